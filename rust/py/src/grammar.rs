//! Grammars as Python asks for them and holds them.

use std::sync::Arc;

use miniinfer_core::grammar::{self, GrammarSource, GrammarSpec, Whitespace};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A grammar that an engine compiled, for any number of its requests.
#[pyclass(frozen, module = "miniinfer._core")]
pub struct CompiledGrammar(pub Arc<grammar::CompiledGrammar>);

/// The form that `kind` and its texts describe.
pub fn spec(
    kind: &str,
    texts: Vec<String>,
    compact: bool,
    whitespace_pattern: Option<String>,
) -> PyResult<GrammarSpec> {
    let first = || texts.first().cloned().unwrap_or_default();
    let source = match kind {
        "json_object" => GrammarSource::JsonObject,
        "json_schema" => GrammarSource::JsonSchema(first()),
        "regex" => GrammarSource::Regex(first()),
        "choice" => GrammarSource::Choice(texts),
        "lark" => GrammarSource::Lark(first()),
        _ => {
            return Err(PyValueError::new_err(format!(
                "kind must be json_object, json_schema, regex, choice or lark, got {kind}"
            )));
        }
    };
    let whitespace = match whitespace_pattern {
        _ if compact => Whitespace::Compact,
        Some(pattern) => Whitespace::Pattern(pattern),
        None => Whitespace::Bounded,
    };
    Ok(GrammarSpec { source, whitespace })
}
