use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::json;

use super::*;
use crate::api::Ec2NodeClass;
use crate::cloud::{Capabilities, LaunchError, LaunchRequest, Launched, Message, Override};
use crate::model::offering::Catalog;
use crate::test_support::objects;
use crate::test_support::objects::instance;

fn claim(name: &str, id: &str) -> NodeClaim {
    objects::claim(name, &json!({"status": objects::launched(id, &["Launched"])}))
}

/// The claim `c` with the instance i-1, and its node.
fn state(ready: bool) -> ClusterState {
    let mut state = ClusterState::default();
    state.apply_claim(claim("c", "i-1"));
    let status = json!({"conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]});
    let node = json!({"spec": {"providerID": "aws:///z/i-1"}, "status": status});
    state.apply_node(objects::node("n", &node));
    state
}

#[test]
fn c39_an_instance_without_a_claim_is_leaked_after_thirty_seconds() {
    let stopping = |state| Instance { state, ..instance("i-5", "other", 0) };
    let all = [
        instance("i-1", "uid-c", 0),
        instance("i-2", "other", 0),
        instance("i-3", "other", 30_000),
        instance("i-4", "other", 29_999),
        stopping(InstanceState::ShuttingDown),
        stopping(InstanceState::Terminated),
    ];
    assert_eq!(leaked(&state(true), &all, UnixMillis(60_000)), ["aws:///z/i-2", "aws:///z/i-4"]);
}

#[test]
fn an_instance_is_known_by_the_provider_id_of_its_claim() {
    let adopted = instance("i-1", "", 0);
    assert!(leaked(&state(true), &[adopted], UnixMillis(60_000)).is_empty());
    let twin = instance("i-2", "uid-c", 0);
    assert_eq!(
        leaked(&state(true), std::slice::from_ref(&twin), UnixMillis(60_000)),
        ["aws:///z/i-2"],
        "launched twice"
    );
    let mut unwritten = state(true);
    let mut claim = unwritten.claims["c"].as_ref().clone();
    claim.status = None;
    unwritten.apply_claim(claim);
    assert!(leaked(&unwritten, &[twin], UnixMillis(60_000)).is_empty(), "the provider id is not written yet");
}

#[test]
fn a_claim_without_its_instance_is_orphaned_unless_its_node_is_ready() {
    let launched = UnixMillis::parse_rfc3339("2026-01-01T00:00:00Z").unwrap();
    let now = launched + MIN_LAUNCH_AGE;
    let running = instance("i-1", "uid-c", 0);
    assert!(orphaned(&state(false), std::slice::from_ref(&running), now).is_empty());
    assert_eq!(orphaned(&state(false), &[], now).len(), 1);
    assert!(orphaned(&state(true), &[], now).is_empty());
    assert!(
        orphaned(&state(false), &[], now - Duration::from_millis(1)).is_empty(),
        "launched after the list was made"
    );
    let stopping = Instance { state: InstanceState::ShuttingDown, ..running };
    assert_eq!(orphaned(&state(false), &[stopping], now).len(), 1);
}

#[test]
fn c39_a_deleted_node_without_claim_and_instance_is_released() {
    let node = |labels: serde_json::Value, finalizer: &str, deleting: bool| {
        let deletion = deleting.then_some("2026-01-01T00:00:00Z");
        let metadata = json!({"name": "n", "labels": labels, "finalizers": [finalizer], "deletionTimestamp": deletion});
        let mut state = ClusterState::default();
        let node = json!({"metadata": metadata, "spec": {"providerID": "aws:///z/i-1"}});
        state.apply_node(serde_json::from_value(node).unwrap());
        state
    };
    let (ours, finalizer) = (json!({(labels::NODE_POOL): "p"}), labels::TERMINATION_FINALIZER);
    let count = |state: &ClusterState, instances: &[Instance]| stranded(state, instances).len();
    assert_eq!(count(&node(ours.clone(), finalizer, true), &[]), 1);
    assert_eq!(count(&node(ours.clone(), finalizer, true), &[instance("i-1", "", 0)]), 0, "its instance still exists");
    assert_eq!(count(&node(ours.clone(), finalizer, false), &[]), 0, "it is not deleted");
    assert_eq!(count(&node(ours.clone(), "other/finalizer", true), &[]), 0, "it does not have our finalizer");
    assert_eq!(count(&node(json!({}), finalizer, true), &[]), 0, "not our node");
    let mut claimed = node(ours, finalizer, true);
    claimed.apply_claim(claim("c", "i-1"));
    assert_eq!(count(&claimed, &[]), 0, "its claim exists");
}

/// A cloud with an instance whose claim is created during the query.
struct LateClaim(Arc<Cluster>);

impl Cloud for LateClaim {
    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>> {
        self.0.update(|state| state.apply_claim(claim("late", "i-2")));
        async { Ok(vec![instance("i-2", "unknown", 0), instance("i-3", "unknown", 0)]) }.boxed()
    }

    fn catalog(&self, _: &Ec2NodeClass) -> Arc<Catalog> {
        Arc::default()
    }

    fn mark_unavailable(&self, _: &Override) {}

    fn launch(&self, _: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>> {
        async { Err(LaunchError::Throttled) }.boxed()
    }

    fn describe<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>> {
        async { Ok(None) }.boxed()
    }

    fn terminate<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<bool, CloudError>> {
        async { Ok(false) }.boxed()
    }

    fn receive_messages(&self) -> BoxFuture<'_, Result<Vec<Message>, CloudError>> {
        async { Ok(vec![]) }.boxed()
    }

    fn launched_for<'a>(&'a self, _: &'a NodeClaim) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        async { Ok(vec![]) }.boxed()
    }

    fn delete_messages<'a>(&'a self, _: &'a [String]) -> BoxFuture<'a, Result<(), CloudError>> {
        async { Ok(()) }.boxed()
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::default()
    }
}

#[tokio::test]
async fn c39_the_cloud_is_listed_before_the_cluster() {
    let cluster = Arc::new(Cluster::default());
    let garbage = Garbage::find(&LateClaim(Arc::clone(&cluster)), &cluster).await.unwrap();
    assert_eq!(garbage.leaked, ["aws:///z/i-3"]);
}

#[test]
fn an_instance_of_a_launch_group_is_kept_until_every_claim_has_one() {
    let mut state = state(true);
    let mut waiting = claim("d", "i-3");
    waiting.metadata.annotations = Some([(labels::LAUNCH_GROUP.to_owned(), "group/2".to_owned())].into());
    let launched = waiting.clone();
    waiting.status = None;
    state.apply_claim(waiting);
    let all = [instance("i-1", "group", 0), instance("i-2", "group", 0)];
    assert!(leaked(&state, &all, UnixMillis(60_000)).is_empty(), "it may belong to the waiting claim");
    state.apply_claim(launched);
    assert_eq!(leaked(&state, &all, UnixMillis(60_000)), ["aws:///z/i-2"]);
}
