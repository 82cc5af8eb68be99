//! `miniinfer._core`: argument checks, slices, one error mapping; no logic.

mod arrays;
mod cpu;
mod cpu_attention;
mod cpu_layers;
mod cpu_sampler;
mod delta;
mod driver;
mod engine;
mod error;
mod grammar;
mod host;
mod lane;
mod limits;
mod params;
mod parsing;
mod remote;
mod send;
mod stats;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::cpu::{PackedLinear, kernel_isa, profile_kernels, rms_norm, set_kernel_threads};
    #[pymodule_export]
    use crate::cpu_attention::PagedAttention;
    #[pymodule_export]
    use crate::cpu_layers::DecoderLayers;
    #[pymodule_export]
    use crate::cpu_sampler::sample_rows;
    #[pymodule_export]
    use crate::delta::{Delta, TokenLogprob};
    #[pymodule_export]
    use crate::driver::Driver;
    #[pymodule_export]
    use crate::engine::{Engine, Submission};
    #[pymodule_export]
    use crate::error::{EngineDeadError, RequestError};
    #[pymodule_export]
    use crate::grammar::CompiledGrammar;
    #[pymodule_export]
    use crate::host::EngineHost;
    #[pymodule_export]
    use crate::lane::Lane;
    #[pymodule_export]
    use crate::parsing::parse;
    #[pymodule_export]
    use crate::remote::RemoteFrontend;
    #[pymodule_export]
    use crate::send::send_each;

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
