use serde_json::json;
use stowage_test_objects::{claim, instance, launched, node, node_class};

use super::*;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;

fn world() -> World {
    let api = FakeApi::default();
    let reserved = json!({(labels::CAPACITY_TYPE): "reserved", (labels::CAPACITY_RESERVATION_ID): "cr-1"});
    let mut registered = reserved.clone();
    registered[labels::REGISTERED] = json!("true");
    let finalizers = json!([labels::TERMINATION_FINALIZER]);
    let meta = json!({"labels": reserved, "finalizers": finalizers});
    api.put(&claim("c", &json!({"metadata": meta, "status": launched("i-1", &["Launched"])})));
    api.put(&node("x", &json!({"metadata": {"labels": registered}, "spec": {"providerID": "aws:///z/i-1"}})));
    let other = json!({(labels::CAPACITY_TYPE): "reserved", (labels::CAPACITY_RESERVATION_ID): "cr-2"});
    let meta = json!({"labels": other, "finalizers": finalizers});
    api.put(&claim("other", &json!({"metadata": meta, "status": launched("i-2", &["Launched"])})));
    let block = json!({"id": "cr-1", "availabilityZone": "z", "instanceMatchCriteria": "targeted", "ownerID": "1", "instanceType": "m5.large",
        "reservationType": "capacity-block", "state": "expiring", "endTime": "2026-01-01T12:30:00Z"});
    api.put(&node_class("default", &json!({"status": {"capacityReservations": [block]}})));
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
    PATCH nodes/x
    "#);
}

#[tokio::test]
async fn the_node_of_an_ending_capacity_block_is_marked_under_every_failure() {
    let text = transcript(world, async |ctx| {
        let found = expiring(&ctx.cluster.read());
        for (claim, new) in found {
            mark_expiring(&ctx, &claim, new).await;
        }
        "done".into()
    })
    .await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/disrupting":"capacity_block_expiring/TIME"},"resourceVersion":"1"}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/metadata/resourceVersion","value":"2"},{"op":"add","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"add","path":"/metadata/labels/node.kubernetes.io~1exclude-from-external-load-balancers","value":"karpenter"}]
      event Warning CapacityBlockExpiring on NodeClaim/c: the capacity block is about to end; its pods are moved
      changes nodeclaims/c (metadata.annotations), nodes/x (metadata.labels spec.taints)
    again: done, no write, as undisturbed
    PATCH nodeclaims/c
      404: done; again: done, no write, differs: nodes/x (metadata.labels spec.taints), -nodeclaims/c
      lost answer: done; again: done, no write, differs: nodes/x (metadata.labels spec.taints)
      crash after: stopped; again: done, no write, differs: nodes/x (metadata.labels spec.taints)
    PATCH nodes/x
      409: done, sent 8 times; again: done, no write, differs: nodes/x (metadata.labels spec.taints)
      422: done; again: done, no write, differs: nodes/x (metadata.labels spec.taints)
      504: done, sent 7 times; again: done, no write, differs: nodes/x (metadata.labels spec.taints)
      no answer: waits forever; again: done, no write, differs: nodes/x (metadata.labels spec.taints)
      crash before: stopped; again: done, no write, differs: nodes/x (metadata.labels spec.taints)
    "#);
}
