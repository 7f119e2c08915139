//! The guard of a fresh node: for as long as its pods are on their way, a taint that only they tolerate keeps all others off.
//!
//! A nomination says where a pod is tried first, and holds room against others, but it can't keep the pod from another node,
//! and of pods with a hard spread no more than `maxSkew` can be nominated to one node. Where no extender filters, this does.

use std::collections::{HashMap, HashSet};

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::context::{Context, Placement, is_conflict, is_not_found};
use crate::api::{NodeClaim, labels};
use crate::cluster::holds::Holds;
use crate::cluster::{State, now_ms};

/// A node whose own pods are all there is guarded for so long after it was opened, milliseconds, while pods wait for other
/// nodes: they would take what room is left, and theirs would be bought for nothing.
const SETTLE_MS: i64 = 15_000;
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

/// Pods planned on a claim's node that its guard would keep off.
fn strangers<'a>(state: &'a State, holds: &'a Holds, claim: &'a NodeClaim) -> impl Iterator<Item = Admission> + 'a {
    let uid = claim.uid().unwrap_or_default();
    let live = holds.by_claim.get(&claim.name_any()).into_iter().flatten();
    let waiting = live.filter_map(|hold| state.pods.get(hold.pod.as_ref()?)).filter(|pod| pod.node.is_none());
    waiting.filter(move |pod| !pod.admitted.iter().any(|admitted| **admitted == *uid)).map(move |pod| Admission {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        claim: claim.uid().unwrap_or_default(),
        first: !pod.tolerates,
    })
}

/// Whether every pod that waits for a claim's node would pass its guard.
pub fn passes_all(state: &State, holds: &Holds, claim: &NodeClaim) -> bool {
    strangers(state, holds, claim).next().is_none()
}

/// Pods to admit: those planned on nodes that are guarded, or will be.
fn to_admit(state: &State, holds: &Holds) -> Vec<Admission> {
    let claims = holds.by_claim.keys().filter_map(|name| state.claims.get(name));
    let guarded = claims.filter(|claim| {
        state.node_of(claim).is_none_or(|node| of(node).is_some() || !node.labels().contains_key(labels::REGISTERED))
    });
    guarded.flat_map(|claim| strangers(state, holds, claim)).collect()
}

/// Nodes that need their guard no longer.
fn relieved(state: &State, holds: &Holds, placement: Placement, now_ms: i64) -> Vec<String> {
    let awaited: HashSet<String> = holds
        .by_claim
        .keys()
        .filter_map(|name| state.node_of(state.claims.get(name)?).map(|node| node.name_any()))
        .collect();
    let needed = |name: &str, guard: &Taint| {
        let since = guard.time_added.as_ref().map_or(0, |time| time.0.as_millisecond());
        let settling = !holds.by_pod.is_empty() && now_ms - since < SETTLE_MS;
        placement == Placement::Nominate && (awaited.contains(name) || settling)
    };
    let guarded = state.nodes.iter().filter_map(|(name, node)| Some((name, of(node)?)));
    guarded.filter(|(name, guard)| !needed(name, guard)).map(|(name, _)| name.clone()).collect()
}

/// What the leader remembers between two looks.
#[derive(Debug, Default)]
pub struct Asked {
    /// When each pod was last admitted, milliseconds since the epoch.
    at: HashMap<String, i64>,
}

/// One look of the leader: admits pods and takes down guards that have done their work.
pub async fn keep(ctx: &Context, holds: &Holds, asked: &mut Asked) {
    let now = now_ms();
    let (mut admissions, relieved) = {
        let state = ctx.cluster.read();
        let admissions =
            if ctx.settings.placement == Placement::Nominate { to_admit(&state, holds) } else { Vec::new() };
        (admissions, relieved(&state, holds, ctx.settings.placement, now))
    };
    asked.at.retain(|_, at| now - *at < AGAIN_MS);
    admissions.retain(|pod| !asked.at.contains_key(&pod.uid));
    asked.at.extend(admissions.iter().map(|pod| (pod.uid.clone(), now)));
    let mut admitted = stream::iter(admissions.into_iter().map(|pod| admit(ctx, pod))).buffer_unordered(CONCURRENCY);
    while admitted.next().await.is_some() {}
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

async fn admit(ctx: &Context, pod: Admission) {
    let toleration =
        json!({"key": labels::GUARD_TAINT, "operator": "Equal", "value": pod.claim, "effect": "NoSchedule"});
    let (path, value) =
        if pod.first { ("/spec/tolerations", json!([toleration])) } else { ("/spec/tolerations/-", toleration) };
    let operations = json!([
        {"op": "test", "path": "/metadata/uid", "value": pod.uid},
        {"op": "add", "path": path, "value": value},
    ]);
    let Ok(patch) = serde_json::from_value(operations) else { return };
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &pod.namespace);
    match api.patch(&pod.name, &PatchParams::default(), &Patch::<()>::Json(patch)).await {
        Ok(changed) => ctx.cluster.update(|state| state.apply_pod(&changed, now_ms())),
        Err(error) if is_not_found(&error) || is_conflict(&error) => {}
        Err(error) => {
            tracing::warn!(pod = pod.name, %error, "pod could not be admitted to its node, which will be opened to all");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATER: &str = "2099-01-01T00:00:00Z";

    fn claim(state: &mut State, name: &str, pods: &[&str]) {
        state.apply_claim(
            serde_json::from_value(json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim",
                "metadata": {"name": name, "uid": format!("uid-{name}"), "annotations": {
                    (labels::PLANNED_PODS): json!(pods).to_string(), (labels::HOLD_UNTIL): LATER}},
                "spec": {"requirements": [], "nodeClassRef": {"group": "g", "kind": "k", "name": "n"}},
                "status": {"providerID": format!("aws:///z/{name}")}}))
            .unwrap(),
        );
    }

    fn node(state: &mut State, name: &str, guarded_at: Option<&str>) {
        let taints = guarded_at.map(|at| {
            json!([{"key": labels::GUARD_TAINT, "value": format!("uid-{name}"), "effect": "NoSchedule", "timeAdded": at}])
        });
        let node = json!({"metadata": {"name": format!("node-{name}"), "labels": {(labels::REGISTERED): "true"}},
            "spec": {"providerID": format!("aws:///z/{name}"), "taints": taints}});
        state.apply_node(serde_json::from_value(node).unwrap());
    }

    fn pod(state: &mut State, name: &str, tolerations: serde_json::Value, bound: Option<&str>) {
        let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name},
            "spec": {"containers": [], "tolerations": tolerations, "nodeName": bound}});
        state.apply_pod(&serde_json::from_value(pod).unwrap(), 1);
    }

    #[test]
    fn planned_pods_are_admitted_once_to_nodes_that_are_guarded_or_will_be() {
        let admitted = |node_of: fn(&mut State), tolerations: serde_json::Value| {
            let mut state = State::default();
            claim(&mut state, "c", &["n/a"]);
            node_of(&mut state);
            pod(&mut state, "a", tolerations, None);
            to_admit(&state, &state.holds(5))
                .into_iter()
                .map(|pod| (pod.name, pod.claim, pod.first))
                .collect::<Vec<_>>()
        };
        let want = |first| vec![("a".to_owned(), "uid-c".to_owned(), first)];
        let guarded: fn(&mut State) = |state| node(state, "c", Some(LATER));
        assert_eq!(admitted(|_| {}, json!(null)), want(true), "its node is still booting");
        assert_eq!(admitted(guarded, json!([{"operator": "Exists", "key": "x"}])), want(false));
        let own = |value: &str| json!([{"key": labels::GUARD_TAINT, "value": value, "effect": "NoSchedule"}]);
        assert_eq!(admitted(guarded, own("uid-other")), want(false), "planned anew");
        assert_eq!(admitted(guarded, own("uid-c")), []);
        assert_eq!(admitted(|state| node(state, "c", None), json!(null)), [], "open to all");
    }

    #[test]
    fn a_guard_goes_when_its_pods_are_there_and_the_others_have_had_their_time() {
        let second = 1_000;
        let relieved = |own: Option<&str>, other: Option<&str>, placement, now| {
            let mut state = State::default();
            claim(&mut state, "c", &["n/a"]);
            claim(&mut state, "d", &["n/b"]);
            node(&mut state, "c", Some("1970-01-01T00:00:00Z"));
            pod(&mut state, "a", json!(null), own);
            pod(&mut state, "b", json!(null), other);
            node(&mut state, "d", None);
            relieved(&state, &state.holds(now), placement, now)
        };
        let gone = vec!["node-c".to_owned()];
        assert_eq!(relieved(None, Some("node-d"), Placement::Nominate, second), Vec::<String>::new());
        assert_eq!(relieved(Some("node-c"), None, Placement::Nominate, second), Vec::<String>::new());
        assert_eq!(relieved(Some("node-c"), None, Placement::Nominate, SETTLE_MS), gone);
        assert_eq!(relieved(Some("node-c"), Some("node-d"), Placement::Nominate, second), gone);
        assert_eq!(relieved(None, None, Placement::Extender, second), gone, "left over from another mode");
    }

    #[test]
    fn a_guard_is_passed_by_the_pods_it_was_put_up_for() {
        let mut state = State::default();
        claim(&mut state, "c", &["n/a"]);
        let claim = std::sync::Arc::clone(&state.claims["c"]);
        let guard = taint(&claim, 7_000).unwrap();
        assert_eq!((guard.value.as_deref(), guard.effect.as_str()), (Some("uid-c"), "NoSchedule"));
        pod(&mut state, "a", json!(null), None);
        assert!(!passes_all(&state, &state.holds(5), &claim));
        pod(&mut state, "a", json!([{"key": guard.key, "value": guard.value, "effect": guard.effect}]), None);
        assert!(passes_all(&state, &state.holds(5), &claim));
    }
}
