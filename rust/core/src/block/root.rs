//! Where chains begin: what keeps requests with equal tokens apart.

use std::collections::HashMap;

use super::chain::ChainKey;

/// Something besides the tokens that a block's content depends on, or that a client asked to be kept apart by.
///
/// The kinds are distinct: a salt never equals an adapter of the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExtraKey {
    /// A secret of the client's: only requests with the same salt share blocks.
    Salt(String),
    /// The name of the adapter applied to the model.
    Adapter(String),
}

/// One interned set of extra keys.
#[derive(Debug)]
struct Root {
    uid: u64,
    extra: Box<[ExtraKey]>,
    /// Requests that hold the root.
    holders: u32,
    /// Indexed blocks whose parent is the root.
    children: u32,
}

/// The slot of the root for requests without extra keys; it is always there.
const DEFAULT: u32 = 0;

/// The interned sets of extra keys that a request holds or that an indexed block hangs from. Others are dropped, so
/// there are never more than requests and blocks together.
#[derive(Debug)]
pub(super) struct RootTable {
    /// Empty slots have uid 0.
    slots: Vec<Root>,
    empty: Vec<u32>,
    // The default hasher: salts come from clients, who must not be able to make them collide.
    by_extra: HashMap<Box<[ExtraKey]>, u32>,
}

impl RootTable {
    /// A table with the root for requests without extra keys, which has `uid`.
    pub(super) fn new(uid: u64) -> Self {
        let root = Root {
            uid,
            extra: Box::default(),
            holders: 1,
            children: 0,
        };
        Self {
            slots: vec![root],
            empty: Vec::new(),
            by_extra: HashMap::from([(Box::default(), DEFAULT)]),
        }
    }

    /// The root for these keys, in any order, with one more holder. A new root takes `uid`.
    pub(super) fn hold(&mut self, extra: &[ExtraKey], uid: u64) -> ChainKey {
        if extra.is_empty() {
            return ChainKey::root(DEFAULT, self.slots[DEFAULT as usize].uid);
        }
        let mut extra = extra.to_vec();
        extra.sort_unstable();
        if let Some(&slot) = self.by_extra.get(extra.as_slice()) {
            let root = &mut self.slots[slot as usize];
            root.holders += 1;
            return ChainKey::root(slot, root.uid);
        }
        let extra = extra.into_boxed_slice();
        let root = Root {
            uid,
            extra: extra.clone(),
            holders: 1,
            children: 0,
        };
        let slot = if let Some(slot) = self.empty.pop() {
            self.slots[slot as usize] = root;
            slot
        } else {
            self.slots.push(root);
            self.slots.len() as u32 - 1
        };
        self.by_extra.insert(extra, slot);
        ChainKey::root(slot, uid)
    }

    /// A holder lets go of the root in `slot`.
    pub(super) fn release(&mut self, slot: u32) {
        if slot != DEFAULT {
            let root = &mut self.slots[slot as usize];
            assert!(
                root.holders > 0,
                "root {slot} was released more often than held"
            );
            root.holders -= 1;
            self.drop_if_unused(slot);
        }
    }

    /// An indexed block now hangs from the root in `slot`.
    pub(super) fn add_child(&mut self, slot: u32) {
        self.slots[slot as usize].children += 1;
    }

    /// An indexed block no longer hangs from the root in `slot`.
    pub(super) fn remove_child(&mut self, slot: u32) {
        self.slots[slot as usize].children -= 1;
        self.drop_if_unused(slot);
    }

    /// The uid of the root in `slot`; 0 for an empty slot.
    pub(super) fn uid(&self, slot: u32) -> u64 {
        self.slots.get(slot as usize).map_or(0, |root| root.uid)
    }

    /// How many roots there are, the default one included.
    pub(super) fn len(&self) -> usize {
        self.by_extra.len()
    }

    /// Compares the table with itself and with the number of children counted in the index, given by slot.
    pub(super) fn check(&self, children: &HashMap<u32, u32>) -> Result<(), String> {
        for (slot, root) in (0..).zip(&self.slots) {
            let counted = children.get(&slot).copied().unwrap_or(0);
            if counted != root.children {
                return Err(format!(
                    "root {slot}: {} children, but {counted} are indexed",
                    root.children
                ));
            }
            let used = root.holders > 0 || root.children > 0;
            let named = self.by_extra.get(&root.extra) == Some(&slot);
            if root.uid != 0 && !(used && named)
                || root.uid == 0 && (used || !self.empty.contains(&slot))
            {
                return Err(format!(
                    "root {slot}: neither in use nor properly dropped: {root:?}"
                ));
            }
        }
        if self.slots.len() == self.by_extra.len() + self.empty.len() {
            Ok(())
        } else {
            Err(format!(
                "roots: {} slots, {} named, {} empty",
                self.slots.len(),
                self.len(),
                self.empty.len()
            ))
        }
    }

    fn drop_if_unused(&mut self, slot: u32) {
        let root = &mut self.slots[slot as usize];
        if root.holders == 0 && root.children == 0 {
            root.uid = 0;
            let extra = std::mem::take(&mut root.extra);
            self.by_extra.remove(&extra);
            self.empty.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn salt(name: &str) -> ExtraKey {
        ExtraKey::Salt(name.to_owned())
    }

    fn adapter(name: &str) -> ExtraKey {
        ExtraKey::Adapter(name.to_owned())
    }

    #[test]
    fn kinds_values_and_sets_have_their_own_root_and_order_does_not_matter() {
        let mut roots = RootTable::new(1);
        let sets = [
            vec![],
            vec![salt("x")],
            vec![adapter("x")],
            vec![salt("")],
            vec![salt("xy")],
            vec![salt("x"), adapter("y")],
            vec![salt("y"), adapter("x")],
        ];
        let keys: Vec<_> = sets
            .iter()
            .zip(1..)
            .map(|(set, uid)| roots.hold(set, uid))
            .collect();
        for (position, key) in keys.iter().enumerate() {
            assert!(
                !keys[..position].contains(key),
                "{:?} shares its root",
                sets[position]
            );
        }
        assert_eq!(roots.hold(&[adapter("y"), salt("x")], 99), keys[5]);
        assert_eq!(roots.len(), sets.len());
        roots.check(&HashMap::new()).expect("sound");
    }

    #[test]
    fn a_root_lives_as_long_as_its_holders_and_children() {
        let mut roots = RootTable::new(1);
        roots.hold(&[salt("x")], 2);
        roots.hold(&[salt("x")], 3);
        roots.add_child(1);
        roots.release(1);
        roots.release(1);
        assert_eq!((roots.uid(1), roots.len()), (2, 2));
        roots.remove_child(1);
        assert_eq!((roots.uid(1), roots.len()), (0, 1));
        roots.check(&HashMap::new()).expect("sound");
        assert_eq!(
            roots.hold(&[salt("y")], 4),
            ChainKey::root(1, 4),
            "the slot is used again, with a new uid"
        );
    }

    #[test]
    fn many_salts_leave_nothing_behind() {
        let mut roots = RootTable::new(1);
        for number in 0..10_000 {
            roots.hold(&[salt(&number.to_string())], number + 2);
            roots.release(1);
        }
        assert_eq!((roots.len(), roots.slots.len()), (1, 2));
    }
}
