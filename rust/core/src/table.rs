//! The request table: dense storage, looked up by the never-reused id.

use rustc_hash::FxHashMap;

use crate::request::{Request, RequestId};

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

    pub fn remove(&mut self, index: u32) -> Request {
        let request = self.slots[index as usize]
            .take()
            .expect("invariant: the index is live");
        self.by_id.remove(&request.id);
        self.free.push(index);
        request
    }

    pub fn find(&self, id: RequestId) -> Option<u32> {
        self.by_id.get(&id).copied()
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

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Request)> {
        let numbered = self.slots.iter().enumerate();
        numbered.filter_map(|(index, slot)| Some((index as u32, slot.as_ref()?)))
    }
}
