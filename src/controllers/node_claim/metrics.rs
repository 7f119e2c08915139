//! What is counted of NodeClaims that come and go, by the labels of Karpenter's metrics (core reference 8).

use kube::ResourceExt;

use crate::api::{NodeClaim, NodePool, duration};
use crate::controllers::context::Context;
use crate::controllers::disruption::run::{EMPTY, UNDERUTILIZED};
use crate::model::labels;

/// Why a claim is made: here always for pods that wait.
const PROVISIONED: &str = "provisioned";

/// Counts a claim that is made.
pub fn count_created(ctx: &Context, claim: &NodeClaim) {
    ctx.metrics.claims_created.with_label_values(&created(claim)).inc();
}

/// Counts a claim that is taken away. `reason` as events say it, or as metrics do.
pub fn count(ctx: &Context, claim: &NodeClaim, reason: &str) {
    let pool = claim.labels().get(labels::NODE_POOL).and_then(|pool| ctx.cluster.read().pools.get(pool).cloned());
    ctx.metrics.claims_disrupted.with_label_values(&disrupted(claim, pool.as_deref(), reason)).inc();
}

/// Labels of a claim that is made: reason, pool, and whether its `minValues` were lowered.
fn created(claim: &NodeClaim) -> [String; 3] {
    let relaxed = claim.annotations().get(labels::MIN_VALUES_RELAXED).is_some_and(|value| value == "true");
    [PROVISIONED.to_owned(), label(claim, labels::NODE_POOL), relaxed.to_string()]
}

/// Labels of a claim that is taken away: reason, pool, capacity type, the policy where it is consolidated, and how it ends.
fn disrupted(claim: &NodeClaim, pool: Option<&NodePool>, reason: &str) -> [String; 5] {
    let reason = word(reason);
    let consolidated = [EMPTY, UNDERUTILIZED].iter().any(|other| snake(other) == reason);
    let policy = pool.filter(|_| consolidated).map(|pool| snake(&pool.spec.disruption.consolidation_policy));
    [
        reason,
        label(claim, labels::NODE_POOL),
        label(claim, labels::CAPACITY_TYPE),
        policy.unwrap_or_default(),
        mode(claim).to_owned(),
    ]
}

fn label(claim: &NodeClaim, key: &str) -> String {
    claim.labels().get(key).cloned().unwrap_or_default()
}

/// How patiently a claim's pods are drained, by its `terminationGracePeriod`.
fn mode(claim: &NodeClaim) -> &'static str {
    match claim.spec.termination_grace_period.as_deref() {
        None => "graceful",
        Some(grace) if duration::parse(grace) == Ok(0) => "forceful",
        Some(_) => "eventual",
    }
}

/// Karpenter's word for a reason.
pub fn word(reason: &str) -> String {
    match reason {
        "SpotInterruption" => "spot_interrupted".to_owned(),
        "CapacityReservationInterruption" => "capacity_reservation_interrupted".to_owned(),
        other => snake(other),
    }
}

/// `CamelCase` as `camel_case`; what is that already stays.
fn snake(text: &str) -> String {
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
    fn a_claim_that_goes_is_counted_by_karpenters_words() {
        for (reason, policy, grace, expected) in [
            ("Empty", "WhenEmpty", None, ["empty", "when_empty", "graceful"]),
            ("Underutilized", "Balanced", Some("1h"), ["underutilized", "balanced", "eventual"]),
            (
                "Underutilized",
                "WhenEmptyOrUnderutilized",
                Some("0s"),
                ["underutilized", "when_empty_or_underutilized", "forceful"],
            ),
            ("Drifted", "WhenEmpty", None, ["drifted", "", "graceful"]),
            ("expired", "WhenEmpty", None, ["expired", "", "graceful"]),
            ("SpotInterruption", "WhenEmpty", None, ["spot_interrupted", "", "graceful"]),
            (
                "CapacityReservationInterruption",
                "WhenEmpty",
                None,
                ["capacity_reservation_interrupted", "", "graceful"],
            ),
            ("ScheduledChange", "WhenEmpty", None, ["scheduled_change", "", "graceful"]),
            ("insufficient_capacity", "WhenEmpty", None, ["insufficient_capacity", "", "graceful"]),
        ] {
            let found = disrupted(&claim(grace, &json!({})), Some(&pool(policy)), reason);
            let [reason, policy, mode] = expected;
            assert_eq!(found, [reason, "p", "spot", policy, mode]);
        }
        let bare = NodeClaim { metadata: kube::api::ObjectMeta::default(), ..claim(None, &json!({})) };
        assert_eq!(disrupted(&bare, None, "Empty"), ["empty", "", "", "", "graceful"], "its pool is gone");
    }

    #[test]
    fn a_claim_that_is_made_says_whether_its_min_values_were_lowered() {
        for (annotations, relaxed) in [
            (json!({}), "false"),
            (json!({(labels::MIN_VALUES_RELAXED): "false"}), "false"),
            (json!({(labels::MIN_VALUES_RELAXED): "true"}), "true"),
        ] {
            assert_eq!(created(&claim(None, &annotations)), ["provisioned", "p", relaxed]);
        }
    }

    #[test]
    fn the_values_stand_under_the_names_of_their_labels() {
        let all = Metrics::new();
        let metrics = ControllerMetrics::new(all.registry()).unwrap();
        let claim = claim(None, &json!({}));
        metrics.claims_created.with_label_values(&created(&claim)).inc();
        metrics.claims_disrupted.with_label_values(&disrupted(&claim, Some(&pool("WhenEmpty")), "Empty")).inc();
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
