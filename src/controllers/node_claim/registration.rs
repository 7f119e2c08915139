//! Registration and initialization: what is written to the Node of a claim, and when it is complete.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Taint};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use crate::api::{NodeClaim, conditions};
use crate::clock;
use crate::controllers::condition_writer::ConditionWriter;
use crate::controllers::context::{Context, single_values};
use crate::model::labels;
use crate::state::node_state::is_ephemeral;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};

/// Whether a node has no startup taint and reports every requested resource.
pub fn is_complete(claim: &NodeClaim, node: &Node) -> bool {
    !node.taints().any(|taint| claim.is_startup_taint(taint)) && reports_all(claim, node)
}

/// Whether a node reports every resource that its claim requests.
fn reports_all(claim: &NodeClaim, node: &Node) -> bool {
    let zero = |text: &str| text.chars().all(|c| !c.is_ascii_digit() || c == '0');
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    let reported = |name: &String| allocatable.and_then(|map| map.get(name)).is_some_and(|value| !zero(&value.0));
    claim.spec.resources.requests.iter().all(|(name, value)| zero(&value.0) || reported(name))
}

/// Why a registered node is not initialized, as the reason of the condition (Karpenter core reference 5.4); `None` when it is.
pub fn uninitialized_reason(claim: &NodeClaim, node: &Node) -> Option<&'static str> {
    if !node.is_ready() {
        return Some("NodeNotReady");
    }
    if node.taints().any(|taint| claim.is_startup_taint(taint)) {
        return Some("StartupTaintsExist");
    }
    if node.taints().any(is_ephemeral) {
        return Some("KnownEphemeralTaintsExist");
    }
    (!reports_all(claim, node)).then_some("ResourceNotRegistered")
}

/// The patch that writes the claim's labels, annotations and taints, its owner reference and our finalizer to its Node.
pub fn sync_patch(claim: &NodeClaim, node: &Node) -> Value {
    let mut finalizers = node.finalizers().to_vec();
    finalizers.push(labels::TERMINATION_FINALIZER.into());
    let mut taints: Vec<Taint> = node.taints().cloned().collect();
    if !node.is_labeled(labels::DO_NOT_SYNC_TAINTS) {
        for taint in claim.spec.taints.iter().chain(&claim.spec.startup_taints) {
            if !taints.iter().any(|other| other.key == taint.key && other.effect == taint.effect) {
                taints.push(taint.clone());
            }
        }
    }
    let mut owners = node.owner_references().to_vec();
    if let Some(mut owner) = claim.owner_ref(&())
        && !owners.iter().any(|other| other.uid == owner.uid)
    {
        owner.block_owner_deletion = Some(true);
        owners.push(owner);
    }
    // Our own annotations concern the claim only.
    let annotations: BTreeMap<_, _> =
        claim.annotations().iter().filter(|(key, _)| !key.starts_with("stowage.dev/")).collect();
    json!({
        "metadata": {
            "resourceVersion": node.resource_version(),
            "finalizers": finalizers,
            "ownerReferences": owners,
            "labels": single_values(claim),
            "annotations": annotations,
        },
        "spec": {"taints": taints},
    })
}

/// Sets the Registered condition and the claim's node name.
pub async fn register(ctx: &Context, claim: &NodeClaim, node: &Node) -> Result<(), kube::Error> {
    let mut writer = ConditionWriter::for_claim(claim, clock::now());
    writer.edit().set_true(conditions::REGISTERED);
    let status = json!({"nodeName": node.name_any(), "conditions": writer.finish()});
    ctx.patch_claim_status(&claim.name_any(), &status).await?;
    ctx.metrics.nodes_registered.inc();
    Ok(())
}

/// Labels the Node and sets the Initialized condition.
pub async fn initialize(ctx: &Context, claim: &NodeClaim, node: &Node) -> Result<(), kube::Error> {
    ctx.patch_node(&node.name_any(), &json!({"metadata": {"labels": {(labels::INITIALIZED): "true"}}})).await?;
    let mut writer = ConditionWriter::for_claim(claim, clock::now());
    writer.edit().set_true(conditions::INITIALIZED);
    write_changed(ctx, claim, writer).await?;
    tracing::info!(claim = claim.name_any(), node = node.name_any(), "initialized");
    Ok(())
}

/// Writes to the Initialized condition why the Node is not initialized.
pub async fn report_uninitialized(ctx: &Context, claim: &NodeClaim, reason: &str) -> Result<(), kube::Error> {
    let mut writer = ConditionWriter::for_claim(claim, clock::now());
    writer.edit().set_unknown(conditions::INITIALIZED, reason, "");
    write_changed(ctx, claim, writer).await
}

async fn write_changed(ctx: &Context, claim: &NodeClaim, writer: ConditionWriter) -> Result<(), kube::Error> {
    match writer.changed() {
        Some(list) => ctx.patch_claim_status(&claim.name_any(), &json!({ "conditions": list })).await,
        None => Ok(()),
    }
}
