//! Why a node did not take a pod that it was purchased for, as far as the objects show: for the report, and for the next plan.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Taint;
use kube::ResourceExt;
use stowage_api::{NodeClaim, conditions};
use stowage_model::labels;
use stowage_model::pod_class::{NodeTerm, PodClass, Toleration};
use stowage_model::requirement::ValueSet;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_planner::{Daemon, Problem};

use crate::decisions::holds::owner_key;
use crate::state::node_state::is_ephemeral;
use crate::state::object_ext::{NodeClaimExt, NodeExt, ObjectExt};
use crate::state::plan_record::PlanRecord;
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// Maximum number of pods and taints that a text names.
const MAX_NAMES: usize = 3;
/// Maximum number of taints that are remembered of a NodePool.
const MAX_TAINTS: usize = 16;
/// How long the taints of a node count for new ones: nobody reports that they are no longer added.
const TAINTS_LAST: Duration = Duration::from_mins(10);
/// How long new nodes are planned with more room.
const EXTRA_LASTS: Duration = Duration::from_hours(1);

/// What kept a pod off its new node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Obstacle {
    /// For a person; empty when the objects show nothing.
    pub text: String,
    /// Requests that the node has to have room for beyond the plan: what it lacks of its promised resources, and pods on it that were created for
    /// it and are of no DaemonSet; at most what the node has.
    pub extra: Resources,
    /// Only pods are in its way that are older than the node and that a scheduler bound there. They needed a node, too: the purchase was not in vain.
    pub is_of_use: bool,
    /// Taints of the node that neither its NodeClaim has nor the pod tolerates, and that other new nodes may have, too.
    pub taints: Vec<Taint>,
}

/// What kept `pod` off the node of the NodeClaim `claim`.
pub fn obstacle(state: &ClusterState, claim: &str, pod: &PodRecord) -> Obstacle {
    let text = |text: String| Obstacle { text, ..Obstacle::default() };
    let Some(known) = state.claims.get(claim) else { return text("the NodeClaim is gone".to_owned()) };
    let Some(node) = state.node_of(known) else { return text("no Node registered".to_owned()) };
    let Ok(class) = pod.entry.as_ref().map(|entry| &entry.class) else { return Obstacle::default() };
    let startup: Vec<&Taint> = node.taints().filter(|taint| known.is_startup_taint(taint)).collect();
    if !known.has_condition(conditions::INITIALIZED) && !startup.is_empty() {
        return text(format!(
            "startup taint {} was not removed",
            names(startup.iter().map(|taint| taint.key.as_str()))
        ));
    }
    if node.taints().any(|taint| taint.key == labels::DISRUPTED_TAINT) {
        return text("it is being disrupted".to_owned());
    }
    let is_own = |taint: &&Taint| is_ephemeral(taint) || taint.key == labels::PLANNED_TAINT || has_taint(known, taint);
    let taints: Vec<&Taint> = node.taints().filter(|taint| !is_own(taint) && !class.tolerates(taint)).collect();
    let reported = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    let allocatable = reported.and_then(|map| Resources::from_map(map).ok()).unwrap_or_default();
    let is_reported = allocatable.cpu.0 > 0 && allocatable.memory.0 > 0;
    let mut extra = Resources::default();
    let mut room = allocatable.clone();
    let (mut strangers, mut of_scheduler) = (Vec::new(), Resources::default());
    let plan = state.planned.get(claim);
    for other in state.pods_on(&node.name_any()).filter(|other| other.active()) {
        let Ok(entry) = &other.entry else { continue };
        room.sub(&entry.class.requests);
        if other.daemon || plan.is_some_and(|plan| plan.pods.iter().any(|key| **key == *entry.key)) {
            continue;
        }
        if plan.is_some_and(|plan| may_succeed(plan, other)) {
            of_scheduler.add(&entry.class.requests);
            continue;
        }
        strangers.push(&*entry.key);
        // A pod that is made for a node is younger than it, also where a scheduler binds it.
        let needed_a_node = other.was_unbound && entry.created_at < node.created_at();
        if needed_a_node { &mut of_scheduler } else { &mut extra }.add(&entry.class.requests);
    }
    let fits = |room: &Resources| class.requests.fits(room);
    let is_of_use = is_reported && taints.is_empty() && !fits(&room) && {
        let mut without = room.clone();
        without.add(&of_scheduler);
        fits(&without)
    };
    let lacking: Vec<String> = class
        .requests
        .iter()
        .filter(|(resource, request)| is_reported && *request > 0 && *request > room.get(resource))
        .map(|(resource, _)| resource.to_owned())
        .collect();
    if let Some(promised) = known.status.as_ref().and_then(|status| Resources::from_map(&status.allocatable).ok())
        && is_reported
    {
        for (resource, amount) in promised.foreseeable().iter() {
            let missing = amount - allocatable.get(resource);
            extra.set(resource, extra.get(resource).saturating_add(missing.max(0)));
        }
    }
    let text = if !taints.is_empty() {
        format!("it has the taint {}", names(taints.iter().map(|taint| taint.key.as_str())))
    } else if lacking.is_empty() {
        String::new()
    } else if strangers.is_empty() {
        format!("it lacks {}", lacking.join(", "))
    } else {
        format!(
            "it lacks {}, pods that were not planned there are {}",
            lacking.join(", "),
            names(strangers.into_iter())
        )
    };
    if lacking.is_empty() {
        extra = Resources::default();
    }
    // A tenant may bind any pod to the node.
    for (resource, most) in allocatable.iter() {
        extra.set(resource, extra.get(resource).min(most));
    }
    let taints = taints.into_iter().filter(|taint| !is_of_state(taint)).cloned().collect();
    Obstacle { text, extra, is_of_use, taints }
}

/// Whether a pod may be the successor of a displaced pod of the plan.
fn may_succeed(plan: &PlanRecord, pod: &PodRecord) -> bool {
    let owner = pod.entry.as_ref().ok().and_then(|entry| entry.owner.as_deref());
    let key = owner.map(|uid| (pod.namespace.clone(), uid.to_owned()));
    plan.owners.iter().any(|(original, owner)| Some(owner_key(original, owner)) == key)
}

/// Whether a taint is about the present state of its node, such as that it is cordoned or lacks memory: other new nodes need not have it.
fn is_of_state(taint: &Taint) -> bool {
    ["node.kubernetes.io/", "node.cloudprovider.kubernetes.io/"].iter().any(|prefix| taint.key.starts_with(prefix))
}

fn has_taint(claim: &NodeClaim, taint: &Taint) -> bool {
    claim.is_startup_taint(taint)
        || claim.spec.taints.iter().any(|own| own.key == taint.key && own.effect == taint.effect)
}

fn names<'a>(all: impl Iterator<Item = &'a str>) -> String {
    let mut all: Vec<&str> = all.collect();
    let more = all.len().saturating_sub(MAX_NAMES);
    all.truncate(MAX_NAMES);
    let joined = all.join(", ");
    if more > 0 { format!("{joined} and {more} more") } else { joined }
}

/// What new nodes of a NodePool had that plans do not know, for the next plan of the pods that they did not take.
#[derive(Debug, Default)]
pub struct Seen {
    /// Requests that a node needs room for.
    extra: Resources,
    /// A node that was planned with `extra` needed more: it is not constant, and is not planned with again. Nodes would grow without a bound.
    grows: bool,
    taints: Vec<Taint>,
    at: UnixMillis,
    /// The pass that learned it last.
    pub pass: u64,
    /// A hash of what new nodes were like then.
    pub supply: u64,
}

impl Seen {
    /// Considers another node, which was planned with what is known if `is_planned_with`.
    pub fn learn(&mut self, obstacle: &Obstacle, is_planned_with: bool, supply: u64, pass: u64, now: UnixMillis) {
        let known = self.extra.clone();
        self.extra.raise_to(&obstacle.extra);
        self.grows |= is_planned_with && !known.is_zero() && self.extra != known;
        for taint in &obstacle.taints {
            if self.taints.len() < MAX_TAINTS && !self.taints.contains(taint) {
                self.taints.push(taint.clone());
            }
        }
        (self.at, self.pass, self.supply) = (now, pass, supply);
    }

    /// Forgets what is too old. Returns whether anything is left.
    pub fn lasts(&mut self, now: UnixMillis) -> bool {
        if self.at.is_older_than(TAINTS_LAST, now) {
            self.taints.clear();
        }
        !self.at.is_older_than(EXTRA_LASTS, now)
    }

    /// Adds it to the NodePool of this name: the taints, and room for one more DaemonSet.
    pub fn amend(&self, problem: &mut Problem, pool: &str) {
        let Some(found) = problem.pools.iter_mut().find(|other| *other.name == *pool) else { return };
        found.taints.extend(self.taints.iter().cloned());
        if self.grows || self.extra.is_zero() {
            return;
        }
        let mut of_pool = NodeTerm::default();
        of_pool.labels.require(labels::NODE_POOL, &ValueSet::one(pool));
        let class = PodClass {
            requests: self.extra.clone(),
            node_terms: vec![of_pool],
            tolerations: vec![Toleration { exists: true, ..Toleration::default() }],
            ..PodClass::default()
        };
        let key = Arc::from(format!("/seen on nodes of NodePool {pool}"));
        problem.daemons.push(Daemon { key, class: Arc::new(class), labels: Arc::default() });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::time::UnixMillis;
    use stowage_test_objects as objects;

    use super::*;

    fn found(claim: &Value, node: &Value, running: &[(&str, &str)]) -> Obstacle {
        let state = state(claim, node, running);
        obstacle(&state, "c", &state.pods["n/a"])
    }

    fn state(claim: &Value, node: &Value, running: &[(&str, &str)]) -> ClusterState {
        let mut state = ClusterState::default();
        let mut status = objects::launched("i", &["Launched", "Registered", "Initialized"]);
        status["allocatable"] = json!({"cpu": "2", "memory": "4Gi", "pods": "10"});
        let mut whole = json!({"metadata": {"annotations": {(labels::PLANNED_PODS): "[\"n/a\", \"n/planned\"]"}}, "status": status});
        json_patch::merge(&mut whole, claim);
        state.apply_claim(objects::claim("c", &whole));
        let allocatable = json!({"cpu": "2", "memory": "4Gi", "pods": "10"});
        let mut whole = json!({"spec": {"providerID": "aws:///z/i"}, "status": {"allocatable": allocatable}});
        json_patch::merge(&mut whole, node);
        state.apply_node(objects::node("x", &whole));
        let pod = |name: &str, cpu: &str, node: Option<&str>| {
            let containers = json!([{"name": "c", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]);
            objects::pod(name, &json!({"spec": {"containers": containers, "nodeName": node}}))
        };
        for (name, cpu) in running {
            state.apply_pod(&pod(name, cpu, Some("x")), UnixMillis(1));
        }
        state.apply_pod(&pod("a", "1500m", None), UnixMillis(1));
        state
    }

    #[test]
    fn what_the_objects_show_is_named() {
        let tainted = |key: &str| json!({"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
        let startup =
            json!({"spec": {"startupTaints": [{"key": "s", "effect": "NoSchedule"}]}, "status": {"conditions": null}});
        let own = json!({"spec": {"taints": [{"key": "t", "effect": "NoSchedule"}]}});
        let nothing = json!({});
        for (claim, node, running, text) in [
            (&nothing, &nothing, &[][..], ""),
            (&nothing, &nothing, &[("planned", "200m")], ""),
            (&nothing, &tainted("t"), &[], "it has the taint t"),
            (&nothing, &tainted(labels::PLANNED_TAINT), &[], ""),
            (&nothing, &tainted("node.kubernetes.io/not-ready"), &[], ""),
            (
                &nothing,
                &tainted("node.kubernetes.io/unschedulable"),
                &[],
                "it has the taint node.kubernetes.io/unschedulable",
            ),
            (&nothing, &tainted(labels::DISRUPTED_TAINT), &[], "it is being disrupted"),
            (&own, &tainted("t"), &[], ""),
            (&startup, &tainted("s"), &[], "startup taint s was not removed"),
            (&nothing, &nothing, &[("b", "1")], "it lacks cpu, pods that were not planned there are n/b"),
            (&nothing, &json!({"status": {"allocatable": {"cpu": "1"}}}), &[], "it lacks cpu"),
        ] {
            assert_eq!(found(claim, node, running).text, text, "{claim} {node} {running:?}");
        }
    }

    #[test]
    fn other_new_nodes_may_have_its_taints_but_not_its_state() {
        let learned = |key: &str| {
            let node = json!({"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
            !found(&json!({}), &node, &[]).taints.is_empty()
        };
        assert!(learned("t"));
        for key in
            ["node.kubernetes.io/unschedulable", "node.cloudprovider.kubernetes.io/shutdown", labels::DISRUPTED_TAINT]
        {
            assert!(!learned(key), "{key}");
        }
    }

    #[test]
    fn a_node_that_takes_other_pods_that_needed_one_is_of_use() {
        let mut state = ClusterState::default();
        let status = objects::launched("i", &["Launched", "Registered", "Initialized"]);
        state.apply_claim(objects::claim("c", &json!({"status": status})));
        let (before, at) = ("2026-01-01T00:00:09Z", "2026-01-01T00:00:10Z");
        let node = json!({"metadata": {"creationTimestamp": at}, "spec": {"providerID": "aws:///z/i"},
            "status": {"allocatable": {"cpu": "2", "memory": "4Gi", "pods": "9"}}});
        state.apply_node(objects::node("x", &node));
        let put_at = |state: &mut ClusterState, name: &str, cpu: &str, node: Option<&str>, created: &str| {
            let containers = json!([{"name": "c", "resources": {"requests": {"cpu": cpu}}}]);
            let spec = json!({"containers": containers, "nodeName": node});
            let pod = objects::pod(name, &json!({"metadata": {"creationTimestamp": created}, "spec": spec}));
            state.apply_pod(&pod, UnixMillis(1));
        };
        let put = |state: &mut ClusterState, name: &str, cpu: &str, node| put_at(state, name, cpu, node, before);
        let found = |state: &ClusterState| {
            let found = obstacle(state, "c", &state.pods["n/a"]);
            (found.is_of_use, found.extra.cpu.0)
        };
        put(&mut state, "a", "1500m", None);
        assert_eq!(found(&state), (false, 0), "the pod fits");
        put(&mut state, "other", "1", None);
        put(&mut state, "other", "1", Some("x"));
        assert_eq!(found(&state), (true, 0), "a scheduler bound it");
        put(&mut state, "intruder", "1", Some("x"));
        assert_eq!(found(&state), (false, 1_000), "without the other pod it fits no better");
        for name in ["intruder", "other"] {
            state.delete_pod(&format!("n/{name}"), UnixMillis(2));
        }
        put_at(&mut state, "pinned", "1", None, at);
        put_at(&mut state, "pinned", "1", Some("x"), at);
        assert_eq!(found(&state), (false, 1_000), "it may have been made for the node");
        put(&mut state, "huge", "100", Some("x"));
        assert_eq!(found(&state), (false, 2_000), "no more than the node has");
    }

    #[test]
    fn the_successors_of_its_displaced_pods_are_no_load_of_new_nodes() {
        let owned = |namespace: &str, owner: &str| {
            let owner =
                json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": owner, "controller": true}]);
            let containers = json!([{"name": "c", "resources": {"requests": {"cpu": "1"}}}]);
            let meta = json!({"namespace": namespace, "ownerReferences": owner});
            json!({"metadata": meta, "spec": {"containers": containers, "nodeName": "x"}})
        };
        let plan = json!({(labels::PLANNED_OWNERS): json!({"n/planned": {"uid": "rs", "at_ms": 0}}).to_string()});
        let found = |namespace, owner| {
            let mut state = state(&json!({"metadata": {"annotations": plan}}), &json!({}), &[]);
            state.apply_pod(&objects::pod("other", &owned(namespace, owner)), UnixMillis(1));
            let found = obstacle(&state, "c", &state.pods["n/a"]);
            (found.is_of_use, found.extra.cpu.0, found.text)
        };
        assert_eq!(found("n", "rs"), (true, 0, "it lacks cpu".to_owned()));
        assert_eq!(found("n", "other").1, 1_000);
        assert_eq!(found("m", "rs").1, 1_000, "a copied UID in another namespace");
    }

    #[test]
    fn the_next_node_needs_room_for_strangers_and_for_what_was_missing() {
        let smaller = json!({"status": {"allocatable": {"cpu": "1800m"}}});
        let found = |node: &Value, running: &[(&str, &str)]| found(&json!({}), node, running).extra;
        assert_eq!(found(&smaller, &[("b", "600m"), ("planned", "100m")]).cpu.0, 600 + 200);
        assert_eq!(found(&smaller, &[("b", "600m")]).memory, stowage_model::units::Bytes::from_mib(1024));
        assert!(found(&json!({}), &[("planned", "1")]).is_zero(), "a planned pod is in the plan");
        assert!(found(&json!({}), &[("b", "100m")]).is_zero(), "the pod fits beside it");
    }
}
