use serde_json::{Value, json};
use stowage_api::hash;
use stowage_cloud::catalog::{SpotPricing, embedded};
use stowage_model::events::DeclaredEvent;
use stowage_test_objects as objects;

use super::*;

const CREATED: &str = "2026-01-01T00:00:00Z";

fn pool(template: &Value, requirements: &Value) -> NodePool {
    let mut whole = json!({"spec": {"requirements": requirements}});
    json_patch::merge(&mut whole, template);
    let mut pool = objects::node_pool("p", &json!({"spec": {"template": whole}}));
    let annotations = pool.metadata.annotations.get_or_insert_default();
    annotations.insert(labels::NODE_POOL_HASH.into(), hash::node_pool(&pool.spec));
    annotations.insert(labels::NODE_POOL_HASH_VERSION.into(), hash::NODE_POOL_VERSION.into());
    pool
}

fn class() -> Ec2NodeClass {
    objects::node_class("default", &json!({}))
}

fn desired(pool: NodePool) -> DesiredState {
    let catalog = embedded().for_node_class(Some(&class()), SpotPricing::Off);
    DesiredState::new(Arc::new(pool), Arc::new(class()), &catalog).unwrap()
}

/// A claim of the pool, launched as m5.large in us-east-1a.
fn launched(pool: &NodePool, own: &Value, requirements: &Value) -> NodeClaim {
    let mut all = json!({(labels::NODE_POOL): "p", (labels::INSTANCE_TYPE): "m5.large", (labels::ZONE): "us-east-1a",
        (labels::CAPACITY_TYPE): "on-demand", (labels::ARCH): "amd64", (labels::INSTANCE_CPU): "2"});
    json_patch::merge(&mut all, own);
    let meta = json!({"labels": all, "annotations": pool.metadata.annotations, "creationTimestamp": CREATED});
    let status = json!({"conditions": objects::conditions_true(&["Launched"])});
    objects::claim("c", &json!({"metadata": meta, "spec": {"requirements": requirements}, "status": status}))
}

fn at(age: Duration) -> UnixMillis {
    UnixMillis::parse_rfc3339(CREATED).unwrap() + age
}

fn event_of(claim: &NodeClaim, desired: &DesiredState) -> Option<&'static DeclaredEvent> {
    pool_drift(claim, desired, at(Duration::ZERO)).map(|drift| drift.event)
}

#[test]
fn c31_a_hashed_change_of_the_template_drifts() {
    let before = pool(&json!({}), &json!([]));
    let claim = launched(&before, &json!({}), &json!([]));
    for (template, expected) in [
        (json!({}), None),
        (json!({"metadata": {"labels": {"a": "b"}}}), Some(events::NODE_POOL_DRIFTED)),
        (json!({"metadata": {"annotations": {"a": "b"}}}), Some(events::NODE_POOL_DRIFTED)),
        (json!({"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}}), Some(events::NODE_POOL_DRIFTED)),
        (json!({"spec": {"startupTaints": [{"key": "k", "effect": "NoSchedule"}]}}), Some(events::NODE_POOL_DRIFTED)),
        (json!({"spec": {"terminationGracePeriod": "1h"}}), Some(events::NODE_POOL_DRIFTED)),
        (json!({"spec": {"expireAfter": "Never"}}), Some(events::NODE_POOL_DRIFTED)),
        (json!({"spec": {"expireAfter": "43200m"}}), None),
        (json!({"spec": {"nodeClassRef": {"name": "other"}}}), Some(events::NODE_POOL_DRIFTED)),
        (json!({"spec": {"requirements": [{"key": labels::ARCH, "operator": "In", "values": ["amd64"]}]}}), None),
    ] {
        assert_eq!(event_of(&claim, &desired(pool(&template, &json!([])))), expected, "{template}");
    }
    let mut other = before.clone();
    other.spec.weight = Some(7);
    other.spec.disruption.consolidate_after = "5m".into();
    assert_eq!(event_of(&claim, &desired(other)), None, "weight and disruption are the pool's own matter");
}

#[test]
fn c31_absent_hashes_and_hashes_of_other_versions_do_not_drift() {
    let (before, after) =
        (pool(&json!({}), &json!([])), pool(&json!({"metadata": {"labels": {"a": "b"}}}), &json!([])));
    let after = desired(after);
    let claim = launched(&before, &json!({}), &json!([]));
    assert_eq!(event_of(&claim, &after), Some(events::NODE_POOL_DRIFTED));
    for key in [labels::NODE_POOL_HASH, labels::NODE_POOL_HASH_VERSION] {
        let mut without = claim.clone();
        without.annotations_mut().remove(key);
        assert_eq!(event_of(&without, &after), None, "{key}");
    }
    let mut old = claim;
    old.annotations_mut().insert(labels::NODE_POOL_HASH_VERSION.into(), "v2".into());
    assert_eq!(event_of(&old, &after), None);
}

#[test]
fn b56_a_requirement_that_no_longer_admits_the_node_drifts_it() {
    let requirement =
        |key: &str, operator: &str, values: &[&str]| json!([{"key": key, "operator": operator, "values": values}]);
    let open = requirement("team", "In", &["a", "b"]);
    for (case, wants, own, asked, expected) in [
        ("admitted", requirement(labels::ARCH, "In", &["amd64"]), json!({}), json!([]), None),
        (
            "another value",
            requirement(labels::ARCH, "In", &["arm64"]),
            json!({}),
            json!([]),
            Some(events::REQUIREMENTS_DRIFTED),
        ),
        ("within bounds", requirement(labels::INSTANCE_CPU, "Gt", &["1"]), json!({}), json!([]), None),
        (
            "too small",
            requirement(labels::INSTANCE_CPU, "Gt", &["2"]),
            json!({}),
            json!([]),
            Some(events::REQUIREMENTS_DRIFTED),
        ),
        (
            "an old name",
            requirement("beta.kubernetes.io/arch", "In", &["arm64"]),
            json!({}),
            json!([]),
            Some(events::REQUIREMENTS_DRIFTED),
        ),
        (
            "a key it lacks",
            requirement("team", "Exists", &[]),
            json!({}),
            json!([]),
            Some(events::REQUIREMENTS_DRIFTED),
        ),
        ("a key it must lack", requirement("team", "DoesNotExist", &[]), json!({}), json!([]), None),
        ("a value it must not have", requirement("team", "NotIn", &["a"]), json!({}), json!([]), None),
        (
            "a value it has and must not",
            requirement("team", "NotIn", &["a"]),
            json!({"team": "a"}),
            json!([]),
            Some(events::REQUIREMENTS_DRIFTED),
        ),
        ("left open by the claim", open.clone(), json!({}), open.clone(), None),
        ("left open otherwise", requirement("team", "In", &["c"]), json!({}), open, Some(events::REQUIREMENTS_DRIFTED)),
    ] {
        let pool = pool(&json!({}), &wants);
        let claim = launched(&pool, &own, &asked);
        assert_eq!(event_of(&claim, &desired(pool)), expected, "{case}");
    }
}

#[test]
fn drift_is_reported_in_the_order_template_requirements_instance_type() {
    let before = pool(&json!({}), &json!([]));
    let claim = launched(&before, &json!({(labels::INSTANCE_TYPE): "m0.gone"}), &json!([]));
    let arm = json!([{"key": labels::ARCH, "operator": "In", "values": ["arm64"]}]);
    let late = |desired: &DesiredState| pool_drift(&claim, desired, at(TYPE_GRACE)).map(|drift| drift.event);
    assert_eq!(
        late(&desired(pool(&json!({"metadata": {"labels": {"a": "b"}}}), &arm))),
        Some(events::NODE_POOL_DRIFTED)
    );
    assert_eq!(late(&desired(pool(&json!({}), &arm))), Some(events::REQUIREMENTS_DRIFTED));
    assert_eq!(late(&desired(before)), Some(events::INSTANCE_TYPE_NOT_FOUND));
}

#[test]
fn a_removed_offering_drifts_its_nodes_after_an_hour() {
    let pool = pool(&json!({}), &json!([]));
    let desired = desired(pool.clone());
    for (case, own, after, expected) in [
        ("offered", json!({}), TYPE_GRACE, None),
        (
            "an unknown type",
            json!({(labels::INSTANCE_TYPE): "m0.gone"}),
            TYPE_GRACE,
            Some(events::INSTANCE_TYPE_NOT_FOUND),
        ),
        (
            "too young",
            json!({(labels::INSTANCE_TYPE): "m0.gone"}),
            TYPE_GRACE.checked_sub(Duration::from_millis(1)).unwrap(),
            None,
        ),
        ("an unknown zone", json!({(labels::ZONE): "mars-1a"}), TYPE_GRACE, Some(events::INSTANCE_TYPE_NOT_FOUND)),
        ("reserved, and offered on demand", json!({(labels::CAPACITY_TYPE): "reserved"}), TYPE_GRACE, None),
    ] {
        let claim = launched(&pool, &own, &json!([]));
        assert_eq!(pool_drift(&claim, &desired, at(after)).map(|drift| drift.event), expected, "{case}");
    }
    let nothing = DesiredState { types: HashMap::new(), ..desired };
    let claim = launched(&pool, &json!({}), &json!([]));
    assert_eq!(pool_drift(&claim, &nothing, at(TYPE_GRACE)), None, "no catalog, no verdict");
}

#[test]
fn pools_and_classes_without_an_up_to_date_hash_are_not_compared() {
    let mut state = ClusterState::default();
    let mut ready = pool(&json!({}), &json!([]));
    state.pools.insert("p".into(), Arc::new(ready.clone()));
    assert!(comparable(&state, None).is_empty(), "its class is missing");
    let mut class = class();
    state.classes.insert("default".into(), Arc::new(class.clone()));
    assert_eq!(comparable(&state, None).len(), 1);
    assert!(comparable(&state, Some("ca")).is_empty(), "the class has no hash yet");
    let annotations = class.metadata.annotations.get_or_insert_default();
    annotations
        .insert(labels::EC2_NODE_CLASS_HASH.into(), hash::node_class(&class.spec, hash::NodeClassVersion::V6, "ca"));
    annotations.insert(labels::EC2_NODE_CLASS_HASH_VERSION.into(), "v6".into());
    state.classes.insert("default".into(), Arc::new(class));
    assert_eq!(comparable(&state, Some("ca")).len(), 1);
    assert!(comparable(&state, Some("another")).is_empty());
    ready.spec.template.metadata.labels.get_or_insert_default().insert("a".into(), "b".into());
    state.pools.insert("p".into(), Arc::new(ready));
    assert!(comparable(&state, Some("ca")).is_empty(), "the pool changed");
}

#[test]
fn only_launched_claims_of_known_pools_are_compared() {
    let pool = pool(&json!({}), &json!([]));
    let claim = launched(&pool, &json!({}), &json!([]));
    let check = |claim: &NodeClaim, pools: &HashMap<String, DesiredState>| match check(claim, pools, at(Duration::ZERO))
    {
        DriftCheck::Incomparable => "keep".to_owned(),
        DriftCheck::Settled(None) => "clear".to_owned(),
        DriftCheck::Settled(Some(drift)) => drift.event.reason().to_owned(),
        DriftCheck::MatchesPool(class) => format!("compare with {}", class.name_any()),
    };
    let pools = HashMap::from([("p".to_owned(), desired(pool.clone()))]);
    assert_eq!(check(&claim, &pools), "compare with default");
    assert_eq!(check(&claim, &HashMap::new()), "keep", "its pool is being changed");
    let mut launching = claim.clone();
    launching.status = None;
    assert_eq!(check(&launching, &HashMap::new()), "clear", "not launched");
    let changed = self::pool(&json!({"metadata": {"labels": {"a": "b"}}}), &json!([]));
    assert_eq!(check(&claim, &HashMap::from([("p".to_owned(), desired(changed))])), "NodePoolDrifted");
    let invalid = self::pool(&json!({}), &json!([{"key": "k", "operator": "Odd", "values": []}]));
    assert!(DesiredState::new(Arc::new(invalid), Arc::new(class()), &Catalog::default()).is_none());
}
