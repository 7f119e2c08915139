//! Takes away what nobody needs or wants: empty nodes, drifted ones ([`crate::controllers::disruption::drift_replacement`]), and nodes whose pods fit elsewhere
//! ([`crate::controllers::disruption::consolidation`]).
//!
//! A node is closed before it is taken. An empty one is looked at once more: a pod that came in between takes the mark off again.
//! The others go when their pods' new places are ready ([`crate::controllers::interruption::queue::depart`]).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use croner::Cron;
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::{Timestamp, tz::TimeZone};
use kube::ResourceExt;
use serde_json::json;

use crate::api::node_pool::Budget;
use crate::api::{NodeClaim, NodePool, duration};
use crate::controllers::context::{Context, reference};
use crate::controllers::disruption::consolidation::consolidate;
use crate::controllers::disruption::drift_replacement::{DRIFTED, Replacement};
use crate::controllers::interruption::queue::{Disrupting, mark};
use crate::controllers::node_claim::{drain, lifecycle, metrics};
use crate::decisions::disruption::budget;
use crate::decisions::disruption::emptiness;
use crate::decisions::disruption::emptiness::{Candidate, Rule};
use crate::model::labels;
use crate::state::holds::Holds;
use crate::state::snapshot::{Types, is_leaving, node_ready};
use crate::state::{ClusterState, PodRecord, now_ms};

/// Reason of an empty node.
pub const EMPTY: &str = "Empty";
/// Reason of a node whose pods fit elsewhere.
pub const UNDERUTILIZED: &str = "Underutilized";
/// How often empty nodes are looked for.
const LOOK: Duration = Duration::from_secs(1);
/// How often drifted nodes, and nodes whose pods fit elsewhere, are looked for, milliseconds.
const MOVE_MS: i64 = 5_000;
/// A node whose pods found no new place in so long stays, milliseconds, by the reason for which it was to go.
const UNDECIDED_MS: [(&str, i64); 2] = [(UNDERUTILIZED, 300_000), (DRIFTED, 600_000)];
/// The second look at a closed node comes no sooner than this after the first, milliseconds: what the scheduler had under
/// way when the taint was written has been bound by then.
const SETTLE_MS: i64 = 2_000;

/// Nodes that are written on at the same time.
const WRITES: usize = 16;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut closed: BTreeMap<String, i64> = BTreeMap::new();
    let mut undecided: BTreeMap<String, i64> = BTreeMap::new();
    let mut replacement = Replacement::default();
    let mut moved = now_ms();
    loop {
        tokio::time::sleep(LOOK).await;
        let now = now_ms();
        let pools = ctx.ready_pools();
        let types = Types::new(&pools);
        let (go, doomed) = {
            let state = ctx.cluster.read();
            let holds = state.holds(now);
            let (candidates, rules) = (candidates(&state, &holds, &types), rules(&state, EMPTY, now));
            let (go, _) = emptiness::decide(&candidates, &rules, now);
            let marked = state.claims.values().filter(|claim| {
                claim.metadata.deletion_timestamp.is_none()
                    && Disrupting::of(claim).is_some_and(|disrupting| disrupting.reason == EMPTY)
            });
            let doomed: Vec<_> = marked.map(|claim| (Arc::clone(claim), pods_of(&state, &holds, claim))).collect();
            (go, doomed)
        };
        closed.retain(|name, _| doomed.iter().any(|(claim, _)| claim.name_any() == *name));
        let mut steps = Vec::new();
        for (claim, pods) in doomed {
            let name = claim.name_any();
            let since = *closed.entry(name.clone()).or_insert(now);
            let node = ctx.cluster.read().node_of(&claim).cloned();
            let step = if pods > 0 {
                Step::Reopen
            } else if let Some(node) = node.filter(|node| !drain::is_closed(node)) {
                // The mark was written and the taint was not: close it now, and look again later.
                closed.insert(name, now);
                Step::Close(node)
            } else if now - since >= SETTLE_MS {
                Step::Delete
            } else {
                continue;
            };
            steps.push((claim, step));
        }
        stream::iter(steps).for_each_concurrent(WRITES, |(claim, step)| take_step(&ctx, claim, step)).await;
        for claim in given_up(&ctx, &mut undecided, now) {
            replacement.given_up(&claim.name_any(), now);
            if let Err(error) = reopen(&ctx, &claim, "its pods found no other place in time").await {
                tracing::warn!(claim = claim.name_any(), %error, "node could not be opened again, trying again");
            }
        }
        stream::iter(go).for_each_concurrent(WRITES, |name| begin(&ctx, name, EMPTY)).await;
        if now - moved >= MOVE_MS {
            moved = now;
            let drifted = replacement.choose(&ctx, &pools, &types).await;
            let (go, reason) = if drifted.is_empty() {
                (consolidate(&ctx, &pools, &types).await, UNDERUTILIZED)
            } else {
                (drifted, DRIFTED)
            };
            stream::iter(go).for_each_concurrent(WRITES, |name| begin(&ctx, name, reason)).await;
        }
    }
}

/// What is next for a node that was empty when it was marked.
enum Step {
    /// A pod came: it stays.
    Reopen,
    /// It lacks the taint.
    Close(Arc<Node>),
    /// It goes.
    Delete,
}

async fn take_step(ctx: &Context, claim: Arc<NodeClaim>, step: Step) {
    let name = claim.name_any();
    let result = match step {
        Step::Reopen => reopen(ctx, &claim, "a pod came in between").await,
        Step::Close(node) => drain::close(ctx, &node).await,
        Step::Delete => {
            tracing::info!(claim = name, "empty, it goes");
            lifecycle::delete_claim(ctx, &claim).await.inspect(|()| metrics::count(ctx, &claim, EMPTY))
        }
    };
    if let Err(error) = result {
        tracing::warn!(claim = name, %error, "empty node could not be taken, trying again");
    }
}

/// Claims that were marked since their pods could go elsewhere, and whose pods found no new place in all this time.
fn given_up(ctx: &Context, since: &mut BTreeMap<String, i64>, now: i64) -> Vec<Arc<NodeClaim>> {
    let state = ctx.cluster.read();
    let patience = |claim: &NodeClaim| {
        let disrupting = Disrupting::of(claim).filter(|_| claim.metadata.deletion_timestamp.is_none())?;
        UNDECIDED_MS.iter().find(|(reason, _)| *reason == disrupting.reason).map(|(_, patience)| *patience)
    };
    since.retain(|name, _| state.claims.get(name).is_some_and(|claim| patience(claim).is_some()));
    let marked = state.claims.values().filter_map(|claim| Some((claim, patience(claim)?)));
    marked
        .filter(|(claim, patience)| now - *since.entry(claim.name_any()).or_insert(now) >= *patience)
        .map(|(claim, _)| Arc::clone(claim))
        .collect()
}

async fn begin(ctx: &Context, name: String, reason: &str) {
    let claim = ctx.cluster.read().claims.get(&name).cloned();
    let Some(claim) = claim else { return };
    tracing::info!(claim = name, reason, "closed for disruption");
    ctx.event(reference(&*claim), false, "DisruptionTerminating", &format!("disrupting node: {reason}")).await;
    let disrupting = Disrupting { reason: reason.into(), deadline_ms: None };
    if let Err(error) = mark(ctx, &claim, &disrupting).await {
        tracing::warn!(claim = name, %error, "node could not be closed, trying again");
    }
}

/// Takes the mark and the taint off again.
async fn reopen(ctx: &Context, claim: &NodeClaim, why: &str) -> Result<(), kube::Error> {
    tracing::info!(claim = claim.name_any(), why, "it stays");
    let node = ctx.cluster.read().node_of(claim).cloned();
    if let Some(node) = node {
        let taints: Vec<_> = node
            .spec
            .iter()
            .flat_map(|spec| spec.taints.iter().flatten())
            .filter(|taint| taint.key != labels::DISRUPTED_TAINT)
            .collect();
        let patch = json!({
            "metadata": {
                "resourceVersion": node.resource_version(),
                "labels": {(labels::EXCLUDE_FROM_LOAD_BALANCERS): null},
            },
            "spec": {"taints": taints},
        });
        ctx.patch_node(&node.name_any(), &patch).await?;
    }
    // An interruption may have been written on it since the look: then this write fails.
    let version = claim.resource_version();
    let patch = json!({"metadata": {"resourceVersion": version, "annotations": {(labels::DISRUPTING): null}}});
    ctx.patch_claim(&claim.name_any(), &patch).await
}

/// Pods on a claim's node, or held for it, that need another place if it goes.
pub(crate) fn pods_of(state: &ClusterState, holds: &Holds, claim: &NodeClaim) -> usize {
    let bound = state
        .node_of(claim)
        .map_or(0, |node| state.pods_on(&node.name_any()).filter(|pod| pod.reschedulable() || held_back(pod)).count());
    bound + holds.by_claim.get(&claim.name_any()).map_or(0, Vec::len)
}

/// Whether a node still has pods that need another place.
pub(crate) fn occupied(state: &ClusterState, node: &str) -> bool {
    state.pods_on(node).any(|pod| pod.reschedulable() || held_back(pod))
}

/// A StatefulSet's pod that is going comes back under its name: its node isn't empty yet.
fn held_back(pod: &PodRecord) -> bool {
    pod.deleting_since_ms.is_some() && !pod.terminal && !pod.daemon && !pod.mirror
}

/// When a claim's node was initialized, milliseconds since the epoch; `None` where it isn't.
pub(crate) fn initialized_ms(claim: &NodeClaim) -> Option<i64> {
    let list = &claim.status.as_ref()?.conditions;
    let found = list.iter().find(|condition| condition.type_ == "Initialized" && condition.status == "True")?;
    Some(found.last_transition_time.0.as_millisecond())
}

/// Nodes that are up and not about to go.
pub(crate) fn candidates(state: &ClusterState, holds: &Holds, types: &Types) -> Vec<Candidate> {
    let mut out = Vec::new();
    for (name, claim) in &state.claims {
        let (Some(node), Some(initialized)) = (state.node_of(claim), initialized_ms(claim)) else {
            continue;
        };
        if is_leaving(claim) || node.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let node_name = node.name_any();
        let last_event = state.last_pod_event_ms.get(&*node_name).copied().unwrap_or(0);
        let guarded = |pod: &PodRecord| pod.do_not_disrupt && pod.active();
        out.push(Candidate {
            claim: name.clone(),
            pool: claim.labels().get(labels::NODE_POOL).cloned().unwrap_or_default(),
            pods: pods_of(state, holds, claim),
            quiet_since_ms: initialized.max(last_event),
            protected: node.annotations().get(labels::DO_NOT_DISRUPT).is_some_and(|value| value == "true")
                || state.pods_on(&node_name).any(guarded),
            price: types.price(claim).0,
        });
    }
    out
}

/// What pools allow now for a reason, by name.
pub(crate) fn rules(state: &ClusterState, reason: &str, now: i64) -> BTreeMap<String, Rule> {
    state.pools.iter().map(|(name, pool)| (name.clone(), rule(state, name, pool, reason, now))).collect()
}

fn rule(state: &ClusterState, name: &String, pool: &NodePool, reason: &str, now: i64) -> Rule {
    let (mut nodes, mut consuming) = (0, 0);
    for claim in state.claims.values().filter(|claim| claim.labels().get(labels::NODE_POOL) == Some(name)) {
        let initialized = initialized_ms(claim).is_some();
        if !initialized {
            continue;
        }
        nodes += 1;
        let ready = state.node_of(claim).is_some_and(|node| node_ready(node));
        if is_leaving(claim) || !ready {
            consuming += 1;
        }
    }
    let disruption = &pool.spec.disruption;
    let active = |budget: &Budget| budget_active(budget, now);
    Rule {
        consolidate_after_ms: duration::parse_or_never(&disruption.consolidate_after).unwrap_or(None),
        allowed: budget::allowed(&disruption.budgets, reason, nodes, consuming, active),
    }
}

/// Whether a budget counts now: always without a schedule, else for its duration after each hit, in UTC.
fn budget_active(budget: &Budget, now: i64) -> Result<bool, String> {
    let (Some(schedule), Some(length)) = (&budget.schedule, &budget.duration) else {
        return Ok(true);
    };
    let length = duration::parse(length).map_err(|error| error.to_string())?;
    let cron: Cron = schedule.parse().map_err(|error: croner::errors::CronError| error.to_string())?;
    let start = Timestamp::from_millisecond(now - length).map_err(|error| error.to_string())?;
    let hit = cron.find_next_occurrence(&start.to_zoned(TimeZone::UTC), false).map_err(|error| error.to_string())?;
    Ok(hit.timestamp().as_millisecond() <= now)
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheduled_budget_is_active_in_its_window_only() {
        let budget = Budget {
            nodes: "0".into(),
            schedule: Some("0 9 * * mon-fri".into()),
            duration: Some("8h".into()),
            ..Budget::default()
        };
        let at = |text: &str| text.parse::<Timestamp>().unwrap().as_millisecond();
        // 2026-11-20 is a Friday.
        assert_eq!(budget_active(&budget, at("2026-11-20T08:59:59Z")), Ok(false));
        assert_eq!(budget_active(&budget, at("2026-11-20T09:00:00Z")), Ok(true));
        assert_eq!(budget_active(&budget, at("2026-11-20T16:59:59Z")), Ok(true));
        assert_eq!(budget_active(&budget, at("2026-11-20T17:00:01Z")), Ok(false));
        assert_eq!(budget_active(&budget, at("2026-11-21T10:00:00Z")), Ok(false), "a Saturday");
        assert!(budget_active(&Budget { schedule: Some("whenever".into()), ..budget }, 0).is_err());
    }
}
