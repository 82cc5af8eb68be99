//! Attention over the paged cache.
//!
//! The cache of a layer is two arrays [slots, key-value heads, head size], a slot is its block's id
//! times the block size, plus the offset within. Queries are packed: requests one behind the other, each with the last tokens of its
//! sequence. The single tokens of requests that decode have their context streamed past them
//! ([`decode`]); prompts are attended in tiles ([`prefill`]), however few of their tokens a step computes, so
//! that a token's result does not depend on how its prompt was cut. Both compute softmax in float32.

pub mod cache;
mod context;
pub mod decode;
pub mod element;
mod pieces;
pub mod prefill;
#[cfg(target_arch = "x86_64")]
mod prefill_bf16;
mod softmax;
pub mod write;

use crate::isa::Isa;
use crate::pool::Pool;
use cache::LayerCache;
use std::cell::RefCell;

/// The queries of a step and what they attend to.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// For each token, `stride` floats, of which the first `heads` * head size are its queries.
    pub query: &'a [f32],
    /// Floats from one token to the next.
    pub stride: usize,
    /// Query heads: a multiple of the cache's heads.
    pub heads: usize,
    /// Prefix sums of the requests' token counts, from 0: one more than there are requests.
    pub query_start: &'a [i32],
    /// For each request the length of its context, its new tokens included.
    pub seq_lens: &'a [i32],
    /// For each request its row of the block table.
    pub rows: &'a [i32],
    /// Block ids, `table_width` to a row.
    pub block_table: &'a [i32],
    /// Entries of a row.
    pub table_width: usize,
    /// How many positions a token sees, itself among them; 0 for all.
    pub window: usize,
    /// The first so many requests decode: they have one new token each.
    pub num_decodes: usize,
}

/// What is wrong with the queries.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttentionError {
    /// Arrays that do not belong together.
    #[error("{what} has {got} elements, expected {expected}")]
    Length {
        /// Which array.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length that the others ask for.
        expected: usize,
    },
    /// A request whose numbers make no sense.
    #[error("request {request}: {tokens} new tokens of a context of {length}, row {row}")]
    Request {
        /// Which.
        request: usize,
        /// Its new tokens.
        tokens: i64,
        /// Its context.
        length: i32,
        /// Its row.
        row: i32,
    },
    /// A block or slot that the cache does not have.
    #[error("{what} {got} is not in the cache of {limit}")]
    OutOfCache {
        /// Block or slot.
        what: &'static str,
        /// Its number.
        got: i64,
        /// How many there are.
        limit: usize,
    },
}

/// One request, checked.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    /// Its first token.
    pub start: usize,
    pub tokens: usize,
    /// Its context, the new tokens included.
    pub length: usize,
    /// Its blocks, of which the context's are in the cache.
    pub blocks: &'a [i32],
}

#[derive(Default)]
struct Scratch {
    partials: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Causal attention of each token over its request's context; `out`: [tokens, heads, head size].
pub fn attend(
    isa: Isa,
    pool: &Pool,
    cache: &LayerCache,
    queries: &Queries<'_>,
    out: &mut [f32],
) -> Result<(), AttentionError> {
    let requests = check(cache, queries, out.len())?;
    let (decodes, prompts) = requests.split_at(queries.num_decodes);
    if !decodes.is_empty() {
        SCRATCH.with_borrow_mut(|scratch| {
            decode::attend(
                isa,
                pool,
                cache,
                queries,
                decodes,
                &mut scratch.partials,
                out,
            );
        });
    }
    if !prompts.is_empty() {
        prefill::attend(isa, pool, cache, queries, prompts, out);
    }
    Ok(())
}

fn check<'a>(
    cache: &LayerCache,
    queries: &Queries<'a>,
    out: usize,
) -> Result<Vec<Request<'a>>, AttentionError> {
    let count = queries.seq_lens.len();
    let tokens = usize::try_from(queries.query_start.last().copied().unwrap_or(0)).unwrap_or(0);
    let width = queries.heads * cache.head_dim();
    let needed = if tokens == 0 {
        0
    } else {
        (tokens - 1) * queries.stride + width
    };
    let lengths = [
        ("query_start", queries.query_start.len(), count + 1),
        ("rows", queries.rows.len(), count),
        ("output", out, tokens * width),
        ("query", queries.query.len().min(needed), needed),
    ];
    for (what, got, expected) in lengths {
        if got != expected {
            return Err(AttentionError::Length {
                what,
                got,
                expected,
            });
        }
    }
    if queries.num_decodes > count {
        return Err(AttentionError::Length {
            what: "seq_lens",
            got: count,
            expected: queries.num_decodes,
        });
    }
    (0..count)
        .map(|request| check_request(cache, queries, request))
        .collect()
}

fn check_request<'a>(
    cache: &LayerCache,
    queries: &Queries<'a>,
    request: usize,
) -> Result<Request<'a>, AttentionError> {
    let (start, end) = (
        queries.query_start[request],
        queries.query_start[request + 1],
    );
    let (length, row) = (queries.seq_lens[request], queries.rows[request]);
    let tokens = i64::from(end) - i64::from(start);
    let table_rows = queries.block_table.len() / queries.table_width.max(1);
    let blocks = usize::try_from(length)
        .unwrap_or(0)
        .div_ceil(cache.block_size());
    let is_sound = start >= 0
        && tokens >= 1
        && (tokens == 1 || request >= queries.num_decodes)
        && tokens <= i64::from(length)
        && usize::try_from(row).is_ok_and(|row| row < table_rows)
        && blocks <= queries.table_width;
    if !is_sound {
        return Err(AttentionError::Request {
            request,
            tokens,
            length,
            row,
        });
    }
    let blocks = &queries.block_table[row as usize * queries.table_width..][..blocks];
    // Blocks before the window may have been given away; they are not read.
    let first_key = first_key(length as usize - tokens as usize, queries.window);
    for block in &blocks[first_key / cache.block_size()..] {
        if usize::try_from(*block).is_ok_and(|block| block < cache.blocks()) {
            continue;
        }
        return Err(AttentionError::OutOfCache {
            what: "block",
            got: i64::from(*block),
            limit: cache.blocks(),
        });
    }
    Ok(Request {
        start: start as usize,
        tokens: tokens as usize,
        length: length as usize,
        blocks,
    })
}

/// The first position that a token at `position` sees.
pub(crate) fn first_key(position: usize, window: usize) -> usize {
    if window == 0 {
        0
    } else {
        (position + 1).saturating_sub(window)
    }
}
