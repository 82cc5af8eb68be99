//! What a reader gets.

use miniinfer_core::pipeline::StreamDelta;
use miniinfer_core::text::{self, FinishReason, StopCause};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::parsing::tuples;

type Top = Vec<(u32, String, Py<PyBytes>, f32)>;

/// The log-probability of one generated token.
#[pyclass(frozen, get_all, module = "miniinfer._core")]
pub struct TokenLogprob {
    token_id: u32,
    text: String,
    bytes: Py<PyBytes>,
    logprob: f32,
    rank: u32,
    top: Top,
}

impl TokenLogprob {
    fn new(py: Python<'_>, from: text::TokenLogprob) -> PyResult<Py<Self>> {
        let alternatives = from.top.into_iter();
        let top = alternatives
            .map(|t| (t.id, t.text, PyBytes::new(py, &t.bytes).unbind(), t.logprob))
            .collect();
        let bytes = PyBytes::new(py, &from.bytes).unbind();
        let (token_id, logprob, rank) = (from.id, from.logprob, from.rank);
        Py::new(
            py,
            Self {
                token_id,
                text: from.text,
                bytes,
                logprob,
                rank,
                top,
            },
        )
    }
}

/// What became certain of one choice since the last delta.
#[pyclass(frozen, get_all, module = "miniinfer._core")]
pub struct Delta {
    index: u32,
    text: String,
    parts: Vec<Py<PyTuple>>,
    token_ids: Vec<u32>,
    logprobs: Option<Vec<Py<TokenLogprob>>>,
    prompt_logprobs: Option<Vec<Option<Py<TokenLogprob>>>>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    error: Option<String>,
    num_output_tokens: u32,
    num_prompt_tokens: u32,
    num_cached_tokens: u32,
}

/// The stop token or the stop string.
#[derive(Clone, IntoPyObject, IntoPyObjectRef)]
pub enum StopReason {
    Token(u32),
    Text(String),
}

impl Delta {
    /// Takes the contents of a delta of the core.
    pub fn new(py: Python<'_>, from: &mut StreamDelta) -> PyResult<Py<Self>> {
        let text = &mut from.text;
        let logprobs = std::mem::take(&mut text.logprobs);
        let logprobs = (!logprobs.is_empty())
            .then(|| {
                logprobs
                    .into_iter()
                    .map(|l| TokenLogprob::new(py, l))
                    .collect()
            })
            .transpose()?;
        let prompt_logprobs = from.prompt_logprobs.take();
        let prompt_logprobs = prompt_logprobs
            .map(|prompt| prompt_row(py, prompt))
            .transpose()?;
        let finish = text.finish.take();
        let (mut finish_reason, mut stop_reason, mut error) = (None, None, None);
        if let Some(finish) = finish {
            finish_reason = Some(match finish.reason {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
                FinishReason::Abort => "abort",
                FinishReason::Error => "error",
            });
            stop_reason = match finish.stop {
                StopCause::None => None,
                StopCause::Token(token) => Some(StopReason::Token(token)),
                StopCause::Text(text) => Some(StopReason::Text(text)),
            };
            error = finish.error;
        }
        let delta = Self {
            index: from.index,
            parts: tuples(py, std::mem::take(&mut text.parts))?,
            text: std::mem::take(&mut text.text),
            token_ids: std::mem::take(&mut text.token_ids),
            logprobs,
            prompt_logprobs,
            finish_reason,
            stop_reason,
            error,
            num_output_tokens: text.num_output_tokens,
            num_prompt_tokens: from.num_prompt_tokens,
            num_cached_tokens: from.num_cached_tokens,
        };
        Py::new(py, delta)
    }
}

/// One entry a prompt token; nothing predicts the first.
fn prompt_row(
    py: Python<'_>,
    from: Vec<text::TokenLogprob>,
) -> PyResult<Vec<Option<Py<TokenLogprob>>>> {
    let rest = from
        .into_iter()
        .map(|logprob| TokenLogprob::new(py, logprob).map(Some));
    std::iter::once(Ok(None)).chain(rest).collect()
}

/// Deltas on their way to Python: pairs of a choice's id and what it gained.
pub struct Deltas<'py> {
    list: Bound<'py, PyList>,
    result: PyResult<()>,
}

impl<'py> Deltas<'py> {
    /// None yet.
    pub fn new(py: Python<'py>) -> Self {
        Self {
            list: PyList::empty(py),
            result: Ok(()),
        }
    }

    /// Adds one; after a failure the others are lost.
    pub fn add(&mut self, id: u64, delta: &mut StreamDelta) {
        if self.result.is_ok() {
            self.result = self.append(id, delta);
        }
    }

    fn append(&self, id: u64, delta: &mut StreamDelta) -> PyResult<()> {
        let py = self.list.py();
        let id = id.into_pyobject(py)?.into_any();
        let delta = Delta::new(py, delta)?.into_bound(py).into_any();
        self.list.append(PyTuple::new(py, [id, delta])?)
    }

    /// All of them.
    pub fn into_list(self) -> PyResult<Bound<'py, PyList>> {
        self.result.map(|()| self.list)
    }
}
