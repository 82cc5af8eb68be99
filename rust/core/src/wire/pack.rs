//! Writes `MessagePack`, each value in its shortest form.

/// Appends values to a buffer.
pub struct Packer<'a>(pub &'a mut Vec<u8>);

impl Packer<'_> {
    /// Nothing.
    pub fn nil(&mut self) {
        self.0.push(0xc0);
    }

    /// A truth value.
    pub fn bool(&mut self, value: bool) {
        self.0.push(0xc2 + u8::from(value));
    }

    /// A number that is not negative.
    #[inline]
    pub fn uint(&mut self, value: u64) {
        match value {
            0..0x80 => self.0.push(value as u8),
            0x80..0x100 => self.0.extend_from_slice(&[0xcc, value as u8]),
            0x100..0x1_0000 => self.head(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..0x1_0000_0000 => self.head(0xce, &(value as u32).to_be_bytes()),
            _ => self.head(0xcf, &value.to_be_bytes()),
        }
    }

    /// A number that may be negative.
    pub fn int(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(value) => self.uint(value),
            Err(_) => self.head(0xd3, &value.to_be_bytes()),
        }
    }

    /// A number, or nothing.
    pub fn option(&mut self, value: Option<u32>) {
        match value {
            Some(value) => self.uint(value.into()),
            None => self.nil(),
        }
    }

    /// A number of single precision.
    pub fn f32(&mut self, value: f32) {
        self.head(0xca, &value.to_be_bytes());
    }

    /// A number of double precision.
    pub fn f64(&mut self, value: f64) {
        self.head(0xcb, &value.to_be_bytes());
    }

    /// A text.
    pub fn str(&mut self, text: &str) {
        let len = text.len();
        match len {
            0..0x20 => self.0.push(0xa0 | len as u8),
            0x20..0x1_0000 => self.head(0xda, &(len as u16).to_be_bytes()),
            _ => self.head(0xdb, &(len as u32).to_be_bytes()),
        }
        self.0.extend_from_slice(text.as_bytes());
    }

    /// The head of a list of `len` values, which follow.
    pub fn array(&mut self, len: usize) {
        match len {
            0..0x10 => self.0.push(0x90 | len as u8),
            0x10..0x1_0000 => self.head(0xdc, &(len as u16).to_be_bytes()),
            _ => self.head(0xdd, &(len as u32).to_be_bytes()),
        }
    }

    /// Numbers as one piece of bytes, four each, the lowest first: a column of a table.
    pub fn column<'v, T: Word + 'v>(&mut self, values: impl ExactSizeIterator<Item = &'v T>) {
        let len = values.len() * 4;
        match len {
            0..0x100 => self.head(0xc4, &[len as u8]),
            0x100..0x1_0000 => self.head(0xc5, &(len as u16).to_be_bytes()),
            _ => self.head(0xc6, &(len as u32).to_be_bytes()),
        }
        self.0.reserve(len);
        for value in values {
            self.0.extend_from_slice(&value.to_bytes());
        }
    }

    #[inline]
    fn head(&mut self, kind: u8, bytes: &[u8]) {
        self.0.push(kind);
        self.0.extend_from_slice(bytes);
    }
}

/// A number of four bytes, as columns hold.
pub trait Word: Copy {
    /// Its bytes, the lowest first.
    fn to_bytes(self) -> [u8; 4];
    /// The number of these bytes.
    fn from_bytes(bytes: [u8; 4]) -> Self;
}

impl Word for u32 {
    fn to_bytes(self) -> [u8; 4] {
        self.to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 4]) -> Self {
        Self::from_le_bytes(bytes)
    }
}

impl Word for f32 {
    fn to_bytes(self) -> [u8; 4] {
        self.to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 4]) -> Self {
        Self::from_le_bytes(bytes)
    }
}
