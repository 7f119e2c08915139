use serde_json::json;
use stowage_model::labels;
use stowage_test_objects::{claim, node_class, node_pool};

use super::*;
use crate::test_support::failures::{World, outcome, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::small_cluster::{NOW, SmallCluster};

/// The pools `p`, with this metadata, and `other`, their class, and the claim `c` of `p`.
fn world(metadata: &Value) -> World {
    let api = FakeApi::default();
    api.put(&node_class("default", &json!({})));
    api.put(&node_pool("p", &json!({"metadata": metadata})));
    api.put(&node_pool("other", &json!({})));
    let old = json!({(labels::NODE_POOL_HASH): "1", (labels::NODE_POOL_HASH_VERSION): "v1"});
    api.put(&claim("c", &json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}, "annotations": old}})));
    World::new(api)
}

#[test]
fn a_pool_that_limits_its_price_shows_what_its_registered_nodes_cost() {
    for (limits, expected) in [(json!({(labels::USD_PER_HOUR): "1"}), json!("0.5")), (json!({"cpu": "9"}), Value::Null)]
    {
        let mut cluster = SmallCluster::new(&[("p", json!({"spec": {"limits": limits}}))]);
        cluster.add_node("n1", "p", "small/on-demand");
        cluster.add_node("n2", "p", "large/on-demand");
        let launching = json!({"metadata": {"labels": {(labels::NODE_POOL): "p"}}, "spec": {"requirements": []}});
        cluster.state.apply_claim(claim("launching", &launching));
        let (types, health) = (InstanceTypes::new(&cluster.pools), RegistrationHealth::default());
        let desired = desired_status(&cluster.state, &types, &cluster.state.pools["p"], &health, NOW);
        assert_eq!(desired.status["resources"][labels::USD_PER_HOUR], expected);
    }
}

/// What the loop does for the pool `p`.
async fn reconciled(ctx: Arc<Context>) -> String {
    let types = InstanceTypes::new(&ctx.ready_pools());
    let (pool, desired) = {
        let state = ctx.cluster.read();
        let Some(pool) = state.pools.get("p").cloned() else { return "no pool".into() };
        let desired = desired_status(&state, &types, &pool, &lock(&ctx.registration_health), clock::now());
        (pool, desired)
    };
    outcome(reconcile(&ctx, &pool, &desired).await)
}

#[tokio::test]
async fn a_pool_gets_hash_and_status_after_its_claims_under_every_failure() {
    let text = transcript(|| world(&json!({})), reconciled).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: ok
      PATCH nodeclaims/c {"metadata":{"annotations":{"karpenter.sh/nodepool-hash":"6821555240594823858","karpenter.sh/nodepool-hash-version":"v3"}}}
      PATCH nodepools/p {"metadata":{"annotations":{"karpenter.sh/nodepool-hash":"6821555240594823858","karpenter.sh/nodepool-hash-version":"v3"}}}
      PATCH nodepools/p/status {"status":{"conditions":[{"lastTransitionTime":"TIME","message":"","reason":"ValidationSucceeded","status":"True","type":"ValidationSucceeded"},{"lastTransitionTime":"TIME","message":"EC2NodeClass default has not been checked yet","reason":"NodeClassReadinessUnknown","status":"False","type":"NodeClassReady"},{"lastTransitionTime":"TIME","message":"object is awaiting reconciliation","reason":"AwaitingReconciliation","status":"Unknown","type":"NodeRegistrationHealthy"},{"lastTransitionTime":"TIME","message":"NodeClassReady=False","reason":"UnhealthyDependents","status":"False","type":"Ready"}],"nodes":0,"resources":{"cpu":"0","ephemeral-storage":"0","memory":"0","nodes":"0","pods":"0"}}}
      event Warning NodeClassReadinessUnknown on NodePool/p: NodeClassReady: EC2NodeClass default has not been checked yet
      changes nodeclaims/c (metadata.annotations), nodepools/p (metadata.annotations status)
    again: ok, no write, as undisturbed
    PATCH nodeclaims/c
    PATCH nodepools/p
    PATCH nodepools/p/status
    "#);
}
