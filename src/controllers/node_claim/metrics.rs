//! NodeClaim lifecycle metrics, labeled as Karpenter labels them (Karpenter core reference 8).

use crate::api::{NodeClaim, NodePool, duration};
use crate::controllers::context::Context;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::model::labels;
use crate::state::object_ext::ObjectExt;

/// Reason of every new claim: pods need it.
const PROVISIONED: &str = "provisioned";

/// Counts a new claim.
pub fn count_created(ctx: &Context, claim: &NodeClaim) {
    ctx.metrics.claims_created.with_label_values(&created(claim)).inc();
}

/// Counts a disrupted claim.
pub fn count_disrupted(ctx: &Context, claim: &NodeClaim, reason: DisruptionReason) {
    let pool = claim.node_pool().and_then(|pool| ctx.cluster.read().pools.get(pool).cloned());
    ctx.metrics.claims_disrupted.with_label_values(&disrupted(claim, pool.as_deref(), reason)).inc();
}

/// Counts a claim whose Node had this unhealthy condition.
pub fn count_unhealthy(ctx: &Context, claim: &NodeClaim, condition: &str) {
    let image = claim.status.as_ref().and_then(|status| status.image_id.clone()).unwrap_or_default();
    let pool_and_type = [labels::NODE_POOL, labels::CAPACITY_TYPE].map(|key| label(claim, key));
    let [pool, capacity_type] = pool_and_type;
    ctx.metrics.claims_unhealthy.with_label_values(&[snake_case(condition), pool, capacity_type, image]).inc();
}

/// Labels of a new claim: reason, pool, and whether its `minValues` were relaxed.
fn created(claim: &NodeClaim) -> [String; 3] {
    let relaxed = claim.is_annotated(labels::MIN_VALUES_RELAXED);
    [PROVISIONED.to_owned(), label(claim, labels::NODE_POOL), relaxed.to_string()]
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
mod tests {
    use serde_json::json;

    use super::*;
    use crate::telemetry::Metrics;
    use crate::telemetry::controllers::ControllerMetrics;
    use crate::test_support::objects;

    fn claim(grace: Option<&str>, annotations: &serde_json::Value) -> NodeClaim {
        let own = json!({(labels::NODE_POOL): "p", (labels::CAPACITY_TYPE): "spot"});
        let meta = json!({"labels": own, "annotations": annotations});
        objects::claim("c", &json!({"metadata": meta, "spec": {"terminationGracePeriod": grace}}))
    }

    fn pool(policy: &str) -> NodePool {
        objects::node_pool("p", &json!({"spec": {"disruption": {"consolidationPolicy": policy}}}))
    }

    #[test]
    fn a_disrupted_claim_is_counted_with_karpenters_labels() {
        for (reason, policy, grace, expected) in [
            (DisruptionReason::Empty, "WhenEmpty", None, ["empty", "when_empty", "graceful"]),
            (DisruptionReason::Underutilized, "Balanced", Some("1h"), ["underutilized", "balanced", "eventual"]),
            (
                DisruptionReason::Underutilized,
                "WhenEmptyOrUnderutilized",
                Some("0s"),
                ["underutilized", "when_empty_or_underutilized", "forceful"],
            ),
            (DisruptionReason::Drifted, "WhenEmpty", None, ["drifted", "", "graceful"]),
            (DisruptionReason::Expired, "WhenEmpty", None, ["expired", "", "graceful"]),
            (DisruptionReason::SpotInterruption, "WhenEmpty", None, ["spot_interrupted", "", "graceful"]),
            (
                DisruptionReason::CapacityReservationInterruption,
                "WhenEmpty",
                None,
                ["capacity_reservation_interrupted", "", "graceful"],
            ),
            (DisruptionReason::ScheduledChange, "WhenEmpty", None, ["scheduled_change", "", "graceful"]),
            (DisruptionReason::InsufficientCapacity, "WhenEmpty", None, ["insufficient_capacity", "", "graceful"]),
        ] {
            let found = disrupted(&claim(grace, &json!({})), Some(&pool(policy)), reason);
            let [reason, policy, mode] = expected;
            assert_eq!(found, [reason, "p", "spot", policy, mode]);
        }
        let bare = NodeClaim { metadata: kube::api::ObjectMeta::default(), ..claim(None, &json!({})) };
        assert_eq!(
            disrupted(&bare, None, DisruptionReason::Empty),
            ["empty", "", "", "", "graceful"],
            "without its pool"
        );
    }

    #[test]
    fn a_new_claim_is_counted_by_whether_its_min_values_were_relaxed() {
        for (annotations, relaxed) in [
            (json!({}), "false"),
            (json!({(labels::MIN_VALUES_RELAXED): "false"}), "false"),
            (json!({(labels::MIN_VALUES_RELAXED): "true"}), "true"),
        ] {
            assert_eq!(created(&claim(None, &annotations)), ["provisioned", "p", relaxed]);
        }
    }

    #[test]
    fn the_values_match_the_label_names() {
        let all = Metrics::new();
        let metrics = ControllerMetrics::new(all.registry()).unwrap();
        let claim = claim(None, &json!({}));
        metrics.claims_created.with_label_values(&created(&claim)).inc();
        metrics
            .claims_disrupted
            .with_label_values(&disrupted(&claim, Some(&pool("WhenEmpty")), DisruptionReason::Empty))
            .inc();
        let text = all.text().unwrap();
        for line in [
            "stowage_nodeclaims_created_total{min_values_relaxed=\"false\",nodepool=\"p\",reason=\"provisioned\"} 1",
            "stowage_nodeclaims_disrupted_total{capacity_type=\"spot\",consolidation_policy=\"when_empty\",nodepool=\"p\",\
             reason=\"empty\",termination_mode=\"graceful\"} 1",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }
}
