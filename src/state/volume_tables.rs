//! The tables of volumes: PersistentVolumeClaims, PersistentVolumes, StorageClasses and CSINodes.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::ResourceExt;
use stowage_planner::volumes::{self, Claim, Volume};

use crate::state::tables::ClusterState;

impl ClusterState {
    /// Applies a PersistentVolumeClaim.
    pub fn apply_volume_claim(&mut self, claim: &PersistentVolumeClaim) {
        let key = format!("{}/{}", claim.namespace().unwrap_or_default(), claim.name_any());
        Arc::make_mut(&mut self.volumes).claims.insert(key, Claim::new(claim));
    }

    /// Applies a PersistentVolume. An invalid one is left out, and so are the pods bound to it.
    pub fn apply_volume(&mut self, volume: &PersistentVolume) {
        let name = volume.name_any();
        let volumes = &mut Arc::make_mut(&mut self.volumes).volumes;
        match Volume::new(volume) {
            Ok(volume) => {
                volumes.insert(name, volume);
            }
            Err(error) => {
                tracing::warn!(volume = name, %error, "invalid volume left out");
                volumes.remove(&name);
            }
        }
    }

    /// Applies a StorageClass.
    pub fn apply_storage_class(&mut self, class: &StorageClass) {
        Arc::make_mut(&mut self.volumes).classes.insert(class.name_any(), volumes::StorageClass::new(class));
    }

    /// Applies the attach limits of a node's CSI drivers.
    pub fn apply_csi_node(&mut self, node: &CSINode) {
        Arc::make_mut(&mut self.volumes).limits.insert(node.name_any(), volumes::attach_limits(node));
    }
}
