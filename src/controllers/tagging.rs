//! Instances are tagged with their node's name once they have one, no faster than the cloud's API likes.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use serde_json::json;

use super::context::{Context, gone_is_fine};
use crate::api::{NodeClaim, labels};
use crate::cluster::State;

/// Wait between two instances.
const PAUSE: Duration = Duration::from_secs(1);
/// The state is looked at at least this often.
const TICK: Duration = Duration::from_secs(10);

/// Claims whose instance has a node and not yet its tags: name, provider id, node.
pub fn untagged(state: &State) -> Vec<(String, String, String)> {
    let due = |claim: &&Arc<NodeClaim>| {
        claim.metadata.deletion_timestamp.is_none()
            && ANNOTATIONS.iter().any(|key| claim.annotations().get(*key).is_none_or(|value| value != "true"))
    };
    let told = |claim: &Arc<NodeClaim>| {
        let status = claim.status.as_ref()?;
        Some((claim.name_any(), status.provider_id.clone()?, status.node_name.clone()?))
    };
    state.claims.values().filter(due).filter_map(told).collect()
}

/// Annotations of a claim whose instance has got its tags.
const ANNOTATIONS: [&str; 2] = [labels::TAGGED, labels::CLUSTER_NAME_TAGGED];

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    loop {
        let due = untagged(&ctx.cluster.read());
        for (claim, provider_id, node) in due {
            if let Err(error) = ctx.cloud.tag(&provider_id, &node, &claim).await {
                tracing::warn!(claim, %error, "its instance could not be tagged, trying again");
            } else {
                let annotations = json!(
                    ANNOTATIONS.map(|key| (key, "true")).into_iter().collect::<std::collections::BTreeMap<_, _>>()
                );
                let patch = json!({"metadata": {"annotations": annotations}});
                if let Err(error) = gone_is_fine(ctx.patch_claim(&claim, &patch).await) {
                    tracing::warn!(claim, %error, "that its instance is tagged could not be written down");
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(PAUSE).await;
        changes.mark_unchanged();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(name: &str, annotations: serde_json::Value, node: Option<&str>, deleting: bool) -> NodeClaim {
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        serde_json::from_value(json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim",
            "metadata": {"name": name, "annotations": annotations, "deletionTimestamp": deletion},
            "spec": {"requirements": [], "nodeClassRef": {"group": "g", "kind": "k", "name": "n"}},
            "status": {"providerID": format!("aws:///z/{name}"), "nodeName": node}}))
        .unwrap()
    }

    #[test]
    fn c20_claims_with_a_node_are_tagged_once_unless_they_are_going() {
        let done = json!({(labels::TAGGED): "true", (labels::CLUSTER_NAME_TAGGED): "true"});
        let mut state = State::default();
        state.apply_claim(claim("due", json!({}), Some("n1"), false));
        state.apply_claim(claim("half", json!({(labels::TAGGED): "true"}), Some("n2"), false));
        state.apply_claim(claim("done", done, Some("n3"), false));
        state.apply_claim(claim("booting", json!({}), None, false));
        state.apply_claim(claim("going", json!({}), Some("n4"), true));
        let names: Vec<String> = untagged(&state).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, ["due", "half"]);
    }
}
