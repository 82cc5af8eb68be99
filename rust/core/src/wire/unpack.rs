//! Reads `MessagePack` that may be anything: every length is checked against what is there before it is believed.

use super::error::WireError;
use super::pack::Word;

/// Reads one value after the other.
pub struct Unpacker<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Unpacker<'a> {
    /// A reader at the start of a message.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Checks that the message ends here.
    pub fn end(self) -> Result<(), WireError> {
        if self.at == self.bytes.len() {
            return Ok(());
        }
        Err(WireError::Trailing {
            at: self.at,
            len: self.bytes.len(),
        })
    }

    /// True, and past it, if nothing stands here.
    pub fn nil(&mut self) -> bool {
        let nil = self.bytes.get(self.at) == Some(&0xc0);
        self.at += usize::from(nil);
        nil
    }

    /// A truth value.
    pub fn bool(&mut self) -> Result<bool, WireError> {
        match self.kind("a truth value")? {
            0xc2 => Ok(false),
            0xc3 => Ok(true),
            got => Err(self.wrong("a truth value", got)),
        }
    }

    /// A number that is not negative, in any of its forms.
    #[inline]
    pub fn uint(&mut self) -> Result<u64, WireError> {
        match self.kind("a number")? {
            small @ 0..0x80 => Ok(small.into()),
            0xcc => Ok(u8::from_be_bytes(self.take()?).into()),
            0xcd => Ok(u16::from_be_bytes(self.take()?).into()),
            0xce => Ok(u32::from_be_bytes(self.take()?).into()),
            0xcf => Ok(u64::from_be_bytes(self.take()?)),
            got => Err(self.wrong("a number that is not negative", got)),
        }
    }

    /// A number of at most 32 bits.
    #[inline]
    pub fn u32(&mut self, name: &'static str) -> Result<u32, WireError> {
        let value = self.uint()?;
        u32::try_from(value).map_err(|_| WireError::Range {
            name,
            limit: "at most 4294967295",
            value,
        })
    }

    /// A number of 32 bits that may be negative.
    pub fn i32(&mut self, name: &'static str) -> Result<i32, WireError> {
        let value = if self.bytes.get(self.at) == Some(&0xd3) {
            self.at += 1;
            i64::from_be_bytes(self.take()?)
        } else {
            i64::from(self.u32(name)?)
        };
        i32::try_from(value).map_err(|_| WireError::Range {
            name,
            limit: "a number of 32 bits",
            value: value as u64,
        })
    }

    /// A number of at most 32 bits, or nothing.
    pub fn option(&mut self, name: &'static str) -> Result<Option<u32>, WireError> {
        if self.nil() {
            return Ok(None);
        }
        self.u32(name).map(Some)
    }

    /// A number of single precision.
    pub fn f32(&mut self) -> Result<f32, WireError> {
        match self.kind("a number")? {
            0xca => Ok(f32::from_be_bytes(self.take()?)),
            got => Err(self.wrong("a number of single precision", got)),
        }
    }

    /// A number of double precision.
    pub fn f64(&mut self) -> Result<f64, WireError> {
        match self.kind("a number")? {
            0xcb => Ok(f64::from_be_bytes(self.take()?)),
            got => Err(self.wrong("a number of double precision", got)),
        }
    }

    /// A text.
    pub fn str(&mut self) -> Result<&'a str, WireError> {
        let len = match self.kind("a text")? {
            short @ 0xa0..0xc0 => usize::from(short & 0x1f),
            0xd9 => u8::from_be_bytes(self.take()?).into(),
            0xda => u16::from_be_bytes(self.take()?).into(),
            0xdb => u32::from_be_bytes(self.take()?) as usize,
            got => return Err(self.wrong("a text", got)),
        };
        let at = self.at;
        std::str::from_utf8(self.slice(len, "a text")?).map_err(|_| WireError::Utf8 { at })
    }

    /// The length of a list whose values follow, each of `width` values that take at least a byte: a list longer
    /// than the rest of the message is none.
    pub fn array(&mut self, width: usize) -> Result<usize, WireError> {
        let len = match self.kind("a list")? {
            short @ 0x90..0xa0 => usize::from(short & 0xf),
            0xdc => u16::from_be_bytes(self.take()?).into(),
            0xdd => u32::from_be_bytes(self.take()?) as usize,
            got => return Err(self.wrong("a list", got)),
        };
        if len > (self.bytes.len() - self.at) / width {
            return Err(self.truncated("a list"));
        }
        Ok(len)
    }

    /// The head of a list that must have this many values.
    pub fn fields(&mut self, name: &'static str, wanted: usize) -> Result<(), WireError> {
        let len = self.array(1)?;
        if len == wanted {
            return Ok(());
        }
        Err(WireError::Range {
            name,
            limit: "a list of as many values as this version knows",
            value: len as u64,
        })
    }

    /// Numbers that were written as a column.
    pub fn column<T: Word>(
        &mut self,
        name: &'static str,
        into: &mut Vec<T>,
    ) -> Result<(), WireError> {
        let len = match self.kind("bytes")? {
            0xc4 => u8::from_be_bytes(self.take()?).into(),
            0xc5 => u16::from_be_bytes(self.take()?).into(),
            0xc6 => u32::from_be_bytes(self.take()?) as usize,
            got => return Err(self.wrong("bytes", got)),
        };
        let (words, rest) = self.slice(len, "bytes")?.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(WireError::Range {
                name,
                limit: "a multiple of 4 bytes",
                value: len as u64,
            });
        }
        into.extend(words.iter().map(|word| T::from_bytes(*word)));
        Ok(())
    }

    fn slice(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], WireError> {
        let slice = self.bytes[self.at..].get(..len);
        let slice = slice.ok_or_else(|| self.truncated(what))?;
        self.at += len;
        Ok(slice)
    }

    #[inline]
    fn kind(&mut self, what: &'static str) -> Result<u8, WireError> {
        let kind = self.bytes.get(self.at).copied();
        let kind = kind.ok_or_else(|| self.truncated(what))?;
        self.at += 1;
        Ok(kind)
    }

    #[inline]
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let bytes = self.bytes[self.at..].first_chunk();
        let bytes = *bytes.ok_or_else(|| self.truncated("a number"))?;
        self.at += N;
        Ok(bytes)
    }

    fn wrong(&self, wanted: &'static str, got: u8) -> WireError {
        let at = self.at - 1;
        WireError::Type { wanted, got, at }
    }

    fn truncated(&self, what: &'static str) -> WireError {
        let at = self.bytes.len();
        WireError::Truncated { what, at }
    }
}
