//! Instances are tagged with their node's name once they have one. How fast is the cloud's business.

use std::collections::{BTreeMap, HashMap};
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::ResourceExt;
use serde_json::json;

use crate::api::NodeClaim;
use crate::cloud::{CloudError, InstanceTagging, Untagged};
use crate::controllers::context::{Context, gone_is_fine};
use crate::model::labels;
use crate::state::ClusterState;

/// Least wait between two looks.
const PAUSE: Duration = Duration::from_secs(1);
/// The state is looked at at least this often.
const TICK: Duration = Duration::from_secs(10);

/// Instances that have a node and not yet its tags.
pub fn untagged(state: &ClusterState) -> Vec<Untagged> {
    let due = |claim: &&Arc<NodeClaim>| {
        claim.metadata.deletion_timestamp.is_none()
            && ANNOTATIONS.iter().any(|key| claim.annotations().get(*key).is_none_or(|value| value != "true"))
    };
    let told = |claim: &Arc<NodeClaim>| {
        let status = claim.status.as_ref()?;
        let (provider_id, node) = (status.provider_id.clone()?, status.node_name.clone()?);
        Some(Untagged { provider_id, node, claim: claim.name_any() })
    };
    state.claims.values().filter(due).filter_map(told).collect()
}

/// Annotations of a claim whose instance has got its tags.
const ANNOTATIONS: [&str; 2] = [labels::TAGGED, labels::CLUSTER_NAME_TAGGED];

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let Some(tagger) = ctx.cloud.capabilities().instance_tagging else { return std::future::pending().await };
    let mut changes = ctx.cluster.changes();
    loop {
        let due = untagged(&ctx.cluster.read());
        tag(&ctx, tagger, &due).await;
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(PAUSE).await;
        changes.mark_unchanged();
    }
}

/// Tags instances, and writes on each claim when its instance has its tags.
async fn tag(ctx: &Context, tagger: &dyn InstanceTagging, due: &[Untagged]) {
    // One line for each kind of failure: a right that is missing fails every instance in the same way.
    let mut failures: HashMap<Discriminant<CloudError>, (CloudError, &str, usize)> = HashMap::new();
    let mut outcomes = tagger.tag(due);
    while let Some((at, outcome)) = outcomes.next().await {
        let claim = &*due[at].claim;
        if let Err(error) = outcome {
            failures.entry(discriminant(&error)).or_insert((error, claim, 0)).2 += 1;
            continue;
        }
        let annotations: BTreeMap<&str, &str> = ANNOTATIONS.map(|key| (key, "true")).into();
        let patch = json!({"metadata": {"annotations": annotations}});
        if let Err(error) = gone_is_fine(ctx.patch_claim(claim, &patch).await) {
            tracing::warn!(claim, %error, "that its instance is tagged could not be written down");
        }
    }
    for (error, claim, count) in failures.into_values() {
        tracing::warn!(claim, count, %error, "instances could not be tagged, trying again");
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::objects;

    fn claim(name: &str, annotations: serde_json::Value, node: Option<&str>, deleting: bool) -> NodeClaim {
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        let meta = json!({"annotations": annotations, "deletionTimestamp": deletion});
        let status = json!({"providerID": format!("aws:///z/{name}"), "nodeName": node});
        objects::claim(name, &json!({"metadata": meta, "status": status}))
    }

    #[test]
    fn c20_claims_with_a_node_are_tagged_once_unless_they_are_going() {
        let done = json!({(labels::TAGGED): "true", (labels::CLUSTER_NAME_TAGGED): "true"});
        let mut state = ClusterState::default();
        state.apply_claim(claim("due", json!({}), Some("n1"), false));
        state.apply_claim(claim("half", json!({(labels::TAGGED): "true"}), Some("n2"), false));
        state.apply_claim(claim("done", done, Some("n3"), false));
        state.apply_claim(claim("booting", json!({}), None, false));
        state.apply_claim(claim("going", json!({}), Some("n4"), true));
        let names: Vec<String> = untagged(&state).into_iter().map(|one| one.claim).collect();
        assert_eq!(names, ["due", "half"]);
    }
}
