//! Reference counts and the free list.

use super::BlockId;

/// A block's place in the free list, and how many tables hold it. Linked exactly while `references` is 0.
#[derive(Debug, Clone, Copy)]
struct Node {
    previous: u32,
    next: u32,
    references: u32,
}

/// All blocks, and one doubly linked list through those that nobody holds.
///
/// The links live in an array beside the counts: a block leaves the middle of the list in constant time, and nothing is
/// allocated after construction. The last node is a sentinel: its `next` is the front of the list (handed out next),
/// its `previous` the back (handed out last).
#[derive(Debug)]
pub(super) struct BlockPool {
    nodes: Box<[Node]>,
    free: u32,
}

impl BlockPool {
    /// `num_blocks` free blocks, lowest number in front.
    pub(super) fn new(num_blocks: u32) -> Self {
        let ring = u64::from(num_blocks) + 1;
        let nodes = (0..ring)
            .map(|index| Node {
                previous: ((index + u64::from(num_blocks)) % ring) as u32,
                next: ((index + 1) % ring) as u32,
                references: 0,
            })
            .collect();
        Self {
            nodes,
            free: num_blocks,
        }
    }

    pub(super) fn num_blocks(&self) -> u32 {
        self.sentinel()
    }

    pub(super) fn num_free(&self) -> u32 {
        self.free
    }

    pub(super) fn references(&self, block: BlockId) -> u32 {
        self.nodes[block as usize].references
    }

    /// Adds a reference. True if the block was free.
    pub(super) fn take(&mut self, block: BlockId) -> bool {
        let node = &mut self.nodes[block as usize];
        node.references += 1;
        if node.references > 1 {
            return false;
        }
        let Node { previous, next, .. } = *node;
        self.join(previous, next);
        self.free -= 1;
        true
    }

    /// Takes `count` blocks, which must be there, from the front of the list and appends them to `table`.
    pub(super) fn take_front(&mut self, count: u32, table: &mut Vec<BlockId>) {
        assert!(
            count <= self.free,
            "{count} blocks were taken of {} free ones",
            self.free
        );
        let mut front = self.nodes[self.sentinel() as usize].next;
        table.reserve(count as usize);
        for _ in 0..count {
            let node = &mut self.nodes[front as usize];
            node.references = 1;
            table.push(front);
            front = node.next;
        }
        self.join(self.sentinel(), front);
        self.free -= count;
    }

    /// Gives a reference back; the last one puts the block at the front or the back of the list. True if it was the
    /// last.
    pub(super) fn release(&mut self, block: BlockId, to_back: bool) -> bool {
        let node = &mut self.nodes[block as usize];
        assert!(
            node.references > 0,
            "block {block} was released more often than taken"
        );
        node.references -= 1;
        if node.references > 0 {
            return false;
        }
        let sentinel = self.sentinel();
        let ends = self.nodes[sentinel as usize];
        let (previous, next) = if to_back {
            (ends.previous, sentinel)
        } else {
            (sentinel, ends.next)
        };
        self.join(previous, block);
        self.join(block, next);
        self.free += 1;
        true
    }

    /// The free blocks, front first. Fails where the links are broken.
    pub(super) fn free_list(&self) -> Result<Vec<BlockId>, String> {
        let mut list = Vec::with_capacity(self.free as usize);
        let mut at = self.sentinel();
        loop {
            let next = self.nodes[at as usize].next;
            let back = self.nodes.get(next as usize).map(|node| node.previous);
            if back != Some(at) {
                return Err(format!(
                    "free list: {at} leads to {next}, which leads back to {back:?}"
                ));
            }
            if next == self.sentinel() {
                break;
            }
            if list.len() == self.free as usize {
                return Err(format!(
                    "free list: longer than the {} free blocks",
                    self.free
                ));
            }
            list.push(next);
            at = next;
        }
        if list.len() == self.free as usize {
            Ok(list)
        } else {
            Err(format!(
                "free list: {} blocks, but {} are free",
                list.len(),
                self.free
            ))
        }
    }

    fn sentinel(&self) -> u32 {
        self.nodes.len() as u32 - 1
    }

    #[inline]
    fn join(&mut self, previous: u32, next: u32) {
        self.nodes[previous as usize].next = next;
        self.nodes[next as usize].previous = previous;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_out_in_order_and_go_to_the_end_asked_for() {
        let mut pool = BlockPool::new(4);
        let mut taken = vec![9];
        pool.take_front(1, &mut taken);
        pool.take_front(3, &mut taken);
        assert_eq!(taken, [9, 0, 1, 2, 3]);
        assert_eq!(
            (
                pool.num_free(),
                pool.free_list().expect("well formed").len()
            ),
            (0, 0)
        );
        for (block, to_back) in [(2, true), (0, true), (3, false)] {
            assert!(pool.release(block, to_back));
        }
        assert_eq!(pool.free_list().expect("well formed"), [3, 2, 0]);
    }

    #[test]
    fn a_block_leaves_the_middle_and_counts_its_holders() {
        let mut pool = BlockPool::new(3);
        assert!(pool.take(1));
        assert!(!pool.take(1));
        assert_eq!(pool.free_list().expect("well formed"), [0, 2]);
        assert_eq!((pool.references(1), pool.num_free()), (2, 2));
        assert!(!pool.release(1, true));
        assert!(pool.release(1, true));
        assert_eq!(pool.free_list().expect("well formed"), [0, 2, 1]);
    }

    #[test]
    fn a_pool_without_blocks_is_empty() {
        let mut pool = BlockPool::new(0);
        pool.take_front(0, &mut Vec::new());
        assert!(pool.free_list().expect("well formed").is_empty());
    }

    #[test]
    #[should_panic(expected = "block 1 was released more often than taken")]
    fn a_block_is_not_released_twice() {
        BlockPool::new(2).release(1, false);
    }

    #[test]
    fn broken_links_are_found() {
        let mut pool = BlockPool::new(3);
        pool.nodes[1].previous = 2;
        assert!(
            pool.free_list()
                .expect_err("damaged")
                .contains("0 leads to 1, which leads back to Some(2)")
        );
        let mut pool = BlockPool::new(3);
        pool.free = 2;
        assert!(
            pool.free_list()
                .expect_err("damaged")
                .contains("longer than the 2 free blocks")
        );
        pool.free = 4;
        assert!(
            pool.free_list()
                .expect_err("damaged")
                .contains("3 blocks, but 4 are free")
        );
    }
}
