use serde_json::{Value, json};
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_test_objects as objects;

use super::*;
use crate::state::tables::ClusterState;

/// A budget for pods with the label app=web that allows this many disruptions.
fn web(allowed: i32) -> Value {
    json!({"spec": {"selector": {"matchLabels": {"app": "web"}}}, "status": {"disruptionsAllowed": allowed}})
}

/// What blocks the pod `n/a` with the label app=web and these further fields.
fn block(budgets: &[(&str, Value)], pod: &Value) -> Option<EvictionBlock> {
    let mut state = ClusterState::default();
    for (name, budget) in budgets {
        state.pod_budgets.apply(&objects::pod_budget(name, budget));
    }
    let mut patch = json!({"metadata": {"labels": {"app": "web"}}, "spec": {"nodeName": "x"},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    json_patch::merge(&mut patch, pod);
    state.apply_pod(&objects::pod("a", &patch), UnixMillis(1));
    state.pod_budgets.block(&state.pods["n/a"])
}

#[test]
fn b49_a_budget_blocks_the_pods_that_it_selects_and_allows_no_disruption_of() {
    let exhausted = Some(EvictionBlock::Exhausted("n/b".into()));
    let with = |patch: Value| {
        let mut budget = web(0);
        json_patch::merge(&mut budget, &patch);
        budget
    };
    let selecting = |selector: Value| json!({"spec": {"selector": selector}, "status": {"disruptionsAllowed": 0}});
    let expression = |operator: &str, values: Option<&[&str]>| {
        selecting(json!({"matchExpressions": [{"key": "app", "operator": operator, "values": values}]}))
    };
    for (case, budget, expected) in [
        ("allows none", web(0), &exhausted),
        ("allows one", web(1), &None),
        ("another namespace", with(json!({"metadata": {"namespace": "m"}})), &None),
        ("no status yet", with(json!({"status": null})), &exhausted),
        (
            "the status is of an older spec",
            with(json!({"metadata": {"generation": 2},
            "status": {"disruptionsAllowed": 1, "observedGeneration": 1}})),
            &exhausted,
        ),
        (
            "the status is of this spec",
            with(json!({"metadata": {"generation": 2},
            "status": {"disruptionsAllowed": 1, "observedGeneration": 2}})),
            &None,
        ),
        ("no selector selects no pod", with(json!({"spec": {"selector": null}})), &None),
        ("an empty selector selects every pod", selecting(json!({})), &exhausted),
        ("another label", selecting(json!({"matchLabels": {"app": "db"}})), &None),
        ("a further label that the pod lacks", selecting(json!({"matchLabels": {"app": "web", "tier": "1"}})), &None),
        ("one of several values", expression("In", Some(&["db", "web"])), &exhausted),
        ("none of several values", expression("NotIn", Some(&["db"])), &exhausted),
        ("none of these values", expression("NotIn", Some(&["web"])), &None),
        ("the label exists", expression("Exists", None), &exhausted),
        ("the label does not exist", expression("DoesNotExist", None), &None),
        ("an invalid selector blocks the namespace", expression("Whatever", None), &exhausted),
    ] {
        assert_eq!(block(&[("b", budget)], &json!({})), *expected, "{case}");
    }
}

#[test]
fn unhealthy_pods_are_evicted_where_the_policy_always_allows_it() {
    let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    for (policy, pod, blocked) in [
        (Some("AlwaysAllow"), &unready, false),
        (Some("AlwaysAllow"), &json!({}), true),
        (Some("IfHealthyBudget"), &unready, true),
        (None, &unready, true),
    ] {
        let mut budget = web(0);
        budget["spec"]["unhealthyPodEvictionPolicy"] = json!(policy);
        assert_eq!(block(&[("b", budget)], pod).is_some(), blocked, "{policy:?}");
    }
}

#[test]
fn two_budgets_block_a_pod_whatever_they_allow() {
    let several = EvictionBlock::Several("n/a".into(), "n/b".into());
    assert_eq!(block(&[("b", web(5)), ("a", web(5))], &json!({})), Some(several));
}

#[test]
fn pods_that_a_drain_does_not_evict_are_not_blocked() {
    for (case, pod) in [
        ("finished", json!({"status": {"phase": "Succeeded"}})),
        ("terminating", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})),
        (
            "protected: waited for, not evicted",
            json!({"metadata": {"annotations": {(labels::DO_NOT_DISRUPT): "true"}}}),
        ),
        ("mirror pod", json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}})),
        ("tolerates the disruption taint", json!({"spec": {"tolerations": [{"operator": "Exists"}]}})),
    ] {
        assert_eq!(block(&[("b", web(0))], &pod), None, "{case}");
    }
}

#[test]
fn changed_and_deleted_budgets_leave_nothing_behind() {
    let mut budgets = PodBudgets::default();
    let other = json!({"spec": {"selector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}});
    for patch in [web(0), web(1), other, web(0)] {
        budgets.apply(&objects::pod_budget("b", &patch));
        let namespace = &budgets.namespaces["n"];
        let indexed: usize = namespace.by_label.values().flat_map(HashMap::values).map(BTreeSet::len).sum();
        assert_eq!((namespace.by_name.len(), indexed + namespace.unindexed.len()), (1, 1));
    }
    assert_eq!(budgets.keys(), ["n/b".to_owned()].into());
    budgets.delete("n/unknown");
    budgets.delete("n/b");
    assert!(budgets.namespaces.is_empty());
}

/// Ten thousand budgets of one tenant cost a pod of it no search through them.
#[test]
fn a_pod_is_compared_only_with_the_budgets_that_its_labels_lead_to() {
    let mut budgets = PodBudgets::default();
    for n in 0..1_000 {
        let selector = json!({"matchLabels": {"app": format!("app-{n}")}});
        budgets.apply(&objects::pod_budget(&format!("b{n}"), &json!({"spec": {"selector": selector}})));
    }
    assert!(budgets.namespaces["n"].unindexed.is_empty());
    let labels = Labels::from([("app".to_owned(), "app-7".to_owned())]);
    assert_eq!(budgets.namespaces["n"].selecting(&labels).map(|(name, _)| &**name).collect::<Vec<_>>(), ["b7"]);
    let evasive =
        json!({"spec": {"selector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}}});
    let many: Vec<_> = (0..=MAX_UNINDEXED).map(|n| (format!("e{n}"), evasive.clone())).collect();
    let many: Vec<_> = many.iter().map(|(name, budget)| (&**name, budget.clone())).collect();
    assert_eq!(block(&many, &json!({})), Some(EvictionBlock::TooManyBudgets));
}
