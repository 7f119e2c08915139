//! Counters that exist before anything is counted: an alert on an increase misses the first one of a series that appears with it.

use std::sync::Arc;

use stowage_api::NodePool;
use stowage_model::interruption::MessageKind;
use stowage_runtime::telemetry::controllers::ControllerMetrics;

use crate::controllers::caps::Capped;
use crate::controllers::disruption::disruption_metrics::preset as preset_disruption;
use crate::controllers::disruption::scores::{APPROVED, REJECTED};
use crate::controllers::node_claim::garbage_collection::{INSTANCE, NODE, NODE_CLAIM};
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::interruption::confirmation::{Refusal, TOO_MANY};
use crate::decisions::interruption::response::kind_label;
use crate::decisions::placement::hold_events::HoldEnd;

/// Creates the series of a leader.
pub fn preset(metrics: &ControllerMetrics) {
    preset_disruption(metrics);
    for capped in [Capped::Purchase, Capped::Disruption] {
        metrics.capped.with_label_values(&[capped.label()]).inc_by(0);
    }
    for counter in [&metrics.planned_cost, &metrics.planned_bound] {
        counter.with_label_values::<&str>(&[]).inc_by(0.0);
    }
    for kind in [INSTANCE, NODE_CLAIM, NODE] {
        metrics.garbage_collected.with_label_values(&[kind]).inc_by(0);
    }
    for end in HoldEnd::ALL {
        let [result, reason] = end.metric_labels();
        metrics.holds_ended.with_label_values(&[result, reason]).inc_by(0);
    }
    for kind in MessageKind::ALL.map(kind_label) {
        for reason in [Refusal::Running.label(), Refusal::WrongCapacityType.label(), TOO_MANY] {
            metrics.messages_refused.with_label_values(&[kind, reason]).inc_by(0);
        }
    }
}

/// Creates the series of NodePools.
pub fn preset_pools<'p>(metrics: &ControllerMetrics, pools: impl IntoIterator<Item = (&'p String, &'p Arc<NodePool>)>) {
    for (name, pool) in pools {
        metrics.claims_rejected.with_label_values(&[name]).inc_by(0);
        metrics.purchased_in_vain.with_label_values(&[name]).inc_by(0);
        for reason in [DisruptionReason::Empty, DisruptionReason::Underutilized] {
            metrics.saved.with_label_values(&[name, reason.metric_label()]).inc_by(0.0);
        }
        for decision in [APPROVED, REJECTED] {
            let labels = [decision, name, &pool.spec.disruption.consolidation_policy];
            metrics.consolidation_moves.with_label_values(&labels).inc_by(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use stowage_runtime::telemetry::Metrics;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn a_leader_has_series_before_anything_is_counted() {
        let metrics = Metrics::new();
        let own = ControllerMetrics::new(metrics.registry()).unwrap();
        preset(&own);
        let pools = [("a".to_owned(), Arc::new(objects::node_pool("a", &json!({}))))].into();
        let pools: BTreeMap<String, Arc<NodePool>> = pools;
        preset_pools(&own, &pools);
        own.claims_rejected.with_label_values(&["a"]).inc();
        preset_pools(&own, &pools);
        let text = metrics.text().unwrap();
        for line in [
            "stowage_rate_capped_total{action=\"disruption\"} 0",
            "stowage_interruption_refused_messages_total{message_type=\"spot_interrupted\",reason=\"too_many\"} 0",
            "stowage_holds_ended_total{reason=\"expired\",result=\"released\"} 0",
            "stowage_nodeclaims_rejected_total{nodepool=\"a\"} 1",
            "stowage_purchases_in_vain_total{nodepool=\"a\"} 0",
            "stowage_garbage_collected_total{kind=\"instance\"} 0",
            "stowage_saved_usd_per_hour_total{nodepool=\"a\",reason=\"empty\"} 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }
}
