use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, ListParams, PatchParams, PostParams};
use serde_json::json;
use stowage_api::NodeClaim;
use stowage_test_objects::{claim, node};

use super::*;

fn labeled() -> kube::api::Patch<Value> {
    kube::api::Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}))
}

fn code(error: kube::Error) -> u16 {
    match error {
        kube::Error::Api(status) => status.code,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn objects_are_written_and_read_through_the_client() {
    let fake = FakeApi::default();
    let claims: Api<NodeClaim> = fake.all();
    let written = claims.create(&PostParams::default(), &claim("c", &json!({}))).await.unwrap();
    assert_eq!(written.metadata.uid.as_deref(), Some("uid-c"));
    claims.patch("c", &PatchParams::default(), &labeled()).await.unwrap();
    let list = claims.list(&ListParams::default()).await.unwrap();
    assert_eq!(list.items[0].metadata.labels.as_ref().unwrap()["a"], "b");
    let gone = claims.delete("c", &DeleteParams::default()).await.unwrap();
    assert!(gone.is_right(), "without a finalizer the object is deleted at once");
    assert_eq!(code(claims.get("c").await.unwrap_err()), 404);
    let lines = ["POST nodeclaims", "PATCH nodeclaims/c", "GET nodeclaims", "DELETE nodeclaims/c", "GET nodeclaims/c"];
    assert_eq!(fake.lines(), lines);
}

#[tokio::test]
async fn a_throttled_request_is_retried_after_the_retry_after_time() {
    let fake = FakeApi::default();
    fake.put(&node("x", &json!({})));
    fake.inject(Fault::Refused(Refusal::too_many_requests(7)), 2, |_| true);
    fake.all::<Node>().patch("x", &PatchParams::default(), &labeled()).await.unwrap();
    assert_eq!(fake.lines().len(), 3);
    assert_eq!((fake.waited() + std::time::Duration::from_millis(500)).as_secs(), 14);
    fake.inject(Fault::Refused(Refusal::too_many_requests(7)), 1, |_| true);
    let once: Api<Node> = Api::all(fake.client_without_retries());
    assert_eq!(code(once.get("x").await.unwrap_err()), 429);
}

#[tokio::test]
async fn a_lost_response_is_an_error_after_the_effect() {
    let fake = FakeApi::default();
    fake.put(&node("x", &json!({})));
    fake.inject_on("PATCH nodes/x", Fault::LostAnswer);
    let lost = fake.all::<Node>().patch("x", &PatchParams::default(), &labeled()).await;
    assert!(matches!(lost, Err(kube::Error::Service(_))), "{lost:?}");
    assert_eq!(fake.stored("nodes/x").unwrap()["metadata"]["labels"]["a"], "b");
}

#[tokio::test]
async fn a_crash_stops_the_caller_before_or_after_the_effect() {
    for (fault, label) in [(Fault::CrashBefore, json!(null)), (Fault::CrashAfter, json!("b"))] {
        let fake = FakeApi::default();
        fake.put(&node("x", &json!({})));
        fake.inject_on("PATCH nodes/x", fault);
        let api = fake.all::<Node>();
        let patch = labeled();
        let params = PatchParams::default();
        tokio::select! {
            biased;
            done = api.patch("x", &params, &patch) => panic!("{done:?}"),
            () = fake.stopped() => {}
        }
        assert_eq!(fake.stored("nodes/x").unwrap()["metadata"]["labels"]["a"], label);
    }
}

#[tokio::test]
async fn a_watch_reports_what_another_client_writes() {
    let fake = FakeApi::default();
    fake.put(&node("x", &json!({})));
    let ctx =
        fake.watching_context(Arc::new(crate::test_support::scripted_cloud::FakeCloud::default()), PlacementMode::Off);
    fake.inject(Fault::WrittenByAnother, 1, |_| true);
    let old = ctx.cluster.read().nodes["x"].metadata.resource_version.clone();
    let patch = json!({"metadata": {"resourceVersion": old, "labels": {"a": "b"}}});
    assert_eq!(code(ctx.patch_node("x", &patch).await.unwrap_err()), 409);
    let taints = ctx.cluster.read().nodes["x"].spec.as_ref().unwrap().taints.clone().unwrap();
    assert_eq!(taints[0].key, "other.example/taint");
}
