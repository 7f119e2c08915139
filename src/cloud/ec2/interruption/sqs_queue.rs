//! The interruption queue on SQS: long polls, and conversion of messages for the interruption controller.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::Builder;
use aws_sdk_sqs::config::timeout::TimeoutConfig;
use aws_sdk_sqs::types::{
    DeleteMessageBatchRequestEntry as Entry, Message as SqsMessage, MessageSystemAttributeName as Attribute,
};
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;
use tracing::{debug, warn};

use crate::Message;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::interruption::messages;
use crate::ec2::interruption::messages::{Dropped, Event, EventKind, Origin};
use crate::ec2::interruption::receipts::Receipts;

const GET_QUEUE_URL: &str = "sqs:GetQueueUrl";
const RECEIVE: &str = "sqs:ReceiveMessage";
const DELETE: &str = "sqs:DeleteMessageBatch";
/// Messages per poll or delete; the maximum of SQS.
const BATCH: u8 = 10;
/// Wait time of a poll; the maximum of SQS.
const WAIT_SECONDS: i32 = 20;
/// Visibility timeout: a message that is not deleted within it is received again.
const VISIBILITY_SECONDS: i32 = 20;
/// Timeout of a poll including retries: the wait time plus network time.
const POLL_TIMEOUT: Duration = Duration::from_secs(40);
/// Timeout of a delete including retries: other messages wait meanwhile, and messages that stay are received again.
const DELETE_TIMEOUT: Duration = Duration::from_secs(5);

/// An event about one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The receipt for [`Queue::delete`] once the instance is handled.
    pub receipt: String,
    pub kind: EventKind,
    pub instance_id: String,
    /// Time of the event by this machine's clock.
    pub at: UnixMillis,
}

impl From<Received> for Message {
    fn from(received: Received) -> Self {
        let kind = received.kind.message_kind();
        Self { receipt: received.receipt, kind, instance_id: received.instance_id, at: received.at }
    }
}

/// Message counts since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueCounts {
    /// Received, by `message_type`.
    pub received: BTreeMap<&'static str, u64>,
    pub deleted: u64,
}

/// The interruption queue. Safe to share; concurrent polls receive different messages.
#[derive(Debug)]
pub struct Queue {
    client: Client,
    name: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Known after the first GetQueueUrl.
    url: Option<String>,
    /// Known with the URL.
    origin: Option<Origin>,
    receipts: Receipts,
    counts: QueueCounts,
    skew: Skew,
}

impl Queue {
    /// The queue with a name. Makes no call: the queue may be created later.
    pub fn new(client: Client, name: impl Into<String>) -> Self {
        Self { client, name: name.into(), state: Mutex::default() }
    }

    /// Waits up to 20 s for messages and returns their events, one per instance. Messages without effect are counted and deleted
    /// here; the others are deleted by [`Queue::delete`], or received again after 20 s.
    ///
    /// # Errors
    /// The queue does not exist or cannot be read. The next call resolves it again.
    pub async fn receive(&self, clock: impl Fn() -> UnixMillis) -> Result<Vec<Received>, ApiError> {
        let url = self.url().await?;
        let timeouts = TimeoutConfig::builder().operation_timeout(POLL_TIMEOUT).build();
        let response = self
            .client
            .receive_message()
            .queue_url(&url)
            .max_number_of_messages(BATCH.into())
            .wait_time_seconds(WAIT_SECONDS)
            .visibility_timeout(VISIBILITY_SECONDS)
            .message_system_attribute_names(Attribute::SentTimestamp)
            .message_system_attribute_names(Attribute::ApproximateFirstReceiveTimestamp)
            .message_system_attribute_names(Attribute::ApproximateReceiveCount)
            .message_attribute_names("All")
            .customize()
            .config_override(Builder::default().timeout_config(timeouts))
            .send()
            .await;
        let messages = match response {
            Ok(response) => response.messages.unwrap_or_default(),
            Err(error) => {
                let error = ApiError::of(RECEIVE)(error);
                if error.class == Class::NotFound {
                    // Deleted, and perhaps created again under another URL.
                    self.state().url = None;
                }
                return Err(error);
            }
        };
        let (events, dropped) = self.state().receive(messages, clock());
        // The events wait for this call, which is one round trip with a short timeout.
        if let Err(error) = self.delete_messages(&dropped).await {
            warn!(%error, "could not delete messages without effect, they will be received again");
        }
        Ok(events)
    }

    /// Records that events are handled, and deletes messages without further events. A message that SQS does not delete is logged and
    /// received again.
    ///
    /// # Errors
    /// The call failed: the messages are received again.
    pub async fn delete(&self, receipts: &[String]) -> Result<(), ApiError> {
        let handles: Vec<String> = {
            let mut state = self.state();
            receipts.iter().filter_map(|receipt| state.receipts.redeem(receipt)).collect()
        };
        self.delete_messages(&handles).await
    }

    /// The message counts so far.
    pub fn counts(&self) -> QueueCounts {
        self.state().counts.clone()
    }

    async fn delete_messages(&self, handles: &[String]) -> Result<(), ApiError> {
        for batch in handles.chunks(BATCH.into()) {
            let url = self.url().await?;
            let entry = |(id, handle): (usize, &String)| {
                Entry::builder().id(id.to_string()).receipt_handle(handle).build().expect("id and handle are set")
            };
            let entries = batch.iter().enumerate().map(entry).collect();
            let timeouts = TimeoutConfig::builder().operation_timeout(DELETE_TIMEOUT).build();
            let call = self.client.delete_message_batch().queue_url(url).set_entries(Some(entries)).customize();
            let call = call.config_override(Builder::default().timeout_config(timeouts));
            let response = call.send().await.map_err(ApiError::of(DELETE))?;
            for failure in response.failed() {
                warn!(
                    code = failure.code(),
                    error = failure.message(),
                    "could not delete message, it will be received again"
                );
            }
            let mut state = self.state();
            let ids = response.successful().iter().filter_map(|deleted| deleted.id().parse::<usize>().ok());
            for handle in ids.filter_map(|id| batch.get(id)) {
                state.receipts.deleted(handle);
                state.counts.deleted += 1;
            }
        }
        Ok(())
    }

    async fn url(&self) -> Result<String, ApiError> {
        if let Some(url) = &self.state().url {
            return Ok(url.clone());
        }
        let response = self.client.get_queue_url().queue_name(&self.name).send().await;
        let url = response.map_err(ApiError::of(GET_QUEUE_URL))?.queue_url.unwrap_or_default();
        if url.is_empty() {
            return Err(crate::ec2::offerings::instance_types::unusable_response(GET_QUEUE_URL, "no URL"));
        }
        let region = self.client.config().region().map(ToString::to_string).unwrap_or_default();
        let mut state = self.state();
        state.origin = Origin::of_queue(&url, &region);
        state.url = Some(url.clone());
        Ok(url)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is atomic, so a panic of another holder leaves a consistent state.
        lock(&self.state)
    }
}

impl State {
    /// Reads a batch: the events in it, and the handles of messages to delete at once.
    fn receive(&mut self, batch: Vec<SqsMessage>, now: UnixMillis) -> (Vec<Received>, Vec<String>) {
        let (mut events, mut dropped) = (Vec::new(), Vec::new());
        for message in batch {
            // Without a handle the message can be neither deleted nor identified.
            let Some(handle) = message.receipt_handle else { continue };
            match messages::parse(message.body.as_deref().unwrap_or_default(), self.origin.as_ref()) {
                Ok(event) => {
                    self.count(event.kind.label());
                    let times = Times::of(message.attributes.as_ref());
                    let at = self.skew.local_time(event.at, &times, now);
                    events.extend(self.events(&handle, event, at, now));
                }
                Err(why) => {
                    self.count(why.label());
                    log_dropped(why, message.message_id.as_deref().unwrap_or_default());
                    dropped.push(handle);
                }
            }
        }
        (events, dropped)
    }

    fn events(&mut self, handle: &str, event: Event, at: UnixMillis, now: UnixMillis) -> Vec<Received> {
        let receipts = self.receipts.issue(handle, event.instances.len(), now);
        let one = |(receipt, instance_id)| Received { receipt, kind: event.kind, instance_id, at };
        receipts.into_iter().zip(event.instances).map(one).collect()
    }

    fn count(&mut self, label: &'static str) {
        *self.counts.received.entry(label).or_default() += 1;
    }
}

fn log_dropped(why: Dropped, message: &str) {
    match why {
        Dropped::Irrelevant | Dropped::Unknown => debug!(message, ?why, "message without effect"),
        Dropped::Empty | Dropped::TooLarge | Dropped::Malformed => {
            warn!(message, ?why, "deleting unreadable message");
        }
        Dropped::Foreign => warn!(message, "deleting message of another account or region"),
    }
}

/// Timestamps of a message by SQS's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Times {
    sent: Option<UnixMillis>,
    first_received: Option<UnixMillis>,
    /// Whether this is the first receipt.
    is_first: bool,
}

impl Times {
    fn of(attributes: Option<&HashMap<Attribute, String>>) -> Self {
        let number = |name| attributes.and_then(|all| all.get(&name)).and_then(|text| text.parse::<i64>().ok());
        Self {
            sent: number(Attribute::SentTimestamp).map(UnixMillis),
            first_received: number(Attribute::ApproximateFirstReceiveTimestamp).map(UnixMillis),
            is_first: number(Attribute::ApproximateReceiveCount) == Some(1),
        }
    }
}

/// Offset of this machine's clock from AWS's, measured at the last message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Skew {
    /// Milliseconds, negative if this machine's clock is behind: [`Duration`] has no sign.
    ahead_millis: i64,
}

impl Skew {
    /// The time of an event by this machine's clock, never later than now. A message received for the first time shows the offset
    /// of the clocks: SQS's time of the receipt is now. An event without a time is dated when the message was sent.
    fn local_time(&mut self, event: Option<UnixMillis>, times: &Times, now: UnixMillis) -> UnixMillis {
        if let (Some(received), true) = (times.first_received, times.is_first) {
            self.ahead_millis = now.0.saturating_sub(received.0);
        }
        match event.or(times.sent) {
            Some(at) => UnixMillis(at.0.saturating_add(self.ahead_millis)).min(now),
            None => now,
        }
    }
}

#[cfg(test)]
mod tests;
