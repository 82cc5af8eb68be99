//! A stream's own way to its socket, as the event loop opens and closes it.

use std::sync::Arc;

use miniinfer_core::event::EventFrame;
use miniinfer_core::lane::{self, LaneText, Route};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Writes what is text alone past the event loop, while it is open.
#[pyclass(frozen, module = "miniinfer._core")]
pub struct Lane(pub Arc<lane::Lane>);

#[pymethods]
impl Lane {
    /// Has a stream's texts written to a socket, each with `before` and `after` around it as JSON.
    ///
    /// The socket is given by its descriptor, and stays open until `close`. `text` is which text: whole, content or
    /// reasoning. `told` is the `num_output_tokens` of the last delta that was read and written.
    fn open(
        &self,
        socket: i32,
        before: Vec<u8>,
        after: Vec<u8>,
        chunked: bool,
        text: &str,
        told: u32,
    ) -> PyResult<()> {
        let text = match text {
            "whole" => LaneText::Whole,
            "content" => LaneText::Content,
            "reasoning" => LaneText::Reasoning,
            other => {
                return Err(PyValueError::new_err(format!(
                    "text must be whole, content or reasoning, got {other:?}"
                )));
            }
        };
        let frame = EventFrame {
            before,
            after,
            chunked,
        };
        self.0.open(Route {
            socket,
            frame,
            text,
            told,
        });
        Ok(())
    }

    /// Has nothing more written, from now on. Returns what the socket did not take of the last event, to be written
    /// before anything else, and the number of bytes of all events since the last call.
    fn close<'py>(&self, py: Python<'py>) -> (Bound<'py, PyBytes>, usize) {
        let written = self.0.close();
        (PyBytes::new(py, &written.rest), written.bytes)
    }

    /// Tokens of the stream that it wrote or was told of; 0 if it was never open.
    fn num_output_tokens(&self) -> u32 {
        self.0.num_output_tokens()
    }

    /// Seconds since it last wrote; None if it never did.
    fn silence(&self) -> Option<f64> {
        self.0.silence().map(|silence| silence.as_secs_f64())
    }
}
