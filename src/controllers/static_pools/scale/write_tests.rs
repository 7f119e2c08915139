use std::collections::BTreeMap;

use serde_json::{Value, json};
use stowage_model::labels;
use stowage_model::pause::Pause;
use stowage_test_objects::{catalog, claim, conditions_true, launched, node_class, node_pool};

use super::*;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::scripted_cloud::FakeCloud;

/// The static NodePool `p` with this spec, and NodeClaims of it.
fn world(spec: &Value, claims: &[&str]) -> World {
    let api = FakeApi::default();
    let ready = json!({"conditions": conditions_true(&["Ready"])});
    api.put(&node_class("default", &json!({"status": ready})));
    api.put(&node_pool("p", &json!({"spec": spec, "status": ready})));
    let meta = json!({"labels": {(labels::NODE_POOL): "p"}, "finalizers": [labels::TERMINATION_FINALIZER]});
    for name in claims {
        let status = launched(name, &["Launched", "Registered", "Initialized"]);
        api.put(&claim(name, &json!({"metadata": meta, "status": status})));
    }
    World::new(api).with_cloud(FakeCloud { catalog: Arc::new(catalog()), ..FakeCloud::default() })
}

async fn scale(ctx: Arc<Context>) -> String {
    pass(&ctx, &mut LaunchBackoff::default()).await;
    "done".into()
}

/// The number of NodeClaims that are not deleted.
fn staying(ctx: &Context) -> usize {
    ctx.cluster.read().claims.values().filter(|claim| !claim.is_deleting()).count()
}

#[tokio::test]
async fn a_static_pool_grows_under_every_failure() {
    let taints = json!([{"key": "team", "effect": "NoSchedule"}]);
    let requirements = json!([{"key": labels::ARCH, "operator": "In", "values": ["amd64"], "minValues": 1}]);
    let template = json!({"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {"taints": taints, "requirements": requirements, "terminationGracePeriod": "1h"}});
    let spec = json!({"replicas": 3, "template": template});
    let text = transcript(|| World { watched: true, ..world(&spec, &["c"]) }, scale).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      POST nodeclaims {"apiVersion":"karpenter.sh/v1","kind":"NodeClaim","metadata":{"annotations":{"karpenter.sh/nodepool-hash":"10648129935291253223","karpenter.sh/nodepool-hash-version":"v3","note":"b","stowage.dev/launch-group":"GROUP/2"},"finalizers":["karpenter.sh/termination"],"generateName":"p-","labels":{"karpenter.k8s.aws/ec2nodeclass":"default","karpenter.sh/nodepool":"p","team":"a"},"name":"p-1","ownerReferences":[{"apiVersion":"karpenter.sh/v1","blockOwnerDeletion":true,"kind":"NodePool","name":"p","uid":"uid-p"}]},"spec":{"expireAfter":"720h","nodeClassRef":{"group":"karpenter.k8s.aws","kind":"EC2NodeClass","name":"default"},"requirements":[{"key":"kubernetes.io/arch","minValues":1,"operator":"In","values":["amd64"]}],"taints":[{"effect":"NoSchedule","key":"team"}],"terminationGracePeriod":"1h"}}
      POST nodeclaims {"apiVersion":"karpenter.sh/v1","kind":"NodeClaim","metadata":{"annotations":{"karpenter.sh/nodepool-hash":"10648129935291253223","karpenter.sh/nodepool-hash-version":"v3","note":"b","stowage.dev/launch-group":"GROUP/2"},"finalizers":["karpenter.sh/termination"],"generateName":"p-","labels":{"karpenter.k8s.aws/ec2nodeclass":"default","karpenter.sh/nodepool":"p","team":"a"},"name":"p-2","ownerReferences":[{"apiVersion":"karpenter.sh/v1","blockOwnerDeletion":true,"kind":"NodePool","name":"p","uid":"uid-p"}]},"spec":{"expireAfter":"720h","nodeClassRef":{"group":"karpenter.k8s.aws","kind":"EC2NodeClass","name":"default"},"requirements":[{"key":"kubernetes.io/arch","minValues":1,"operator":"In","values":["amd64"]}],"taints":[{"effect":"NoSchedule","key":"team"}],"terminationGracePeriod":"1h"}}
      changes +nodeclaims/p-1, +nodeclaims/p-2
    again: done, no write, as undisturbed
    POST nodeclaims
    "#);
}

#[tokio::test]
async fn a_static_pool_shrinks_under_every_failure() {
    let text = transcript(|| World { watched: true, ..world(&json!({"replicas": 1}), &["c", "d"]) }, scale).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      DELETE nodeclaims/c {"preconditions":{"uid":"uid-c"}}
      event Normal ScaledDown on NodeClaim/c: its static NodePool has more nodes than spec.replicas
      changes nodeclaims/c (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: done, no write, as undisturbed
    DELETE nodeclaims/c
    "#);
}

#[tokio::test]
async fn the_emergency_stop_and_the_caps_hold_for_static_pools() {
    let all = Pause::ALL;
    for (case, pause, replicas, expected) in [
        ("grows", Pause::default(), 5, 5),
        ("provisioning is paused", Pause { provisioning: true, ..Pause::default() }, 5, 2),
        ("disruption is paused", Pause { disruption: true, ..Pause::default() }, 5, 5),
        ("shrinks", Pause::default(), 0, 0),
        ("provisioning is paused", Pause { provisioning: true, ..Pause::default() }, 0, 0),
        ("disruption is paused", Pause { disruption: true, ..Pause::default() }, 0, 2),
        ("disruption is only reported", Pause { disruption: true, report: true, ..Pause::default() }, 0, 2),
        ("all is paused", all, 5, 2),
    ] {
        let world = world(&json!({ "replicas": replicas }), &["c", "d"]);
        let ctx = World { watched: true, ..world }.context();
        ctx.cluster.update(|state| state.pause = Some(pause));
        scale(Arc::clone(&ctx)).await;
        assert_eq!(staying(&ctx), expected, "{case}: {replicas} replicas");
    }
}

#[tokio::test]
async fn without_the_feature_gate_a_static_pool_is_left_alone_and_reported() {
    for replicas in [5, 0] {
        let world = world(&json!({ "replicas": replicas }), &["c", "d"]);
        let mut ctx = world.context();
        Arc::get_mut(&mut ctx).unwrap().settings.static_capacity = false;
        scale(Arc::clone(&ctx)).await;
        assert_eq!(staying(&ctx), 2);
        let events = world.api.events();
        assert!(events.len() == 1 && events[0].contains("StaticCapacityDisabled on NodePool/p"), "{events:?}");
    }
}

#[tokio::test]
async fn a_pool_without_an_available_offering_waits_and_says_so() {
    let requirements = json!([{"key": labels::INSTANCE_TYPE, "operator": "In", "values": ["p99.metal"]}]);
    let world = world(&json!({"replicas": 2, "template": {"spec": {"requirements": requirements}}}), &[]);
    let (ctx, mut backoff) = (world.context(), LaunchBackoff::default());
    pass(&ctx, &mut backoff).await;
    pass(&ctx, &mut backoff).await;
    assert_eq!(staying(&ctx), 0);
    assert!(backoff.until("p") > clock::now());
    let events = world.api.events();
    let [event] = &events[..] else { panic!("{events:?}") };
    assert!(event.contains("NoOfferingAvailable on NodePool/p: 2 nodes are missing"), "{event}");
}

/// Without capacity, each NodeClaim is deleted when its launch fails.
#[tokio::test]
async fn claims_that_end_before_their_nodes_are_up_are_not_created_again_at_once() {
    let world = World { watched: true, ..world(&json!({"replicas": 2}), &[]) };
    let (ctx, mut backoff) = (world.context(), LaunchBackoff::default());
    pass(&ctx, &mut backoff).await;
    assert_eq!(staying(&ctx), 2);
    let claims: Vec<String> = ctx.cluster.read().claims.keys().cloned().collect();
    ctx.cluster.update(|state| claims.iter().for_each(|name| state.delete_claim(name)));
    pass(&ctx, &mut backoff).await;
    assert_eq!(staying(&ctx), 0, "its launches failed a moment ago");
    assert!(backoff.until("p") > clock::now());
}

#[tokio::test]
async fn a_limit_below_the_replicas_is_reported() {
    let world = world(&json!({"replicas": 5, "limits": {"nodes": "3"}}), &["c", "d"]);
    let ctx = world.context();
    scale(Arc::clone(&ctx)).await;
    assert_eq!(staying(&ctx), 3);
    let note = "NodeLimitReached on NodePool/p: spec.limits.nodes leaves no room for 2 of 5 spec.replicas";
    assert!(world.api.events().iter().any(|event| event.contains(note)), "{:?}", world.api.events());
}

/// A user scales to zero: a mistake must not remove more than the cap allows.
#[tokio::test]
async fn a_shrinking_pool_obeys_the_cap_per_minute() {
    let names: Vec<String> = (0..300).map(|n| format!("c{n:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let ctx = world(&json!({"replicas": 0}), &names).context();
    let most = ctx.most_per_minute(Capped::Disruption);
    assert!(most < 300, "{most}");
    for _ in 0..3 {
        scale(Arc::clone(&ctx)).await;
        assert_eq!(staying(&ctx), 300 - most);
    }
    let by_pool = ctx.cluster.read().claims.values().fold(BTreeMap::<bool, usize>::new(), |mut counts, claim| {
        *counts.entry(claim.is_deleting()).or_default() += 1;
        counts
    });
    assert_eq!(by_pool[&true], most);
}
