//! NodePool status: conditions and resources; and the drift hash.

use std::sync::Arc;
use std::time::Duration;

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use stowage_api::conditions;
use stowage_api::conditions::{NODE_CLASS_READY, NODE_REGISTRATION_HEALTHY, VALIDATION_SUCCEEDED};
use stowage_api::{NodeClaim, NodePool, validation};
use stowage_model::events;
use stowage_model::events::DeclaredEvent;
use stowage_model::labels;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::controllers::condition_writer::ConditionWriter;
use crate::controllers::context::{Context, ignore_not_found, reference};
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::lifecycle::drift_hash::DriftHash;
use crate::decisions::lifecycle::registration_health::RegistrationHealth;
use crate::state::ClusterState;
use crate::state::claim_index::Usage;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::pool_types::InstanceTypes;

const PACE: Pace = Pace { debounce: Duration::from_millis(500), resync: Duration::from_secs(5) };

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    loop {
        let types = InstanceTypes::new(&ctx.ready_pools());
        let all: Vec<(Arc<NodePool>, DesiredStatus)> = {
            let (state, now) = (ctx.cluster.read(), clock::now());
            let mut health = lock(&ctx.registration_health);
            health.retain(state.pools.values().map(|pool| &**pool));
            let desired = |pool| desired_status(&state, &types, pool, &health, now);
            state.pools.values().map(|pool| (Arc::clone(pool), desired(pool))).collect()
        };
        for (pool, desired) in all {
            if let Err(error) = ignore_not_found(reconcile(&ctx, &pool, &desired).await) {
                tracing::warn!(node_pool = pool.name_any(), %error, "failed to write status, retrying");
            }
        }
        run_loop.next().await;
    }
}

/// Writes the hash to the claims and the pool, then the status. The pool keeps the version of its hash until all claims are patched.
async fn reconcile(ctx: &Context, pool: &NodePool, desired: &DesiredStatus) -> Result<(), kube::Error> {
    let hash = DriftHash::of_pool(pool);
    let claims: Vec<Arc<NodeClaim>> = {
        let (state, name) = (ctx.cluster.read(), pool.name_any());
        state.claim_index.of_pool(&name).filter_map(|claim| state.claims.get(claim)).cloned().collect()
    };
    for (claim, patch) in hash.claim_patches(pool, &claims) {
        ignore_not_found(ctx.patch_claim(&claim, &patch).await)?;
    }
    let annotations = (!hash.is_on(pool)).then(|| json!(hash.annotations()));
    write(ctx, pool, desired, annotations.as_ref()).await
}

async fn write(
    ctx: &Context,
    pool: &NodePool,
    desired: &DesiredStatus,
    annotations: Option<&Value>,
) -> Result<(), kube::Error> {
    let api: Api<NodePool> = Api::all(ctx.client.clone());
    let name = pool.name_any();
    let mut current = None;
    if let Some(annotations) = annotations {
        let patch = json!({"metadata": {"annotations": annotations}});
        current = Some(api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?);
    }
    let before = pool.status.as_ref().map_or_else(|| json!({}), |status| json!(status));
    if before != desired.status {
        let patch = json!({ "status": desired.status });
        let written = api.patch_status(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        for condition in written.status.iter().flat_map(|status| &status.conditions) {
            if let Some((_, event)) = desired.failed.iter().find(|(kind, _)| *kind == condition.type_) {
                let note = format!("{}: {}", condition.type_, condition.message);
                ctx.emit(reference(&written), event.note(&note)).await;
            }
        }
        current = Some(written);
    }
    if let Some(current) = current {
        ctx.cluster.update(|state| state.pools.insert(name, Arc::new(current)));
    }
    Ok(())
}

/// The status that a pool should have.
pub struct DesiredStatus {
    status: Value,
    /// Conditions that are False, with the events that report them.
    failed: Vec<(&'static str, &'static DeclaredEvent)>,
}

/// Whether a condition is True; otherwise the event that reports it, and its message.
type Evaluation = Result<(), (&'static DeclaredEvent, String)>;

/// The conditions that `Ready` of a NodePool depends on, in the order of [`conditions::NODE_POOL_DEPENDENTS`].
const DEPENDENTS: [(&str, fn(&ClusterState, &NodePool) -> Evaluation); 2] =
    [(VALIDATION_SUCCEEDED, validate), (NODE_CLASS_READY, class_readiness)];

fn validate(_: &ClusterState, pool: &NodePool) -> Evaluation {
    let errors = validation::node_pool(&pool.spec);
    if errors.is_empty() {
        return Ok(());
    }
    let text = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    Err((events::NODE_POOL_VALIDATION_FAILED, text))
}

/// Whether the class of a pool exists and is Ready.
fn class_readiness(state: &ClusterState, pool: &NodePool) -> Evaluation {
    let class_name = &pool.spec.template.spec.node_class_ref.name;
    let Some(class) = state.classes.get(class_name) else {
        let text = format!(
            "EC2NodeClass {class_name} does not exist: create it or name another in spec.template.spec.nodeClassRef"
        );
        return Err((events::NODE_CLASS_NOT_FOUND, text));
    };
    if class.is_deleting() {
        return Err((events::NODE_CLASS_TERMINATING, format!("EC2NodeClass {class_name} is being deleted")));
    }
    let conditions = class.status.as_ref().map(|status| &*status.conditions).unwrap_or_default();
    match conditions::get(conditions, conditions::READY) {
        Some(ready) if ready.status == "True" => Ok(()),
        Some(ready) if ready.status == "False" => Err((events::UNHEALTHY_DEPENDENTS, ready.message.clone())),
        _ => {
            let text = format!("EC2NodeClass {class_name} has not been checked yet");
            Err((events::NODE_CLASS_READINESS_UNKNOWN, text))
        }
    }
}

/// Capacity and number of the nodes of a pool that have registered and are not leaving.
fn registered(state: &ClusterState, types: &InstanceTypes, pool: &NodePool) -> (Resources, i64) {
    let name = &*pool.name_any();
    let Usage { capacity: mut used, count: mut nodes, unsized_claims } = state.claim_index.usage(name);
    for claim in unsized_claims.iter().filter_map(|name| state.claims.get(name)) {
        used.add(&types.capacity(claim));
    }
    let in_flight = state.in_flight.iter().filter_map(|name| state.claims.get(name));
    for claim in in_flight.filter(|claim| claim.node_pool() == Some(name) && !claim.is_leaving()) {
        used.sub(&types.capacity(claim));
        nodes -= 1;
    }
    let is_registered = |claim: &NodeClaim| !state.in_flight.contains(&claim.name_any());
    if let Some(price) = types.limited_price_of(state, pool, is_registered) {
        used.set(labels::USD_PER_HOUR, price.0);
    }
    (used, nodes)
}

pub fn desired_status(
    state: &ClusterState,
    types: &InstanceTypes,
    pool: &NodePool,
    health: &RegistrationHealth,
    now: UnixMillis,
) -> DesiredStatus {
    let mut writer = ConditionWriter::for_pool(pool, now);
    let mut conditions = writer.edit();
    let mut failed = Vec::new();
    for (kind, evaluate) in DEPENDENTS {
        match evaluate(state, pool) {
            Ok(()) => {
                conditions.set_true(kind);
            }
            Err((event, message)) => {
                conditions.set_false(kind, event.reason(), &message);
                failed.push((kind, event));
            }
        }
    }
    let class = state.classes.get(&pool.spec.template.spec.node_class_ref.name);
    let generation = class.and_then(|class| class.metadata.generation);
    if class.is_some() {
        let (status, reason, message) = health.of(pool, generation);
        conditions.set(NODE_REGISTRATION_HEALTHY, status, &reason, &message);
    }
    let (used, nodes) = registered(state, types, pool);
    let mut resources = json!({"cpu": "0", "memory": "0", "pods": "0", "ephemeral-storage": "0"});
    for (key, value) in used.to_map() {
        resources[key] = json!(value);
    }
    resources["nodes"] = json!(nodes.to_string());
    let mut out = pool.status.as_ref().map_or_else(|| json!({}), |status| json!(status));
    out["conditions"] = json!(writer.finish());
    out["resources"] = resources;
    out["nodes"] = json!(nodes);
    if let Some(generation) = generation {
        out["nodeClassObservedGeneration"] = json!(generation);
    }
    DesiredStatus { status: out, failed }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> UnixMillis {
        UnixMillis(second * 1_000)
    }

    fn pool(requirements: Value) -> NodePool {
        serde_json::from_value(
            json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "p", "generation": 1},
            "spec": {"template": {"spec": {"requirements": requirements,
                "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}}}}}),
        )
        .unwrap()
    }

    fn condition(status: &Value, kind: &str) -> (String, String) {
        let list = status["conditions"].as_array().unwrap();
        let found = list.iter().find(|condition| condition["type"] == kind).unwrap();
        (found["status"].as_str().unwrap().into(), found["message"].as_str().unwrap().into())
    }

    #[test]
    fn every_condition_that_ready_depends_on_is_evaluated() {
        assert_eq!(DEPENDENTS.map(|(kind, _)| kind), conditions::NODE_POOL_DEPENDENTS);
    }

    #[test]
    fn a_pool_without_its_class_names_the_missing_class() {
        let status = desired_status(
            &ClusterState::default(),
            &InstanceTypes::default(),
            &pool(json!([])),
            &RegistrationHealth::default(),
            at(1),
        )
        .status;
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
        let status = desired_status(
            &ClusterState::default(),
            &InstanceTypes::default(),
            &pool(requirements),
            &RegistrationHealth::default(),
            at(1),
        )
        .status;
        let (valid, message) = condition(&status, "ValidationSucceeded");
        assert_eq!(valid, "False");
        assert!(message.contains("kubernetes.io/arch"), "{message}");
    }

    #[test]
    fn an_up_to_date_status_is_not_written_again() {
        let mut pool = pool(json!([]));
        let first = desired_status(
            &ClusterState::default(),
            &InstanceTypes::default(),
            &pool,
            &RegistrationHealth::default(),
            at(1),
        )
        .status;
        pool.status = Some(serde_json::from_value(first.clone()).unwrap());
        let second = desired_status(
            &ClusterState::default(),
            &InstanceTypes::default(),
            &pool,
            &RegistrationHealth::default(),
            at(2),
        )
        .status;
        assert_eq!(json!(pool.status), second);
    }
}
