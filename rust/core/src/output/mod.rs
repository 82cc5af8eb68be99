//! What carries results from the text thread to the reader.
//!
//! * [`mod@ring`]: a bounded queue between two threads whose slots keep their memory.
//! * [`wake`]: one file descriptor that an event loop watches.
//! * [`stream`]: one request's way out: a ring, and a tail when the reader is slow.
//! * [`mod@hub`]: where the streams of one engine meet their reader.

mod descriptor;
pub mod hub;
#[cfg(all(test, loom))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod loom_tests;
#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod model_tests;
pub mod ring;
pub mod stream;
#[cfg(test)]
mod test_delta;
#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
pub mod wake;

pub use hub::{HubConsumer, HubOpener, HubProducer, hub};
pub use stream::{Delta, StreamGuard, StreamProducer};
pub use wake::Wake;
