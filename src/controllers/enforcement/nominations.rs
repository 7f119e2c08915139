//! Nominates planned pods to their nodes, renews holds, and triggers retries of kube-scheduler when a hold ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;

use crate::controllers::context::{Context, ignore_not_found, is_conflict, is_not_found};
use crate::controllers::provisioning::plan_writer::withdraw;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::holds::HOLD_READY;
use crate::decisions::placement::hold_events::{EndedHold, HoldEnd};
use crate::decisions::placement::nominations::Nominations;
use crate::decisions::placement::refusals::Withdrawal;
use crate::decisions::pod_ref::PodRef;
use crate::decisions::rate_cap::RateCap;
use crate::state::pod_waits::PodWait;

const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_millis(500) };
/// Holds that ended without their pod, and pods that are withdrawn, that are logged at level info within a minute; further holds are at level debug.
const MAX_LOGGED: usize = 100;
/// Concurrent writes: half of what the client sends at a time.
const CONCURRENCY: usize = 16;

/// What became of nominations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nominated {
    /// The API server accepted them.
    pub accepted: usize,
    /// The API server refused them, or the pods no longer exist: another attempt has the same result.
    pub refused: usize,
    /// No such answer: another attempt may succeed.
    pub failed: usize,
}

/// Nominates pods to nodes, given by their names. Failures are logged; the next pass tries again.
pub async fn nominate(ctx: &Context, pods: Vec<(String, PodRef)>) -> Nominated {
    let nominations = pods.into_iter().map(|(node, pod)| nominate_one(ctx, node, pod));
    let results = stream::iter(nominations).buffer_unordered(CONCURRENCY);
    let sum = |sum: Nominated, one: Nominated| async move {
        Nominated {
            accepted: sum.accepted + one.accepted,
            refused: sum.refused + one.refused,
            failed: sum.failed + one.failed,
        }
    };
    results.fold(Nominated::default(), sum).await
}

async fn nominate_one(ctx: &Context, node: String, pod: PodRef) -> Nominated {
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), &pod.namespace);
    let patch = json!({"metadata": {"uid": pod.uid}, "status": {"nominatedNodeName": node}});
    match api.patch_status(&pod.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(changed) => {
            ctx.cluster.update(|state| state.apply_pod(&changed, clock::now()));
            ctx.metrics.nominations.inc();
            Nominated { accepted: 1, ..Nominated::default() }
        }
        Err(error) if is_not_found(&error) || is_conflict(&error) => Nominated { refused: 1, ..Nominated::default() },
        Err(error) => {
            tracing::warn!(pod = pod.name, %error, "failed to nominate pod");
            let refused = usize::from(matches!(&error, kube::Error::Api(status) if is_final(status.code)));
            Nominated { refused, failed: 1 - refused, ..Nominated::default() }
        }
    }
}

/// Whether another attempt has the same result: the request itself is refused, for another reason than the load.
fn is_final(code: u16) -> bool {
    (400..500).contains(&code) && code != 408 && code != 429
}

/// Runs on the leader until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut nominations = Nominations::new(clock::now());
    let mut logged = RateCap::default();
    loop {
        reconcile(&ctx, &mut nominations, &mut logged, clock::now()).await;
        run_loop.next().await;
    }
}

async fn reconcile(ctx: &Context, nominations: &mut Nominations, logged: &mut RateCap, now: UnixMillis) {
    let holds = ctx.derived.holds(&ctx.cluster.read(), now);
    let actions = nominations.choose(&ctx.cluster.read(), &holds, ctx.settings.placement, now);
    for EndedHold { claim, pod, end } in actions.ended {
        let [result, reason] = end.metric_labels();
        ctx.metrics.holds_ended.with_label_values(&[result, reason]).inc();
        let is_early = ctx.cluster.read().pods.get(&pod).is_some_and(|pod| pod.is_planned_unattempted);
        if is_early && matches!(end, HoldEnd::Planned | HoldEnd::Elsewhere(_)) {
            ctx.metrics.pods_planned_unattempted.with_label_values(&[result]).inc();
        }
        if end == HoldEnd::Planned {
            continue;
        }
        if logged.admit(1, MAX_LOGGED, now) == 1 {
            tracing::info!(claim, pod, result, reason, "hold ended");
        } else {
            tracing::debug!(claim, pod, result, reason, "hold ended");
        }
    }
    for time in actions.bound_after {
        let part = PodWait::ReadyToBound.metric_label();
        ctx.metrics.pod_wait_seconds.with_label_values(&[part]).observe(time.as_secs_f64());
    }
    let renewed = json!({"metadata": {"annotations": {(labels::HOLD_UNTIL): (now + HOLD_READY).rfc3339()}}});
    stream::iter(actions.renew)
        .for_each_concurrent(CONCURRENCY, async |claim| {
            if let Err(error) = ignore_not_found(ctx.patch_claim(&claim, &renewed).await) {
                tracing::warn!(claim, %error, "failed to renew hold, retrying");
            }
        })
        .await;
    let mut withdrawn: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (claim, pod) in actions.strayed {
        withdrawn.entry(claim).or_default().insert(pod);
    }
    for Withdrawal { claim, planned, pod } in actions.withdraw {
        if logged.admit(1, MAX_LOGGED, now) == 1 {
            tracing::info!(claim, pod, "kube-scheduler refuses the pod on its planned node, planning it again");
        }
        withdrawn.entry(claim).or_default().insert(planned);
    }
    stream::iter(withdrawn)
        .for_each_concurrent(CONCURRENCY, async |(claim, planned)| {
            withdraw(ctx, claim, &planned.iter().map(String::as_str).collect()).await;
        })
        .await;
    let to_node = |(node, pods): (String, Vec<PodRef>)| pods.into_iter().map(move |pod| (node.clone(), pod));
    nominate(ctx, actions.nominate.into_iter().flat_map(to_node).collect()).await;
    for node in actions.trigger {
        let patch = json!({"metadata": {"annotations": {(labels::HOLD_RELEASED): now.rfc3339()}}});
        if let Err(error) = ignore_not_found(ctx.patch_node(&node, &patch).await) {
            tracing::warn!(node, %error, "failed to trigger a retry of kube-scheduler");
        }
    }
}

#[cfg(test)]
mod write_tests;
