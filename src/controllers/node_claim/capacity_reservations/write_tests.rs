use serde_json::json;

use super::*;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;
use crate::test_support::objects::{claim, instance, launched, node};

fn world() -> World {
    let api = FakeApi::default();
    let reserved = json!({(labels::CAPACITY_TYPE): "reserved", (labels::CAPACITY_RESERVATION_ID): "cr-1"});
    let mut registered = reserved.clone();
    registered[labels::REGISTERED] = json!("true");
    let finalizers = json!([labels::TERMINATION_FINALIZER]);
    let meta = json!({"labels": reserved, "finalizers": finalizers});
    api.put(&claim("c", &json!({"metadata": meta, "status": launched("i-1", &["Launched"])})));
    api.put(&node("x", &json!({"metadata": {"labels": registered}, "spec": {"providerID": "aws:///z/i-1"}})));
    api.put(&claim("other", &json!({"metadata": meta, "status": launched("i-2", &["Launched"])})));
    World::new(api)
}

#[tokio::test]
async fn a_node_whose_reservation_has_ended_is_relabeled_under_every_failure() {
    let text = transcript(world, async |ctx| {
        let found = demoted(&ctx.cluster.read(), &[instance("i-1", "", 0)], clock::now());
        relabel(&ctx, found).await;
        "done".into()
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      PATCH nodeclaims/c {"metadata":{"labels":{"karpenter.k8s.aws/capacity-reservation-id":null,"karpenter.k8s.aws/capacity-reservation-interruptible":null,"karpenter.k8s.aws/capacity-reservation-type":null,"karpenter.sh/capacity-type":"on-demand"}}}
      PATCH nodes/x {"metadata":{"labels":{"karpenter.k8s.aws/capacity-reservation-id":null,"karpenter.k8s.aws/capacity-reservation-interruptible":null,"karpenter.k8s.aws/capacity-reservation-type":null,"karpenter.sh/capacity-type":"on-demand"}}}
      changes nodeclaims/c (metadata.labels), nodes/x (metadata.labels)
    again: done, no write, as undisturbed
    PATCH nodeclaims/c
      written by another | lost answer: done; again: done, no write, as undisturbed
      409 | 422: done; again: done, 1 write, as undisturbed
      404: done; again: done, no write, differs: -nodeclaims/c
      429, Retry-After 2 s, once: done, sent 2 times in 2 s; again: done, no write, as undisturbed
      504: done, sent 7 times; again: done, 1 write, as undisturbed
      no answer: waits forever; again: done, 2 writes, as undisturbed
      crash before: stopped; again: done, 2 writes, as undisturbed
      crash after: stopped; again: done, 1 write, as undisturbed
    PATCH nodes/x
      written by another | lost answer: done; again: done, no write, as undisturbed
      409 | 422: done; again: done, 1 write, as undisturbed
      404: done; again: done, no write, differs: -nodes/x
      429, Retry-After 2 s, once: done, sent 2 times in 2 s; again: done, no write, as undisturbed
      504: done, sent 7 times; again: done, 1 write, as undisturbed
      no answer: waits forever; again: done, 1 write, as undisturbed
      crash before: stopped; again: done, 1 write, as undisturbed
      crash after: stopped; again: done, no write, as undisturbed
    "#);
}

#[tokio::test]
async fn a_claim_of_an_ending_capacity_block_is_deleted_under_every_failure() {
    let text = transcript(world, async |ctx| {
        let Some(claim) = ctx.cluster.read().claims.get("c").cloned() else { return "no claim".into() };
        delete_expiring(&ctx, &claim).await;
        "done".into()
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      DELETE nodeclaims/c {"preconditions":{"uid":"uid-c"}}
      event Warning CapacityBlockExpiring on NodeClaim/c: the capacity block is about to end; its pods are moved
      changes nodeclaims/c (metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: done, 1 write, as undisturbed
    DELETE nodeclaims/c
      written by another | 409 | 422 | lost answer: done; again: done, 1 write, as undisturbed
      404: done; again: no claim, no write, differs: -nodeclaims/c
      429, Retry-After 2 s, once: done, sent 2 times in 2 s; again: done, 1 write, as undisturbed
      504: done, sent 7 times; again: done, 1 write, as undisturbed
      no answer: waits forever; again: done, 1 write, as undisturbed
      crash before | crash after: stopped; again: done, 1 write, as undisturbed
    "#);
}
