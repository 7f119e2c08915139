//! The scheduler is made to follow the plan: nominations while a node is still closed, and a nudge to the scheduler whenever a
//! hold ends.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::api::NodeClaim;
use crate::controllers::context::{Context, PlacementMode, gone_is_fine, is_conflict, is_not_found};
use crate::controllers::enforcement::planned_taint;
use crate::controllers::node_claim::lifecycle;
use crate::controllers::provisioning::provisioner::HOLD_READY_MS;
use crate::model::labels;
use crate::model::pod_class::PodClass;
use crate::state::holds::Holds;
use crate::state::snapshot::{is_ephemeral, node_ready};
use crate::state::{ClusterState, PodRecord, created_ms, now_ms, rfc3339};

/// A node that isn't ready so long after it registered is opened all the same, milliseconds: something that has to run
/// on it first may not tolerate our taint.
const OPEN_PATIENCE_MS: i64 = 20_000;
/// Where the scheduler does as it likes, a hold only keeps a pod from being planned twice: it ends so long after the node
/// was opened, milliseconds.
const HOLD_OFF_MS: i64 = 10_000;
/// Wait between two looks at a node that isn't ready to be opened, milliseconds.
const OPEN_POLL_MS: i64 = 50;
/// Nominations under way at the same time.
const CONCURRENCY: usize = 32;
/// While pods wait for nodes that are open to them, the scheduler is nudged so often, milliseconds: it may have tried them
/// before the extender knew of what it knew itself, and nothing else need happen for it to try them again.
const NUDGE_MS: i64 = 2_000;
/// A pod is nominated again no sooner than this, milliseconds.
const RENOMINATE_MS: i64 = 200;
/// Where pods of a class are being bound as planned, holds of the others are kept up: a spread of hundreds of pods goes step by
/// step. So long after the last of them the class counts as stuck, milliseconds.
const PROGRESS_MS: i64 = 15_000;
/// A hold that ends within this is kept up, milliseconds.
const RENEW_MS: i64 = 20_000;
/// No hold is kept up on a node older than this, milliseconds.
const LONGEST_HOLD_MS: i64 = 600_000;
/// The state is looked at no more often than this.
const LOOK: Duration = Duration::from_millis(20);
/// The state is looked at at least this often.
const TICK: Duration = Duration::from_millis(500);

/// Nominates a new node's pods while its taint still keeps everyone off, then takes the taint off; without an extender a
/// [guard](guard) takes its place. Returns how long to wait before the next look, where it isn't time yet.
///
/// # Errors
/// The API server's, on writing the node or the claim.
pub async fn open(ctx: &Context, claim: &NodeClaim, node: &Node) -> Result<Option<i64>, kube::Error> {
    let name = node.name_any();
    let now = now_ms();
    let placement = ctx.settings.placement;
    let off = placement == PlacementMode::Off;
    let patient = !off && now - created_ms(&node.metadata) < OPEN_PATIENCE_MS;
    if patient && !can_open(claim, node) {
        return Ok(Some(OPEN_POLL_MS));
    }
    // Written before the nominations, so that nothing comes between them and the opening.
    let until = if off { now + HOLD_OFF_MS } else { now + HOLD_READY_MS };
    let planned = ctx.cluster.read().planned.get(&claim.name_any()).map_or(0, |planned| planned.until_ms);
    if planned > until || planned < now + HOLD_OFF_MS / 2 {
        let patch = json!({"metadata": {"annotations": {(labels::HOLD_UNTIL): rfc3339(until)}}});
        ctx.patch_claim(&claim.name_any(), &patch).await?;
    }
    let mut guard = None;
    if !off {
        let pods = {
            let state = ctx.cluster.read();
            let holds = state.holds(now);
            let held = holds.by_claim.contains_key(&claim.name_any());
            // What the node still lacks may come with a DaemonSet that would not tolerate the guard.
            if placement == PlacementMode::Nominate
                && held
                && can_open(claim, node)
                && lifecycle::is_complete(claim, node)
            {
                guard = planned_taint::taint(claim, now);
            }
            nominees(&state, &holds, placement, guard.is_some(), &claim.name_any(), &name)
        };
        if patient && !pods.is_empty() {
            nominate(ctx, &name, pods).await;
            // Opened at the next look, when our own watch shows the nominations.
            return Ok(Some(0));
        }
    }
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let taints =
        taints.filter(|taint| ![labels::UNREGISTERED_TAINT, labels::GUARD_TAINT].contains(&taint.key.as_str()));
    let taints: Vec<&Taint> = taints.chain(&guard).collect();
    let patch = json!({
        "metadata": {"resourceVersion": node.resource_version(), "labels": {(labels::REGISTERED): "true"}},
        "spec": {"taints": taints},
    });
    ctx.patch_node(&name, &patch).await?;
    tracing::info!(node = name, claim = claim.name_any(), guarded = guard.is_some(), "open");
    Ok(None)
}

/// Whether nothing but our own taint keeps planned pods off a node.
fn can_open(claim: &NodeClaim, node: &Node) -> bool {
    let closed = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).any(|taint| {
        taint.key != labels::UNREGISTERED_TAINT && is_ephemeral(taint) && !lifecycle::is_startup(claim, taint)
    });
    node_ready(node) && !closed
}

/// A pod to nominate.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Nominee {
    namespace: String,
    name: String,
    uid: String,
}

/// Pods that room is held for on a claim's node and that should be nominated to it but aren't. When the scheduler judges a
/// node it counts every pod nominated to it, but none nominated elsewhere: more pods of one spread constraint than its
/// `maxSkew` nominated to one node would each look like too many. So at most that many are at a time; and none where the
/// extender's filter or the node's guard steers them anyway.
fn nominees(
    state: &ClusterState,
    holds: &Holds,
    placement: PlacementMode,
    guarded: bool,
    claim: &str,
    node: &str,
) -> Vec<Nominee> {
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
        Some((Arc::as_ptr(class), if placement == PlacementMode::Extender || guarded { 0 } else { skew }))
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
        out.push(Nominee { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() });
    }
    out
}

async fn nominate(ctx: &Context, node: &str, pods: Vec<Nominee>) {
    let patches = pods.into_iter().map(|pod| {
        let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &pod.namespace);
        async move {
            let patch = json!({"metadata": {"uid": pod.uid}, "status": {"nominatedNodeName": node}});
            let result = api.patch_status(&pod.name, &PatchParams::default(), &Patch::Merge(&patch)).await;
            match result {
                Ok(changed) => ctx.cluster.update(|state| state.apply_pod(&changed, now_ms())),
                Err(error) if is_not_found(&error) || is_conflict(&error) => {}
                Err(error) => tracing::warn!(pod = pod.name, %error, "pod could not be nominated"),
            }
        }
    });
    let mut results = stream::iter(patches).buffer_unordered(CONCURRENCY);
    while results.next().await.is_some() {
        ctx.metrics.nominations.inc();
    }
}

/// How a hold ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Its pod was bound to the planned node.
    Followed,
    /// Its pod was bound to another node.
    Elsewhere,
    /// Its pod went away or it ran out.
    Released,
}

/// Holds that were live before and aren't any more: claim, pod and how each ended.
fn ended<'a>(before: &'a Holds, after: &Holds, state: &ClusterState) -> Vec<(&'a str, &'a str, End)> {
    let mut out = Vec::new();
    for (pod, claim) in &before.by_pod {
        if after.by_pod.contains_key(pod) {
            continue;
        }
        let node = state.claims.get(claim).and_then(|claim| state.node_of(claim)).map(|node| node.name_any());
        let bound = state.pods.get(pod).and_then(|pod| pod.node.as_deref());
        let end = match (bound, node) {
            (Some(bound), Some(node)) if bound == node => End::Followed,
            (Some(_), _) => End::Elsewhere,
            (None, _) => End::Released,
        };
        out.push((claim.as_str(), pod.as_str(), end));
    }
    out.sort_by_key(|(claim, pod, _)| (*claim, *pod));
    out
}

/// Classes of which a pod was bound as planned lately, and when.
type Progress = HashMap<Arc<PodClass>, i64>;

fn class_of<'s>(state: &'s ClusterState, pod: &str) -> Option<&'s Arc<PodClass>> {
    Some(&state.pods.get(pod)?.entry.as_ref().ok()?.class)
}

/// Claims whose holds are about to end while pods of the same class are still being bound one after the other.
fn to_renew(state: &ClusterState, holds: &Holds, progress: &Progress, now_ms: i64) -> Vec<String> {
    let waits = |claim: &&String| {
        let node = state.claims.get(*claim).and_then(|claim| state.node_of(claim));
        let young = node.is_some_and(|node| now_ms - created_ms(&node.metadata) < LONGEST_HOLD_MS);
        let ends = state.planned.get(*claim).is_some_and(|planned| planned.until_ms - now_ms < RENEW_MS);
        let moves = |class: &Arc<PodClass>| progress.contains_key(class);
        let pods = || holds.by_claim[*claim].iter().filter_map(|hold| class_of(state, hold.pod.as_ref()?));
        young && ends && pods().any(moves)
    };
    holds.by_claim.keys().filter(waits).cloned().collect()
}

/// The leader's part: keeps nominations in place on open nodes and tells the scheduler of holds that ended.
pub async fn keep(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    let mut before = Arc::new(Holds::default());
    let mut asked = planned_taint::Asked::default();
    let mut nominated: HashMap<String, i64> = HashMap::new();
    let mut nudged = now_ms();
    let mut progress: Progress = HashMap::new();
    loop {
        let now = now_ms();
        let after = ctx.cluster.read().holds(now);
        planned_taint::keep(&ctx, &after, &mut asked).await;
        let mut freed: Vec<String> = Vec::new();
        let mut again: BTreeMap<String, Vec<Nominee>> = BTreeMap::new();
        let mut awaited = None;
        let mut renewed: Vec<String> = Vec::new();
        {
            let state = ctx.cluster.read();
            for (claim, pod, end) in ended(&before, &after, &state) {
                let result = match end {
                    End::Followed => "planned",
                    End::Elsewhere => "elsewhere",
                    End::Released => "released",
                };
                ctx.metrics.holds_ended.with_label_values(&[result]).inc();
                if end == End::Followed {
                    if let Some(class) = class_of(&state, pod) {
                        progress.insert(Arc::clone(class), now);
                    }
                } else {
                    tracing::info!(claim, pod, result, "hold ended");
                    let node = state.claims.get(claim).and_then(|claim| state.node_of(claim));
                    freed.extend(node.map(|node| node.name_any()));
                }
            }
            nominated.retain(|_, at| now - *at < RENOMINATE_MS);
            progress.retain(|_, at| now - *at < PROGRESS_MS);
            if ctx.settings.placement != PlacementMode::Off {
                renewed = to_renew(&state, &after, &progress, now);
            }
            for claim in after.by_claim.keys() {
                let Some(node) = state.claims.get(claim).and_then(|claim| state.node_of(claim)) else {
                    continue;
                };
                let open = node.labels().get(labels::REGISTERED).is_some_and(|value| value == "true");
                if open && node_ready(node) {
                    let name = node.name_any();
                    if after.by_claim[claim].iter().any(|hold| hold.pod.is_some()) {
                        awaited.get_or_insert_with(|| name.clone());
                    }
                    let guarded = planned_taint::of(node).is_some();
                    let mut pods = nominees(&state, &after, ctx.settings.placement, guarded, claim, &name);
                    pods.retain(|pod| !nominated.contains_key(&pod.uid));
                    if !pods.is_empty() {
                        again.insert(name, pods);
                    }
                }
            }
        }
        before = after;
        for claim in renewed {
            let until = json!({"metadata": {"annotations": {(labels::HOLD_UNTIL): rfc3339(now + HOLD_READY_MS)}}});
            if let Err(error) = gone_is_fine(ctx.patch_claim(&claim, &until).await) {
                tracing::warn!(claim, %error, "a hold could not be kept up, trying again");
            }
        }
        if ctx.settings.placement != PlacementMode::Off {
            for (node, pods) in again {
                nominated.extend(pods.iter().map(|pod| (pod.uid.clone(), now)));
                nominate(&ctx, &node, pods).await;
            }
        }
        if ctx.settings.placement == PlacementMode::Extender {
            if awaited.is_none() {
                nudged = now;
            } else if now - nudged >= NUDGE_MS && freed.is_empty() {
                // One event wakes every pod that the extender kept away.
                freed.extend(awaited);
            }
            if !freed.is_empty() {
                nudged = now;
            }
            freed.sort();
            freed.dedup();
            for node in freed {
                // Pods that only the extender kept away are tried again on any event that changes a node.
                let stamp = json!({"metadata": {"annotations": {(labels::HOLD_RELEASED): rfc3339(now)}}});
                if let Err(error) = gone_is_fine(ctx.patch_node(&node, &stamp).await) {
                    tracing::warn!(node, %error, "the scheduler could not be told of a freed hold");
                }
            }
        }
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(LOOK).await;
        changes.mark_unchanged();
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::test_support::objects;

    /// A claim with its node, and a pod planned there that waits or is bound.
    pub fn state(bound: Option<&str>) -> ClusterState {
        let mut state = ClusterState::default();
        let later = "2099-01-01T00:00:00Z";
        let planned = |pods: &str| json!({(labels::PLANNED_PODS): pods, (labels::HOLD_UNTIL): later});
        let meta = json!({"annotations": planned("[\"n/a\"]")});
        state.apply_claim(objects::claim("c", &json!({"metadata": meta, "status": objects::launched("i-1", &[])})));
        let room = json!({"cpu": "2", "memory": "4Gi", "pods": "10"});
        let node = json!({"spec": {"providerID": "aws:///z/i-1"}, "status": {"allocatable": room}});
        state.apply_node(objects::node("node-c", &node));
        let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": "500m"}}});
        state.apply_pod(&objects::pod("a", &json!({"spec": {"nodeName": bound, "containers": [container]}})), 1);
        state
    }

    fn nominated(state: &ClusterState, placement: PlacementMode, guarded: bool) -> Vec<Nominee> {
        nominees(state, &state.holds(5), placement, guarded, "c", "node-c")
    }

    #[test]
    fn a_hold_that_ends_says_how() {
        let before = state(None).holds(5);
        for (bound, end) in [(Some("node-c"), End::Followed), (Some("other"), End::Elsewhere)] {
            let now = state(bound);
            assert_eq!(ended(&before, &now.holds(5), &now), [("c", "n/a", end)]);
        }
        let mut gone = state(None);
        gone.delete_pod("n/a", 6);
        assert_eq!(ended(&before, &gone.holds(6), &gone), [("c", "n/a", End::Released)]);
    }

    #[test]
    fn a_hold_is_kept_up_while_others_of_its_class_are_bound() {
        let mut state = state(None);
        let mut node = Node::clone(&state.nodes["node-c"]);
        node.metadata.creation_timestamp = serde_json::from_value(json!("1970-01-01T00:00:00Z")).ok();
        state.apply_node(node);
        let class = Arc::clone(class_of(&state, "n/a").unwrap());
        let moving: Progress = [(class, 1)].into();
        let until = state.planned["c"].until_ms;
        let at = |now: i64, progress: &Progress, state: &ClusterState| to_renew(state, &state.holds(5), progress, now);
        assert!(at(until - RENEW_MS, &moving, &state).is_empty(), "it lasts, and the node is old");
        state.planned.get_mut("c").unwrap().until_ms = 60_000;
        assert!(at(60_000 - RENEW_MS, &moving, &state).is_empty(), "it lasts");
        assert_eq!(at(60_000 - RENEW_MS + 1, &moving, &state), ["c"]);
        assert!(at(60_000 - RENEW_MS + 1, &Progress::new(), &state).is_empty(), "nothing moves");
        state.planned.get_mut("c").unwrap().until_ms = LONGEST_HOLD_MS;
        assert!(at(LONGEST_HOLD_MS, &moving, &state).is_empty(), "long enough");
    }

    #[test]
    fn no_more_pods_of_a_spread_are_nominated_to_a_node_than_may_differ() {
        let mut state = state(None);
        let (pods, until) = ("[\"n/s1\",\"n/s2\",\"n/s3\"]", "2099-01-01T00:00:00Z");
        let meta = json!({"annotations": {(labels::PLANNED_PODS): pods, (labels::HOLD_UNTIL): until}});
        state.apply_claim(objects::claim("c", &json!({"metadata": meta, "status": objects::launched("i-1", &[])})));
        for name in ["s1", "s2", "s3"] {
            let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": name, "labels": {"app": "s"}},
                "spec": {"containers": [{"name": "c", "image": "i"}], "topologySpreadConstraints": [{"maxSkew": 2,
                    "topologyKey": labels::ZONE, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "s"}}}]}});
            state.apply_pod(&serde_json::from_value(pod).unwrap(), 1);
        }
        assert_eq!(nominated(&state, PlacementMode::Nominate, false).len(), 2);
        assert!(nominated(&state, PlacementMode::Extender, false).is_empty(), "the filter steers them");
        assert!(nominated(&state, PlacementMode::Nominate, true).is_empty(), "the guard steers them");
    }

    #[test]
    fn only_pods_without_the_nomination_are_nominated() {
        let mut state = state(None);
        assert_eq!(nominated(&state, PlacementMode::Nominate, false).len(), 1);
        state.apply_pod(&objects::pod("a", &json!({"status": {"nominatedNodeName": "node-c"}})), 2);
        assert!(nominated(&state, PlacementMode::Nominate, false).is_empty());
    }
}
