//! The engine as Python drives it.

use miniinfer_core::EngineConfig;
use miniinfer_core::frontend;
use miniinfer_core::runtime::{Runtime, RuntimeSpec};
use miniinfer_core::stall::StallPolicy;
use miniinfer_core::text::TextModel;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::delta::Deltas;
use crate::driver::{Driver, seconds};
use crate::error;
use crate::grammar::{self, CompiledGrammar};
use crate::lane::Lane;
use crate::limits::Lookup;
use crate::params::SubmitParams;
use crate::stats;

/// Scheduler, KV blocks, prefix cache, text pipeline and output channels of one model.
#[pyclass(frozen, extends = Driver, module = "miniinfer._core")]
pub struct Engine {
    runtime: Runtime,
}

/// A submitted request. Dropping it cancels what has not ended.
#[pyclass(frozen, module = "miniinfer._core")]
pub struct Submission(pub frontend::Submission);

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        *, tokenizer_json, vocab_size, eos_token_ids, block_size, num_blocks, max_num_seqs,
        max_num_batched_tokens, max_model_len, enable_prefix_caching=true, target_itl_ms=None,
        max_draft_tokens=0, ngram_lookup=None, max_logprobs=20, text_thread=true, max_backlog=1024, stall_limit=60.0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn new(
        py: Python<'_>,
        tokenizer_json: &[u8],
        vocab_size: u32,
        eos_token_ids: Vec<u32>,
        block_size: u32,
        num_blocks: u32,
        max_num_seqs: u32,
        max_num_batched_tokens: u32,
        max_model_len: u32,
        enable_prefix_caching: bool,
        target_itl_ms: Option<f64>,
        max_draft_tokens: u32,
        ngram_lookup: Option<Lookup>,
        max_logprobs: u32,
        text_thread: bool,
        max_backlog: usize,
        stall_limit: f64,
    ) -> PyResult<PyClassInitializer<Self>> {
        let config = EngineConfig {
            block_size,
            num_blocks,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            max_draft_tokens,
            ngram_lookup: ngram_lookup.map(Lookup::config),
            max_logprobs,
            enable_prefix_caching,
            target_itl_ms,
            ..EngineConfig::default()
        };
        config.validate().map_err(|error| error::config(&error))?;
        let stall_limit = seconds("stall_limit", stall_limit)?;
        let runtime = py.detach(|| {
            let model = TextModel::from_json(tokenizer_json)
                .map_err(|error| PyValueError::new_err(error.to_string()))?;
            let spec = RuntimeSpec {
                config: config.clone(),
                eos: eos_token_ids,
                vocab_size,
                model,
                text_thread,
                policy: StallPolicy {
                    max_backlog,
                    stall_limit,
                },
            };
            Runtime::new(spec).map_err(|error| error::runtime(&error))
        })?;
        let driver = Driver::new(runtime.driver().clone(), config, vocab_size);
        Ok(PyClassInitializer::from(driver).add_subclass(Self { runtime }))
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
        py.detach(|| self.runtime.frontend().compile_grammar(&spec))
            .map(CompiledGrammar)
            .map_err(|error| error::submit(py, &error))
    }

    /// Whether requests are alive.
    fn has_requests(&self) -> bool {
        self.runtime.has_requests()
    }

    /// Submits a prompt. `params` are those of a `SamplingParams` and the request's own, by name.
    fn submit(
        &self,
        py: Python<'_>,
        prompt: Vec<u32>,
        params: SubmitParams,
    ) -> PyResult<Submission> {
        let request = params.into_request(prompt);
        let submission =
            request.and_then(|(request, spec)| self.runtime.frontend().submit(request, spec));
        submission
            .map(Submission)
            .map_err(|error| error::submit(py, &error))
    }

    /// All that is ready: pairs of a choice's id and its delta.
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let mut deltas = Deltas::new(py);
        self.runtime.drain(|id, delta| deltas.add(id, delta));
        deltas.into_list()
    }

    /// The descriptor that is readable when there is something to drain.
    fn wake_fd(&self) -> i32 {
        self.runtime.wake().fd()
    }

    /// Makes the descriptor unreadable; drain after it.
    fn clear_wake(&self) {
        self.runtime.wake().clear();
    }

    /// Sleeps until there is something to drain. False if the time, in seconds, ran out.
    #[pyo3(signature = (timeout=None))]
    fn wait_output(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = timeout.map(|t| seconds("timeout", t)).transpose()?;
        py.detach(|| self.runtime.wake().wait(timeout))
            .map_err(|error| PyOSError::new_err(error.to_string()))
    }

    /// Forgets cached prefixes before the next step.
    fn reset_prefix_cache(&self) {
        self.runtime.reset_prefix_cache();
    }

    /// Counters and gauges by name; histograms are (bounds, counts, sum), times in seconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.runtime.driver().stats();
        stats::as_dict(py, &stats, self.runtime.stall_counters())
    }
}

#[pymethods]
impl Submission {
    /// Id of the first choice and the number of choices.
    fn ids(&self) -> (u64, u32) {
        self.0.ids()
    }

    /// The way past the event loop; None for several choices.
    fn lane(&self) -> Option<Lane> {
        self.0.lane().cloned().map(Lane)
    }

    /// Ends the request; its reader gets what was generated and the reason "abort".
    fn cancel(&self) {
        self.0.cancel();
    }

    /// Ends the request and wants to hear nothing more of it.
    fn close(&self) {
        self.0.close();
    }

    /// Leaves deltas where they are until `resume`: the reader is busy.
    fn hold(&self) {
        self.0.hold();
    }

    /// Ends a `hold`.
    fn resume(&self) {
        self.0.resume();
    }
}
