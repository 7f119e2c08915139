//! The shared [`ClusterState`] and a signal of its changes.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use tokio::sync::watch;

use crate::state::tables::ClusterState;
use crate::state::watch_signs::WatchSigns;

/// The shared state.
#[derive(Debug)]
pub struct Cluster {
    state: RwLock<ClusterState>,
    version: watch::Sender<u64>,
    signs: Arc<WatchSigns>,
}

impl Default for Cluster {
    fn default() -> Self {
        Self::new(ClusterState::default())
    }
}

impl Cluster {
    /// A cluster that starts with `state`.
    pub fn new(state: ClusterState) -> Self {
        Self { state: RwLock::new(state), version: watch::Sender::new(0), signs: Arc::default() }
    }

    /// Reads the state. The lock guard must not be held across an await.
    pub fn read(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, then wakes every receiver of [`Self::changes`].
    pub fn update<T>(&self, change: impl FnOnce(&mut ClusterState) -> T) -> T {
        let out = change(&mut self.state.write().unwrap_or_else(PoisonError::into_inner));
        self.version.send_modify(|version| *version += 1);
        out
    }

    /// When the watches last had an event or a bookmark.
    pub fn watch_signs(&self) -> &Arc<WatchSigns> {
        &self.signs
    }

    /// A receiver that wakes after every change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }
}
