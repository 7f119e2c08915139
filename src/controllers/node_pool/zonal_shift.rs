//! Emits an event on the NodePools that use a zone when a zonal shift begins or ends there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::NodePool;
use stowage_api::parse_requirements;
use stowage_model::events;
use stowage_model::events::EventSpec;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::{Context, reference};
use crate::state::ClusterState;

/// How often the cloud is queried.
const PERIOD: Duration = Duration::from_secs(5);

/// Pools that may have nodes in a zone: their class has subnets there, and their requirements admit it.
fn users(state: &ClusterState, zone: &str) -> Vec<Arc<NodePool>> {
    let uses = |pool: &&Arc<NodePool>| {
        let template = &pool.spec.template.spec;
        let class = state.classes.get(&template.node_class_ref.name);
        let status = class.and_then(|class| class.status.as_ref());
        let Some(subnet) = status.and_then(|status| status.subnets.iter().find(|subnet| subnet.zone == zone)) else {
            return false;
        };
        let requirements = parse_requirements(&template.requirements).unwrap_or_default();
        let admits = |key: &str, value: Option<&str>| requirements.get(key).is_none_or(|set| set.accepts(value));
        admits(labels::ZONE, Some(zone)) && admits(labels::ZONE_ID, subnet.zone_id.as_deref())
    };
    state.pools.values().filter(uses).cloned().collect()
}

/// Runs until the process ends. Does nothing when the cloud does not report the status of its services.
pub async fn run(ctx: Arc<Context>) {
    let Some(services) = ctx.cloud.capabilities().service_status else { return heartbeat::rest_forever().await };
    let mut reports = Reports::default();
    loop {
        reports.pass(&ctx, &services.shifted_zones(), clock::now()).await;
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
    }
}

/// What has been reported so far.
#[derive(Debug, Default)]
struct Reports {
    /// Zones whose shift every affected pool has an event about.
    shifted: BTreeSet<String>,
}

impl Reports {
    /// Reports the changes since the last pass. A zone with a refused event is reported again in the next pass.
    async fn pass(&mut self, ctx: &Context, shifted: &BTreeSet<String>, now: UnixMillis) {
        let (begun, ended) = (shifted - &self.shifted, &self.shifted - shifted);
        for zone in begun {
            let note = format!("zonal shift away from {zone}: nothing is launched there, and its nodes are left alone");
            if emit(ctx, &zone, events::ZONAL_SHIFT_ACTIVE.note(&note), now).await {
                self.shifted.insert(zone);
            }
        }
        for zone in ended {
            let note = format!("zone {zone} is used again");
            if emit(ctx, &zone, events::ZONAL_SHIFT_CLEARED.note(&note), now).await {
                self.shifted.remove(&zone);
            }
        }
    }
}

/// Emits an event about every pool that uses the zone. Returns whether all of them are written.
async fn emit(ctx: &Context, zone: &str, event: EventSpec<'_>, now: UnixMillis) -> bool {
    let pools = users(&ctx.cluster.read(), zone);
    let mut all = true;
    for pool in pools {
        tracing::info!(node_pool = pool.name_any(), zone, reason = event.declared().reason(), "zonal shift changed");
        all &= ctx.emit_at(reference(&*pool), event, now).await;
    }
    all
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn only_pools_that_may_have_nodes_in_the_zone_are_affected() {
        let mut state = ClusterState::default();
        let subnets = json!([{"id": "s", "zone": "z-a", "zoneID": "id-a"}]);
        let class = objects::node_class("default", &json!({"status": {"subnets": subnets}}));
        state.classes.insert("default".into(), Arc::new(class));
        let pool = |name: &str, key: &str, value: &str| {
            let requirements = json!([{"key": key, "operator": "In", "values": [value]}]);
            let template = json!({"spec": {"requirements": requirements}});
            (name.to_owned(), Arc::new(objects::node_pool(name, &json!({"spec": {"template": template}}))))
        };
        state.pools.extend([
            pool("any", labels::ARCH, "amd64"),
            pool("there", labels::ZONE, "z-a"),
            pool("by-id", labels::ZONE_ID, "id-a"),
            pool("elsewhere", labels::ZONE, "z-b"),
            pool("elsewhere-by-id", labels::ZONE_ID, "id-b"),
        ]);
        let names: Vec<String> = users(&state, "z-a").iter().map(|pool| pool.name_any()).collect();
        assert_eq!(names, ["any", "by-id", "there"]);
        assert!(users(&state, "z-b").is_empty(), "its class has no subnet there");
    }
}
