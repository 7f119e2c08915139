use serde_json::json;
use stowage_test_objects as objects;
use stowage_test_objects::instance;

use super::*;

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
    let now = launched + MIN_UNREGISTERED_AGE;
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

#[test]
fn the_instance_profiles_of_classes_and_claims_are_in_use() {
    let mut state = ClusterState::default();
    let class = objects::node_class("default", &json!({"status": {"instanceProfile": "of-class"}}));
    state.classes.insert("default".into(), Arc::new(class));
    state.classes.insert("new".into(), Arc::new(objects::node_class("new", &json!({}))));
    let annotations = json!({(labels::INSTANCE_PROFILE_NAME): "of-claim"});
    state.apply_claim(objects::claim("c", &json!({"metadata": {"annotations": annotations}})));
    assert_eq!(profiles_in_use(&state), BTreeSet::from(["of-claim".to_owned(), "of-class".to_owned()]));
}

#[test]
fn instances_of_other_providers_are_not_garbage() {
    let mut state = ClusterState::default();
    let reference = json!({"group": "eks.amazonaws.com", "kind": "NodeClass", "name": "default"});
    let status = objects::launched("i-1", &["Launched"]);
    state.apply_claim(objects::claim("auto", &json!({"spec": {"nodeClassRef": reference}, "status": status})));
    assert!(leaked(&state, &[instance("i-1", "", 0)], UnixMillis(60_000)).is_empty());
}

#[test]
fn a_fresh_list_of_claims_has_the_last_word() {
    let all: Vec<Instance> = (0..80).map(|n| instance(&format!("i-{n}"), &format!("uid-{n}"), 0)).collect();
    let leaked = || all.iter().map(|instance| instance.provider_id.clone()).collect::<Vec<_>>();
    let live = vec![claim("named", "i-0"), objects::claim("1", &json!({"metadata": {"uid": "uid-1"}}))];
    let ids = confirmed(leaked(), &all, &live);
    assert_eq!(ids, (2..80).map(|n| format!("aws:///z/i-{n}")).collect::<Vec<_>>());
    assert_eq!((max_terminations(&all), max_terminations(&all[..6])), (8, 5), "a tenth, at least five");
}

#[test]
fn c39_a_lagging_list_costs_no_instance() {
    let at = UnixMillis::parse_rfc3339("2026-01-01T00:00:00Z").unwrap();
    let mut state = state(false);
    let after = |state: &ClusterState, seconds| orphaned(state, &[], at + Duration::from_secs(seconds)).len();
    assert_eq!((after(&state, 299), after(&state, 300)), (0, 1), "its node has not registered");
    state.apply_claim(objects::claim("c", &json!({"status": objects::launched("i-1", &["Launched", "Registered"])})));
    assert_eq!((after(&state, 99), after(&state, 100)), (0, 1), "its node is not ready");
    state.delete_node("n");
    assert_eq!((after(&state, 9), after(&state, 10)), (0, 1), "its node is gone, too");
}

/// Karpenter's spec "should succeed to garbage collect an Instance that was launched by a NodeClaim but has no Instance mapping".
#[test]
fn a_claim_that_is_registered_without_an_instance_is_orphaned_within_seconds() {
    let at = UnixMillis::parse_rfc3339("2026-01-01T00:00:00Z").unwrap();
    for (id, conditions, orphans) in [
        (json!(null), &["Launched", "Registered", "Initialized"][..], (0, 1)),
        (json!(""), &["Launched", "Registered"], (0, 1)),
        (json!(null), &["Launched"], (0, 0)),
        (json!("Provider:///AZ/i-01234567890123456"), &["Launched", "Registered", "Initialized"], (0, 1)),
    ] {
        let status = json!({"providerID": id, "conditions": objects::conditions_true(conditions)});
        let mut state = ClusterState::default();
        state.apply_claim(objects::claim("c", &json!({"status": status})));
        let after = |seconds| orphaned(&state, &[], at + Duration::from_secs(seconds)).len();
        assert_eq!((after(9), after(10)), orphans, "{id} {conditions:?}");
    }
}
