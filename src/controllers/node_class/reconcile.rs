//! EC2NodeClasses: what each comes to in the cloud, as status and conditions; its drift hash; its end.
//!
//! A cloud that has nothing to discover, as simulated EC2, finds every class ready as soon as it is seen.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::api::conditions;
use crate::api::conditions::{Conditions, DRIFTED, EC2_NODE_CLASS_DEPENDENTS};
use crate::api::{Ec2NodeClass, Ec2NodeClassStatus, NodeClaim, NodePool, hash};
use crate::cloud::{CloudError, NodeClassCloud, Resolution, Verdict};
use crate::controllers::context::{Context, gone_is_fine, is_conflict, is_not_found, reference};
use crate::model::labels;
use crate::state::{ClusterState, now_ms};

/// The state is looked at at least this often.
const TICK: Duration = Duration::from_secs(5);
/// Classes that are looked up at the same time.
const CONCURRENCY: usize = 10;
/// Longest wait after something could not be judged; the wait doubles up to it.
const LONGEST_RETRY: Duration = Duration::from_mins(1);
/// Most claims that an event names.
const NAMED: usize = 5;

/// Why a class could not be dealt with.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("writing the class: {0}")]
    Api(#[from] kube::Error),
    #[error("deleting what was made for the class: {0}")]
    Cloud(#[from] CloudError),
}

/// What a class was when it was last looked up, how often in a row something could not be judged, and when it is looked up again,
/// milliseconds since the epoch.
struct Looked {
    what: String,
    failures: u32,
    again_ms: i64,
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    let mut looked: HashMap<String, Looked> = HashMap::new();
    loop {
        let classes: Vec<Arc<Ec2NodeClass>> = ctx.cluster.read().classes.values().cloned().collect();
        looked.retain(|name, _| classes.iter().any(|class| class.name_any() == *name));
        let now = now_ms();
        let is_due = |class: &&Arc<Ec2NodeClass>| {
            let before = looked.get(&class.name_any());
            before.is_none_or(|before| before.what != what(class) || before.again_ms <= now)
        };
        let due: Vec<Arc<Ec2NodeClass>> = classes.iter().filter(is_due).cloned().collect();
        for some in due.chunks(CONCURRENCY) {
            let results = join_all(some.iter().map(|class| reconcile(&ctx, class))).await;
            for (class, result) in some.iter().zip(results) {
                let (again, judged) = result.unwrap_or_else(|error| {
                    let quiet = matches!(&error, Failure::Api(error) if is_not_found(error) || is_conflict(error));
                    if !quiet {
                        tracing::warn!(class = class.name_any(), %error, "trying again");
                    }
                    (TICK, true)
                });
                let before = looked.get(&class.name_any()).filter(|before| before.what == what(class));
                let failures = if judged { 0 } else { before.map_or(0, |before| before.failures) + 1 };
                let wait = i64::try_from(backed_off(again, failures).as_millis()).unwrap_or(i64::MAX);
                let again_ms = now_ms().saturating_add(wait);
                looked.insert(class.name_any(), Looked { what: what(class), failures, again_ms });
            }
        }
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        changes.mark_unchanged();
    }
}

/// When to look again after something could not be judged so often in a row: what is refused for good is asked ever less often.
fn backed_off(again: Duration, failures: u32) -> Duration {
    if failures == 0 {
        return again;
    }
    again.max(again.saturating_mul(1 << (failures - 1).min(10)).min(LONGEST_RETRY))
}

/// What makes a class another one to look up: what people write, not what we do.
fn what(class: &Ec2NodeClass) -> String {
    let own = [labels::EC2_NODE_CLASS_HASH, labels::EC2_NODE_CLASS_HASH_VERSION];
    let annotations: Vec<_> = class.annotations().iter().filter(|(key, _)| !own.contains(&key.as_str())).collect();
    let meta = &class.metadata;
    format!("{:?} {:?} {:?} {annotations:?}", meta.uid, meta.generation, meta.deletion_timestamp.is_some())
}

/// Brings a class up to date. Returns when to look again, and whether everything could be judged.
async fn reconcile(ctx: &Context, class: &Arc<Ec2NodeClass>) -> Result<(Duration, bool), Failure> {
    let ca = ctx.cloud.capabilities().node_classes.map(NodeClassCloud::instance_ca);
    if class.metadata.deletion_timestamp.is_some() {
        return Ok((end(ctx, class).await?, true));
    }
    let mut class = Arc::clone(class);
    if let Some(ca) = ca {
        let claims: Vec<Arc<NodeClaim>> = claims_of(&ctx.cluster.read(), &class.name_any());
        for (name, patch) in restamped(&class, &claims, &ca) {
            gone_is_fine(ctx.patch_claim(&name, &patch).await)?;
        }
        if let Some(patch) = marks(&class, &ca) {
            class = Arc::new(write(ctx, &class, &patch).await?);
        }
    }
    let pools = pools_of(&ctx.cluster.read(), &class.name_any());
    let resolution = match ctx.cloud.capabilities().node_classes {
        Some(node_classes) => node_classes.resolve(&class, &pools).await,
        None => Resolution::all_true(),
    };
    for (kind, verdict) in &resolution.verdicts {
        if let Verdict::Unjudged(error) = verdict {
            tracing::warn!(class = class.name_any(), condition = kind, error, "not judged, what was known stands");
            let note = format!("{kind} could not be judged, what was known stands: {error}");
            ctx.event(reference(&*class), true, "NotJudged", &note).await;
        }
        if let Verdict::Degraded(reason, message) = verdict {
            tracing::warn!(class = class.name_any(), condition = kind, reason, message, "degraded");
            ctx.event(reference(&*class), true, reason, message).await;
        }
    }
    let before = class.status.clone().unwrap_or_default();
    let after = status(&class, &resolution, &Time(Timestamp::now()));
    if after != before {
        let api: Api<Ec2NodeClass> = Api::all(ctx.client.clone());
        // Fails where the class was written since it was read: it is looked up anew then.
        let patch = json!({"metadata": {"resourceVersion": class.resource_version()}, "status": whole(&after)});
        let written = api.patch_status(&class.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
        for condition in newly_false(&before, &after) {
            ctx.event(reference(&written), true, &condition.0, &condition.1).await;
        }
        ctx.cluster.update(|state| state.classes.insert(class.name_any(), Arc::new(written)));
    }
    let judged = !resolution.verdicts.iter().any(|(_, verdict)| matches!(verdict, Verdict::Unjudged(_)));
    Ok((resolution.requeue_after, judged))
}

/// Merge-patches a class and takes the answer into the state.
async fn write(ctx: &Context, class: &Ec2NodeClass, patch: &Value) -> Result<Ec2NodeClass, kube::Error> {
    let api: Api<Ec2NodeClass> = Api::all(ctx.client.clone());
    let written = api.patch(&class.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
    ctx.cluster.update(|state| {
        if written.finalizers().is_empty() && written.metadata.deletion_timestamp.is_some() {
            state.classes.remove(&written.name_any());
        } else {
            state.classes.insert(written.name_any(), Arc::new(written.clone()));
        }
    });
    Ok(written)
}

/// The status of a class by what it comes to. What could not be judged keeps its condition.
fn status(class: &Ec2NodeClass, resolution: &Resolution, now: &Time) -> Ec2NodeClassStatus {
    let before = class.status.clone().unwrap_or_default();
    let mut list = before.conditions.clone();
    let mut out = resolution.status.clone().unwrap_or(before);
    let (generation, created) = (class.metadata.generation, class.metadata.creation_timestamp.as_ref());
    let mut judged = Conditions::open(&mut list, EC2_NODE_CLASS_DEPENDENTS, generation, created, now);
    for (kind, verdict) in &resolution.verdicts {
        match verdict {
            Verdict::True | Verdict::Degraded(..) => judged.set_true(kind),
            Verdict::False(reason, message) => judged.set_false(kind, reason, message),
            Verdict::Unknown(reason, message) => judged.set_unknown(kind, reason, message),
            Verdict::Unjudged(_) => false,
        };
    }
    out.conditions = list;
    out
}

/// A status as a merge patch: what is empty is taken away.
fn whole(status: &Ec2NodeClassStatus) -> Value {
    json!({
        "subnets": status.subnets,
        "securityGroups": status.security_groups,
        "capacityReservations": status.capacity_reservations,
        "amis": status.amis,
        "instanceProfile": status.instance_profile,
        "conditions": status.conditions,
    })
}

/// Reasons and messages of the conditions that became False.
fn newly_false(before: &Ec2NodeClassStatus, after: &Ec2NodeClassStatus) -> Vec<(String, String)> {
    let is_false = |status: &Ec2NodeClassStatus, kind: &str| {
        conditions::get(&status.conditions, kind).is_some_and(|condition| condition.status == "False")
    };
    let new = after.conditions.iter().filter(|condition| condition.type_ != conditions::READY);
    new.filter(|condition| condition.status == "False" && !is_false(before, &condition.type_))
        .map(|condition| (condition.reason.clone(), format!("{}: {}", condition.type_, condition.message)))
        .collect()
}

/// The finalizer and the hash annotations, where they aren't right yet.
fn marks(class: &Ec2NodeClass, ca: &str) -> Option<Value> {
    let wanted = [
        (labels::EC2_NODE_CLASS_HASH, hash::node_class(&class.spec, ca)),
        (labels::EC2_NODE_CLASS_HASH_VERSION, hash::NODE_CLASS_VERSION.to_owned()),
    ];
    let stamped = wanted.iter().all(|(key, value)| class.annotations().get(*key) == Some(value));
    let held = class.finalizers().iter().any(|finalizer| finalizer == labels::EC2_TERMINATION_FINALIZER);
    if stamped && held {
        return None;
    }
    let annotations: serde_json::Map<String, Value> =
        wanted.into_iter().map(|(key, value)| (key.to_owned(), Value::String(value))).collect();
    let mut metadata = json!({"annotations": annotations});
    if !held {
        let mut finalizers = class.finalizers().to_vec();
        finalizers.push(labels::EC2_TERMINATION_FINALIZER.into());
        metadata["finalizers"] = json!(finalizers);
        metadata["resourceVersion"] = json!(class.resource_version());
    }
    Some(json!({ "metadata": metadata }))
}

/// Whether the hash on a class is that of what it says now, for a cloud whose instances get `ca`.
pub fn is_stamped(class: &Ec2NodeClass, ca: &str) -> bool {
    let annotation = |key: &str| class.annotations().get(key).map(String::as_str);
    annotation(labels::EC2_NODE_CLASS_HASH_VERSION) == Some(hash::NODE_CLASS_VERSION)
        && annotation(labels::EC2_NODE_CLASS_HASH) == Some(hash::node_class(&class.spec, ca).as_str())
}

/// What has to be written on claims when the class's hash has another version than ours: the hash counts anew, so that a new
/// way of counting drifts no node. One that has drifted already keeps its hash.
fn restamped(class: &Ec2NodeClass, claims: &[Arc<NodeClaim>], ca: &str) -> Vec<(String, Value)> {
    let version = |annotations: &std::collections::BTreeMap<String, String>| {
        annotations.get(labels::EC2_NODE_CLASS_HASH_VERSION).map(String::as_str) == Some(hash::NODE_CLASS_VERSION)
    };
    if version(class.annotations()) {
        return vec![];
    }
    let new = hash::node_class(&class.spec, ca);
    let old = claims.iter().filter(|claim| !version(claim.annotations()));
    old.map(|claim| {
        let drifted = claim.status.iter().any(|status| conditions::get(&status.conditions, DRIFTED).is_some());
        let mut annotations = json!({(labels::EC2_NODE_CLASS_HASH_VERSION): hash::NODE_CLASS_VERSION});
        if !drifted {
            annotations[labels::EC2_NODE_CLASS_HASH] = json!(new);
        }
        (claim.name_any(), json!({"metadata": {"annotations": annotations}}))
    })
    .collect()
}

fn claims_of(state: &ClusterState, class: &str) -> Vec<Arc<NodeClaim>> {
    state.claims.values().filter(|claim| claim.spec.node_class_ref.name == class).cloned().collect()
}

fn pools_of(state: &ClusterState, class: &str) -> Vec<Arc<NodePool>> {
    let names = |pool: &&Arc<NodePool>| pool.spec.template.spec.node_class_ref.name == class;
    state.pools.values().filter(names).cloned().collect()
}

/// The end of a class: it waits for its claims, then what was made for it goes, then its finalizer.
async fn end(ctx: &Context, class: &Arc<Ec2NodeClass>) -> Result<Duration, Failure> {
    let name = class.name_any();
    if !class.finalizers().iter().any(|finalizer| finalizer == labels::EC2_TERMINATION_FINALIZER) {
        return Ok(Duration::from_mins(1));
    }
    let claims = claims_of(&ctx.cluster.read(), &name);
    if !claims.is_empty() {
        ctx.event(reference(&**class), false, "WaitingOnNodeClaimTermination", &waits_for(&claims)).await;
        return Ok(TICK);
    }
    if let Some(node_classes) = ctx.cloud.capabilities().node_classes {
        node_classes.release_class(class).await?;
    }
    let left: Vec<&String> =
        class.finalizers().iter().filter(|finalizer| *finalizer != labels::EC2_TERMINATION_FINALIZER).collect();
    let patch = json!({"metadata": {"finalizers": left, "resourceVersion": class.resource_version()}});
    gone_is_fine(write(ctx, class, &patch).await.map(|_| ()))?;
    tracing::info!(class = name, "node class released");
    Ok(TICK)
}

fn waits_for(claims: &[Arc<NodeClaim>]) -> String {
    let mut names: Vec<String> = claims.iter().map(|claim| claim.name_any()).collect();
    names.sort();
    let more = names.len().saturating_sub(NAMED);
    names.truncate(NAMED);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("waiting for the NodeClaims of this class to go: {}{rest}", names.join(", "))
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::objects;

    fn class(metadata: Value, status: Value) -> Ec2NodeClass {
        let mut meta = json!({"generation": 2});
        json_patch::merge(&mut meta, &metadata);
        objects::node_class("default", &json!({"metadata": meta, "status": status}))
    }

    fn claim(name: &str, annotations: Value, conditions: Value) -> Arc<NodeClaim> {
        let patch = json!({"metadata": {"annotations": annotations}, "status": {"conditions": conditions}});
        Arc::new(objects::claim(name, &patch))
    }

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    fn resolution(verdict: Verdict, status: Option<Ec2NodeClassStatus>) -> Resolution {
        let mut verdicts: Vec<_> = EC2_NODE_CLASS_DEPENDENTS.iter().map(|kind| (*kind, Verdict::True)).collect();
        verdicts[0].1 = verdict;
        Resolution { status, verdicts, requeue_after: TICK }
    }

    fn ready(status: &Ec2NodeClassStatus) -> &str {
        &conditions::get(&status.conditions, "Ready").unwrap().status
    }

    #[test]
    fn what_can_not_be_judged_is_asked_ever_less_often() {
        let seconds = Duration::from_secs;
        for (again, failures, expected) in [
            (seconds(60), 0, seconds(60)),
            (seconds(10), 1, seconds(10)),
            (seconds(10), 2, seconds(20)),
            (seconds(10), 3, seconds(40)),
            (seconds(10), 4, seconds(60)),
            (seconds(10), 4_000_000, seconds(60)),
            (seconds(3_600), 3, seconds(3_600)),
        ] {
            assert_eq!(backed_off(again, failures), expected, "{again:?} {failures}");
        }
    }

    #[test]
    fn verdicts_become_conditions_and_what_is_not_judged_stays() {
        let fresh = class(json!({}), Value::Null);
        let good = status(&fresh, &resolution(Verdict::True, None), &at(1));
        assert_eq!(ready(&good), "True");
        let mut known = fresh.clone();
        known.status = Some(good.clone());
        let bad = status(&known, &resolution(Verdict::False("AMINotFound", "none".into()), None), &at(2));
        assert_eq!(ready(&bad), "False");
        assert_eq!(newly_false(&good, &bad), [("AMINotFound".to_owned(), "AMIsReady: none".to_owned())]);
        assert!(newly_false(&bad, &bad).is_empty());
        let degraded = resolution(Verdict::Degraded("Unreadable", "refused".into()), None);
        assert_eq!(status(&fresh, &degraded, &at(1)), good);
        let unjudged = resolution(Verdict::Unjudged("throttled".into()), None);
        assert_eq!(status(&known, &unjudged, &at(3)), good);
        assert_eq!(ready(&status(&fresh, &unjudged, &at(3))), "Unknown");
        known.metadata.generation = Some(3);
        assert_eq!(ready(&status(&known, &unjudged, &at(3))), "Unknown", "known of what it said before");
    }

    #[test]
    fn an_empty_list_is_written_as_such() {
        let text = whole(&Ec2NodeClassStatus::default());
        assert_eq!((&text["subnets"], &text["instanceProfile"]), (&json!([]), &Value::Null));
    }

    #[test]
    fn a_class_gets_its_finalizer_and_its_hash_once() {
        let patch = marks(&class(json!({"finalizers": ["other/one"]}), Value::Null), "ca").unwrap();
        let finalizers = &patch["metadata"]["finalizers"];
        assert_eq!(*finalizers, json!(["other/one", "karpenter.k8s.aws/termination"]));
        let annotations = &patch["metadata"]["annotations"];
        assert_eq!(annotations[labels::EC2_NODE_CLASS_HASH_VERSION], "v6");
        let metadata = json!({"finalizers": finalizers, "annotations": annotations});
        assert!(marks(&class(metadata.clone(), Value::Null), "ca").is_none());
        assert!(marks(&class(metadata, Value::Null), "another").is_some(), "the CA is part of the hash");
    }

    #[test]
    fn a_new_version_of_the_hash_drifts_no_node() {
        let old = json!({(labels::EC2_NODE_CLASS_HASH): "1", (labels::EC2_NODE_CLASS_HASH_VERSION): "v5"});
        let drifted = json!([{"type": "Drifted", "status": "True", "reason": "r", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        let current = json!({(labels::EC2_NODE_CLASS_HASH): "2", (labels::EC2_NODE_CLASS_HASH_VERSION): "v6"});
        let claims = [
            claim("old", old.clone(), json!([])),
            claim("drifted", old.clone(), drifted),
            claim("current", current, json!([])),
        ];
        let class = |annotations| class(json!({"annotations": annotations}), Value::Null);
        let patches = restamped(&class(old), &claims, "ca");
        let annotations: Vec<(&str, &Value)> =
            patches.iter().map(|(name, patch)| (name.as_str(), &patch["metadata"]["annotations"])).collect();
        assert_eq!(annotations.len(), 2);
        assert_eq!(annotations[0].0, "old");
        assert_eq!(annotations[0].1[labels::EC2_NODE_CLASS_HASH], hash::node_class(&class(json!({})).spec, "ca"));
        assert_eq!(annotations[1].1.get(labels::EC2_NODE_CLASS_HASH), None);
        let current = json!({(labels::EC2_NODE_CLASS_HASH_VERSION): "v6"});
        assert!(restamped(&class(current), &claims, "ca").is_empty());
    }

    #[test]
    fn c35_the_event_names_five_claims_at_most() {
        let claims: Vec<_> = (1..=7).map(|n| claim(&format!("c{n}"), json!({}), json!([]))).collect();
        assert!(waits_for(&claims).ends_with("c1, c2, c3, c4, c5 and 2 more"));
        assert!(waits_for(&claims[..1]).ends_with(": c1"));
    }

    #[test]
    fn only_what_people_write_makes_a_class_another_one() {
        let base = class(json!({}), Value::Null);
        let stamped = class(json!({"annotations": {(labels::EC2_NODE_CLASS_HASH): "1"}}), json!({"conditions": []}));
        assert_eq!(what(&base), what(&stamped));
        assert_ne!(what(&base), what(&class(json!({"annotations": {"a": "b"}}), Value::Null)));
        assert_ne!(what(&base), what(&class(json!({"generation": 3}), Value::Null)));
    }
}
