//! The pods that wait for a plan.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

use crate::decisions::provisioning::batch_window::{BatchWindow, QUIET_PERIOD};
use crate::decisions::provisioning::purchase_backoff::PurchaseBackoff;
use crate::decisions::provisioning::quarantine::{Cause, Quarantine};
use crate::decisions::provisioning::supply_watch::SupplyWatch;
use crate::state::plan_record::Holds;
use crate::state::pods::Scheduling;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::Demand;
use crate::state::tables::ClusterState;

/// A pod that a plan left without a node is planned again after this time, whatever happens.
const RETRY_AFTER: Duration = Duration::from_secs(10);
/// Changes that can help end the wait at most this often.
const MIN_RETRY_PERIOD: Duration = Duration::from_secs(1);

/// A pod that its scheduler has not attempted in this time belongs to no burst.
const ATTEMPT_PERIOD: Duration = Duration::from_secs(10);

/// Pods that need a node.
#[derive(Debug, Default)]
pub struct PodQueue {
    /// Since when each pod has needed a node.
    first_seen: BTreeMap<String, UnixMillis>,
    observed_at: UnixMillis,
    /// When the present demand was last planned.
    planned_at: UnixMillis,
    /// When a plan last left a pod without a node.
    failed: HashMap<String, UnixMillis>,
    supply: SupplyWatch,
    /// Something that can help changed since the failed pods were planned.
    is_helped: bool,
    /// When such a change last ended the wait of the failed pods.
    helped_at: UnixMillis,
    /// Pods that are left out of plans at present.
    quarantined: HashMap<String, Cause>,
}

impl PodQueue {
    /// Updates the queue with the demand at `now`. Returns the batch of pods to plan; `None` when there are none.
    pub fn observe(
        &mut self,
        state: &ClusterState,
        holds: &Holds,
        demand: &Demand,
        quarantine: &mut Quarantine,
        backoff: &mut PurchaseBackoff,
        now: UnixMillis,
    ) -> Option<BatchWindow> {
        let demand: BTreeSet<&String> = demand.pending.iter().chain(&demand.displaced).collect();
        self.failed.retain(|key, at| demand.contains(key) && !at.is_older_than(RETRY_AFTER, now));
        backoff.observe(state, holds, &demand, |key| self.failed.contains_key(key), now);
        self.quarantined = quarantined(state, &demand, quarantine, now);
        self.quarantined.extend(backoff.left_out().iter().map(|key| (key.clone(), Cause::PurchasedInVain)));
        self.first_seen.retain(|key, _| demand.contains(key));
        let waiting =
            state.unbound.iter().filter(|key| !holds.by_pod.contains_key(*key)).filter_map(|key| state.pods.get(key));
        let unattempted = waiting
            .filter(|pod| pod.scheduling == Scheduling::Unattempted && !pod.daemon && pod.deleted_at.is_none())
            .filter(|pod| state.schedulers.has(pod) && !pod.first_seen.is_older_than(ATTEMPT_PERIOD, now))
            .filter(|pod| pod.first_seen.is_older_than(QUIET_PERIOD, now))
            .count();
        let since = |key: &String| {
            let Some(pod) = state.pods.get(key) else { return now };
            let at = match (pod.first_unschedulable, &pod.node) {
                // Between two observations, another plan was made and written, which takes time.
                (Some(rejected), _) => rejected.max(self.observed_at),
                (None, None) => pod.first_seen.max(self.planned_at),
                (None, Some(_)) => now,
            };
            at.min(now)
        };
        for key in demand {
            if !self.failed.contains_key(key) && !self.first_seen.contains_key(key) {
                self.first_seen.insert(key.clone(), since(key));
            }
        }
        self.observed_at = now;
        let waits = |key: &String| self.failed.contains_key(key) || self.quarantined.contains_key(key);
        let batch = || self.first_seen.iter().filter(|(key, _)| !waits(key)).map(|(_, at)| *at);
        let (opened, latest) = (batch().min()?, batch().max()?);
        Some(BatchWindow { opened, latest, unattempted })
    }

    /// Whether pods wait that a plan left without a node.
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Ends the wait of the pods that a plan left without a node, if something changed that can help them: see [`SupplyWatch`].
    pub fn help(&mut self, state: &ClusterState, pools: &[ReadyPool], now: UnixMillis) {
        self.is_helped |= self.supply.improved(state, pools);
        if self.is_helped && self.helped_at.is_older_than(MIN_RETRY_PERIOD, now) {
            self.failed.clear();
            (self.is_helped, self.helped_at) = (false, now);
        }
    }

    /// Records that the present demand is planned at `now`, and what can be purchased.
    pub fn planned_with(&mut self, state: &ClusterState, pools: &[ReadyPool], now: UnixMillis) {
        self.planned_at = now;
        self.supply.improved(state, pools);
        self.is_helped = false;
    }

    /// Number of pods that need a node and are left out of plans.
    pub fn quarantined(&self, cause: Cause) -> usize {
        self.quarantined.values().filter(|other| **other == cause).count()
    }

    /// Since when each pod has needed a node.
    pub fn first_seen(&self) -> &BTreeMap<String, UnixMillis> {
        &self.first_seen
    }

    /// Records that a plan left a pod without a node.
    pub fn fail(&mut self, pod: &str, now: UnixMillis) {
        self.failed.insert(pod.to_owned(), now);
    }
}

/// The pods of the demand that are left out of plans. What no pod of the demand needs is forgotten.
fn quarantined(
    state: &ClusterState,
    demand: &BTreeSet<&String>,
    quarantine: &mut Quarantine,
    now: UnixMillis,
) -> HashMap<String, Cause> {
    if quarantine.is_empty() {
        return HashMap::new();
    }
    let class = |key: &String| Some(&state.pods.get(key)?.entry.as_ref().ok()?.class);
    let classes: HashSet<&Arc<PodClass>> = demand.iter().filter_map(|key| class(key)).collect();
    quarantine.forget(&classes.iter().map(|class| &***class).collect(), now);
    let causes: HashMap<*const PodClass, Cause> =
        classes.iter().filter_map(|class| Some((Arc::as_ptr(class), quarantine.cause(class, now)?))).collect();
    let cause = |key: &String| causes.get(&Arc::as_ptr(class(key)?)).copied();
    demand.iter().filter_map(|key| Some(((*key).clone(), cause(key)?))).collect()
}

#[cfg(test)]
mod tests;
