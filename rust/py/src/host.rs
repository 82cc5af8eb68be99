//! An engine that other processes speak to.

use miniinfer_core::text::TextModel;
use miniinfer_core::wire::host::Host;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::driver::Driver;
use crate::error;
use crate::limits::Limits;

/// Scheduler, KV blocks and prefix cache of one model; its clients are elsewhere.
#[pyclass(frozen, extends = Driver, module = "miniinfer._core")]
pub struct EngineHost(Host);

#[pymethods]
impl EngineHost {
    #[new]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn new(
        py: Python<'_>,
        tokenizer_json: &[u8],
        limits: Limits,
        eos_token_ids: Vec<u32>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let config = limits.config();
        let vocab_size = limits.vocab_size;
        let host = py.detach(|| {
            let model = TextModel::from_json(tokenizer_json)
                .map_err(|error| PyValueError::new_err(error.to_string()))?;
            Host::new(config.clone(), eos_token_ids, vocab_size, model)
                .map_err(|error| error::config(&error))
        })?;
        let driver = Driver::new(host.driver().clone(), config, vocab_size);
        Ok(PyClassInitializer::from(driver).add_subclass(Self(host)))
    }

    /// A client is there; its number is its own for good.
    fn connect(&self, client: u16) {
        self.0.connect(client);
    }

    /// A client is gone: its requests end.
    fn disconnect(&self, client: u16) {
        self.0.disconnect(client);
    }

    /// Takes in a message of a client's; `ValueError` if it is none.
    fn feed(&self, py: Python<'_>, client: u16, kind: u8, message: &[u8]) -> PyResult<()> {
        // A request may bring a grammar to compile.
        let fed = py.detach(|| self.0.feed(client, kind, message));
        fed.map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Frames to send, each with the client it is for. `idle`: the last plan found nothing to do.
    fn take_frames<'py>(&self, py: Python<'py>, idle: bool) -> Vec<(u16, Bound<'py, PyBytes>)> {
        let frames = self.0.take_frames(idle).into_iter();
        frames
            .map(|(client, bytes)| (client, PyBytes::new(py, &bytes)))
            .collect()
    }
}
