//! The arrays that Python registers once: typed, writable, contiguous.
#![expect(
    unsafe_code,
    reason = "a buffer's memory is a pointer until it is made a slice"
)]

use miniinfer_core::arrays::StepArrays;
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::cell::Cell;
use std::ffi::CStr;

fn get<T: Element>(arrays: &Bound<'_, PyDict>, name: &str) -> PyResult<PyBuffer<T>> {
    let array = arrays
        .get_item(name)?
        .ok_or_else(|| PyKeyError::new_err(format!("array {name} is missing")))?;
    let buffer = PyBuffer::<T>::get(&array)
        .map_err(|error| PyValueError::new_err(format!("array {name}: {error}")))?;
    cells(array.py(), &buffer, name)?;
    Ok(buffer)
}

/// The items of a buffer, as cells that Python code may look at between calls.
pub fn cells<'a, T: Element>(
    _attached: Python<'a>,
    buffer: &'a PyBuffer<T>,
    name: &str,
) -> PyResult<&'a [Cell<T>]> {
    if !has_native_order(buffer.format()) {
        return Err(PyValueError::new_err(format!(
            "array {name} must have this machine's byte order"
        )));
    }
    let items = buffer
        .as_slice_ptr()
        .filter(|_| !buffer.readonly())
        .ok_or_else(|| {
            PyValueError::new_err(format!("array {name} must be writable and C-contiguous"))
        })?;
    // SAFETY: the buffer keeps the memory alive for 'a and checked its item type and alignment; no other
    // thread touches it while this one is attached, and cells allow aliases on this thread.
    Ok(unsafe { &*(items.as_ptr() as *const [Cell<T>]) })
}

/// Whether the items of a buffer are in this machine's byte order, which their type does not say.
fn has_native_order(format: &CStr) -> bool {
    let swapped: &[u8] = if cfg!(target_endian = "little") {
        b">!"
    } else {
        b"<"
    };
    !matches!(format.to_bytes().first(), Some(order) if swapped.contains(order))
}

trait ItemType {
    const NAME: &'static str;
}

impl ItemType for i32 {
    const NAME: &'static str = "int32";
}

impl ItemType for i64 {
    const NAME: &'static str = "int64";
}

impl ItemType for f32 {
    const NAME: &'static str = "float32";
}

macro_rules! slot_arrays {
    ($($name:ident: $type:ty),* $(,)?) => {
        /// One slot's arrays.
        pub struct SlotArrays { $($name: PyBuffer<$type>,)* }

        impl SlotArrays {
            /// Takes hold of the arrays in a dict by their names.
            pub fn from_dict(arrays: &Bound<'_, PyDict>) -> PyResult<Self> {
                Ok(Self { $($name: get(arrays, stringify!($name))?,)* })
            }

            /// The arrays as the engine takes them.
            pub fn view<'a>(&'a self, py: Python<'a>) -> PyResult<StepArrays<'a>> {
                Ok(StepArrays { $($name: cells(py, &self.$name, stringify!($name))?,)* })
            }
        }

        /// Item type of each array, as numpy names it.
        pub const TYPES: &[(&str, &str)] = &[$((stringify!($name), <$type as ItemType>::NAME)),*];
    };
}

slot_arrays! {
    header: i32, token_ids: i32, positions: i32, slot_mapping: i64, query_start: i32, seq_lens: i32,
    rows: i32, block_table: i32, logits_index: i32, temperature: f32, top_k: i32, top_p: f32,
    min_p: f32, uniform: f32, source: i32, sampled: i32, logprob: f32, rank: i32, top_ids: i32, top_logprobs: f32,
}
