//! The life of a NodeClaim: launched, registered, initialized; then drained, terminated, gone.
//! [`next_step`] says what is due; [`run`] does it, one step at a time for each claim, and tries again what failed.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Resource, ResourceExt};
use serde_json::{Value, json};

use crate::api::NodeClaim;
use crate::api::conditions;
use crate::api::conditions::{Conditions, NODE_CLAIM_DEPENDENTS};
use crate::cloud::launch_group;
use crate::controllers::context::{Context, gone_is_fine, is_conflict, is_not_found, single_values};
use crate::controllers::enforcement::nominations;
use crate::controllers::node_claim::launch;
use crate::controllers::node_claim::launch::Failure;
use crate::controllers::node_claim::{drain, metrics};
use crate::model::labels;
use crate::state::snapshot::{is_ephemeral, node_ready};
use crate::state::{ClusterState, created_ms, now_ms, rfc3339};
use crate::sync::lock;

/// A claim that isn't launched after so long is given up (core reference 5.5), milliseconds.
const LAUNCH_TIMEOUT_MS: i64 = 300_000;
/// A launched claim whose node doesn't register in so long is given up, milliseconds.
const REGISTRATION_TIMEOUT_MS: i64 = 900_000;
/// The state is looked at no more often than this.
const LOOK: Duration = Duration::from_millis(20);
/// The state is looked at at least this often, since time passes without events.
const TICK: Duration = Duration::from_millis(500);
/// First and longest wait after a step failed, milliseconds.
const BACKOFF_MS: (i64, i64) = (250, 10_000);
/// Wait between two looks at something under way (a drain, an instance going down), milliseconds.
const POLL_MS: i64 = 500;
/// Wait between two questions after the partition of an instance, milliseconds.
const PARTITION_POLL_MS: i64 = 1_000;
/// Steps under way at the same time, launches aside: however long EC2 keeps those waiting, nodes go on coming up and going.
const CONCURRENCY: usize = 100;
/// Launches under way at the same time: those of a group share a call.
const LAUNCHES: usize = launch_group::MOST;

/// What is due for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Nothing,
    /// Put our finalizer on it.
    AddFinalizer,
    /// Launch its instance.
    Launch,
    /// Give it up, for this reason.
    GiveUp(&'static str),
    /// Put the claim's labels, taints and our finalizer on its Node.
    Sync,
    /// Nominate its pods and take the unregistered taint off.
    Open,
    /// Say that it is registered.
    Register,
    /// Say that it is initialized.
    Initialize,
    /// Say why it isn't initialized.
    Explain(&'static str),
    /// Write on it when its drain must be over, milliseconds since the epoch.
    WriteDeadline(i64),
    /// Delete its Node.
    DeleteNode,
    /// Keep pods off its Node and evict those there.
    Drain,
    /// Terminate its instance, and let go of the Node and the claim when it is gone.
    Terminate,
    /// Delete the claim, since its Node was deleted.
    FollowNode,
}

/// What is due for a claim at `now_ms`. `drained` says whether no pod on its node has to be waited for.
pub fn next_step(claim: &NodeClaim, node: Option<&Node>, drained: bool, now_ms: i64) -> Step {
    let status = claim.status.as_ref();
    let holds = |kind: &str| status.is_some_and(|status| conditions::is_true(&status.conditions, kind));
    let ours = claim.finalizers().iter().any(|finalizer| finalizer == labels::TERMINATION_FINALIZER);
    if claim.metadata.deletion_timestamp.is_some() {
        if !ours {
            return Step::Nothing;
        }
        if let Some(deadline) = drain::unwritten_deadline(claim) {
            return Step::WriteDeadline(deadline);
        }
        return match node {
            Some(node) if node.metadata.deletion_timestamp.is_none() => Step::DeleteNode,
            Some(node) if !drained || !drain::is_closed(node) => Step::Drain,
            _ => Step::Terminate,
        };
    }
    if !ours {
        return Step::AddFinalizer;
    }
    let age = now_ms - created_ms(&claim.metadata);
    if !holds("Launched") {
        return if age > LAUNCH_TIMEOUT_MS { Step::GiveUp("launch_timeout") } else { Step::Launch };
    }
    let Some(node) = node else {
        let timed_out = !holds("Registered") && age > REGISTRATION_TIMEOUT_MS;
        return if timed_out { Step::GiveUp("registration_timeout") } else { Step::Nothing };
    };
    if node.metadata.deletion_timestamp.is_some() {
        return Step::FollowNode;
    }
    let taints = || node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let registered_label = node.labels().get(labels::REGISTERED).is_some_and(|value| value == "true");
    if !holds("Registered") {
        let synced = node.finalizers().iter().any(|finalizer| finalizer == labels::TERMINATION_FINALIZER);
        return if !synced {
            Step::Sync
        } else if !registered_label || taints().any(|taint| taint.key == labels::UNREGISTERED_TAINT) {
            Step::Open
        } else {
            Step::Register
        };
    }
    if holds("Initialized") {
        return Step::Nothing;
    }
    match missing(claim, node) {
        None => Step::Initialize,
        Some(reason) => Step::Explain(reason),
    }
}

/// Whether a taint is one that a claim's node starts with and something takes off.
pub fn is_startup(claim: &NodeClaim, taint: &Taint) -> bool {
    claim.spec.startup_taints.iter().any(|other| other.key == taint.key && other.effect == taint.effect)
}

/// Whether a node has neither start-up taints nor resources that are yet to be reported.
pub fn is_complete(claim: &NodeClaim, node: &Node) -> bool {
    let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    !taints.any(|taint| is_startup(claim, taint)) && reports_all(claim, node)
}

/// Whether a node reports every resource that its claim asks for.
fn reports_all(claim: &NodeClaim, node: &Node) -> bool {
    let zero = |text: &str| text.chars().all(|c| !c.is_ascii_digit() || c == '0');
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    let reported = |name: &String| allocatable.and_then(|map| map.get(name)).is_some_and(|value| !zero(&value.0));
    claim.spec.resources.requests.iter().all(|(name, value)| zero(&value.0) || reported(name))
}

/// Why a registered node isn't initialized (core reference 5.4).
fn missing(claim: &NodeClaim, node: &Node) -> Option<&'static str> {
    let taints: Vec<&Taint> = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).collect();
    if !node_ready(node) {
        return Some("NodeNotReady");
    }
    if taints.iter().any(|taint| is_startup(claim, taint)) {
        return Some("StartupTaintsExist");
    }
    if taints.iter().any(|taint| is_ephemeral(taint)) {
        return Some("KnownEphemeralTaintsExist");
    }
    if !reports_all(claim, node) {
        return Some("ResourceNotRegistered");
    }
    None
}

/// How long a claim is left alone after a step.
enum Wait {
    /// Not at all.
    No,
    /// So long, milliseconds.
    For(i64),
    /// Longer each time, but not past this, milliseconds since the epoch.
    Longer(i64),
}

#[derive(Default)]
struct Work {
    busy: HashSet<String>,
    /// Launches among them.
    launching: usize,
    later: HashMap<String, Later>,
}

/// A claim that is left alone for a while.
struct Later {
    /// Until then, milliseconds since the epoch.
    at: i64,
    /// The wait of the next step that fails, milliseconds.
    next: i64,
    /// When its drain must be over, as it was known then: with another one, it is looked at at once.
    deadline: Option<i64>,
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    let work = Arc::new(Mutex::new(Work::default()));
    let (done, mut finished) = tokio::sync::mpsc::unbounded_channel::<()>();
    // Dropped, and its steps with it, when this loop is.
    let mut steps = tokio::task::JoinSet::new();
    loop {
        while steps.try_join_next().is_some() {}
        for (name, step, deadline) in due(&ctx.cluster.read(), &work, now_ms()) {
            let (ctx, work, done) = (Arc::clone(&ctx), Arc::clone(&work), done.clone());
            steps.spawn(async move {
                let wait = match take(&ctx, &name, &step).await {
                    Ok(wait) => wait,
                    Err(Failure::Hopeless(reason, why)) => {
                        give_up(&ctx, &name, reason, &why).await;
                        Wait::No
                    }
                    Err(Failure::Api(error)) if is_not_found(&error) => Wait::For(POLL_MS),
                    Err(Failure::Api(error)) if is_conflict(&error) => {
                        look_again(&ctx, &name).await;
                        Wait::Longer(i64::MAX)
                    }
                    Err(error) => {
                        tracing::warn!(claim = name, ?step, %error, "step failed, trying again");
                        Wait::Longer(i64::MAX)
                    }
                };
                {
                    let mut work = lock(&work);
                    work.busy.remove(&name);
                    work.launching -= usize::from(step == Step::Launch);
                    match wait {
                        Wait::No => {
                            work.later.remove(&name);
                        }
                        Wait::Longer(until) => {
                            let wait = work.later.get(&name).map_or(BACKOFF_MS.0, |later| later.next);
                            let (at, next) = ((now_ms() + wait).min(until), (wait * 2).min(BACKOFF_MS.1));
                            work.later.insert(name, Later { at, next, deadline });
                        }
                        Wait::For(wait) => {
                            work.later.insert(name, Later { at: now_ms() + wait, next: BACKOFF_MS.0, deadline });
                        }
                    }
                }
                let _ = done.send(());
            });
        }
        let planned = tokio::select! {
            _ = changes.changed() => false,
            _ = finished.recv() => false,
            () = ctx.claimed.notified() => true,
            () = tokio::time::sleep(TICK) => false,
        };
        // What else happens may wait for more of its kind; the claims of a plan are all there.
        if !planned {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = ctx.claimed.notified() => {}
            }
        }
        changes.mark_unchanged();
        while finished.try_recv().is_ok() {}
    }
}

/// Claims with their next steps, and when their drains must be over.
fn due(state: &ClusterState, work: &Mutex<Work>, now: i64) -> Vec<(String, Step, Option<i64>)> {
    let mut work = lock(&work);
    work.later.retain(|name, _| state.claims.contains_key(name));
    let mut out = Vec::new();
    for (name, claim) in &state.claims {
        let deleting = claim.metadata.deletion_timestamp.is_some();
        let deadline = drain::termination_deadline(claim).filter(|_| deleting);
        let waits = work.later.get(name).is_some_and(|later| later.at > now && later.deadline == deadline);
        if waits || work.busy.contains(name) {
            continue;
        }
        let node = state.node_of(claim);
        let drained =
            !deleting || node.is_none_or(|node| drain::waiting(state, claim, &node.name_any(), now).is_empty());
        let step = next_step(claim, node.map(|node| &**node), drained, now);
        let launch = step == Step::Launch;
        let room = if launch { work.launching < LAUNCHES } else { work.busy.len() - work.launching < CONCURRENCY };
        if room && step != Step::Nothing {
            work.busy.insert(name.clone());
            work.launching += usize::from(launch);
            out.push((name.clone(), step, deadline));
        }
    }
    out
}

/// Does one step. Returns how long to leave the claim alone afterwards.
async fn take(ctx: &Arc<Context>, name: &str, step: &Step) -> Result<Wait, Failure> {
    let (claim, node) = {
        let state = ctx.cluster.read();
        let Some(claim) = state.claims.get(name).cloned() else {
            return Ok(Wait::No);
        };
        let node = state.node_of(&claim).cloned();
        (claim, node)
    };
    match (step, &node) {
        (Step::AddFinalizer, _) => {
            let mut finalizers = claim.finalizers().to_vec();
            finalizers.push(labels::TERMINATION_FINALIZER.into());
            let patch = json!({"metadata": {"finalizers": finalizers, "resourceVersion": claim.resource_version()}});
            ctx.patch_claim(name, &patch).await?;
        }
        (Step::Launch, _) => launch::launch(ctx, &claim).await?,
        (Step::GiveUp(reason), _) => {
            give_up(ctx, name, reason, "it did not come up in time").await;
            return Ok(Wait::For(POLL_MS));
        }
        // Spread over partitions must not be judged by a label that is yet to come.
        (Step::Sync, Some(_)) if launch::lacks_partition(&claim) => {
            if now_ms() - created_ms(&claim.metadata) > REGISTRATION_TIMEOUT_MS {
                let why = "EC2 does not say in which partition its instance is".to_owned();
                return Err(Failure::Hopeless("registration_timeout", why));
            }
            let learnt = launch::learn_partition(ctx, &claim).await?;
            return Ok(if learnt { Wait::No } else { Wait::For(PARTITION_POLL_MS) });
        }
        (Step::Sync, Some(node)) => {
            ctx.patch_node(&node.name_any(), &sync_patch(&claim, node)).await?;
        }
        (Step::Open, Some(node)) => {
            return Ok(nominations::open(ctx, &claim, node).await?.map_or(Wait::No, Wait::For));
        }
        (Step::Register, Some(node)) => {
            let note = json!({"nodeName": node.name_any()});
            set(ctx, &claim, "Registered", None, Some(note)).await?;
            ctx.metrics.nodes_registered.inc();
        }
        (Step::Initialize, Some(node)) => {
            ctx.patch_node(&node.name_any(), &json!({"metadata": {"labels": {(labels::INITIALIZED): "true"}}})).await?;
            set(ctx, &claim, "Initialized", None, None).await?;
            tracing::info!(claim = name, node = node.name_any(), "initialized");
        }
        (Step::Explain(reason), _) => {
            set(ctx, &claim, "Initialized", Some(reason), None).await?;
            return Ok(Wait::For(POLL_MS));
        }
        (Step::WriteDeadline(at), _) => {
            let at = rfc3339(*at);
            let patch = json!({"metadata": {"annotations": {(labels::TERMINATION_TIMESTAMP): at}}});
            ctx.patch_claim(name, &patch).await?;
            let note = format!("all its pods will be deleted by {at}");
            crate::controllers::provisioning::provisioner::claim_event(
                ctx,
                &claim,
                true,
                "TerminationGracePeriodExpiring",
                &note,
            )
            .await;
        }
        (Step::DeleteNode, Some(node)) => delete_node(ctx, node).await?,
        (Step::FollowNode, _) => delete_claim(ctx, &claim).await?,
        (Step::Drain, Some(node)) => {
            // Where only budgets are in the way, asking again and again helps nobody.
            return Ok(drain::step(ctx, &claim, node).await?.map_or(Wait::For(POLL_MS), Wait::Longer));
        }
        (Step::Terminate, node) => return terminate(ctx, &claim, node.as_deref()).await,
        // The node went away between the look and the step: look again.
        (_, _) => {}
    }
    Ok(Wait::No)
}

/// Reads a claim and its Node anew, after a conflict. Under a burst the watch lags behind, and to write again on what it shows
/// would fail again and keep the API server from catching up.
async fn look_again(ctx: &Context, name: &str) {
    let node = {
        let state = ctx.cluster.read();
        state.claims.get(name).and_then(|claim| state.node_of(claim)).map(|node| node.name_any())
    };
    if let Some(node) = node
        && let Ok(Some(node)) = Api::<Node>::all(ctx.client.clone()).get_opt(&node).await
    {
        ctx.cluster.update(|state| state.apply_node(node));
    }
    if let Ok(Some(claim)) = Api::<NodeClaim>::all(ctx.client.clone()).get_opt(name).await {
        ctx.cluster.update(|state| state.apply_claim(claim));
    }
}

/// Sets a condition: true, or unknown with a reason. Writes only what changes.
async fn set(
    ctx: &Context,
    claim: &NodeClaim,
    kind: &str,
    unknown: Option<&str>,
    more: Option<Value>,
) -> Result<(), kube::Error> {
    let before = claim.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let mut list = before.clone();
    let generation = claim.metadata.generation;
    let created = claim.metadata.creation_timestamp.as_ref();
    let now = Time(Timestamp::now());
    let mut judged = Conditions::open(&mut list, NODE_CLAIM_DEPENDENTS, generation, created, &now);
    match unknown {
        None => judged.set_true(kind),
        Some(reason) => judged.set_unknown(kind, reason, ""),
    };
    if list == before && more.is_none() {
        return Ok(());
    }
    let mut status = more.unwrap_or_else(|| json!({}));
    status["conditions"] = json!(list);
    ctx.patch_claim_status(&claim.name_any(), &status).await
}

fn sync_patch(claim: &NodeClaim, node: &Node) -> Value {
    let mut finalizers = node.finalizers().to_vec();
    finalizers.push(labels::TERMINATION_FINALIZER.into());
    let mut taints: Vec<Taint> = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
    if node.labels().get(labels::DO_NOT_SYNC_TAINTS).is_none_or(|value| value != "true") {
        for taint in claim.spec.taints.iter().chain(&claim.spec.startup_taints) {
            if !taints.iter().any(|other| other.key == taint.key && other.effect == taint.effect) {
                taints.push(taint.clone());
            }
        }
    }
    let mut owners = node.owner_references().to_vec();
    if let Some(mut owner) = claim.owner_ref(&())
        && !owners.iter().any(|other| other.uid == owner.uid)
    {
        owner.block_owner_deletion = Some(true);
        owners.push(owner);
    }
    // Our own bookkeeping on the claim is no business of the node's.
    let annotations: std::collections::BTreeMap<_, _> =
        claim.annotations().iter().filter(|(key, _)| !key.starts_with("stowage.dev/")).collect();
    json!({
        "metadata": {
            "resourceVersion": node.resource_version(),
            "finalizers": finalizers,
            "ownerReferences": owners,
            "labels": single_values(claim),
            "annotations": annotations,
        },
        "spec": {"taints": taints},
    })
}

async fn give_up(ctx: &Context, name: &str, reason: &str, why: &str) {
    let claim = ctx.cluster.read().claims.get(name).cloned();
    let Some(claim) = claim else { return };
    tracing::warn!(claim = name, reason, why, "node claim is given up");
    crate::controllers::provisioning::provisioner::claim_event(
        ctx,
        &claim,
        true,
        "Disrupted",
        &format!("{reason}: {why}"),
    )
    .await;
    match delete_claim(ctx, &claim).await {
        Ok(()) => metrics::count(ctx, &claim, reason),
        Err(error) => tracing::warn!(claim = name, %error, "node claim could not be deleted, trying again"),
    }
}

/// Deletes a claim; its finalizer does the rest.
///
/// # Errors
/// The API server's, unless the claim is gone already.
pub async fn delete_claim(ctx: &Context, claim: &NodeClaim) -> Result<(), kube::Error> {
    let api: Api<NodeClaim> = Api::all(ctx.client.clone());
    let deleted = api.delete(&claim.name_any(), &same_uid(claim.uid())).await;
    gone_is_fine(deleted.map(|answer| {
        if let Some(claim) = answer.left() {
            ctx.cluster.update(|state| state.apply_claim(claim));
        }
    }))
}

/// Deletes a Node; its finalizer, where it has one, does the rest.
///
/// # Errors
/// The API server's, unless the Node is gone already.
pub async fn delete_node(ctx: &Context, node: &Node) -> Result<(), kube::Error> {
    let api: Api<Node> = Api::all(ctx.client.clone());
    let deleted = api.delete(&node.name_any(), &same_uid(node.uid())).await;
    gone_is_fine(deleted.map(|answer| {
        if let Some(node) = answer.left() {
            ctx.cluster.update(|state| state.apply_node(node));
        }
    }))
}

fn same_uid(uid: Option<String>) -> DeleteParams {
    DeleteParams { preconditions: Some(Preconditions { uid, resource_version: None }), ..DeleteParams::default() }
}

/// Terminates a claim's instance; when it is gone, lets go of the Node and then of the claim.
async fn terminate(ctx: &Context, claim: &NodeClaim, node: Option<&Node>) -> Result<Wait, Failure> {
    let cloud = |error: crate::cloud::CloudError| Failure::Later(format!("terminating its instance: {error}"));
    let ids = if let Some(id) = claim.status.as_ref().and_then(|status| status.provider_id.clone()) {
        vec![id]
    } else {
        // It may have been launched by a process that died before it could write so, or by a call whose answer was lost.
        let found = ctx.cloud.launched_for(claim).await.map_err(cloud)?;
        let state = ctx.cluster.read();
        launch_group::left_behind(claim, state.claims.values().map(|claim| &**claim), &found)
    };
    // Each is asked for, whatever becomes of the others.
    let going = join_all(ids.iter().map(|id| ctx.cloud.terminate(id))).await;
    if going.iter().any(|going| matches!(going, Ok(true))) {
        return Ok(Wait::For(POLL_MS));
    }
    going.into_iter().collect::<Result<Vec<bool>, _>>().map_err(cloud)?;
    if let Some(node) = node {
        release_node(ctx, node).await?;
    }
    release(claim.finalizers(), |left| {
        let patch = json!({"metadata": {"finalizers": left, "resourceVersion": claim.resource_version()}});
        async move { gone_is_fine(ctx.patch_claim(&claim.name_any(), &patch).await) }
    })
    .await?;
    tracing::info!(claim = claim.name_any(), "terminated");
    Ok(Wait::For(POLL_MS))
}

/// Takes our finalizer off a Node.
///
/// # Errors
/// The API server's, unless the Node is gone already.
pub async fn release_node(ctx: &Context, node: &Node) -> Result<(), kube::Error> {
    release(node.finalizers(), |left| {
        let patch = json!({"metadata": {"finalizers": left, "resourceVersion": node.resource_version()}});
        async move { gone_is_fine(ctx.patch_node(&node.name_any(), &patch).await) }
    })
    .await
}

async fn release<F: Future<Output = Result<(), kube::Error>>>(
    finalizers: &[String],
    write: impl FnOnce(Vec<String>) -> F,
) -> Result<(), kube::Error> {
    let left: Vec<String> =
        finalizers.iter().filter(|finalizer| *finalizer != labels::TERMINATION_FINALIZER).cloned().collect();
    if left.len() == finalizers.len() {
        return Ok(());
    }
    write(left).await
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests;
