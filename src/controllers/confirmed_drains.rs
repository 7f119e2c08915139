//! Which nodes the API server has confirmed to be drained.

use std::collections::HashSet;
use std::sync::Mutex;

use stowage_runtime::sync::lock;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Concurrent lists of pods: the API server may read all pods for each of them.
const CONCURRENCY: usize = 5;
/// Beyond this number, the confirmed claims are forgotten, and confirmed again.
const MEMORY: usize = 10_000;

/// UIDs of claims; all are forgotten when there are too many.
#[derive(Debug, Default)]
pub struct ClaimSet(Mutex<HashSet<String>>);

impl ClaimSet {
    pub fn contains(&self, uid: &str) -> bool {
        lock(&self.0).contains(uid)
    }

    /// Adds a claim. Returns whether it is new.
    pub fn insert(&self, uid: String) -> bool {
        let mut claims = lock(&self.0);
        if claims.len() >= MEMORY {
            claims.clear();
        }
        claims.insert(uid)
    }

    pub fn remove(&self, uid: &str) {
        lock(&self.0).remove(uid);
    }
}

/// Claims whose nodes are confirmed to be drained.
#[derive(Debug)]
pub struct ConfirmedDrains {
    confirmed: ClaimSet,
    lists: Semaphore,
}

impl Default for ConfirmedDrains {
    fn default() -> Self {
        Self { confirmed: ClaimSet::default(), lists: Semaphore::new(CONCURRENCY) }
    }
}

impl ConfirmedDrains {
    /// Waits for the permission to list pods; `None` never, as the semaphore is not closed.
    pub async fn permit(&self) -> Option<SemaphorePermit<'_>> {
        self.lists.acquire().await.ok()
    }

    pub fn contains(&self, uid: &str) -> bool {
        self.confirmed.contains(uid)
    }

    pub fn insert(&self, uid: String) {
        self.confirmed.insert(uid);
    }

    pub fn remove(&self, uid: &str) {
        self.confirmed.remove(uid);
    }
}
