use stowage_api::conditions::EC2_NODE_CLASS_DEPENDENTS;
use stowage_model::events;
use stowage_test_objects as objects;

use super::*;

fn class(metadata: Value, status: Value) -> Ec2NodeClass {
    let mut meta = json!({"name": "default", "uid": "u", "generation": 2});
    for (key, value) in metadata.as_object().into_iter().flatten() {
        meta[key] = value.clone();
    }
    serde_json::from_value(json!({
        "apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": meta,
        "spec": {"role": "r", "amiSelectorTerms": [], "subnetSelectorTerms": [], "securityGroupSelectorTerms": []},
        "status": status,
    }))
    .unwrap()
}

fn claim(name: &str) -> Arc<NodeClaim> {
    Arc::new(objects::claim(name, &json!({})))
}

fn at(second: i64) -> UnixMillis {
    UnixMillis(second * 1_000)
}

fn resolution(verdict: Verdict, status: Option<Ec2NodeClassStatus>) -> Resolution {
    let mut verdicts: Vec<_> = EC2_NODE_CLASS_DEPENDENTS.iter().map(|kind| (*kind, Verdict::True)).collect();
    verdicts[0].1 = verdict;
    Resolution { status, verdicts, requeue_after: PACE.resync }
}

fn ready(status: &Ec2NodeClassStatus) -> &str {
    &conditions::get(&status.conditions, "Ready").unwrap().status
}

#[test]
fn unevaluated_conditions_back_off_exponentially() {
    let seconds = Duration::from_secs;
    for (requeue_after, failures, expected) in [
        (seconds(60), 0, seconds(60)),
        (seconds(10), 1, seconds(10)),
        (seconds(10), 2, seconds(20)),
        (seconds(10), 3, seconds(40)),
        (seconds(10), 4, seconds(60)),
        (seconds(10), 4_000_000, seconds(60)),
        (seconds(3_600), 3, seconds(3_600)),
    ] {
        assert_eq!(backed_off(requeue_after, failures), expected, "{requeue_after:?} {failures}");
    }
}

#[test]
fn verdicts_become_conditions_and_unevaluated_conditions_are_kept() {
    let fresh = class(json!({}), Value::Null);
    let good = status(&fresh, &resolution(Verdict::True, None), at(1));
    assert_eq!(ready(&good), "True");
    let mut known = fresh.clone();
    known.status = Some(good.clone());
    let failed = resolution(Verdict::False(events::AMI_NOT_FOUND, "none".into()), None);
    let bad = status(&known, &failed, at(2));
    assert_eq!(ready(&bad), "False");
    assert_eq!(newly_false(&good, &bad, &failed), [(events::AMI_NOT_FOUND, "AMIsReady: none".to_owned())]);
    assert!(newly_false(&bad, &bad, &failed).is_empty());
    let degraded = resolution(Verdict::Degraded(events::CAPACITY_RESERVATIONS_UNREADABLE, "refused".into()), None);
    assert_eq!(status(&fresh, &degraded, at(1)), good);
    let unjudged = resolution(Verdict::Unjudged("throttled".into()), None);
    assert_eq!(status(&known, &unjudged, at(3)), good);
    assert_eq!(ready(&status(&fresh, &unjudged, at(3))), "Unknown");
    known.metadata.generation = Some(3);
    assert_eq!(ready(&status(&known, &unjudged, at(3))), "Unknown", "known for the generation before");
}

#[test]
fn empty_lists_and_absent_fields_are_part_of_the_patch() {
    let text = status_patch(&Ec2NodeClassStatus::default());
    assert_eq!((&text["subnets"], &text["instanceProfile"]), (&json!([]), &Value::Null));
}

#[test]
fn a_class_gets_its_finalizer_and_its_hash_once() {
    let marks = |class: &Ec2NodeClass, ca: &str| metadata_patch(class, &DriftHash::of_class(class, ca));
    let patch = marks(&class(json!({"finalizers": ["other/one"]}), Value::Null), "ca").unwrap();
    let finalizers = &patch["metadata"]["finalizers"];
    assert_eq!(*finalizers, json!(["other/one", "karpenter.k8s.aws/termination"]));
    let annotations = &patch["metadata"]["annotations"];
    assert_eq!(annotations[labels::EC2_NODE_CLASS_HASH_VERSION], "v6");
    let metadata = json!({"finalizers": finalizers, "annotations": annotations});
    assert!(marks(&class(metadata.clone(), Value::Null), "ca").is_none());
    assert!(marks(&class(metadata, Value::Null), "another").is_some(), "the CA is part of the hash");
}

#[test]
fn c35_the_event_names_five_claims_at_most() {
    let claims: Vec<_> = (1..=7).map(|n| claim(&format!("c{n}"))).collect();
    assert!(waiting_note(&claims).ends_with("7 NodeClaims to be deleted: c1, c2, c3, c4, c5 and 2 more"));
    assert!(waiting_note(&claims[..1]).ends_with(": c1"));
}

#[test]
fn the_fingerprint_changes_only_with_what_users_write() {
    let base = class(json!({}), Value::Null);
    let stamped = class(json!({"annotations": {(labels::EC2_NODE_CLASS_HASH): "1"}}), json!({"conditions": []}));
    assert_eq!(fingerprint(&base), fingerprint(&stamped));
    assert_ne!(fingerprint(&base), fingerprint(&class(json!({"annotations": {"a": "b"}}), Value::Null)));
    assert_ne!(fingerprint(&base), fingerprint(&class(json!({"generation": 3}), Value::Null)));
}
