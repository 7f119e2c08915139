//! What blocks the voluntary disruption of a node (Karpenter core reference 4.2).

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::model::labels;
use crate::state::object_ext::ObjectExt;
use crate::state::pod_budgets::EvictionBlock;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// What blocks the replacement of a drifted node. Its pods do not when the claim has a `terminationGracePeriod`.
pub fn drift_block(state: &ClusterState, claim: &NodeClaim, node: &Node) -> Option<String> {
    let key = labels::DO_NOT_DISRUPT;
    if node.is_protected() {
        return Some(format!("its Node has the annotation {key}"));
    }
    if claim.spec.termination_grace_period.is_some() {
        return None;
    }
    let name = node.name_any();
    let protected = state.pods_on(&name).filter(|pod| pod.do_not_disrupt && pod.active());
    let pod = protected.map(PodRecord::key).min();
    pod.map(|pod| format!("pod {pod} has the annotation {key}")).or_else(|| budget_block(state, &name))
}

/// Why a pod on the node cannot be evicted now because of PodDisruptionBudgets: the first such pod by name.
pub fn budget_block(state: &ClusterState, node: &str) -> Option<String> {
    state.pods_on(node).find_map(|pod| {
        let (pod, block) = (pod.key(), state.pod_budgets.block(pod)?);
        Some(match block {
            EvictionBlock::Exhausted(budget) => {
                format!("pdb prevents pod evictions: {budget} allows no disruption of pod {pod}")
            }
            EvictionBlock::Several(first, second) => {
                format!("multiple PDBs: {first} and {second} select pod {pod}, so that it can't be evicted")
            }
            EvictionBlock::TooManyBudgets => {
                format!("the namespace of pod {pod} has too many PDBs with wide selectors")
            }
        })
    })
}

/// [`budget_block`] for the node of a claim.
pub fn budget_block_of_claim(state: &ClusterState, claim: &str) -> Option<String> {
    let node = state.claims.get(claim).and_then(|claim| state.node_of(claim))?;
    budget_block(state, &node.name_any())
}
