//! Parts of answers, and what `submit` and `parse` are told about formats.

use std::collections::HashMap;
use std::sync::Arc;

use miniinfer_core::error::SubmitError;
use miniinfer_core::parse::{
    ParameterType, ParseSpec, Part, ReasoningFormat, ToolFormat, ToolTypes, parse as parse_whole,
};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error;

/// Function, parameter, type.
pub type TypeNames = HashMap<String, HashMap<String, String>>;

/// The formats of these names; `None` if there is none to look for.
pub fn parse_spec(
    reasoning: Option<&str>,
    tools: Option<&str>,
    in_reasoning: Option<bool>,
    calls_only: bool,
    tool_types: TypeNames,
) -> Result<Option<ParseSpec>, SubmitError> {
    let reasoning = reasoning
        .map(|name| {
            ReasoningFormat::from_name(name)
                .ok_or_else(|| unknown("reasoning_parser", &ReasoningFormat::ALL, name))
        })
        .transpose()?;
    let tools = tools
        .map(|name| {
            ToolFormat::from_name(name)
                .ok_or_else(|| unknown("tool_parser", &ToolFormat::ALL, name))
        })
        .transpose()?;
    if reasoning.is_none() && tools.is_none() {
        return Ok(None);
    }
    let mut types = ToolTypes::default();
    for (function, parameters) in tool_types {
        for (parameter, name) in parameters {
            let kind = ParameterType::from_name(&name)
                .ok_or_else(|| unknown("tool_types", &ParameterType::ALL, &name))?;
            types.insert(function.clone(), parameter, kind);
        }
    }
    Ok(Some(ParseSpec {
        reasoning,
        tools,
        in_reasoning,
        calls_only,
        tool_types: Arc::new(types),
    }))
}

fn unknown<T>(name: &'static str, known: &[(&'static str, T)], value: &str) -> SubmitError {
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    SubmitError::Parameter {
        name,
        limit: format!("one of {}", names.join(", ")),
        value: format!("{value:?}"),
    }
}

/// The parts of a whole text.
#[pyfunction]
#[pyo3(signature = (text, *, reasoning_parser=None, tool_parser=None, in_reasoning=None, calls_only=false, tool_types=None))]
#[expect(
    clippy::needless_pass_by_value,
    reason = "arguments from Python are owned"
)]
pub fn parse(
    py: Python<'_>,
    text: &str,
    reasoning_parser: Option<String>,
    tool_parser: Option<String>,
    in_reasoning: Option<bool>,
    calls_only: bool,
    tool_types: Option<TypeNames>,
) -> PyResult<Vec<Py<PyTuple>>> {
    let spec = parse_spec(
        reasoning_parser.as_deref(),
        tool_parser.as_deref(),
        in_reasoning,
        calls_only,
        tool_types.unwrap_or_default(),
    );
    let spec = spec.map_err(|error| error::submit(py, &error))?;
    let parts = py.detach(|| parse_whole(&spec.unwrap_or_default(), text));
    tuples(py, parts)
}

/// Parts as tuples that begin with their kind.
pub fn tuples(py: Python<'_>, parts: Vec<Part>) -> PyResult<Vec<Py<PyTuple>>> {
    let parts = parts.into_iter().map(|part| match part {
        Part::Reasoning(text) => ("reasoning", text).into_pyobject(py),
        Part::Content(text) => ("content", text).into_pyobject(py),
        Part::ToolCall { index, name } => ("tool_call", index, name).into_pyobject(py),
        Part::Arguments { index, text } => ("arguments", index, text).into_pyobject(py),
    });
    parts.map(|part| Ok(part?.unbind())).collect()
}
