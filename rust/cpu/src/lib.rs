//! Kernels of the forward pass for CPUs.
//!
//! What a layer of the Llama family needs between its input and its output, over plain slices of
//! float32: linear layers with quantised or plain weights, attention over the paged cache, norms,
//! rotary embedding and activation. No Python, no torch.
//!
//! Two kinds of kernels. Products of bytes are written for each set of instructions ([`tile`]), those
//! of bfloat16 for the one that has them. All else is written once over vectors of 16 floats ([`simd`])
//! and compiled for each. Which set runs is
//! decided by [`isa`], at run time. Work is shared out by [`pool`], in the same pieces whatever the
//! number of threads, and a row's result does not depend on the rows beside it: the same input gives
//! the same bits, alone or in a batch.

pub mod activations;
pub mod arena;
pub mod attention;
mod before;
pub mod dense;
pub mod error;
pub mod format;
pub mod half;
pub mod isa;
pub mod layout;
pub mod linear;
pub mod memory;
mod outputs;
pub mod packed;
pub mod pool;
mod product;
pub mod profile;
pub mod quantize;
pub mod rows;
pub mod sample;
pub mod shared;
pub mod simd;
pub mod tile;
