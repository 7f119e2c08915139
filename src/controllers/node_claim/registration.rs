//! Registration and initialization: what is written to the Node of a claim, and the conditions of the claim.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use stowage_api::conditions::Conditions;
use stowage_api::{NodeClaim, conditions};
use stowage_model::events;
use stowage_model::labels;
use stowage_runtime::clock;

use crate::controllers::condition_writer::{ConditionWriter, write_condition};
use crate::controllers::context::{Context, single_values};
use crate::controllers::node_claim::{claim_metrics, consistency};
use crate::decisions::lifecycle::consistency::shape_issues;
use crate::decisions::lifecycle::initialization::uninitialized_reason;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};

/// Maximum number of other Nodes that a report of duplicates names.
const MAX_NAMED_NODES: usize = 5;

/// The patch that writes the claim's labels, annotations and taints, its owner reference and our finalizer to its Node.
pub fn sync_patch(claim: &NodeClaim, node: &Node) -> Value {
    // Our own annotations concern the claim only, but for the price.
    let is_of_node = |key: &str| key == labels::USD_PER_HOUR || !key.starts_with("stowage.dev/");
    let annotations: BTreeMap<_, _> = claim.annotations().iter().filter(|(key, _)| is_of_node(key)).collect();
    let owner = claim.owner_ref(&()).map(|owner| OwnerReference { block_owner_deletion: Some(true), ..owner });
    let mut patch = json!({"metadata": {
        "uid": node.metadata.uid,
        "finalizers": [labels::TERMINATION_FINALIZER],
        "ownerReferences": owner.as_slice(),
        "labels": single_values(claim),
        "annotations": annotations,
    }});
    let has = |taint: &&Taint| node.taints().any(|other| other.key == taint.key && other.effect == taint.effect);
    let of_claim = || claim.spec.taints.iter().chain(&claim.spec.startup_taints);
    let missing: Vec<&Taint> = of_claim().filter(|taint| !has(taint)).collect();
    if !missing.is_empty() && !node.is_labeled(labels::DO_NOT_SYNC_TAINTS) {
        // Unlike the others, this list is replaced.
        patch["metadata"]["resourceVersion"] = json!(node.resource_version());
        patch["spec"] = json!({"taints": node.taints().chain(missing).collect::<Vec<_>>()});
    }
    patch
}

/// Sets the Registered condition and the claim's node name; the Initialized condition too when the Node was complete as it opened.
pub async fn register(ctx: &Context, claim: &NodeClaim, node: &Node) -> Result<(), kube::Error> {
    let is_initialized = node.is_labeled(labels::INITIALIZED) && uninitialized_reason(claim, node).is_none();
    let issues = shape_issues(claim, node);
    let status = |claim: &NodeClaim| {
        let mut writer = ConditionWriter::for_claim(claim, clock::now());
        writer.edit().set_true(conditions::REGISTERED);
        if is_initialized {
            set_initialized(&mut writer.edit(), &issues);
        }
        Some(json!({"nodeName": node.name_any(), "conditions": writer.finish()}))
    };
    ctx.update_claim_status(claim, status).await?;
    ctx.record_registration(claim, true);
    claim_metrics::count_registered(ctx, claim);
    tracing::info!(claim = claim.name_any(), node = node.name_any(), "registered nodeclaim");
    if is_initialized {
        log_initialized(claim, node);
    }
    Ok(())
}

/// Labels the Node and sets the Initialized condition.
pub async fn initialize(ctx: &Context, claim: &NodeClaim, node: &Node) -> Result<(), kube::Error> {
    ctx.patch_node(&node.name_any(), &json!({"metadata": {"labels": {(labels::INITIALIZED): "true"}}})).await?;
    let issues = shape_issues(claim, node);
    write_condition(ctx, claim, |list| set_initialized(list, &issues)).await?;
    log_initialized(claim, node);
    Ok(())
}

fn set_initialized(list: &mut Conditions<'_>, issues: &[String]) -> bool {
    let changed = issues.is_empty() && consistency::set(list, issues);
    list.set_true(conditions::INITIALIZED) || changed
}

fn log_initialized(claim: &NodeClaim, node: &Node) {
    tracing::info!(claim = claim.name_any(), node = node.name_any(), "initialized nodeclaim");
}

/// Whether the Node is not registered and nothing has kept pods off it.
pub fn lacks_unregistered_taint(node: &Node) -> bool {
    !node.is_labeled(labels::REGISTERED) && !node.taints().any(|taint| taint.key == labels::UNREGISTERED_TAINT)
}

/// Reports that several Nodes have the claim's provider id: by an event, and by the Registered condition unless one of them is registered.
pub async fn report_duplicate_nodes(ctx: &Context, claim: &NodeClaim) -> Result<(), kube::Error> {
    let names = {
        let state = ctx.cluster.read();
        let Some(others) = state.duplicate_nodes(claim) else { return Ok(()) };
        let own = state.node_of(claim).map(|node| node.name_any());
        let names: Vec<String> = own.into_iter().chain(others.iter().take(MAX_NAMED_NODES).cloned()).collect();
        names.join(", ")
    };
    let note = format!("several nodes have its provider ID: {names}");
    ctx.emit_for_claim(claim, events::MULTIPLE_NODES_FOUND.note(&note)).await;
    if claim.has_condition(conditions::REGISTERED) {
        return Ok(());
    }
    let reason = events::MULTIPLE_NODES_FOUND.reason();
    write_condition(ctx, claim, |list| list.set_false(conditions::REGISTERED, reason, &note)).await
}

/// Writes to the Initialized condition why the Node is not initialized.
pub async fn report_uninitialized(ctx: &Context, claim: &NodeClaim, reason: &str) -> Result<(), kube::Error> {
    write_condition(ctx, claim, |list| list.set_unknown(conditions::INITIALIZED, reason, "")).await
}
