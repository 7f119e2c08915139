//! The cluster as the watches tell it: tables of what scheduling looks at, and the problem and the extender's view made from them.
//! Only [`watch`] talks to the API server; nothing here decides anything.

pub mod claim_index;
pub mod holds;
pub mod pods;
pub mod snapshot;
pub mod snapshot_cache;
pub mod tables;
pub mod watch;

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use tokio::sync::watch as channel;

pub use crate::state::pods::{PodRecord, Scheduling};
pub use crate::state::tables::ClusterState;

/// The shared state and a signal that it changed.
#[derive(Debug)]
pub struct Cluster {
    state: RwLock<ClusterState>,
    version: channel::Sender<u64>,
}

impl Default for Cluster {
    fn default() -> Self {
        Self::new(ClusterState::default())
    }
}

impl Cluster {
    /// A cluster that begins with this state.
    pub fn new(state: ClusterState) -> Self {
        Self { state: RwLock::new(state), version: channel::Sender::new(0) }
    }

    /// Reads the state. The guard must not be held across an await.
    pub fn read(&self) -> RwLockReadGuard<'_, ClusterState> {
        self.state.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Changes the state and tells everyone who waits.
    pub fn update<T>(&self, change: impl FnOnce(&mut ClusterState) -> T) -> T {
        let out = change(&mut self.write());
        self.version.send_modify(|version| *version += 1);
        out
    }

    /// A receiver that wakes after every change.
    pub fn changes(&self) -> channel::Receiver<u64> {
        self.version.subscribe()
    }

    fn write(&self) -> RwLockWriteGuard<'_, ClusterState> {
        self.state.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A time as RFC 3339 in UTC, whole seconds; times that can't be written are the epoch.
pub fn rfc3339(milliseconds: i64) -> String {
    k8s_openapi::jiff::Timestamp::from_second(milliseconds.div_euclid(1_000)).unwrap_or_default().to_string()
}

/// When an object was created, milliseconds since the epoch; 0 when it doesn't say.
pub fn created_ms(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> i64 {
    meta.creation_timestamp.as_ref().map_or(0, |time| time.0.as_millisecond())
}

/// Milliseconds since the epoch.
pub fn now_ms() -> i64 {
    k8s_openapi::jiff::Timestamp::now().as_millisecond()
}
