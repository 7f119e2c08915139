//! When the drain of a deleted NodeClaim must be over.

use kube::ResourceExt;
use stowage_api::{NodeClaim, duration};
use stowage_model::labels;
use stowage_model::time::UnixMillis;

/// The deadline: the annotation of the claim, or else its deletion timestamp plus its `terminationGracePeriod`.
pub fn termination_deadline(claim: &NodeClaim) -> Option<UnixMillis> {
    let text = claim.annotations().get(labels::TERMINATION_TIMESTAMP);
    text.and_then(|text| UnixMillis::parse_rfc3339(text)).or_else(|| from_grace_period(claim))
}

/// The deadline that follows from the grace period of a deleted claim, unless the annotation is set.
pub fn unwritten_deadline(claim: &NodeClaim) -> Option<UnixMillis> {
    if claim.annotations().contains_key(labels::TERMINATION_TIMESTAMP) { None } else { from_grace_period(claim) }
}

fn from_grace_period(claim: &NodeClaim) -> Option<UnixMillis> {
    let deleted = UnixMillis::from(claim.metadata.deletion_timestamp.as_ref()?);
    let grace = duration::parse(claim.spec.termination_grace_period.as_deref()?).ok()?;
    deleted.0.checked_add(grace).map(UnixMillis)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;

    fn claim(annotations: &serde_json::Value) -> NodeClaim {
        let metadata =
            json!({"annotations": annotations, "deletionTimestamp": "1970-01-01T00:01:40Z", "finalizers": ["f"]});
        objects::claim("c", &json!({"metadata": metadata, "spec": {"terminationGracePeriod": "1h"}}))
    }

    #[test]
    fn the_annotation_takes_precedence_over_the_grace_period() {
        assert_eq!(termination_deadline(&claim(&json!({}))), Some(UnixMillis(3_700_000)));
        let written = |text: &str| termination_deadline(&claim(&json!({(labels::TERMINATION_TIMESTAMP): text})));
        assert_eq!(written("1970-01-01T00:00:50Z"), Some(UnixMillis(50_000)));
        assert_eq!(written("soon"), Some(UnixMillis(3_700_000)), "an invalid annotation is ignored");
        assert_eq!(unwritten_deadline(&claim(&json!({}))), Some(UnixMillis(3_700_000)));
        assert_eq!(unwritten_deadline(&claim(&json!({(labels::TERMINATION_TIMESTAMP): "soon"}))), None);
    }
}
