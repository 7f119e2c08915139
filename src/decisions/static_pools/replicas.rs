//! The size of a static NodePool, and what it lacks.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::{NodeClaim, NodePool, conditions};
use stowage_model::quantity::parse_amount;

use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::progress::source_of;
use crate::state::object_ext::ObjectExt;
use crate::state::tables::ClusterState;

/// One node of a static NodePool: its NodeClaim, and the NodeClaim that replaces it.
#[derive(Clone, Debug, PartialEq)]
pub struct Replica {
    pub claim: Arc<NodeClaim>,
    pub replacement: Option<Arc<NodeClaim>>,
}

/// The NodeClaims of a static NodePool.
#[derive(Clone, Debug, PartialEq)]
pub struct Size {
    /// Nodes that stay, each with its replacement.
    pub replicas: Vec<Replica>,
    /// All NodeClaims: also replacements, and those that are being deleted, whose instances may still run.
    pub existing: usize,
}

/// What a static NodePool needs to have `spec.replicas` nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// NodeClaims to create, as far as `spec.limits.nodes` allows it.
    pub create: usize,
    /// NodeClaims that `spec.limits.nodes` does not allow.
    pub over_limit: usize,
    /// Nodes to remove.
    pub remove: usize,
}

/// Whether a NodeClaim stays: it is not deleted, and its node has no deadline such as that of a spot interruption.
pub fn stays(claim: &NodeClaim) -> bool {
    !claim.is_deleting() && DisruptionMark::of(claim).is_none_or(|mark| mark.deadline.is_none())
}

impl Size {
    /// The NodeClaims of the NodePool with this name.
    pub fn of(state: &ClusterState, pool: &str) -> Self {
        let all = || state.claim_index.of_pool(pool).filter_map(|name| state.claims.get(name));
        let replacement_of = |claim: &NodeClaim| {
            let name = source_of(claim)?.0.replaced_by?;
            state.claims.get(&name).filter(|replacement| stays(replacement)).cloned()
        };
        let replicas = all().filter(|claim| stays(claim));
        let mut replicas: Vec<Replica> =
            replicas.map(|claim| Replica { claim: Arc::clone(claim), replacement: replacement_of(claim) }).collect();
        let replacements: BTreeSet<String> =
            replicas.iter().filter_map(|replica| Some(replica.replacement.as_ref()?.name_any())).collect();
        replicas.retain(|replica| !replacements.contains(&replica.claim.name_any()));
        Self { replicas, existing: all().count() }
    }

    /// NodeClaims that `spec.limits.nodes` allows beside those that exist.
    pub fn room(&self, pool: &NodePool) -> usize {
        node_limit(pool).map_or(usize::MAX, |limit| limit.saturating_sub(self.existing))
    }

    /// What the NodePool needs.
    pub fn change(&self, pool: &NodePool) -> Change {
        let wanted = wanted(pool).unwrap_or(self.replicas.len());
        let missing = wanted.saturating_sub(self.replicas.len());
        let create = missing.min(self.room(pool));
        Change { create, over_limit: missing - create, remove: self.replicas.len().saturating_sub(wanted) }
    }
}

/// `spec.replicas`; `None` of a dynamic NodePool.
fn wanted(pool: &NodePool) -> Option<usize> {
    pool.spec.replicas.map(|replicas| usize::try_from(replicas).unwrap_or(0))
}

/// `spec.limits.nodes`, rounded up as Kubernetes does. What can't be parsed allows no node: the condition ValidationSucceeded says why.
fn node_limit(pool: &NodePool) -> Option<usize> {
    let limit = pool.spec.limits.as_ref()?.get("nodes")?;
    Some(parse_amount("nodes", &limit.0).ok().and_then(|limit| usize::try_from(limit).ok()).unwrap_or(0))
}

/// Whether nodes of a static NodePool may be launched: it is Ready, and not deleted.
pub fn may_launch(pool: &NodePool) -> bool {
    let is_ready = |pool: &NodePool| {
        pool.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY))
    };
    pool.spec.replicas.is_some() && !pool.is_deleting() && is_ready(pool)
}

/// The static NodePools that have too few or too many nodes, with what they need.
pub fn changes(state: &ClusterState) -> Vec<(Arc<NodePool>, Change)> {
    let pools = state.pools.iter().filter(|(_, pool)| pool.spec.replicas.is_some() && !pool.is_deleting());
    let changes = pools.map(|(name, pool)| (Arc::clone(pool), Size::of(state, name).change(pool)));
    changes.filter(|(_, change)| *change != Change::default()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_model::time::UnixMillis;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::disruption::move_record::MoveRecord;

    fn pool(spec: &Value) -> NodePool {
        objects::node_pool("p", &json!({"spec": spec, "status": {"conditions": objects::conditions_true(&["Ready"])}}))
    }

    /// A NodeClaim of the NodePool with these annotations.
    fn claim(annotations: &Value, deleting: bool) -> Value {
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}, "annotations": annotations, "deletionTimestamp": deletion,
            "finalizers": ["f"]}})
    }

    /// The mark of a node that this NodeClaim replaces.
    fn replaced_by(name: &str, mark: &str) -> Value {
        let record = MoveRecord {
            id: "m".into(),
            at: UnixMillis(0),
            give_up: UnixMillis(1),
            sources: vec!["old".into()],
            usd_per_hour: 0.0,
            unheld: BTreeSet::new(),
            replaced_by: Some(name.into()),
        };
        json!({(labels::DISRUPTING): mark, (labels::MOVE): record.annotation()})
    }

    fn size(claims: &[(&str, Value)]) -> Size {
        let mut state = ClusterState::default();
        for (name, patch) in claims {
            state.apply_claim(objects::claim(name, patch));
        }
        Size::of(&state, "p")
    }

    #[test]
    fn a_node_and_its_replacement_count_once() {
        let plain = || claim(&json!({}), false);
        let old = |mark: &str| claim(&replaced_by("new", mark), false);
        for (case, claims, replicas, existing) in [
            ("two nodes", vec![("a", plain()), ("b", plain())], 2, 2),
            ("of another NodePool", vec![("a", plain()), ("b", json!({}))], 1, 1),
            ("one is deleted", vec![("a", plain()), ("b", claim(&json!({}), true))], 1, 2),
            (
                "one is interrupted",
                vec![
                    ("a", plain()),
                    ("b", claim(&json!({(labels::DISRUPTING): "SpotInterruption/2026-01-01T00:02:00Z"}), false)),
                ],
                1,
                2,
            ),
            ("one is replaced", vec![("a", plain()), ("old", old("Drifted/")), ("new", plain())], 2, 3),
            ("its replacement is gone", vec![("a", plain()), ("old", old("Drifted/"))], 2, 2),
            ("its replacement is deleted", vec![("old", old("Drifted/")), ("new", claim(&json!({}), true))], 1, 2),
            ("it is deleted", vec![("old", claim(&replaced_by("new", "Drifted/"), true)), ("new", plain())], 1, 2),
            (
                "it is interrupted meanwhile",
                vec![("old", old("SpotInterruption/2026-01-01T00:02:00Z")), ("new", plain())],
                1,
                2,
            ),
        ] {
            let size = size(&claims);
            assert_eq!((size.replicas.len(), size.existing), (replicas, existing), "{case}");
        }
    }

    #[test]
    fn a_node_pool_gets_the_replicas_that_its_limit_allows() {
        let three =
            size(&[("a", claim(&json!({}), false)), ("b", claim(&json!({}), false)), ("c", claim(&json!({}), true))]);
        for (spec, create, over_limit, remove) in [
            (json!({"replicas": 2}), 0, 0, 0),
            (json!({"replicas": 5}), 3, 0, 0),
            (json!({"replicas": 5, "limits": {"nodes": "5"}}), 2, 1, 0),
            (json!({"replicas": 5, "limits": {"nodes": "3"}}), 0, 3, 0),
            (json!({"replicas": 5, "limits": {"nodes": "1"}}), 0, 3, 0),
            (json!({"replicas": 5, "limits": {"nodes": "4500m"}}), 2, 1, 0),
            (json!({"replicas": 5, "limits": {"nodes": "many"}}), 0, 3, 0),
            (json!({"replicas": 1, "limits": {"nodes": "1"}}), 0, 0, 1),
            (json!({"replicas": 0}), 0, 0, 2),
            (json!({"replicas": -1}), 0, 0, 2),
            (json!({"replicas": i64::MAX}), usize::try_from(i64::MAX - 2).unwrap(), 0, 0),
            (json!({}), 0, 0, 0),
        ] {
            assert_eq!(three.change(&pool(&spec)), Change { create, over_limit, remove }, "{spec}");
        }
    }

    #[test]
    fn only_static_node_pools_that_are_not_deleted_change() {
        let deleted = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"]}});
        let unready = json!({"status": {"conditions": []}});
        for (case, patch, changed, launches) in [
            ("static", json!({"spec": {"replicas": 1}}), 1, true),
            ("as many nodes as wanted", json!({"spec": {"replicas": 0}}), 0, true),
            ("dynamic", json!({}), 0, false),
            ("deleted", json_patched(&deleted, &json!({"spec": {"replicas": 1}})), 0, false),
            ("not ready", json_patched(&unready, &json!({"spec": {"replicas": 1}})), 1, false),
        ] {
            let mut state = ClusterState::default();
            let mut object = json!(pool(&json!({})));
            json_patch::merge(&mut object, &patch);
            let pool: NodePool = serde_json::from_value(object).unwrap();
            assert_eq!(may_launch(&pool), launches, "{case}");
            state.apply_pool(pool);
            assert_eq!(changes(&state).len(), changed, "{case}");
        }
    }

    fn json_patched(base: &Value, patch: &Value) -> Value {
        let mut out = base.clone();
        json_patch::merge(&mut out, patch);
        out
    }
}
