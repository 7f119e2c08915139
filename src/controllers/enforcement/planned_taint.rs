//! The guard of a fresh node: for as long as its pods are on their way, a taint that only they tolerate keeps all others off.
//!
//! A nomination says where a pod is tried first, and holds room against others, but it can't keep the pod from another node,
//! and of pods with a hard spread no more than `maxSkew` can be nominated to one node. Where no extender filters, this does.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::api::NodeClaim;
use crate::controllers::context::{Context, PlacementMode, is_conflict, is_not_found};
use crate::controllers::provisioning::provisioner::HOLD_READY_MS;
use crate::model::labels;
use crate::model::pod_class::PodClass;
use crate::state::holds::Holds;
use crate::state::snapshot::offering_of;
use crate::state::{ClusterState, PodRecord, now_ms};

/// Pods of a hard spread are admitted so many steps of its `maxSkew` ahead of those that are bound.
const STEPS: i64 = 2;
/// A pod whose node has been open for so long is admitted out of step, milliseconds: where its siblings' nodes don't come, it
/// is for the scheduler to say whether it may go first.
const STEP_PATIENCE_MS: i64 = 10_000;
/// A pod is admitted again no sooner than this, milliseconds.
const AGAIN_MS: i64 = 1_000;
/// Pods admitted at the same time.
const CONCURRENCY: usize = 32;

/// The guard of a claim's node, put up at `now_ms`.
pub fn taint(claim: &NodeClaim, now_ms: i64) -> Option<Taint> {
    Some(Taint {
        key: labels::GUARD_TAINT.into(),
        value: Some(claim.uid()?),
        effect: "NoSchedule".into(),
        time_added: Timestamp::from_millisecond(now_ms).ok().map(Time),
    })
}

/// The guard that a node has.
pub fn of(node: &Node) -> Option<&Taint> {
    node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).find(|taint| taint.key == labels::GUARD_TAINT)
}

/// When a guard was put up, milliseconds since the epoch.
fn put_up_ms(guard: &Taint) -> i64 {
    guard.time_added.as_ref().map_or(0, |time| time.0.as_millisecond())
}

/// A pod to admit through the guard of the node that it is planned on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Admission {
    namespace: String,
    name: String,
    uid: String,
    /// UID of the NodeClaim.
    claim: String,
    /// It has no toleration yet.
    first: bool,
}

/// Pods that wait for a claim's node.
fn waiting<'a>(state: &'a ClusterState, holds: &'a Holds, claim: &str) -> impl Iterator<Item = &'a PodRecord> {
    let live = holds.by_claim.get(claim).into_iter().flatten();
    live.filter_map(|hold| state.pods.get(hold.pod.as_ref()?)).filter(|pod| pod.node.is_none())
}

fn is_admitted(pod: &PodRecord, claim: &NodeClaim) -> bool {
    claim.metadata.uid.as_ref().is_some_and(|uid| pod.admitted.iter().any(|admitted| **admitted == **uid))
}

/// Topology keys that a pod must spread over in step with its siblings, and by how much it may be ahead. A host name is a
/// domain of its own for every node: no step is to be kept.
fn paces(pod: &PodRecord) -> impl Iterator<Item = (&str, i64)> {
    let spread = pod.entry.iter().flat_map(|entry| &entry.class.spread);
    spread
        .filter(|spread| spread.hard && *spread.key != *labels::HOSTNAME)
        .map(|spread| (&*spread.key, spread.max_skew))
}

/// Siblings that wait in one domain.
#[derive(Clone, Copy, Debug, Default)]
struct Domain {
    waiting: i64,
    admitted: i64,
}

impl Domain {
    fn left(self) -> i64 {
        self.waiting - self.admitted
    }
}

/// Pods of one class by topology key and domain.
type Steps<'a> = HashMap<(*const PodClass, &'a str), BTreeMap<String, Domain>>;

/// The domain of a claim's node.
fn domain_of(state: &ClusterState, claim: &NodeClaim, key: &str) -> Option<String> {
    let node = state.node_of(claim).and_then(|node| node.labels().get(key));
    node.or_else(|| claim.labels().get(key)).cloned().or_else(|| {
        let (instance_type, zone, capacity_type) = offering_of(claim)?;
        match key {
            labels::ZONE => Some(zone),
            labels::CAPACITY_TYPE => Some(capacity_type.as_str().to_owned()),
            labels::INSTANCE_TYPE => Some(instance_type),
            _ => None,
        }
    })
}

/// Pods to admit: those planned on guarded nodes. The toleration is what makes the scheduler try a pod again, so it is not given
/// before the node is open, and pods with a hard spread get it in the order in which they can be bound: none is tried in vain.
fn to_admit(state: &ClusterState, holds: &Holds, now_ms: i64) -> Vec<Admission> {
    let mut out = Vec::new();
    let mut steps: Steps<'_> = HashMap::new();
    let mut candidates = Vec::new();
    for claim in holds.by_claim.keys().filter_map(|name| state.claims.get(name)) {
        let since = state.node_of(claim).and_then(|node| of(node)).map(put_up_ms);
        for pod in waiting(state, holds, &claim.name_any()) {
            let admitted = is_admitted(pod, claim);
            let mut domains = Vec::new();
            for (key, skew) in paces(pod) {
                let (Ok(entry), Some(domain)) = (&pod.entry, domain_of(state, claim, key)) else { continue };
                let step = (Arc::as_ptr(&entry.class), key);
                let siblings = steps.entry(step).or_default().entry(domain.clone()).or_default();
                siblings.waiting += 1;
                siblings.admitted += i64::from(admitted);
                domains.push((step, domain, skew));
            }
            let Some(since) = since.filter(|_| !admitted) else { continue };
            let admission = Admission {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                claim: claim.uid().unwrap_or_default(),
                first: !pod.tolerates,
            };
            if domains.is_empty() || now_ms - since >= STEP_PATIENCE_MS {
                out.push(admission);
            } else {
                candidates.push((domains, admission));
            }
        }
    }
    // One round admits a pod of each domain at most, so that domains take turns.
    let mut going = true;
    while std::mem::take(&mut going) {
        let mut turn: HashSet<(*const PodClass, &str, String)> = HashSet::new();
        candidates.retain(|(domains, admission)| {
            let may = domains.iter().all(|((class, key), domain, skew)| {
                let siblings = &steps[&(*class, *key)];
                let most = siblings.values().map(|domain| domain.left()).max().unwrap_or(0);
                let own = siblings[domain];
                own.left() + skew > most
                    && own.admitted < skew * STEPS
                    && !turn.contains(&(*class, *key, domain.clone()))
            });
            if may {
                for ((class, key), domain, _) in domains {
                    turn.insert((*class, *key, domain.clone()));
                }
                out.push(admission.clone());
                going = true;
            }
            !may
        });
        for (class, key, domain) in turn {
            if let Some(siblings) = steps.get_mut(&(class, key)).and_then(|siblings| siblings.get_mut(&domain)) {
                siblings.admitted += 1;
            }
        }
    }
    out
}

/// Nodes that need their guard no longer. A node whose own pods are all there is guarded while pods wait for other nodes: they
/// would take what room is left, and theirs would be bought for nothing; but no longer than the hold of a fresh node.
fn relieved(
    state: &ClusterState,
    holds: &Holds,
    placement: PlacementMode,
    refused: &HashSet<String>,
    now_ms: i64,
) -> Vec<String> {
    let held: HashSet<&str> =
        holds.by_claim.keys().filter_map(|claim| state.claims.get(claim)?.metadata.uid.as_deref()).collect();
    let needed = |guard: &Taint| {
        let in_the_way = guard.value.as_ref().is_some_and(|claim| refused.contains(claim));
        let young = now_ms - put_up_ms(guard) < HOLD_READY_MS;
        let own = guard.value.as_deref().is_some_and(|claim| held.contains(claim));
        placement == PlacementMode::Nominate && !in_the_way && (own || young) && !holds.by_claim.is_empty()
    };
    let guarded = state.nodes.iter().filter_map(|(name, node)| Some((name, of(node)?)));
    guarded.filter(|(_, guard)| !needed(guard)).map(|(name, _)| name.clone()).collect()
}

/// What the leader remembers between two looks.
#[derive(Debug, Default)]
pub struct Asked {
    /// When each pod was last admitted, milliseconds since the epoch.
    at: HashMap<String, i64>,
    /// How often in a row the API server would not have a pod admitted, by the pod's UID.
    refusals: HashMap<String, u32>,
    /// UIDs of NodeClaims whose pods could not be admitted: their guard must not keep them off.
    refused: HashSet<String>,
}

/// A pod that the API server would not have admitted so often in a row may not be: once may be a race, such as a pod of the
/// same name that came in its place.
const REFUSALS: u32 = 3;

/// One look of the leader: admits pods and takes down guards that have done their work.
pub async fn keep(ctx: &Context, holds: &Holds, asked: &mut Asked) {
    let now = now_ms();
    let (mut admissions, relieved) = {
        let state = ctx.cluster.read();
        let admissions =
            if ctx.settings.placement == PlacementMode::Nominate { to_admit(&state, holds, now) } else { Vec::new() };
        (admissions, relieved(&state, holds, ctx.settings.placement, &asked.refused, now))
    };
    asked.at.retain(|_, at| now - *at < AGAIN_MS);
    admissions.retain(|pod| !asked.at.contains_key(&pod.uid));
    asked.at.extend(admissions.iter().map(|pod| (pod.uid.clone(), now)));
    let mut admitted = stream::iter(admissions.into_iter().map(|pod| admit(ctx, pod))).buffer_unordered(CONCURRENCY);
    while let Some((pod, admitted)) = admitted.next().await {
        if admitted {
            asked.refusals.remove(&pod.uid);
            continue;
        }
        let refusals = asked.refusals.entry(pod.uid).or_default();
        *refusals += 1;
        if *refusals >= REFUSALS {
            tracing::warn!(pod = pod.name, "pod may not be admitted, its node is opened to all");
            asked.refused.insert(pod.claim);
        }
    }
    drop(admitted);
    if !asked.refused.is_empty() || !asked.refusals.is_empty() {
        let state = ctx.cluster.read();
        let waiting: HashSet<&String> =
            state.unbound.iter().filter_map(|key| Some(&state.pods.get(key)?.uid)).collect();
        asked.refusals.retain(|pod, _| waiting.contains(pod));
        let known: HashSet<&String> = state.claims.values().filter_map(|claim| claim.metadata.uid.as_ref()).collect();
        asked.refused.retain(|claim| known.contains(claim));
    }
    for name in relieved {
        let Some(node) = ctx.cluster.read().nodes.get(&name).cloned() else { continue };
        let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
        let taints: Vec<&Taint> = taints.filter(|taint| taint.key != labels::GUARD_TAINT).collect();
        let patch = json!({"metadata": {"resourceVersion": node.resource_version()}, "spec": {"taints": taints}});
        match ctx.patch_node(&name, &patch).await {
            Ok(()) => tracing::debug!(node = name, "guard taken down"),
            Err(error) if is_not_found(&error) || is_conflict(&error) => {}
            Err(error) => tracing::warn!(node = name, %error, "guard could not be taken down, trying again"),
        }
    }
}

/// Admits a pod. False where the API server will not have it.
async fn admit(ctx: &Context, pod: Admission) -> (Admission, bool) {
    let toleration =
        json!({"key": labels::GUARD_TAINT, "operator": "Equal", "value": &pod.claim, "effect": "NoSchedule"});
    let (path, value) =
        if pod.first { ("/spec/tolerations", json!([toleration])) } else { ("/spec/tolerations/-", toleration) };
    let operations = json!([
        {"op": "test", "path": "/metadata/uid", "value": &pod.uid},
        {"op": "add", "path": path, "value": value},
    ]);
    let Ok(patch) = serde_json::from_value(operations) else { return (pod, false) };
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &pod.namespace);
    match api.patch(&pod.name, &PatchParams::default(), &Patch::<()>::Json(patch)).await {
        Ok(changed) => ctx.cluster.update(|state| state.apply_pod(&changed, now_ms())),
        Err(error) if is_not_found(&error) || is_conflict(&error) => {}
        Err(kube::Error::Api(status)) if (400..500).contains(&status.code) && status.code != 429 => {
            tracing::info!(pod = pod.name, error = %status, "pod was not admitted to its node");
            return (pod, false);
        }
        Err(error) => tracing::warn!(pod = pod.name, %error, "pod could not be admitted to its node, trying again"),
    }
    (pod, true)
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::objects;

    const LATER: &str = "2099-01-01T00:00:00Z";

    fn claim(state: &mut ClusterState, name: &str, pods: &[&str]) {
        let plan = json!({(labels::PLANNED_PODS): json!(pods).to_string(), (labels::HOLD_UNTIL): LATER});
        let status = objects::launched(name, &[]);
        state.apply_claim(objects::claim(name, &json!({"metadata": {"annotations": plan}, "status": status})));
    }

    fn node(state: &mut ClusterState, name: &str, guarded_at: Option<&str>) {
        let taints = guarded_at.map(|at| {
            json!([{"key": labels::GUARD_TAINT, "value": format!("uid-{name}"), "effect": "NoSchedule", "timeAdded": at}])
        });
        let spec = json!({"providerID": format!("aws:///z/{name}"), "taints": taints});
        let own = json!({(labels::REGISTERED): "true"});
        state.apply_node(objects::node(&format!("node-{name}"), &json!({"metadata": {"labels": own}, "spec": spec})));
    }

    fn pod(state: &mut ClusterState, name: &str, tolerations: serde_json::Value, bound: Option<&str>) {
        state.apply_pod(&objects::pod(name, &json!({"spec": {"tolerations": tolerations, "nodeName": bound}})), 1);
    }

    #[test]
    fn planned_pods_are_admitted_once_when_their_node_is_open_and_guarded() {
        let admitted = |node_of: fn(&mut ClusterState), tolerations: serde_json::Value| {
            let mut state = ClusterState::default();
            claim(&mut state, "c", &["n/a"]);
            node_of(&mut state);
            pod(&mut state, "a", tolerations, None);
            let pods = to_admit(&state, &state.holds(5), 5).into_iter();
            pods.map(|pod| (pod.name, pod.claim, pod.first)).collect::<Vec<_>>()
        };
        let want = |first| vec![("a".to_owned(), "uid-c".to_owned(), first)];
        let guarded: fn(&mut ClusterState) = |state| node(state, "c", Some(LATER));
        assert_eq!(admitted(|_| {}, json!(null)), [], "its node is still booting");
        assert_eq!(admitted(guarded, json!(null)), want(true));
        assert_eq!(admitted(guarded, json!([{"operator": "Exists", "key": "x"}])), want(false));
        let own = |value: &str| json!([{"key": labels::GUARD_TAINT, "value": value, "effect": "NoSchedule"}]);
        assert_eq!(admitted(guarded, own("uid-other")), want(false), "planned anew");
        assert_eq!(admitted(guarded, own("uid-c")), []);
        assert_eq!(admitted(|state| node(state, "c", None), json!(null)), [], "open to all");
    }

    #[test]
    fn pods_of_a_hard_spread_are_admitted_in_step() {
        let mut state = ClusterState::default();
        let put = |state: &mut ClusterState, name: &str, admitted: Option<&str>, bound: Option<&str>| {
            let tolerations = admitted.map(
                |claim| json!([{"key": labels::GUARD_TAINT, "value": format!("uid-{claim}"), "effect": "NoSchedule"}]),
            );
            let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {"containers": [], "nodeName": bound,
                "tolerations": tolerations, "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": labels::ZONE,
                    "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "s"}}}]}});
            state.apply_pod(&serde_json::from_value(pod).unwrap(), 1);
        };
        let zoned = |state: &mut ClusterState, name: &str, guarded_at: &str| {
            node(state, name, Some(guarded_at));
            let mut open = Node::clone(&state.nodes[&format!("node-{name}")]);
            open.metadata.labels.get_or_insert_default().insert(labels::ZONE.into(), format!("zone-{name}"));
            state.apply_node(open);
        };
        let admitted = |state: &ClusterState, now: i64| {
            let mut names: Vec<String> =
                to_admit(state, &state.holds(now), now).into_iter().map(|pod| pod.name).collect();
            names.sort();
            names.join(" ")
        };
        claim(&mut state, "x", &["n/x1", "n/x2", "n/x3", "n/x4"]);
        claim(&mut state, "y", &["n/y1", "n/y2", "n/y3", "n/y4"]);
        for name in ["x1", "x2", "x3", "x4", "y1", "y2", "y3", "y4"] {
            put(&mut state, name, None, None);
        }
        let opened = "1970-01-01T00:01:00Z";
        let soon = 61_000;
        zoned(&mut state, "x", opened);
        assert_eq!(admitted(&state, soon), "x1 x2", "the other claim's zone isn't known: no domain to keep step with");
        let mut known = NodeClaim::clone(&state.claims["y"]);
        known.metadata.labels.get_or_insert_default().insert(labels::ZONE.into(), "zone-y".into());
        state.apply_claim(known);
        assert_eq!(admitted(&state, soon), "x1", "one ahead of the other zone, whose node is not open");
        zoned(&mut state, "y", opened);
        assert_eq!(admitted(&state, soon), "x1 x2 y1 y2", "two steps of a pod each");
        put(&mut state, "x1", Some("x"), None);
        put(&mut state, "x2", Some("x"), None);
        put(&mut state, "y1", Some("y"), Some("node-y"));
        assert_eq!(admitted(&state, soon), "y2 y3", "as many in each zone, and no more than two on their way");
        assert_eq!(admitted(&state, 60_000 + STEP_PATIENCE_MS), "x3 x4 y2 y3 y4", "out of patience");
    }

    #[test]
    fn a_guard_goes_when_its_pods_are_there_and_the_others_have_had_their_time() {
        let second = 1_000;
        let relieved = |own: Option<&str>, other: Option<&str>, placement, refused: &[&str], now| {
            let mut state = ClusterState::default();
            claim(&mut state, "c", &["n/a"]);
            claim(&mut state, "d", &["n/b"]);
            node(&mut state, "c", Some("1970-01-01T00:00:00Z"));
            pod(&mut state, "a", json!(null), own);
            pod(&mut state, "b", json!(null), other);
            node(&mut state, "d", None);
            relieved(
                &state,
                &state.holds(now),
                placement,
                &refused.iter().map(|claim| (*claim).to_owned()).collect(),
                now,
            )
        };
        let gone = vec!["node-c".to_owned()];
        assert_eq!(relieved(None, Some("node-d"), PlacementMode::Nominate, &[], second), Vec::<String>::new());
        assert_eq!(relieved(Some("node-c"), None, PlacementMode::Nominate, &[], second), Vec::<String>::new());
        assert_eq!(relieved(None, None, PlacementMode::Nominate, &[], HOLD_READY_MS), Vec::<String>::new(), "held");
        assert_eq!(relieved(Some("node-c"), None, PlacementMode::Nominate, &[], HOLD_READY_MS), gone);
        assert_eq!(relieved(Some("node-c"), Some("node-d"), PlacementMode::Nominate, &[], second), gone);
        assert_eq!(relieved(None, None, PlacementMode::Extender, &[], second), gone, "left over from another mode");
        assert_eq!(
            relieved(None, None, PlacementMode::Nominate, &["uid-c"], second),
            gone,
            "a pod may not be admitted"
        );
    }
}
