//! What a simulated removal of a node runs into.

use std::fmt;
use std::sync::Arc;

use stowage_model::time::UnixMillis;

/// Fewest cheaper instance types with which a spot node is replaced with a spot node (Karpenter core reference 4.8).
pub const MIN_ALTERNATIVES: usize = 15;

/// Why the removal of a node is not complete, or not wanted to save costs. The first of several counts. Pods are named `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// Plans fail over the node.
    LeftOutOfPlans,
    /// This pod fits on no node and no new node.
    NoPlace { pod: Arc<str>, reason: String },
    /// This pod, which waits, has no place without the node.
    NeededByWaitingPod(Arc<str>),
    /// This pod goes to a node that is not initialized.
    TargetNotInitialized(Arc<str>),
    /// A pod needs a new node of a NodePool whose newest node does not start up: that of this NodeClaim.
    LateNode(String),
    /// The spec of this pod is invalid, so that where it fits is not known.
    InvalidPod(Arc<str>),
    /// A new node would be without the pods of a DaemonSet that is left out of plans.
    DaemonLeftOut,
    /// A pod of a spot node goes to a new spot node, which may be interrupted sooner than the one that runs.
    SpotToSpot,
    /// The pods of a spot node go to a new spot node of which so few instance types are cheaper than it.
    FewAlternatives(usize),
    /// Its pods need a new node, and it was itself the last of so many replacements in a row, until this time.
    RepeatedReplacement(u8, UnixMillis),
}

impl Obstacle {
    /// Whether a drifted node stays, too: the price of its replacement does not matter.
    pub fn concerns_replacement(&self) -> bool {
        matches!(
            self,
            Self::LeftOutOfPlans
                | Self::NoPlace { .. }
                | Self::NeededByWaitingPod(_)
                | Self::TargetNotInitialized(_)
                | Self::LateNode(_)
        )
    }

    /// The value of the label `blocker` of metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::LeftOutOfPlans => "left_out_of_plans",
            Self::NoPlace { .. } => "no_place",
            Self::NeededByWaitingPod(_) => "needed_by_waiting_pod",
            Self::TargetNotInitialized(_) => "target_not_initialized",
            Self::LateNode(_) => "late_node",
            Self::InvalidPod(_) => "invalid_pod",
            Self::DaemonLeftOut => "daemon_left_out",
            Self::SpotToSpot => "spot_to_spot",
            Self::FewAlternatives(_) => "few_alternatives",
            Self::RepeatedReplacement(..) => "repeated_replacement",
        }
    }

    /// The pod that it names.
    pub fn pod(&self) -> Option<&str> {
        match self {
            Self::NoPlace { pod, .. }
            | Self::NeededByWaitingPod(pod)
            | Self::TargetNotInitialized(pod)
            | Self::InvalidPod(pod) => Some(pod),
            Self::LeftOutOfPlans
            | Self::LateNode(_)
            | Self::DaemonLeftOut
            | Self::SpotToSpot
            | Self::FewAlternatives(_)
            | Self::RepeatedReplacement(..) => None,
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeftOutOfPlans => f.write_str("the planner failed over the node, which is left out of plans"),
            Self::NoPlace { pod, reason } => {
                write!(f, "not all pods would schedule: {pod} fits on no other node, and on no new node: {reason}")
            }
            Self::NeededByWaitingPod(pod) => write!(f, "pod {pod}, which waits, has no place without the node"),
            Self::TargetNotInitialized(pod) => {
                write!(f, "not all pods would schedule: {pod} fits only on a node that is not initialized yet")
            }
            Self::LateNode(claim) => write!(
                f,
                "its pods need a new node, and the newest of its NodePool, that of NodeClaim {claim}, is not initialized: \
                 see its events; disruption goes on when it is, or when the NodePool changes"
            ),
            Self::InvalidPod(pod) => write!(f, "the spec of pod {pod} is invalid, so that where it fits is not known"),
            Self::DaemonLeftOut => f.write_str(
                "its pods need a new node, which would have no room for the pods of a DaemonSet that is left out of plans",
            ),
            Self::SpotToSpot => f.write_str(
                "its pods need a new node, and can't replace a spot node with a spot node: the feature gate SpotToSpotConsolidation is off",
            ),
            Self::FewAlternatives(types) => write!(
                f,
                "can't replace a spot node with a spot node: only {types} instance types for its pods are cheaper, and \
                 {MIN_ALTERNATIVES} are needed so that the new node is not interrupted soon; allow more types"
            ),
            Self::RepeatedReplacement(generation, until) => write!(
                f,
                "its pods need a new node, and it is itself replacement {generation} in a row within an hour: prices, demand or capacity go \
                 back and forth; until {} it is removed only when its pods have room on nodes that exist",
                until.rfc3339()
            ),
        }
    }
}
