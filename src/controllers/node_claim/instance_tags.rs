//! Tags instances with the names of their nodes after registration. The cloud limits the rate.

use std::collections::{BTreeMap, HashMap};
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::ResourceExt;
use serde_json::json;
use stowage_api::NodeClaim;
use stowage_cloud::{CloudError, InstanceTagging, Untagged};
use stowage_model::labels;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::{Context, ignore_not_found};
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::state::ClusterState;
use crate::state::object_ext::{NodeClaimExt, ObjectExt};

const PACE: Pace = Pace { debounce: Duration::from_secs(1), resync: Duration::from_secs(10) };

/// Instances with a node and without its tags.
fn untagged(state: &ClusterState) -> Vec<Untagged> {
    let due = |claim: &&Arc<NodeClaim>| !claim.is_deleting() && ANNOTATIONS.iter().any(|key| !claim.is_annotated(key));
    let to_tag = |claim: &Arc<NodeClaim>| {
        let (provider_id, node) = (claim.provider_id()?.to_owned(), claim.status.as_ref()?.node_name.clone()?);
        Some(Untagged { provider_id, node, claim: claim.name_any() })
    };
    state.claims.values().filter(due).filter_map(to_tag).collect()
}

/// Annotations of a claim whose instance has its tags.
const ANNOTATIONS: [&str; 2] = [labels::TAGGED, labels::CLUSTER_NAME_TAGGED];

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let Some(tagger) = ctx.cloud.capabilities().instance_tagging else { return heartbeat::rest_forever().await };
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    loop {
        let due = untagged(&ctx.cluster.read());
        tag(&ctx, tagger, &due).await;
        run_loop.next().await;
    }
}

/// Tags instances, and annotates the claims of those that are tagged.
async fn tag(ctx: &Context, tagger: &dyn InstanceTagging, due: &[Untagged]) {
    // One log line for each kind of failure: a missing permission fails every instance in the same way.
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
        if let Err(error) = ignore_not_found(ctx.patch_claim(claim, &patch).await) {
            tracing::warn!(claim, %error, "failed to annotate node claim of tagged instance");
        }
    }
    for (error, claim, count) in failures.into_values() {
        tracing::warn!(claim, count, %error, "failed to tag instances, retrying");
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use stowage_test_objects as objects;

    use super::*;

    fn claim(name: &str, annotations: serde_json::Value, node: Option<&str>, deleting: bool) -> NodeClaim {
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        let meta = json!({"annotations": annotations, "deletionTimestamp": deletion});
        let status = json!({"providerID": format!("aws:///z/{name}"), "nodeName": node});
        objects::claim(name, &json!({"metadata": meta, "status": status}))
    }

    #[test]
    fn c20_instances_with_a_node_are_tagged_once_unless_deleting() {
        let done = json!({(labels::TAGGED): "true", (labels::CLUSTER_NAME_TAGGED): "true"});
        let mut state = ClusterState::default();
        state.apply_claim(claim("due", json!({}), Some("n1"), false));
        state.apply_claim(claim("half", json!({(labels::TAGGED): "true"}), Some("n2"), false));
        state.apply_claim(claim("done", done, Some("n3"), false));
        state.apply_claim(claim("booting", json!({}), None, false));
        state.apply_claim(claim("deleting", json!({}), Some("n4"), true));
        let names: Vec<String> = untagged(&state).into_iter().map(|untagged| untagged.claim).collect();
        assert_eq!(names, ["due", "half"]);
    }
}
