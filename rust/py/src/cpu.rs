//! The CPU kernels over tensors' addresses: check, slice, call, return. The GIL is released meanwhile.
//!
//! Addresses come from `miniinfer.cpu`, which checks types, contiguity and shapes; sizes and indices
//! are checked here again.
#![expect(
    unsafe_code,
    reason = "a tensor's memory is an address until it is made a slice"
)]

use miniinfer_cpu::dense::{DenseMatrix, DenseType};
use miniinfer_cpu::error::PackError;
use miniinfer_cpu::format::Format;
use miniinfer_cpu::isa::Isa;
use miniinfer_cpu::linear::{Before, Call, Linear, Part};
use miniinfer_cpu::packed::PackedMatrix;
use miniinfer_cpu::pool::Pool;
use miniinfer_cpu::profile;
use miniinfer_cpu::quantize::Bits;
use miniinfer_cpu::rows;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

static POOL: RwLock<Option<Arc<Pool>>> = RwLock::new(None);

pub(crate) fn pool() -> Arc<Pool> {
    let current = POOL.read().unwrap_or_else(PoisonError::into_inner).clone();
    current.unwrap_or_else(|| {
        let mut place = POOL.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(place.get_or_insert_with(|| Arc::new(Pool::new(1))))
    })
}

/// How many threads the kernels use, the caller's included.
#[pyfunction]
pub fn set_kernel_threads(threads: usize) -> PyResult<()> {
    if threads == 0 || threads > 1024 {
        return Err(value_error(format!(
            "threads must be from 1 to 1024, got {threads}"
        )));
    }
    if pool().threads() != threads {
        let fresh = Arc::new(Pool::new(threads));
        *POOL.write().unwrap_or_else(PoisonError::into_inner) = Some(fresh);
    }
    Ok(())
}

/// The instructions that kernels use here.
#[pyfunction]
pub fn kernel_isa() -> &'static str {
    Isa::best().name()
}

/// Turns the clock of the kernels' parts on, at zero, or off; see the stub.
#[pyfunction]
pub fn profile_kernels(on: bool) -> HashMap<&'static str, f64> {
    let seconds = profile::seconds();
    profile::set(on);
    HashMap::from(seconds.map(|(part, seconds)| (part.name(), seconds)))
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "a function to map errors with"
)]
pub(crate) fn value_error(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// # Safety
///
/// `count` elements must lie at the address, and nobody may write them during the call.
pub(crate) unsafe fn slice<'a, T>(address: usize, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), count) }
}

/// # Safety
///
/// As `slice`, and nobody else may read them.
pub(crate) unsafe fn slice_mut<'a, T>(address: usize, count: usize) -> &'a mut [T] {
    if count == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), count) }
}

/// A linear layer's weights, packed for the kernels.
#[pyclass(frozen)]
pub struct PackedLinear {
    linear: Linear,
}

/// Number of a ggml type, or bits to quantise its floats to; raw bytes; rows; columns.
type PartArguments = (u32, u32, PyBuffer<u8>, usize, usize);

/// What comes before a product.
#[derive(Clone, Copy)]
pub(crate) enum Prepare {
    /// `RMSNorm` with the weight at an address, if it is not 0, and an epsilon.
    Norm(usize, f32),
    /// The gated activation.
    SiluMul,
}

impl PackedLinear {
    /// `forward` without Python.
    pub(crate) fn run(
        &self,
        x: usize,
        out: usize,
        count: usize,
        before: Prepare,
        accumulate: bool,
    ) {
        let columns = self.linear.columns();
        let (width, before) = match before {
            Prepare::SiluMul => (2 * columns, Before::SiluMul),
            Prepare::Norm(0, _) => (columns, Before::Nothing),
            Prepare::Norm(weight, epsilon) => {
                // SAFETY: `miniinfer.cpu` gives addresses of tensors of these sizes, which it holds.
                let weight = unsafe { slice(weight, columns) };
                (columns, Before::RmsNorm { weight, epsilon })
            }
        };
        let mut call = Call {
            // SAFETY: as above.
            input: unsafe { slice(x, count * width) },
            // SAFETY: as above.
            output: unsafe { slice_mut(out, count * self.linear.rows()) },
            before,
            accumulate,
        };
        self.linear.forward(Isa::best(), &pool(), &mut call);
    }
}

#[pymethods]
impl PackedLinear {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 gives arguments away")]
    fn new(py: Python<'_>, parts: Vec<PartArguments>, bias: Option<Vec<f32>>) -> PyResult<Self> {
        let mut inputs = Vec::with_capacity(parts.len());
        for (kind, bits, data, rows, columns) in &parts {
            let bytes = data
                .as_slice_ptr()
                .ok_or_else(|| value_error("weights must be C-contiguous"))?;
            // SAFETY: the buffer holds the memory, and nobody writes weights while they are packed.
            let bytes: &[u8] = unsafe { &*bytes.as_ptr() };
            inputs.push((*kind, *bits, bytes, *rows, *columns));
        }
        py.detach(|| {
            let packed: Result<Vec<_>, _> = inputs.into_iter().map(pack).collect();
            Linear::new(packed?, bias.as_deref()).map_err(value_error)
        })
        .map(|linear| Self { linear })
    }

    #[getter]
    fn rows(&self) -> usize {
        self.linear.rows()
    }

    #[getter]
    fn columns(&self) -> usize {
        self.linear.columns()
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.linear.num_bytes()
    }

    /// `out` [count, rows] = prepared `x` times the weights; see the stub.
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords would cost more than the call"
    )]
    fn forward(
        &self,
        py: Python<'_>,
        x: usize,
        out: usize,
        count: usize,
        norm: usize,
        epsilon: f32,
        silu: bool,
        accumulate: bool,
    ) {
        let before = if silu {
            Prepare::SiluMul
        } else {
            Prepare::Norm(norm, epsilon)
        };
        py.detach(|| self.run(x, out, count, before, accumulate));
    }

    /// Rows of the weights by index: an embedding.
    fn gather(&self, py: Python<'_>, indices: usize, count: usize, out: usize) -> PyResult<()> {
        // SAFETY: as in `run`.
        let indices: &[i32] = unsafe { slice(indices, count) };
        let limit = self.linear.rows();
        for index in indices {
            if !usize::try_from(*index).is_ok_and(|index| index < limit) {
                return Err(PyIndexError::new_err(format!(
                    "token {index} is not in the vocabulary of {limit}"
                )));
            }
        }
        py.detach(|| {
            // SAFETY: as in `run`.
            let out = unsafe { slice_mut(out, count * self.linear.columns()) };
            self.linear.gather(indices, out);
        });
        Ok(())
    }
}

fn pack((kind, bits, data, rows, columns): (u32, u32, &[u8], usize, usize)) -> PyResult<Part> {
    const F32: u32 = 0;
    const BF16: u32 = 30;
    let pool = pool();
    let packed = match (kind, bits) {
        (F32, 4 | 8) => {
            let bits = if bits == 4 { Bits::Four } else { Bits::Eight };
            PackedMatrix::from_floats(bits, floats(data)?, rows, columns, &pool)
                .map(Part::Quantized)
        }
        (F32, _) => DenseMatrix::new(DenseType::F32, data, rows, columns, &pool).map(Part::Dense),
        (BF16, _) => DenseMatrix::new(DenseType::Bf16, data, rows, columns, &pool).map(Part::Dense),
        _ => Format::from_ggml(kind)
            .and_then(|format| PackedMatrix::from_ggml(format, data, rows, columns, &pool))
            .map(Part::Quantized),
    };
    packed.map_err(|error: PackError| value_error(error))
}

fn floats(data: &[u8]) -> PyResult<&[f32]> {
    // SAFETY: every bit pattern is a float.
    let (before, floats, after) = unsafe { data.align_to::<f32>() };
    if before.is_empty() && after.is_empty() {
        Ok(floats)
    } else {
        Err(value_error("float32 weights must be aligned"))
    }
}

/// `RMSNorm` of `count` rows of `columns`.
#[pyfunction]
pub fn rms_norm(
    py: Python<'_>,
    x: usize,
    weight: usize,
    epsilon: f32,
    out: usize,
    count: usize,
    columns: usize,
) {
    py.detach(|| {
        // SAFETY: `miniinfer.cpu` gives addresses of tensors of these sizes, which it holds.
        let (x, weight, out) = unsafe {
            let length = count * columns;
            (
                slice::<f32>(x, length),
                slice(weight, columns),
                slice_mut(out, length),
            )
        };
        for (row, out) in x.chunks_exact(columns).zip(out.chunks_exact_mut(columns)) {
            rows::rms_norm(Isa::best(), row, weight, epsilon, out);
        }
    });
}
