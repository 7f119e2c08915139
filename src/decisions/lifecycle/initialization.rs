//! When the Node of a claim is initialized (Karpenter core reference 5.4).

use k8s_openapi::api::core::v1::Node;
use stowage_api::NodeClaim;

use crate::state::node_state::is_ephemeral;
use crate::state::object_ext::{NodeClaimExt, NodeExt};

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

/// Why a registered node is not initialized, as the reason of the condition; `None` when it is.
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

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn a_node_is_complete_without_startup_taints_and_with_every_requested_resource() {
        let claim = objects::claim(
            "c",
            &json!({"spec": {"startupTaints": [{"key": "cni", "effect": "NoSchedule"}],
                "resources": {"requests": {"nvidia.com/gpu": "1", "vpc.amazonaws.com/efa": "0", "cpu": "500m"}}}}),
        );
        let allocatable = |gpu: Option<&str>| json!({"cpu": "2", "nvidia.com/gpu": gpu});
        for (case, taint, gpu, complete) in [
            ("all there", ("other", "NoSchedule"), Some("1"), true),
            ("the startup taint", ("cni", "NoSchedule"), Some("1"), false),
            ("another effect than the startup taint's", ("cni", "NoExecute"), Some("1"), true),
            ("no device plugin yet", ("other", "NoSchedule"), None, false),
            ("no device yet", ("other", "NoSchedule"), Some("0"), false),
        ] {
            let taints = json!([{"key": taint.0, "effect": taint.1}]);
            let patch = json!({"spec": {"taints": taints}, "status": {"allocatable": allocatable(gpu)}});
            assert_eq!(is_complete(&claim, &objects::node("n", &patch)), complete, "{case}");
        }
    }
}
