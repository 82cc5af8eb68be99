//! A token's context in pieces, and their results joined.
//!
//! Pieces are attended on their own and then merged, in order, by their largest scores (as in
//! `FlashDecoding`). The cuts depend on positions alone, so that a token's result does not depend on how
//! many threads there are or what else is in the batch.

use super::context::RUN;
use super::{Queries, Request, first_key};

/// One run of one token's context.
pub(super) struct Piece<'a> {
    pub request: Request<'a>,
    /// The run's first position, and the one behind its last.
    pub first: usize,
    pub end: usize,
    /// Whether it is the whole context: then its result is final.
    pub is_whole: bool,
}

/// Cuts the contexts of requests that have one new token each.
pub(super) fn cut<'a>(queries: &Queries<'_>, requests: &[Request<'a>]) -> Vec<Piece<'a>> {
    let mut pieces = Vec::with_capacity(requests.len());
    for request in requests {
        let start = first_key(request.length - 1, queries.window);
        let mut first = start;
        while first < request.length {
            let end = ((first / RUN + 1) * RUN).min(request.length);
            pieces.push(Piece {
                request: *request,
                first,
                end,
                is_whole: first == start && end == request.length,
            });
            first = end;
        }
    }
    pieces
}

/// A head's result: its weighted values by the sum of the weights.
pub(super) fn finish(partial: &[f32], out: &mut [f32]) {
    let inverse = 1.0 / partial[1];
    for (out, value) in out.iter_mut().zip(&partial[2..]) {
        *out = value * inverse;
    }
}

/// Joins the pieces of tokens that have several.
pub(super) fn merge(
    pieces: &[Piece<'_>],
    partials: &[f32],
    heads: usize,
    size: usize,
    out: &mut [f32],
) {
    let entry = size + 2;
    let mut joined = vec![0.0; entry];
    for parts in pieces.chunk_by(|a, b| a.request.start == b.request.start) {
        if parts[0].is_whole {
            continue;
        }
        let before = (parts.as_ptr().addr() - pieces.as_ptr().addr()) / size_of::<Piece<'_>>();
        for head in 0..heads {
            let part =
                |index: usize| &partials[((before + index) * heads + head) * entry..][..entry];
            joined.copy_from_slice(part(0));
            for index in 1..parts.len() {
                join(&mut joined, part(index));
            }
            finish(
                &joined,
                &mut out[(parts[0].request.start * heads + head) * size..][..size],
            );
        }
    }
}

fn join(into: &mut [f32], from: &[f32]) {
    let largest = into[0].max(from[0]);
    let (old, new) = ((into[0] - largest).exp(), (from[0] - largest).exp());
    into[0] = largest;
    for (into, from) in into[1..].iter_mut().zip(&from[1..]) {
        *into = *into * old + from * new;
    }
}
