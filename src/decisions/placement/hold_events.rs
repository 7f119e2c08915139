//! How holds end, and which holds are renewed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// After this time without a pod bound as planned, the pods of a class no longer count as progressing.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(15);
/// A hold is renewed when it ends within this time.
const RENEW_BEFORE: Duration = Duration::from_secs(20);
/// No hold is renewed on a node older than this.
const MAX_HOLD_AGE: Duration = Duration::from_mins(10);

/// How a hold ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldEnd {
    /// Its pod was bound to the planned node.
    Planned,
    /// Its pod was bound to another node.
    Elsewhere(Missed),
    /// The room was kept for the successor of a displaced pod, which was bound to another node before it had the hold.
    Stray,
    /// No pod takes the room.
    Released(Release),
}

/// Why a pod was not bound to its planned node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missed {
    /// The planned node did not exist.
    NoNode,
    /// The planned node was not ready.
    NotReady,
    /// kube-scheduler chose another one.
    Chosen,
}

/// Why room is not kept any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The pod was deleted, or ended.
    PodGone,
    /// The NodeClaim is gone or goes.
    NodeGone,
    /// The plan of the NodeClaim no longer has the pod.
    Replanned,
    /// The pod waited for too long.
    Expired,
}

impl HoldEnd {
    pub const ALL: [Self; 9] = [
        Self::Planned,
        Self::Elsewhere(Missed::NoNode),
        Self::Elsewhere(Missed::NotReady),
        Self::Elsewhere(Missed::Chosen),
        Self::Stray,
        Self::Released(Release::PodGone),
        Self::Released(Release::NodeGone),
        Self::Released(Release::Replanned),
        Self::Released(Release::Expired),
    ];

    /// Values of the metric labels `result` and `reason`.
    pub fn metric_labels(self) -> [&'static str; 2] {
        match self {
            Self::Planned => ["planned", ""],
            Self::Elsewhere(Missed::NoNode) => ["elsewhere", "no_node"],
            Self::Elsewhere(Missed::NotReady) => ["elsewhere", "not_ready"],
            Self::Elsewhere(Missed::Chosen) => ["elsewhere", "chosen"],
            Self::Stray => ["stray", ""],
            Self::Released(Release::PodGone) => ["released", "pod_gone"],
            Self::Released(Release::NodeGone) => ["released", "node_gone"],
            Self::Released(Release::Replanned) => ["released", "replanned"],
            Self::Released(Release::Expired) => ["released", "expired"],
        }
    }
}

/// A hold that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedHold {
    pub claim: String,
    pub pod: String,
    pub end: HoldEnd,
}

/// Holds of `before` that are not in `after`, by claim and pod.
pub fn ended(before: &Holds, after: &Holds, state: &ClusterState) -> Vec<EndedHold> {
    let mut out = Vec::new();
    for (pod, claim) in &before.by_pod {
        if after.by_pod.contains_key(pod) {
            continue;
        }
        let node = state.claims.get(claim).and_then(|claim| state.node_of(claim));
        let bound = state.pods.get(pod).and_then(|pod| pod.node.as_deref());
        let end = match (bound, node) {
            (Some(bound), Some(node)) if bound == node.name_any() => HoldEnd::Planned,
            (Some(_), None) => HoldEnd::Elsewhere(Missed::NoNode),
            (Some(_), Some(node)) if !node.is_ready() => HoldEnd::Elsewhere(Missed::NotReady),
            (Some(_), Some(_)) => HoldEnd::Elsewhere(Missed::Chosen),
            (None, _) => HoldEnd::Released(release(before, state, claim, pod)),
        };
        out.push(EndedHold { claim: claim.clone(), pod: pod.clone(), end });
    }
    let had_hold = |pod: &String| before.by_pod.contains_key(pod) || before.strays.contains_key(pod);
    for (pod, claim) in after.strays.iter().filter(|(pod, _)| !had_hold(pod)) {
        out.push(EndedHold { claim: claim.clone(), pod: pod.clone(), end: HoldEnd::Stray });
    }
    out.sort_by(|a, b| (&a.claim, &a.pod).cmp(&(&b.claim, &b.pod)));
    out
}

/// Why the hold of a pod that has no node ended.
fn release(before: &Holds, state: &ClusterState, claim: &str, pod: &str) -> Release {
    if !state.pods.get(pod).is_some_and(PodRecord::active) {
        return Release::PodGone;
    }
    if state.claims.get(claim).is_none_or(|claim| claim.is_leaving()) {
        return Release::NodeGone;
    }
    // The plan names the pod whose successor this one is.
    let holds = before.by_claim.get(claim).into_iter().flatten();
    let original = holds.filter(|hold| hold.pod.as_deref() == Some(pod)).map(|hold| hold.original.as_str()).next();
    let is_planned =
        state.planned.get(claim).is_some_and(|plan| plan.pods.iter().any(|name| name == original.unwrap_or(pod)));
    if is_planned { Release::Expired } else { Release::Replanned }
}

/// When a pod of each class was last bound as planned. A topology spread of hundreds of pods is bound step by step: while it
/// progresses, the holds of the waiting pods are renewed.
#[derive(Debug, Default)]
pub struct Progress {
    bound: HashMap<Arc<PodClass>, UnixMillis>,
}

impl Progress {
    /// Records that a pod was bound as planned.
    pub fn record(&mut self, state: &ClusterState, pod: &str, now: UnixMillis) {
        if let Some(class) = class_of(state, pod) {
            self.bound.insert(Arc::clone(class), now);
        }
    }

    /// Whether a pod of the class was bound as planned a short while ago.
    pub fn is_bound(&self, class: &Arc<PodClass>) -> bool {
        self.bound.contains_key(class)
    }

    /// Forgets classes without recent progress.
    pub fn expire(&mut self, now: UnixMillis) {
        self.bound.retain(|_, at| !at.is_older_than(PROGRESS_TIMEOUT, now));
    }

    /// Claims whose holds end soon although pods of a held class are still being bound, or a scheduler that is late has not attempted a held pod.
    pub fn to_renew(&self, state: &ClusterState, holds: &Holds, now: UnixMillis) -> Vec<String> {
        let is_due = |claim: &&String| {
            let node = state.claims.get(*claim).and_then(|claim| state.node_of(claim));
            let young = node.is_some_and(|node| !node.created_at().is_older_than(MAX_HOLD_AGE, now));
            let ends = state.planned.get(*claim).is_some_and(|plan| plan.hold_until < now + RENEW_BEFORE);
            let mut pods = holds.by_claim[*claim].iter().filter_map(|hold| state.pods.get(hold.pod.as_ref()?));
            let progresses = |pod: &PodRecord| {
                pod.awaits_attempt || pod.entry.as_ref().is_ok_and(|entry| self.is_bound(&entry.class))
            };
            young && ends && pods.any(progresses)
        };
        holds.by_claim.keys().filter(is_due).cloned().collect()
    }
}

fn class_of<'s>(state: &'s ClusterState, pod: &str) -> Option<&'s Arc<PodClass>> {
    Some(&state.pods.get(pod)?.entry.as_ref().ok()?.class)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::holds::resolve;
    use crate::test_support::state_with_planned_pod;

    fn hold(end: HoldEnd) -> EndedHold {
        EndedHold { claim: "c".into(), pod: "n/a".into(), end }
    }

    #[test]
    fn a_hold_that_ends_is_reported_with_how_it_ended() {
        let before = resolve(&state_with_planned_pod(None), UnixMillis(5));
        for (bound, end) in [(Some("node-c"), HoldEnd::Planned), (Some("other"), HoldEnd::Elsewhere(Missed::NotReady))]
        {
            let now = state_with_planned_pod(bound);
            assert_eq!(ended(&before, &resolve(&now, UnixMillis(5)), &now), [hold(end)]);
        }
        let mut gone = state_with_planned_pod(None);
        gone.delete_pod("n/a", UnixMillis(6));
        assert_eq!(ended(&before, &resolve(&gone, UnixMillis(6)), &gone), [hold(HoldEnd::Released(Release::PodGone))]);
    }

    #[test]
    fn why_a_hold_ended_otherwise_is_reported() {
        type Change = fn(&mut ClusterState);
        let before = resolve(&state_with_planned_pod(None), UnixMillis(5));
        let ready: Change = |state| {
            let mut node = Node::clone(&state.nodes["node-c"]);
            let ready = json!([{"type": "Ready", "status": "True"}]);
            node.status.get_or_insert_default().conditions = serde_json::from_value(ready).unwrap();
            state.apply_node(node);
        };
        let without_node: Change = |state| state.delete_node("node-c");
        let deleted: Change = |state| state.delete_claim("c");
        let replanned: Change = |state| {
            let mut claim = (*state.claims["c"]).clone();
            let plan = json!({(labels::PLANNED_PODS): "[]", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
            claim.metadata.annotations = serde_json::from_value(plan).unwrap();
            state.apply_claim(claim);
        };
        let expired: Change = |state| {
            let mut claim = (*state.claims["c"]).clone();
            let plan = json!({(labels::PLANNED_PODS): "[\"n/a\"]", (labels::HOLD_UNTIL): "1970-01-01T00:00:00Z"});
            claim.metadata.annotations = serde_json::from_value(plan).unwrap();
            state.apply_claim(claim);
        };
        for (case, bound, change, end) in [
            ("ready", Some("other"), ready, HoldEnd::Elsewhere(Missed::Chosen)),
            ("no node", Some("other"), without_node, HoldEnd::Elsewhere(Missed::NoNode)),
            ("claim deleted", None, deleted, HoldEnd::Released(Release::NodeGone)),
            ("replanned", None, replanned, HoldEnd::Released(Release::Replanned)),
            ("expired", None, expired, HoldEnd::Released(Release::Expired)),
        ] {
            let mut now = state_with_planned_pod(bound);
            change(&mut now);
            assert_eq!(ended(&before, &resolve(&now, UnixMillis(5)), &now), [hold(end)], "{case}");
        }
    }

    #[test]
    fn the_ends_of_holds_have_labels_of_their_own() {
        let labels: std::collections::BTreeSet<_> = HoldEnd::ALL.map(HoldEnd::metric_labels).into();
        assert_eq!(labels.len(), HoldEnd::ALL.len());
    }

    #[test]
    fn a_stray_is_reported_once_and_a_pod_that_had_the_hold_is_none() {
        let state = state_with_planned_pod(None);
        let strays = Holds { strays: [("n/a".to_owned(), "c".to_owned())].into(), ..Holds::default() };
        assert_eq!(ended(&Holds::default(), &strays, &state), [hold(HoldEnd::Stray)]);
        assert!(ended(&strays, &strays, &state).is_empty());
        let (before, bound) = (resolve(&state, UnixMillis(5)), state_with_planned_pod(Some("other")));
        assert_eq!(ended(&before, &strays, &bound), [hold(HoldEnd::Elsewhere(Missed::NotReady))]);
    }

    /// The pod waits, and its node is as old as the clock.
    fn state_with_new_node() -> ClusterState {
        let mut state = state_with_planned_pod(None);
        let mut node = Node::clone(&state.nodes["node-c"]);
        node.metadata.creation_timestamp = serde_json::from_value(json!("1970-01-01T00:00:00Z")).ok();
        state.apply_node(node);
        state
    }

    #[test]
    fn a_hold_is_renewed_while_other_pods_of_its_class_are_bound() {
        let mut state = state_with_new_node();
        let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        state.apply_pod(&objects::pod("a", &json!({"status": {"conditions": [rejected]}})), UnixMillis(1));
        let mut progress = Progress::default();
        let due = |now: UnixMillis, progress: &Progress, state: &ClusterState| {
            progress.to_renew(state, &resolve(state, UnixMillis(5)), now)
        };
        let until = state.planned["c"].hold_until;
        let moment = Duration::from_millis(1);
        progress.record(&state, "n/a", UnixMillis(1));
        assert!(due(until - RENEW_BEFORE, &progress, &state).is_empty(), "it lasts, and the node is too old");
        let until = UnixMillis(60_000);
        state.planned.get_mut("c").unwrap().hold_until = until;
        assert!(due(until - RENEW_BEFORE, &progress, &state).is_empty(), "it lasts");
        assert_eq!(due(until - RENEW_BEFORE + moment, &progress, &state), ["c"]);
        assert!(due(until - RENEW_BEFORE + moment, &Progress::default(), &state).is_empty(), "no progress");
        state.planned.get_mut("c").unwrap().hold_until = UnixMillis(0) + MAX_HOLD_AGE;
        assert!(due(UnixMillis(0) + MAX_HOLD_AGE, &progress, &state).is_empty(), "the node is too old");
        progress.expire(UnixMillis(1) + PROGRESS_TIMEOUT);
        assert!(progress.bound.is_empty());
    }

    #[test]
    fn a_hold_is_renewed_until_the_scheduler_has_attempted_its_pod() {
        let mut state = state_with_new_node();
        state.planned.get_mut("c").unwrap().hold_until = UnixMillis(60_000);
        for (case, generation, condition, renewed) in [
            ("never", 1, json!(null), true),
            ("before it got its toleration", 2, json!(1), true),
            ("since then", 2, json!(2), false),
            ("not known", 2, json!(null), false),
        ] {
            let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "observedGeneration": condition});
            let conditions = if case == "never" { json!([]) } else { json!([rejected]) };
            let patch = json!({"metadata": {"generation": generation}, "status": {"conditions": conditions}});
            state.apply_pod(&objects::pod("a", &patch), UnixMillis(2));
            let holds = resolve(&state, UnixMillis(5));
            let due = Progress::default().to_renew(&state, &holds, UnixMillis(50_000));
            assert_eq!(!due.is_empty(), renewed, "{case}");
        }
    }
}
