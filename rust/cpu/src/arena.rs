//! Memory for weights, in pages as large as the system has.
//!
//! A step reads all weights once, far more than caches and the processor's table of pages hold, and
//! prefetchers stop where a page ends: from pages of 2 MiB one core reads half as fast again as from
//! pages of 4 KiB. Matrices are smaller than such a page, so they share chunks.
#![expect(
    unsafe_code,
    reason = "matrices borrow parts of a chunk that are apart"
)]

use crate::error::PackError;
use crate::layout::ALIGNMENT;
use memmap2::MmapMut;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A large page of most systems.
const PAGE: usize = 2 << 20;

/// The least that is asked of the system. What is not used of it takes no memory.
const CHUNK: usize = 16 * PAGE;

/// Where weights get their memory.
static WEIGHTS: Arena = Arena::new();

/// Bytes of weights at an address that is a multiple of 64, zero at first: a part of a chunk, which is
/// given back with the last of its parts.
pub struct WeightBytes {
    chunk: Arc<Chunk>,
    offset: usize,
    length: usize,
}

impl WeightBytes {
    /// That many bytes.
    pub fn new(length: usize) -> Result<Self, PackError> {
        WEIGHTS.take(length)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: within the chunk, whose bytes are initialised, and nobody else's.
        unsafe { std::slice::from_raw_parts(self.chunk.start.add(self.offset), self.length) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.chunk.start.add(self.offset), self.length) }
    }
}

/// Hands out chunks piece by piece.
struct Arena {
    /// The chunk that was begun last, for as long as somebody uses it, and how much of it is taken.
    last: Mutex<(Weak<Chunk>, usize)>,
}

impl Arena {
    const fn new() -> Self {
        Self {
            last: Mutex::new((Weak::new(), 0)),
        }
    }

    fn take(&self, length: usize) -> Result<WeightBytes, PackError> {
        let refused = |reason: String| PackError::Memory {
            bytes: length,
            reason,
        };
        let size = length
            .checked_next_multiple_of(ALIGNMENT)
            .ok_or_else(|| refused("that is more than there are addresses".into()))?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (chunk, offset) = match last.0.upgrade() {
            Some(chunk) if size <= chunk.length - last.1 => (chunk, last.1),
            _ => {
                let chunk = Chunk::new(size).map_err(|error| refused(error.to_string()))?;
                (Arc::new(chunk), 0)
            }
        };
        *last = (Arc::downgrade(&chunk), offset + size);
        Ok(WeightBytes {
            chunk,
            offset,
            length,
        })
    }
}

/// Memory of the system's, zero at first, from the beginning of a large page on.
struct Chunk {
    start: *mut u8,
    length: usize,
    _map: MmapMut,
}

// SAFETY: it is memory, of which each part has one owner.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(least: usize) -> std::io::Result<Self> {
        let length = least.max(CHUNK);
        let mut map = MmapMut::map_anon(length.saturating_add(PAGE))?;
        // Where the system has no large pages, or not for us, small ones do.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let start = map.as_mut_ptr();
        let skipped = start.align_offset(PAGE);
        debug_assert!(skipped < PAGE);
        Ok(Self {
            start: start.wrapping_add(skipped),
            length,
            _map: map,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_zero_and_apart() {
        let arena = Arena::new();
        let sizes = [1, 64, 65, 0, 4097, CHUNK - 4096, CHUNK, CHUNK + 1, 100];
        let mut pieces: Vec<_> = sizes
            .iter()
            .map(|size| arena.take(*size).expect("there is memory"))
            .collect();
        for (number, piece) in (1_u8..).zip(&mut pieces) {
            assert_eq!(piece.len(), sizes[usize::from(number) - 1]);
            assert_eq!(piece.as_slice().as_ptr() as usize % ALIGNMENT, 0);
            assert!(piece.as_slice().iter().all(|byte| *byte == 0));
            piece.as_mut_slice().fill(number);
        }
        for (number, piece) in (1_u8..).zip(&pieces) {
            assert!(piece.as_slice().iter().all(|byte| *byte == number));
        }
    }

    #[test]
    fn a_chunk_ends_with_the_last_piece_in_it() {
        let arena = Arena::new();
        let first = arena.take(100).expect("there is memory");
        let second = arena.take(100).expect("there is memory");
        let chunk = Arc::downgrade(&first.chunk);
        drop(first);
        assert_eq!(chunk.strong_count(), 1);
        drop(second);
        assert_eq!(chunk.strong_count(), 0);
        // And one that is gone is not handed out again.
        let third = arena.take(100).expect("there is memory");
        assert_eq!(third.as_slice(), [0; 100]);
    }

    #[test]
    fn what_the_system_refuses_is_said() {
        for size in [usize::MAX, isize::MAX as usize] {
            let error = WeightBytes::new(size).err().expect("nobody has as much");
            assert!(matches!(error, PackError::Memory { bytes, .. } if bytes == size));
        }
    }
}
