//! The targets: each feeds one kind of outside input to the code that reads it, and returns whether the input parses.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::Value;
use stowage_api::parse_requirements;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_cloud::ami_family::AmiFamily;
use stowage_cloud::parsers::{UserDataInput, ignored_settings, queue_message, user_data};
use stowage_model::offering::{CapacityType, Catalog, Offering};
use stowage_model::quantity;
use stowage_model::time::UnixMillis;
use stowage_planner::PlanSettings;
use stowage_test_objects as objects;

use super::fuzz;
use crate::controllers::derived_state::DerivedState;
use crate::decisions::placement::extender_view::ViewCache;
use crate::extender::{self, FilterArgs, PreemptArgs};
use crate::state::ClusterState;
use crate::state::pool_types::ReadyPool;
use crate::state::snapshot::SnapshotRequest;
use crate::test_support::state_with_planned_pod;
use crate::webhook;
use crate::webhook::rule_list::Rules;

const NOW: UnixMillis = UnixMillis(1_700_000_000_000);
/// Objects of one input: an attacker can send more, but a mutant with thousands would only repeat what these show.
const MOST_OBJECTS: usize = 200;

#[test]
fn admission_reviews() {
    fuzz("admission-review", 1, |body| match webhook::review(body, &Rules::default()) {
        Ok(review) => serde_json::to_vec(&review.response).is_ok(),
        Err(error) => error.to_string().is_empty(),
    });
}

#[test]
fn extender_calls() {
    let state = state_with_planned_pod(None);
    let view = ViewCache::default().update(&state, &DerivedState::default().holds(&state, NOW), NOW);
    fuzz("extender-args", 1, |body| {
        let filtered = serde_json::from_slice::<FilterArgs<'_>>(body).map(|args| {
            serde_json::to_vec(&extender::filter(&view, NOW, args)).unwrap();
        });
        let scored = serde_json::from_slice::<FilterArgs<'_>>(body).map(|args| {
            serde_json::to_vec(&extender::prioritize(&view, NOW, args)).unwrap();
        });
        let preempted = serde_json::from_slice::<PreemptArgs<'_>>(body).map(|args| {
            serde_json::to_vec(&extender::preempt(&view, NOW, args)).unwrap();
        });
        filtered.is_ok() && scored.is_ok() || preempted.is_ok()
    });
}

#[test]
fn quantities_times_and_durations() {
    fuzz("scalars", 1, |input| {
        let text = String::from_utf8_lossy(input);
        let amounts =
            ["cpu", "memory", "pods", "nvidia.com/gpu"].map(|name| quantity::parse_amount(name, &text).is_ok());
        let others = [
            quantity::parse_cpu(&text).is_ok(),
            quantity::parse_bytes(&text).is_ok(),
            UnixMillis::parse_rfc3339(&text).map(UnixMillis::rfc3339).is_some(),
            stowage_api::duration::parse(&text).is_ok(),
            stowage_api::duration::parse_or_never(&text).is_ok(),
        ];
        amounts.contains(&true) || others.contains(&true)
    });
}

#[test]
fn messages_of_the_queue() {
    fuzz("queue-messages", 1, |body| queue_message(&String::from_utf8_lossy(body), None).is_ok());
}

#[test]
fn user_data_of_every_family() {
    fuzz("user-data", 1, |custom| {
        let custom = String::from_utf8_lossy(custom);
        let labels = [("team".to_owned(), "a".to_owned())].into();
        let input = UserDataInput {
            cluster_name: "c",
            endpoint: "https://api.example.com",
            ca_bundle: Some("Y2E="),
            service_cidr: Some("10.100.0.0/16"),
            cluster_dns: None,
            kubelet: None,
            max_pods: 29,
            labels: &labels,
            taints: &[],
            capacity_type: CapacityType::Spot,
            local_disks: true,
            custom: Some(&custom),
            image_version: None,
        };
        let made = AmiFamily::ALL.map(|family| user_data(family, &input).is_ok());
        ignored_settings(&custom);
        made.iter().filter(|made| **made).count() == AmiFamily::ALL.len()
    });
}

#[test]
fn node_pools_and_node_classes() {
    fuzz("node-pools", 1, |object| {
        let pool = serde_json::from_slice::<NodePool>(object).map(|pool| {
            stowage_api::validation::node_pool(&pool.spec);
            let _ = parse_requirements(&pool.spec.template.spec.requirements);
        });
        pool.is_ok() || serde_json::from_slice::<Ec2NodeClass>(object).is_ok()
    });
}

/// A list of objects, as watches deliver them, through snapshot and plan to the view of the extender; then each is deleted.
#[test]
fn clusters_through_to_a_plan() {
    fuzz("clusters", 10, |input| {
        let Ok(Value::Array(objects)) = serde_json::from_slice::<Value>(input) else { return false };
        let mut state = ClusterState::default();
        let mut pools = Vec::new();
        let applied: Vec<&Value> = objects
            .iter()
            .take(MOST_OBJECTS)
            .filter(|object| apply(&mut state, &mut pools, object).is_some())
            .collect();
        let derived = DerivedState::default();
        let settings = PlanSettings::default();
        for now in [NOW, UnixMillis(0), UnixMillis(i64::MAX)] {
            let request = SnapshotRequest { pools: &pools, settings: &settings, now };
            let snapshot = derived.snapshot(&state, request);
            stowage_planner::plan(&snapshot.problem, &snapshot.column_cache).prove();
            let _ = ViewCache::default().update(&state, &derived.holds(&state, now), now);
        }
        for object in &applied {
            delete(&mut state, object);
        }
        !applied.is_empty()
    });
}

/// Four sizes in three zones, on-demand and spot.
fn catalog() -> Arc<Catalog> {
    let of = |cpus: i64| {
        let offering = |zone: &str, capacity_type| Offering { capacity_type, ..objects::offering(zone, 48_000 * cpus) };
        let offerings = ["z-a", "z-b", "z-c"]
            .iter()
            .flat_map(|zone| [CapacityType::OnDemand, CapacityType::Spot].map(|of| offering(zone, of)))
            .collect();
        let resources =
            [("cpu", cpus.to_string()), ("memory", format!("{}Gi", 4 * cpus)), ("pods", (8 * cpus).to_string())];
        let resources = resources.each_ref().map(|(name, amount)| (*name, amount.as_str()));
        Arc::new(objects::instance_type(&format!("m1.x{cpus}"), &resources, offerings))
    };
    Arc::new(Catalog { region: "here".into(), instance_types: [2, 4, 8, 16].map(of).into() })
}

/// Applies an object that the typed client would accept.
fn apply(state: &mut ClusterState, pools: &mut Vec<ReadyPool>, object: &Value) -> Option<()> {
    match object.get("kind")?.as_str()? {
        "Pod" => state.apply_pod(&read(object)?, NOW),
        "Node" => state.apply_node(read(object)?),
        "NodeClaim" => state.apply_claim(read::<NodeClaim>(object)?),
        "NodePool" => {
            let pool: NodePool = read(object)?;
            pool.metadata.name.as_ref()?;
            state.apply_pool(pool.clone());
            pools.push(ReadyPool { pool: Arc::new(pool), catalog: catalog() });
        }
        "DaemonSet" => state.apply_daemon_set(&read(object)?),
        "Namespace" => state.apply_namespace(&read(object)?),
        "PersistentVolumeClaim" => state.apply_volume_claim(&read(object)?),
        "PersistentVolume" => state.apply_volume(&read(object)?),
        "StorageClass" => state.apply_storage_class(&read(object)?),
        "CSINode" => state.apply_csi_node(&read(object)?),
        "Service" => state.apply_service(&read(object)?),
        _ => return None,
    }
    Some(())
}

/// The API server stores no object without a name.
fn read<T: DeserializeOwned>(object: &Value) -> Option<T> {
    object.pointer("/metadata/name")?.as_str().filter(|name| !name.is_empty())?;
    serde_json::from_value(object.clone()).ok()
}

fn delete(state: &mut ClusterState, object: &Value) {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let key = format!("{}/{name}", object["metadata"]["namespace"].as_str().unwrap_or("default"));
    match object["kind"].as_str() {
        Some("Pod") => state.delete_pod(&key, NOW),
        Some("Node") => state.delete_node(name),
        Some("NodeClaim") => state.delete_claim(name),
        Some("DaemonSet") => state.daemons.delete(&key),
        _ => {}
    }
}
