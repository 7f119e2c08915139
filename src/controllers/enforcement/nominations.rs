//! Nominates planned pods to their nodes, renews holds, and triggers retries of kube-scheduler when a hold ends.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::clock;
use crate::controllers::context::{Context, PlacementMode, ignore_not_found, is_conflict, is_not_found};
use crate::controllers::enforcement::hold_events::{HoldEnd, Progress, ended};
use crate::controllers::enforcement::planned_taint::{PlannedTaints, planned_taint_of};
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::holds::HOLD_READY;
use crate::model::labels;
use crate::model::pod_class::PodClass;
use crate::model::time::UnixMillis;
use crate::state::object_ext::{NodeExt, ObjectExt};
use crate::state::plan_record::Holds;
use crate::state::{ClusterState, PodRecord};

const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_millis(500) };
/// Concurrent nominations.
const CONCURRENCY: usize = 32;
/// How often kube-scheduler is triggered while pods wait for open nodes: it may have attempted them before the extender's view
/// included their holds, and no other event may follow.
const RETRY_TRIGGER_PERIOD: Duration = Duration::from_secs(2);
/// Minimum time between two nominations of a pod.
const RENOMINATE_PERIOD: Duration = Duration::from_millis(200);

/// A pod to nominate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRef {
    namespace: String,
    name: String,
    uid: String,
}

/// Held pods of a claim that are not nominated to its node yet.
///
/// When the scheduler evaluates a node, it counts every pod nominated to that node, but none nominated elsewhere: if more pods of a
/// topology spread constraint than its `maxSkew` were nominated to one node, each would appear to violate it. So at most `maxSkew`
/// are nominated at a time, and none when the extender or the planned taint (`tainted`) directs them anyway.
pub fn to_nominate(
    state: &ClusterState,
    holds: &Holds,
    placement: PlacementMode,
    tainted: bool,
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
        Some((Arc::as_ptr(class), if placement == PlacementMode::Extender || tainted { 0 } else { skew }))
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
        out.push(PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() });
    }
    out
}

/// Nominates pods to a node. Failures are logged; the next pass tries again.
pub async fn nominate(ctx: &Context, node: &str, pods: Vec<PodRef>) {
    let patches = pods.into_iter().map(|pod| {
        let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &pod.namespace);
        async move {
            let patch = json!({"metadata": {"uid": pod.uid}, "status": {"nominatedNodeName": node}});
            let result = api.patch_status(&pod.name, &PatchParams::default(), &Patch::Merge(&patch)).await;
            match result {
                Ok(changed) => ctx.cluster.update(|state| state.apply_pod(&changed, clock::now())),
                Err(error) if is_not_found(&error) || is_conflict(&error) => {}
                Err(error) => tracing::warn!(pod = pod.name, %error, "failed to nominate pod"),
            }
        }
    });
    let mut results = stream::iter(patches).buffer_unordered(CONCURRENCY);
    while results.next().await.is_some() {
        ctx.metrics.nominations.inc();
    }
}

/// What one pass does.
#[derive(Debug, Default)]
struct Actions {
    /// Nodes with a hold that ended other than as planned.
    freed: Vec<String>,
    /// Pods to nominate, by node.
    nominate: BTreeMap<String, Vec<PodRef>>,
    /// An open node that a held pod waits for.
    awaited: Option<String>,
    /// Claims whose holds are renewed.
    renew: Vec<String>,
}

/// State of the controller between two passes.
#[derive(Debug)]
struct Nominations {
    holds: Arc<Holds>,
    planned_taints: PlannedTaints,
    /// When each pod was last nominated, by UID.
    nominated: HashMap<String, UnixMillis>,
    /// When kube-scheduler was last triggered, or had no reason to be.
    triggered: UnixMillis,
    progress: Progress,
}

/// Runs on the leader until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut nominations = Nominations {
        holds: Arc::default(),
        planned_taints: PlannedTaints::default(),
        nominated: HashMap::new(),
        triggered: clock::now(),
        progress: Progress::default(),
    };
    loop {
        nominations.reconcile(&ctx).await;
        run_loop.next().await;
    }
}

impl Nominations {
    async fn reconcile(&mut self, ctx: &Context) {
        let now = clock::now();
        let holds = {
            let state = ctx.cluster.read();
            ctx.derived.holds(&state, now)
        };
        self.planned_taints.reconcile(ctx, &holds).await;
        let actions = self.choose(ctx, &holds, now);
        self.holds = holds;
        for claim in actions.renew {
            let until = (now + HOLD_READY).rfc3339();
            let patch = json!({"metadata": {"annotations": {(labels::HOLD_UNTIL): until}}});
            if let Err(error) = ignore_not_found(ctx.patch_claim(&claim, &patch).await) {
                tracing::warn!(claim, %error, "failed to renew hold, retrying");
            }
        }
        if ctx.settings.placement != PlacementMode::Off {
            for (node, pods) in actions.nominate {
                self.nominated.extend(pods.iter().map(|pod| (pod.uid.clone(), now)));
                nominate(ctx, &node, pods).await;
            }
        }
        if ctx.settings.placement == PlacementMode::Extender {
            self.trigger_retries(ctx, actions.freed, actions.awaited, now).await;
        }
    }

    /// Compares the holds with those of the last pass. Counts the holds that ended.
    fn choose(&mut self, ctx: &Context, holds: &Holds, now: UnixMillis) -> Actions {
        let placement = ctx.settings.placement;
        let mut actions = Actions::default();
        let state = ctx.cluster.read();
        for (claim, pod, end) in ended(&self.holds, holds, &state) {
            let result = end.metric_label();
            ctx.metrics.holds_ended.with_label_values(&[result]).inc();
            if end == HoldEnd::Planned {
                self.progress.record(&state, pod, now);
            } else {
                tracing::info!(claim, pod, result, "hold ended");
                let node = state.claims.get(claim).and_then(|claim| state.node_of(claim));
                actions.freed.extend(node.map(|node| node.name_any()));
            }
        }
        self.nominated.retain(|_, at| !at.is_older_than(RENOMINATE_PERIOD, now));
        self.progress.expire(now);
        if placement != PlacementMode::Off {
            actions.renew = self.progress.to_renew(&state, holds, now);
        }
        for (claim, live) in &holds.by_claim {
            let Some(node) = state.claims.get(claim).and_then(|claim| state.node_of(claim)) else {
                continue;
            };
            if !(node.is_labeled(labels::REGISTERED) && node.is_ready()) {
                continue;
            }
            let name = node.name_any();
            if live.iter().any(|hold| hold.pod.is_some()) {
                actions.awaited.get_or_insert_with(|| name.clone());
            }
            let tainted = planned_taint_of(node).is_some();
            let mut pods = to_nominate(&state, holds, placement, tainted, claim, &name);
            pods.retain(|pod| !self.nominated.contains_key(&pod.uid));
            if !pods.is_empty() {
                actions.nominate.insert(name, pods);
            }
        }
        actions
    }

    /// Updates an annotation of nodes: kube-scheduler retries pods that only the extender rejected after any update of a node.
    async fn trigger_retries(
        &mut self,
        ctx: &Context,
        mut nodes: Vec<String>,
        awaited: Option<String>,
        now: UnixMillis,
    ) {
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
        for node in nodes {
            let patch = json!({"metadata": {"annotations": {(labels::HOLD_RELEASED): now.rfc3339()}}});
            if let Err(error) = ignore_not_found(ctx.patch_node(&node, &patch).await) {
                tracing::warn!(node, %error, "failed to trigger a retry of kube-scheduler");
            }
        }
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decisions::holds::resolve;
    use crate::test_support::state_with_planned_pod;

    fn count(state: &ClusterState, placement: PlacementMode, tainted: bool) -> usize {
        to_nominate(state, &resolve(state, UnixMillis(5)), placement, tainted, "c", "node-c").len()
    }

    #[test]
    fn at_most_max_skew_pods_of_a_spread_are_nominated_to_a_node() {
        let mut state = state_with_planned_pod(None);
        state.apply_claim(
            serde_json::from_value(json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim",
                "metadata": {"name": "c", "uid": "1", "annotations": {
                    (labels::PLANNED_PODS): "[\"n/s1\",\"n/s2\",\"n/s3\"]", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"}},
                "spec": {"requirements": [], "nodeClassRef": {"group": "g", "kind": "k", "name": "n"}},
                "status": {"providerID": "aws:///z/i-1"}}))
            .unwrap(),
        );
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
}
