//! Identifies the pod that a decision is about.

use crate::state::pods::PodRecord;

/// A pod. The UID distinguishes it from a later pod of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl PodRef {
    pub fn of(pod: &PodRecord) -> Self {
        Self { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() }
    }
}
