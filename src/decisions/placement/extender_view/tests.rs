use serde_json::{Value, json};
use stowage_test_objects as objects;

use super::*;
use crate::decisions::holds::{HoldsCache, resolve};
use crate::extender::{filter, preempt, prioritize};
use crate::test_support::history::{self, History};
use crate::test_support::state_with_planned_pod;

const PODS: [&str; 7] = ["n/p0", "n/p1", "n/p2", "n/p3", "m/p0", "m/p1", "n/stranger"];
const NODES: [&str; 4] = ["node-0", "node-1", "node-2", "ghost"];

/// Every verdict on pods of each owner and size.
fn verdicts(view: &View, now: UnixMillis) -> Vec<Value> {
    let pods = PODS.iter().zip([1, 2, 0].iter().cycle()).flat_map(|(key, owner)| {
        let (namespace, name) = key.split_once('/').unwrap();
        let owners = json!([{"kind": "ReplicaSet", "uid": format!("owner-{owner}"), "controller": true}]);
        [1, 3].map(|cpu| {
            json!({"metadata": {"name": name, "namespace": namespace, "uid": name, "ownerReferences": owners},
                "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu.to_string()}}}]}})
        })
    });
    let victims: Value = NODES.map(|node| (node.to_owned(), json!({"Pods": [{"UID": "v"}]}))).into_iter().collect();
    pods.flat_map(|pod| {
        let call = json!({"Pod": pod, "NodeNames": NODES}).to_string();
        let preemption = json!({"Pod": pod, "NodeNameToMetaVictims": victims}).to_string();
        [
            json!(filter(view, now, serde_json::from_str(&call).unwrap())),
            json!(prioritize(view, now, serde_json::from_str(&call).unwrap())),
            json!(preempt(view, now, serde_json::from_str(&preemption).unwrap())),
        ]
    })
    .collect()
}

#[test]
fn a_planned_pod_passes_on_its_node_only_until_it_is_bound() {
    let view = |bound| {
        let (state, now) = (state_with_planned_pod(bound), UnixMillis(5));
        ViewCache::default().update(&state, &Arc::new(resolve(&state, now)), now)
    };
    let passing = |view: &View, name: &str, cpu: &str| {
        let pod = json!({"metadata": {"name": name, "namespace": "n"},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}});
        let call = json!({"Pod": pod, "NodeNames": ["node-c", "other"]}).to_string();
        let result = filter(view, UnixMillis(5), serde_json::from_str(&call).unwrap());
        result.node_names.iter().map(|name| name.as_str().to_owned()).collect::<Vec<_>>()
    };
    let planned = view(None);
    assert_eq!(passing(&planned, "a", "500m"), ["node-c"]);
    assert_eq!(passing(&planned, "b", "100m"), ["other"], "only held room is offered");
    assert!(!planned.is_stale(UnixMillis(5) + extender::DEFAULT_MAX_AGE));
    assert!(planned.is_stale(UnixMillis(6) + extender::DEFAULT_MAX_AGE));
    let bound = view(Some("node-c"));
    assert_eq!(passing(&bound, "a", "500m"), ["node-c", "other"]);
    assert_eq!(passing(&bound, "b", "1500m"), ["node-c", "other"]);
}

/// A StatefulSet creates the successor when the displaced pod is gone.
#[test]
fn the_room_of_a_displaced_pod_that_is_gone_is_held_until_its_successor_exists() {
    [1, 2].into_iter().for_each(displace_pod_of_stateful_set);
}

fn displace_pod_of_stateful_set(replicas: usize) {
    let plan = json!({"stowage.dev/planned-pods": "[\"n/web-0\"]", "stowage.dev/hold-until": "2030-01-01T00:00:00Z",
        "stowage.dev/planned-owners": r#"{"n/web-0": {"uid": "set", "at_ms": 1}}"#});
    let meta = json!({ "annotations": plan });
    let mut state = ClusterState::default();
    state.apply_claim(objects::claim("c", &json!({"metadata": meta, "status": objects::launched("i-1", &[])})));
    let status = json!({"allocatable": {"cpu": "2", "memory": "4Gi", "pods": "10"}});
    state.apply_node(objects::node("node-c", &json!({"spec": {"providerID": "aws:///z/i-1"}, "status": status})));
    let containers = json!([{"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}}}]);
    let pod = |name: &str, node: Option<&str>, uid: &str| {
        let owner =
            json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "set", "controller": true}]);
        let owner = if name == "stranger" { json!([]) } else { owner };
        let meta = json!({"uid": uid, "ownerReferences": owner, "creationTimestamp": "1970-01-01T00:01:00Z"});
        json!({"metadata": meta, "spec": {"nodeName": node, "containers": containers}})
    };
    let now = UnixMillis(60_000);
    if replicas > 1 {
        state.apply_pod(&objects::pod("web-1", &pod("web-1", Some("elsewhere"), "2")), now);
    }
    state.apply_pod(&objects::pod("web-0", &pod("web-0", Some("old"), "1")), now);
    let (mut holds, mut cache) = (HoldsCache::default(), ViewCache::default());
    let mut passes = |state: &ClusterState, name: &str| {
        let view = cache.update(state, &holds.resolve(state, now), now);
        let mut pod = pod(name, None, "3");
        pod["metadata"]["name"] = name.into();
        pod["metadata"]["namespace"] = "n".into();
        let call = json!({"Pod": pod, "NodeNames": ["node-c"]}).to_string();
        !filter(&view, now, serde_json::from_str(&call).unwrap()).node_names.is_empty()
    };
    assert!(!passes(&state, "stranger") && passes(&state, "web-0"));
    state.delete_pod("n/web-0", now);
    assert!(passes(&state, "web-0"), "its successor");
    assert!(!passes(&state, "stranger"), "nobody else");
    state.apply_pod(&objects::pod("web-0", &pod("web-0", None, "3")), now);
    assert!(!passes(&state, "stranger") && passes(&state, "web-0"));
}

#[test]
fn f14_a_change_of_a_pod_replaces_its_node_only() {
    let mut state = state_with_planned_pod(None);
    for name in ["x", "y"] {
        let status = objects::launched(name, &[]);
        state.apply_claim(objects::claim(name, &json!({ "status": status })));
        state.apply_node(objects::node(
            name,
            &json!({"spec": {"providerID": format!("aws:///z/{name}")},
            "status": {"allocatable": {"cpu": "2", "memory": "4Gi", "pods": "10"}}}),
        ));
    }
    let (mut holds, mut cache, now) = (HoldsCache::default(), ViewCache::default(), UnixMillis(5));
    let before = cache.update(&state, &holds.resolve(&state, now), now);
    let new = json!({"metadata": {"resourceVersion": "9"}, "spec": {"nodeName": "x"}});
    state.apply_pod(&objects::pod("new", &new), now);
    let after = cache.update(&state, &holds.resolve(&state, now), now);
    let kept = ["x", "y", "node-c"].map(|name| std::ptr::eq(before.node(name).unwrap(), after.node(name).unwrap()));
    assert_eq!(kept, [false, true, true]);
}

proptest::proptest! {
    #![proptest_config(history::config())]

    #[test]
    fn a_view_that_follows_every_history_gives_the_verdicts_of_a_new_one(events in history::history(), every in 1..6_usize) {
        let mut history = History::default();
        let (mut holds, mut cache) = (HoldsCache::default(), ViewCache::default());
        let mut published = (View::default(), verdicts(&View::default(), UnixMillis(0)), UnixMillis(0));
        for (index, event) in events.into_iter().enumerate() {
            history.apply(event);
            let now = history.now;
            if index % every != 0 {
                // Another loop resolves the holds; the view follows later.
                holds.resolve(&history.state, now);
                continue;
            }
            let live = holds.resolve(&history.state, now);
            let view = cache.update(&history.state, &live, now);
            let expected = ViewCache::default().update(&history.fresh(), &live, now);
            assert_eq!(view, expected, "after {event:?}");
            let given = verdicts(&view, now);
            assert_eq!(given, verdicts(&expected, now), "after {event:?}");
            let (last, answers, at) = std::mem::replace(&mut published, (view, given, now));
            assert_eq!(verdicts(&last, at), answers, "a published view never changes");
        }
    }
}
