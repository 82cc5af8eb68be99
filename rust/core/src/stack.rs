//! A lock-free stack of owned nodes that many threads push and one takes whole, oldest first.
//!
//! The links live in the nodes, so a push allocates nothing. Nodes are only ever taken all at once, which rules out
//! the ABA problem. Closing the stack turns later pushes away, each with its node handed back.
#![expect(
    unsafe_code,
    reason = "the links are raw pointers that own their nodes"
)]

use std::marker::PhantomData;
use std::ptr;

use crate::sync::{Arc, AtomicPtr, Ordering};

/// A node with room for the stack's link.
///
/// # Safety
/// `link` must return the same field at each call, and nothing but the stack may write it.
pub(crate) unsafe trait Linked: Sized {
    fn link(&self) -> &AtomicPtr<Self>;
}

/// An owning pointer to a node.
///
/// # Safety
/// `from_raw` must be the inverse of `into_raw`, and the node must stay at its address in between.
pub(crate) unsafe trait Owner {
    type Node: Linked;

    fn into_raw(self) -> *mut Self::Node;

    /// # Safety
    /// The pointer comes from `into_raw` and is used here once.
    unsafe fn from_raw(raw: *mut Self::Node) -> Self;
}

// SAFETY: `Box::from_raw` undoes `Box::into_raw`, and a box never moves its contents.
unsafe impl<N: Linked> Owner for Box<N> {
    type Node = N;

    #[inline]
    fn into_raw(self) -> *mut N {
        Self::into_raw(self)
    }

    #[inline]
    unsafe fn from_raw(raw: *mut N) -> Self {
        // SAFETY: the caller passes a pointer of `into_raw`, once.
        unsafe { Self::from_raw(raw) }
    }
}

// SAFETY: `Arc::from_raw` undoes `Arc::into_raw`, and an `Arc` never moves its contents.
unsafe impl<N: Linked> Owner for Arc<N> {
    type Node = N;

    #[inline]
    fn into_raw(self) -> *mut N {
        Self::into_raw(self).cast_mut()
    }

    #[inline]
    unsafe fn from_raw(raw: *mut N) -> Self {
        // SAFETY: the caller passes a pointer of `into_raw`, once.
        unsafe { Self::from_raw(raw.cast_const()) }
    }
}

/// The stack. `push` from any thread; `take` and `close` are for one owner.
pub(crate) struct Stack<P: Owner> {
    head: AtomicPtr<P::Node>,
    owns: PhantomData<P>,
}

// SAFETY: the stack moves its nodes between threads and gives no access to them while it holds them.
unsafe impl<P: Owner + Send> Send for Stack<P> {}
// SAFETY: as above; sharing the stack only lets threads move nodes through it.
unsafe impl<P: Owner + Send> Sync for Stack<P> {}

/// The head of a closed stack: an address at which no node lives.
#[inline]
fn closed<N>() -> *mut N {
    ptr::without_provenance_mut(usize::MAX)
}

impl<P: Owner> Stack<P> {
    pub(crate) fn new() -> Self {
        Self {
            head: AtomicPtr::new(ptr::null_mut()),
            owns: PhantomData,
        }
    }

    /// Adds a node; hands it back when the stack is closed.
    ///
    /// # Safety
    /// The node must not be in a stack now.
    #[inline]
    pub(crate) unsafe fn push(&self, node: P) -> Result<(), P> {
        let raw = node.into_raw();
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            if head == closed() {
                // SAFETY: `raw` was made above and did not enter the stack.
                return Err(unsafe { P::from_raw(raw) });
            }
            // SAFETY: `raw` points to a live node that this call owns until the exchange below succeeds.
            unsafe { &*raw }.link().store(head, Ordering::Relaxed);
            // Release: whoever takes the node sees the node and all that was written before it.
            match self
                .head
                .compare_exchange_weak(head, raw, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return Ok(()),
                Err(now) => head = now,
            }
        }
    }

    /// True when a `take` now would find nothing.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        let head = self.head.load(Ordering::Acquire);
        head.is_null() || head == closed()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.head.load(Ordering::Acquire) == closed()
    }

    /// Takes all nodes, oldest first. A closed stack has none.
    #[inline]
    pub(crate) fn take(&self) -> Taken<P> {
        if self.is_empty() {
            return Taken {
                next: ptr::null_mut(),
            };
        }
        // Only the owner closes or takes, so the head is a node now and stays one until this swap.
        Taken::oldest_first(self.head.swap(ptr::null_mut(), Ordering::Acquire))
    }

    /// Takes all nodes and refuses those to come.
    pub(crate) fn close(&self) -> Taken<P> {
        let head = self.head.swap(closed(), Ordering::AcqRel);
        if head == closed() {
            return Taken {
                next: ptr::null_mut(),
            };
        }
        Taken::oldest_first(head)
    }
}

impl<P: Owner> Drop for Stack<P> {
    fn drop(&mut self) {
        drop(self.close());
    }
}

/// The nodes of one `take`, which this owns until they are handed out.
pub(crate) struct Taken<P: Owner> {
    next: *mut P::Node,
}

// SAFETY: this owns its nodes as a list of `P` would.
unsafe impl<P: Owner + Send> Send for Taken<P> {}

impl<P: Owner> Taken<P> {
    /// Turns the links round: the stack gives the newest first.
    fn oldest_first(mut newest: *mut P::Node) -> Self {
        let mut next = ptr::null_mut();
        while !newest.is_null() {
            // SAFETY: the chain was taken whole, so its nodes are live and only this call follows their links.
            let link = unsafe { &*newest }.link();
            let older = link.load(Ordering::Relaxed);
            link.store(next, Ordering::Relaxed);
            next = newest;
            newest = older;
        }
        Self { next }
    }
}

impl<P: Owner> Iterator for Taken<P> {
    type Item = P;

    /// The link is read before the node is handed out, so its new owner may push it again at once.
    #[inline]
    fn next(&mut self) -> Option<P> {
        let raw = self.next;
        if raw.is_null() {
            return None;
        }
        // SAFETY: `raw` is the live head of the chain this owns.
        self.next = unsafe { &*raw }.link().load(Ordering::Relaxed);
        // SAFETY: `raw` came from `into_raw` in `push` and has just left the chain.
        Some(unsafe { P::from_raw(raw) })
    }
}

impl<P: Owner> Drop for Taken<P> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}
