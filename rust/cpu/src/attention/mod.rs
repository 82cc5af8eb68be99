//! Attention over the paged cache.
pub mod element;
