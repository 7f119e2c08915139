//! The newest pod of each workload: pods of a workload that just changed are not evicted where the NodePool has an interval between evictions.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use stowage_model::time::UnixMillis;
use stowage_planner::PodEntry;

use crate::decisions::disruption::blockers::Blocker;
use crate::decisions::disruption::consolidation::objective::PoolTerms;
use crate::decisions::disruption::node_facts::NodeFacts;
use crate::state::tables::ClusterState;

/// When the newest pod of each workload was created, by namespace and UID of what controls its pods.
pub struct Newest<'a>(HashMap<(&'a str, &'a str), UnixMillis>);

impl<'a> Newest<'a> {
    /// Empty where no NodePool has an interval between evictions.
    pub fn of(state: &'a ClusterState, terms: &BTreeMap<String, PoolTerms>) -> Self {
        let mut newest = HashMap::new();
        if terms.values().any(|terms| terms.min_eviction_interval().is_some()) {
            let entries = state.pods.values().filter(|pod| pod.active()).filter_map(|pod| pod.entry.as_ref().ok());
            for (workload, created_at) in entries.filter_map(|entry| Some((workload(entry)?, entry.created_at))) {
                let newest = newest.entry(workload).or_insert(created_at);
                *newest = created_at.max(*newest);
            }
        }
        Self(newest)
    }

    /// What blocks the removal of a node: the pod whose workload changed last, if that is not this long ago.
    pub fn block(&self, node: &NodeFacts, interval: Duration, now: UnixMillis) -> Option<Blocker> {
        let ends = node.pods.iter().filter_map(|entry| Some((*self.0.get(&workload(entry)?)? + interval, &entry.key)));
        let (at, pod) = ends.filter(|(at, _)| *at > now).max()?;
        Some(Blocker::WorkloadChanged(pod.to_string(), at))
    }
}

/// The namespace of a pod and the UID of what controls it. A UID may be copied to another namespace.
fn workload(entry: &PodEntry) -> Option<(&str, &str)> {
    Some((&entry.class.namespace, entry.owner.as_deref()?))
}
