//! Messages to an engine on the wire: a type, which is a frame of its own, and what it says.

use std::time::{Duration, Instant};

use super::client_ids;
use super::error::WireError;
use super::limits::{Compile, pack_limits, unpack_limits};
use super::pack::Packer;
use super::unpack::Unpacker;
use crate::block::ExtraKey;
use crate::engine::Command;
use crate::request::{Arrival, MAX_CHOICES, NewRequest, RequestId, SamplingSpec};

/// A new request.
pub const ADD: u8 = 0;
/// Ids to cancel.
pub const CANCEL: u8 = 1;
/// Ids in whose text a stop string was found.
pub const STOP: u8 = 2;
/// Ids whose readers are behind.
pub const PAUSE: u8 = 3;
/// Ids whose readers have caught up.
pub const RESUME: u8 = 4;
/// Forget all cached prefixes.
pub const RESET: u8 = 5;

const KNOWN: &str = "0 (add), 1 (cancel), 2 (stop), 3 (pause), 4 (resume), 5 (reset)";

/// Values of a request; with a change here comes another number of the protocol.
const REQUEST: usize = 10;
const SAMPLING: usize = 15;

// Kinds of extra keys.
const SALT: u64 = 0;
const ADAPTER: u64 = 1;

/// A message: its type and what it says.
pub type Message = (u8, Vec<u8>);

/// Writes commands of a client in their order; ids of one kind in a row go together.
///
/// Drafts are the engine's own business and have no form here; neither has the end of a whole client, which its
/// engine sees for itself.
pub fn pack_commands(commands: impl IntoIterator<Item = Command>, client: u16) -> Vec<Message> {
    let base = client_ids(client).start;
    let mut messages: Vec<Message> = Vec::new();
    let mut row: Option<(u8, Vec<RequestId>)> = None;
    let now = Instant::now();
    for command in commands {
        let kind = match &command {
            Command::Cancel(_) => CANCEL,
            Command::Stop(_) => STOP,
            Command::Pause(_) => PAUSE,
            Command::Resume(_) => RESUME,
            Command::ResetPrefixCache => RESET,
            Command::Add { .. } => ADD,
            Command::Draft(..) | Command::CancelRange(_) => continue,
        };
        match command {
            Command::Cancel(id) | Command::Stop(id) | Command::Pause(id) | Command::Resume(id) => {
                match &mut row {
                    Some((same, ids)) if *same == kind => ids.push(id - base),
                    _ => messages.extend(row.replace((kind, vec![id - base])).map(pack_ids)),
                }
            }
            other => {
                messages.extend(row.take().map(pack_ids));
                let mut bytes = Vec::new();
                if let Command::Add {
                    first,
                    request,
                    arrival,
                } = other
                {
                    let age = now.saturating_duration_since(arrival.time);
                    pack_request(first - base, &request, age, &mut bytes);
                }
                messages.push((kind, bytes));
            }
        }
    }
    messages.extend(row.map(pack_ids));
    messages
}

fn pack_ids((kind, ids): (u8, Vec<RequestId>)) -> Message {
    let mut bytes = Vec::new();
    let mut packer = Packer(&mut bytes);
    packer.array(ids.len());
    for id in ids {
        packer.uint(id);
    }
    (kind, bytes)
}

fn pack_request(first: RequestId, request: &NewRequest, age: Duration, into: &mut Vec<u8>) {
    let mut packer = Packer(into);
    packer.array(REQUEST);
    packer.uint(first);
    packer.uint(age.as_micros().try_into().unwrap_or(u64::MAX));
    packer.uint(request.n.into());
    packer.int(request.priority.into());
    packer.str(&request.tenant);
    packer.array(2 * request.extra_keys.len());
    for key in &request.extra_keys {
        let (kind, text) = match key {
            ExtraKey::Salt(salt) => (SALT, salt),
            ExtraKey::Adapter(name) => (ADAPTER, name),
        };
        packer.uint(kind);
        packer.str(text);
    }
    pack_sampling(&request.sampling, &mut packer);
    packer.column(request.prompt.iter());
    pack_limits(&request.limits, &mut packer);
    packer.option(request.num_prompt_logprobs);
}

fn pack_sampling(sampling: &SamplingSpec, packer: &mut Packer<'_>) {
    packer.array(SAMPLING);
    packer.f32(sampling.temperature);
    packer.uint(sampling.top_k.into());
    packer.f32(sampling.top_p);
    packer.f32(sampling.min_p);
    packer.uint(sampling.seed);
    packer.option(sampling.num_logprobs);
    packer.uint(sampling.min_tokens.into());
    packer.bool(sampling.ignore_eos);
    packer.column(sampling.stop_token_ids.iter());
    packer.f32(sampling.presence_penalty);
    packer.f32(sampling.frequency_penalty);
    packer.f32(sampling.repetition_penalty);
    packer.option(sampling.max_tokens);
    let (tokens, biases): (Vec<u32>, Vec<f32>) = sampling.logit_bias.iter().copied().unzip();
    packer.column(tokens.iter());
    packer.column(biases.iter());
}

/// Reads a message of a client: the commands it stands for. `compile` makes grammars of what came through.
///
/// A request is as the client has sent it; its host checks whether it can run.
pub fn unpack_message(
    kind: u8,
    bytes: &[u8],
    client: u16,
    compile: &Compile<'_>,
) -> Result<Vec<Command>, WireError> {
    let make: fn(RequestId) -> Command = match kind {
        ADD => return unpack_request(bytes, client, compile).map(|command| vec![command]),
        RESET => {
            Unpacker::new(bytes).end()?;
            return Ok(vec![Command::ResetPrefixCache]);
        }
        CANCEL => Command::Cancel,
        STOP => Command::Stop,
        PAUSE => Command::Pause,
        RESUME => Command::Resume,
        _ => {
            let value = kind.into();
            return Err(WireError::Unknown {
                name: "the type of a message",
                known: KNOWN,
                value,
            });
        }
    };
    let mut unpacker = Unpacker::new(bytes);
    let count = unpacker.array(1)?;
    let commands: Result<Vec<_>, _> = (0..count)
        .map(|_| id(unpacker.uint()?, client, 1).map(make))
        .collect();
    unpacker.end()?;
    commands
}

/// The id that is `offset` into a client's, followed by others up to `count` in all.
fn id(offset: u64, client: u16, count: u32) -> Result<RequestId, WireError> {
    let ids = client_ids(client);
    if offset.saturating_add(count.into()) > ids.end - ids.start {
        return Err(WireError::Range {
            name: "an id",
            limit: "below 2^48",
            value: offset,
        });
    }
    Ok(ids.start + offset)
}

fn unpack_request(bytes: &[u8], client: u16, compile: &Compile<'_>) -> Result<Command, WireError> {
    let mut unpacker = Unpacker::new(bytes);
    let u = &mut unpacker;
    u.fields("a request", REQUEST)?;
    let first = u.uint()?;
    let age = Duration::from_micros(u.uint()?);
    let n = u.u32("n")?;
    let first = id(first, client, n.min(MAX_CHOICES))?;
    let priority = u.i32("priority")?;
    let tenant = u.str()?.into();
    let extra_keys = unpack_extra_keys(u)?;
    let sampling = unpack_sampling(u)?;
    let mut prompt = Vec::new();
    u.column("prompt", &mut prompt)?;
    let limits = unpack_limits(u, compile)?;
    let num_prompt_logprobs = u.option("prompt_logprobs")?;
    unpacker.end()?;
    let now = Instant::now();
    let request = NewRequest {
        prompt,
        sampling,
        limits,
        n,
        priority,
        tenant,
        extra_keys,
        num_prompt_logprobs,
    };
    Ok(Command::Add {
        first,
        request: Box::new(request),
        arrival: Arrival {
            time: now.checked_sub(age).unwrap_or(now),
        },
    })
}

fn unpack_extra_keys(u: &mut Unpacker<'_>) -> Result<Vec<ExtraKey>, WireError> {
    let values = u.array(1)?;
    let mut keys = Vec::new();
    for _ in 0..values / 2 {
        keys.push(match u.uint()? {
            SALT => ExtraKey::Salt(u.str()?.into()),
            ADAPTER => ExtraKey::Adapter(u.str()?.into()),
            value => {
                return Err(WireError::Unknown {
                    name: "the kind of an extra key",
                    known: "0 (salt), 1 (adapter)",
                    value,
                });
            }
        });
    }
    Ok(keys)
}

fn unpack_sampling(u: &mut Unpacker<'_>) -> Result<SamplingSpec, WireError> {
    u.fields("sampling parameters", SAMPLING)?;
    let mut sampling = SamplingSpec {
        temperature: u.f32()?,
        top_k: u.u32("top_k")?,
        top_p: u.f32()?,
        min_p: u.f32()?,
        seed: u.uint()?,
        num_logprobs: u.option("logprobs")?,
        min_tokens: u.u32("min_tokens")?,
        ignore_eos: u.bool()?,
        ..SamplingSpec::default()
    };
    u.column("stop_token_ids", &mut sampling.stop_token_ids)?;
    sampling.presence_penalty = u.f32()?;
    sampling.frequency_penalty = u.f32()?;
    sampling.repetition_penalty = u.f32()?;
    sampling.max_tokens = u.option("max_tokens")?;
    let (mut tokens, mut biases) = (Vec::<u32>::new(), Vec::<f32>::new());
    u.column("logit_bias", &mut tokens)?;
    u.column("logit_bias", &mut biases)?;
    if tokens.len() != biases.len() {
        return Err(WireError::Range {
            name: "logit_bias",
            limit: "as many biases as tokens",
            value: biases.len() as u64,
        });
    }
    sampling.logit_bias = tokens.into_iter().zip(biases).collect();
    Ok(sampling)
}
