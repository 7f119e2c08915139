//! Messages of the interruption queue: the node is closed at once, its replacement is bought first where time allows,
//! then it is drained and terminated.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;

use crate::api::{NodeClaim, conditions};
use crate::cloud::{InstanceEvents, Message, MessageKind};
use crate::controllers::context::{Context, is_conflict, reference};
use crate::controllers::node_claim::{drain, lifecycle, metrics};
use crate::model::labels;
use crate::state::holds::Holds;
use crate::state::{ClusterState, now_ms, rfc3339};

/// Notice that EC2 gives of a spot interruption, milliseconds.
const SPOT_NOTICE_MS: i64 = 120_000;
/// Time that a scheduled change leaves us, milliseconds; the event itself is usually days ahead.
pub const SCHEDULED_NOTICE_MS: i64 = 600_000;
/// Longest grace period that a drain reckons with, milliseconds.
const MAX_GRACE_MS: i64 = 60_000;
/// What a drain needs beside the pods' grace period, milliseconds.
const DRAIN_MARGIN_MS: i64 = 15_000;
/// First and longest wait after the queue could not be read; the wait doubles.
const RETRY: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// How often a node is tried to be closed that others write at the same time, and how long is waited for what they wrote.
const TRIES: u32 = 8;
const NEXT_TRY: Duration = Duration::from_millis(200);
/// Instances whose messages are handled at the same time.
const CONCURRENCY: usize = 10;
/// The state is looked at at least this often.
const TICK: Duration = Duration::from_millis(500);

/// A disruption under way, as written on the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disrupting {
    /// Why, as in events and metrics.
    pub reason: String,
    /// When the node must be gone, milliseconds since the epoch; `None` where there is no hurry.
    pub deadline_ms: Option<i64>,
}

impl Disrupting {
    /// Reads it off a claim.
    pub fn of(claim: &NodeClaim) -> Option<Self> {
        let text = claim.annotations().get(labels::DISRUPTING)?;
        let (reason, deadline) = text.split_once('/').unwrap_or((text, ""));
        let deadline_ms = deadline.parse::<Timestamp>().ok().map(Timestamp::as_millisecond);
        Some(Self { reason: reason.to_owned(), deadline_ms })
    }

    /// The annotation's value.
    pub fn annotation(&self) -> String {
        format!("{}/{}", self.reason, self.deadline_ms.map(rfc3339).unwrap_or_default())
    }
}

/// What a message asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response {
    /// Tell, and nothing else.
    Tell,
    /// Replace the node, then let it go by the deadline.
    Replace(Disrupting),
    /// The instance is going or gone: follow.
    Delete,
}

/// What a message asks for.
pub fn response(message: &Message) -> Response {
    let replace = |reason: &str, notice: i64| {
        Response::Replace(Disrupting { reason: reason.into(), deadline_ms: Some(message.at.0 + notice) })
    };
    match message.kind {
        MessageKind::SpotInterruption => replace("SpotInterruption", SPOT_NOTICE_MS),
        MessageKind::CapacityReservationInterruption => replace("CapacityReservationInterruption", SPOT_NOTICE_MS),
        MessageKind::ScheduledChange => replace("ScheduledChange", SCHEDULED_NOTICE_MS),
        MessageKind::Stopped | MessageKind::StateChange => Response::Delete,
        MessageKind::RebalanceRecommendation => Response::Tell,
    }
}

/// Reads the queue until the process ends.
pub async fn listen(ctx: Arc<Context>) {
    let (mut counted, mut failures) = (BTreeMap::new(), 0);
    loop {
        let messages = match ctx.cloud.receive_messages().await {
            Ok(messages) => messages,
            Err(error) => {
                if failures == 0 {
                    tracing::warn!(%error, "the interruption queue could not be read, trying again");
                    let note =
                        format!("interruptions of instances are not heard of, the queue could not be read: {error}");
                    tell_of_queue(&ctx, true, "InterruptionQueueUnreadable", &note).await;
                }
                tokio::time::sleep(retry_after(failures)).await;
                failures += 1;
                continue;
            }
        };
        let received = ctx.cloud.capabilities().instance_events.map(InstanceEvents::messages_received);
        for (kind, new) in since(&mut counted, received.clone().unwrap_or_default()) {
            ctx.metrics.interruption_messages.with_label_values(&[kind]).inc_by(new);
        }
        if received.is_none() {
            for message in &messages {
                ctx.metrics.interruption_messages.with_label_values(&[kind_label(message.kind)]).inc();
            }
        }
        let respond = |message| {
            let ctx = Arc::clone(&ctx);
            async move { respond(&ctx, &message).await }
        };
        let handled = handle(messages, respond).await;
        if !handled.is_empty()
            && let Err(error) = ctx.cloud.delete_messages(&handled).await
        {
            tracing::warn!(%error, "messages could not be deleted, they come back");
        }
        if failures > 0 {
            failures = 0;
            tracing::info!("the interruption queue can be read again");
            let note = "interruptions of instances are heard of again";
            tell_of_queue(&ctx, false, "InterruptionQueueReadable", note).await;
        }
    }
}

/// Tells people, but doesn't keep the queue waiting for an API server that takes no event.
async fn tell_of_queue(ctx: &Context, warning: bool, reason: &str, note: &str) {
    let told = tokio::time::timeout(RETRY.1, ctx.tell_classes(warning, reason, note)).await;
    if told.is_err() {
        tracing::warn!(reason, "an event on the node classes could not be written in time");
    }
}

/// How long to wait after the queue could not be read, and not before either for so often in a row.
fn retry_after(failures: u32) -> Duration {
    RETRY.0.saturating_mul(1 << failures.min(10)).min(RETRY.1)
}

/// Handles messages, those of different instances side by side. Returns the receipts of those that were handled; one that could
/// not be acted on comes back when its visibility time-out ends.
///
/// What is handled soon is deleted with what takes longer: meanwhile nobody else asks for messages, so none comes back before.
async fn handle<R>(messages: Vec<Message>, respond: impl Fn(Message) -> R) -> Vec<String>
where
    R: Future<Output = Result<(), kube::Error>>,
{
    let mut by_instance: BTreeMap<String, Vec<Message>> = BTreeMap::new();
    for message in messages {
        by_instance.entry(message.instance_id.clone()).or_default().push(message);
    }
    let respond = &respond;
    let all_of = |messages: Vec<Message>| async move {
        let mut handled = Vec::new();
        for message in messages {
            let (kind, instance, receipt) = (message.kind, message.instance_id.clone(), message.receipt.clone());
            match respond(message).await {
                Ok(()) => handled.push(receipt),
                Err(error) => {
                    tracing::warn!(kind = kind_label(kind), instance, %error, "not handled, it comes back");
                }
            }
        }
        handled
    };
    stream::iter(by_instance.into_values()).map(all_of).buffer_unordered(CONCURRENCY).concat().await
}

/// What was counted since the last look, which `counted` remembers.
fn since(counted: &mut BTreeMap<&'static str, u64>, now: BTreeMap<&'static str, u64>) -> Vec<(&'static str, u64)> {
    let before = std::mem::replace(counted, now.clone());
    let new = now.into_iter().map(|(kind, count)| (kind, count - before.get(kind).copied().unwrap_or(0).min(count)));
    new.filter(|(_, new)| *new > 0).collect()
}

fn kind_label(kind: MessageKind) -> &'static str {
    match kind {
        MessageKind::SpotInterruption => "spot_interrupted",
        MessageKind::RebalanceRecommendation => "rebalance_recommendation",
        MessageKind::CapacityReservationInterruption => "capacity_reservation_interrupted",
        MessageKind::ScheduledChange => "scheduled_change",
        MessageKind::Stopped => "instance_stopped",
        MessageKind::StateChange => "instance_terminated",
    }
}

/// What a message is told as in events on the claim and its node: whether it is a warning, Karpenter's reason, and the note.
fn told(kind: MessageKind) -> (bool, &'static str, &'static str) {
    match kind {
        MessageKind::SpotInterruption => (true, "SpotInterrupted", "EC2 takes the spot instance back in two minutes"),
        MessageKind::RebalanceRecommendation => {
            (false, "SpotRebalanceRecommendation", "EC2 thinks that it may soon take the spot instance back")
        }
        MessageKind::CapacityReservationInterruption => (
            true,
            "CapacityReservationInstanceInterrupted",
            "the owner of the capacity reservation takes the instance back in two minutes",
        ),
        MessageKind::ScheduledChange => {
            (true, "InstanceUnhealthy", "AWS Health has scheduled a change of the instance")
        }
        MessageKind::Stopped => (true, "InstanceStopping", "the instance stops"),
        MessageKind::StateChange => (true, "InstanceTerminating", "the instance shuts down"),
    }
}

/// Tells something of a claim, and of its node, if it has one.
async fn tell(ctx: &Context, claim: &NodeClaim, (warning, reason, note): (bool, &str, &str)) {
    ctx.event(reference(claim), warning, reason, note).await;
    let node = ctx.cluster.read().node_of(claim).cloned();
    if let Some(node) = node {
        ctx.event(reference(&*node), warning, reason, note).await;
    }
}

/// Reason of the event that a claim goes because of what was told of its instance.
const TERMINATING: &str = "TerminatingOnInterruption";

/// The claim that has to do something about a message: `None` where the instance isn't ours, or was let go of already.
fn concerned(state: &ClusterState, message: &Message) -> Option<Arc<NodeClaim>> {
    let suffix = format!("/{}", message.instance_id);
    let is_its = |claim: &&Arc<NodeClaim>| {
        let id = claim.status.as_ref().and_then(|status| status.provider_id.as_ref());
        id.is_some_and(|id| id.ends_with(&suffix))
    };
    let claim = state.claims.values().find(is_its)?;
    claim.metadata.deletion_timestamp.is_none().then(|| Arc::clone(claim))
}

/// Acts on a message first, and tells of it then: there is little time.
async fn respond(ctx: &Arc<Context>, message: &Message) -> Result<(), kube::Error> {
    let claim = concerned(&ctx.cluster.read(), message);
    let Some(claim) = claim else { return Ok(()) };
    let kind = kind_label(message.kind);
    tracing::info!(claim = claim.name_any(), instance = message.instance_id, kind, "interruption message");
    let response = response(message);
    match &response {
        Response::Tell => {}
        Response::Delete => {
            lifecycle::delete_claim(ctx, &claim).await?;
            metrics::count(ctx, &claim, kind);
        }
        Response::Replace(disrupting) => mark(ctx, &claim, disrupting).await?,
    }
    tell(ctx, &claim, told(message.kind)).await;
    if response == Response::Delete {
        tell(ctx, &claim, (true, TERMINATING, "its instance goes or is gone")).await;
    }
    Ok(())
}

/// Writes a disruption on a claim and closes its node. An earlier deadline stays.
///
/// # Errors
/// The API server's.
pub async fn mark(ctx: &Context, claim: &NodeClaim, disrupting: &Disrupting) -> Result<(), kube::Error> {
    let known = Disrupting::of(claim);
    let sooner = known.as_ref().is_none_or(|known| match (known.deadline_ms, disrupting.deadline_ms) {
        (Some(known), Some(new)) => new < known,
        (None, new) => new.is_some(),
        (Some(_), None) => false,
    });
    if sooner || known.is_none() {
        let patch = json!({"metadata": {"annotations": {(labels::DISRUPTING): disrupting.annotation()}}});
        ctx.patch_claim(&claim.name_any(), &patch).await?;
    }
    let mut changes = ctx.cluster.changes();
    for _ in 1..TRIES {
        match close_node(ctx, claim).await {
            // Somebody else wrote the Node: as it is now comes by the watch.
            Err(error) if is_conflict(&error) => drop(tokio::time::timeout(NEXT_TRY, changes.changed()).await),
            done => return done,
        }
    }
    close_node(ctx, claim).await
}

async fn close_node(ctx: &Context, claim: &NodeClaim) -> Result<(), kube::Error> {
    let node = ctx.cluster.read().node_of(claim).cloned();
    match node {
        Some(node) => drain::close(ctx, &node).await,
        None => Ok(()),
    }
}

/// Whether a claim that is being disrupted may be deleted now: nothing on it needs a new place, or every new place is
/// ready, or there is no time left to wait for it.
pub fn departs(state: &ClusterState, holds: &Holds, claim: &NodeClaim, now: i64) -> bool {
    let Some(disrupting) = Disrupting::of(claim) else {
        return false;
    };
    let Some(node) = state.node_of(claim) else { return true };
    let node = node.name_any();
    let moving: Vec<_> = state
        .pods_on(&node)
        .filter(|pod| pod.reschedulable())
        .filter(|pod| pod.entry.as_ref().is_ok_and(|entry| entry.owner.is_some()))
        .collect();
    let grace = moving.iter().map(|pod| pod.grace_seconds * 1_000).max().unwrap_or(0).clamp(0, MAX_GRACE_MS);
    if disrupting.deadline_ms.is_some_and(|deadline| now >= deadline - grace - DRAIN_MARGIN_MS) {
        return true;
    }
    let ready: BTreeSet<&String> = holds
        .by_claim
        .iter()
        .filter(|(name, _)| {
            let status = state.claims.get(*name).and_then(|claim| claim.status.as_ref());
            status.is_some_and(|status| conditions::is_true(&status.conditions, "Initialized"))
        })
        .flat_map(|(_, holds)| holds.iter().filter(|hold| hold.owner.is_some()).map(|hold| &hold.original))
        .collect();
    moving.iter().all(|pod| ready.contains(&pod.key()))
}

/// Deletes the claims whose time has come, until the process ends.
pub async fn depart(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    loop {
        let now = now_ms();
        let due: Vec<Arc<NodeClaim>> = {
            let state = ctx.cluster.read();
            let leaving = || {
                let claims = state.claims.values();
                claims.filter(|claim| claim.metadata.deletion_timestamp.is_none() && Disrupting::of(claim).is_some())
            };
            if leaving().next().is_none() {
                Vec::new()
            } else {
                let holds = state.holds(now);
                leaving().filter(|claim| departs(&state, &holds, claim, now)).cloned().collect()
            }
        };
        for claim in due {
            let Some(Disrupting { reason, deadline_ms }) = Disrupting::of(&claim) else { continue };
            // Empty nodes are closed first and looked at again by the disruption loop, which lets them go itself.
            if reason == crate::controllers::disruption::run::EMPTY {
                continue;
            }
            tracing::info!(claim = claim.name_any(), reason, "its pods have a new place, it goes");
            if let Err(error) = lifecycle::delete_claim(&ctx, &claim).await {
                tracing::warn!(claim = claim.name_any(), %error, "node claim could not be deleted, trying again");
                continue;
            }
            metrics::count(&ctx, &claim, &reason);
            if deadline_ms.is_some() {
                // What we do of our own will has no deadline, and an event of its own.
                tell(&ctx, &claim, (true, TERMINATING, "its pods have a new place, or its time is over")).await;
            }
        }
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        changes.mark_unchanged();
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::UnixMillis;
    use crate::test_support::objects;

    fn claim(name: &str, id: &str, initialized: bool, annotations: &serde_json::Value) -> NodeClaim {
        let conditions: &[&str] = if initialized { &["Initialized"] } else { &[] };
        let status = json!({"providerID": id, "conditions": objects::conditions_true(conditions)});
        objects::claim(name, &json!({"metadata": {"annotations": annotations}, "status": status}))
    }

    fn state(replacement_ready: bool) -> ClusterState {
        let mut state = ClusterState::default();
        state.apply_claim(claim(
            "old",
            "aws:///z/i-1",
            true,
            &json!({(labels::DISRUPTING): "SpotInterruption/1970-01-01T00:02:00Z"}),
        ));
        state.apply_claim(claim("new", "aws:///z/i-2", replacement_ready, &json!({
            (labels::PLANNED_PODS): "[\"n/a\"]", (labels::PLANNED_OWNERS): "{\"n/a\":{\"uid\":\"rs\",\"at_ms\":0}}", (labels::HOLD_UNTIL): "2099-01-01T00:00:00Z"})));
        state.apply_node(objects::node("node-old", &json!({"spec": {"providerID": "aws:///z/i-1"}})));
        let pod = json!({"metadata": {"name": "a", "namespace": "n", "uid": "a",
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "rs", "controller": true}]},
            "spec": {"nodeName": "node-old", "terminationGracePeriodSeconds": 30, "containers": [{"name": "c", "image": "i"}]}});
        state.apply_pod(&serde_json::from_value(pod).unwrap(), 1);
        state
    }

    #[test]
    fn an_interrupted_node_waits_for_its_replacement_but_not_beyond_its_notice() {
        let leaves = |ready: bool, now: i64| {
            let state = state(ready);
            departs(&state, &state.holds(now), &state.claims["old"], now)
        };
        assert!(!leaves(false, 10_000), "the replacement isn't ready");
        assert!(leaves(true, 10_000), "it is");
        assert!(!leaves(false, 74_999));
        assert!(leaves(false, 75_000), "30 s of grace and 15 s of margin before the deadline");
    }

    #[test]
    fn what_a_message_begins_is_counted_by_the_messages_own_word() {
        use MessageKind::{CapacityReservationInterruption, ScheduledChange, SpotInterruption};
        for kind in [SpotInterruption, CapacityReservationInterruption, ScheduledChange] {
            let Response::Replace(disrupting) = response(&Message { kind, ..message("i-1", "r") }) else {
                panic!("{kind:?} replaces")
            };
            assert_eq!(metrics::word(&disrupting.reason), kind_label(kind));
        }
    }

    fn message(instance: &str, receipt: &str) -> Message {
        let (receipt, instance_id) = (receipt.to_owned(), instance.to_owned());
        Message { receipt, kind: MessageKind::StateChange, instance_id, at: UnixMillis(0) }
    }

    #[tokio::test]
    async fn c37_what_is_handled_is_to_be_deleted_and_what_is_not_comes_back() {
        let respond = |message: Message| async move {
            if message.receipt == "r2" { Err(kube::Error::LinesCodecMaxLineLengthExceeded) } else { Ok(()) }
        };
        let messages = [("i-1", "r1"), ("i-2", "r2"), ("i-2", "r3"), ("i-3", "r4")];
        let mut handled = handle(messages.map(|(instance, receipt)| message(instance, receipt)).into(), respond).await;
        handled.sort();
        assert_eq!(handled, ["r1", "r3", "r4"]);
    }

    #[tokio::test]
    async fn c37_ten_instances_are_handled_side_by_side_and_each_ones_messages_in_turn() {
        // Passed only when as many are there at the same time.
        let barrier = tokio::sync::Barrier::new(CONCURRENCY);
        let order = std::sync::Mutex::new(Vec::new());
        let respond = |message: Message| {
            let (barrier, order) = (&barrier, &order);
            async move {
                order.lock().unwrap().push(message.receipt.clone());
                barrier.wait().await;
                Ok(())
            }
        };
        let all = |turn: &str| (0..CONCURRENCY).map(|n| message(&format!("i-{n}"), turn)).collect::<Vec<_>>();
        let both = [all("first"), all("second")].concat();
        let handled = handle(both, respond);
        tokio::time::timeout(Duration::from_secs(20), handled).await.expect("they don't wait for each other");
        let order = order.lock().unwrap();
        assert!(order[..CONCURRENCY].iter().all(|turn| turn == "first"), "{order:?}");
    }

    #[test]
    fn c37_a_claim_that_is_on_its_way_out_is_left_alone() {
        let mut state = ClusterState::default();
        state.apply_claim(claim("there", "aws:///z/i-1", true, &json!({})));
        let mut going = claim("going", "aws:///z/i-2", true, &json!({}));
        going.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        going.metadata.finalizers = Some(vec!["f".into()]);
        state.apply_claim(going);
        for (instance, expected) in [("i-1", Some("there")), ("i-2", None), ("i-11", None), ("1", None)] {
            let found = concerned(&state, &message(instance, "r")).map(|claim| claim.name_any());
            assert_eq!(found.as_deref(), expected, "{instance}");
        }
    }

    #[test]
    fn a_queue_that_can_not_be_read_is_asked_ever_less_often() {
        let waits: Vec<u64> = [0, 1, 2, 5, 4_000].map(|failures| retry_after(failures).as_secs()).into();
        assert_eq!(waits, [2, 4, 8, 10, 10]);
    }

    #[test]
    fn counts_of_the_cloud_are_told_once() {
        let mut counted = BTreeMap::new();
        assert_eq!(since(&mut counted, [("a", 2), ("b", 0)].into()), [("a", 2)]);
        assert_eq!(since(&mut counted, [("a", 3), ("b", 1)].into()), [("a", 1), ("b", 1)]);
        assert!(since(&mut counted, [("a", 3), ("b", 1)].into()).is_empty());
    }

    #[test]
    fn every_kind_of_message_is_told_by_karpenters_reason() {
        for (kind, warning, reason) in [
            (MessageKind::SpotInterruption, true, "SpotInterrupted"),
            (MessageKind::RebalanceRecommendation, false, "SpotRebalanceRecommendation"),
            (MessageKind::CapacityReservationInterruption, true, "CapacityReservationInstanceInterrupted"),
            (MessageKind::ScheduledChange, true, "InstanceUnhealthy"),
            (MessageKind::Stopped, true, "InstanceStopping"),
            (MessageKind::StateChange, true, "InstanceTerminating"),
        ] {
            let (warns, said, _) = told(kind);
            assert_eq!((warns, said), (warning, reason));
        }
    }

    #[test]
    fn every_kind_of_message_has_its_response() {
        let message = |kind| Message { receipt: "r".into(), kind, instance_id: "i-1".into(), at: UnixMillis(1_000) };
        assert_eq!(response(&message(MessageKind::RebalanceRecommendation)), Response::Tell);
        for gone in [MessageKind::Stopped, MessageKind::StateChange] {
            assert_eq!(response(&message(gone)), Response::Delete);
        }
        for (kind, reason, deadline_ms) in [
            (MessageKind::CapacityReservationInterruption, "CapacityReservationInterruption", 121_000),
            (MessageKind::ScheduledChange, "ScheduledChange", 601_000),
        ] {
            let disrupting = Disrupting { reason: reason.into(), deadline_ms: Some(deadline_ms) };
            assert_eq!(response(&message(kind)), Response::Replace(disrupting));
        }
        let spot = Disrupting { reason: "SpotInterruption".into(), deadline_ms: Some(121_000) };
        assert_eq!(response(&message(MessageKind::SpotInterruption)), Response::Replace(spot.clone()));
        let marked = claim("x", "aws:///z/i-3", true, &json!({(labels::DISRUPTING): spot.annotation()}));
        assert_eq!(Disrupting::of(&marked), Some(spot));
    }
}
