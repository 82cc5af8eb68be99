//! A step's output on the wire: for each client a list of entries, and the columns of its tokens.

use super::client_ids;
use super::error::WireError;
use super::pack::{Packer, Word};
use super::unpack::Unpacker;
use crate::prompt_logprobs::PromptLogprobs;
use crate::step::{EndReason, OutputEntry, StepOutput};

/// Values of a step.
const FIELDS: usize = 8;

/// Values of an entry in the list of all.
const ENTRY: usize = 6;

/// Values of a prompt's log-probabilities in the list of all.
const PROMPT: usize = 7;

/// Most alternatives of a token.
const MOST_ALTERNATIVES: usize = 1 << 20;

// Codes of the ends; `NONE` goes on.
const NONE: u64 = 0;
const EOS: u64 = 1;
const STOP_TOKEN: u64 = 2;
const LENGTH: u64 = 3;
const ABORT: u64 = 4;
const ERROR: u64 = 5;

/// Appends those of an output's entries that are `client`'s. False, and nothing appended, if it has none.
pub fn pack_step(output: &StepOutput, client: u16, into: &mut Vec<u8>) -> bool {
    let ids = client_ids(client);
    let mine = |entry: &&OutputEntry| ids.contains(&entry.id);
    let count = output.entries.iter().filter(mine).count();
    let prompts = output.prompt_logprobs.iter();
    let prompts: Vec<_> = prompts.filter(|prompt| ids.contains(&prompt.id)).collect();
    if count == 0 && prompts.is_empty() {
        return false;
    }
    let all = count == output.entries.len();
    let mut packer = Packer(into);
    packer.array(FIELDS);
    packer.array(count * ENTRY);
    for entry in output.entries.iter().filter(mine) {
        pack_entry(&mut packer, entry, ids.start);
    }
    let mut ranges = Vec::new();
    if !all {
        let mut first = 0;
        for entry in &output.entries {
            let last = first + entry.num_tokens as usize;
            if mine(&entry) {
                ranges.push(first..last);
            }
            first = last;
        }
    }
    let ranges = (!all).then_some(ranges.as_slice());
    let width = output.top_width;
    packer.uint(width as u64);
    column(&mut packer, &output.tokens, ranges, 1);
    column(&mut packer, &output.logprobs, ranges, 1);
    column(&mut packer, &output.ranks, ranges, 1);
    column(&mut packer, &output.top_ids, ranges, width);
    column(&mut packer, &output.top_logprobs, ranges, width);
    packer.array(prompts.len() * PROMPT);
    for prompt in prompts {
        pack_prompt(&mut packer, prompt, ids.start);
    }
    true
}

fn pack_prompt(packer: &mut Packer<'_>, prompt: &PromptLogprobs, base: u64) {
    packer.uint(prompt.id - base);
    packer.uint(prompt.top_width as u64);
    packer.column(prompt.tokens.iter());
    packer.column(prompt.logprobs.iter());
    packer.column(prompt.ranks.iter());
    packer.column(prompt.top_ids.iter());
    packer.column(prompt.top_logprobs.iter());
}

fn pack_entry(packer: &mut Packer<'_>, entry: &OutputEntry, base: u64) {
    packer.uint(entry.id - base);
    packer.uint(entry.num_tokens.into());
    packer.option(entry.num_logprobs);
    packer.uint(entry.cached_tokens.into());
    let (code, token) = match &entry.end {
        None => (NONE, 0),
        Some(EndReason::Eos(token)) => (EOS, *token),
        Some(EndReason::StopToken(token)) => (STOP_TOKEN, *token),
        Some(EndReason::Length) => (LENGTH, 0),
        Some(EndReason::Abort) => (ABORT, 0),
        Some(EndReason::Error(_)) => (ERROR, 0),
    };
    packer.uint(code);
    match &entry.end {
        Some(EndReason::Error(message)) => packer.str(message),
        _ => packer.uint(token.into()),
    }
}

/// Writes a column, whole or in ranges of rows that have `width` values each.
fn column<T: Word>(
    packer: &mut Packer<'_>,
    values: &[T],
    ranges: Option<&[std::ops::Range<usize>]>,
    width: usize,
) {
    let Some(ranges) = ranges.filter(|_| !values.is_empty()) else {
        packer.column(values.iter());
        return;
    };
    let rows = ranges
        .iter()
        .map(|rows| rows.start * width..rows.end * width);
    let chosen: Vec<T> = rows.flat_map(|rows| values[rows].iter().copied()).collect();
    packer.column(chosen.iter());
}

/// Reads what [`pack_step`] wrote for a client into an empty output.
pub fn unpack_step(bytes: &[u8], client: u16, into: &mut StepOutput) -> Result<(), WireError> {
    let ids = client_ids(client);
    let mut unpacker = Unpacker::new(bytes);
    unpacker.fields("a step", FIELDS)?;
    let values = unpacker.array(1)?;
    if values % ENTRY != 0 {
        return Err(range("entries", "of six values each", values as u64));
    }
    into.entries.reserve(values / ENTRY);
    let mut tokens = 0;
    for _ in 0..values / ENTRY {
        let entry = unpack_entry(&mut unpacker, &ids)?;
        tokens += entry.num_tokens as usize;
        into.entries.push(entry);
    }
    into.top_width = unpack_width(&mut unpacker)?;
    unpacker.column("tokens", &mut into.tokens)?;
    unpacker.column("logprobs", &mut into.logprobs)?;
    unpacker.column("ranks", &mut into.ranks)?;
    unpacker.column("top_ids", &mut into.top_ids)?;
    unpacker.column("top_logprobs", &mut into.top_logprobs)?;
    for _ in 0..unpacker.array(1)? / PROMPT {
        into.prompt_logprobs
            .push(unpack_prompt(&mut unpacker, &ids)?);
    }
    unpacker.end()?;
    check_lengths(into, tokens)
}

fn unpack_width(unpacker: &mut Unpacker<'_>) -> Result<usize, WireError> {
    let width = unpacker.u32("alternatives")? as usize;
    if width > MOST_ALTERNATIVES {
        return Err(range("alternatives", "at most 1048576", width as u64));
    }
    Ok(width)
}

fn unpack_id(unpacker: &mut Unpacker<'_>, ids: &std::ops::Range<u64>) -> Result<u64, WireError> {
    let offset = unpacker.uint()?;
    if offset >= ids.end - ids.start {
        return Err(range("an id", "below 2^48", offset));
    }
    Ok(ids.start + offset)
}

fn unpack_prompt(
    unpacker: &mut Unpacker<'_>,
    ids: &std::ops::Range<u64>,
) -> Result<PromptLogprobs, WireError> {
    let mut prompt = PromptLogprobs {
        id: unpack_id(unpacker, ids)?,
        top_width: unpack_width(unpacker)?,
        ..PromptLogprobs::default()
    };
    unpacker.column("tokens", &mut prompt.tokens)?;
    unpacker.column("logprobs", &mut prompt.logprobs)?;
    unpacker.column("ranks", &mut prompt.ranks)?;
    unpacker.column("top_ids", &mut prompt.top_ids)?;
    unpacker.column("top_logprobs", &mut prompt.top_logprobs)?;
    let (tokens, width) = (prompt.tokens.len(), prompt.top_width);
    for (name, len, wanted) in [
        ("logprobs", prompt.logprobs.len(), tokens),
        ("ranks", prompt.ranks.len(), tokens),
        ("top_ids", prompt.top_ids.len(), tokens * width),
        ("top_logprobs", prompt.top_logprobs.len(), tokens * width),
    ] {
        if len != wanted {
            return Err(range(name, "as many as the prompt has", len as u64));
        }
    }
    Ok(prompt)
}

fn unpack_entry(
    unpacker: &mut Unpacker<'_>,
    ids: &std::ops::Range<u64>,
) -> Result<OutputEntry, WireError> {
    let id = unpack_id(unpacker, ids)?;
    let num_tokens = unpacker.u32("num_tokens")?;
    let num_logprobs = unpacker.option("num_logprobs")?;
    let cached_tokens = unpacker.u32("cached_tokens")?;
    let code = unpacker.uint()?;
    let end = if code == ERROR {
        Some(EndReason::Error(unpacker.str()?.into()))
    } else {
        let token = unpacker.u32("a token")?;
        match code {
            NONE => None,
            EOS => Some(EndReason::Eos(token)),
            STOP_TOKEN => Some(EndReason::StopToken(token)),
            LENGTH => Some(EndReason::Length),
            ABORT => Some(EndReason::Abort),
            _ => return Err(range("an end", "a code from 0 to 5", code)),
        }
    };
    if matches!(end, Some(EndReason::Eos(_) | EndReason::StopToken(_))) && num_tokens == 0 {
        return Err(range("num_tokens", "at least 1 where a token ends", 0));
    }
    Ok(OutputEntry {
        id,
        num_tokens,
        num_logprobs,
        cached_tokens,
        end,
    })
}

/// Checks that the columns are as long as the entries say.
fn check_lengths(output: &StepOutput, tokens: usize) -> Result<(), WireError> {
    let with_logprobs = if output.logprobs.is_empty() {
        0
    } else {
        tokens
    };
    for (name, len, wanted) in [
        ("tokens", output.tokens.len(), tokens),
        ("logprobs", output.logprobs.len(), with_logprobs),
        ("ranks", output.ranks.len(), with_logprobs),
        (
            "top_ids",
            output.top_ids.len(),
            with_logprobs * output.top_width,
        ),
        (
            "top_logprobs",
            output.top_logprobs.len(),
            with_logprobs * output.top_width,
        ),
    ] {
        if len != wanted {
            return Err(range(name, "as many as the entries say", len as u64));
        }
    }
    let width = output.top_width as u32;
    let wanted = output.entries.iter().filter_map(|entry| entry.num_logprobs);
    match wanted
        .max()
        .filter(|&most| with_logprobs > 0 && most > width)
    {
        Some(most) => Err(range(
            "num_logprobs",
            "at most the alternatives sent",
            most.into(),
        )),
        None => Ok(()),
    }
}

fn range(name: &'static str, limit: &'static str, value: u64) -> WireError {
    WireError::Range { name, limit, value }
}
