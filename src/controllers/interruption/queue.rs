//! Messages of the interruption queue: an interrupted node is marked and tainted at once, its pods get other nodes, then it is
//! drained and terminated. Where others can write to the queue, EC2 confirms the end of an instance first.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::stream::{self, StreamExt};
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_cloud::{CloudError, Message, MessageKind};
use stowage_model::events;
use stowage_model::events::{DeclaredEvent, EventSpec};
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;
use stowage_runtime::sync::lock;

use crate::controllers::context::Context;
use crate::controllers::deletion::delete_claim;
use crate::controllers::disruption::mark::mark;
use crate::controllers::event_queue::EventQueue;
use crate::controllers::node_claim::claim_metrics;
use crate::decisions::disruption::mark::DisruptionMark;
use crate::decisions::interruption::confirmation;
use crate::decisions::interruption::confirmation::Confirmation;
use crate::decisions::interruption::response::{InterruptionAction, action, claim_of, kind_label};
use crate::decisions::rate_cap::RateCap;
use crate::state::object_ext::NodeClaimExt;

/// First and longest wait after a failed read of the queue; the wait doubles.
const RETRY: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// Longest wait for the confirmation of a spot interruption: calls that EC2 throttles are repeated for longer than the notice lasts.
const CONFIRMATION: Duration = Duration::from_secs(10);
/// Instances whose messages are handled concurrently.
const CONCURRENCY: usize = 10;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut reader = Reader::new(&ctx);
    loop {
        // A long poll.
        let received = heartbeat::rest(ctx.cloud.receive_messages()).await;
        if let Some(wait) = reader.process(&ctx, received).await {
            heartbeat::rest(tokio::time::sleep(wait)).await;
        }
    }
}

/// What is remembered between two reads of the queue.
#[derive(Debug)]
struct Reader {
    /// Consecutive failed reads.
    failures: u32,
    handler: Handler,
}

/// Acts on messages.
#[derive(Debug)]
struct Handler {
    /// Nodes that warnings drained.
    warned: Mutex<RateCap>,
    /// Events about messages are emitted in the background: hundreds of warnings may arrive at once, and the time to act on them is short.
    events: EventQueue,
}

/// Why a message is redelivered.
#[derive(Debug, thiserror::Error)]
enum Unhandled {
    #[error("writing an object: {0}")]
    Api(#[from] kube::Error),
    #[error("describing the instance: {0}")]
    Cloud(#[from] CloudError),
    #[error("EC2 does not confirm it yet")]
    Unconfirmed,
    #[error("warnings drained as many nodes in the last minute as they may")]
    TooMany,
}

impl Reader {
    fn new(ctx: &Arc<Context>) -> Self {
        Self { failures: 0, handler: Handler::new(ctx) }
    }

    /// Handles the messages of one read, or its failure. Returns the wait before the next read after a failure.
    async fn process(&mut self, ctx: &Context, received: Result<Vec<Message>, CloudError>) -> Option<Duration> {
        let messages = match received {
            Ok(messages) => messages,
            Err(error) => {
                if self.failures == 0 {
                    tracing::warn!(%error, "failed to read interruption queue, retrying");
                    let note = format!("instance interruptions go unnoticed, the queue could not be read: {error}");
                    emit_about_queue(ctx, events::INTERRUPTION_QUEUE_UNREADABLE.note(&note)).await;
                }
                let wait = retry_after(self.failures);
                self.failures += 1;
                return Some(wait);
            }
        };
        let handler = &self.handler;
        let handled = handle(messages, |message| async move { handler.respond(ctx, &message).await }).await;
        if !handled.is_empty()
            && let Err(error) = ctx.cloud.delete_messages(&handled).await
        {
            tracing::warn!(%error, "failed to delete messages, they will be redelivered");
        }
        if self.failures > 0 {
            self.failures = 0;
            tracing::info!("interruption queue is readable again");
            let note = "the interruption queue is readable again";
            emit_about_queue(ctx, events::INTERRUPTION_QUEUE_READABLE.note(note)).await;
        }
        None
    }
}

/// Emits an event about every node class, but does not delay the queue when the API server takes no event.
async fn emit_about_queue(ctx: &Context, event: EventSpec<'_>) {
    if tokio::time::timeout(RETRY.1, ctx.emit_for_classes(event)).await.is_err() {
        tracing::warn!(reason = event.declared().reason(), "emitting an event about node classes timed out");
    }
}

/// The wait after a failed read that follows this number of consecutive failures.
fn retry_after(failures: u32) -> Duration {
    RETRY.0.saturating_mul(1 << failures.min(10)).min(RETRY.1)
}

/// Handles messages, those of different instances concurrently. Returns the receipts of the handled messages; the others are
/// redelivered after their visibility timeout.
///
/// Handled messages are deleted together at the end: the queue is not read meanwhile, so none is redelivered before.
async fn handle<R>(messages: Vec<Message>, respond: impl Fn(Message) -> R) -> Vec<String>
where
    R: Future<Output = Result<(), Unhandled>>,
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
                    tracing::warn!(kind = kind_label(kind), instance, %error, "failed to handle message, it will be redelivered");
                }
            }
        }
        handled
    };
    stream::iter(by_instance.into_values()).map(all_of).buffer_unordered(CONCURRENCY).concat().await
}

/// The event about a message, with Karpenter's reason, and its note.
fn event_of(kind: MessageKind) -> (&'static DeclaredEvent, &'static str) {
    match kind {
        MessageKind::SpotInterruption => {
            (events::SPOT_INTERRUPTED, "Spot interruption warning: instance will be reclaimed in 2 minutes")
        }
        MessageKind::RebalanceRecommendation => {
            let note = "elevated risk of spot interruption (rebalance recommendation)";
            (events::SPOT_REBALANCE_RECOMMENDATION, note)
        }
        MessageKind::CapacityReservationInterruption => {
            let note = "the owner of the capacity reservation reclaims the instance in 2 minutes";
            (events::CAPACITY_RESERVATION_INSTANCE_INTERRUPTED, note)
        }
        MessageKind::ScheduledChange => {
            (events::INSTANCE_UNHEALTHY, "AWS Health has scheduled a change of the instance")
        }
        MessageKind::Stopped => (events::INSTANCE_STOPPING, "instance is stopping"),
        MessageKind::StateChange => (events::INSTANCE_TERMINATING, "instance is shutting down"),
    }
}

impl Handler {
    fn new(ctx: &Arc<Context>) -> Self {
        Self { warned: Mutex::default(), events: EventQueue::start(ctx) }
    }

    /// Acts on a message, then queues its events: time is short.
    async fn respond(&self, ctx: &Context, message: &Message) -> Result<(), Unhandled> {
        let claim = claim_of(&ctx.cluster.read(), &message.instance_id);
        let Some(claim) = claim else { return Ok(()) };
        let kind = kind_label(message.kind);
        tracing::info!(claim = claim.name_any(), instance = message.instance_id, kind, "received interruption message");
        let action = action(message.kind, message.at);
        let mut counted = false;
        if ctx.cloud.capabilities().untrusted_messages {
            match self.confirm(ctx, &claim, message, action, &mut counted).await? {
                Confirmation::Confirmed => {}
                Confirmation::Unknown => return Err(Unhandled::Unconfirmed),
                Confirmation::Refused(refusal) => {
                    let (instance, reason) = (&message.instance_id, refusal.label());
                    tracing::warn!(claim = claim.name_any(), instance, kind, reason, "refused interruption message");
                    ctx.metrics.messages_refused.with_label_values(&[kind, reason]).inc();
                    return Ok(());
                }
            }
        }
        match action {
            InterruptionAction::Report => {}
            InterruptionAction::Delete(reason) => delete_claim(ctx, &claim, reason).await?,
            InterruptionAction::Mark(new) => {
                if let Err(error) = mark(ctx, &claim, new, None).await {
                    let known = ctx.cluster.read().claims.get(&claim.name_any()).cloned();
                    if counted && known.is_none_or(|known| DisruptionMark::of(&known).is_none()) {
                        // Nothing drains: the redelivered message needs the place that this one took.
                        lock(&self.warned).take_back(1);
                    }
                    return Err(error.into());
                }
                // The claim as it was before the mark: a message may come twice.
                let is_known = DisruptionMark::of(&claim).is_some_and(|known| known.reason == new.reason);
                if message.kind == MessageKind::SpotInterruption && !is_known {
                    claim_metrics::count_spot_interruption(ctx, &claim);
                }
            }
        }
        let (event, note) = event_of(message.kind);
        self.events.emit_for_claim_and_node(ctx, &claim, event, note);
        if let InterruptionAction::Delete(_) = action {
            let note = "instance is shutting down or terminated";
            self.events.emit_for_claim_and_node(ctx, &claim, events::TERMINATING_ON_INTERRUPTION, note);
        }
        Ok(())
    }

    /// Confirms a message before it is acted on. Sets `counted` when it takes a place in `warned`.
    async fn confirm(
        &self,
        ctx: &Context,
        claim: &NodeClaim,
        message: &Message,
        action: InterruptionAction,
        counted: &mut bool,
    ) -> Result<Confirmation, Unhandled> {
        match action {
            InterruptionAction::Report => Ok(Confirmation::Confirmed),
            InterruptionAction::Delete(_) => {
                let Some(id) = claim.provider_id() else { return Ok(Confirmation::Unknown) };
                let observed = ctx.cloud.describe(id).await?.map(|instance| instance.state);
                Ok(confirmation::of_end(observed, message.at, clock::now()))
            }
            InterruptionAction::Mark(_) => {
                let plausible = confirmation::of_warning(message.kind, claim);
                // Another message about a marked node drains nothing more.
                if plausible != Confirmation::Confirmed || DisruptionMark::of(claim).is_some() {
                    return Ok(plausible);
                }
                let most = confirmation::warned_per_minute(message.kind, ctx.cluster.read().claims.len());
                let admitted = lock(&self.warned).admit(1, most, clock::now());
                match admitted {
                    0 if message.kind == MessageKind::SpotInterruption && is_interrupted(ctx, message).await => {
                        Ok(plausible)
                    }
                    0 => {
                        ctx.metrics
                            .messages_refused
                            .with_label_values(&[kind_label(message.kind), confirmation::TOO_MANY])
                            .inc();
                        Err(Unhandled::TooMany)
                    }
                    _ => {
                        *counted = true;
                        Ok(plausible)
                    }
                }
            }
        }
    }
}

/// Whether EC2 shows the interruption that a message warns of. Without the right to ask, nothing is known.
async fn is_interrupted(ctx: &Context, message: &Message) -> bool {
    let instance = &message.instance_id;
    let Some(events) = ctx.cloud.capabilities().instance_events else { return false };
    match tokio::time::timeout(CONFIRMATION, events.is_interrupted(instance)).await {
        Ok(Ok(interrupted)) => interrupted,
        Ok(Err(error)) => {
            tracing::warn!(instance, %error, "failed to confirm a spot interruption");
            false
        }
        Err(_) => {
            tracing::warn!(instance, "confirmation of a spot interruption timed out");
            false
        }
    }
}

#[cfg(test)]
mod write_tests;

#[cfg(test)]
mod tests {
    use stowage_model::events::EventType;
    use stowage_model::time::UnixMillis;

    use super::*;

    fn message(instance: &str, receipt: &str) -> Message {
        let (receipt, instance_id) = (receipt.to_owned(), instance.to_owned());
        Message { receipt, kind: MessageKind::StateChange, instance_id, at: UnixMillis(0) }
    }

    #[tokio::test]
    async fn c37_handled_messages_are_deleted_and_others_are_redelivered() {
        let respond = |message: Message| async move {
            if message.receipt == "r2" { Err(Unhandled::Unconfirmed) } else { Ok(()) }
        };
        let messages = [("i-1", "r1"), ("i-2", "r2"), ("i-2", "r3"), ("i-3", "r4")];
        let mut handled = handle(messages.map(|(instance, receipt)| message(instance, receipt)).into(), respond).await;
        handled.sort();
        assert_eq!(handled, ["r1", "r3", "r4"]);
    }

    #[tokio::test]
    async fn c37_instances_are_handled_concurrently_and_messages_of_an_instance_in_order() {
        // Opens only when all instances wait at the same time.
        let barrier = tokio::sync::Barrier::new(CONCURRENCY);
        let order = Mutex::new(Vec::new());
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
        tokio::time::timeout(Duration::from_secs(20), handled).await.expect("instances do not wait for each other");
        let order = order.lock().unwrap();
        assert!(order[..CONCURRENCY].iter().all(|turn| turn == "first"), "{order:?}");
    }

    #[test]
    fn failed_reads_of_the_queue_back_off_exponentially() {
        let waits: Vec<u64> = [0, 1, 2, 5, 4_000].map(|failures| retry_after(failures).as_secs()).into();
        assert_eq!(waits, [2, 4, 8, 10, 10]);
    }

    #[test]
    fn every_kind_of_message_has_karpenters_event_reason() {
        for (kind, event_type, reason) in [
            (MessageKind::SpotInterruption, EventType::Warning, "SpotInterrupted"),
            (MessageKind::RebalanceRecommendation, EventType::Normal, "SpotRebalanceRecommendation"),
            (
                MessageKind::CapacityReservationInterruption,
                EventType::Warning,
                "CapacityReservationInstanceInterrupted",
            ),
            (MessageKind::ScheduledChange, EventType::Warning, "InstanceUnhealthy"),
            (MessageKind::Stopped, EventType::Warning, "InstanceStopping"),
            (MessageKind::StateChange, EventType::Warning, "InstanceTerminating"),
        ] {
            let (event, _) = event_of(kind);
            assert_eq!((event.event_type(), event.reason()), (event_type, reason));
        }
    }
}
