//! Threads that compute masks while the forward pass runs.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::cursor::Cursor;

/// Most threads; a mask takes some ten microseconds, so that four keep up with a few hundred rows.
const MOST_THREADS: usize = 4;

/// A few threads with one queue, started when there is something for them to do.
#[derive(Default)]
pub(crate) struct MaskWorkers {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
    started: bool,
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    filled: Condvar,
}

#[derive(Default)]
struct Waiting {
    cursors: VecDeque<Arc<Cursor>>,
    closed: bool,
}

impl MaskWorkers {
    /// Has the masks computed. Where no thread can be had, they are left to whoever needs them.
    pub(crate) fn compute(&mut self, cursors: impl Iterator<Item = Arc<Cursor>>) {
        let mut waiting = self.queue.lock();
        waiting.cursors.extend(cursors);
        let any = !waiting.cursors.is_empty();
        drop(waiting);
        if any {
            self.start();
            self.queue.filled.notify_all();
        }
    }

    fn start(&mut self) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..(cores / 2).clamp(1, MOST_THREADS) {
            let queue = self.queue.clone();
            let thread = std::thread::Builder::new().name("miniinfer-mask".into());
            self.threads.extend(thread.spawn(move || queue.work()).ok());
        }
    }
}

impl Drop for MaskWorkers {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.filled.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(cursor) = self.next() {
            cursor.finish();
        }
    }

    fn next(&self) -> Option<Arc<Cursor>> {
        let mut waiting = self.lock();
        loop {
            if waiting.closed {
                return None;
            }
            if let Some(cursor) = waiting.cursors.pop_front() {
                return Some(cursor);
            }
            waiting = self
                .filled
                .wait(waiting)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}
