//! NodePool status: is it valid, is its class ready, what does it hold; and the drift hash on it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::api::conditions;
use crate::api::conditions::{Conditions, DRIFTED, NODE_CLASS_READY, NODE_POOL_DEPENDENTS, VALIDATION_SUCCEEDED};
use crate::api::{NodePool, hash, validation};
use crate::controllers::context::{Context, gone_is_fine, reference};
use crate::model::labels;
use crate::model::resources::Resources;
use crate::state::ClusterState;
use crate::state::snapshot::{Types, capacity_of, is_leaving};

/// The state is looked at at least this often.
const TICK: Duration = Duration::from_secs(5);

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    loop {
        let now = Time(Timestamp::now());
        let types = Types::new(&ctx.ready_pools());
        let due: Vec<(Arc<NodePool>, Value, Option<Value>)> = {
            let state = ctx.cluster.read();
            let all = state.pools.values();
            all.map(|pool| (Arc::clone(pool), status(&state, &types, pool, &now), annotations(pool))).collect()
        };
        for (pool, status, annotations) in due {
            let name = pool.name_any();
            let written = match restamp(&ctx, &pool).await {
                Ok(()) => write(&ctx, &pool, &status, annotations.as_ref()).await,
                // The pool keeps its version, so that the next look repeats it.
                Err(error) => Err(error),
            };
            if let Err(error) = gone_is_fine(written) {
                tracing::warn!(node_pool = name, %error, "status could not be written, trying again");
            }
        }
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        changes.mark_unchanged();
    }
}

async fn write(ctx: &Context, pool: &NodePool, status: &Value, annotations: Option<&Value>) -> Result<(), kube::Error> {
    let api: Api<NodePool> = Api::all(ctx.client.clone());
    let name = pool.name_any();
    let mut current = None;
    if let Some(annotations) = annotations {
        let patch = json!({"metadata": {"annotations": annotations}});
        current = Some(api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?);
    }
    let before = pool.status.as_ref().map_or_else(|| json!({}), |status| json!(status));
    if before != *status {
        let patch = json!({ "status": status });
        let written = api.patch_status(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        for condition in written.status.iter().flat_map(|status| &status.conditions) {
            if condition.status == "False" && condition.type_ != "Ready" {
                let note = format!("{}: {}", condition.type_, condition.message);
                ctx.event(reference(&written), true, &condition.reason, &note).await;
            }
        }
        current = Some(written);
    }
    if let Some(current) = current {
        ctx.cluster.update(|state| state.pools.insert(name, Arc::new(current)));
    }
    Ok(())
}

/// Whether the hash on a pool is that of what it says now.
pub fn is_stamped(pool: &NodePool) -> bool {
    annotations(pool).is_none()
}

/// Writes what [`restamped`] says.
async fn restamp(ctx: &Context, pool: &NodePool) -> Result<(), kube::Error> {
    let patches = restamped(pool, &ctx.cluster.read());
    for (claim, patch) in patches {
        gone_is_fine(ctx.patch_claim(&claim, &patch).await)?;
    }
    Ok(())
}

/// What has to be written on claims when the pool's hash has another version than ours: the hash counts anew, so that a new way
/// of counting drifts no node. One that has drifted already keeps its hash.
fn restamped(pool: &NodePool, state: &ClusterState) -> Vec<(String, Value)> {
    let version = |annotations: &BTreeMap<String, String>| {
        annotations.get(labels::NODE_POOL_HASH_VERSION).map(String::as_str) == Some(hash::NODE_POOL_VERSION)
    };
    if version(pool.annotations()) {
        return vec![];
    }
    let name = pool.name_any();
    let new = hash::node_pool(&pool.spec);
    let own = state.claims.values().filter(|claim| claim.labels().get(labels::NODE_POOL) == Some(&name));
    own.filter(|claim| !version(claim.annotations()))
        .map(|claim| {
            let drifted = claim.status.iter().any(|status| conditions::get(&status.conditions, DRIFTED).is_some());
            let mut annotations = json!({(labels::NODE_POOL_HASH_VERSION): hash::NODE_POOL_VERSION});
            if !drifted {
                annotations[labels::NODE_POOL_HASH] = json!(new);
            }
            (claim.name_any(), json!({"metadata": {"annotations": annotations}}))
        })
        .collect()
}

/// Hash annotations, where they aren't right yet.
fn annotations(pool: &NodePool) -> Option<Value> {
    let wanted = [
        (labels::NODE_POOL_HASH, hash::node_pool(&pool.spec)),
        (labels::NODE_POOL_HASH_VERSION, hash::NODE_POOL_VERSION.to_owned()),
    ];
    let right = wanted.iter().all(|(key, value)| pool.annotations().get(*key) == Some(value));
    (!right).then(|| json!(BTreeMap::from(wanted)))
}

/// The status a pool should have.
fn status(state: &ClusterState, types: &Types, pool: &NodePool, now: &Time) -> Value {
    let name = pool.name_any();
    let generation = pool.metadata.generation;
    let mut list = pool.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let created = pool.metadata.creation_timestamp.as_ref();
    let mut judged = Conditions::open(&mut list, NODE_POOL_DEPENDENTS, generation, created, now);
    let errors = validation::node_pool(&pool.spec);
    if errors.is_empty() {
        judged.set_true(VALIDATION_SUCCEEDED);
    } else {
        let text = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        judged.set_false(VALIDATION_SUCCEEDED, "NodePoolValidationFailed", &text);
    }
    let class_name = &pool.spec.template.spec.node_class_ref.name;
    let class = state.classes.get(class_name);
    let ready = class.and_then(|class| conditions::get(&class.status.as_ref()?.conditions, "Ready"));
    match (class, ready) {
        (None, _) => {
            let text = format!(
                "EC2NodeClass {class_name} does not exist: create it or name another in spec.template.spec.nodeClassRef"
            );
            judged.set_false(NODE_CLASS_READY, "NodeClassNotFound", &text);
        }
        (Some(class), _) if class.metadata.deletion_timestamp.is_some() => {
            let text = format!("EC2NodeClass {class_name} is being deleted");
            judged.set_false(NODE_CLASS_READY, "NodeClassTerminating", &text);
        }
        (_, Some(ready)) if ready.status == "True" => {
            judged.set_true(NODE_CLASS_READY);
        }
        (_, Some(ready)) if ready.status == "False" => {
            judged.set_false(NODE_CLASS_READY, &ready.reason, &ready.message);
        }
        (Some(_), _) => {
            let text = format!("EC2NodeClass {class_name} has not been checked yet");
            judged.set_false(NODE_CLASS_READY, "NodeClassReadinessUnknown", &text);
        }
    }
    let mut used = Resources::default();
    let mut nodes = 0_i64;
    for claim in state.claims.values().filter(|claim| claim.labels().get(labels::NODE_POOL) == Some(&name)) {
        if !is_leaving(claim) && state.node_of(claim).is_some() {
            used.add(&capacity_of(types, claim));
            nodes += 1;
        }
    }
    let mut resources = json!({"cpu": "0", "memory": "0", "pods": "0", "ephemeral-storage": "0"});
    for (key, value) in used.to_map() {
        resources[key] = json!(value);
    }
    resources["nodes"] = json!(nodes.to_string());
    let mut out = pool.status.as_ref().map_or_else(|| json!({}), |status| json!(status));
    out["conditions"] = json!(list);
    out["resources"] = resources;
    out["nodes"] = json!(nodes);
    out
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::objects;

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    fn pool(requirements: Value) -> NodePool {
        let template = json!({"spec": {"requirements": requirements}});
        objects::node_pool("p", &json!({"metadata": {"generation": 1}, "spec": {"template": template}}))
    }

    fn condition(status: &Value, kind: &str) -> (String, String) {
        let list = status["conditions"].as_array().unwrap();
        let found = list.iter().find(|condition| condition["type"] == kind).unwrap();
        (found["status"].as_str().unwrap().into(), found["message"].as_str().unwrap().into())
    }

    #[test]
    fn a_pool_without_its_class_says_which_is_missing() {
        let status = status(&ClusterState::default(), &Types::default(), &pool(json!([])), &at(1));
        let (class, message) = condition(&status, "NodeClassReady");
        assert_eq!(class, "False");
        assert!(message.contains("EC2NodeClass default does not exist"), "{message}");
        assert_eq!(condition(&status, "Ready").0, "False");
    }

    #[test]
    fn a_contradiction_names_its_key() {
        let requirements = json!([
            {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]},
            {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]);
        let status = status(&ClusterState::default(), &Types::default(), &pool(requirements), &at(1));
        let (valid, message) = condition(&status, "ValidationSucceeded");
        assert_eq!(valid, "False");
        assert!(message.contains("kubernetes.io/arch"), "{message}");
    }

    #[test]
    fn c31_a_new_version_of_the_hash_drifts_no_node() {
        let mut state = ClusterState::default();
        let mut claim = |name: &str, version: &str, conditions: Value| {
            let annotations = json!({(labels::NODE_POOL_HASH): "1", (labels::NODE_POOL_HASH_VERSION): version});
            let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "annotations": annotations});
            let patch = json!({"metadata": meta, "status": {"conditions": conditions}});
            state.apply_claim(objects::claim(name, &patch));
        };
        let drifted = json!([{"type": "Drifted", "status": "True", "reason": "r", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        claim("old", "v2", json!([]));
        claim("drifted", "v2", drifted);
        claim("current", "v3", json!([]));
        let mut pool = pool(json!([]));
        assert!(!is_stamped(&pool));
        pool.annotations_mut().insert(labels::NODE_POOL_HASH_VERSION.into(), "v2".into());
        let patches = restamped(&pool, &state);
        let names: Vec<&str> = patches.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["drifted", "old"]);
        let hashes: Vec<&Value> =
            patches.iter().map(|(_, patch)| &patch["metadata"]["annotations"][labels::NODE_POOL_HASH]).collect();
        assert_eq!(hashes, [&Value::Null, &json!(hash::node_pool(&pool.spec))], "a drifted node keeps its hash");
        pool.annotations_mut().insert(labels::NODE_POOL_HASH_VERSION.into(), "v3".into());
        assert!(restamped(&pool, &state).is_empty());
    }

    #[test]
    fn a_status_that_is_right_is_not_written_again() {
        let mut pool = pool(json!([]));
        let first = status(&ClusterState::default(), &Types::default(), &pool, &at(1));
        pool.status = Some(serde_json::from_value(first.clone()).unwrap());
        let second = status(&ClusterState::default(), &Types::default(), &pool, &at(2));
        assert_eq!(json!(pool.status), second);
    }
}
