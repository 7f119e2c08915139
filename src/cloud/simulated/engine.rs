//! The simulated EC2 as a state machine: inputs are API calls and the time, outputs are responses and journal entries. No clock, no
//! I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;

use crate::simulated::engine_state::{EngineState, InstanceRecord, JournalEntry, NodeStep, QueuedMessage};
use crate::simulated::instance_event::InstanceEvent;
use crate::simulated::new_instance::NewInstance;
use crate::simulated::node_steps::{NodeAction, next_step};
use crate::simulated::simulation_settings::Timings;
use crate::simulated::spot_price_model::SpotPriceModel;
use crate::{
    CloudError, Instance, InstanceState, LaunchError, LaunchRequest, Launched, Message, MessageKind, Override,
};

/// How long a terminated instance is still described; EC2 documents about an hour.
const DESCRIBED_AFTER_TERMINATION: Duration = Duration::from_hours(1);
/// Maximum number of messages per receive call, as in SQS.
const MAX_RECEIVED: usize = 10;

/// The state machine.
#[derive(Debug)]
pub struct Engine {
    seed: u64,
    timings: Timings,
    state: EngineState,
    /// Entries that are not in the journal yet.
    pending_entries: Vec<JournalEntry>,
    /// Received messages, and until when they are invisible.
    invisible: BTreeMap<String, UnixMillis>,
}

impl Engine {
    /// Starts a simulation, or resumes one from the state that a journal restored.
    pub fn new(seed: u64, timings: Timings, state: EngineState, now: UnixMillis) -> Self {
        let mut engine = Self { seed, timings, state, pending_entries: Vec::new(), invisible: BTreeMap::new() };
        if engine.state.started_at.is_none() {
            engine.record(JournalEntry::Started { at: now, launches: 0, messages: 0 });
        }
        engine
    }

    /// When the simulation started.
    pub fn started_at(&self) -> UnixMillis {
        self.state.started_at.unwrap_or_default()
    }

    /// The entries since the last call, in order, for the journal.
    pub fn take_pending_entries(&mut self) -> Vec<JournalEntry> {
        std::mem::take(&mut self.pending_entries)
    }

    fn record(&mut self, entry: JournalEntry) {
        self.state.apply(&entry);
        self.pending_entries.push(entry);
    }

    /// Advances the simulation to a time: drops expired instances and messages. Every API call does this first.
    pub fn advance(&mut self, now: UnixMillis) {
        let expired = |record: &&InstanceRecord| {
            record.terminated_at.is_some_and(|at| at.is_older_than(DESCRIBED_AFTER_TERMINATION, now))
        };
        let forgotten: Vec<String> =
            self.state.instances.values().filter(expired).map(|record| record.id.clone()).collect();
        for id in forgotten {
            self.record(JournalEntry::Forgotten { id });
        }
        let stale = |message: &&QueuedMessage| message.sent_at.is_older_than(self.timings.retention, now);
        let stale: Vec<String> = self.state.queue.values().filter(stale).map(|message| message.id.clone()).collect();
        for id in stale {
            self.invisible.remove(&id);
            self.record(JournalEntry::Deleted { id });
        }
    }

    /// Applies an event to an instance, selected by its id or node name.
    ///
    /// # Errors
    /// There is no such running instance, or a spot interruption is requested for an on-demand one.
    pub fn trigger(&mut self, id_or_node: &str, kind: InstanceEvent, now: UnixMillis) -> Result<(), CloudError> {
        self.advance(now);
        let found = self.state.instances.get(id_or_node);
        let found = found.or_else(|| self.state.instances.values().find(|record| record.node_name() == id_or_node));
        let Some(record) = found.filter(|record| record.is_alive(now)) else {
            return Err(CloudError::Other(format!(
                "no living simulated instance has the id or node name {id_or_node}"
            )));
        };
        if kind == InstanceEvent::SpotInterruption && record.capacity_type != CapacityType::Spot {
            return Err(CloudError::Other(format!(
                "{id_or_node} is on-demand, only spot instances are interrupted; use terminate"
            )));
        }
        let id = record.id.clone();
        self.apply_event(&id, kind, now);
        Ok(())
    }

    fn apply_event(&mut self, id: &str, kind: InstanceEvent, now: UnixMillis) {
        match kind {
            InstanceEvent::SpotInterruption => {
                self.send(id, MessageKind::SpotInterruption, now);
                self.shut_down(id, now + self.timings.notice);
            }
            InstanceEvent::Rebalance => self.send(id, MessageKind::RebalanceRecommendation, now),
            InstanceEvent::ScheduledChange => self.send(id, MessageKind::ScheduledChange, now),
            InstanceEvent::Terminate => self.shut_down(id, now),
            InstanceEvent::KernelPanic => self.record(JournalEntry::Panicked { id: id.to_owned() }),
        }
    }

    fn send(&mut self, instance_id: &str, kind: MessageKind, sent_at: UnixMillis) {
        let id = match kind {
            // One per instance: an earlier shutdown replaces the message of a later one.
            MessageKind::StateChange => format!("state-{instance_id}"),
            _ => format!("message-{}-{instance_id}", self.state.messages + 1),
        };
        self.record(JournalEntry::Sent(QueuedMessage { id, kind, instance_id: instance_id.to_owned(), sent_at }));
    }

    /// Schedules the shutdown of an instance, unless an earlier one is scheduled.
    fn shut_down(&mut self, id: &str, at: UnixMillis) {
        let scheduled = self.state.instances.get(id).and_then(|record| record.shutdown_at);
        if scheduled.is_none_or(|scheduled| at < scheduled) {
            let terminated_at = at + self.timings.shutdown;
            self.record(JournalEntry::Shutdown { id: id.to_owned(), at, terminated_at });
            self.send(id, MessageKind::StateChange, at);
        }
    }

    /// Launches one instance, as an `instant` CreateFleet: in the cheapest acceptable offering, on-demand or spot. A repeated token
    /// returns the same instance, even if it is terminated.
    ///
    /// # Errors
    /// [`LaunchError::InsufficientCapacity`] where no offering exists.
    pub fn launch(
        &mut self,
        request: &LaunchRequest,
        prices: &SpotPriceModel,
        now: UnixMillis,
    ) -> Result<Launched, LaunchError> {
        self.advance(now);
        let earlier = self.state.tokens.get(&request.client_token).and_then(|id| self.state.instances.get(id));
        if let Some(record) = earlier {
            return Ok(Launched { instance: record.describe(now), unavailable: Vec::new(), called_at: None });
        }
        if request.overrides.is_empty() {
            return Err(LaunchError::other("the launch request names no offering"));
        }
        let (offering, unavailable) = choose_offering(request, prices);
        let Some(offering) = offering else {
            return Err(LaunchError::InsufficientCapacity { unavailable });
        };
        let launch = NewInstance { number: self.state.launches + 1, request, offering };
        let record = launch.record(self.seed, &self.timings, self.started_at(), now);
        let instance = record.describe(now);
        self.record(JournalEntry::Launched(Box::new(record)));
        Ok(Launched { instance, unavailable, called_at: Some(now) })
    }

    /// Describes an instance; `None` where EC2 no longer describes it.
    pub fn describe(&mut self, provider_id: &str, now: UnixMillis) -> Option<Instance> {
        self.advance(now);
        self.by_provider_id(provider_id).map(|record| record.describe(now))
    }

    /// Starts the termination of an instance; false where it is terminated or unknown. Idempotent.
    pub fn terminate(&mut self, provider_id: &str, now: UnixMillis) -> bool {
        self.advance(now);
        let found = self.by_provider_id(provider_id).filter(|record| record.state(now) != InstanceState::Terminated);
        let Some(id) = found.map(|record| record.id.clone()) else { return false };
        self.shut_down(&id, now);
        true
    }

    /// Every instance that is not terminated, in the order of launch.
    pub fn list(&mut self, now: UnixMillis) -> Vec<Instance> {
        self.advance(now);
        let mut records: Vec<&InstanceRecord> =
            self.state.instances.values().filter(|record| record.state(now) != InstanceState::Terminated).collect();
        records.sort_by_key(|record| record.number);
        records.into_iter().map(|record| record.describe(now)).collect()
    }

    /// Receives the visible messages, oldest first, at most ten, and makes them invisible for the visibility timeout.
    pub fn receive(&mut self, now: UnixMillis) -> Vec<Message> {
        self.advance(now);
        self.invisible.retain(|_, until| *until > now);
        let visible = |message: &&QueuedMessage| message.sent_at <= now && !self.invisible.contains_key(&message.id);
        let mut due: Vec<&QueuedMessage> = self.state.queue.values().filter(visible).collect();
        due.sort_by(|a, b| (a.sent_at, &a.id).cmp(&(b.sent_at, &b.id)));
        due.truncate(MAX_RECEIVED);
        let until = now + self.timings.visibility;
        self.invisible.extend(due.iter().map(|message| (message.id.clone(), until)));
        let as_message = |message: &QueuedMessage| Message {
            receipt: message.id.clone(),
            kind: message.kind,
            instance_id: message.instance_id.clone(),
            at: message.sent_at,
        };
        due.into_iter().map(as_message).collect()
    }

    /// Deletes messages; an unknown one is not an error.
    pub fn delete_messages(&mut self, receipts: &[String], now: UnixMillis) {
        self.advance(now);
        for receipt in receipts {
            self.invisible.remove(receipt);
            if self.state.queue.contains_key(receipt) {
                self.record(JournalEntry::Deleted { id: receipt.to_owned() });
            }
        }
    }

    /// The due steps of Node objects, at most `limit`, in the order of launch, without the instances to skip. A step is returned until it
    /// is reported as done.
    pub fn node_actions(&mut self, now: UnixMillis, limit: usize, skip: impl Fn(&str) -> bool) -> Vec<NodeAction> {
        self.advance(now);
        let due = |record| next_step(record, now).filter(|(at, _)| *at <= now).map(|(_, step)| (record, step));
        let mut due: Vec<(&InstanceRecord, NodeStep)> = self.state.instances.values().filter_map(due).collect();
        due.retain(|(record, _)| !skip(&record.id));
        due.sort_by_key(|(record, _)| record.number);
        due.truncate(limit);
        due.into_iter().map(|(record, step)| NodeAction { record: record.clone(), step }).collect()
    }

    /// Records that a step of an instance's Node is done.
    pub fn node_step_done(&mut self, id: &str, step: NodeStep) {
        self.record(JournalEntry::Node { id: id.to_owned(), step });
    }

    /// The next time after `now` at which the state changes without a call.
    pub fn next_wake(&self, now: UnixMillis) -> Option<UnixMillis> {
        let steps = self.state.instances.values().filter_map(|record| next_step(record, now).map(|(at, _)| at));
        let messages = self.state.queue.values().map(|message| message.sent_at);
        steps.chain(messages).filter(|at| *at > now).min()
    }

    /// An instance by its provider id, including the zone.
    fn by_provider_id(&self, provider_id: &str) -> Option<&InstanceRecord> {
        let id = provider_id.rsplit('/').next()?;
        self.state.instances.get(id).filter(|record| record.provider_id() == provider_id)
    }
}

/// The cheapest offering of a request, and those that do not exist: EC2 responds "unsupported", which callers handle like missing
/// capacity. Of equal prices, the first.
fn choose_offering<'a>(request: &'a LaunchRequest, prices: &SpotPriceModel) -> (Option<&'a Override>, Vec<Override>) {
    let (existing, unavailable): (Vec<_>, Vec<_>) = request
        .overrides
        .iter()
        .map(|offering| (prices.price(offering), offering))
        .partition(|(price, _)| price.is_some());
    let cheapest = existing.into_iter().min_by_key(|(price, _)| *price).map(|(_, offering)| offering);
    (cheapest, unavailable.into_iter().map(|(_, offering)| offering.clone()).collect())
}

#[cfg(test)]
mod tests;
