//! Which outdated nodes of static NodePools are replaced now: one new node each, within the budgets and `spec.limits.nodes` (Karpenter core reference
//! 4.12).

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;
use stowage_api::NodePool;
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::candidates::allowances;
use crate::decisions::disruption::late_nodes::pools_with_late_nodes;
use crate::decisions::disruption::obstacle::Obstacle;
use crate::decisions::disruption::outdated::{PoolKind, order, outdated};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::static_pools::replicas::{Change, Size, may_launch};
use crate::state::plan_record::Holds;
use crate::state::tables::ClusterState;

/// Why an outdated node stays whose NodePool may have no node more.
const NO_ROOM: &str = "spec.limits.nodes of its NodePool leaves no room for a replacement, raise it";

/// The nodes of static NodePools that are outdated for one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutdatedReplicas {
    /// NodeClaims to replace now.
    pub due: Vec<String>,
    /// NodeClaims that can't be replaced now, and why.
    pub blocked: Vec<(String, String)>,
}

/// Decides about the nodes of static NodePools that are outdated for this reason. A NodePool that has too few or too many nodes gets the right number first.
pub fn replaceable(
    state: &ClusterState,
    holds: &Holds,
    backed_off: &BTreeSet<String>,
    reason: DisruptionReason,
    now: UnixMillis,
) -> OutdatedReplicas {
    let nodes = outdated(state, holds, PoolKind::Static, reason, now);
    let mut out = OutdatedReplicas::default();
    if nodes.is_empty() {
        return out;
    }
    let blocked = nodes.iter().filter_map(|node| Some((node.claim.clone(), node.blocked_by.as_ref()?.to_string())));
    out.blocked = blocked.collect();
    let allowances = allowances(state, reason, now);
    let allowed =
        |pool: &str| allowances.get(pool).map_or(0, |allowance| usize::try_from(allowance.nodes).unwrap_or(0));
    let late = pools_with_late_nodes(state, now);
    let mut quotas: BTreeMap<&str, Quota> = BTreeMap::new();
    for node in order(&nodes, backed_off) {
        let Some(pool) = state.pools.get(&node.pool).filter(|pool| may_launch(pool)) else { continue };
        if let Some(newest) = late.get(&node.pool) {
            out.blocked.push((node.claim.clone(), Obstacle::LateNode(newest.clone()).to_string()));
            continue;
        }
        let quota = quotas.entry(&node.pool).or_insert_with(|| Quota::of(state, pool, allowed(&node.pool)));
        if quota.nodes > 0 {
            quota.nodes -= 1;
            out.due.push(node.claim.clone());
        } else if quota.is_limited {
            out.blocked.push((node.claim.clone(), NO_ROOM.to_owned()));
        }
    }
    out
}

/// How many nodes of a static NodePool may be replaced now.
struct Quota {
    nodes: usize,
    /// Whether `spec.limits.nodes` will never allow a replacement.
    is_limited: bool,
}

impl Quota {
    fn of(state: &ClusterState, pool: &NodePool, allowed: usize) -> Self {
        let size = Size::of(state, &pool.name_any());
        if size.change(pool) != Change::default() {
            return Self { nodes: 0, is_limited: false };
        }
        let room = size.room(pool);
        Self { nodes: room.min(allowed), is_limited: room == 0 && size.existing == size.replicas.len() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::holds::resolve;

    /// The NodePool with this spec, and drifted nodes of it.
    fn state(spec: &Value, drifted: usize) -> ClusterState {
        let mut state = ClusterState::default();
        let status = json!({"conditions": objects::conditions_true(&["Ready"])});
        state.apply_pool(objects::node_pool("p", &json!({"spec": spec, "status": status})));
        for n in 0..drifted {
            let name = format!("c{n}");
            let meta = json!({"labels": {(labels::NODE_POOL): "p"}});
            let status = objects::launched(&name, &["Launched", "Registered", "Initialized", "Drifted"]);
            state.apply_claim(objects::claim(&name, &json!({"metadata": meta, "status": status})));
            let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
            let spec = json!({"providerID": format!("aws:///z/{name}")});
            state.apply_node(objects::node(&name, &json!({"spec": spec, "status": ready})));
        }
        state
    }

    fn found(state: &ClusterState, backed_off: &[&str]) -> OutdatedReplicas {
        let backed_off = backed_off.iter().map(|name| (*name).to_owned()).collect();
        replaceable(state, &resolve(state, UnixMillis(1)), &backed_off, DisruptionReason::Drifted, UnixMillis(1))
    }

    #[test]
    fn nodes_of_equal_age_are_replaced_within_the_budget_before_they_expire() {
        let mut state = state(&json!({"replicas": 4, "disruption": {"budgets": [{"nodes": "1"}]}}), 4);
        for n in 0..4 {
            let mut claim = serde_json::to_value(&*state.claims[&format!("c{n}")]).unwrap();
            claim["metadata"]["creationTimestamp"] = json!("1970-01-01T00:00:00Z");
            claim["spec"]["expireAfter"] = json!("100s");
            claim["status"]["conditions"].as_array_mut().unwrap().retain(|found| found["type"] != "Drifted");
            state.apply_claim(serde_json::from_value(claim).unwrap());
        }
        for (seconds, due) in [(89, 0), (90, 1)] {
            let now = UnixMillis(seconds * 1_000);
            let holds = resolve(&state, now);
            let found = replaceable(&state, &holds, &BTreeSet::new(), DisruptionReason::Expired, now);
            assert_eq!((found.due.len(), found.blocked.len()), (due, 0), "after {seconds} s");
            assert!(replaceable(&state, &holds, &BTreeSet::new(), DisruptionReason::Drifted, now).due.is_empty());
        }
    }

    #[test]
    fn b50_drifted_nodes_of_a_static_pool_are_replaced_within_budget_and_limit() {
        let all = json!([{"nodes": "100%"}]);
        for (case, spec, due, blocked) in [
            ("all", json!({"replicas": 5, "disruption": {"budgets": all}}), 5, 0),
            (
                "a budget",
                json!({"replicas": 5, "disruption": {"budgets": [{"nodes": "2"}]}, "limits": {"nodes": "9"}}),
                2,
                0,
            ),
            (
                "a limit",
                json!({"replicas": 5, "disruption": {"budgets": [{"nodes": "4"}]}, "limits": {"nodes": "7"}}),
                2,
                0,
            ),
            ("no budget left", json!({"replicas": 5, "disruption": {"budgets": [{"nodes": "0"}]}}), 0, 0),
            (
                "a limit without room",
                json!({"replicas": 5, "disruption": {"budgets": all}, "limits": {"nodes": "5"}}),
                0,
                5,
            ),
            ("too few nodes", json!({"replicas": 6, "disruption": {"budgets": all}}), 0, 0),
            ("too many nodes", json!({"replicas": 4, "disruption": {"budgets": all}}), 0, 0),
            ("dynamic", json!({"disruption": {"budgets": all}}), 0, 0),
        ] {
            let found = found(&state(&spec, 5), &[]);
            assert_eq!((found.due.len(), found.blocked.len()), (due, blocked), "{case}");
        }
    }

    #[test]
    fn a_protected_node_and_one_that_was_given_up_stay() {
        let spec = json!({"replicas": 3, "disruption": {"budgets": [{"nodes": "100%"}]}});
        let mut state = state(&spec, 3);
        let meta = json!({"annotations": {(labels::DO_NOT_DISRUPT): "true"}});
        state.apply_node(objects::node("c0", &json!({"metadata": meta, "spec": {"providerID": "aws:///z/c0"}})));
        let found = found(&state, &["c1"]);
        assert_eq!(found.due, ["c2"]);
        let [(claim, why)] = &found.blocked[..] else { panic!("{:?}", found.blocked) };
        assert!(claim == "c0" && why.contains(labels::DO_NOT_DISRUPT), "{why}");
    }

    #[test]
    fn no_node_is_replaced_while_the_newest_one_does_not_start_up() {
        let spec = json!({"replicas": 3, "disruption": {"budgets": [{"nodes": "100%"}]}});
        let mut state = state(&spec, 2);
        let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "creationTimestamp": "2026-01-01T00:00:00Z"});
        state.apply_claim(objects::claim("late", &json!({"metadata": meta, "status": objects::launched("late", &[])})));
        let at =
            |minutes: u64| UnixMillis::parse_rfc3339("2026-01-01T00:00:00Z").unwrap() + Duration::from_mins(minutes);
        for (minutes, due, blocked) in [(1, 2, 0), (30, 0, 2), (61, 2, 0)] {
            let found = replaceable(
                &state,
                &resolve(&state, at(minutes)),
                &BTreeSet::new(),
                DisruptionReason::Drifted,
                at(minutes),
            );
            assert_eq!((found.due.len(), found.blocked.len()), (due, blocked), "after {minutes} minutes");
        }
    }
}
