//! The document of small and of huge clusters.

use serde_json::{Value, json};
use stowage_cloud::offering_state;
use stowage_model::labels;
use stowage_model::pause;
use stowage_model::units::MicroUsd;
use stowage_test_objects as objects;

use super::*;
use crate::decisions::holds;
use crate::state::plan_record::PlanRecord;

const NOW: UnixMillis = UnixMillis(100_000);

fn at(seconds: i64) -> UnixMillis {
    UnixMillis(seconds * 1_000)
}

fn rejected(name: &str) -> k8s_openapi::api::core::v1::Pod {
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": "1970-01-01T00:00:40Z"});
    objects::pod(name, &json!({"status": {"conditions": [condition]}}))
}

fn shown(state: &ClusterState) -> DebugState {
    let mut shown = DebugState::of_tables(state, NOW);
    shown.version = "1.2.3";
    shown.add_holds(at(99), &holds::resolve(state, NOW));
    shown
}

fn document(shown: DebugState) -> Value {
    serde_json::from_slice(&shown.render()).unwrap()
}

/// A claim that names pods of its plan, a launched and a failed claim without a Node, a marked claim with its Node, four pending pods.
fn small_cluster() -> ClusterState {
    let mut state = ClusterState::default();
    let plan = PlanRecord { pods: vec!["n/held".into()], hold_until: at(200), ..PlanRecord::default() };
    let meta = json!({"annotations": plan.annotations(), "labels": {"karpenter.sh/nodepool": "pool"}, "creationTimestamp": "1970-01-01T00:00:10Z"});
    let status = json!({"conditions": [{"type": "Launched", "status": "Unknown", "reason": "LaunchFailed", "message": "no\u{1b}[31m capacity",
        "lastTransitionTime": "1970-01-01T00:00:20Z"}]});
    state.apply_claim(objects::claim("failing", &json!({"metadata": meta, "status": status})));
    state.apply_claim(objects::claim("launched", &json!({"status": objects::launched("i-1", &["Launched"])})));
    let mark = json!({"annotations": {(labels::DISRUPTING): "Drifted/1970-01-01T00:05:00Z"}});
    let registered = objects::launched("i-2", &["Launched", "Registered", "Initialized"]);
    state.apply_claim(objects::claim("marked", &json!({"metadata": mark, "status": registered})));
    state.apply_node(objects::node("node-2", &json!({"spec": {"providerID": "aws:///z/i-2"}})));
    for name in ["held", "left-out", "new", "quarantined"] {
        state.apply_pod(&rejected(name), NOW);
    }
    state
}

#[test]
fn a_replica_that_does_not_lead_shows_its_tables() {
    let state = small_cluster();
    let mut shown = shown(&state);
    shown.not_ready = vec!["watch caches are not synced"];
    let turn = Turn { name: "pods", age: Duration::from_secs(7), limit: Duration::from_mins(3), completed: None };
    shown.loops = vec![Loop::of(&turn)];
    shown.watches = vec![Watch { kind: "pods", age_seconds: 2, lists: 3 }];
    let document = document(shown);
    let pod = |name: &str, claim: Value| json!({"pod": format!("n/{name}"), "since": "1970-01-01T00:00:40Z", "nodeclaim": claim, "reason": null});
    let flying = |name: &str, pool: Value, age: u64, launched: bool, reason: Value, message: Value| json!({"nodeclaim": name, "nodepool": pool, "age_seconds": age, "launched": launched, "deleting": false, "reason": reason, "message": message});
    let counts =
        json!({"nodes": 1, "nodeclaims": 3, "nodepools": 0, "ec2nodeclasses": 0, "pods": 4, "pods_without_node": 4});
    assert_eq!(
        document,
        json!({
            "time": "1970-01-01T00:01:40Z", "version": "1.2.3", "leading": false, "leading_since": null, "paused": null,
            "not_ready": ["watch caches are not synced"], "objects": counts,
            "watches": [{"kind": "pods", "age_seconds": 2, "lists": 3}],
            "loops": [{"name": "pods", "turn_seconds": 7, "limit_seconds": 180, "completed_seconds_ago": null}],
            "pending_pods": {"truncated": 0, "items": [
                pod("held", "failing".into()), pod("left-out", Value::Null), pod("new", Value::Null), pod("quarantined", Value::Null)
            ]},
            "holds": {"as_of": "1970-01-01T00:01:39Z", "truncated": 0, "items": [
                {"nodeclaim": "failing", "pod": "n/held", "planned_pod": "n/held", "expires_at": "1970-01-01T00:03:20Z"}
            ]},
            "nodeclaims_in_flight": {"truncated": 0, "items": [
                flying("failing", "pool".into(), 90, false, "LaunchFailed".into(), "no\u{fffd}[31m capacity".into()),
                flying("launched", Value::Null, 100, true, Value::Null, Value::Null),
            ]},
            "nodes_leaving": {"truncated": 0, "items": [
                {"nodeclaim": "marked", "node": "node-2", "reason": "Drifted", "deadline": "1970-01-01T00:05:00Z", "deleting": false}
            ]},
            "leader": null
        })
    );
}

#[test]
fn the_leader_shows_what_its_loops_decided() {
    let mut state = small_cluster();
    state.pause = Some(pause::Pause::ALL);
    let mut shown = shown(&state);
    let pending = &shown.pending_pods.items;
    let causes: Vec<_> =
        pending.iter().map(|pod| (pod.key == "n/quarantined").then_some(Cause::PlannerPanic)).collect();
    let last_plan = LastPlan {
        at: at(90),
        took: Duration::from_millis(12),
        pods: 4,
        new_nodes: 1,
        on_existing: 2,
        left_out: 1,
        reasons: vec![("n/left-out".into(), "pool: limit reached".into())],
    };
    let consolidation = LastConsolidation {
        waits: true,
        saving: MicroUsd(250_000),
        verdicts: [("nominated", 2)].into(),
        ..LastConsolidation::at(at(95))
    };
    let data = |kind: &str, source, read_at, error: Option<&str>| offering_state::OfferingData {
        kind: kind.into(),
        source,
        read_at,
        error: error.map(Into::into),
    };
    let offerings = OfferingState {
        unavailable: vec![("m5.large in a, spot".into(), at(280))],
        unavailable_count: 3,
        data: vec![
            data("spot prices", "stale", Some(at(40)), Some("AccessDenied")),
            data("zones", "embedded", None, None),
        ],
    };
    shown.add_reasons(&causes, Some(&last_plan));
    shown.leader = Some(Leader {
        last_plan: Some(PlanSummary::of(&last_plan)),
        last_consolidation: Some(Consolidation::of(&consolidation)),
        would_disrupt: List::of([WouldDisrupt::of("node-8", DisruptionReason::Drifted)].into_iter(), 1),
        quarantined_pod_classes: List::of([QuarantinedClass::of("n", Cause::PlannerPanic, at(130))].into_iter(), 5),
        quarantined_supply: List::of([QuarantinedSource::of("node", "node-9", at(140))].into_iter(), 1),
        caps: vec![Cap { action: "purchase", per_minute: 1_000, left: 998 }],
        offerings: Some(Offerings::of(&offerings, NOW)),
    });
    let document = document(shown);
    assert_eq!(document["paused"], "all");
    let reasons: Vec<&Value> = (0..4).map(|index| &document["pending_pods"]["items"][index]["reason"]).collect();
    assert_eq!(
        reasons,
        [
            &Value::Null,
            &json!({"left_out": "pool: limit reached"}),
            &Value::Null,
            &json!({"quarantined": "planner_panic"})
        ]
    );
    assert_eq!(
        document["leader"],
        json!({
            "last_plan": {"at": "1970-01-01T00:01:30Z", "milliseconds": 12, "pods": 4, "new_nodes": 1, "on_existing": 2, "left_out": 1},
            "last_consolidation": {"at": "1970-01-01T00:01:35Z", "waits": true, "candidates": 0, "verdicts": {"nominated": 2}, "chosen": 0,
                "pods": 0, "plans": 0, "milliseconds": 0,
                "usd_per_hour_saved": 0.25},
            "would_disrupt": {"items": [{"nodeclaim": "node-8", "reason": "Drifted"}], "truncated": 0},
            "quarantined_pod_classes": {"items": [{"namespace": "n", "cause": "planner_panic", "until": "1970-01-01T00:02:10Z"}], "truncated": 4},
            "quarantined_supply": {"items": [{"kind": "node", "name": "node-9", "until": "1970-01-01T00:02:20Z"}], "truncated": 0},
            "caps": [{"action": "purchase", "per_minute": 1_000, "left": 998}],
            "offerings": {
                "data": [
                    {"kind": "spot prices", "source": "stale", "read_seconds_ago": 60, "error": "AccessDenied"},
                    {"kind": "zones", "source": "embedded", "read_seconds_ago": null, "error": null}
                ],
                "unavailable": {"items": [{"what": "m5.large in a, spot", "until": "1970-01-01T00:04:40Z"}], "truncated": 2}
            }
        })
    );
}

#[test]
fn a_document_is_bounded_whatever_the_cluster_has() {
    let mut shown = shown(&ClusterState::default());
    // Texts of the longest characters.
    let long = text(&"𝕏".repeat(1 << 10));
    let pod = || Pending {
        pod: long.clone(),
        since: UnixMillis::MAX.rfc3339(),
        nodeclaim: None,
        reason: Some(Reason::Invalid(long.clone())),
        key: long.clone(),
        class: None,
    };
    shown.pending_pods = List { items: (0..MAX_ENTRIES).map(|_| pod()).collect(), truncated: 5 };
    let status = json!({"conditions": [{"type": "Launched", "status": "False", "reason": long, "message": long,
        "lastTransitionTime": "1970-01-01T00:00:20Z"}]});
    let claim = objects::claim(&long, &json!({"status": status}));
    shown.nodeclaims_in_flight = List::of((0..MAX_ENTRIES).map(|_| InFlight::of(&claim, NOW)), MAX_ENTRIES);
    let document = shown.render();
    assert!(document.len() <= MAX_BYTES, "{}", document.len());
    let document: Value = serde_json::from_slice(&document).unwrap();
    let list = |name: &str| (document[name]["items"].as_array().unwrap().len(), document[name]["truncated"].clone());
    assert_eq!((list("pending_pods"), list("nodeclaims_in_flight")), ((300, json!(705)), (300, json!(700))));
    assert_eq!(document["pending_pods"]["items"][0]["since"], "1970-01-01T00:00:00Z");
}

#[test]
fn a_text_neither_controls_a_terminal_nor_is_cut_inside_a_character() {
    assert_eq!(text("a\n\u{1b}[2J\u{7f}\u{9b}\u{202e}é"), "a\u{fffd}\u{fffd}[2J\u{fffd}\u{fffd}\u{fffd}é");
    for c in ['\u{61c}', '\u{2028}', '\u{2029}'] {
        assert_eq!(text(&c.to_string()), "\u{fffd}", "{c:?}");
    }
    assert_eq!(text(&"é".repeat(MAX_TEXT + 1)).chars().count(), MAX_TEXT);
}

fn put(state: &mut ClusterState, namespace: &str, name: &str, rejected: bool) {
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let conditions = if rejected { json!([condition]) } else { json!([]) };
    let patch = json!({"metadata": {"namespace": namespace}, "status": {"conditions": conditions}});
    state.apply_pod(&objects::pod(name, &patch), UnixMillis(1));
}

#[test]
fn lists_are_capped_and_count_what_they_leave_out() {
    let mut state = ClusterState::default();
    for index in 0..MAX_ENTRIES + 3 {
        state.apply_claim(objects::claim(&format!("c{index:06}"), &json!({})));
    }
    let shown = DebugState::of_tables(&state, NOW);
    assert_eq!((shown.nodeclaims_in_flight.items.len(), shown.nodeclaims_in_flight.truncated), (MAX_ENTRIES, 3));
    assert_eq!((shown.nodes_leaving.items.len(), shown.nodes_leaving.truncated), (0, 0));
    assert_eq!(shown.objects["nodeclaims"], MAX_ENTRIES + 3);
}

#[test]
fn a_namespace_with_many_pods_hides_no_pending_pod_of_another() {
    let mut state = ClusterState::default();
    for index in 0..MAX_EXAMINED_PER_NAMESPACE + 7 {
        put(&mut state, "a", &format!("p{index:06}"), true);
        put(&mut state, "a-b", &format!("p{index:06}"), false);
    }
    for namespace in ["a.b", "a0", "b", "b-"] {
        put(&mut state, namespace, "pending", true);
        put(&mut state, namespace, "untried", false);
    }
    let shown = DebugState::of_tables(&state, NOW);
    let keys: Vec<&str> = shown.pending_pods.items.iter().map(|pod| pod.key.as_str()).collect();
    assert_eq!(keys[..6], ["a/p000000", "a.b/pending", "a0/pending", "b/pending", "b-/pending", "a/p000001"]);
    assert_eq!((keys.len(), shown.pending_pods.truncated), (MAX_ENTRIES, 4 + 7 + 7));
}
