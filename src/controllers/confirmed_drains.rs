//! Which nodes the API server has confirmed to be drained.

use std::collections::HashSet;
use std::sync::Mutex;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::sync::lock;

/// Concurrent lists of pods: the API server may read all pods for each of them.
const CONCURRENCY: usize = 5;
/// Beyond this number, the confirmed claims are forgotten, and confirmed again.
const MEMORY: usize = 10_000;

/// Claims whose nodes are confirmed to be drained, by UID.
#[derive(Debug)]
pub struct ConfirmedDrains {
    confirmed: Mutex<HashSet<String>>,
    lists: Semaphore,
}

impl Default for ConfirmedDrains {
    fn default() -> Self {
        Self { confirmed: Mutex::default(), lists: Semaphore::new(CONCURRENCY) }
    }
}

impl ConfirmedDrains {
    /// Waits for the permission to list pods; `None` never, as the semaphore is not closed.
    pub async fn permit(&self) -> Option<SemaphorePermit<'_>> {
        self.lists.acquire().await.ok()
    }

    pub fn contains(&self, uid: &str) -> bool {
        lock(&self.confirmed).contains(uid)
    }

    pub fn insert(&self, uid: String) {
        let mut confirmed = lock(&self.confirmed);
        if confirmed.len() >= MEMORY {
            confirmed.clear();
        }
        confirmed.insert(uid);
    }

    pub fn remove(&self, uid: &str) {
        lock(&self.confirmed).remove(uid);
    }
}
