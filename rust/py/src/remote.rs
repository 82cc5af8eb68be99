//! Requests in and text out for an engine in another process.

use miniinfer_core::stall::StallPolicy;
use miniinfer_core::text::TextModel;
use miniinfer_core::wire::client::{Client, ClientSpec};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::delta::Deltas;
use crate::driver::seconds;
use crate::engine::Submission;
use crate::error;
use crate::grammar::{self, CompiledGrammar};
use crate::limits::Limits;
use crate::params::SubmitParams;
use crate::stats;

/// Text pipeline and output channels of an engine elsewhere. It has no threads.
#[pyclass(frozen, module = "miniinfer._core")]
pub struct RemoteFrontend(Client);

#[pymethods]
impl RemoteFrontend {
    #[new]
    #[pyo3(signature = (
        *, tokenizer_json, limits, eos_token_ids, client, max_backlog=1024, stall_limit=60.0
    ))]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn new(
        py: Python<'_>,
        tokenizer_json: &[u8],
        limits: Limits,
        eos_token_ids: Vec<u32>,
        client: u16,
        max_backlog: usize,
        stall_limit: f64,
    ) -> PyResult<Self> {
        let stall_limit = seconds("stall_limit", stall_limit)?;
        py.detach(|| {
            let model = TextModel::from_json(tokenizer_json)
                .map_err(|error| PyValueError::new_err(error.to_string()))?;
            let spec = ClientSpec {
                config: limits.config(),
                vocab_size: limits.vocab_size,
                model,
                eos: eos_token_ids,
                client,
                policy: StallPolicy {
                    max_backlog,
                    stall_limit,
                },
            };
            let client = Client::new(spec).map_err(|error| error::runtime(&error))?;
            Ok(Self(client))
        })
    }

    /// Makes a grammar ready for `submit`. From any thread, but not one that others wait for.
    #[pyo3(signature = (kind, texts, *, compact=false, whitespace_pattern=None))]
    fn compile_grammar(
        &self,
        py: Python<'_>,
        kind: &str,
        texts: Vec<String>,
        compact: bool,
        whitespace_pattern: Option<String>,
    ) -> PyResult<CompiledGrammar> {
        let spec = grammar::spec(kind, texts, compact, whitespace_pattern)?;
        py.detach(|| self.0.frontend().compile_grammar(&spec))
            .map(CompiledGrammar)
            .map_err(|error| error::submit(py, &error))
    }

    /// Submits a prompt, as `Engine.submit`.
    fn submit(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        params: SubmitParams,
    ) -> PyResult<Submission> {
        let request = params.into_request(prompt);
        let submission =
            request.and_then(|(request, spec)| self.0.frontend().submit(request, spec));
        submission
            .map(Submission)
            .map_err(|error| error::submit(py, &error))
    }

    /// Takes in a frame of the engine's; `ValueError` if it is none.
    fn feed(&self, frame: &[u8]) -> PyResult<()> {
        let fed = self.0.feed(frame);
        fed.map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Makes text of what was fed. Returns the seconds after which it must be called again whatever comes.
    fn turn(&self, py: Python<'_>) -> Option<f64> {
        py.detach(|| self.0.turn())
            .map(|patience| patience.as_secs_f64())
    }

    /// Messages to send to the engine: pairs of a type and what it says.
    fn take_messages<'py>(&self, py: Python<'py>) -> Vec<(u8, Bound<'py, PyBytes>)> {
        let messages = self.0.take_messages().into_iter();
        messages
            .map(|(kind, bytes)| (kind, PyBytes::new(py, &bytes)))
            .collect()
    }

    /// All that is ready: pairs of a choice's id and its delta.
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let mut deltas = Deltas::new(py);
        self.0.drain(|id, delta| deltas.add(id, delta));
        deltas.into_list()
    }

    /// The descriptor that is readable when there is something to drain or to send.
    fn wake_fd(&self) -> i32 {
        self.0.wake().fd()
    }

    /// Makes the descriptor unreadable; drain and send after it.
    fn clear_wake(&self) {
        self.0.wake().clear();
    }

    /// Has the engine forget cached prefixes before its next step.
    fn reset_prefix_cache(&self) {
        self.0.reset_prefix_cache();
    }

    /// The engine is lost: ends every stream with an error and refuses requests.
    fn fail(&self, reason: &str) {
        self.0.fail(reason);
    }

    /// Another engine with the same limits is there.
    fn reopen(&self) {
        self.0.reopen();
    }

    /// The engine's counters as it last sent them, as `Engine.stats`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats::as_dict(py, &self.0.stats(), self.0.stall_counters())
    }
}
