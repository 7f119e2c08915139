//! Nominations of planned pods, renewal of holds, and retries of kube-scheduler when a hold ends.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::decisions::placement::hold_events::{EndedHold, HoldEnd, Progress, ended};
use crate::decisions::placement::mode::PlacementMode;
use crate::decisions::placement::planned_taint::{is_closed, planned_taint_of, suffices};
use crate::decisions::placement::refusals::{Refusals, Withdrawal};
use crate::decisions::pod_ref::PodRef;
use crate::model::labels;
use crate::model::pod_class::PodClass;
use crate::model::time::UnixMillis;
use crate::state::object_ext::{NodeExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// How often kube-scheduler is triggered while pods wait for open nodes: it may have attempted them before the extender's view
/// included their holds, and no other event may follow.
const RETRY_TRIGGER_PERIOD: Duration = Duration::from_secs(2);
/// Minimum time between two nominations of a pod.
const RENOMINATE_PERIOD: Duration = Duration::from_millis(200);

/// Held pods of a claim that are not nominated to its node yet.
///
/// When the scheduler evaluates a node, it counts every pod nominated to that node, but none nominated elsewhere: if more pods of a
/// topology spread constraint than its `maxSkew` were nominated to one node, each would appear to violate it. So at most `maxSkew`
/// are nominated at a time, and none when the extender or the planned taint (`closed`) directs them anyway.
pub fn to_nominate(
    state: &ClusterState,
    holds: &Holds,
    placement: PlacementMode,
    closed: bool,
    claim: &str,
    node: &str,
) -> Vec<PodRef> {
    let mut left: HashMap<*const PodClass, i64> = HashMap::new();
    let mut out = Vec::new();
    let waiting = || {
        let live = holds.by_claim.get(claim).into_iter().flatten();
        live.filter_map(|hold| state.pods.get(hold.pod.as_ref()?)).filter(|pod| pod.node.is_none())
    };
    let limit = |pod: &PodRecord| {
        let class = &pod.entry.as_ref().ok()?.class;
        let hard = class.spread.iter().filter(|spread| spread.hard && *spread.key != *labels::HOSTNAME);
        let skew = hard.map(|spread| spread.max_skew).min()?;
        Some((Arc::as_ptr(class), if placement == PlacementMode::Extender || closed { 0 } else { skew }))
    };
    let nominated = |pod: &&PodRecord| pod.nominated.as_deref() == Some(node);
    for pod in waiting().filter(|pod| nominated(pod)) {
        if let Some((class, skew)) = limit(pod) {
            *left.entry(class).or_insert(skew) -= 1;
        }
    }
    for pod in waiting().filter(|pod| !nominated(pod)) {
        if let Some((class, skew)) = limit(pod) {
            let left = left.entry(class).or_insert(skew);
            if *left <= 0 {
                continue;
            }
            *left -= 1;
        }
        out.push(PodRef::of(pod));
    }
    out
}

/// What one pass does.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct NominationActions {
    /// Holds that ended since the last pass.
    pub ended: Vec<EndedHold>,
    /// Claims whose holds are renewed.
    pub renew: Vec<String>,
    /// Pods to withdraw from their plans.
    pub withdraw: Vec<Withdrawal>,
    /// Pods to nominate, by node.
    pub nominate: BTreeMap<String, Vec<PodRef>>,
    /// Nodes to update, so that kube-scheduler retries the pods that only the extender rejected.
    pub trigger: Vec<String>,
}

/// What is remembered between two passes.
#[derive(Debug)]
pub struct Nominations {
    holds: Arc<Holds>,
    /// When each pod was last nominated, by UID.
    nominated: HashMap<String, UnixMillis>,
    /// When kube-scheduler was last triggered, or had no reason to be.
    triggered: UnixMillis,
    progress: Progress,
    refusals: Refusals,
}

impl Nominations {
    /// Begins at `now`, without knowledge of earlier holds.
    pub fn new(now: UnixMillis) -> Self {
        Self {
            holds: Arc::default(),
            nominated: HashMap::new(),
            triggered: now,
            progress: Progress::default(),
            refusals: Refusals::default(),
        }
    }

    /// Compares the holds with those of the last pass, and records the nominations as made.
    pub fn choose(
        &mut self,
        state: &ClusterState,
        holds: &Arc<Holds>,
        placement: PlacementMode,
        now: UnixMillis,
    ) -> NominationActions {
        let ended = ended(&self.holds, holds, state);
        self.holds = Arc::clone(holds);
        for hold in ended.iter().filter(|hold| hold.end == HoldEnd::Planned) {
            self.progress.record(state, &hold.pod, now);
        }
        self.nominated.retain(|_, at| !at.is_older_than(RENOMINATE_PERIOD, now));
        self.progress.expire(now);
        if placement == PlacementMode::Off {
            return NominationActions { ended, ..NominationActions::default() };
        }
        let renew = self.progress.to_renew(state, holds, now);
        let withdraw = self.refusals.choose(state, holds, &self.progress, now);
        let open = || open_nodes(state, holds);
        let mut nominate = BTreeMap::new();
        for (claim, node) in open() {
            let (name, taint) = (node.name_any(), planned_taint_of(node));
            let mut pods = to_nominate(state, holds, placement, taint.is_some_and(is_closed), claim, &name);
            pods.retain(|pod| !self.nominated.contains_key(&pod.uid));
            if !pods.is_empty() && !taint.is_some_and(|taint| suffices(state, node, taint, now)) {
                nominate.insert(name, pods);
            }
        }
        self.nominated.extend(nominate.values().flatten().map(|pod| (pod.uid.clone(), now)));
        let mut trigger = Vec::new();
        if placement == PlacementMode::Extender {
            let unplanned = ended.iter().filter(|hold| hold.end != HoldEnd::Planned);
            let node_of = |claim: &String| Some(state.node_of(state.claims.get(claim)?)?.name_any());
            let freed: Vec<String> = unplanned.filter_map(|hold| node_of(&hold.claim)).collect();
            let waited_for = |claim: &str| holds.by_claim[claim].iter().any(|hold| hold.pod.is_some());
            let awaited = open().find(|(claim, _)| waited_for(claim)).map(|(_, node)| node.name_any());
            trigger = self.nodes_to_update(freed, awaited, now);
        }
        NominationActions { ended, renew, withdraw, nominate, trigger }
    }

    /// Nodes to update: those `freed` by holds that ended other than as planned, and periodically an open node that a held pod waits
    /// for (`awaited`).
    fn nodes_to_update(&mut self, freed: Vec<String>, awaited: Option<String>, now: UnixMillis) -> Vec<String> {
        let mut nodes = freed;
        if awaited.is_none() {
            self.triggered = now;
        } else if self.triggered.is_older_than(RETRY_TRIGGER_PERIOD, now) && nodes.is_empty() {
            // The update of one node triggers a retry of all of these pods.
            nodes.extend(awaited);
        }
        if !nodes.is_empty() {
            self.triggered = now;
        }
        nodes.sort();
        nodes.dedup();
        nodes
    }
}

/// Claims with holds whose nodes are registered and ready, with their nodes.
fn open_nodes<'a>(state: &'a ClusterState, holds: &'a Holds) -> impl Iterator<Item = (&'a String, &'a Node)> {
    holds.by_claim.keys().filter_map(|claim| {
        let node = state.node_of(state.claims.get(claim)?)?;
        let open = node.is_labeled(labels::REGISTERED) && node.is_ready();
        open.then_some((claim, &**node))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::decisions::holds::resolve;
    use crate::decisions::placement::planned_taint::planned_taint;
    use crate::test_support::{objects, state_with_planned_pod};

    fn count(state: &ClusterState, placement: PlacementMode, tainted: bool) -> usize {
        to_nominate(state, &resolve(state, UnixMillis(5)), placement, tainted, "c", "node-c").len()
    }

    #[test]
    fn at_most_max_skew_pods_of_a_spread_are_nominated_to_a_node() {
        let mut state = state_with_planned_pod(None);
        let planned = "[\"n/s1\",\"n/s2\",\"n/s3\"]";
        let plan = json!({(labels::PLANNED_PODS): planned, (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"});
        let patch = json!({"metadata": {"annotations": plan}, "status": objects::launched("i-1", &[])});
        state.apply_claim(objects::claim("c", &patch));
        for name in ["s1", "s2", "s3"] {
            let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name, "labels": {"app": "s"}},
                "spec": {"containers": [{"name": "c", "image": "i"}], "topologySpreadConstraints": [{"maxSkew": 2,
                    "topologyKey": labels::ZONE, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "s"}}}]}});
            state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(1));
        }
        assert_eq!(count(&state, PlacementMode::Nominate, false), 2);
        assert_eq!(count(&state, PlacementMode::Extender, false), 0, "the extender's filter directs them");
        assert_eq!(count(&state, PlacementMode::Nominate, true), 0, "the planned taint directs them");
    }

    #[test]
    fn only_pods_without_the_nomination_are_nominated() {
        let mut state = state_with_planned_pod(None);
        assert_eq!(count(&state, PlacementMode::Nominate, false), 1);
        let pod = json!({"metadata": {"name": "a", "namespace": "n", "uid": "a"}, "spec": {"containers": []},
            "status": {"nominatedNodeName": "node-c"}});
        state.apply_pod(&serde_json::from_value(pod).unwrap(), UnixMillis(2));
        assert_eq!(count(&state, PlacementMode::Nominate, false), 0);
    }

    /// The planned pod waits for the open node of its claim, which is new at the epoch.
    fn open(bound: Option<&str>) -> ClusterState {
        let mut state = state_with_planned_pod(bound);
        let meta = json!({"labels": {(labels::REGISTERED): "true"}, "creationTimestamp": "1970-01-01T00:00:00Z"});
        let status = json!({"conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "2", "memory": "4Gi", "pods": "10"}});
        let spec = json!({"providerID": "aws:///z/i-1"});
        state.apply_node(objects::node("node-c", &json!({"metadata": meta, "spec": spec, "status": status})));
        state
    }

    /// One pass `at` this time.
    fn pass(
        nominations: &mut Nominations,
        state: &ClusterState,
        placement: PlacementMode,
        at: i64,
    ) -> NominationActions {
        nominations.choose(state, &Arc::new(resolve(state, UnixMillis(at))), placement, UnixMillis(at))
    }

    #[test]
    fn a_pod_is_nominated_to_a_registered_ready_node_at_most_five_times_a_second() {
        let mut nominations = Nominations::new(UnixMillis(0));
        let mut nominated = |state: &ClusterState, placement, at| {
            let nominate = pass(&mut nominations, state, placement, at).nominate;
            nominate.into_iter().map(|(node, pods)| (node, pods.len())).collect::<Vec<_>>()
        };
        let open = open(None);
        assert_eq!(nominated(&state_with_planned_pod(None), PlacementMode::Nominate, 0), [], "not registered");
        assert_eq!(nominated(&open, PlacementMode::Off, 0), []);
        assert_eq!(nominated(&open, PlacementMode::Nominate, 0), [("node-c".to_owned(), 1)]);
        assert_eq!(nominated(&open, PlacementMode::Nominate, 199), [], "nominated a moment ago");
        assert_eq!(nominated(&open, PlacementMode::Nominate, 200), [("node-c".to_owned(), 1)]);
    }

    #[test]
    fn pods_are_nominated_beside_the_planned_taint_only_where_nodes_may_open_before_they_are_bound() {
        let mut state = open(None);
        let mut node = (*state.nodes["node-c"]).clone();
        let taint = planned_taint(&state.claims["c"], UnixMillis(0));
        node.spec.as_mut().unwrap().taints = taint.map(|taint| vec![taint]);
        state.apply_node(node);
        let nominated = |state: &ClusterState, at| {
            !pass(&mut Nominations::new(UnixMillis(0)), state, PlacementMode::Nominate, at).nominate.is_empty()
        };
        assert_eq!([29_999, 30_000].map(|at| nominated(&state, at)), [false, true]);
        let agent = json!({"metadata": {"name": "agent", "namespace": "n", "uid": "agent"},
            "spec": {"selector": {}, "template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}});
        state.apply_daemon_set(&serde_json::from_value(agent).unwrap());
        assert!(nominated(&state, 0), "the node opens for a while for a DaemonSet pod");
    }

    #[test]
    fn a_retry_is_triggered_by_an_unplanned_end_and_every_two_seconds() {
        let mut nominations = Nominations::new(UnixMillis(0));
        let mut trigger = |state: &ClusterState, placement, at| pass(&mut nominations, state, placement, at).trigger;
        let waiting = open(None);
        assert!(trigger(&waiting, PlacementMode::Extender, 1_999).is_empty());
        assert_eq!(trigger(&waiting, PlacementMode::Extender, 2_000), ["node-c"]);
        assert!(trigger(&waiting, PlacementMode::Extender, 3_999).is_empty());
        assert_eq!(trigger(&open(Some("other")), PlacementMode::Extender, 3_999), ["node-c"], "bound elsewhere");
        assert!(trigger(&open(Some("other")), PlacementMode::Extender, 9_000).is_empty(), "no pod waits");
        assert!(trigger(&waiting, PlacementMode::Extender, 10_999).is_empty(), "it waits for less than two seconds");
        assert!(trigger(&waiting, PlacementMode::Nominate, 99_000).is_empty(), "without an extender");
        assert!(trigger(&open(Some("node-c")), PlacementMode::Extender, 99_000).is_empty(), "bound as planned");
    }

    #[test]
    fn a_hold_is_renewed_after_another_pod_of_its_class_was_bound_as_planned() {
        let mut state = open(None);
        let plan = json!({(labels::PLANNED_PODS): "[\"n/a\",\"n/b\"]", (labels::HOLD_UNTIL): "1970-01-01T00:00:30Z"});
        let status = json!({"providerID": "aws:///z/i-1"});
        state.apply_claim(objects::claim("c", &json!({"metadata": {"annotations": plan}, "status": status})));
        let put = |name: &str, bound: Option<&str>, state: &mut ClusterState| {
            let rejected = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
            let pod = json!({"spec": {"nodeName": bound}, "status": {"conditions": [rejected]}});
            state.apply_pod(&objects::pod(name, &pod), UnixMillis(1));
        };
        put("a", None, &mut state);
        put("b", None, &mut state);
        let mut nominations = Nominations::new(UnixMillis(0));
        let mut renewed = |state: &ClusterState, placement, at| {
            let actions = pass(&mut nominations, state, placement, at);
            (actions.ended.len(), actions.renew)
        };
        let due = (0, vec!["c".to_owned()]);
        assert_eq!(renewed(&state, PlacementMode::Nominate, 11_000), (0, vec![]), "no pod was bound");
        put("a", Some("node-c"), &mut state);
        assert_eq!(renewed(&state, PlacementMode::Nominate, 12_000), (1, due.1.clone()));
        assert_eq!(renewed(&state, PlacementMode::Off, 13_000), (0, vec![]), "not enforced");
        assert_eq!(renewed(&state, PlacementMode::Nominate, 26_999), due);
        assert_eq!(renewed(&state, PlacementMode::Nominate, 27_000), (0, vec![]), "no progress for fifteen seconds");
    }
}
