//! Benchmarks of the scheduler.
fn main() {}
