//! What the eviction of pods costs, in units: an ordinary pod that runs for some time costs one (Karpenter core reference 4.3).

use std::time::Duration;

use stowage_model::time::UnixMillis;

use crate::state::pods::PodRecord;

/// Eviction cost in thousandths of a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct EvictionUnits(pub i64);

impl EvictionUnits {
    /// The number of units, for logs.
    pub fn as_number(self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "for logs")]
        let thousandths = self.0 as f64;
        thousandths / 1_000.0
    }
}

/// One unit.
const UNIT: i64 = 1_000;
/// Maximum cost of a pod, before its age counts.
const MAX: i64 = 10 * UNIT;
/// Deletion cost that adds one unit.
const DELETION_COST_PER_UNIT: i64 = 1 << 27;
/// Priority that adds one unit.
const PRIORITY_PER_UNIT: i64 = 1 << 25;
/// A pod that just started costs twice as much, and one of this age once: a young pod was probably just moved.
const SETTLED_AGE: Duration = Duration::from_mins(5);

/// Cost of the eviction of a pod. A pod without a controller costs the maximum: nothing creates it again.
pub fn of_pod(pod: &PodRecord, now: UnixMillis) -> EvictionUnits {
    let Ok(entry) = &pod.entry else { return EvictionUnits(UNIT) };
    if entry.owner.is_none() {
        return EvictionUnits(MAX);
    }
    let by_deletion_cost = i64::from(pod.deletion_cost) * UNIT / DELETION_COST_PER_UNIT;
    let by_priority = i64::from(entry.class.priority) * UNIT / PRIORITY_PER_UNIT;
    with_age((UNIT + by_deletion_cost + by_priority).clamp(0, MAX), entry.created_at, now)
}

fn with_age(settled: i64, created_at: UnixMillis, now: UnixMillis) -> EvictionUnits {
    let period = i64::try_from(SETTLED_AGE.as_millis()).unwrap_or(i64::MAX);
    let age = i64::try_from(now.saturating_since(created_at).as_millis()).unwrap_or(i64::MAX).min(period);
    EvictionUnits(settled + settled * (period - age) / period)
}

/// From this time on the age of these pods does not count.
pub fn settled_at<'a>(pods: impl Iterator<Item = &'a PodRecord>) -> UnixMillis {
    let created = pods.filter_map(|pod| pod.entry.as_ref().ok()).map(|entry| entry.created_at).max();
    created.map_or(UnixMillis(0), |created| created + SETTLED_AGE)
}

/// Cost of the removal of a node with these pods: one unit, and that of each pod that needs another node.
pub fn of_node<'a>(pods: impl Iterator<Item = &'a PodRecord>, now: UnixMillis) -> EvictionUnits {
    sum(pods, |pod| of_pod(pod, now))
}

/// The same if every pod were an ordinary one: how a tenant sets its deletion costs and priorities changes nothing.
pub fn of_node_with_ordinary_pods<'a>(pods: impl Iterator<Item = &'a PodRecord>, now: UnixMillis) -> EvictionUnits {
    let of_pod =
        |pod: &PodRecord| pod.entry.as_ref().map_or(EvictionUnits(UNIT), |entry| with_age(UNIT, entry.created_at, now));
    sum(pods, of_pod)
}

fn sum<'a>(pods: impl Iterator<Item = &'a PodRecord>, of_pod: impl Fn(&PodRecord) -> EvictionUnits) -> EvictionUnits {
    EvictionUnits(UNIT + pods.filter(|pod| pod.needs_another_node()).map(|pod| of_pod(pod).0).sum::<i64>())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;
    use crate::state::tables::ClusterState;

    const NOW: UnixMillis = UnixMillis(1_800_000_000_000);

    fn pod(age: Duration, patch: &Value) -> Value {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
        let mut pod = json!({"metadata": {"creationTimestamp": (NOW - age).rfc3339(), "ownerReferences": [owner]},
            "spec": {"nodeName": "x"}});
        json_patch::merge(&mut pod, patch);
        pod
    }

    fn state(pods: &[Value]) -> ClusterState {
        let mut state = ClusterState::default();
        for (at, patch) in pods.iter().enumerate() {
            state.apply_pod(&objects::pod(&format!("p{at}"), patch), NOW);
        }
        state
    }

    #[test]
    fn the_cost_of_a_pod_follows_its_deletion_cost_priority_age_and_controller() {
        let cost =
            |cost: &str| json!({"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": cost}}});
        let priority = |priority: i64| json!({"spec": {"priority": priority}});
        let (old, young) = (Duration::from_hours(1), Duration::ZERO);
        for (case, age, patch, expected) in [
            ("an ordinary pod", old, json!({}), 1_000),
            ("deletion cost 2147483647", old, cost("2147483647"), 10_000),
            ("deletion cost 134217728", old, cost("134217728"), 2_000),
            ("deletion cost -134217728", old, cost("-134217728"), 0),
            ("deletion cost -2147483648", old, cost("-2147483648"), 0),
            ("no number", old, cost("much"), 1_000),
            ("more than 32 bits", old, cost("99999999999"), 1_000),
            ("priority 2000000000", old, priority(2_000_000_000), 10_000),
            ("priority 33554432", old, priority(1 << 25), 2_000),
            ("priority -2147483648", old, priority(-2_147_483_648), 0),
            ("just started", young, json!({}), 2_000),
            ("started a minute ago", Duration::from_mins(1), json!({}), 1_800),
            ("started five minutes ago", SETTLED_AGE, json!({}), 1_000),
            ("the most, just started", young, cost("2147483647"), 20_000),
            ("without a controller", old, json!({"metadata": {"ownerReferences": null}}), 10_000),
        ] {
            let state = state(&[pod(age, &patch)]);
            assert_eq!(of_pod(&state.pods["n/p0"], NOW), EvictionUnits(expected), "{case}");
        }
        let future = state(&[pod(old, &json!({"metadata": {"creationTimestamp": "2999-01-01T00:00:00Z"}}))]);
        assert_eq!(of_pod(&future.pods["n/p0"], NOW), EvictionUnits(2_000));
    }

    /// Karpenter core reference 4.15: nine ordinary pods cost ten units with their node.
    #[test]
    fn the_cost_of_a_node_is_one_unit_and_its_pods_that_need_another_node() {
        let old = Duration::from_hours(1);
        let mut pods = vec![pod(old, &json!({})); 9];
        assert_eq!(of_node(state(&pods).pods.values(), NOW), EvictionUnits(10_000));
        pods.push(pod(old, &json!({"status": {"phase": "Succeeded"}})));
        let daemon =
            json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]);
        pods.push(pod(old, &json!({"metadata": {"ownerReferences": daemon}})));
        assert_eq!(of_node(state(&pods).pods.values(), NOW), EvictionUnits(10_000));
        assert_eq!(of_node(std::iter::empty(), NOW), EvictionUnits(1_000));
    }
}
