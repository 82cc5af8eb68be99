//! Whole-state verification.

use super::hash::TokenHash;
use super::{BlockId, BlockManager};

impl<H: TokenHash> BlockManager<H> {
    /// Verifies the whole state, given every block table in existence: each block is free or in use, its reference
    /// count is its number of occurrences in the tables, the free list is well formed and hands out cached blocks last,
    /// and the index agrees with itself, with the roots and with the counts. Says what is wrong first.
    ///
    /// It takes time and memory in proportion to the number of blocks: it is for tests.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a [BlockId]>) -> Result<(), String> {
        self.check_references(tables)?;
        self.check_free_list()?;
        let children = self.index.check(self.next_uid)?;
        self.roots.check(&children)
    }

    fn check_references<'a>(
        &self,
        tables: impl Iterator<Item = &'a [BlockId]>,
    ) -> Result<(), String> {
        let mut occurrences = vec![0_u32; self.num_blocks() as usize];
        for &block in tables.flatten() {
            let Some(count) = occurrences.get_mut(block as usize) else {
                return Err(format!(
                    "tables: block {block} does not exist; there are {}",
                    self.num_blocks()
                ));
            };
            *count += 1;
        }
        for (block, &occurrences) in (0..).zip(&occurrences) {
            let references = self.pool.references(block);
            if references != occurrences {
                return Err(format!(
                    "block {block}: {references} references, but in tables {occurrences} times"
                ));
            }
        }
        let used = occurrences.iter().filter(|&&count| count > 0).count();
        if used + self.num_free() as usize == occurrences.len() {
            Ok(())
        } else {
            Err(format!(
                "blocks: {used} used and {} free, of {}",
                self.num_free(),
                occurrences.len()
            ))
        }
    }

    fn check_free_list(&self) -> Result<(), String> {
        let list = self.pool.free_list()?;
        if let Some(block) = list.iter().find(|&&block| self.pool.references(block) > 0) {
            return Err(format!("free list: block {block} is in use"));
        }
        let plain = list
            .iter()
            .take_while(|&&block| !self.index.contains(block))
            .count();
        let cached = list
            .iter()
            .filter(|&&block| self.index.contains(block))
            .count();
        if plain + cached != list.len() {
            return Err(format!(
                "free list: a cached block stands before one that is not: {list:?}"
            ));
        }
        if cached == self.cached_free as usize {
            Ok(())
        } else {
            Err(format!(
                "free list: {cached} cached blocks, but {} are counted",
                self.cached_free
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::block::{BlockManager, ChainKey};

    type Damage = fn(&mut BlockManager, &mut Vec<u32>);

    /// Blocks 0 and 1 cached and free, 2 in use and cached, 3 in use, 4 free.
    fn filled() -> (BlockManager, Vec<u32>) {
        let mut manager = BlockManager::new(5, 1, true);
        let mut table = Vec::new();
        manager.allocate(4, &mut table).expect("enough blocks");
        let root = manager.root(&[]);
        for block in 0..3 {
            manager.register(root, block, &[block]);
        }
        manager.release(&table[..2]);
        (manager, table.split_off(2))
    }

    #[test]
    fn a_sound_state_passes() {
        let (manager, table) = filled();
        manager
            .check([table.as_slice()].into_iter())
            .expect("sound");
        assert_eq!((manager.num_free(), manager.num_cached_free()), (3, 2));
    }

    #[test]
    fn damage_is_found() {
        let damage: [(&str, Damage); 7] = [
            ("block 5 does not exist; there are 5", |_, table| {
                table.push(5);
            }),
            (
                "block 3: 1 references, but in tables 0 times",
                |_, table| table.truncate(1),
            ),
            (
                "block 2: 1 references, but in tables 2 times",
                |_, table| table.push(2),
            ),
            ("2 cached blocks, but 1 are counted", |manager, _| {
                manager.cached_free = 1;
            }),
            ("stands before one that is not", |manager, _| {
                manager.index.remove(0);
            }),
            ("root 0: 4 children, but 3 are indexed", |manager, _| {
                manager.roots.add_child(0);
            }),
            ("the next is 3", |manager, _| manager.next_uid = 3),
        ];
        for (message, damage) in damage {
            let (mut manager, mut table) = filled();
            damage(&mut manager, &mut table);
            let found = manager
                .check([table.as_slice()].into_iter())
                .expect_err("damaged");
            assert!(found.contains(message), "{message}: {found}");
        }
    }

    #[test]
    fn a_detached_key_is_never_current() {
        let (manager, _) = filled();
        assert!(!manager.is_current(ChainKey::DETACHED));
    }
}
