//! The grammars that were compiled last.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::compiler::CompiledGrammar;
use super::spec::GrammarSpec;

/// Grammars that are kept: a service uses few, and one takes up to some megabytes.
const CAPACITY: usize = 64;

/// Compiled grammars by what was asked for; the one that was not used for longest makes room.
#[derive(Default)]
pub(super) struct GrammarCache {
    entries: FxHashMap<GrammarSpec, Entry>,
    uses: u64,
}

struct Entry {
    last_use: u64,
    grammar: Arc<CompiledGrammar>,
}

impl GrammarCache {
    pub(super) fn get(&mut self, spec: &GrammarSpec) -> Option<Arc<CompiledGrammar>> {
        self.uses += 1;
        let entry = self.entries.get_mut(spec)?;
        entry.last_use = self.uses;
        Some(entry.grammar.clone())
    }

    pub(super) fn insert(&mut self, spec: GrammarSpec, grammar: Arc<CompiledGrammar>) {
        self.uses += 1;
        let last_use = self.uses;
        self.entries.insert(spec, Entry { last_use, grammar });
        if self.entries.len() > CAPACITY {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_use);
            let oldest = oldest.map(|(spec, _)| spec.clone());
            self.entries
                .remove(&oldest.expect("invariant: more than none"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::spec::{GrammarSource, Whitespace};
    use super::super::testing;
    use super::*;

    fn choice(number: usize) -> GrammarSpec {
        GrammarSpec {
            source: GrammarSource::Choice(vec![number.to_string()]),
            whitespace: Whitespace::Bounded,
        }
    }

    #[test]
    fn the_grammar_that_was_not_used_for_longest_makes_room() {
        let compiler = testing::byte_compiler();
        let grammar = compiler.compile(&choice(0)).expect("a grammar");
        let mut cache = GrammarCache::default();
        for number in 0..CAPACITY {
            cache.insert(choice(number), grammar.clone());
        }
        assert!(cache.get(&choice(0)).is_some());
        cache.insert(choice(CAPACITY), grammar);
        assert!(cache.get(&choice(1)).is_none());
        for kept in [0, 2, CAPACITY] {
            assert!(cache.get(&choice(kept)).is_some(), "{kept}");
        }
    }
}
