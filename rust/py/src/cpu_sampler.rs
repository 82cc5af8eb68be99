//! The sampler over tensors' addresses: slice, call, return. The GIL is released meanwhile.
#![expect(
    unsafe_code,
    reason = "a tensor's memory is an address until it is made a slice"
)]

use crate::cpu::{pool, slice, slice_mut, value_error};
use miniinfer_cpu::isa::Isa;
use miniinfer_cpu::sample::{self, Batch, Edits, Logprobs, Masks, Parameters};
use pyo3::prelude::*;

/// Address, rows, columns, floats from one row to the next, and how many columns count.
type Logits = (usize, usize, usize, usize, usize);

/// Addresses of `temperature`, `top_k`, `top_p`, `min_p`, `uniform`, and the greatest temperature that is
/// greedy.
type ParameterAddresses = (usize, usize, usize, usize, usize, f32);

/// Chooses a token for each row; see the stub.
#[pyfunction]
pub fn sample_rows(
    py: Python<'_>,
    logits: Logits,
    parameters: ParameterAddresses,
    edits: (usize, usize, usize, usize, usize),
    masks: (usize, usize, usize, usize),
    sampled: usize,
    logprobs: Option<(usize, usize, usize, usize, usize)>,
) -> PyResult<()> {
    let (address, rows, columns, stride, vocabulary) = logits;
    let (temperature, top_k, top_p, min_p, uniform, greedy) = parameters;
    // The last row may end before its padding.
    let length = rows.saturating_sub(1) * stride + if rows == 0 { 0 } else { columns };
    py.detach(|| {
        // SAFETY: `miniinfer.cpu` gives addresses of tensors of these sizes, which it holds.
        unsafe {
            let mut batch = Batch {
                logits: slice_mut(address, length),
                stride,
                vocabulary,
                parameters: Parameters {
                    temperature: slice(temperature, rows),
                    top_k: slice(top_k, rows),
                    top_p: slice(top_p, rows),
                    min_p: slice(min_p, rows),
                    uniform: slice(uniform, rows),
                    greedy,
                },
                edits: Edits {
                    sample: slice(edits.0, edits.4),
                    token: slice(edits.1, edits.4),
                    repetition: slice(edits.2, edits.4),
                    bias: slice(edits.3, edits.4),
                },
                masks: Masks {
                    rows: slice(masks.0, masks.2),
                    bits: slice(masks.1, masks.2 * masks.3),
                    words: masks.3,
                },
            };
            let sampled = slice_mut(sampled, rows);
            let mut wanted = logprobs.map(|(logprob, rank, ids, values, count)| Logprobs {
                logprob: slice_mut(logprob, rows),
                rank: slice_mut(rank, rows),
                top_ids: slice_mut(ids, rows * count),
                top_logprobs: slice_mut(values, rows * count),
                count,
            });
            sample::sample(Isa::best(), &pool(), &mut batch, sampled, wanted.as_mut())
        }
        .map_err(value_error)
    })
}
