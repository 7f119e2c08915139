//! UIDs of recently deleted objects: the late response to a write must not bring a deleted object back.

use std::collections::{HashSet, VecDeque};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// The UIDs, oldest dropped first.
#[derive(Debug, Default)]
pub struct DeletedUids {
    uids: HashSet<String>,
    order: VecDeque<String>,
}

impl DeletedUids {
    /// Maximum number of UIDs; far more than the writes in flight.
    const CAPACITY: usize = 10_000;

    /// Records a deletion.
    pub fn record(&mut self, uid: Option<String>) {
        let Some(uid) = uid else { return };
        if self.uids.insert(uid.clone()) {
            self.order.push_back(uid);
        }
        while self.order.len() > Self::CAPACITY {
            if let Some(oldest) = self.order.pop_front() {
                self.uids.remove(&oldest);
            }
        }
    }

    /// Whether the object with this metadata was deleted.
    pub fn contains(&self, meta: &ObjectMeta) -> bool {
        meta.uid.as_ref().is_some_and(|uid| self.uids.contains(uid))
    }

    /// Whether an object was deleted before, or by this very write: one that removed the last finalizer of a deleting object.
    pub fn is_gone(&self, meta: &ObjectMeta) -> bool {
        let last = meta.deletion_timestamp.is_some() && meta.finalizers.as_ref().is_none_or(Vec::is_empty);
        last || self.contains(meta)
    }
}
