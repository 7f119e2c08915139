//! Whether a node is what was launched (Karpenter core reference 6): with much less of a resource than its type has, plans for it are wrong.

use k8s_openapi::api::core::v1::Node;
use stowage_api::{NodeClaim, conditions};
use stowage_model::quantity::parse_amount;

use crate::state::object_ext::{NodeClaimExt, ObjectExt};

/// The least share of the expected capacity that a node must have, in percent.
const MIN_SHARE: i128 = 90;

/// What a node lacks of its expected capacity: the resources that its claim requests. `None` where it is not known yet: the claim is deleted, or its node
/// is not initialized.
pub fn issues(claim: &NodeClaim, node: &Node) -> Option<Vec<String>> {
    if claim.is_deleting() || !claim.has_condition(conditions::INITIALIZED) {
        return None;
    }
    Some(shape_issues(claim, node))
}

/// [`issues`] of a claim whose node is about to be initialized.
pub fn shape_issues(claim: &NodeClaim, node: &Node) -> Vec<String> {
    let expected = claim.status.as_ref().map(|status| status.capacity.clone()).unwrap_or_default();
    let found = node.status.as_ref().and_then(|status| status.capacity.clone()).unwrap_or_default();
    let requests = claim.spec.resources.requests.iter();
    let issue = requests.filter_map(|(resource, requested)| {
        let amount = |text: &str| parse_amount(resource, text).ok();
        let wanted = expected.get(resource)?;
        let (requested, of_type) = (amount(&requested.0)?, amount(&wanted.0)?);
        let have = found.get(resource).map_or("0", |quantity| &quantity.0);
        let is_short = i128::from(amount(have)?) * 100 < i128::from(of_type) * MIN_SHARE;
        let percent = i128::from(amount(have)?) * 100 / i128::from(of_type.max(1));
        (requested > 0 && of_type > 0 && is_short)
            .then(|| format!("expected {} of resource {resource}, but found {have} ({percent}% of expected)", wanted.0))
    });
    issue.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn a_node_with_less_than_nine_tenths_of_a_requested_resource_is_inconsistent() {
        let capacity = json!({"cpu": "4", "memory": "16Gi", "vpc.amazonaws.com/efa": "0"});
        let claim = |requests: &Value, conditions: &[&str]| {
            let mut status = objects::launched("i-1", conditions);
            status["capacity"] = capacity.clone();
            objects::claim("c", &json!({"spec": {"resources": {"requests": requests}}, "status": status}))
        };
        let node = |capacity: Value| objects::node("x", &json!({"status": {"capacity": capacity}}));
        let both = json!({"cpu": "1", "memory": "1Gi"});
        for (case, requests, found, expected) in [
            ("as expected", &both, json!({"cpu": "4", "memory": "15.5Gi"}), &[][..]),
            ("nine tenths", &both, json!({"cpu": "3600m", "memory": "16Gi"}), &[]),
            (
                "less",
                &both,
                json!({"cpu": "3599m", "memory": "16Gi"}),
                &["expected 4 of resource cpu, but found 3599m (89% of expected)"],
            ),
            ("not requested", &json!({"cpu": "1"}), json!({"cpu": "4", "memory": "1Gi"}), &[]),
            ("requested in vain", &json!({"cpu": "0"}), json!({"cpu": "1"}), &[]),
            ("missing", &json!({"cpu": "1"}), json!({}), &["expected 4 of resource cpu, but found 0 (0% of expected)"]),
            ("not expected", &json!({"vpc.amazonaws.com/efa": "1", "team.io/x": "1"}), json!({}), &[]),
            ("more", &both, json!({"cpu": "8", "memory": "64Gi"}), &[]),
        ] {
            let issues = issues(&claim(requests, &["Initialized"]), &node(found)).unwrap();
            assert_eq!(issues, expected, "{case}");
        }
        assert_eq!(issues(&claim(&both, &["Registered"]), &node(json!({}))), None, "not initialized");
    }
}
