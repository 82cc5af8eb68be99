//! Element.
pub trait Element {}
