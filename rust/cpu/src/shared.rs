//! Memory that tasks write apart from each other.
#![expect(
    unsafe_code,
    reason = "the borrow checker cannot see that the parts are apart"
)]

use std::marker::PhantomData;

/// A mutable slice that several tasks write, each its own part.
pub struct SharedMut<'a, T> {
    start: *mut T,
    length: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are handed out one by one, as mutable borrows of a slice that could be split would be.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// The slice, shared.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            length: slice.len(),
            _borrow: PhantomData,
        }
    }

    /// The part of a task. Crate-private callers give each task parts of its own.
    #[expect(
        clippy::mut_from_ref,
        reason = "tasks share it, and write parts that are apart"
    )]
    pub(crate) fn part(&self, start: usize, length: usize) -> &mut [T] {
        assert!(start <= self.length && length <= self.length - start);
        // SAFETY: within the slice, and no other task has this part.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), length) }
    }
}
