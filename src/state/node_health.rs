//! Unhealthy conditions of Nodes (Karpenter AWS reference 11).

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use stowage_model::time::UnixMillis;

const LONG: Duration = Duration::from_mins(30);

/// Unhealthy conditions: type, status, and how long it is tolerated.
const POLICIES: [(&str, &str, Duration); 7] = [
    ("Ready", "False", LONG),
    ("Ready", "Unknown", LONG),
    ("AcceleratedHardwareReady", "False", Duration::from_mins(10)),
    ("StorageReady", "False", LONG),
    ("NetworkingReady", "False", LONG),
    ("KernelReady", "False", LONG),
    ("ContainerRuntimeReady", "False", LONG),
];

/// An unhealthy condition of a Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unhealthy {
    /// Its type.
    pub condition: &'static str,
    pub since: UnixMillis,
    /// Until when it is tolerated.
    pub until: UnixMillis,
}

impl Unhealthy {
    /// The unhealthy condition of a Node that is tolerated for the shortest time from now on. A condition without a time is left out.
    pub fn of(node: &Node) -> Option<Self> {
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let found = conditions.filter_map(|condition| {
            let (kind, _, tolerated) =
                POLICIES.iter().find(|(kind, status, _)| condition.type_ == *kind && condition.status == *status)?;
            let since = UnixMillis::from(condition.last_transition_time.as_ref()?);
            Some(Self { condition: kind, since, until: since + *tolerated })
        });
        found.min_by_key(|found| found.until)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;
    use crate::state::tables::ClusterState;

    const NOW: UnixMillis = UnixMillis(1_800_000_000_000);

    fn condition(kind: &str, status: &str, minutes: u64) -> Value {
        let at = NOW - Duration::from_mins(minutes);
        json!({"type": kind, "status": status, "lastTransitionTime": at.rfc3339()})
    }

    #[test]
    fn a_condition_is_tolerated_for_the_time_of_its_policy() {
        let hardware = "AcceleratedHardwareReady";
        for (case, conditions, expected) in [
            ("ready", json!([condition("Ready", "True", 99)]), None),
            ("not ready", json!([condition("Ready", "False", 5)]), Some(("Ready", 25))),
            ("unknown", json!([condition("Ready", "Unknown", 5)]), Some(("Ready", 25))),
            ("hardware", json!([condition(hardware, "False", 5)]), Some((hardware, 5))),
            ("hardware unknown", json!([condition(hardware, "Unknown", 99)]), None),
            ("storage", json!([condition("StorageReady", "False", 5)]), Some(("StorageReady", 25))),
            ("network", json!([condition("NetworkingReady", "False", 5)]), Some(("NetworkingReady", 25))),
            ("kernel", json!([condition("KernelReady", "False", 5)]), Some(("KernelReady", 25))),
            ("runtime", json!([condition("ContainerRuntimeReady", "False", 5)]), Some(("ContainerRuntimeReady", 25))),
            ("pressure", json!([condition("MemoryPressure", "True", 99)]), None),
            (
                "the first one counts",
                json!([condition("Ready", "False", 15), condition(hardware, "False", 2)]),
                Some((hardware, 8)),
            ),
            ("without a time", json!([{"type": "Ready", "status": "False"}]), None),
            ("none", json!([]), None),
        ] {
            let node = objects::node("x", &json!({"status": {"conditions": conditions}}));
            let found = Unhealthy::of(&node);
            let minutes = |at: UnixMillis| (at.0 - NOW.0) / 60_000;
            assert_eq!(found.as_ref().map(|found| (found.condition, minutes(found.until))), expected, "{case}");
        }
    }

    #[test]
    fn the_state_knows_the_unhealthy_nodes() {
        let mut state = ClusterState::default();
        let node =
            |status: &str| objects::node("x", &json!({"status": {"conditions": [condition("Ready", status, 1)]}}));
        state.apply_node(node("False"));
        assert_eq!(state.unhealthy.keys().collect::<Vec<_>>(), ["x"]);
        state.apply_node(node("True"));
        assert!(state.unhealthy.is_empty());
        state.apply_node(node("Unknown"));
        state.delete_node("x");
        assert!(state.unhealthy.is_empty());
    }
}
