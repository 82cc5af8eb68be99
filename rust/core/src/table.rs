//! The request table: dense storage, looked up by the never-reused id.

use std::hint::black_box;

use rustc_hash::FxHashMap;

use crate::request::{Request, RequestId};

/// Requests whose memory is asked for at once: about as many as a core can wait for.
pub(crate) const TOGETHER: usize = 16;

/// Live requests. An index is valid while its request lives; an id says so for ever.
#[derive(Default)]
pub(crate) struct Table {
    slots: Vec<Option<Request>>,
    free: Vec<u32>,
    by_id: FxHashMap<RequestId, u32>,
}

impl Table {
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn insert(&mut self, request: Request) -> u32 {
        let id = request.id;
        let index = match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = Some(request);
                index
            }
            None => {
                self.slots.push(Some(request));
                self.slots.len() as u32 - 1
            }
        };
        let previous = self.by_id.insert(id, index);
        debug_assert!(previous.is_none(), "ids are never reused");
        index
    }

    pub fn remove(&mut self, index: u32) {
        let id = self.get(index).id;
        // Dropped where it lies: half a kilobyte need not move first.
        self.slots[index as usize] = None;
        self.by_id.remove(&id);
        self.free.push(index);
    }

    /// From now on nobody finds a request by its id.
    pub fn forget(&mut self, id: RequestId) {
        self.by_id.remove(&id);
    }

    pub fn find(&self, id: RequestId) -> Option<u32> {
        self.by_id.get(&id).copied()
    }

    /// The request at an index that may be free by now.
    pub fn find_index(&self, index: u32) -> Option<&Request> {
        self.slots[index as usize].as_ref()
    }

    pub fn get(&self, index: u32) -> &Request {
        self.slots[index as usize]
            .as_ref()
            .expect("invariant: the index is live")
    }

    pub fn get_mut(&mut self, index: u32) -> &mut Request {
        self.slots[index as usize]
            .as_mut()
            .expect("invariant: the index is live")
    }

    /// Reads what a decode step needs of each of these requests, for nothing but to have it near when it is
    /// needed: so the waits for memory overlap. Worth a third of a step with 4,096 requests.
    #[inline]
    pub fn warm(&self, indices: impl Iterator<Item = u32>) {
        let lines = |r: &Request| r.computed ^ r.id as u32 ^ r.params.min_tokens;
        black_box(indices.fold(0, |sum, index| sum ^ lines(self.get(index))));
    }

    /// The same, with the end of the tokens.
    #[inline]
    pub fn warm_with_tokens(&self, indices: impl Iterator<Item = u32>) {
        let lines = |r: &Request| r.id as u32 ^ r.params.min_tokens ^ r.tokens.last().unwrap_or(&0);
        black_box(indices.fold(0, |sum, index| sum ^ lines(self.get(index))));
    }

    /// Reads all that ending each of these requests needs, for the same reason.
    pub fn warm_whole(&self, indices: impl Iterator<Item = u32>) {
        let lines = |r: &Request| {
            let params = r.params.min_tokens ^ u32::from(r.params.logit_bias.is_empty());
            let rest = r.drafts.is_empty() ^ r.followers.is_empty() ^ r.first_token.is_some();
            r.id ^ r.key as u64 ^ u64::from(r.tokens[0] ^ params) ^ u64::from(rest)
        };
        black_box(indices.fold(0, |sum, index| sum ^ lines(self.get(index))));
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Request)> {
        let numbered = self.slots.iter().enumerate();
        numbered.filter_map(|(index, slot)| Some((index as u32, slot.as_ref()?)))
    }
}
