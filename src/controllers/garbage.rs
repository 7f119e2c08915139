//! Instances without a NodeClaim, and NodeClaims without an instance.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use super::context::Context;
use super::lifecycle;
use crate::api::{NodeClaim, conditions, labels};
use crate::cloud::Instance;
use crate::cluster::snapshot::node_ready;
use crate::cluster::{State, now_ms};

/// How often both are compared.
const PERIOD: Duration = Duration::from_secs(30);
/// How often unused instance profiles are looked for.
const PROFILES_PERIOD: Duration = Duration::from_mins(30);
/// A younger instance may belong to a claim whose launch is not written down yet, milliseconds.
const YOUNG_MS: i64 = 60_000;

/// Provider ids of instances that no claim knows: none names it, and the claim it was launched for, if there is one, names
/// another.
pub fn leaked(state: &State, instances: &[Instance], now: i64) -> Vec<String> {
    let id = |claim: &NodeClaim| claim.status.as_ref().and_then(|status| status.provider_id.clone());
    let named: BTreeSet<String> = state.claims.values().filter_map(|claim| id(claim)).collect();
    let waiting: BTreeSet<&str> = (state.claims.values().filter(|claim| id(claim).is_none()))
        .filter_map(|claim| claim.metadata.uid.as_deref())
        .collect();
    let known = |instance: &&Instance| {
        named.contains(&instance.provider_id) || waiting.contains(instance.client_token.as_str())
    };
    let old = instances.iter().filter(|instance| now - instance.launched_at_ms >= YOUNG_MS);
    old.filter(|instance| !known(instance)).map(|instance| instance.provider_id.clone()).collect()
}

/// Claims whose instance is gone. A node that is still ready contradicts the list, so its claim stays; so does a claim that
/// was launched since the list was made.
pub fn orphaned(state: &State, instances: &[Instance], now: i64) -> Vec<Arc<NodeClaim>> {
    let known: BTreeSet<&str> = instances.iter().map(|instance| instance.provider_id.as_str()).collect();
    state
        .claims
        .values()
        .filter(|claim| claim.metadata.deletion_timestamp.is_none())
        .filter(|claim| {
            let status = claim.status.as_ref();
            let launched = status.is_some_and(|status| conditions::is_true(&status.conditions, "Launched"));
            let id = status.and_then(|status| status.provider_id.as_deref());
            let since = status.and_then(|status| conditions::get(&status.conditions, conditions::LAUNCHED));
            let old = since.is_some_and(|since| now - since.last_transition_time.0.as_millisecond() >= YOUNG_MS);
            launched && old && id.is_some_and(|id| !known.contains(id))
        })
        .filter(|claim| state.node_of(claim).is_none_or(|node| !node_ready(node)))
        .cloned()
        .collect()
}

/// Instance profiles that classes name, or claims: their instances may still ask for credentials.
pub fn profiles_in_use(state: &State) -> BTreeSet<String> {
    let classes = state.classes.values().filter_map(|class| class.status.as_ref()?.instance_profile.clone());
    let claims =
        state.claims.values().filter_map(|claim| claim.annotations().get(labels::INSTANCE_PROFILE_NAME).cloned());
    classes.chain(claims).collect()
}

/// Deletes instance profiles that nothing uses any more, until the process ends.
pub async fn profiles(ctx: Arc<Context>) {
    loop {
        tokio::time::sleep(PROFILES_PERIOD).await;
        let used = profiles_in_use(&ctx.cluster.read());
        if let Err(error) = ctx.cloud.delete_unused_profiles(&used).await {
            tracing::warn!(%error, "unused instance profiles could not be deleted, trying again later");
        }
    }
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    loop {
        // What is launched between the list and the look at the claims is too young to matter to either.
        let instances = match ctx.cloud.list().await {
            Ok(instances) => instances,
            Err(error) => {
                tracing::warn!(%error, "instances could not be listed, trying again");
                tokio::time::sleep(PERIOD).await;
                continue;
            }
        };
        let (leaked, orphaned) = {
            let state = ctx.cluster.read();
            (leaked(&state, &instances, now_ms()), orphaned(&state, &instances, now_ms()))
        };
        for id in leaked {
            tracing::warn!(instance = id, "instance without a node claim is terminated");
            ctx.metrics.garbage_collected.with_label_values(&["instance"]).inc();
            if let Err(error) = ctx.cloud.terminate(&id).await {
                tracing::warn!(instance = id, %error, "instance could not be terminated, trying again");
            }
        }
        for claim in orphaned {
            tracing::warn!(claim = claim.name_any(), "its instance is gone, it goes");
            ctx.metrics.garbage_collected.with_label_values(&["nodeclaim"]).inc();
            if let Err(error) = lifecycle::delete_claim(&ctx, &claim).await {
                tracing::warn!(claim = claim.name_any(), %error, "node claim could not be deleted, trying again");
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::InstanceState;
    use crate::scheduling::offering::CapacityType;

    fn instance(id: &str, token: &str, launched_at_ms: i64) -> Instance {
        Instance {
            id: id.into(),
            provider_id: format!("aws:///z/{id}"),
            client_token: token.into(),
            node_claim: "c".into(),
            instance_type: "m5.large".into(),
            zone: "z".into(),
            capacity_type: CapacityType::OnDemand,
            reservation: None,
            partition: None,
            image_id: "ami-1".into(),
            launched_at_ms,
            state: InstanceState::Running,
        }
    }

    fn state(ready: bool) -> State {
        let mut state = State::default();
        state.apply_claim(
            serde_json::from_value(serde_json::json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim",
                "metadata": {"name": "c", "uid": "token"},
                "spec": {"requirements": [], "nodeClassRef": {"group": "g", "kind": "k", "name": "n"}},
                "status": {"providerID": "aws:///z/i-1", "conditions": [{"type": "Launched", "status": "True",
                    "reason": "Launched", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}))
            .unwrap(),
        );
        state.apply_node(
            serde_json::from_value(
                serde_json::json!({"metadata": {"name": "n"}, "spec": {"providerID": "aws:///z/i-1"},
                "status": {"conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]}}),
            )
            .unwrap(),
        );
        state
    }

    #[test]
    fn only_an_old_instance_that_no_claim_knows_is_leaked() {
        let all = [instance("i-1", "token", 0), instance("i-2", "other", 0), instance("i-3", "young", 50_000)];
        assert_eq!(leaked(&state(true), &all, 60_000), ["aws:///z/i-2"]);
    }

    #[test]
    fn an_instance_is_known_by_its_claims_provider_id_whoever_launched_it() {
        let adopted = instance("i-1", "", 0);
        assert!(leaked(&state(true), &[adopted], 60_000).is_empty());
        let twin = instance("i-2", "token", 0);
        assert_eq!(leaked(&state(true), std::slice::from_ref(&twin), 60_000), ["aws:///z/i-2"], "launched twice");
        let mut unwritten = state(true);
        let mut claim = unwritten.claims["c"].as_ref().clone();
        claim.status = None;
        unwritten.apply_claim(claim);
        assert!(leaked(&unwritten, &[twin], 60_000).is_empty(), "its launch is not written down yet");
    }

    #[test]
    fn a_claim_without_its_instance_goes_unless_its_node_is_ready() {
        let launched = "2026-01-01T00:00:00Z".parse::<k8s_openapi::jiff::Timestamp>().unwrap().as_millisecond();
        let now = launched + YOUNG_MS;
        assert!(orphaned(&state(false), &[instance("i-1", "token", 0)], now).is_empty());
        assert_eq!(orphaned(&state(false), &[], now).len(), 1);
        assert!(orphaned(&state(true), &[], now).is_empty());
        assert!(orphaned(&state(false), &[], now - 1).is_empty(), "launched since the list was made");
    }
}
