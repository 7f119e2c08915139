//! NodeClaim lifecycle metrics, labeled as Karpenter labels them (Karpenter core reference 8).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::conditions::INSTANCE_TERMINATING;
use stowage_api::{NodeClaim, NodePool, duration};
use stowage_model::labels;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;

use crate::controllers::context::Context;
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::move_record::MoveRecord;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::gauges::in_units;
use crate::decisions::node_usage::NodeUsage;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};

/// Reason of pods that leave a node whose claim is not disrupted, but deleted.
const FORCEFUL: &str = "Forceful Termination";
/// Reason of a new claim that replaces no node.
const PROVISIONED: &str = "provisioned";

/// Counts a new claim, which replaces nodes for `reason` if there is one, and creates the series in which it is counted if it is not launched in time.
pub fn count_created(ctx: &Context, claim: &NodeClaim, reason: Option<DisruptionReason>) {
    ctx.metrics.claims_created.with_label_values(&created(claim, reason)).inc();
    preset_disrupted(ctx, claim, &label(claim, labels::CAPACITY_TYPE), &[DisruptionReason::LaunchTimeout]);
}

/// Creates the series in which a launched claim is counted when its Node registers, and when it does not. An alert on an increase misses the first one of a
/// series that appears with it: of a zone, the node would be taken for one that never came; of many NodePools, every failure would be missed.
pub fn preset_launched(ctx: &Context, claim: &NodeClaim, node_labels: &BTreeMap<String, String>) {
    let [pool, zone, capacity_type] = [labels::NODE_POOL, labels::ZONE, labels::CAPACITY_TYPE]
        .map(|key| node_labels.get(key).cloned().unwrap_or_default());
    ctx.metrics.nodes_created.with_label_values(&[pool, zone]).inc_by(0);
    let timeouts = [DisruptionReason::RegistrationTimeout, DisruptionReason::InitializationTimeout];
    preset_disrupted(ctx, claim, &capacity_type, &timeouts);
}

fn preset_disrupted(ctx: &Context, claim: &NodeClaim, capacity_type: &str, reasons: &[DisruptionReason]) {
    for reason in reasons {
        let [reason, pool, _, policy, mode] = disrupted(claim, None, *reason);
        ctx.metrics.claims_disrupted.with_label_values(&[&*reason, &pool, capacity_type, &policy, &mode]).inc_by(0);
    }
}

/// Counts a claim whose Node registered.
pub fn count_registered(ctx: &Context, claim: &NodeClaim) {
    let [pool, zone] = [labels::NODE_POOL, labels::ZONE].map(|key| label(claim, key));
    ctx.metrics.nodes_created.with_label_values(&[pool, zone]).inc();
}

/// Counts a claim whose node is drained.
pub fn count_drained(ctx: &Context, claim: &NodeClaim) {
    ctx.metrics.nodes_drained.with_label_values(&[label(claim, labels::NODE_POOL)]).inc();
}

/// Counts a Node whose instance is gone.
pub fn count_terminated_node(ctx: &Context, node: &Node, now: UnixMillis) {
    let [pool, zone] = [labels::NODE_POOL, labels::ZONE].map(|key| node.labels().get(key).cloned().unwrap_or_default());
    ctx.metrics.nodes_terminated.with_label_values(&[&pool, &zone]).inc();
    let lifetime = now.saturating_since(node.created_at());
    ctx.metrics.nodes_lifetime_seconds.with_label_values(&[&pool]).observe(lifetime.as_secs_f64());
    if let Some(begin) = node.deleted_at() {
        ctx.metrics.nodes_termination_seconds.observe(&[&pool], now.saturating_since(begin));
    }
}

/// Counts a claim whose instance is gone, or that had none.
pub fn count_terminated(ctx: &Context, claim: &NodeClaim, now: UnixMillis) {
    let [pool, capacity_type, zone] =
        [labels::NODE_POOL, labels::CAPACITY_TYPE, labels::ZONE].map(|key| label(claim, key));
    ctx.metrics.claims_terminated.with_label_values(&[&pool, &capacity_type, &zone]).inc();
    let since = |begin: Option<UnixMillis>| begin.map(|begin| now.saturating_since(begin).as_secs_f64());
    if let Some(seconds) = since(claim.deleted_at()) {
        ctx.metrics.claims_termination_seconds.with_label_values(&[&pool]).observe(seconds);
    }
    if let Some(seconds) = since(claim.true_since(INSTANCE_TERMINATING)) {
        ctx.metrics.instance_termination_seconds.with_label_values(&[&pool]).observe(seconds);
    }
}

/// Counts pods that were evicted from the node of a claim.
pub fn count_pods_drained(ctx: &Context, claim: &NodeClaim, pods: usize) {
    let reason = DisruptionMark::of(claim).map_or(FORCEFUL, |mark| mark.reason.as_str());
    ctx.metrics.pods_drained.with_label_values(&[reason]).inc_by(u64::try_from(pods).unwrap_or(u64::MAX));
}

/// Counts a disrupted claim, and the pods that need another node because of that.
pub fn count_disrupted(ctx: &Context, claim: &NodeClaim, reason: DisruptionReason) {
    let (pool, pods) = {
        let state = ctx.cluster.read();
        let pool = claim.node_pool().and_then(|pool| state.pools.get(pool).cloned());
        let node = state.node_of(claim);
        if let Some(node) = node {
            observe_utilization(ctx, claim, &NodeUsage::of(&state, node));
        }
        let pods = |node: &Node| state.pods_on(&node.name_any()).filter(|pod| pod.reschedulable()).count();
        (pool, node.map_or(0, |node| pods(node)))
    };
    if let Some(saving) = saving(claim, reason) {
        let labels = [label(claim, labels::NODE_POOL), reason.metric_label().to_owned()];
        ctx.metrics.saved.with_label_values(&labels).inc_by(saving.max(0.0));
    }
    let labels = disrupted(claim, pool.as_deref(), reason);
    ctx.metrics.claims_disrupted.with_label_values(&labels).inc();
    ctx.metrics.pods_disrupted.with_label_values(&labels).inc_by(u64::try_from(pods).unwrap_or(u64::MAX));
}

/// Observes how full the node of a claim is.
fn observe_utilization(ctx: &Context, claim: &NodeClaim, usage: &NodeUsage) {
    let pool = label(claim, labels::NODE_POOL);
    for resource in ["cpu", "memory"] {
        let of = |resources: &Resources| in_units(resource, resources.get(resource));
        let (requested, allocatable) = (of(&usage.requests), of(&usage.allocatable));
        if allocatable > 0.0 {
            ctx.metrics.disrupted_utilization.with_label_values(&[&*pool, resource]).observe(requested / allocatable);
        }
    }
}

/// What consolidation saves by the removal of a claim, in USD per hour: its price, or its share of what its move saves. `None` for other reasons, and while the price is unknown.
fn saving(claim: &NodeClaim, reason: DisruptionReason) -> Option<f64> {
    match reason {
        DisruptionReason::Empty => {
            claim.annotations().get(labels::USD_PER_HOUR)?.parse().ok().filter(|usd: &f64| usd.is_finite())
        }
        DisruptionReason::Underutilized => {
            let record = MoveRecord::of(claim)?;
            let sources = u32::try_from(record.sources.len().max(1)).unwrap_or(u32::MAX);
            Some(record.usd_per_hour / f64::from(sources)).filter(|usd| usd.is_finite())
        }
        _ => None,
    }
}

/// Counts a spot interruption warning.
pub fn count_spot_interruption(ctx: &Context, claim: &NodeClaim) {
    let labels = [labels::INSTANCE_TYPE, labels::ZONE, labels::NODE_POOL].map(|key| label(claim, key));
    ctx.metrics.spot_interruptions.with_label_values(&labels).inc();
}

/// Counts a claim whose Node had this unhealthy condition.
pub fn count_unhealthy(ctx: &Context, claim: &NodeClaim, condition: &str) {
    let image = claim.status.as_ref().and_then(|status| status.image_id.clone()).unwrap_or_default();
    let pool_and_type = [labels::NODE_POOL, labels::CAPACITY_TYPE].map(|key| label(claim, key));
    let [pool, capacity_type] = pool_and_type;
    ctx.metrics.claims_unhealthy.with_label_values(&[snake_case(condition), pool, capacity_type, image]).inc();
}

/// Labels of a new claim: reason, pool, and whether its `minValues` were relaxed.
fn created(claim: &NodeClaim, reason: Option<DisruptionReason>) -> [String; 3] {
    let relaxed = claim.is_annotated(labels::MIN_VALUES_RELAXED);
    let reason = reason.map_or(PROVISIONED, DisruptionReason::metric_label);
    [reason.to_owned(), label(claim, labels::NODE_POOL), relaxed.to_string()]
}

/// Labels of a disrupted claim: reason, pool, capacity type, consolidation policy, termination mode.
fn disrupted(claim: &NodeClaim, pool: Option<&NodePool>, reason: DisruptionReason) -> [String; 5] {
    let pool = pool.filter(|_| reason.is_consolidation());
    [
        reason.metric_label().to_owned(),
        label(claim, labels::NODE_POOL),
        label(claim, labels::CAPACITY_TYPE),
        pool.map(|pool| snake_case(&pool.spec.disruption.consolidation_policy)).unwrap_or_default(),
        termination_mode(claim).to_owned(),
    ]
}

fn label(claim: &NodeClaim, key: &str) -> String {
    claim.metadata.labels.as_ref().and_then(|labels| labels.get(key)).cloned().unwrap_or_default()
}

fn termination_mode(claim: &NodeClaim) -> &'static str {
    match claim.spec.termination_grace_period.as_deref() {
        None => "graceful",
        Some(grace) if duration::parse(grace) == Ok(0) => "forceful",
        Some(_) => "eventual",
    }
}

/// `CamelCase` as `camel_case`.
fn snake_case(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if c.is_ascii_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

#[cfg(test)]
mod tests;
