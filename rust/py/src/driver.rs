//! The side of an engine that steps it, as Python drives it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use miniinfer_core::EngineConfig;
use miniinfer_core::arrays::array_lengths;
use miniinfer_core::driver;
use miniinfer_core::error::StepError;
use miniinfer_core::grammar;
use miniinfer_core::prompt_logprobs::PromptRows;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{SlotArrays, TYPES, cells};
use crate::error;

/// Plan, commit and what belongs to them. Made as an `Engine` or an `EngineHost`.
#[pyclass(frozen, subclass, module = "miniinfer._core")]
pub struct Driver {
    inner: Arc<driver::Driver>,
    config: EngineConfig,
    vocab_size: u32,
    slots: Mutex<[Option<SlotArrays>; 2]>,
}

impl Driver {
    pub fn new(driver: Arc<driver::Driver>, config: EngineConfig, vocab_size: u32) -> Self {
        Self {
            inner: driver,
            config,
            vocab_size,
            slots: Mutex::default(),
        }
    }
}

#[pymethods]
impl Driver {
    /// Name, numpy dtype and number of items of each array that `register_slot` needs.
    fn array_specs(&self) -> Vec<(&'static str, &'static str, usize)> {
        let lengths = array_lengths(&self.config);
        lengths
            .into_iter()
            .zip(TYPES)
            .map(|((name, len), (_, dtype))| (name, *dtype, len))
            .collect()
    }

    /// Rows of the array `block_table`.
    fn block_table_rows(&self) -> u32 {
        self.config.max_num_seqs
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
        self.with_slot(py, slot, |arrays| self.inner.plan(slot, arrays))
    }

    /// Takes in what was sampled for a planned step.
    fn commit(&self, py: Python<'_>, slot: usize) -> PyResult<()> {
        self.with_slot(py, slot, |arrays| self.inner.commit(slot, arrays))
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
        self.inner
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
        self.inner
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
        self.inner
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
        let work = self.inner.with_engine(|engine| engine.mask_work(slot));
        let work = work.map_err(|error| error::step(&error))?;
        py.detach(|| work.iter().for_each(|cursor| cursor.finish()));
        let rows = cells(py, &rows, "rows")?;
        let bits = cells(py, &bits, "bits")?;
        self.inner
            .with_engine(|engine| engine.fill_masks(slot, rows, bits))
            .map_err(|error| error::step(&error))
    }

    /// Words of 32 bits in a mask: one bit for each id of the vocabulary.
    fn mask_words(&self) -> usize {
        grammar::mask_words(self.vocab_size)
    }

    /// Ends the requests of a planned step with an error; the others go on.
    fn fail_step(&self, slot: usize, reason: &str) -> PyResult<()> {
        self.inner
            .fail_step(slot, reason)
            .map_err(|error| error::step(&error))
    }

    /// Ends every request with an error and refuses new ones.
    fn fail(&self, reason: &str) {
        self.inner.fail(reason);
    }

    /// Sleeps until there is something to plan. False if the time, in seconds, ran out.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = timeout.map(|t| seconds("timeout", t)).transpose()?;
        Ok(py.detach(|| self.inner.wait(timeout)))
    }

    /// Ends a `wait` at once.
    fn interrupt(&self) {
        self.inner.interrupt();
    }

    /// Verifies the engine's whole state; raises `RuntimeError` saying what is wrong.
    fn check(&self) -> PyResult<()> {
        self.inner.check().map_err(PyRuntimeError::new_err)
    }
}

impl Driver {
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

/// A duration given in seconds.
pub fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        PyValueError::new_err(format!("{name} must be at least 0 seconds, got {value}"))
    })
}
