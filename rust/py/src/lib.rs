//! `miniinfer._core`: argument checks, slices, one error mapping; no logic.
use pyo3::prelude::*;

#[pymodule]
mod _core {}
