use serde_json::json;
use stowage_planner::Interner;
use stowage_test_objects as objects;

use super::*;

const NOW: UnixMillis = UnixMillis(1_000_000);

fn pods(namespace: &str, count: usize) -> Vec<PodEntry> {
    let mut interner = Interner::default();
    let meta = json!({ "namespace": namespace });
    let pod = |number| objects::pod(&format!("p{number}"), &json!({ "metadata": meta }));
    (0..count).map(|number| interner.intern(&pod(number)).unwrap()).collect()
}

fn with_reason<'a>(pods: &'a [PodEntry], reason: &'a str) -> Vec<(&'a PodEntry, &'a str)> {
    pods.iter().map(|pod| (pod, reason)).collect()
}

#[test]
fn a_pod_and_reason_is_reported_once_until_the_pod_has_a_node() {
    let (mut reports, pods) = (UnschedulablePods::default(), pods("a", 3));
    let failed = with_reason(&pods, "too large");
    let first = reports.report(&failed, NOW);
    assert_eq!((first.pods.len(), first.reasons), (3, vec![("too large".to_owned(), 3)]));
    assert_eq!(reports.report(&failed, NOW), Report::default());
    let other = reports.report(&with_reason(&pods, "no zone"), NOW);
    assert_eq!((other.pods.len(), other.reasons.len()), (3, 1), "another reason");
    assert_eq!(reports.report(&[], NOW), Report::default());
    assert!(reports.reported.is_empty(), "what is no longer without a node is forgotten");
}

#[test]
fn an_event_is_repeated_after_two_minutes_without_a_line() {
    let (mut reports, pods) = (UnschedulablePods::default(), pods("a", 1));
    let failed = with_reason(&pods, "too large");
    reports.report(&failed, NOW);
    assert_eq!(reports.report(&failed, NOW + REPEAT), Report { pods: vec![0], ..Report::default() });
}

#[test]
fn no_tenant_uses_up_the_reports() {
    let mut reports = UnschedulablePods::default();
    let (many, few) = (pods("a-attacker", 2_000), pods("b", 2));
    let failed = [with_reason(&many, "too large"), with_reason(&few, "no zone")].concat();
    let report = reports.report(&failed, NOW);
    assert_eq!(report.pods.len(), MAX_PODS);
    assert!(report.pods.contains(&2_000) && report.pods.contains(&2_001));
    assert_eq!(reports.report(&failed, NOW), Report::default(), "the period is used up");
    assert_eq!(reports.report(&failed, NOW + PERIOD).pods.len(), MAX_PODS);
}

#[test]
fn a_summary_names_the_most_frequent_reasons() {
    let (mut reports, pods) = (UnschedulablePods::default(), pods("a", 30));
    let reasons: Vec<String> = (0..10).map(|reason| format!("reason {reason}")).collect();
    let failed: Vec<_> = pods.iter().enumerate().map(|(at, pod)| (pod, reasons[at.min(9)].as_str())).collect();
    let report = reports.report(&failed, NOW);
    assert_eq!(
        (report.reasons[0].clone(), report.reasons.len(), report.other_reasons),
        (("reason 9".into(), 21), 5, 5)
    );
}
