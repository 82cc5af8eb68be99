//! All layers of a decoder in one call, so that a step gives the GIL up once and not for every matrix.

use crate::cpu::{PackedLinear, Prepare, value_error};
use crate::cpu_attention::{Heads, PagedAttention, StepArguments};
use pyo3::prelude::*;

/// A layer's matrices, and addresses of its norms; 0 for a head norm that it lacks.
struct Layer {
    qkv: Py<PackedLinear>,
    output: Py<PackedLinear>,
    gate_up: Py<PackedLinear>,
    down: Py<PackedLinear>,
    norms: Norms,
    /// Positions that a token sees; 0 for all.
    window: usize,
}

/// Addresses of the weights before attention, of query and key heads, and behind attention.
type Norms = (usize, usize, usize);

type LayerArguments = (
    Py<PackedLinear>,
    Py<PackedLinear>,
    Py<PackedLinear>,
    Py<PackedLinear>,
    Norms,
    usize,
);

/// The layers of a Llama-like decoder.
#[pyclass(frozen)]
pub struct DecoderLayers {
    layers: Vec<Layer>,
    num_heads: usize,
    epsilon: f32,
}

#[pymethods]
impl DecoderLayers {
    #[new]
    fn new(layers: Vec<LayerArguments>, num_heads: usize, epsilon: f32) -> Self {
        let layers = layers
            .into_iter()
            .map(|(qkv, output, gate_up, down, norms, window)| Layer {
                qkv,
                output,
                gate_up,
                down,
                norms,
                window,
            });
        Self {
            layers: layers.collect(),
            num_heads,
            epsilon,
        }
    }

    /// All layers; see the stub.
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 gives arguments away")]
    fn forward(
        &self,
        py: Python<'_>,
        attention: Py<PagedAttention>,
        buffers: (usize, usize, usize, usize),
        rotary: (usize, usize),
        step: StepArguments,
    ) -> PyResult<()> {
        let attention = attention.get();
        if attention.num_layers() != self.layers.len() {
            return Err(value_error(format!(
                "a cache of {} layers for a model of {}",
                attention.num_layers(),
                self.layers.len()
            )));
        }
        py.detach(|| {
            for (index, layer) in self.layers.iter().enumerate() {
                self.layer(layer, index, attention, buffers, rotary, step)?;
            }
            Ok(())
        })
    }
}

impl DecoderLayers {
    fn layer(
        &self,
        layer: &Layer,
        index: usize,
        attention: &PagedAttention,
        (hidden, heads, attended, gate_up): (usize, usize, usize, usize),
        rotary: (usize, usize),
        step: StepArguments,
    ) -> PyResult<()> {
        let (.., tokens, _, _, _, _) = step;
        let (before, head_norm, behind) = layer.norms;
        let norm = |weight| Prepare::Norm(weight, self.epsilon);
        let run = |matrix: &Py<PackedLinear>, from, to, prepare, accumulate| {
            matrix.get().run(from, to, tokens, prepare, accumulate);
        };
        run(&layer.qkv, hidden, heads, norm(before), false);
        let new = Heads {
            address: heads,
            count: self.num_heads,
            norm: head_norm,
            epsilon: self.epsilon,
        };
        attention.run(index, &new, attended, layer.window, rotary, step)?;
        run(&layer.output, attended, hidden, norm(0), true);
        run(&layer.gate_up, hidden, gate_up, norm(behind), false);
        run(&layer.down, gate_up, hidden, Prepare::SiluMul, true);
        Ok(())
    }
}
