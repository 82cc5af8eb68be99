//! How the core's errors look from Python.

use miniinfer_core::error::{ConfigError, RuntimeError, StepError, SubmitError};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    miniinfer._core,
    RequestError,
    PyValueError,
    "A request that was refused; `param` names the parameter at fault."
);
pyo3::create_exception!(
    miniinfer._core,
    EngineDeadError,
    PyRuntimeError,
    "The engine has stopped and takes no more requests."
);

pub fn config(error: &ConfigError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

pub fn runtime(error: &RuntimeError) -> PyErr {
    match error {
        RuntimeError::Config(error) => config(error),
        RuntimeError::System(error) => PyOSError::new_err(error.to_string()),
    }
}

pub fn step(error: &StepError) -> PyErr {
    match error {
        StepError::ArrayLength { .. } => PyValueError::new_err(error.to_string()),
        StepError::SlotState { .. }
        | StepError::OutOfOrder { .. }
        | StepError::NoSuchSlot { .. } => PyRuntimeError::new_err(error.to_string()),
    }
}

pub fn submit(py: Python<'_>, error: &SubmitError) -> PyErr {
    let parameter = match error {
        SubmitError::EmptyPrompt | SubmitError::Vocabulary { .. } => "prompt",
        SubmitError::TooLong { .. } | SubmitError::PromptTooLong { .. } => "max_tokens",
        SubmitError::Parameter { name, .. } => name,
        SubmitError::Grammar(_) => "structured_outputs",
        SubmitError::EngineStopped { .. } => return EngineDeadError::new_err(error.to_string()),
    };
    let refusal = RequestError::new_err(error.to_string());
    match refusal.value(py).setattr("param", parameter) {
        Ok(()) => refusal,
        Err(other) => other,
    }
}
