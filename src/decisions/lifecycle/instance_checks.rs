//! When the cloud is asked whether the instance of a draining node still exists: nothing evicts pods from a machine that is gone
//! (Karpenter core reference 5.9).

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use stowage_model::time::UnixMillis;

use crate::state::object_ext::NodeExt;

/// Minimum time between two queries for one claim.
const PERIOD: Duration = Duration::from_secs(5);

/// When the instance of each claim was last looked up.
#[derive(Debug, Default)]
pub struct InstanceChecks {
    checked: HashMap<String, UnixMillis>,
}

impl InstanceChecks {
    /// Whether to look up the instance of a claim whose node drains: the Node is not ready, and the last query is a while ago.
    /// Records the query.
    pub fn is_due(&mut self, claim: &str, node: &Node, now: UnixMillis) -> bool {
        if node.is_ready() {
            return false;
        }
        self.checked.retain(|_, at| !at.is_older_than(PERIOD, now));
        if self.checked.contains_key(claim) {
            return false;
        }
        self.checked.insert(claim.to_owned(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn an_instance_is_looked_up_every_five_seconds_while_its_node_is_not_ready() {
        let mut checks = InstanceChecks::default();
        let node = |ready: &str| {
            let conditions = json!([{"type": "Ready", "status": ready}]);
            objects::node("x", &json!({"status": {"conditions": conditions}}))
        };
        for (claim, ready, now, due) in [
            ("c", "True", 0, false),
            ("c", "Unknown", 0, true),
            ("c", "Unknown", 4_999, false),
            ("d", "False", 4_999, true),
            ("c", "Unknown", 5_000, true),
        ] {
            assert_eq!(checks.is_due(claim, &node(ready), UnixMillis(now)), due, "{claim} {ready} at {now}");
        }
        assert_eq!(checks.checked.len(), 2);
        checks.is_due("e", &node("False"), UnixMillis(99_000));
        assert_eq!(checks.checked.len(), 1, "claims that no longer drain are forgotten");
    }
}
