//! Facts about node classes and the cluster: cluster facts, placement groups, free subnet addresses, and the caches of SSM
//! parameters and instance profiles. At most one lock is held at a time, and none across an `await`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use kube::ResourceExt;
use stowage_api::Ec2NodeClass;
use stowage_runtime::sync::lock;

use crate::ec2::node_class::cluster_facts::ClusterFacts;
use crate::ec2::node_class::images::SsmParameterCache;
use crate::ec2::node_class::instance_profiles::InstanceProfiles;
use crate::ec2::node_class::subnets::FreeAddresses;
use crate::ec2::placement_group::PlacementGroup;

#[derive(Debug)]
pub struct NodeClassStore {
    cluster: ArcSwap<ClusterFacts>,
    parameters: SsmParameterCache,
    profiles: InstanceProfiles,
    addresses: Mutex<FreeAddresses>,
    /// Resolved placement groups by UID of the class; `None` for a class without one.
    placement_groups: Mutex<HashMap<String, Option<PlacementGroup>>>,
}

impl NodeClassStore {
    pub fn new(cluster: ClusterFacts) -> Self {
        Self {
            cluster: ArcSwap::from_pointee(cluster),
            parameters: SsmParameterCache::default(),
            profiles: InstanceProfiles::default(),
            addresses: Mutex::default(),
            placement_groups: Mutex::default(),
        }
    }

    /// The cluster as last discovered.
    pub fn cluster(&self) -> Arc<ClusterFacts> {
        self.cluster.load_full()
    }

    pub fn set_cluster(&self, cluster: ClusterFacts) {
        self.cluster.store(Arc::new(cluster));
    }

    pub fn parameters(&self) -> &SsmParameterCache {
        &self.parameters
    }

    pub fn profiles(&self) -> &InstanceProfiles {
        &self.profiles
    }

    /// Reads or updates the free addresses of subnets. `update` must not call this store.
    pub fn with_addresses<R>(&self, update: impl FnOnce(&mut FreeAddresses) -> R) -> R {
        update(&mut lock(&self.addresses))
    }

    /// The placement group of a class as last resolved; `None` without one, or before the first resolution.
    pub fn placement_group(&self, class: &Ec2NodeClass) -> Option<PlacementGroup> {
        lock(&self.placement_groups).get(&key(class)).cloned().flatten()
    }

    /// Whether the placement group of a class is resolved, also if it does not exist.
    pub fn is_placement_group_resolved(&self, class: &Ec2NodeClass) -> bool {
        lock(&self.placement_groups).contains_key(&key(class))
    }

    pub fn set_placement_group(&self, class: &Ec2NodeClass, group: Option<PlacementGroup>) {
        lock(&self.placement_groups).insert(key(class), group);
    }

    /// Deletes the placement group of a deleted class.
    pub fn forget(&self, class: &Ec2NodeClass) {
        lock(&self.placement_groups).remove(&key(class));
    }
}

fn key(class: &Ec2NodeClass) -> String {
    class.uid().unwrap_or_else(|| class.name_any())
}
