//! Reconciles EC2NodeClasses: resolves them in the cloud to status and conditions, sets the drift hash and the finalizer, and releases
//! deleted classes. With a cloud that resolves nothing, such as simulated EC2, every class is Ready.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use stowage_api::conditions;
use stowage_api::{Ec2NodeClass, Ec2NodeClassStatus, NodeClaim, NodePool};
use stowage_cloud::{CloudError, NodeClassCloud, Resolution, Verdict};
use stowage_model::events;
use stowage_model::events::DeclaredEvent;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;

use crate::controllers::condition_writer::ConditionWriter;
use crate::controllers::context::{Context, ignore_not_found, is_conflict, is_not_found, reference};
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::lifecycle::drift_hash::DriftHash;
use crate::state::ClusterState;
use crate::state::object_ext::ObjectExt;

const PACE: Pace = Pace { debounce: Duration::from_millis(200), resync: Duration::from_secs(5) };
/// Classes that are reconciled concurrently. EC2's rate limits bound the calls; this bounds memory.
const CONCURRENCY: usize = 50;
/// Longest backoff when a condition could not be evaluated.
const MAX_BACKOFF: Duration = Duration::from_mins(1);
/// Maximum number of claims that an event names.
const MAX_NAMED: usize = 5;

/// Why a class could not be reconciled.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("writing the class: {0}")]
    Api(#[from] kube::Error),
    #[error("deleting the cloud resources of the class: {0}")]
    Cloud(#[from] CloudError),
}

/// The last pass over a class.
#[derive(Debug)]
struct Reconciled {
    fingerprint: String,
    /// Consecutive passes in which a condition could not be evaluated, or a cloud resource not be deleted.
    failures: u32,
    /// When the class is reconciled again without a change.
    due: UnixMillis,
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut reconciled: HashMap<String, Reconciled> = HashMap::new();
    // A class whose calls hang delays no other.
    let mut in_progress: HashSet<String> = HashSet::new();
    let mut workers = FuturesUnordered::new();
    loop {
        let classes: Vec<Arc<Ec2NodeClass>> = ctx.cluster.read().classes.values().cloned().collect();
        reconciled.retain(|name, _| classes.iter().any(|class| class.name_any() == *name));
        let now = clock::now();
        let is_due = |class: &&Arc<Ec2NodeClass>| {
            let last = reconciled.get(&class.name_any());
            last.is_none_or(|last| last.fingerprint != fingerprint(class) || last.due <= now)
        };
        let due: Vec<Arc<Ec2NodeClass>> = classes.iter().filter(is_due).cloned().collect();
        for class in due {
            if workers.len() == CONCURRENCY {
                break;
            }
            if in_progress.insert(class.name_any()) {
                let ctx = &ctx;
                workers.push(async move {
                    let result = reconcile(ctx, &class).await;
                    (class, result)
                });
            }
        }
        tokio::select! {
            Some((class, result)) = workers.next(), if !workers.is_empty() => {
                let name = class.name_any();
                in_progress.remove(&name);
                let done = completed(&class, result, reconciled.get(&name));
                reconciled.insert(name, done);
            }
            () = run_loop.next() => {}
        }
    }
}

/// The result of a pass over a class, after the result of the pass before it.
fn completed(class: &Ec2NodeClass, result: Result<(Duration, bool), Failure>, last: Option<&Reconciled>) -> Reconciled {
    let (requeue_after, succeeded) = result.unwrap_or_else(|error| {
        let expected = matches!(&error, Failure::Api(error) if is_not_found(error) || is_conflict(error));
        if !expected {
            tracing::warn!(class = class.name_any(), %error, "failed to reconcile node class, retrying");
        }
        // Calls that delete cloud resources back off.
        (PACE.resync, !matches!(error, Failure::Cloud(_)))
    });
    let fingerprint = fingerprint(class);
    let last = last.filter(|last| last.fingerprint == fingerprint);
    let failures = if succeeded { 0 } else { last.map_or(0, |last| last.failures) + 1 };
    // A cloud that resolves nothing has no period of its own.
    let wait = backed_off(requeue_after, failures).max(PACE.debounce);
    Reconciled { fingerprint, failures, due: clock::now() + wait }
}

/// The time to the next pass after this number of consecutive failures: exponential backoff up to [`MAX_BACKOFF`].
fn backed_off(requeue_after: Duration, failures: u32) -> Duration {
    if failures == 0 {
        return requeue_after;
    }
    requeue_after.max(requeue_after.saturating_mul(1 << (failures - 1).min(10)).min(MAX_BACKOFF))
}

/// Changes with everything that users write to a class, and not with our own writes.
fn fingerprint(class: &Ec2NodeClass) -> String {
    let own = [labels::EC2_NODE_CLASS_HASH, labels::EC2_NODE_CLASS_HASH_VERSION];
    let annotations: Vec<_> = class.annotations().iter().filter(|(key, _)| !own.contains(&key.as_str())).collect();
    let meta = &class.metadata;
    format!("{:?} {:?} {:?} {annotations:?}", meta.uid, meta.generation, class.is_deleting())
}

/// One pass over a class. Returns the time to the next pass, and whether every condition could be evaluated.
async fn reconcile(ctx: &Context, class: &Arc<Ec2NodeClass>) -> Result<(Duration, bool), Failure> {
    if class.is_deleting() {
        return Ok((finalize(ctx, class).await?, true));
    }
    let mut class = Arc::clone(class);
    let node_classes = ctx.cloud.capabilities().node_classes;
    if let Some(ca) = node_classes.map(NodeClassCloud::instance_ca) {
        let hash = DriftHash::of_class(&class, &ca);
        let claims: Vec<Arc<NodeClaim>> = claims_of(&ctx.cluster.read(), &class.name_any());
        for (name, patch) in hash.claim_patches(&*class, &claims) {
            ignore_not_found(ctx.patch_claim(&name, &patch).await)?;
        }
        if let Some(patch) = metadata_patch(&class, &hash) {
            class = Arc::new(write(ctx, &class, &patch).await?);
        }
    }
    let pools = pools_of(&ctx.cluster.read(), &class.name_any());
    let resolution = match node_classes {
        Some(node_classes) => node_classes.resolve(&class, &pools).await,
        None => Resolution::all_true(),
    };
    for (kind, verdict) in &resolution.verdicts {
        report(ctx, &class, kind, verdict).await;
    }
    let before = class.status.clone().unwrap_or_default();
    let after = status(&class, &resolution, clock::now());
    if after != before {
        let api: Api<Ec2NodeClass> = Api::all(ctx.client.clone());
        // Conflicts when the class was written since it was read; the next pass resolves it again.
        let patch = json!({"metadata": {"resourceVersion": class.resource_version()}, "status": status_patch(&after)});
        let written = api.patch_status(&class.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
        for (event, note) in newly_false(&before, &after, &resolution) {
            ctx.emit(reference(&written), event.note(&note)).await;
        }
        ctx.cluster.update(|state| state.classes.insert(class.name_any(), Arc::new(written)));
    }
    let evaluated = !resolution.verdicts.iter().any(|(_, verdict)| matches!(verdict, Verdict::Unjudged(_)));
    Ok((resolution.requeue_after, evaluated))
}

/// Logs and emits what a condition does not show.
async fn report(ctx: &Context, class: &Ec2NodeClass, kind: &str, verdict: &Verdict) {
    match verdict {
        Verdict::Unjudged(error) => {
            tracing::warn!(class = class.name_any(), condition = kind, error, "condition unknown, keeping last status");
            let note = format!("condition {kind} unknown ({error}); keeping last status");
            ctx.emit(reference(class), events::NOT_JUDGED.note(&note)).await;
        }
        Verdict::Degraded(event, message) => {
            let (class_name, reason) = (class.name_any(), event.reason());
            tracing::warn!(class = class_name, condition = kind, reason, message, "node class is degraded");
            ctx.emit(reference(class), event.note(message)).await;
        }
        Verdict::True | Verdict::False(..) | Verdict::Unknown(..) => {}
    }
}

/// Merge-patches a class and applies the response to the state.
async fn write(ctx: &Context, class: &Ec2NodeClass, patch: &Value) -> Result<Ec2NodeClass, kube::Error> {
    let api: Api<Ec2NodeClass> = Api::all(ctx.client.clone());
    let written = api.patch(&class.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
    ctx.cluster.update(|state| {
        if written.finalizers().is_empty() && written.is_deleting() {
            state.classes.remove(&written.name_any());
        } else {
            state.classes.insert(written.name_any(), Arc::new(written.clone()));
        }
    });
    Ok(written)
}

/// The status of a resolved class. A condition that could not be evaluated is kept.
fn status(class: &Ec2NodeClass, resolution: &Resolution, now: UnixMillis) -> Ec2NodeClassStatus {
    let mut writer = ConditionWriter::for_class(class, now);
    let mut conditions = writer.edit();
    for (kind, verdict) in &resolution.verdicts {
        match verdict {
            Verdict::True | Verdict::Degraded(..) => conditions.set_true(kind),
            Verdict::False(event, message) => conditions.set_false(kind, event.reason(), message),
            Verdict::Unknown(reason, message) => conditions.set_unknown(kind, reason, message),
            Verdict::Unjudged(_) => false,
        };
    }
    let resolved = resolution.status.clone().or_else(|| class.status.clone()).unwrap_or_default();
    Ec2NodeClassStatus { conditions: writer.finish(), ..resolved }
}

/// A status as a merge patch that removes absent fields.
fn status_patch(status: &Ec2NodeClassStatus) -> Value {
    json!({
        "subnets": status.subnets,
        "securityGroups": status.security_groups,
        "capacityReservations": status.capacity_reservations,
        "amis": status.amis,
        "instanceProfile": status.instance_profile,
        "conditions": status.conditions,
    })
}

/// Events and notes of the conditions that a resolution made False.
fn newly_false(
    before: &Ec2NodeClassStatus,
    after: &Ec2NodeClassStatus,
    resolution: &Resolution,
) -> Vec<(&'static DeclaredEvent, String)> {
    let was_false =
        |kind: &str| conditions::get(&before.conditions, kind).is_some_and(|condition| condition.status == "False");
    let event_of = |kind: &str| {
        let (_, verdict) = resolution.verdicts.iter().find(|(other, _)| *other == kind)?;
        if let Verdict::False(event, _) = verdict { Some(*event) } else { None }
    };
    let new = after.conditions.iter().filter(|condition| !was_false(&condition.type_));
    new.filter_map(|condition| {
        Some((event_of(&condition.type_)?, format!("{}: {}", condition.type_, condition.message)))
    })
    .collect()
}

/// The patch that adds the finalizer and the hash annotations; `None` when the class has both.
fn metadata_patch(class: &Ec2NodeClass, hash: &DriftHash) -> Option<Value> {
    let has_finalizer = class.has_finalizer(labels::EC2_TERMINATION_FINALIZER);
    if hash.is_on(class) && has_finalizer {
        return None;
    }
    let mut metadata = json!({"annotations": hash.annotations()});
    if !has_finalizer {
        let mut finalizers = class.finalizers().to_vec();
        finalizers.push(labels::EC2_TERMINATION_FINALIZER.into());
        metadata["finalizers"] = json!(finalizers);
        metadata["resourceVersion"] = json!(class.resource_version());
    }
    Some(json!({ "metadata": metadata }))
}

fn claims_of(state: &ClusterState, class: &str) -> Vec<Arc<NodeClaim>> {
    state.claims.values().filter(|claim| claim.spec.node_class_ref.name == class).cloned().collect()
}

fn pools_of(state: &ClusterState, class: &str) -> Vec<Arc<NodePool>> {
    let names = |pool: &&Arc<NodePool>| pool.spec.template.spec.node_class_ref.name == class;
    state.pools.values().filter(names).cloned().collect()
}

/// Waits for the deletion of the class's claims, then deletes its cloud resources, then removes our finalizer. Returns the time to the
/// next pass.
async fn finalize(ctx: &Context, class: &Arc<Ec2NodeClass>) -> Result<Duration, Failure> {
    let name = class.name_any();
    if !class.has_finalizer(labels::EC2_TERMINATION_FINALIZER) {
        return Ok(Duration::from_mins(1));
    }
    let claims = claims_of(&ctx.cluster.read(), &name);
    if !claims.is_empty() {
        let note = waiting_note(&claims);
        ctx.emit(reference(&**class), events::WAITING_ON_NODE_CLAIM_TERMINATION.note(&note)).await;
        return Ok(PACE.resync);
    }
    if let Some(node_classes) = ctx.cloud.capabilities().node_classes {
        node_classes.release_class(class).await?;
    }
    let left: Vec<&String> =
        class.finalizers().iter().filter(|finalizer| *finalizer != labels::EC2_TERMINATION_FINALIZER).collect();
    let patch = json!({"metadata": {"finalizers": left, "resourceVersion": class.resource_version()}});
    ignore_not_found(write(ctx, class, &patch).await.map(|_| ()))?;
    tracing::info!(class = name, "released node class");
    Ok(PACE.resync)
}

fn waiting_note(claims: &[Arc<NodeClaim>]) -> String {
    let mut names: Vec<String> = claims.iter().map(|claim| claim.name_any()).collect();
    names.sort();
    let more = names.len().saturating_sub(MAX_NAMED);
    names.truncate(MAX_NAMED);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("waiting for {} NodeClaims to be deleted: {}{rest}", claims.len(), names.join(", "))
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests;
