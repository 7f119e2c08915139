use serde_json::{Value, json};

use super::*;
use crate::decisions::holds::{HoldsCache, resolve};
use crate::extender::{filter, preempt, prioritize};
use crate::test_support::history::{self, History};
use crate::test_support::{objects, state_with_planned_pod};

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

#[test]
fn a_change_of_a_pod_replaces_its_node_only() {
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
    fn a_view_that_follows_changes_gives_the_verdicts_of_a_new_one(events in history::history()) {
        let mut history = History::default();
        let (mut holds, mut cache) = (HoldsCache::default(), ViewCache::default());
        let mut published = (View::default(), verdicts(&View::default(), UnixMillis(0)), UnixMillis(0));
        for event in events {
            history.apply(event);
            let now = history.now;
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
