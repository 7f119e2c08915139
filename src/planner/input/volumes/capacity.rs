//! Whether a free PersistentVolume serves a claim, as the volume controller matches them.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolumeClaimSpec, PersistentVolumeSpec};
use stowage_model::pod_class::Selector;
use stowage_model::quantity::parse_bytes;
use stowage_model::units::Bytes;

use crate::input::pod::Labels;
use crate::input::terms::selector;

/// What a claim requires of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    bytes: Bytes,
    modes: BTreeSet<Arc<str>>,
    block: bool,
    /// `None` for a selector that cannot be parsed: it selects nothing.
    selector: Option<Selector>,
}

/// What a free volume offers to a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    pub(crate) bytes: Bytes,
    modes: BTreeSet<Arc<str>>,
    block: bool,
    labels: Labels,
}

impl Wanted {
    /// Parses a claim.
    pub fn new(spec: &PersistentVolumeClaimSpec) -> Self {
        let requests = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref());
        Self {
            bytes: requests
                .and_then(|map| map.get("storage"))
                .map_or(Bytes(0), |q| parse_bytes(&q.0).unwrap_or(Bytes(i64::MAX))),
            modes: spec.access_modes.iter().flatten().map(|mode| Arc::from(mode.as_str())).collect(),
            block: spec.volume_mode.as_deref() == Some("Block"),
            selector: match &spec.selector {
                Some(api) => selector(api, "spec.selector").ok(),
                None => Some(Selector::default()),
            },
        }
    }

    pub(crate) fn served_by(&self, volume: &Capacity) -> bool {
        volume.bytes >= self.bytes
            && volume.block == self.block
            && self.modes.is_subset(&volume.modes)
            && self.selector.as_ref().is_some_and(|selector| selector.selects(&volume.labels))
    }
}

impl Capacity {
    /// Parses a volume with these labels.
    pub fn new(spec: &PersistentVolumeSpec, labels: Option<&Labels>) -> Self {
        let storage = spec.capacity.as_ref().and_then(|map| map.get("storage"));
        Self {
            bytes: storage.and_then(|q| parse_bytes(&q.0).ok()).unwrap_or_default(),
            modes: spec.access_modes.iter().flatten().map(|mode| Arc::from(mode.as_str())).collect(),
            block: spec.volume_mode.as_deref() == Some("Block"),
            labels: labels.cloned().unwrap_or_default(),
        }
    }
}
