//! Random programs: a small scheduler that keeps the manager and the model in step.

use std::collections::HashSet;

use miniinfer_core::block::{BlockCounters, BlockId, BlockManager, ChainKey, ExtraKey, TokenHash};
use proptest::prelude::*;

use super::model::{Key, Model};

/// What a scheduler does. Requests are chosen by a number taken modulo how many there are.
#[derive(Debug, Clone)]
pub enum Operation {
    Start {
        extra: usize,
        tokens: Vec<u32>,
        whole: bool,
    },
    Append {
        request: usize,
        token: u32,
    },
    Register {
        request: usize,
        blocks: usize,
    },
    Share {
        request: usize,
    },
    Rewind {
        request: usize,
        blocks: usize,
    },
    Finish {
        request: usize,
    },
    Reset,
}

pub fn operations() -> impl Strategy<Value = Vec<Operation>> {
    use Operation::*;
    let request = 0..8_usize;
    let operation = prop_oneof![
        6 => (0..5_usize, prop::collection::vec(0..2_u32, 0..12), any::<bool>())
            .prop_map(|(extra, tokens, whole)| Start { extra, tokens, whole }),
        6 => (request.clone(), 0..2_u32).prop_map(|(request, token)| Append { request, token }),
        8 => (request.clone(), 1..4_usize).prop_map(|(request, blocks)| Register { request, blocks }),
        2 => request.clone().prop_map(|request| Share { request }),
        1 => (request.clone(), 0..3_usize).prop_map(|(request, blocks)| Rewind { request, blocks }),
        5 => request.prop_map(|request| Finish { request }),
        1 => Just(Reset),
    ];
    prop::collection::vec(operation, 1..60)
}

/// What the memory of a block would hold: the model's weights when it was computed, and all tokens up to its end.
type Content = (u64, Vec<ExtraKey>, Vec<u32>);

#[derive(Debug, Clone)]
struct Request {
    epoch: u64,
    extra: Vec<ExtraKey>,
    tokens: Vec<u32>,
    table: Vec<BlockId>,
    /// The root, then the key after each registered block; with the model's.
    keys: Vec<(ChainKey, Key)>,
}

#[derive(Debug)]
pub struct Program<H: TokenHash> {
    block_size: usize,
    manager: BlockManager<H>,
    model: Model,
    requests: Vec<Request>,
    memory: Vec<Option<Content>>,
    counters: BlockCounters,
}

fn extra_keys(number: usize) -> Vec<ExtraKey> {
    let (salt, adapter) = (ExtraKey::Salt("x".into()), ExtraKey::Adapter("x".into()));
    match number {
        0 => vec![],
        1 => vec![salt],
        2 => vec![adapter],
        3 => vec![salt, adapter],
        _ => vec![ExtraKey::Salt("y".into())],
    }
}

impl<H: TokenHash> Program<H> {
    pub fn new(num_blocks: u32, block_size: u32, hash: H) -> Self {
        Self {
            block_size: block_size as usize,
            manager: BlockManager::with_hash(num_blocks, block_size, true, hash),
            model: Model::new(num_blocks, block_size),
            requests: Vec::new(),
            memory: vec![None; num_blocks as usize],
            counters: BlockCounters::default(),
        }
    }

    /// Runs one operation on both and compares everything there is to see.
    pub fn run(&mut self, operation: &Operation) {
        let chosen = match operation {
            Operation::Append { request, .. }
            | Operation::Register { request, .. }
            | Operation::Share { request }
            | Operation::Rewind { request, .. }
            | Operation::Finish { request } => request.checked_rem(self.requests.len()),
            Operation::Start { .. } | Operation::Reset => Some(0),
        };
        let Some(chosen) = chosen else { return };
        match operation {
            Operation::Start {
                extra,
                tokens,
                whole,
            } => self.start(*extra, tokens, *whole),
            Operation::Append { token, .. } => self.append(chosen, *token),
            Operation::Register { blocks, .. } => self.register(chosen, *blocks),
            Operation::Share { .. } => self.share(chosen),
            Operation::Rewind { blocks, .. } => self.rewind(chosen, *blocks),
            Operation::Finish { .. } => self.finish(chosen),
            Operation::Reset => {
                self.manager.reset();
                self.model.reset();
            }
        }
        self.compare();
    }

    /// Ends every request: only cached and free blocks, and the roots of cached ones, may be left.
    pub fn drain(&mut self) {
        while !self.requests.is_empty() {
            self.finish(self.requests.len() - 1);
            self.compare();
        }
        assert_eq!(self.manager.num_free(), self.manager.num_blocks());
    }

    fn start(&mut self, extra: usize, tokens: &[u32], whole: bool) {
        let extra = extra_keys(extra);
        let reversed: Vec<_> = extra.iter().rev().cloned().collect();
        let root = (self.manager.root(&reversed), self.model.root(&extra));
        let spared = usize::from(!whole);
        let max_blocks = tokens.len().saturating_sub(spared) / self.block_size;

        let found = self.manager.lookup(root.0, tokens, max_blocks);
        let chain = self.model.lookup(&root.1, tokens, max_blocks);
        let free = chain
            .iter()
            .filter(|block| self.model.free.contains(block))
            .count();
        assert_eq!((found.blocks, found.free as usize), (chain.len(), free));

        let mut table = vec![];
        let (end, blocks) = self.manager.acquire(root.0, tokens, max_blocks, &mut table);
        assert_eq!((blocks, &table), (chain.len(), &chain));
        self.counters.queries_tokens += tokens.len() as u64;
        self.counters.hit_tokens += (blocks * self.block_size) as u64;
        for &block in &chain {
            self.model.take(block);
        }
        let mut keys = vec![root];
        for (&block, content) in chain.iter().zip(tokens.chunks_exact(self.block_size)) {
            // Registering a block again changes nothing and gives its key.
            let (key, same) = self
                .manager
                .register(keys[keys.len() - 1].0, block, content);
            assert_eq!(same, block);
            keys.push((key, self.model.key(block)));
        }
        assert_eq!(keys[keys.len() - 1].0, end);
        let epoch = self.model.epoch;
        let request = Request {
            epoch,
            extra,
            tokens: vec![],
            table,
            keys,
        };
        self.requests.push(request);
        self.compare();
        self.grow(self.requests.len() - 1, tokens);
    }

    fn append(&mut self, chosen: usize, token: u32) {
        self.grow(chosen, &[token]);
    }

    /// Appends tokens, if there are blocks for them, and computes what they fill.
    fn grow(&mut self, chosen: usize, tokens: &[u32]) {
        let request = &mut self.requests[chosen];
        let length = request.tokens.len() + tokens.len();
        let needed = length
            .div_ceil(self.block_size)
            .saturating_sub(request.table.len());
        let before = request.table.clone();
        let allocated = self.manager.allocate(needed, &mut request.table);
        let Some(blocks) = self.model.allocate(needed) else {
            let free = self.model.free.len() as u32;
            let error = allocated.expect_err("the model has too few blocks");
            assert_eq!(
                (error.needed, error.free, &request.table),
                (needed, free, &before)
            );
            self.finish(chosen);
            return;
        };
        assert_eq!(
            (allocated, &request.table[before.len()..]),
            (Ok(()), blocks.as_slice())
        );
        request.tokens.extend(tokens);
        for index in before.len()..request.tokens.len() / self.block_size {
            self.memory[request.table[index] as usize] =
                Some(request.content(index, self.block_size));
        }
        if let Some(last) = before.len().checked_sub(1) {
            // The block that was partly filled, or one that was found.
            let content = request.content(last, self.block_size);
            if content.2.len() == (last + 1) * self.block_size && last + 1 > request.registered() {
                self.memory[request.table[last] as usize] = Some(content);
            }
        }
    }

    fn register(&mut self, chosen: usize, blocks: usize) {
        for _ in 0..blocks {
            let request = &mut self.requests[chosen];
            let index = request.registered();
            let Some(tokens) = request.tokens.chunks_exact(self.block_size).nth(index) else {
                return;
            };
            let (block, (parent, model_parent)) =
                (request.table[index], request.keys[index].clone());
            let (key, now) = self.manager.register(parent, block, tokens);
            let (model_key, expected) = self.model.register(&model_parent, block, tokens);
            assert_eq!(now, expected);
            request.table[index] = now;
            request.keys.push((key, model_key));
            self.compare();
        }
    }

    /// A second answer to the same prompt: full blocks are shared, a partly filled one is copied.
    fn share(&mut self, chosen: usize) {
        let full = self.requests[chosen].tokens.len() / self.block_size;
        let mut twin = self.requests[chosen].clone();
        twin.table.truncate(full);
        twin.tokens.truncate(full * self.block_size);
        if self.model.resolve(&twin.keys[0].1).is_some() {
            assert_eq!(self.manager.root(&twin.extra), twin.keys[0].0);
        }
        self.manager.share(&twin.table);
        twin.table.iter().for_each(|&block| self.model.take(block));
        let rest = self.requests[chosen].tokens[full * self.block_size..].to_vec();
        self.requests.push(twin);
        self.grow(self.requests.len() - 1, &rest);
    }

    /// Takes back the last blocks, as when drafted tokens are refused.
    fn rewind(&mut self, chosen: usize, blocks: usize) {
        let request = &mut self.requests[chosen];
        let kept = request.table.len().saturating_sub(blocks);
        let gone = request.table.split_off(kept);
        request.tokens.truncate(kept * self.block_size);
        request.keys.truncate(kept + 1);
        self.manager.release(&gone);
        gone.iter()
            .rev()
            .for_each(|&block| self.model.release(block));
    }

    fn finish(&mut self, chosen: usize) {
        let request = self.requests.swap_remove(chosen);
        self.manager.release(&request.table);
        self.manager.release_root(request.keys[0].0);
        request
            .table
            .iter()
            .rev()
            .for_each(|&block| self.model.release(block));
    }

    fn compare(&mut self) {
        let tables = self.requests.iter().map(|request| request.table.as_slice());
        self.manager.check(tables).expect("a sound state");
        assert_eq!(self.manager.num_free() as usize, self.model.free.len());
        let cached = self
            .model
            .free
            .iter()
            .filter(|&&block| self.model.names[block as usize].is_some());
        assert_eq!(self.manager.num_cached_free() as usize, cached.count());
        self.counters.evictions = self.model.evictions;
        self.counters.merges = self.model.merges;
        assert_eq!(self.manager.counters(), self.counters);

        let mut roots: HashSet<&[ExtraKey]> = self.model.roots_with_children().collect();
        roots.insert(&[]);
        for request in &self.requests {
            for (key, model_key) in &request.keys {
                assert_eq!(
                    self.manager.is_current(*key),
                    self.model.resolve(model_key).is_some()
                );
            }
            if self.model.resolve(&request.keys[0].1).is_some() {
                roots.insert(&request.extra);
            }
            self.compare_memory(request);
        }
        assert_eq!(self.manager.num_roots(), roots.len());
    }

    /// Every full block that a request reads holds what the request would have computed itself.
    fn compare_memory(&self, request: &Request) {
        for index in 0..request.tokens.len() / self.block_size {
            let held = self.memory[request.table[index] as usize].as_ref();
            assert_eq!(
                held,
                Some(&request.content(index, self.block_size)),
                "block {index} of {request:?}"
            );
        }
    }
}

impl Request {
    fn registered(&self) -> usize {
        self.keys.len() - 1
    }

    fn content(&self, index: usize, block_size: usize) -> Content {
        let end = self.tokens.len().min((index + 1) * block_size);
        (self.epoch, self.extra.clone(), self.tokens[..end].to_vec())
    }
}
