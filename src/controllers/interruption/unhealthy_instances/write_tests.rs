use serde_json::json;
use stowage_model::instance_health::Category;
use stowage_model::labels;
use stowage_test_objects::{claim, launched, node};

use super::*;
use crate::test_support::failures::{World, transcript};
use crate::test_support::kubernetes::FakeApi;

fn world() -> World {
    let api = FakeApi::default();
    let finalizers = json!([labels::TERMINATION_FINALIZER]);
    for (name, id, node_name) in [("c", "i-1", "x"), ("other", "i-2", "y")] {
        let status = launched(id, &["Launched"]);
        api.put(&claim(name, &json!({"metadata": {"finalizers": finalizers}, "status": status})));
        api.put(&node(node_name, &json!({"spec": {"providerID": format!("aws:///z/{id}")}})));
    }
    World { watched: true, ..World::new(api) }
}

async fn checked(ctx: Arc<Context>, category: Category) -> String {
    let found = [Unhealthy { instance_id: "i-1".into(), categories: [category].into() }];
    handle(&ctx, &mut UnhealthyTracker::default(), &found).await;
    "done".into()
}

#[tokio::test]
async fn the_claim_of_a_failed_instance_is_forced_out_under_every_failure() {
    let text = transcript(world, async |ctx| checked(ctx, Category::SystemStatus).await).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      PATCH nodeclaims/c {"metadata":{"annotations":{"karpenter.sh/nodeclaim-termination-timestamp":"TIME"}}}
      DELETE nodeclaims/c {"preconditions":{"uid":"uid-c"}}
      event Warning InstanceUnhealthy on NodeClaim/c: system_status reported for instance i-1
      event Warning InstanceUnhealthy on Node/x: system_status reported for instance i-1
      event Warning TerminatingOnInterruption on NodeClaim/c: system_status reported for instance i-1
      changes nodeclaims/c (metadata.annotations metadata.deletionGracePeriodSeconds metadata.deletionTimestamp)
    again: done, no write, as undisturbed
    PATCH nodeclaims/c
    DELETE nodeclaims/c
    "#);
}

/// Where the annotation is written and the taint is not, the disruption loop taints the node.
#[tokio::test]
async fn the_node_of_a_scheduled_event_is_marked_and_closed_under_every_failure() {
    let text = transcript(world, async |ctx| checked(ctx, Category::EventStatus).await).await;
    insta::assert_snapshot!(text, @r#"
    undisturbed: done
      PATCH nodeclaims/c {"metadata":{"annotations":{"stowage.dev/disrupting":"event_status/TIME"},"resourceVersion":"1"}}
      PATCH nodes/x [{"op":"test","path":"/metadata/uid","value":"uid-x"},{"op":"test","path":"/metadata/resourceVersion","value":"2"},{"op":"add","path":"/spec/taints","value":[{"effect":"NoSchedule","key":"karpenter.sh/disrupted"}]},{"op":"add","path":"/metadata/labels","value":{}},{"op":"add","path":"/metadata/labels/node.kubernetes.io~1exclude-from-external-load-balancers","value":"karpenter"}]
      event Warning InstanceUnhealthy on NodeClaim/c: event_status reported for instance i-1
      event Warning InstanceUnhealthy on Node/x: event_status reported for instance i-1
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
