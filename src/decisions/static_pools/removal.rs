//! Which nodes of a static NodePool are removed when it has too many (Karpenter core reference 3.20).
//!
//! First NodeClaims without an instance, then nodes without pods, then by the cost of the evictions and the remaining lifetime. Nodes with a pod that is
//! protected or whose eviction a PodDisruptionBudget refuses now are last. The budgets of the NodePool do not apply: its owner asked for fewer nodes.

use std::cmp::Reverse;
use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::{NodeClaim, conditions};
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::blockers::{budget_block, protection};
use crate::decisions::disruption::candidates::pods_to_reschedule;
use crate::decisions::disruption::eviction_cost::of_node;
use crate::decisions::lifecycle::expiration::remaining_lifetime;
use crate::decisions::static_pools::replicas::{Replica, Size};
use crate::state::object_ext::NodeClaimExt;
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// What the removal of a node means for its pods, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Harm {
    /// It has no instance yet.
    NotLaunched,
    /// It has no pods, or only those of DaemonSets.
    Empty,
    /// Its pods move.
    Evictions,
    /// A pod on it must not be disrupted.
    Protected,
}

/// The NodeClaims to delete so that a static NodePool has this many nodes less; a node goes with its replacement.
pub fn removals(
    state: &ClusterState,
    holds: &Holds,
    size: &Size,
    count: usize,
    now: UnixMillis,
) -> Vec<Arc<NodeClaim>> {
    let mut order: Vec<&Replica> = size.replicas.iter().collect();
    order.sort_by_cached_key(|replica| {
        let claim = &replica.claim;
        let (harm, cost) = harm(state, holds, claim, now);
        // Of nodes that cost the same, those go first that pods can't use yet or that have to be replaced anyway.
        let is_initialized = claim.has_condition(conditions::INITIALIZED);
        (harm, cost, is_initialized, Reverse(claim.has_condition(conditions::DRIFTED)), claim.name_any())
    });
    let removed = order.into_iter().take(count);
    removed.flat_map(|replica| [Some(&replica.claim), replica.replacement.as_ref()]).flatten().cloned().collect()
}

/// The harm, and the cost of the evictions times the permille of its lifetime that the node has left.
fn harm(state: &ClusterState, holds: &Holds, claim: &NodeClaim, now: UnixMillis) -> (Harm, i64) {
    if claim.provider_id().is_none() {
        return (Harm::NotLaunched, 0);
    }
    let pods = pods_to_reschedule(state, holds, claim);
    let Some(node) = state.node_of(claim) else {
        return (if pods == 0 { Harm::Empty } else { Harm::Evictions }, 0);
    };
    let name = node.name_any();
    if protection(state, node).is_some() || budget_block(state, &name).is_some() {
        let cost = of_node(state.pods_on(&name), now).0.saturating_mul(remaining_lifetime(claim, now));
        return (Harm::Protected, cost);
    }
    if pods == 0 {
        return (Harm::Empty, 0);
    }
    (Harm::Evictions, of_node(state.pods_on(&name), now).0.saturating_mul(remaining_lifetime(claim, now)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::holds::resolve;

    const NOW: UnixMillis = UnixMillis(1_800_000_000_000);
    const UP: &[&str] = &["Launched", "Registered", "Initialized"];

    /// A claim of the NodePool and, if it is launched, its node.
    fn put(state: &mut ClusterState, name: &str, conditions: Option<&[&str]>, spec: &Value) {
        let status = conditions.map(|conditions| objects::launched(name, conditions));
        let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "creationTimestamp": (NOW - std::time::Duration::from_hours(1)).rfc3339()});
        state.apply_claim(objects::claim(name, &json!({"metadata": meta, "spec": spec, "status": status})));
        if conditions.is_some() {
            state.apply_node(objects::node(name, &json!({"spec": {"providerID": format!("aws:///z/{name}")}})));
        }
    }

    fn bind(state: &mut ClusterState, node: &str, count: usize, annotations: &Value) {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
        for n in 0..count {
            let meta = json!({"ownerReferences": [owner], "annotations": annotations, "labels": {"app": node}});
            let pod = objects::pod(&format!("{node}-{n}"), &json!({"metadata": meta, "spec": {"nodeName": node}}));
            state.apply_pod(&pod, NOW);
        }
    }

    fn order(state: &ClusterState) -> Vec<String> {
        let size = Size::of(state, "p");
        let removed = removals(state, &resolve(state, NOW), &size, size.replicas.len(), NOW);
        removed.iter().map(|claim| claim.name_any()).collect()
    }

    #[test]
    fn nodes_are_removed_by_what_it_means_for_their_pods() {
        let mut state = ClusterState::default();
        let none = json!({});
        put(&mut state, "protected", Some(UP), &none);
        bind(&mut state, "protected", 1, &json!({(labels::DO_NOT_DISRUPT): "true"}));
        put(&mut state, "budget", Some(UP), &none);
        bind(&mut state, "budget", 3, &none);
        let selector = json!({"matchLabels": {"app": "budget"}});
        state.pod_budgets.apply(&objects::pod_budget("b", &json!({"spec": {"selector": selector}})));
        put(&mut state, "two-pods", Some(UP), &none);
        bind(&mut state, "two-pods", 2, &none);
        // Nine tenths of its lifetime are over.
        put(&mut state, "expiring", Some(UP), &json!({"expireAfter": "4000s"}));
        bind(&mut state, "expiring", 5, &none);
        put(&mut state, "one-pod", Some(UP), &none);
        bind(&mut state, "one-pod", 1, &none);
        put(&mut state, "empty", Some(UP), &none);
        put(&mut state, "drifted", Some(&["Launched", "Registered", "Initialized", "Drifted"]), &none);
        put(&mut state, "starting", Some(&["Launched"]), &none);
        put(&mut state, "unlaunched", None, &none);
        assert_eq!(
            order(&state),
            ["unlaunched", "starting", "drifted", "empty", "expiring", "one-pod", "two-pods", "protected", "budget"]
        );
        let size = Size::of(&state, "p");
        assert_eq!(removals(&state, &resolve(&state, NOW), &size, 2, NOW).len(), 2);
        assert_eq!(removals(&state, &resolve(&state, NOW), &size, 99, NOW).len(), 9);
    }

    #[test]
    fn a_protected_node_is_last_although_it_is_empty() {
        let mut state = ClusterState::default();
        put(&mut state, "a", Some(UP), &json!({}));
        let mut protected = (*state.claims["a"]).clone();
        protected.annotations_mut().insert(labels::DO_NOT_DISRUPT.into(), "true".into());
        assert!(state.is_protected(&protected));
        state.apply_claim(protected);
        put(&mut state, "b", Some(UP), &json!({}));
        bind(&mut state, "b", 9, &json!({}));
        assert_eq!(order(&state), ["b", "a"]);
    }
}
