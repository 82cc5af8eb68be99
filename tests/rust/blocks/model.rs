//! The block manager as one would write it without a thought for speed.

use miniinfer_core::block::{BlockId, ExtraKey};

/// What a cached block holds, from the first token of its chain to its own last.
///
/// When a block is evicted, what hangs below it can no longer be reached from the root, even if the same block is cached
/// again later: it goes on under another `life`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    life: u64,
    extra: Vec<ExtraKey>,
    tokens: Vec<u32>,
}

/// The model's counterpart of a chain key.
#[derive(Debug, Clone)]
pub enum Key {
    Root { epoch: u64, extra: Vec<ExtraKey> },
    Block { block: BlockId, birth: u64 },
    Dead,
}

#[derive(Debug)]
pub struct Model {
    block_size: usize,
    pub references: Vec<u32>,
    /// Front first.
    pub free: Vec<BlockId>,
    pub names: Vec<Option<Name>>,
    births: Vec<u64>,
    clock: u64,
    pub epoch: u64,
    pub evictions: u64,
    pub merges: u64,
}

impl Model {
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        Self {
            block_size: block_size as usize,
            references: vec![0; num_blocks as usize],
            free: (0..num_blocks).collect(),
            names: vec![None; num_blocks as usize],
            births: vec![0; num_blocks as usize],
            clock: 0,
            epoch: 0,
            evictions: 0,
            merges: 0,
        }
    }

    pub fn root(&self, extra: &[ExtraKey]) -> Key {
        Key::Root {
            epoch: self.epoch,
            extra: extra.to_vec(),
        }
    }

    /// The name a key stands for, while there is one.
    pub fn resolve(&self, key: &Key) -> Option<Name> {
        match key {
            Key::Root { epoch, extra } => (*epoch == self.epoch).then(|| Name {
                life: 0,
                extra: extra.clone(),
                tokens: Vec::new(),
            }),
            &Key::Block { block, birth } => {
                let name = self.names[block as usize].clone();
                name.filter(|_| self.births[block as usize] == birth)
            }
            Key::Dead => None,
        }
    }

    /// The cached blocks below a key, in order.
    pub fn lookup(&self, root: &Key, tokens: &[u32], max_blocks: usize) -> Vec<BlockId> {
        let Some(mut name) = self.resolve(root) else {
            return Vec::new();
        };
        let mut chain = Vec::new();
        for content in tokens.chunks_exact(self.block_size).take(max_blocks) {
            name.tokens.extend(content);
            let Some(block) = self.find(&name) else { break };
            chain.push(block);
        }
        chain
    }

    pub fn key(&self, block: BlockId) -> Key {
        Key::Block {
            block,
            birth: self.births[block as usize],
        }
    }

    pub fn take(&mut self, block: BlockId) {
        self.references[block as usize] += 1;
        self.free.retain(|&free| free != block);
    }

    pub fn release(&mut self, block: BlockId) {
        self.references[block as usize] -= 1;
        if self.references[block as usize] == 0 {
            let place = match self.names[block as usize] {
                Some(_) => self.free.len(),
                None => 0,
            };
            self.free.insert(place, block);
        }
    }

    pub fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let blocks = self.free.get(..count)?.to_vec();
        for &block in &blocks {
            self.evictions += u64::from(self.names[block as usize].is_some());
            self.forget(block);
            self.take(block);
        }
        Some(blocks)
    }

    pub fn register(&mut self, parent: &Key, block: BlockId, tokens: &[u32]) -> (Key, BlockId) {
        let Some(mut name) = self.resolve(parent) else {
            return (Key::Dead, block);
        };
        name.tokens.extend(tokens);
        if let Some(cached) = self.find(&name) {
            if cached != block {
                self.take(cached);
                self.release(block);
                self.merges += 1;
            }
            return (self.key(cached), cached);
        }
        self.forget(block);
        self.clock += 1;
        self.births[block as usize] = self.clock;
        self.names[block as usize] = Some(name);
        (self.key(block), block)
    }

    pub fn reset(&mut self) {
        self.names.fill(None);
        self.epoch += 1;
    }

    /// The extra keys of all roots that a cached block hangs from.
    pub fn roots_with_children(&self) -> impl Iterator<Item = &[ExtraKey]> {
        let children = self.names.iter().flatten();
        children
            .filter(|name| name.tokens.len() == self.block_size)
            .map(|name| name.extra.as_slice())
    }

    fn find(&self, name: &Name) -> Option<BlockId> {
        let place = self
            .names
            .iter()
            .position(|known| known.as_ref() == Some(name));
        place.map(|block| block as BlockId)
    }

    fn forget(&mut self, block: BlockId) {
        let Some(gone) = self.names[block as usize].take() else {
            return;
        };
        self.clock += 1;
        for name in self.names.iter_mut().flatten() {
            let below = name.tokens.starts_with(&gone.tokens) && name.extra == gone.extra;
            if below && name.life == gone.life {
                name.life = self.clock;
            }
        }
    }
}
