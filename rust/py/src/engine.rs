//! The engine as Python drives it.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use miniinfer_core::EngineConfig;
use miniinfer_core::arrays::array_lengths;
use miniinfer_core::error::StepError;
use miniinfer_core::frontend;
use miniinfer_core::pipeline::StallPolicy;
use miniinfer_core::prompt_logprobs::PromptRows;
use miniinfer_core::runtime::{Runtime, RuntimeSpec};
use miniinfer_core::stats::{Histogram, STEP_TOKEN_BUCKETS, StepTokens, TIME_BUCKETS};
use miniinfer_core::text::TextModel;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::arrays::{SlotArrays, TYPES, cells};
use crate::delta::Delta;
use crate::error;
use crate::grammar::{self, CompiledGrammar};
use crate::params::SubmitParams;

/// Scheduler, KV blocks, prefix cache, text pipeline and output channels of one model.
#[pyclass(frozen, module = "miniinfer._core")]
pub struct Engine {
    runtime: Runtime,
    config: EngineConfig,
    slots: Mutex<[Option<SlotArrays>; 2]>,
}

/// A submitted request. Dropping it cancels what has not ended.
#[pyclass(frozen, module = "miniinfer._core")]
pub struct Submission(frontend::Submission);

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        *, tokenizer_json, vocab_size, eos_token_ids, block_size, num_blocks, max_num_seqs,
        max_num_batched_tokens, max_model_len, enable_prefix_caching=true, target_itl_ms=None,
        max_draft_tokens=0, max_logprobs=20, text_thread=true, max_backlog=1024, stall_limit=60.0
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
        max_logprobs: u32,
        text_thread: bool,
        max_backlog: usize,
        stall_limit: f64,
    ) -> PyResult<Self> {
        let config = EngineConfig {
            block_size,
            num_blocks,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            max_draft_tokens,
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
        Ok(Self {
            runtime,
            config,
            slots: Mutex::default(),
        })
    }

    /// Name, numpy dtype and number of items of each array that `register_slot` needs.
    fn array_specs(&self) -> Vec<(&'static str, &'static str, usize)> {
        let lengths = array_lengths(&self.config);
        lengths
            .into_iter()
            .zip(TYPES)
            .map(|((name, len), (_, dtype))| (name, *dtype, len))
            .collect()
    }

    /// Takes hold of a slot's arrays: writable, contiguous, of the sizes of `array_specs`.
    fn register_slot(&self, slot: usize, arrays: &Bound<'_, PyDict>) -> PyResult<()> {
        let registered = SlotArrays::from_dict(arrays)?;
        registered
            .view(arrays.py())?
            .check(&self.config)
            .map_err(|error| error::step(&error))?;
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let place = slots.get_mut(slot);
        *place.ok_or_else(|| error::step(&StepError::NoSuchSlot { slot }))? = Some(registered);
        Ok(())
    }

    /// Plans a step into a slot's arrays. Returns its number of tokens; with 0 no commit follows.
    fn plan(&self, py: Python<'_>, slot: usize) -> PyResult<u32> {
        self.with_slot(py, slot, |arrays| self.runtime.plan(slot, arrays))
    }

    /// Takes in what was sampled for a planned step.
    fn commit(&self, py: Python<'_>, slot: usize) -> PyResult<()> {
        self.with_slot(py, slot, |arrays| self.runtime.commit(slot, arrays))
    }

    /// Writes a planned step's logit edits; returns how many.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn logit_edits(
        &self,
        py: Python<'_>,
        slot: usize,
        sample: PyBuffer<i32>,
        token: PyBuffer<i32>,
        repetition: PyBuffer<f32>,
        bias: PyBuffer<f32>,
    ) -> PyResult<usize> {
        let sample = cells(py, &sample, "sample")?;
        let token = cells(py, &token, "token")?;
        let repetition = cells(py, &repetition, "repetition")?;
        let bias = cells(py, &bias, "bias")?;
        self.runtime
            .with_engine(|engine| engine.logit_edits(slot, sample, token, repetition, bias))
            .map_err(|error| error::step(&error))
    }

    /// Writes which rows of a planned step's logits its prompts need, and their targets; returns how many.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn prompt_rows(
        &self,
        py: Python<'_>,
        slot: usize,
        index: PyBuffer<i32>,
        target: PyBuffer<i32>,
    ) -> PyResult<usize> {
        let index = cells(py, &index, "index")?;
        let target = cells(py, &target, "target")?;
        self.runtime
            .with_engine(|engine| engine.prompt_rows(slot, index, target))
            .map_err(|error| error::step(&error))
    }

    /// Takes in what the rows of `prompt_rows` say.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn take_prompt_logprobs(
        &self,
        py: Python<'_>,
        slot: usize,
        logprob: PyBuffer<f32>,
        rank: PyBuffer<i32>,
        top_ids: PyBuffer<i32>,
        top_logprobs: PyBuffer<f32>,
    ) -> PyResult<()> {
        let rows = PromptRows {
            logprob: cells(py, &logprob, "logprob")?,
            rank: cells(py, &rank, "rank")?,
            top_ids: cells(py, &top_ids, "top_ids")?,
            top_logprobs: cells(py, &top_logprobs, "top_logprobs")?,
        };
        self.runtime
            .take_prompt_logprobs(slot, &rows)
            .map_err(|error| error::step(&error))
    }

    /// Writes a planned step's masks, waiting for those that are not ready; returns how many.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "arguments from Python are owned"
    )]
    fn fill_masks(
        &self,
        py: Python<'_>,
        slot: usize,
        rows: PyBuffer<i32>,
        bits: PyBuffer<i32>,
    ) -> PyResult<usize> {
        let work = self.runtime.with_engine(|engine| engine.mask_work(slot));
        let work = work.map_err(|error| error::step(&error))?;
        py.detach(|| work.iter().for_each(|cursor| cursor.finish()));
        let rows = cells(py, &rows, "rows")?;
        let bits = cells(py, &bits, "bits")?;
        self.runtime
            .with_engine(|engine| engine.fill_masks(slot, rows, bits))
            .map_err(|error| error::step(&error))
    }

    /// Words of 32 bits in a mask: one bit for each id of the vocabulary.
    fn mask_words(&self) -> usize {
        self.runtime.frontend().mask_words()
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

    /// Ends the requests of a planned step with an error; the others go on.
    fn fail_step(&self, slot: usize, reason: &str) -> PyResult<()> {
        self.runtime
            .fail_step(slot, reason)
            .map_err(|error| error::step(&error))
    }

    /// Ends every request with an error and refuses new ones.
    fn fail(&self, reason: &str) {
        self.runtime.fail(reason);
    }

    /// Sleeps until there is something to plan. False if the time, in seconds, ran out.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = timeout.map(|t| seconds("timeout", t)).transpose()?;
        Ok(py.detach(|| self.runtime.wait(timeout)))
    }

    /// Ends a `wait` at once.
    fn interrupt(&self) {
        self.runtime.interrupt();
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
        let list = PyList::empty(py);
        let mut result = Ok(());
        self.runtime.drain(|id, delta| {
            if result.is_ok() {
                result = Delta::new(py, delta).and_then(|delta| {
                    list.append(PyTuple::new(
                        py,
                        [
                            id.into_pyobject(py)?.into_any(),
                            delta.into_bound(py).into_any(),
                        ],
                    )?)
                });
            }
        });
        result.map(|()| list)
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
        let stats = self.runtime.stats();
        let stall = self.runtime.stall_counters();
        let c = &stats.counters;
        let dict = PyDict::new(py);
        for (name, value) in [
            ("num_requests_running", stats.num_running as u64),
            ("num_requests_waiting", stats.num_waiting as u64),
            ("num_requests_paused", stats.num_paused as u64),
            ("kv_blocks_used", u64::from(stats.blocks_used)),
            ("kv_blocks_cached", u64::from(stats.blocks_cached)),
            ("kv_blocks_total", u64::from(stats.blocks_total)),
            ("prefix_cache_queries", stats.prefix_queries),
            ("prefix_cache_hits", stats.prefix_hits),
            ("prefix_cache_evictions", stats.prefix_evictions),
            ("num_steps", c.steps),
            ("num_requests", c.requests),
            ("num_preemptions", c.preemptions),
            ("prompt_tokens", c.prompt_tokens),
            ("prefill_tokens", c.prefill_tokens),
            ("generation_tokens", c.generation_tokens),
            ("draft_tokens", c.draft_tokens),
            ("accepted_tokens", c.accepted_tokens),
            ("finished_stop", c.finished_stop),
            ("finished_length", c.finished_length),
            ("finished_abort", c.finished_abort),
            ("finished_error", c.finished_error),
            ("corrupted_requests", c.corrupted),
            ("deltas_merged", stall.merged.load(Ordering::Relaxed)),
            ("readers_paused", stall.paused.load(Ordering::Relaxed)),
            ("readers_cancelled", stall.cancelled.load(Ordering::Relaxed)),
        ] {
            dict.set_item(name, value)?;
        }
        for (name, histogram) in [
            ("time_to_first_token_seconds", &c.time_to_first_token),
            ("inter_token_latency_seconds", &c.inter_token_latency),
            ("e2e_request_latency_seconds", &c.e2e_request_latency),
            ("request_queue_time_seconds", &c.request_queue_time),
            ("request_prefill_time_seconds", &c.request_prefill_time),
            ("request_decode_time_seconds", &c.request_decode_time),
            ("request_inference_time_seconds", &c.request_inference_time),
            (
                "request_time_per_output_token_seconds",
                &c.request_time_per_output_token,
            ),
        ] {
            let Histogram { counts, sum } = histogram;
            dict.set_item(name, (TIME_BUCKETS.as_slice(), counts.as_slice(), sum))?;
        }
        let StepTokens { counts, sum } = &c.step_tokens;
        let steps = (STEP_TOKEN_BUCKETS.as_slice(), counts.as_slice(), sum);
        dict.set_item("iteration_tokens_total", steps)?;
        Ok(dict)
    }

    /// Verifies the engine's whole state; raises `RuntimeError` saying what is wrong.
    fn check(&self) -> PyResult<()> {
        self.runtime.check().map_err(PyRuntimeError::new_err)
    }
}

impl Engine {
    fn with_slot<R>(
        &self,
        py: Python<'_>,
        slot: usize,
        call: impl FnOnce(&miniinfer_core::arrays::StepArrays<'_>) -> Result<R, StepError>,
    ) -> PyResult<R> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let arrays = slots
            .get(slot)
            .ok_or_else(|| error::step(&StepError::NoSuchSlot { slot }))?;
        let arrays = arrays.as_ref().ok_or_else(|| {
            PyRuntimeError::new_err(format!("slot {slot} has no arrays registered"))
        })?;
        call(&arrays.view(py)?).map_err(|error| error::step(&error))
    }
}

#[pymethods]
impl Submission {
    /// Id of the first choice and the number of choices.
    fn ids(&self) -> (u64, u32) {
        self.0.ids()
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

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        PyValueError::new_err(format!("{name} must be at least 0 seconds, got {value}"))
    })
}
