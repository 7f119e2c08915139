//! Purchases in vain: nodes that did not take the pods that they were purchased for, whatever the cause. A pod for which that happened is
//! planned again with backoff, and so are the other pods of its controller and class, of which one at a time tests whether a new node
//! takes it.
//!
//! Nothing here knows why a node did not take a pod: kube-scheduler has plugins, other controllers add taints, webhooks enlarge pods. Without
//! a bound, each such pod would be purchased a node in every boot time.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::conditions;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;
use stowage_planner::Problem;

use crate::decisions::provisioning::purchase_obstacle::{Seen, obstacle};
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::pods::{PodRecord, Scheduling};
use crate::state::tables::ClusterState;

/// Wait after the first, the second, and each further purchase in vain for a pod. The first one may be a race with another pod.
const POD_WAITS: [Duration; 4] =
    [Duration::ZERO, Duration::from_mins(1), Duration::from_mins(10), Duration::from_mins(20)];
/// The same for the pods of one controller and class: pods that a controller replaces start over with each replacement.
const WORKLOAD_WAITS: [Duration; 3] = [Duration::ZERO, Duration::from_mins(1), Duration::from_mins(5)];
/// At most this many nodes are purchased in vain for a pod in [`WINDOW`], whatever changes meanwhile.
const MAX_IN_WINDOW: usize = 3;
const WINDOW: Duration = Duration::from_mins(10);
/// At most this many nodes in [`WINDOW`] that other pods needed as much do not count as purchased in vain for a pod.
const MAX_USES_IN_WINDOW: usize = 10;
/// What happened to a pod that is gone, or to a workload, is forgotten after this time. A StatefulSet creates the pod again.
const MEMORY: Duration = Duration::from_hours(1);
/// While a pod of a workload was bound to a node purchased for it within this time, a node that does not take another one is an accident, such
/// as an interruption.
const WORKS: Duration = Duration::from_mins(5);
/// Maximum number of pods that are remembered after they are gone.
const MAX_GONE: usize = 10_000;
/// Maximum number of reported purchases that wait for [`PurchaseBackoff::take_reports`].
const MAX_REPORTS: usize = 1_000;

/// A node that did not take a pod that it was purchased for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PurchaseInVain {
    /// The NodeClaim.
    pub claim: String,
    /// Its Node, if it has registered and still exists.
    pub node: Option<String>,
    pub pool: String,
    /// Whether this is the first of its pods that the node did not take.
    pub is_first: bool,
    /// The pod, `namespace/name`.
    pub pod: String,
    pub uid: String,
    /// Number of nodes purchased for the pod in vain so far.
    pub nodes: u32,
    /// What kept it off the node: what the objects show, else kube-scheduler's last message about the pod.
    pub reason: String,
    /// The pod is not planned on a new node before.
    pub retry_at: UnixMillis,
}

/// A node that was purchased.
#[derive(Debug)]
struct Purchase {
    pool: String,
    /// The pods that it was purchased for.
    pods: BTreeSet<String>,
    at: UnixMillis,
    /// The last pass before it.
    pass: u64,
    /// It has an instance: before that, nothing was paid for.
    launched: bool,
    failed: bool,
}

/// The pods of one controller that scheduling does not distinguish. Equal classes are shared as long as something holds them.
#[derive(Clone, Debug)]
struct Workload {
    owner: Arc<str>,
    class: Arc<PodClass>,
}

impl PartialEq for Workload {
    fn eq(&self, other: &Self) -> bool {
        self.owner == other.owner && Arc::ptr_eq(&self.class, &other.class)
    }
}

impl Eq for Workload {}

impl Hash for Workload {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.owner, Arc::as_ptr(&self.class)).hash(state);
    }
}

impl Workload {
    fn of(pod: &PodRecord) -> Option<Self> {
        let entry = pod.entry.as_ref().ok()?;
        Some(Self { owner: Arc::clone(entry.owner.as_ref()?), class: Arc::clone(&entry.class) })
    }
}

/// The purchases in vain for a pod, or for the pods of a workload.
#[derive(Debug, Default)]
struct Failures {
    /// Those that count for the backoff.
    level: usize,
    total: u32,
    /// The times of the last purchases that failed, oldest first.
    purchased: VecDeque<UnixMillis>,
    failed_at: UnixMillis,
    /// When a pod of the workload was last bound to the node that was purchased for it.
    bound_at: Option<UnixMillis>,
    /// The pass that noticed the last failure.
    pass: u64,
    /// [`supply_of`], or of a pod [`supply_for`], when the last purchase failed.
    supply: u64,
}

impl Failures {
    fn add(&mut self, purchased_at: UnixMillis, supply: u64, pass: u64, now: UnixMillis) {
        self.level += 1;
        self.total = self.total.saturating_add(1);
        self.purchased.push_back(purchased_at);
        if self.purchased.len() > MAX_IN_WINDOW {
            self.purchased.pop_front();
        }
        (self.failed_at, self.pass, self.supply) = (now, pass, supply);
    }

    /// Ends the backoff when something changed that can help.
    fn adapt(&mut self, supply: u64) {
        if self.supply != supply {
            (self.level, self.supply) = (0, supply);
        }
    }

    /// When a node may be purchased again.
    fn retry_at(&self, waits: &[Duration]) -> UnixMillis {
        let wait = waits.get(self.level.saturating_sub(1)).or(waits.last()).copied().unwrap_or_default();
        let after_backoff = if self.level == 0 { self.failed_at } else { self.failed_at + wait };
        let full = self.purchased.len() == MAX_IN_WINDOW;
        let after_window = self.purchased.front().filter(|_| full).map_or(UnixMillis(0), |first| *first + WINDOW);
        after_backoff.max(after_window)
    }
}

/// The purchases whose pods are not bound yet, and the failed ones.
#[derive(Debug, Default)]
pub struct PurchaseBackoff {
    /// By NodeClaim.
    purchases: BTreeMap<String, Purchase>,
    /// The NodeClaim by pod that it was purchased for, or that takes the room of such a pod.
    expected: HashMap<String, String>,
    pods: HashMap<String, Failures>,
    workloads: HashMap<Workload, Failures>,
    /// When nodes were purchased for a pod that other pods needed as much, by pod, within [`WINDOW`].
    uses: HashMap<String, Vec<UnixMillis>>,
    /// By NodePool.
    seen: BTreeMap<String, Seen>,
    /// Pods of the demand that are left out of plans.
    left_out: BTreeSet<String>,
    reports: Vec<PurchaseInVain>,
    /// Number of calls of [`Self::observe`].
    pass: u64,
}

impl PurchaseBackoff {
    /// Records a new NodeClaim, which is in `state`, and the pods that it was created for.
    pub fn purchased(
        &mut self,
        state: &ClusterState,
        claim: &str,
        pods: impl Iterator<Item = String>,
        now: UnixMillis,
    ) {
        let pool = state.claims.get(claim).and_then(|claim| claim.node_pool()).unwrap_or_default().to_owned();
        let pods: BTreeSet<String> = pods.collect();
        for pod in &pods {
            // The hold on an earlier purchase ended after the last pass.
            if let Some(earlier) = self.expected.insert(pod.clone(), claim.to_owned()) {
                self.fail(state, pod, &earlier, now);
            }
        }
        let purchase = Purchase { pool, pods, at: now, pass: self.pass, launched: false, failed: false };
        self.purchases.insert(claim.to_owned(), purchase);
    }

    /// Updates what became of the purchases, and which pods of the demand are left out of plans. `is_waiting` says of a pod that it waits for
    /// another reason: it is not the one of its workload that is planned.
    pub fn observe(
        &mut self,
        state: &ClusterState,
        holds: &Holds,
        demand: &BTreeSet<&String>,
        is_waiting: impl Fn(&str) -> bool,
        now: UnixMillis,
    ) {
        self.adopt(state, holds);
        self.pass += 1;
        self.follow_successors(holds);
        for (claim, purchase) in &mut self.purchases {
            purchase.launched |= state.claims.get(claim).is_some_and(|claim| claim.provider_id().is_some());
        }
        self.settle(state, holds, now);
        self.forget(state, now);
        self.choose_left_out(state, demand, is_waiting, now);
    }

    /// Whether a pod is left out of plans, as of the last [`Self::observe`].
    pub fn leaves_out(&self, pod: &str) -> bool {
        self.left_out.contains(pod)
    }

    /// Whether a new node did not take the pod, or another one of its workload, within the last hour. It is planned apart from other pods, with
    /// [`Self::amend`].
    pub fn is_suspect(&self, state: &ClusterState, pod: &str) -> bool {
        if !self.has_failures() {
            return false;
        }
        let workload = || self.workloads.get(&Workload::of(state.pods.get(pod)?)?);
        self.pods.contains_key(pod) || workload().is_some_and(|failures| failures.total > 0)
    }

    /// Adds to the problem what the nodes had that did not take its pods: their NodePools get the taints, and room for what else ran there.
    pub fn amend(&self, problem: &mut Problem) {
        for (pool, seen) in &self.seen {
            seen.amend(problem, pool);
        }
    }

    /// Pods that are left out of plans.
    pub fn left_out(&self) -> &BTreeSet<String> {
        &self.left_out
    }

    /// The purchases in vain since the last call.
    pub fn take_reports(&mut self) -> Vec<PurchaseInVain> {
        std::mem::take(&mut self.reports)
    }

    /// Purchases that [`Self::purchased`] did not record: those of an earlier leader, or whose creation was answered with an error.
    fn adopt(&mut self, state: &ClusterState, holds: &Holds) {
        for (name, live) in &holds.by_claim {
            if self.purchases.contains_key(name) {
                continue;
            }
            let Some(claim) = state.claims.get(name).filter(|claim| !claim.has_condition(conditions::INITIALIZED))
            else {
                continue;
            };
            let pool = claim.node_pool().unwrap_or_default().to_owned();
            let pods: BTreeSet<String> = live.iter().map(|hold| hold.original.clone()).collect();
            for pod in &pods {
                self.expected.entry(pod.clone()).or_insert_with(|| name.clone());
            }
            let at = claim.created_at();
            let purchase = Purchase { pool, pods, at, pass: self.pass, launched: false, failed: false };
            self.purchases.insert(name.clone(), purchase);
        }
    }

    /// A displaced pod that is gone is represented by its successor.
    fn follow_successors(&mut self, holds: &Holds) {
        for (claim, purchase) in &self.purchases {
            for hold in holds.by_claim.get(claim).into_iter().flatten() {
                if let Some(pod) = &hold.pod
                    && *pod != hold.original
                    && purchase.pods.contains(&hold.original)
                    && !self.expected.contains_key(pod)
                {
                    self.expected.insert(pod.clone(), claim.clone());
                }
            }
        }
    }

    /// Ends the purchases whose pods are bound, are gone, or lost their holds.
    fn settle(&mut self, state: &ClusterState, holds: &Holds, now: UnixMillis) {
        let mut settled = Vec::new();
        for (pod, claim) in &self.expected {
            let Some(record) = state.pods.get(pod).filter(|record| record.active() && record.deleted_at.is_none())
            else {
                // A displaced pod that is gone has no successor yet.
                if !holds.by_claim.get(claim).is_some_and(|live| live.iter().any(|hold| hold.original == *pod)) {
                    settled.push((pod.clone(), claim.clone(), false));
                }
                continue;
            };
            if let Some(bound) = record.node.as_deref() {
                let node = state.claims.get(claim).and_then(|claim| state.node_of(claim));
                if node.is_some_and(|node| node.name_any() == bound) {
                    if let Some(workload) = Workload::of(record) {
                        let known = self.workloads.entry(workload).or_default();
                        (known.level, known.bound_at) = (0, Some(now));
                        known.purchased.clear();
                    }
                    settled.push((pod.clone(), claim.clone(), false));
                } else if !state.planned.get(claim).is_some_and(|plan| plan.owners.contains_key(pod)) {
                    settled.push((pod.clone(), claim.clone(), false));
                }
            } else if !holds.by_pod.contains_key(pod) && record.unschedulable() {
                let is_launched = self.purchases.get(claim).is_some_and(|purchase| purchase.launched);
                if is_launched || !state.claims.contains_key(claim) {
                    settled.push((pod.clone(), claim.clone(), is_launched));
                }
            }
        }
        settled.sort_unstable();
        for (pod, claim, failed) in settled {
            self.expected.remove(&pod);
            if failed {
                self.fail(state, &pod, &claim, now);
            }
        }
        let expected: BTreeSet<&String> = self.expected.values().collect();
        self.purchases.retain(|claim, _| expected.contains(claim));
    }

    /// Records that the node of a claim did not take a pod.
    fn fail(&mut self, state: &ClusterState, pod: &str, claim: &str, now: UnixMillis) {
        let Some(record) = state.pods.get(pod) else { return };
        let Some(purchase) = self.purchases.get_mut(claim).filter(|purchase| purchase.launched) else { return };
        let obstacle = obstacle(state, claim, record);
        if obstacle.is_of_use {
            let uses = self.uses.entry(pod.to_owned()).or_default();
            uses.retain(|at| !at.is_older_than(WINDOW, now));
            if uses.len() < MAX_USES_IN_WINDOW {
                uses.push(purchase.at);
                return;
            }
        }
        let supply = supply_of(state);
        let mut retry_at = now;
        if let Some(workload) = Workload::of(record) {
            let failures = self.workloads.entry(workload).or_default();
            // Nodes that were purchased before the last failure belong to the same attempt.
            let works = failures.bound_at.is_some_and(|at| !at.is_older_than(WORKS, now));
            if !works && (failures.total == 0 || purchase.pass >= failures.pass) {
                failures.add(purchase.at, supply, self.pass, now);
            }
            retry_at = failures.retry_at(&WORKLOAD_WAITS);
        }
        let failures = self.pods.entry(pod.to_owned()).or_default();
        failures.add(purchase.at, supply_for(supply, record), self.pass, now);
        let node = state.claims.get(claim).and_then(|claim| state.node_of(claim)).map(|node| node.name_any());
        let reason = match &record.scheduling {
            _ if !obstacle.text.is_empty() => obstacle.text.clone(),
            Scheduling::Unschedulable { message, .. } => format!("kube-scheduler: {message}"),
            _ => String::new(),
        };
        if !obstacle.extra.is_zero() || !obstacle.taints.is_empty() {
            let seen = self.seen.entry(purchase.pool.clone()).or_default();
            seen.learn(&obstacle, purchase.pass >= seen.pass, supply, self.pass, now);
        }
        let report = PurchaseInVain {
            claim: claim.to_owned(),
            node,
            pool: purchase.pool.clone(),
            is_first: !purchase.failed,
            pod: pod.to_owned(),
            uid: record.uid.clone(),
            nodes: failures.total,
            reason,
            retry_at: failures.retry_at(&POD_WAITS).max(retry_at),
        };
        purchase.failed = true;
        if self.reports.len() < MAX_REPORTS {
            self.reports.push(report);
        }
    }

    /// Forgets pods that are bound or long gone, and workloads without a recent failure. A change that can help a pod ends its backoff.
    fn forget(&mut self, state: &ClusterState, now: UnixMillis) {
        let is_old = |failures: &Failures| failures.failed_at.is_older_than(MEMORY, now);
        let mut gone = 0;
        self.pods.retain(|pod, failures| {
            if let Some(record) = state.pods.get(pod) {
                return record.node.is_none() && record.active();
            }
            gone += 1;
            gone <= MAX_GONE && !is_old(failures)
        });
        self.uses.retain(|pod, _| state.pods.get(pod).is_some_and(|record| record.node.is_none()));
        self.workloads.retain(|_, failures| {
            let works = failures.bound_at.is_some_and(|at| !at.is_older_than(WORKS, now));
            works || (failures.total > 0 && !is_old(failures))
        });
        self.seen.retain(|_, seen| seen.lasts(now));
        if !self.has_failures() {
            return;
        }
        let supply = supply_of(state);
        self.seen.retain(|_, seen| seen.supply == supply);
        for failures in self.workloads.values_mut() {
            failures.adapt(supply);
        }
        for (pod, failures) in &mut self.pods {
            if let Some(record) = state.pods.get(pod) {
                failures.adapt(supply_for(supply, record));
            }
        }
    }

    fn has_failures(&self) -> bool {
        !self.pods.is_empty() || self.workloads.values().any(|failures| failures.total > 0)
    }

    /// Pods whose wait is not over, and all but one of each workload that failed last.
    fn choose_left_out(
        &mut self,
        state: &ClusterState,
        demand: &BTreeSet<&String>,
        is_waiting: impl Fn(&str) -> bool,
        now: UnixMillis,
    ) {
        self.left_out.clear();
        if !self.has_failures() {
            return;
        }
        // Workloads of which a pod is expected on a node that was purchased after the last failure.
        let mut tested: HashSet<Workload> = HashSet::new();
        for (pod, claim) in &self.expected {
            let Some(workload) = state.pods.get(pod).and_then(Workload::of) else { continue };
            if let (Some(failures), Some(purchase)) = (self.workloads.get(&workload), self.purchases.get(claim))
                && purchase.pass >= failures.pass
            {
                tested.insert(workload);
            }
        }
        let mut next: HashMap<Workload, (bool, usize, &String)> = HashMap::new();
        for pod in demand {
            let failures = self.pods.get(*pod);
            if failures.is_some_and(|failures| now < failures.retry_at(&POD_WAITS)) {
                self.left_out.insert((*pod).clone());
                continue;
            }
            let Some(workload) = state.pods.get(*pod).and_then(Workload::of) else { continue };
            let Some(of_workload) = self.workloads.get(&workload).filter(|of| of.level > 0) else { continue };
            self.left_out.insert((*pod).clone());
            if now >= of_workload.retry_at(&WORKLOAD_WAITS) && !tested.contains(&workload) {
                let rank = (is_waiting(pod), failures.map_or(0, |failures| failures.level), *pod);
                let first = next.entry(workload).or_insert(rank);
                *first = rank.min(*first);
            }
        }
        for (_, _, pod) in next.into_values() {
            self.left_out.remove(pod);
        }
    }
}

/// A value that changes when something does that decides what new nodes are like: a NodePool, an EC2NodeClass or a DaemonSet.
fn supply_of(state: &ClusterState) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.daemons.revision().hash(&mut hasher);
    for (name, pool) in &state.pools {
        (name, pool.metadata.generation).hash(&mut hasher);
    }
    for (name, class) in &state.classes {
        (name, class.metadata.generation).hash(&mut hasher);
    }
    hasher.finish()
}

/// The same for one pod: it changes with the pod's requests and constraints, too.
fn supply_for(supply: u64, pod: &PodRecord) -> u64 {
    let mut hasher = DefaultHasher::new();
    (supply, pod.entry.as_ref().ok().map(|entry| Arc::as_ptr(&entry.class))).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
