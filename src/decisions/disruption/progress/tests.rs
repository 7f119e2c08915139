use serde_json::{Value, json};
use stowage_model::labels;
use stowage_test_objects as objects;

use super::*;
use crate::decisions::demand::demand;
use crate::decisions::disruption::candidates::pods_to_reschedule;
use crate::decisions::holds::resolve;

const NOW: UnixMillis = UnixMillis(1_000_000);
const MINUTE: Duration = Duration::from_mins(1);

fn record(sources: &[&str]) -> MoveRecord {
    let sources = sources.iter().map(|name| (*name).to_owned()).collect();
    MoveRecord {
        id: "m".into(),
        at: NOW,
        give_up: NOW + MINUTE * 5,
        sources,
        usd_per_hour: 0.1,
        unheld: BTreeSet::new(),
        replaced_by: None,
    }
}

/// A claim with these annotations, and its node of the same name.
fn put_node(state: &mut ClusterState, name: &str, annotations: &Value, initialized: bool) {
    let conditions: &[&str] = if initialized { &["Initialized"] } else { &[] };
    let meta = json!({"annotations": annotations, "finalizers": ["f"]});
    state.apply_claim(objects::claim(name, &json!({"metadata": meta, "status": objects::launched(name, conditions)})));
    state.apply_node(objects::node(name, &json!({"spec": {"providerID": format!("aws:///z/{name}")}})));
}

fn put_pod(state: &mut ClusterState, name: &str, node: &str, annotations: &Value) {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
    let meta = json!({"ownerReferences": [owner], "annotations": annotations, "labels": {"app": "a"}});
    state.apply_pod(&objects::pod(name, &json!({"metadata": meta, "spec": {"nodeName": node}})), UnixMillis(1));
}

fn marked(reason: &str, sources: &[&str]) -> Value {
    json!({(labels::DISRUPTING): reason, (labels::MOVE): record(sources).annotation()})
}

/// Room for pods, kept until a time.
fn room(pods: &[&str], until: UnixMillis) -> Value {
    let owner = json!({"uid": "r", "at_ms": NOW.0, "until_ms": until.0});
    let keys: Vec<String> = pods.iter().map(|pod| format!("n/{pod}")).collect();
    let owners: serde_json::Map<String, Value> = keys.iter().map(|key| (key.clone(), owner.clone())).collect();
    json!({(labels::PLANNED_PODS): json!(keys).to_string(), (labels::PLANNED_OWNERS): json!(owners).to_string(),
        (labels::HOLD_UNTIL): NOW.rfc3339()})
}

/// The sources a and b of one move with a pod each, whose room is on `old` and on `new`.
fn state() -> ClusterState {
    let mut state = ClusterState::default();
    for name in ["a", "b"] {
        put_node(&mut state, name, &marked("Underutilized/", &["a", "b"]), true);
        put_pod(&mut state, &format!("on-{name}"), name, &json!({}));
    }
    put_node(&mut state, "old", &room(&["on-a"], NOW + MINUTE * 5), true);
    put_node(&mut state, "new", &room(&["on-b"], NOW + MINUTE * 5), true);
    state
}

/// What the only move does next.
fn step_of(state: &ClusterState, now: UnixMillis) -> String {
    let moves = progress(state, &resolve(state, now), now);
    assert!(moves.len() <= 1);
    match moves.first().map(|one| &one.step) {
        None => "no move".into(),
        Some(Step::Wait) => "wait".into(),
        Some(Step::Reserve) => "reserve".into(),
        Some(Step::Surge(pods)) => {
            format!("surge {}", pods.iter().map(|one| &*one.pod.name).collect::<Vec<_>>().join(" "))
        }
        Some(Step::Depart(claims)) => {
            format!("depart {}", claims.iter().map(|claim| claim.name_any()).collect::<Vec<_>>().join(" "))
        }
        Some(Step::RollBack(why)) => format!("roll back: {why}"),
    }
}

fn mark_claim(state: &mut ClusterState, name: &str, patch: &Value) {
    let mut claim = serde_json::to_value(&*state.claims[name]).unwrap();
    json_patch::merge(&mut claim, patch);
    state.apply_claim(serde_json::from_value(claim).unwrap());
}

#[test]
fn a_move_departs_as_a_whole_when_all_its_pods_have_room_on_initialized_nodes() {
    type Change = fn(&mut ClusterState);
    let blocked: Change = |state| {
        let spec = json!({"selector": {"matchLabels": {"app": "a"}}});
        state.pod_budgets.apply(&objects::pod_budget("b", &json!({"spec": spec, "status": {"disruptionsAllowed": 0}})));
    };
    let boots: Change = |state| put_node(state, "new", &room(&["on-b"], NOW + MINUTE * 5), false);
    let gone: Change = |state| state.delete_claim("new");
    let leaves: Change = |state| {
        let mut annotations = room(&["on-b"], NOW + MINUTE * 5);
        annotations[labels::DISRUPTING] = json!("Drifted/");
        put_node(state, "new", &annotations, true);
    };
    let expired: Change = |state| put_node(state, "new", &room(&["on-b"], NOW), true);
    let another: Change = |state| put_pod(state, "late", "a", &json!({}));
    let another_on_b: Change = |state| put_pod(state, "late", "b", &json!({}));
    let bare: Change =
        |state| state.apply_pod(&objects::pod("bare", &json!({"spec": {"nodeName": "a"}})), UnixMillis(1));
    let protected: Change = |state| put_pod(state, "on-a", "a", &json!({(labels::DO_NOT_DISRUPT): "true"}));
    let ended: Change = |state| state.delete_pod("n/on-b", NOW);
    let deleted: Change = |state| mark_claim(state, "a", &json!({"metadata": {"deletionTimestamp": NOW.rfc3339()}}));
    let terminated: Change = |state| {
        state.delete_pod("n/on-a", NOW);
        state.delete_node("a");
        state.delete_claim("a");
    };
    let interrupted: Change = |state| {
        let mark = format!("SpotInterruption/{}", (NOW + MINUTE).rfc3339());
        mark_claim(state, "a", &json!({"metadata": {"annotations": {(labels::DISRUPTING): mark}}}));
    };
    let unmarked: Change = |state| {
        let nothing = json!({(labels::DISRUPTING): null, (labels::MOVE): null});
        mark_claim(state, "a", &json!({"metadata": {"annotations": nothing}}));
    };
    for (case, changes, early, late) in [
        ("ready", vec![], "depart a b", "depart a b"),
        ("a node starts up", vec![boots], "wait", "roll back: its pods found no other node in time"),
        ("a target is gone", vec![gone], "reserve", "roll back: its pods found no other node in time"),
        ("a target leaves", vec![leaves], "reserve", "roll back: its pods found no other node in time"),
        ("the room is given up", vec![expired], "reserve", "roll back: its pods found no other node in time"),
        ("another pod was bound", vec![another], "reserve", "roll back: its pods found no other node in time"),
        (
            "one departs, and another pod was bound",
            vec![deleted, another_on_b],
            "reserve",
            "roll back: its pods found no other node in time",
        ),
        ("a pod without a controller", vec![bare], "depart a b", ""),
        (
            "a pod is protected now",
            vec![protected],
            "roll back: pod n/on-a has the annotation karpenter.sh/do-not-disrupt",
            "",
        ),
        ("a pod ended", vec![ended], "depart a b", ""),
        ("a budget forbids it", vec![blocked], "wait", "roll back: its pods found no other node in time"),
        ("one departs", vec![deleted], "depart b", "depart b"),
        (
            "one departs, the other's node starts up",
            vec![deleted, boots],
            "wait",
            "roll back: its pods found no other node in time",
        ),
        ("one has departed", vec![terminated], "depart b", ""),
        ("one is interrupted", vec![interrupted], "depart b", ""),
        ("a mark is missing", vec![unmarked], "wait", "roll back: NodeClaim a is not marked"),
    ] {
        let mut state = state();
        for change in &changes {
            change(&mut state);
        }
        assert_eq!(step_of(&state, NOW + Duration::from_secs(1)), early, "{case}");
        if !late.is_empty() {
            // The room of the pods ends with the move; what is decided first counts.
            let at = NOW + MINUTE * 5 - Duration::from_secs(1);
            let mut given_up = state;
            for name in ["a", "b"] {
                if let Some((mut record, _)) = given_up.claims.get(name).and_then(|claim| source_of(claim)) {
                    record.give_up = at;
                    let annotations = json!({(labels::MOVE): record.annotation()});
                    mark_claim(&mut given_up, name, &json!({"metadata": {"annotations": annotations}}));
                }
            }
            assert_eq!(step_of(&given_up, at), late, "{case}, when it is given up");
        }
    }
}

#[test]
fn only_voluntary_marks_with_a_record_are_of_a_move() {
    for (mark, with_record, of_move) in [
        ("Underutilized/", true, true),
        ("Drifted/", true, true),
        ("Drifted/", false, false),
        ("Expired/", true, true),
        ("Empty/", true, false),
        ("SpotInterruption/2026-01-01T00:00:00Z", true, false),
        ("Drifted/2026-01-01T00:00:00Z", true, false),
    ] {
        let mut annotations = marked(mark, &["a"]);
        if !with_record {
            annotations[labels::MOVE] = json!("{}");
        }
        let claim = objects::claim("a", &json!({"metadata": {"annotations": annotations}}));
        assert_eq!(source_of(&claim).is_some(), of_move, "{mark} {with_record}");
    }
    assert_eq!(give_up_after(DisruptionReason::Underutilized), MINUTE * 5);
    assert_eq!(give_up_after(DisruptionReason::Drifted), MINUTE * 10);
}

#[test]
fn a_drifted_node_with_a_grace_period_is_protected_by_its_own_annotation_only() {
    let by_pod = "roll back: pod n/on-a has the annotation karpenter.sh/do-not-disrupt";
    let by_node = "roll back: its Node or NodeClaim has the annotation karpenter.sh/do-not-disrupt";
    for (mark, grace, pod, node, expected) in [
        ("Drifted/", None, "true", "", by_pod),
        ("Drifted/", Some("1h"), "true", "", "depart a"),
        ("Drifted/", Some("1h"), "", "true", by_node),
        ("Expired/", Some("1h"), "true", "", by_pod),
        ("Expired/", Some("1h"), "", "", "depart a"),
    ] {
        let mut state = ClusterState::default();
        put_node(&mut state, "a", &marked(mark, &["a"]), true);
        mark_claim(&mut state, "a", &json!({"spec": {"terminationGracePeriod": grace}}));
        let annotations = json!({(labels::DO_NOT_DISRUPT): node});
        let spec = json!({"providerID": "aws:///z/a"});
        state.apply_node(objects::node("a", &json!({"metadata": {"annotations": annotations}, "spec": spec})));
        put_pod(&mut state, "on-a", "a", &json!({(labels::DO_NOT_DISRUPT): pod}));
        put_node(&mut state, "old", &room(&["on-a"], NOW + MINUTE * 5), true);
        assert_eq!(step_of(&state, NOW), expected, "{mark} {grace:?}");
        state.pod_budgets.apply(&objects::pod_budget("b", &json!({"spec": {"selector": {}}})));
        let is_drift = mark == "Drifted/" && grace.is_some();
        let expected = if expected == "depart a" && !is_drift { "wait" } else { expected };
        assert_eq!(step_of(&state, NOW), expected, "{mark} {grace:?}, a PodDisruptionBudget refuses the eviction");
    }
}

#[test]
fn f5_pods_that_go_to_nodes_which_are_not_ours_need_no_hold() {
    let unheld =
        |pods: &[&str]| MoveRecord { unheld: pods.iter().map(|pod| (*pod).to_owned()).collect(), ..record(&["a"]) };
    for (pods, step, counted) in
        [(&["n/on-a"][..], "depart a", &["n/on-a"][..]), (&["n/other"], "reserve", &[]), (&[], "reserve", &[])]
    {
        let mut state = ClusterState::default();
        let annotations = json!({(labels::DISRUPTING): "Drifted/", (labels::MOVE): unheld(pods).annotation()});
        put_node(&mut state, "a", &annotations, true);
        put_pod(&mut state, "on-a", "a", &json!({}));
        assert_eq!(step_of(&state, NOW), step, "{pods:?}");
        let of_others = |but: &[&str]| unheld_pods(&state, &but.iter().copied().collect());
        assert_eq!(of_others(&[]).iter().map(String::as_str).collect::<Vec<_>>(), counted);
        assert!(of_others(&["a"]).is_empty());
    }
    // Each source records its own pods.
    let mut state = ClusterState::default();
    for name in ["a", "b"] {
        let own = MoveRecord { unheld: BTreeSet::from([format!("n/on-{name}")]), ..record(&["a", "b"]) };
        let annotations = json!({(labels::DISRUPTING): "Drifted/", (labels::MOVE): own.annotation()});
        put_node(&mut state, name, &annotations, true);
        put_pod(&mut state, &format!("on-{name}"), name, &json!({}));
    }
    assert_eq!(step_of(&state, NOW), "depart a b");
    assert_eq!(unheld_pods(&state, &["b"].into()).into_iter().collect::<Vec<_>>(), ["n/on-a"]);
    let text = unheld(&["n/on-a"]).annotation();
    assert!(text.contains(r#""unheld":["n/on-a"]"#), "{text}");
    assert!(!record(&["a"]).annotation().contains("unheld"), "an earlier version reads it");
}

/// The addendum: a new node for pods that a budget keeps was discarded as empty and bought again, for ever.
#[test]
fn f3_the_room_of_pods_that_a_budget_keeps_is_neither_discarded_nor_bought_again() {
    let mut state = state();
    let spec = json!({"selector": {"matchLabels": {"app": "a"}}});
    state.pod_budgets.apply(&objects::pod_budget("b", &json!({"spec": spec, "status": {"disruptionsAllowed": 0}})));
    let holds = |state: &ClusterState, at| resolve(state, at);
    let is_empty = |state: &ClusterState, at| pods_to_reschedule(state, &holds(state, at), &state.claims["new"]) == 0;
    let bought_for = |state: &ClusterState, at| demand(state, &holds(state, at), at).displaced.len();
    let (before, after) = (NOW + MINUTE * 4, NOW + MINUTE * 6);
    assert_eq!(
        (step_of(&state, before).as_str(), is_empty(&state, before), bought_for(&state, before)),
        ("wait", false, 0)
    );
    // Then its room ends with the move.
    assert!(step_of(&state, after).starts_with("roll back") && is_empty(&state, after));
    assert_eq!(bought_for(&state, after), 0);
    // The budget was used up by the first evictions of the drain.
    for name in ["a", "b"] {
        mark_claim(&mut state, name, &json!({"metadata": {"deletionTimestamp": NOW.rfc3339()}}));
    }
    assert_eq!(
        (step_of(&state, before).as_str(), is_empty(&state, before), bought_for(&state, before)),
        ("no move", false, 0)
    );
    assert_eq!(bought_for(&state, after), 0);
}

#[test]
fn a_node_of_a_static_pool_departs_when_its_replacement_is_initialized() {
    let late = NOW + MINUTE * 5;
    for (case, replacement, initialized, now, expected) in [
        ("it starts", json!({}), false, NOW, "Wait"),
        ("it is initialized", json!({}), true, NOW, "Depart"),
        ("it is late", json!({}), false, late, "its replacement was not ready in time"),
        (
            "it is interrupted",
            json!({(labels::DISRUPTING): "SpotInterruption/2026-01-01T00:00:00Z"}),
            true,
            NOW,
            "its replacement, NodeClaim new, is gone",
        ),
        ("it is gone", Value::Null, true, NOW, "its replacement, NodeClaim new, is gone"),
    ] {
        let mut state = ClusterState::default();
        let record = MoveRecord { replaced_by: Some("new".into()), ..record(&["a"]) };
        let annotations = json!({(labels::DISRUPTING): "Drifted/", (labels::MOVE): record.annotation()});
        put_node(&mut state, "a", &annotations, true);
        put_pod(&mut state, "on-a", "a", &json!({}));
        if !replacement.is_null() {
            put_node(&mut state, "new", &replacement, initialized);
        }
        let step = |state: &ClusterState| progress(state, &resolve(state, now), now).pop().unwrap().step;
        let found = match step(&state) {
            Step::Depart(sources) => {
                assert_eq!(sources.len(), 1);
                "Depart".to_owned()
            }
            Step::RollBack(why) => why,
            other => format!("{other:?}"),
        };
        assert_eq!(found, expected, "{case}");
        if expected == "Depart" {
            state.pod_budgets.apply(&objects::pod_budget("b", &json!({"spec": {"selector": {}}})));
            assert_eq!(step(&state), Step::Wait, "a PodDisruptionBudget refuses the eviction");
            put_pod(&mut state, "on-a", "a", &json!({(labels::DO_NOT_DISRUPT): "true"}));
            assert!(matches!(step(&state), Step::RollBack(why) if why.contains("do-not-disrupt")));
        }
    }
}

/// A pod that surges, as it was at first, or after it `left` its ReplicaSet.
fn put_surging(state: &mut ClusterState, left: bool) {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
    let mut meta = json!({"labels": {"app": "a"}, "annotations": {(labels::SURGE): "true"}});
    if left {
        let surged = json!({"replica_set": "r", "uid": "r", "hash": "7d", "ready": 1});
        meta["annotations"][labels::SURGED] = json!(surged.to_string());
    } else {
        meta["labels"][labels::POD_TEMPLATE_HASH] = json!("7d");
        meta["ownerReferences"] = json!([owner]);
    }
    state.apply_pod(&objects::pod("on-a", &json!({"metadata": meta, "spec": {"nodeName": "a"}})), UnixMillis(1));
}

/// Its successor.
fn put_successor(state: &mut ClusterState, node: Option<&str>, ready: &str) {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
    let meta = json!({"labels": {"app": "a"}, "ownerReferences": [owner]});
    let status = json!({"conditions": [{"type": "Ready", "status": ready}]});
    let pod = json!({"metadata": meta, "spec": {"nodeName": node}, "status": status});
    state.apply_pod(&objects::pod("next", &pod), UnixMillis(1));
}

#[test]
fn a_surging_pod_leaves_its_replica_set_before_and_its_node_after_its_successor_is() {
    let mut state = state();
    put_surging(&mut state, false);
    // Its budget allows no disruption before its successor is ready; those of other pods count.
    let budget = |selector: &Value, allowed: i64| {
        objects::pod_budget(
            "b",
            &json!({"spec": {"selector": {"matchLabels": selector}}, "status": {"disruptionsAllowed": allowed}}),
        )
    };
    let (own, late) = (json!({labels::POD_TEMPLATE_HASH: "7d"}), NOW + MINUTE * 5);
    state.pod_budgets.apply(&budget(&own, 0));
    put_node(&mut state, "new", &room(&["on-b"], NOW + MINUTE * 5), false);
    assert_eq!(step_of(&state, NOW), "wait", "the place of the other pod is not ready");
    put_node(&mut state, "new", &room(&["on-b"], NOW + MINUTE * 5), true);
    assert_eq!(step_of(&state, NOW), "surge on-a");
    assert_eq!(step_of(&state, late), "roll back: its pods found no other node in time");
    state.pod_budgets.apply(&budget(&json!({"app": "a"}), 0));
    assert_eq!(step_of(&state, NOW), "wait", "a budget keeps the other pod");
    state.pod_budgets.apply(&budget(&own, 0));
    // It left: its room is its successor's, and nothing is bought for it.
    put_surging(&mut state, true);
    assert_eq!(step_of(&state, NOW), "wait");
    let held = |state: &ClusterState| resolve(state, NOW).by_claim["old"].first().map(|hold| hold.pod.clone());
    assert_eq!((held(&state), demand(&state, &resolve(&state, NOW), NOW).displaced.len()), (Some(None), 0));
    put_successor(&mut state, None, "False");
    assert_eq!((step_of(&state, NOW).as_str(), held(&state)), ("wait", Some(Some("n/next".into()))));
    put_successor(&mut state, Some("old"), "False");
    assert_eq!(step_of(&state, NOW), "wait");
    assert_eq!(step_of(&state, late), "roll back: its pods found no other node in time");
    put_successor(&mut state, Some("old"), "True");
    assert_eq!(step_of(&state, NOW), "depart a b");
    state.pod_budgets.apply(&budget(&json!({"app": "a"}), 0));
    assert_eq!(step_of(&state, NOW), "wait", "its budget has not counted the successor yet");
}
