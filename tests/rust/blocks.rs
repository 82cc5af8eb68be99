//! KV blocks and the prefix cache, seen from outside.

#[path = "blocks/model.rs"]
mod model;
#[path = "blocks/program.rs"]
mod program;

use miniinfer_core::block::{
    BlockCounters, BlockId, BlockManager, ChainKey, ExtraKey, FoldedHash, OutOfBlocks, PrefixMatch,
    TokenHash,
};
use program::{Program, operations};
use proptest::prelude::*;

/// Every block in one bucket.
#[derive(Debug)]
struct Constant;

impl TokenHash for Constant {
    fn hash(&self, _: u64, _: &[u32]) -> u64 {
        u64::MAX
    }
}

/// The same for all parents, and for half of the contents.
#[derive(Debug)]
struct OneBit;

impl TokenHash for OneBit {
    fn hash(&self, _: u64, tokens: &[u32]) -> u64 {
        u64::from(tokens[0]) << 63
    }
}

fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = std::env::var_os("PROPTEST_CASES").map_or(500, |_| default.cases);
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..default
    }
}

fn run<H: TokenHash>(mut program: Program<H>, operations: &[program::Operation]) {
    for operation in operations {
        program.run(operation);
    }
    program.drain();
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_manager_does_what_the_model_does(
        num_blocks in 0..14_u32,
        block_size in 1..4_u32,
        operations in operations(),
    ) {
        run(Program::new(num_blocks, block_size, FoldedHash::default()), &operations);
        run(Program::new(num_blocks, block_size, Constant), &operations);
        run(Program::new(num_blocks, block_size, OneBit), &operations);
    }
}

/// A request that computed `tokens` from nothing and registered its full blocks.
fn fill<H: TokenHash>(
    manager: &mut BlockManager<H>,
    root: ChainKey,
    tokens: &[u32],
) -> Vec<BlockId> {
    let size = manager.block_size() as usize;
    let mut table = vec![];
    manager
        .allocate(tokens.len().div_ceil(size), &mut table)
        .expect("enough blocks");
    let mut key = root;
    for (block, content) in table.iter_mut().zip(tokens.chunks_exact(size)) {
        (key, *block) = manager.register(key, *block, content);
    }
    table
}

fn sound<'a, H: TokenHash>(
    manager: &BlockManager<H>,
    tables: impl IntoIterator<Item = &'a Vec<BlockId>>,
) {
    manager
        .check(tables.into_iter().map(Vec::as_slice))
        .expect("a sound state");
}

fn salt(name: &str) -> ExtraKey {
    ExtraKey::Salt(name.to_owned())
}

#[test]
fn one_token_of_a_cached_prompt_is_left_to_compute() {
    let mut manager = BlockManager::new(8, 16, true);
    let root = manager.root(&[]);
    let prompt: Vec<u32> = (0..33).collect();
    let table = fill(&mut manager, root, &prompt[..32]);
    manager.release(&table);
    let limit = |tokens: &[u32]| (tokens.len() - 1) / 16;

    let mut again = vec![];
    let (_, blocks) = manager.acquire(root, &prompt[..32], limit(&prompt[..32]), &mut again);
    assert_eq!(
        (blocks, &again),
        (1, &table[..1].to_vec()),
        "16 of 32 tokens, not 32"
    );
    let mut longer = vec![];
    let (_, blocks) = manager.acquire(root, &prompt, limit(&prompt), &mut longer);
    assert_eq!((blocks, &longer), (2, &table), "32 of 33 tokens");
    let counters = manager.counters();
    assert_eq!((counters.queries_tokens, counters.hit_tokens), (65, 48));
    sound(&manager, [&again, &longer]);
}

#[test]
fn a_lookup_says_what_acquiring_takes_and_changes_nothing() {
    let mut manager = BlockManager::new(4, 2, true);
    let root = manager.root(&[]);
    let prompt = [1, 2, 3, 4, 5, 6, 7];
    let table = fill(&mut manager, root, &prompt);
    manager.release(&table[1..]);
    let before = manager.counters();
    assert_eq!(
        manager.lookup(root, &prompt, 9),
        PrefixMatch { blocks: 3, free: 2 }
    );
    assert_eq!(
        manager.lookup(root, &prompt, 2),
        PrefixMatch { blocks: 2, free: 1 }
    );
    assert_eq!(manager.lookup(root, &prompt, 0), PrefixMatch::default());
    assert_eq!(
        manager.lookup(root, &prompt[..1], 9),
        PrefixMatch::default()
    );
    assert_eq!(manager.lookup(root, &[], 9), PrefixMatch::default());
    assert_eq!(
        manager.lookup(root, &[1, 2, 3, 9], 9),
        PrefixMatch { blocks: 1, free: 0 }
    );
    assert_eq!((manager.num_free(), manager.num_cached_free()), (3, 2));
    assert_eq!(manager.counters(), before);
    manager.acquire(root, &prompt, 3, &mut vec![]);
    assert_eq!((manager.num_free(), manager.num_cached_free()), (1, 0));
}

#[test]
fn a_chain_loses_its_tail_first_and_the_oldest_chain_goes_first() {
    let mut manager = BlockManager::new(6, 1, true);
    let root = manager.root(&[]);
    let old = fill(&mut manager, root, &[1, 2, 3]);
    let new = fill(&mut manager, root, &[4, 5]);
    manager.release(&old);
    manager.release(&new);
    let cached = |manager: &BlockManager| {
        [&[1, 2, 3][..], &[4, 5]].map(|tokens| manager.lookup(root, tokens, 9).blocks)
    };
    let mut table = vec![];
    for (evictions, expected) in (0..).zip([[3, 2], [2, 2], [1, 2], [0, 2], [0, 1], [0, 0]]) {
        manager.allocate(1, &mut table).expect("a free block");
        assert_eq!(
            (cached(&manager), manager.counters().evictions),
            (expected, evictions)
        );
    }
    assert_eq!(table, [5, old[2], old[1], old[0], new[1], new[0]]);
    sound(&manager, [&table]);
}

#[test]
fn what_is_used_again_is_kept_longer() {
    let mut manager = BlockManager::new(3, 1, true);
    let root = manager.root(&[]);
    for token in 0..3 {
        let table = fill(&mut manager, root, &[token]);
        manager.release(&table);
    }
    let mut table = vec![];
    manager.acquire(root, &[0], 1, &mut table);
    manager.release(&table);
    manager.allocate(2, &mut vec![]).expect("three are free");
    assert_eq!(manager.lookup(root, &[0], 1).blocks, 1);
}

#[test]
fn extra_keys_isolate_equal_prompts_and_the_order_of_keys_does_not() {
    let mut manager = BlockManager::new(16, 2, true);
    let sets = [
        vec![],
        vec![salt("x")],
        vec![salt("")],
        vec![ExtraKey::Adapter("x".into())],
        vec![salt("x"), ExtraKey::Adapter("x".into())],
    ];
    let mut tables = vec![];
    for extra in &sets {
        let root = manager.root(extra);
        assert_eq!(
            manager.lookup(root, &[1, 2, 3, 4], 2).blocks,
            0,
            "{extra:?}"
        );
        tables.push(fill(&mut manager, root, &[1, 2, 3, 4]));
    }
    let reversed: Vec<_> = sets[4].iter().rev().cloned().collect();
    let root = manager.root(&reversed);
    let mut table = vec![];
    manager.acquire(root, &[1, 2, 3, 4], 2, &mut table);
    assert_eq!(table, tables[4]);
    assert_eq!(manager.counters().merges, 0);
}

#[test]
fn a_salt_is_forgotten_with_its_last_block() {
    let mut manager = BlockManager::new(4, 2, true);
    for number in 0..1000 {
        let root = manager.root(&[salt(&number.to_string())]);
        let table = fill(&mut manager, root, &[1, 2]);
        manager.release(&table);
        manager.release_root(root);
        manager.release_root(ChainKey::DETACHED);
        assert!(
            manager.num_roots() <= 1 + 4,
            "{} roots",
            manager.num_roots()
        );
    }
    let mut table = vec![];
    manager.allocate(4, &mut table).expect("all are free");
    assert_eq!(manager.num_roots(), 1);
    sound(&manager, [&table]);
}

#[test]
fn identical_blocks_are_merged_and_the_surplus_one_is_free_at_once() {
    let mut manager = BlockManager::new(5, 2, true);
    let root = manager.root(&[]);
    let first = fill(&mut manager, root, &[1, 2, 3, 4]);
    let second = fill(&mut manager, root, &[1, 2, 3, 4]);
    assert_eq!(first, second);
    assert_eq!((manager.num_free(), manager.counters().merges), (3, 2));
    sound(&manager, [&first, &second]);
    // The cached one may be free: it is taken from the list.
    manager.release(&first);
    manager.release(&second);
    assert_eq!((manager.num_free(), manager.num_cached_free()), (5, 2));
    let third = fill(&mut manager, root, &[1, 2, 9, 9]);
    assert_eq!(
        (third[0], manager.num_free(), manager.num_cached_free()),
        (first[0], 3, 1)
    );
    sound(&manager, [&third]);
}

#[test]
fn a_collision_never_serves_other_content() {
    let mut manager = BlockManager::with_hash(64, 2, true, Constant);
    let root = manager.root(&[]);
    let prompts: Vec<[u32; 4]> = (0..16)
        .map(|bits| [bits & 1, bits >> 1 & 1, bits >> 2 & 1, bits >> 3])
        .collect();
    let tables: Vec<_> = prompts
        .iter()
        .map(|prompt| fill(&mut manager, root, prompt))
        .collect();
    for (prompt, table) in prompts.iter().zip(&tables) {
        let mut found = vec![];
        manager.acquire(root, prompt, 2, &mut found);
        assert_eq!(&found, table);
        manager.release(&found);
        assert_eq!(
            manager
                .lookup(root, &[prompt[0], prompt[1], 7, 7], 2)
                .blocks,
            1
        );
    }
    assert_eq!(
        manager.num_blocks() - manager.num_free(),
        4 + 16,
        "heads are shared, tails are not"
    );
    sound(&manager, &tables);
}

#[test]
fn a_reset_forgets_everything_and_kills_every_key() {
    let mut manager = BlockManager::new(4, 1, true);
    let (plain, salted) = (manager.root(&[]), manager.root(&[salt("x")]));
    let running = fill(&mut manager, plain, &[1, 2]);
    let (end, _) = manager.register(plain, running[0], &[1]);
    let finished = fill(&mut manager, salted, &[1]);
    manager.release(&finished);
    manager.reset();
    assert_eq!(
        (
            manager.num_free(),
            manager.num_cached_free(),
            manager.num_roots()
        ),
        (2, 0, 1)
    );
    for key in [plain, salted, end] {
        assert!(!manager.is_current(key));
        assert_eq!(manager.lookup(key, &[1, 2], 2).blocks, 0);
        assert_eq!(
            manager.register(key, running[1], &[2]),
            (ChainKey::DETACHED, running[1])
        );
        manager.release_root(key);
    }
    let fresh = manager.root(&[]);
    assert_eq!(manager.lookup(fresh, &[1, 2], 2).blocks, 0);
    let table = fill(&mut manager, fresh, &[1, 2]);
    manager.release(&running);
    assert_eq!(manager.lookup(fresh, &[1, 2], 2).blocks, 2);
    sound(&manager, [&table]);
    assert_eq!(manager.counters().evictions, 0);
}

#[test]
fn too_large_an_allocation_takes_nothing() {
    let mut manager = BlockManager::new(3, 16, true);
    let mut table = vec![7];
    let error = manager.allocate(4, &mut table).expect_err("three are free");
    assert_eq!(error, OutOfBlocks { needed: 4, free: 3 });
    assert_eq!(
        error.to_string(),
        "4 KV blocks are needed, but only 3 are free"
    );
    assert_eq!((table.as_slice(), manager.num_free()), (&[7][..], 3));
    assert_eq!(
        manager
            .allocate(usize::MAX, &mut table)
            .expect_err("never")
            .needed,
        usize::MAX
    );
    manager
        .allocate(0, &mut table)
        .expect("nothing is always there");
    manager.allocate(3, &mut table).expect("three are free");
    assert_eq!(table, [7, 0, 1, 2]);
}

#[test]
fn without_caching_nothing_is_found_or_counted() {
    let mut manager = BlockManager::new(4, 2, false);
    let root = manager.root(&[salt("x")]);
    assert_eq!(root, ChainKey::DETACHED);
    let table = fill(&mut manager, root, &[1, 2, 3, 4]);
    assert_eq!(
        manager.register(root, table[0], &[1, 2]),
        (ChainKey::DETACHED, table[0])
    );
    let mut found = vec![];
    assert_eq!(
        manager.acquire(root, &[1, 2], 1, &mut found),
        (ChainKey::DETACHED, 0)
    );
    manager.release(&table);
    manager.release_root(root);
    manager.reset();
    assert_eq!((manager.num_free(), manager.num_cached_free()), (4, 0));
    assert_eq!(manager.counters(), BlockCounters::default());
    sound(&manager, [&found]);
}

#[test]
fn misuse_is_refused_by_name() {
    let refused = |misuse: fn(&mut BlockManager)| {
        let caught = std::panic::catch_unwind(|| misuse(&mut BlockManager::new(2, 2, true)));
        let payload = caught.expect_err("misuse");
        let text = payload.downcast_ref::<String>().cloned();
        text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
            .expect("a message")
    };
    let message = refused(|manager| manager.release(&[1]));
    assert_eq!(message, "block 1 was released more often than taken");
    assert_eq!(
        refused(|manager| manager.share(&[0])),
        "block 0 was shared while free"
    );
    let message = refused(|manager| {
        let root = manager.root(&[]);
        manager.register(root, 0, &[1, 2]);
    });
    assert_eq!(message, "block 0 was registered while free");
    let message = refused(|manager| {
        manager.register(ChainKey::DETACHED, 0, &[1]);
    });
    assert_eq!(
        message,
        "block 0 was registered with 1 tokens; a full block has 2"
    );
    let message = refused(|_| drop(BlockManager::new(1, 0, true)));
    assert_eq!(message, "block_size is 0; it must be at least 1");
    let message = refused(|_| drop(BlockManager::new(u32::MAX, 1, false)));
    assert_eq!(
        message,
        "num_blocks is 4294967295; it must be at most 2147483648"
    );
}
