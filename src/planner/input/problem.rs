//! What a plan is made from: plain data, parsed once at the edge.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;

use crate::api::Requirement;
use crate::model::offering::{Catalog, MicroUsd};
use crate::model::pod_class::PodClass;
use crate::model::resources::Resources;
pub use crate::planner::columns::table::ColumnCache;
use crate::planner::input::default_spread::Services;
use crate::planner::input::volumes::Volumes;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// A pod as the planner sees it: identity, labels and its interned class.
#[derive(Clone, Debug)]
pub struct PodEntry {
    /// `namespace/name`.
    pub key: Arc<str>,
    /// UID.
    pub uid: Arc<str>,
    /// Labels (shared between equal label sets).
    pub labels: Arc<Labels>,
    /// Everything else that scheduling looks at, shared between pods that ask for the same.
    pub class: Arc<PodClass>,
    /// `namespace/name` of its PersistentVolumeClaims, sorted; they are not part of its class.
    pub claims: Arc<[Arc<str>]>,
    /// UID of the controlling owner.
    pub owner: Option<Arc<str>>,
    /// Creation time, milliseconds since the epoch.
    pub created_at_ms: i64,
    /// Being deleted: it keeps its room until it is gone, but no topology spread counts it.
    pub deleting: bool,
}

/// The pods of a node, and what of them is the same in every plan.
#[derive(Clone, Debug, Default)]
pub struct NodePods {
    entries: Vec<PodEntry>,
    requests: Resources,
    ruling: Vec<Arc<PodClass>>,
}

impl NodePods {
    /// Adds a pod.
    pub fn push(&mut self, pod: PodEntry) {
        self.requests.add(&pod.class.requests);
        let rules = !pod.class.anti_affinity.is_empty() || !pod.class.host_ports.is_empty();
        if rules && !self.ruling.iter().any(|class| Arc::ptr_eq(class, &pod.class)) {
            self.ruling.push(Arc::clone(&pod.class));
        }
        self.entries.push(pod);
    }

    /// What they ask for in sum.
    pub fn requests(&self) -> &Resources {
        &self.requests
    }

    /// The classes among them that keep other pods away: by required anti-affinity, or by host ports.
    pub fn ruling(&self) -> &[Arc<PodClass>] {
        &self.ruling
    }
}

impl Deref for NodePods {
    type Target = [PodEntry];

    fn deref(&self) -> &[PodEntry] {
        &self.entries
    }
}

impl<'a> IntoIterator for &'a NodePods {
    type Item = &'a PodEntry;
    type IntoIter = std::slice::Iter<'a, PodEntry>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.iter()
    }
}

impl Extend<PodEntry> for NodePods {
    fn extend<I: IntoIterator<Item = PodEntry>>(&mut self, pods: I) {
        pods.into_iter().for_each(|pod| self.push(pod));
    }
}

impl FromIterator<PodEntry> for NodePods {
    fn from_iter<I: IntoIterator<Item = PodEntry>>(pods: I) -> Self {
        let mut out = Self::default();
        out.extend(pods);
        out
    }
}

/// A node that exists or is being made.
#[derive(Clone, Debug)]
pub struct NodeState {
    /// Node name; the NodeClaim's name while there is no Node.
    pub name: Arc<str>,
    /// Labels (the NodeClaim's until the node registers).
    pub labels: Labels,
    /// Taints that a pod must tolerate. Start-up and known ephemeral taints are left out before initialization.
    pub taints: Vec<Taint>,
    /// Allocatable resources.
    pub allocatable: Resources,
    /// Pods bound to it or held for it, daemons included.
    pub pods: NodePods,
    /// Requests of daemon pods that will come but are not in `pods` yet.
    pub daemon_reserve: Resources,
    /// Those of them that want ports on the host, which no other pod may take.
    pub daemons: Vec<Arc<PodClass>>,
    /// False when nothing more may be put there (cordoned, being disrupted, not ready): its pods still count for topology.
    pub schedulable: bool,
    /// Registered and initialized; nodes that are come first.
    pub initialized: bool,
    /// What it costs; zero when not ours.
    pub price: MicroUsd,
}

/// A NodePool with what can be bought for it.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Name.
    pub name: Arc<str>,
    /// Higher first; absent weight is 0.
    pub weight: i32,
    /// Template labels, with `karpenter.sh/nodepool` and the node class label.
    pub labels: Labels,
    /// Permanent taints.
    pub taints: Vec<Taint>,
    /// Requirements of the template.
    pub requirements: Vec<Requirement>,
    /// Upper bound on the pool's total capacity by resource; `None` entries are unbounded.
    pub limits: Option<Resources>,
    /// `limits.nodes`.
    pub node_limit: Option<i64>,
    /// Which resources `limits` names (a named zero is a bound of zero).
    pub limited: Vec<Arc<str>>,
    /// Capacity of the pool's nodes, launches in flight included, deleting nodes not.
    pub usage: Resources,
    /// Nodes of the pool, launches in flight included.
    pub node_count: i64,
    /// What can be bought.
    pub catalog: Arc<Catalog>,
}

/// A DaemonSet's pod, as overhead.
#[derive(Clone, Debug)]
pub struct Daemon {
    /// `namespace/name` of the DaemonSet.
    pub key: Arc<str>,
    /// Class of its pods.
    pub class: Arc<PodClass>,
}

/// How preferences are treated (`--preference-policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreferencePolicy {
    /// Treated as required, relaxed one by one where they can't be met.
    #[default]
    Respect,
    /// Ignored.
    Ignore,
}

/// How `minValues` is treated (`--min-values-policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MinValuesPolicy {
    /// Must hold.
    #[default]
    Strict,
    /// Lowered to what can be had.
    BestEffort,
}

/// The node sizes that may be bought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeSizes {
    /// Fewest vCPUs.
    pub least_vcpus: Option<i64>,
    /// Most vCPUs.
    pub most_vcpus: Option<i64>,
}

impl NodeSizes {
    /// Whether a node of this many millicores may be bought.
    pub fn allow(&self, cpu_milli: i64) -> bool {
        self.least_vcpus.is_none_or(|least| cpu_milli >= least.saturating_mul(1000))
            && self.most_vcpus.is_none_or(|most| cpu_milli <= most.saturating_mul(1000))
    }
}

/// Settings of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Preferences.
    pub preference_policy: PreferencePolicy,
    /// `minValues`.
    pub min_values_policy: MinValuesPolicy,
    /// Node sizes.
    pub node_sizes: NodeSizes,
    /// What a node costs beyond its price when plans are compared, per hour.
    pub node_penalty: MicroUsd,
    /// What an instance family is worth in percent when plans are compared; 100 where it isn't named.
    pub family_weights: BTreeMap<String, i64>,
    /// Spot and reserved capacity before on-demand, whatever it costs.
    pub prefer_spot: bool,
    /// Most pods of one controller on one node.
    pub workload_pods_per_node: Option<i32>,
}

impl Settings {
    /// A price as plans compare it: what is worth more than another for its price counts as cheaper.
    pub fn compared_price(&self, price: MicroUsd, family: Option<&str>) -> i64 {
        let weight = family.and_then(|family| self.family_weights.get(family)).copied().unwrap_or(100).max(1);
        let weighed = i128::from(price.0.max(0)) * 100 / i128::from(weight);
        i64::try_from(weighed).unwrap_or(i64::MAX).saturating_add(self.node_penalty.0.max(0))
    }
}

/// Everything [`crate::planner::output::plan`] looks at.
#[derive(Clone, Debug, Default)]
pub struct Problem {
    /// Pods to place.
    pub pods: Vec<PodEntry>,
    /// Nodes, ours and others', in flight or running; shared between problems while they stay as they are.
    pub nodes: Vec<Arc<NodeState>>,
    /// NodePools that are ready.
    pub pools: Vec<Pool>,
    /// DaemonSets.
    pub daemons: Vec<Daemon>,
    /// Labels of namespaces by name, for `namespaceSelector`.
    pub namespaces: Arc<BTreeMap<String, Labels>>,
    /// Claims, volumes, storage classes and attach limits.
    pub volumes: Arc<Volumes>,
    /// Services, for default spread.
    pub services: Arc<Services>,
    /// Settings.
    pub settings: Settings,
    /// What plans of problems that share it need to work out but once.
    pub memory: ColumnCache,
}

impl Problem {
    /// NodePools with their indexes, by name: their order in the input decides nothing.
    pub(crate) fn pools_by_name(&self) -> impl Iterator<Item = (usize, &Pool)> {
        let mut pools: Vec<_> = self.pools.iter().enumerate().collect();
        pools.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        pools.into_iter()
    }
}
