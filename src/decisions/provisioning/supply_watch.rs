//! Notices changes that may give a node to a pod that the last plan left without one.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt;
use stowage_model::offering::Catalog;
use stowage_model::resources::Resources;

use crate::state::pool_types::ReadyPool;
use crate::state::tables::ClusterState;

/// What could be purchased when a plan was made.
#[derive(Debug, Default)]
pub struct SupplyWatch {
    /// By NodePool that may launch nodes.
    pools: BTreeMap<String, PoolSupply>,
}

#[derive(Debug)]
struct PoolSupply {
    /// Generations of the NodePool and of its EC2NodeClass.
    generations: (Option<i64>, Option<i64>),
    catalog: Arc<Catalog>,
    /// Number of offerings with capacity.
    available: usize,
    /// What counts for the limits, if there are any: capacity and number of nodes.
    usage: Option<(Resources, i64)>,
}

impl PoolSupply {
    fn of(state: &ClusterState, ready: &ReadyPool, before: Option<&Self>) -> Self {
        let spec = &ready.pool.spec;
        let class = state.classes.get(&spec.template.spec.node_class_ref.name);
        let counted = before.filter(|before| Arc::ptr_eq(&before.catalog, &ready.catalog));
        let usage = || {
            let usage = state.claim_index.usage(&ready.pool.name_any());
            (usage.capacity, usage.count)
        };
        Self {
            generations: (ready.pool.metadata.generation, class.and_then(|class| class.metadata.generation)),
            catalog: Arc::clone(&ready.catalog),
            available: counted.map_or_else(|| available(&ready.catalog), |before| before.available),
            usage: spec.limits.as_ref().map(|_| usage()),
        }
    }

    fn improves_on(&self, before: &Self) -> bool {
        let freed = match (&before.usage, &self.usage) {
            (Some((before, nodes)), Some((now, left))) => {
                left < nodes || before.iter().any(|(resource, amount)| now.get(resource) < amount)
            }
            _ => false,
        };
        self.generations != before.generations || self.available > before.available || freed
    }
}

fn available(catalog: &Catalog) -> usize {
    catalog.instance_types.iter().flat_map(|one| &one.offerings).filter(|offering| offering.available).count()
}

impl SupplyWatch {
    /// Whether since the last call a NodePool or its class became ready or changed, an offering has capacity again, or usage went down that counts
    /// for limits. Room on existing nodes is left to kube-scheduler.
    pub fn improved(&mut self, state: &ClusterState, pools: &[ReadyPool]) -> bool {
        let mut improved = false;
        let mut now = BTreeMap::new();
        for ready in pools {
            let name = ready.pool.name_any();
            let before = self.pools.get(&name);
            let supply = PoolSupply::of(state, ready, before);
            improved |= before.is_none_or(|before| supply.improves_on(before));
            now.insert(name, supply);
        }
        self.pools = now;
        improved
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;

    fn pool(name: &str, generation: i64, limits: &Value, available: bool) -> ReadyPool {
        let mut offering = objects::offering("z", 1);
        offering.available = available;
        let types = vec![Arc::new(objects::instance_type("m5.large", &[("cpu", "2")], vec![offering]))];
        let patch = json!({"metadata": {"generation": generation}, "spec": {"limits": limits}});
        let catalog = Arc::new(Catalog { region: "r".into(), instance_types: types });
        ReadyPool { pool: Arc::new(objects::node_pool(name, &patch)), catalog }
    }

    fn put_claim(state: &mut ClusterState, name: &str) {
        let status = json!({"providerID": format!("aws:///z/{name}"), "capacity": {"cpu": "2"}});
        let meta = json!({"labels": {(labels::NODE_POOL): "p"}});
        state.apply_claim(objects::claim(name, &json!({"metadata": meta, "status": status})));
    }

    #[test]
    fn only_what_can_help_is_an_improvement() {
        let (mut watch, mut state) = (SupplyWatch::default(), ClusterState::default());
        let limits = json!({"cpu": "4"});
        let p = |generation, available| pool("p", generation, &limits, available);
        assert!(!watch.improved(&state, &[]), "no NodePool is ready");
        assert!(watch.improved(&state, &[p(1, true)]), "one is ready");
        assert!(!watch.improved(&state, &[p(1, true)]));
        assert!(watch.improved(&state, &[p(2, true)]), "it changed");
        assert!(!watch.improved(&state, &[p(2, false)]), "no capacity");
        assert!(watch.improved(&state, &[p(2, true)]), "capacity again");
        put_claim(&mut state, "a");
        put_claim(&mut state, "b");
        assert!(!watch.improved(&state, &[p(2, true)]), "more usage");
        state.delete_claim("a");
        assert!(watch.improved(&state, &[p(2, true)]), "less usage");
        assert!(!watch.improved(&state, &[]), "not ready any more");
        assert!(watch.improved(&state, &[p(2, true)]), "ready again");
        state.classes.insert(
            "default".into(),
            Arc::new(objects::node_class("default", &json!({"metadata": {"generation": 1}}))),
        );
        assert!(watch.improved(&state, &[p(2, true)]), "its class changed");
    }

    #[test]
    fn usage_without_limits_does_not_count() {
        let (mut watch, mut state) = (SupplyWatch::default(), ClusterState::default());
        let p = || pool("p", 1, &Value::Null, true);
        put_claim(&mut state, "a");
        watch.improved(&state, &[p()]);
        state.delete_claim("a");
        assert!(!watch.improved(&state, &[p()]));
    }
}
