//! Bytes to many sockets at once.

use miniinfer_core::send;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// Sends each socket its bytes, as far as it takes them at once; how many each has taken.
///
/// The sockets are given by their descriptors. Other threads run meanwhile, once for all of them.
#[pyfunction]
#[expect(
    clippy::needless_pass_by_value,
    reason = "arguments from Python are owned"
)]
pub fn send_each(py: Python<'_>, batch: Vec<(i32, PyBackedBytes)>) -> Vec<usize> {
    py.detach(|| {
        let batch = batch.iter();
        send::send_each(batch.map(|(socket, bytes)| (*socket, bytes.as_ref())))
    })
}
