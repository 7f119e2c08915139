//! Why a node stays: what blocks its voluntary disruption (Karpenter core reference 4.2, 4.8), with the text for events.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::events::{self, DeclaredEvent};
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;

use crate::decisions::disruption::obstacle::Obstacle;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::pod_budgets::EvictionBlock;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// Why a node stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Blocker {
    /// It is not launched, not registered or not initialized.
    NotInitialized,
    /// It is marked, or being deleted.
    Leaving,
    /// Its NodePool is static.
    Static,
    /// Its NodePool does not exist.
    NoNodePool,
    /// `consolidateAfter` is `Never`.
    Never,
    /// It has pods, and the policy is `WhenEmpty`.
    WhenEmpty,
    /// Its Node has the annotation `karpenter.sh/do-not-disrupt`.
    NodeProtected,
    /// This pod has it.
    PodProtected(String),
    /// This pod cannot be evicted.
    PodBudget(String, EvictionBlock),
    /// Pods that are expected on it.
    Nominated(usize),
    /// Its price is not known: its NodePool is not ready, or its offering does not exist.
    NoPrice,
    /// It is not quiet for `consolidateAfter` before this time.
    NotQuiet(UnixMillis),
    /// Until this time the newest pod of the workload of this pod is younger than the least interval between evictions.
    WorkloadChanged(String, UnixMillis),
    /// The budgets of its NodePool allow no disruption now.
    NodePoolBudget,
    /// The cap on disruptions per minute is reached.
    RateCap,
    /// Its pods have no other place, or not a cheaper one.
    Obstacle(Obstacle),
    /// Its removal saves less per hour than what is needed.
    SavesTooLittle { saving: MicroUsd, needed: MicroUsd },
    /// Its last move was rolled back.
    Abandoned,
    /// A later decision tries it.
    Undecided,
    /// It would be disrupted for this reason, but disruption is only reported.
    ReportedOnly(DisruptionReason),
}

impl Blocker {
    /// The value of the label `blocker` of metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotInitialized => "not_initialized",
            Self::Leaving => "leaving",
            Self::Static => "static",
            Self::NoNodePool => "no_node_pool",
            Self::Never => "consolidate_after_never",
            Self::WhenEmpty => "when_empty",
            Self::NodeProtected => "node_do_not_disrupt",
            Self::PodProtected(_) => "pod_do_not_disrupt",
            Self::PodBudget(..) => "pod_disruption_budget",
            Self::Nominated(_) => "nominated",
            Self::NoPrice => "no_price",
            Self::NotQuiet(_) => "consolidate_after",
            Self::WorkloadChanged(..) => "min_eviction_interval",
            Self::NodePoolBudget => "node_pool_budget",
            Self::RateCap => "rate_cap",
            Self::Obstacle(obstacle) => obstacle.kind(),
            Self::SavesTooLittle { .. } => "saves_too_little",
            Self::Abandoned => "abandoned",
            Self::Undecided => "undecided",
            Self::ReportedOnly(_) => "reported_only",
        }
    }

    /// The event that reports it on Node and NodeClaim. `None`: it passes by itself, is reported elsewhere, or is what the user asked for.
    pub fn event(&self) -> Option<&'static DeclaredEvent> {
        match self {
            Self::NotInitialized
            | Self::NoNodePool
            | Self::NodeProtected
            | Self::PodProtected(_)
            | Self::PodBudget(..)
            | Self::Nominated(_)
            | Self::Abandoned => Some(events::DISRUPTION_BLOCKED),
            Self::Never | Self::WhenEmpty | Self::NoPrice | Self::Obstacle(_) | Self::SavesTooLittle { .. } => {
                Some(events::UNCONSOLIDATABLE)
            }
            Self::ReportedOnly(_) => Some(events::DISRUPTION_REPORTED),
            Self::Leaving
            | Self::Static
            | Self::NotQuiet(_)
            | Self::WorkloadChanged(..)
            | Self::NodePoolBudget
            | Self::RateCap
            | Self::Undecided => None,
        }
    }

    /// When it ends, if that is known.
    pub fn until(&self) -> Option<UnixMillis> {
        match self {
            Self::NotQuiet(at) | Self::WorkloadChanged(_, at) => Some(*at),
            _ => None,
        }
    }

    /// Whether it usually passes by itself within minutes.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::NotInitialized | Self::Nominated(_))
    }

    /// A hash that stays the same while only figures in the text change.
    pub fn identity(&self) -> u64 {
        let pod = match self {
            Self::PodProtected(pod) | Self::PodBudget(pod, _) | Self::WorkloadChanged(pod, _) => Some(&**pod),
            Self::Obstacle(obstacle) => obstacle.pod(),
            _ => None,
        };
        let kind = if let Self::ReportedOnly(reason) = self { reason.as_str() } else { self.kind() };
        let mut hasher = DefaultHasher::new();
        (kind, pod).hash(&mut hasher);
        hasher.finish()
    }
}

impl fmt::Display for Blocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = labels::DO_NOT_DISRUPT;
        match self {
            Self::NotInitialized => f.write_str("the node is not initialized"),
            Self::Leaving => f.write_str("the node is leaving"),
            Self::Static => f.write_str("its NodePool is static"),
            Self::NoNodePool => f.write_str("its NodePool is not found"),
            Self::Never => f.write_str("consolidation is disabled: consolidateAfter of its NodePool is Never"),
            Self::WhenEmpty => f.write_str(
                "consolidation of nodes with pods is disabled: consolidationPolicy of its NodePool is WhenEmpty",
            ),
            Self::NodeProtected => write!(f, "its Node or NodeClaim has the annotation {key}"),
            Self::PodProtected(pod) => write!(f, "pod {pod} has the annotation {key}"),
            Self::PodBudget(pod, EvictionBlock::Exhausted(budget)) => {
                write!(f, "pdb prevents pod evictions: {budget} allows no disruption of pod {pod}")
            }
            Self::PodBudget(pod, EvictionBlock::Several(first, second)) => {
                write!(f, "multiple PDBs: {first} and {second} select pod {pod}, so that it can't be evicted")
            }
            Self::PodBudget(pod, EvictionBlock::TooManyBudgets) => {
                write!(f, "the namespace of pod {pod} has too many PDBs with wide selectors")
            }
            Self::Nominated(1) => f.write_str("the node is nominated for a pending pod"),
            Self::Nominated(pods) => write!(f, "the node is nominated for {pods} pending pods"),
            Self::NoPrice => f.write_str(
                "its price is not known: its NodePool is not ready, or does not offer its type, zone and capacity type",
            ),
            Self::NotQuiet(at) => write!(f, "consolidateAfter ends at {} unless pods come or go", at.rfc3339()),
            Self::WorkloadChanged(pod, at) => {
                let key = labels::MIN_EVICTION_INTERVAL;
                let at = at.rfc3339();
                write!(f, "the workload of pod {pod} has a new pod: its NodePool's {key} ends at {at}")
            }
            Self::NodePoolBudget => f.write_str("the budgets of its NodePool allow no disruption now"),
            Self::RateCap => f.write_str("the cap on disruptions per minute is reached"),
            Self::Obstacle(obstacle) => obstacle.fmt(f),
            Self::SavesTooLittle { saving, .. } if saving.0 <= 0 => {
                f.write_str("can't replace with a cheaper node: the new nodes for its pods would cost as much or more")
            }
            Self::SavesTooLittle { saving, needed } => write!(
                f,
                "its removal would save {:.4} USD/h, less than the {:.4} USD/h that pay for the evictions and new nodes",
                saving.usd(),
                needed.usd()
            ),
            Self::Abandoned => f.write_str("its last move was rolled back, as its event DisruptionCanceled says"),
            Self::Undecided => f.write_str("one of the next decisions tries it"),
            Self::ReportedOnly(reason) => {
                write!(f, "disruption is only reported; it would be disrupted now as {}", reason.as_str())
            }
        }
    }
}

/// Whether the annotation of the Node or of its NodeClaim protects the node from voluntary disruption.
pub fn is_node_protected(state: &ClusterState, node: &Node) -> bool {
    state.is_protected(node) || state.claim_of(node).is_some_and(|claim| state.is_protected(&**claim))
}

/// What protects a node or a pod on it from voluntary disruption.
pub fn protection(state: &ClusterState, node: &Node) -> Option<Blocker> {
    if is_node_protected(state, node) {
        return Some(Blocker::NodeProtected);
    }
    let name = node.name_any();
    let protected = state.pods_on(&name).filter(|pod| pod.do_not_disrupt && pod.active());
    protected.map(PodRecord::key).min().map(Blocker::PodProtected)
}

/// What protects a node that is to be replaced for this reason. The pods of a drifted one do not when the claim has a `terminationGracePeriod`; those of a
/// node that expires have the rest of its lifetime.
pub fn replacement_protection(
    state: &ClusterState,
    claim: &NodeClaim,
    node: &Node,
    reason: DisruptionReason,
) -> Option<Blocker> {
    if evicts_protected_pods(claim, reason) {
        return is_node_protected(state, node).then_some(Blocker::NodeProtected);
    }
    protection(state, node)
}

/// What blocks the replacement of a node for this reason: what protects it, and PodDisruptionBudgets where that is no matter of time.
pub fn replacement_block(
    state: &ClusterState,
    claim: &NodeClaim,
    node: &Node,
    reason: DisruptionReason,
) -> Option<Blocker> {
    let of_budgets = || surging_budget_block(state, &node.name_any()).filter(|_| !evicts_protected_pods(claim, reason));
    replacement_protection(state, claim, node, reason).or_else(of_budgets)
}

/// Whether the `terminationGracePeriod` of the claim ends what protects its pods.
pub fn evicts_protected_pods(claim: &NodeClaim, reason: DisruptionReason) -> bool {
    reason == DisruptionReason::Drifted && claim.spec.termination_grace_period.is_some()
}

/// Why a pod on the node cannot be evicted now because of PodDisruptionBudgets: the first such pod by name.
pub fn budget_block(state: &ClusterState, node: &str) -> Option<Blocker> {
    state.pods_on(node).find_map(|pod| Some(Blocker::PodBudget(pod.key(), state.pod_budgets.block(pod)?)))
}

/// The same for a removal before which pods surge: their successors count when they are ready.
pub fn surging_budget_block(state: &ClusterState, node: &str) -> Option<Blocker> {
    let blocks = |pod: &PodRecord| Some(Blocker::PodBudget(pod.key(), state.pod_budgets.block(pod)?));
    state.pods_on(node).filter(|pod| !pod.will_surge()).find_map(blocks)
}
