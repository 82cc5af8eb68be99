//! Attention over the paged cache, by tensors' addresses: check, slice, call, return.
#![expect(
    unsafe_code,
    reason = "a tensor's memory is an address until it is made a slice"
)]

use crate::cpu::{pool, slice, slice_mut, value_error};
use miniinfer_cpu::attention::cache::{CacheShape, LayerCache};
use miniinfer_cpu::attention::element::ElementType;
use miniinfer_cpu::attention::{self, Queries, write};
use miniinfer_cpu::isa::Isa;
use miniinfer_cpu::profile::{Part, clock};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

/// The cache of all layers, and attention over it.
#[pyclass(frozen)]
pub struct PagedAttention {
    shape: CacheShape,
    layers: Vec<LayerCache>,
}

/// Addresses of a step's arrays and their sizes; see the stub.
pub(crate) type StepArguments = (
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
);

#[pymethods]
impl PagedAttention {
    #[new]
    fn new(
        layers: Vec<(usize, usize, usize, usize)>,
        dtype: &str,
        num_blocks: usize,
        block_size: usize,
        num_kv_heads: usize,
        head_dim: usize,
    ) -> PyResult<Self> {
        let element = match dtype {
            "float32" => ElementType::F32,
            "float16" => ElementType::F16,
            "bfloat16" => ElementType::Bf16,
            "int8" => ElementType::I8,
            _ => return Err(value_error(format!("no kernel for a cache of {dtype}"))),
        };
        if [num_blocks, block_size, num_kv_heads].contains(&0)
            || head_dim < 2
            || !head_dim.is_multiple_of(2)
        {
            return Err(value_error(format!(
                "no kernel for a cache of {num_blocks} blocks, {block_size} tokens, {num_kv_heads} heads \
                 of {head_dim}"
            )));
        }
        let shape = CacheShape {
            blocks: num_blocks,
            block_size,
            heads: num_kv_heads,
            head_dim,
            element,
        };
        let at = std::ptr::with_exposed_provenance_mut;
        let layers = layers
            .into_iter()
            .map(|(keys, values, key_scales, value_scales)| {
                let scales = (
                    std::ptr::with_exposed_provenance_mut(key_scales),
                    std::ptr::with_exposed_provenance_mut(value_scales),
                );
                // SAFETY: `miniinfer.cpu` gives the addresses of a cache of this shape, which it holds.
                unsafe { LayerCache::new(shape, at(keys), at(values), scales) }
            })
            .collect();
        Ok(Self { shape, layers })
    }

    /// Rotates queries and keys, stores keys and values, and attends; see the stub.
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords would cost more than the call"
    )]
    fn step(
        &self,
        py: Python<'_>,
        layer: usize,
        heads: usize,
        out: usize,
        num_heads: usize,
        window: usize,
        norm: usize,
        epsilon: f32,
        rotary: (usize, usize),
        step: StepArguments,
    ) -> PyResult<()> {
        let heads = Heads {
            address: heads,
            count: num_heads,
            norm,
            epsilon,
        };
        py.detach(|| self.run(layer, &heads, out, window, rotary, step))
    }
}

/// The heads of a step's tokens.
pub(crate) struct Heads {
    /// Where they are.
    pub address: usize,
    /// Query heads.
    pub count: usize,
    /// The weight of their norm, or 0.
    pub norm: usize,
    /// Its epsilon.
    pub epsilon: f32,
}

impl PagedAttention {
    /// How many layers the cache has.
    pub(crate) fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// `step` without Python.
    pub(crate) fn run(
        &self,
        layer: usize,
        new: &Heads,
        out: usize,
        window: usize,
        rotary: (usize, usize),
        step: StepArguments,
    ) -> PyResult<()> {
        let cache = self.layers.get(layer).ok_or_else(|| {
            PyIndexError::new_err(format!(
                "layer {layer} of {} was asked for",
                self.layers.len()
            ))
        })?;
        let (num_heads, norm) = (new.count, new.norm);
        let (positions, slots, query_start, seq_lens, rows, table, ..) = step;
        let (.., tokens, requests, table_rows, table_width, num_decodes) = step;
        let CacheShape {
            heads: kv_heads,
            head_dim,
            ..
        } = self.shape;
        if num_heads == 0 || !num_heads.is_multiple_of(kv_heads) {
            return Err(value_error(format!(
                "{kv_heads} key-value heads do not divide the {num_heads} attention heads"
            )));
        }
        let width = (num_heads + 2 * kv_heads) * head_dim;
        let (isa, pool) = (Isa::best(), pool());
        let rotated = if norm == 0 {
            0
        } else {
            (num_heads + kv_heads) * head_dim
        };
        // SAFETY: `miniinfer.cpu` gives addresses of tensors of these sizes, which it holds.
        unsafe {
            let heads = slice_mut::<f32>(new.address, tokens * width);
            let mut new = write::NewTokens {
                heads,
                query_heads: num_heads,
                rotary_table: slice(rotary.0, rotary.1 * head_dim),
                positions: slice(positions, tokens),
                slots: slice(slots, tokens),
                norm: slice(norm, rotated),
                epsilon: new.epsilon,
            };
            clock(Part::Heads, || write::write(isa, &pool, cache, &mut new))
                .map_err(value_error)?;
            let queries = Queries {
                query: heads,
                stride: width,
                heads: num_heads,
                query_start: slice(query_start, requests + 1),
                seq_lens: slice(seq_lens, requests),
                rows: slice(rows, requests),
                block_table: slice(table, table_rows * table_width),
                table_width,
                window,
                num_decodes,
            };
            let out = slice_mut(out, tokens * num_heads * head_dim);
            clock(Part::Attention, || {
                attention::attend(isa, &pool, cache, &queries, out)
            })
            .map_err(value_error)
        }
    }
}
