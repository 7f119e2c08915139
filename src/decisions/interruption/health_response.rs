//! The response to an unhealthy instance (Karpenter AWS reference 9.4): after a failed status check the pods are as good as gone;
//! before a scheduled event there is time to drain.

use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::instance_health::{Category, Remedy, Unhealthy};
use stowage_model::labels;
use stowage_model::time::UnixMillis;

use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::interruption::response::SCHEDULED_NOTICE;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};
use crate::state::tables::ClusterState;

/// What to do about a claim whose instance is unhealthy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthAction {
    /// Mark the claim: its node is replaced and drained before the deadline.
    Mark(DisruptionMark),
    /// Terminate without a drain: set the termination timestamp to now (`expire`) and delete the claim (`delete`), unless done.
    Terminate { expire: bool, delete: bool },
}

/// The claims of unhealthy instances. The cloud reports instances of other clusters, too.
pub fn with_claims(state: &ClusterState, found: &[Unhealthy]) -> Vec<(Arc<NodeClaim>, Unhealthy)> {
    let claims = state.claims.values().filter_map(|claim| {
        let id = claim.instance_id()?;
        let unhealthy = found.iter().find(|unhealthy| unhealthy.instance_id == id)?;
        Some((Arc::clone(claim), unhealthy.clone()))
    });
    claims.collect()
}

/// The category that decides about the response, as a reason.
pub fn reason(unhealthy: &Unhealthy) -> DisruptionReason {
    match unhealthy.categories.first() {
        Some(Category::InstanceStatus) => DisruptionReason::InstanceStatus,
        Some(Category::SystemStatus) => DisruptionReason::SystemStatus,
        Some(Category::EventStatus) => DisruptionReason::EventStatus,
        None => DisruptionReason::Unknown,
    }
}

/// What to do; `None` when it is done.
pub fn action(claim: &NodeClaim, unhealthy: &Unhealthy, now: UnixMillis) -> Option<HealthAction> {
    let deleting = claim.is_deleting();
    match unhealthy.remedy() {
        Remedy::Force => {
            let expire = !claim.annotations().contains_key(labels::TERMINATION_TIMESTAMP);
            (expire || !deleting).then_some(HealthAction::Terminate { expire, delete: !deleting })
        }
        Remedy::Drain => {
            let has_deadline = DisruptionMark::of(claim).is_some_and(|mark| mark.deadline.is_some());
            let mark = DisruptionMark { reason: reason(unhealthy), deadline: Some(now + SCHEDULED_NOTICE) };
            (!deleting && !has_deadline).then_some(HealthAction::Mark(mark))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    fn claim(annotations: &serde_json::Value, deleting: bool) -> NodeClaim {
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        let meta = json!({"annotations": annotations, "deletionTimestamp": deletion, "finalizers": ["f"]});
        objects::claim("c", &json!({"metadata": meta}))
    }

    #[test]
    fn c38_a_failed_check_terminates_and_a_scheduled_event_drains() {
        use Category::{EventStatus, InstanceStatus, SystemStatus};
        let terminate = |expire, delete| Some(HealthAction::Terminate { expire, delete });
        let mark = || {
            let deadline = Some(UnixMillis(600_000));
            Some(HealthAction::Mark(DisruptionMark { reason: DisruptionReason::EventStatus, deadline }))
        };
        let expired = json!({(labels::TERMINATION_TIMESTAMP): "2026-01-01T00:00:00Z"});
        let interrupted = json!({(labels::DISRUPTING): "SpotInterruption/2026-01-01T00:02:00Z"});
        let consolidated = json!({(labels::DISRUPTING): "Underutilized/"});
        for (case, annotations, deleting, categories, expected) in [
            ("instance", json!({}), false, &[InstanceStatus][..], terminate(true, true)),
            ("system", json!({}), false, &[SystemStatus], terminate(true, true)),
            ("both kinds", json!({}), false, &[SystemStatus, EventStatus], terminate(true, true)),
            ("an earlier timestamp is kept", expired.clone(), false, &[InstanceStatus], terminate(false, true)),
            ("stuck in its drain", json!({}), true, &[InstanceStatus], terminate(true, false)),
            ("all done", expired, true, &[InstanceStatus], None),
            ("event", json!({}), false, &[EventStatus], mark()),
            ("event, draining", json!({}), true, &[EventStatus], None),
            ("event, interrupted", interrupted, false, &[EventStatus], None),
            ("event, marked without a deadline", consolidated, false, &[EventStatus], mark()),
        ] {
            let unhealthy = Unhealthy { instance_id: "i-1".into(), categories: categories.iter().copied().collect() };
            assert_eq!(action(&claim(&annotations, deleting), &unhealthy, UnixMillis(0)), expected, "{case}");
        }
    }

    #[test]
    fn c38_instances_without_a_claim_are_ignored() {
        let mut state = ClusterState::default();
        state.apply_claim(objects::claim("c", &json!({"status": objects::launched("i-1", &[])})));
        let unhealthy = |id: &str, category| Unhealthy { instance_id: id.into(), categories: [category].into() };
        let found = [unhealthy("i-1", Category::EventStatus), unhealthy("i-11", Category::InstanceStatus)];
        let claims = with_claims(&state, &found);
        assert_eq!(claims.len(), 1);
        assert_eq!((claims[0].0.name_any(), &*claims[0].1.instance_id), ("c".to_owned(), "i-1"));
    }
}
