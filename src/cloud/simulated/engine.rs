//! The simulated EC2 as a state machine: calls and the time go in, answers and journal entries come out. No clock, no I/O.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::cloud::draw::{draw, draw_between};
use crate::cloud::simulated::node_steps::{NodeAction, next_step};
use crate::cloud::simulated::record::{Entry, Ledger, NodeProgress, NodeStep, QueuedMessage, Record};
use crate::cloud::simulated::script::{Action, Event, InstanceEvent, Script, Trigger};
use crate::cloud::simulated::spot_prices::SpotPriceModel;
use crate::cloud::{
    CloudError, Instance, InstanceState, LaunchError, LaunchRequest, Launched, Message, MessageKind, Override,
};
use crate::model::offering::CapacityType;
use crate::model::time::UnixMillis;

/// How long a terminated instance is still described, in milliseconds. EC2 says "about an hour".
const DESCRIBED_MS: i64 = 3_600_000;
/// Most messages one receive returns, as SQS.
const RECEIVE_MOST: usize = 10;

/// The pace of the simulation. Milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Least and most time from launch to a running kubelet; each instance draws its own.
    pub boot_ms: (i64, i64),
    /// How long an instance stays pending.
    pub pending_ms: i64,
    /// From the notice of a spot interruption to its end.
    pub notice_ms: i64,
    /// From shutting down to terminated.
    pub shutdown_ms: i64,
    /// How long a received message stays hidden from others.
    pub visibility_ms: i64,
    /// How long the queue keeps a message.
    pub retention_ms: i64,
}

/// The simulated EC2.
#[derive(Debug)]
pub struct Ec2State {
    seed: u64,
    pace: Pace,
    script: Script,
    ledger: Ledger,
    /// Changes not yet written to the journal.
    unwritten: Vec<Entry>,
    /// Calls so far; those that a share of is to fail are drawn by it.
    calls: u64,
    /// Until when a received message is hidden.
    hidden: BTreeMap<String, i64>,
}

impl Ec2State {
    /// A simulation that begins now, or goes on from a ledger replayed from a journal.
    pub fn new(seed: u64, pace: Pace, script: Script, ledger: Ledger, now_ms: i64) -> Self {
        let mut state = Self { seed, pace, script, ledger, unwritten: Vec::new(), calls: 0, hidden: BTreeMap::new() };
        if state.ledger.started_at_ms.is_none() {
            state.record(Entry::Started { at_ms: now_ms, launches: 0, messages: 0 });
        }
        state
    }

    /// When the simulation began; times of the script count from here.
    pub fn started_at_ms(&self) -> i64 {
        self.ledger.started_at_ms.unwrap_or(0)
    }

    /// The events of the script.
    pub fn script(&self) -> &Script {
        &self.script
    }

    /// What the simulation remembers.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The changes since the last call, in order, for the journal.
    pub fn take_unwritten(&mut self) -> Vec<Entry> {
        std::mem::take(&mut self.unwritten)
    }

    fn record(&mut self, entry: Entry) {
        self.ledger.apply(&entry);
        self.unwritten.push(entry);
    }

    /// Brings the simulation to a time: fires what the script has for it and forgets what is long gone.
    /// Every call does this first.
    pub fn advance(&mut self, now_ms: i64) {
        for (index, event) in self.script.events.clone().iter().enumerate() {
            if let Action::Instance(kind) = event.action {
                self.fire_on_instances(&event_key(index, event), event, kind, now_ms);
            }
        }
        let old = |record: &&Record| record.gone_at_ms.is_some_and(|gone| gone.saturating_add(DESCRIBED_MS) <= now_ms);
        let forgotten: Vec<String> =
            self.ledger.instances.values().filter(old).map(|record| record.id.clone()).collect();
        for id in forgotten {
            self.record(Entry::Forgotten { id });
        }
        let stale = |message: &&QueuedMessage| message.at_ms.saturating_add(self.pace.retention_ms) <= now_ms;
        let stale: Vec<String> = self.ledger.queue.values().filter(stale).map(|message| message.id.clone()).collect();
        for id in stale {
            self.hidden.remove(&id);
            self.record(Entry::Deleted { id });
        }
    }

    fn fire_on_instances(&mut self, key: &str, event: &Event, kind: InstanceEvent, now_ms: i64) {
        if self.ledger.fired.contains_key(key) {
            return;
        }
        let due = |record: &Record| match event.trigger {
            Trigger::At(at) => self.started_at_ms().saturating_add(at) <= now_ms,
            Trigger::Launch { number, after_ms } => {
                record.number == number && record.launched_at_ms.saturating_add(after_ms) <= now_ms
            }
        };
        let mut targets: Vec<&Record> = self
            .ledger
            .instances
            .values()
            .filter(|record| due(record) && record.lives(now_ms) && !interrupts_on_demand(kind, record))
            .filter(|record| {
                event.selector.matches_offering(&record.instance_type, &record.zone, record.capacity_type)
                    && event.selector.matches_claim(&record.node_claim, &record.node_pool)
            })
            .collect();
        targets.sort_by_key(|record| record.number);
        let most = event.count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
        let ids: Vec<String> = targets.into_iter().take(most).map(|record| record.id.clone()).collect();
        let over = match event.trigger {
            Trigger::At(at) => self.started_at_ms().saturating_add(at) <= now_ms,
            // Without the instance the event waits for it.
            Trigger::Launch { .. } => !ids.is_empty(),
        };
        if over {
            self.record(Entry::Fired { event: key.to_owned(), times: 1 });
            for id in ids {
                self.happen(&id, kind, now_ms);
            }
        }
    }

    /// Makes something happen to an instance, found by its id or its node's name.
    ///
    /// # Errors
    /// There is no such living instance, or a spot interruption is asked of an on-demand one.
    pub fn trigger(&mut self, id_or_node: &str, kind: InstanceEvent, now_ms: i64) -> Result<(), CloudError> {
        self.advance(now_ms);
        let found = self.ledger.instances.get(id_or_node);
        let found = found.or_else(|| self.ledger.instances.values().find(|record| record.node_name() == id_or_node));
        let Some(record) = found.filter(|record| record.lives(now_ms)) else {
            return Err(CloudError::Other(format!(
                "no living simulated instance has the id or node name {id_or_node}"
            )));
        };
        if interrupts_on_demand(kind, record) {
            return Err(CloudError::Other(format!(
                "{id_or_node} is on-demand, only spot instances are interrupted; use terminate"
            )));
        }
        let id = record.id.clone();
        self.happen(&id, kind, now_ms);
        Ok(())
    }

    fn happen(&mut self, id: &str, kind: InstanceEvent, now_ms: i64) {
        match kind {
            InstanceEvent::SpotInterruption => {
                self.send(id, MessageKind::SpotInterruption, now_ms);
                self.shut_down(id, now_ms.saturating_add(self.pace.notice_ms));
            }
            InstanceEvent::Rebalance => self.send(id, MessageKind::RebalanceRecommendation, now_ms),
            InstanceEvent::ScheduledChange => self.send(id, MessageKind::ScheduledChange, now_ms),
            InstanceEvent::Terminate => self.shut_down(id, now_ms),
            InstanceEvent::KernelPanic => self.record(Entry::Panicked { id: id.to_owned() }),
        }
    }

    fn send(&mut self, instance_id: &str, kind: MessageKind, at_ms: i64) {
        let id = match kind {
            // One per instance: an earlier end replaces the message that waits for a later one.
            MessageKind::StateChange => format!("state-{instance_id}"),
            _ => format!("message-{}-{instance_id}", self.ledger.messages + 1),
        };
        self.record(Entry::Sent(QueuedMessage { id, kind, instance_id: instance_id.to_owned(), at_ms }));
    }

    /// Sets the time an instance begins to shut down, unless it is to end earlier already.
    fn shut_down(&mut self, id: &str, at_ms: i64) {
        let end = self.ledger.instances.get(id).and_then(|record| record.shutdown_at_ms);
        if end.is_none_or(|end| at_ms < end) {
            let gone_at_ms = at_ms.saturating_add(self.pace.shutdown_ms);
            self.record(Entry::Shutdown { id: id.to_owned(), at_ms, gone_at_ms });
            self.send(id, MessageKind::StateChange, at_ms);
        }
    }

    /// Launches an instance, as CreateFleet `instant` with one instance: the cheapest acceptable offering that has capacity, for
    /// on-demand and spot alike. A token that launched before gets the same instance again, whatever became of it.
    ///
    /// # Errors
    /// Throttled or failed as scripted; [`LaunchError::InsufficientCapacity`] where no offering has capacity or is sold at all.
    pub fn launch(
        &mut self,
        request: &LaunchRequest,
        market: &SpotPriceModel,
        now_ms: i64,
    ) -> Result<Launched, LaunchError> {
        self.advance(now_ms);
        match self.refusal(now_ms, true) {
            None => {}
            Some(CloudError::Throttled) => return Err(LaunchError::Throttled),
            Some(CloudError::Other(why) | CloudError::Refused(why)) => return Err(LaunchError::other(why)),
        }
        let earlier = self.ledger.tokens.get(&request.client_token).and_then(|id| self.ledger.instances.get(id));
        if let Some(record) = earlier {
            return Ok(Launched { instance: record.describe(now_ms), unavailable: Vec::new() });
        }
        if request.overrides.is_empty() {
            return Err(LaunchError::other("the launch request names no offering"));
        }
        let (offering, unavailable) = self.choose(request, market, now_ms);
        let Some(offering) = offering else {
            return Err(LaunchError::InsufficientCapacity { unavailable });
        };
        let record = self.new_record(request, &offering, now_ms);
        let instance = record.describe(now_ms);
        let fails = self.condition(now_ms, |event| {
            event.action == Action::LaunchErrorAfterSuccess && of_launch(event, &offering, request)
        });
        self.record(Entry::Launched(Box::new(record)));
        if fails.is_some() {
            return Err(LaunchError::other("the connection was lost before the answer came (scripted)"));
        }
        Ok(Launched { instance, unavailable })
    }

    /// The cheapest offering with capacity, and the cheaper ones that were found without.
    fn choose(
        &mut self,
        request: &LaunchRequest,
        market: &SpotPriceModel,
        now_ms: i64,
    ) -> (Option<Override>, Vec<Override>) {
        let mut unavailable = Vec::new();
        let mut priced = Vec::new();
        for (place, offering) in request.overrides.iter().enumerate() {
            match market.price(offering, now_ms) {
                Some(price) => priced.push((price, place, offering)),
                // EC2 answers "unsupported", which callers take as a lack of capacity too.
                None => unavailable.push(offering.clone()),
            }
        }
        priced.sort_by_key(|(price, place, _)| (*price, *place));
        // One attempt uses a limited event up once, however many of its offerings the event shuts.
        let next = self.ledger.launches + 1;
        let shut: Vec<(String, Event)> = self
            .active(now_ms, next)
            .filter(|(_, event)| event.action == Action::OutOfCapacity)
            .map(|(key, event)| (key, event.clone()))
            .collect();
        let mut used = std::collections::BTreeSet::new();
        let mut chosen = None;
        for (_, _, offering) in priced {
            let Some((key, _)) = shut.iter().find(|(_, event)| of_launch(event, offering, request)) else {
                chosen = Some(offering.clone());
                break;
            };
            used.insert(key.clone());
            unavailable.push(offering.clone());
        }
        for event in used {
            self.record(Entry::Fired { event, times: 1 });
        }
        (chosen, unavailable)
    }

    fn new_record(&mut self, request: &LaunchRequest, offering: &Override, now_ms: i64) -> Record {
        let number = self.ledger.launches + 1;
        let (begin, count) = (self.started_at_ms().to_string(), number.to_string());
        let slow = self.condition(now_ms, |event| {
            matches!(event.action, Action::SlowBoot { .. } | Action::NeverBoot) && of_launch(event, offering, request)
        });
        let boot_at_ms = match slow {
            Some(Action::NeverBoot) => None,
            Some(Action::SlowBoot { delay_ms }) => Some(now_ms.saturating_add(delay_ms)),
            _ => {
                let (least, most) = self.pace.boot_ms;
                Some(now_ms.saturating_add(draw_between(self.seed, &["boot", &begin, &count], least, most)))
            }
        };
        let devices = self.condition(now_ms, |event| {
            matches!(event.action, Action::SlowDevicePlugin { .. }) && of_launch(event, offering, request)
        });
        let devices_at_ms = match (devices, boot_at_ms) {
            (Some(Action::SlowDevicePlugin { delay_ms }), Some(boot)) => Some(boot.saturating_add(delay_ms)),
            _ => None,
        };
        let high = draw(self.seed, &["instance", &begin, &count]);
        let low = draw(self.seed, &["instance", &begin, &count, "low"]) & 0xf;
        Record {
            number,
            id: format!("i-{high:016x}{low:x}"),
            client_token: request.client_token.clone(),
            node_claim: request.node_claim.clone(),
            node_pool: request.node_pool.clone(),
            node_class: request.node_class.clone(),
            instance_type: offering.instance_type.clone(),
            zone: offering.zone.clone(),
            capacity_type: offering.capacity_type,
            image_id: "ami-0512a1ed5104a7ed0".to_owned(),
            private_ip: self.address(number, &begin),
            labels: request.labels.clone(),
            taints: request.taints.clone(),
            launched_at_ms: now_ms,
            running_at_ms: now_ms.saturating_add(self.pace.pending_ms),
            boot_at_ms,
            devices_at_ms,
            shutdown_at_ms: None,
            gone_at_ms: None,
            node: NodeProgress::default(),
        }
    }

    /// An address in 10.0.0.0/10 that no other of the first four million instances of this simulation has.
    fn address(&self, number: u64, begin: &str) -> String {
        const SPACE: u64 = 1 << 22;
        // An odd factor permutes the space; the offset keeps simulations that follow one another apart.
        let place = number.wrapping_mul(2_654_435_761).wrapping_add(draw(self.seed, &["address", begin])) % SPACE;
        let place = u32::try_from(place).unwrap_or(0);
        Ipv4Addr::from((10 << 24) | place).to_string()
    }

    /// An instance; `None` when EC2 no longer describes it.
    ///
    /// # Errors
    /// Throttled or failed as scripted.
    pub fn describe(&mut self, provider_id: &str, now_ms: i64) -> Result<Option<Instance>, CloudError> {
        self.call(now_ms)?;
        Ok(self.by_provider_id(provider_id).map(|record| record.describe(now_ms)))
    }

    /// Starts termination; false when the instance is gone already. Repeating it changes nothing.
    ///
    /// # Errors
    /// Throttled or failed as scripted.
    pub fn terminate(&mut self, provider_id: &str, now_ms: i64) -> Result<bool, CloudError> {
        self.call(now_ms)?;
        let Some(record) = self.by_provider_id(provider_id) else {
            return Ok(false);
        };
        if record.state(now_ms) == InstanceState::Terminated {
            return Ok(false);
        }
        let id = record.id.clone();
        self.shut_down(&id, now_ms);
        Ok(true)
    }

    /// Every instance that is not terminated, in the order of launch.
    ///
    /// # Errors
    /// Throttled or failed as scripted.
    pub fn list(&mut self, now_ms: i64) -> Result<Vec<Instance>, CloudError> {
        self.call(now_ms)?;
        let mut records: Vec<&Record> =
            self.ledger.instances.values().filter(|record| record.state(now_ms) != InstanceState::Terminated).collect();
        records.sort_by_key(|record| record.number);
        Ok(records.into_iter().map(|record| record.describe(now_ms)).collect())
    }

    /// The messages that are visible, oldest first, at most ten; they are hidden from other receivers for a while.
    ///
    /// # Errors
    /// Throttled or failed as scripted.
    pub fn receive(&mut self, now_ms: i64) -> Result<Vec<Message>, CloudError> {
        self.call(now_ms)?;
        self.hidden.retain(|_, until| *until > now_ms);
        let visible = |message: &&QueuedMessage| message.at_ms <= now_ms && !self.hidden.contains_key(&message.id);
        let mut due: Vec<&QueuedMessage> = self.ledger.queue.values().filter(visible).collect();
        due.sort_by(|a, b| (a.at_ms, &a.id).cmp(&(b.at_ms, &b.id)));
        due.truncate(RECEIVE_MOST);
        let until = now_ms.saturating_add(self.pace.visibility_ms);
        self.hidden.extend(due.iter().map(|message| (message.id.clone(), until)));
        let as_message = |message: &QueuedMessage| Message {
            receipt: message.id.clone(),
            kind: message.kind,
            instance_id: message.instance_id.clone(),
            at: UnixMillis(message.at_ms),
        };
        Ok(due.into_iter().map(as_message).collect())
    }

    /// Deletes messages by one call; one that is gone already is no error.
    ///
    /// # Errors
    /// Throttled or failed as scripted.
    pub fn delete_messages(&mut self, receipts: &[String], now_ms: i64) -> Result<(), CloudError> {
        self.call(now_ms)?;
        for receipt in receipts {
            self.hidden.remove(receipt);
            if self.ledger.queue.contains_key(receipt) {
                self.record(Entry::Deleted { id: receipt.to_owned() });
            }
        }
        Ok(())
    }

    /// What is to be done to Node objects at a time: at most so many actions, for the longest launched instances first, none for
    /// the instances to skip. An action is returned until it is reported as done.
    pub fn node_actions(&mut self, now_ms: i64, most: usize, skip: impl Fn(&str) -> bool) -> Vec<NodeAction> {
        self.advance(now_ms);
        let due = |record| next_step(record, now_ms).filter(|(at, _)| *at <= now_ms).map(|(_, step)| (record, step));
        let mut due: Vec<(&Record, NodeStep)> = self.ledger.instances.values().filter_map(due).collect();
        due.retain(|(record, _)| !skip(&record.id));
        due.sort_by_key(|(record, _)| record.number);
        due.truncate(most);
        due.into_iter().map(|(record, step)| NodeAction { record: record.clone(), step }).collect()
    }

    /// Reports that something was done to an instance's Node.
    pub fn node_step_done(&mut self, id: &str, step: NodeStep) {
        self.record(Entry::Node { id: id.to_owned(), step });
    }

    /// The next time after `now_ms` at which something happens by itself.
    pub fn next_wake_ms(&self, now_ms: i64) -> Option<i64> {
        let steps = self.ledger.instances.values().filter_map(|record| next_step(record, now_ms).map(|(at, _)| at));
        let messages = self.ledger.queue.values().map(|message| message.at_ms);
        let events = self.script.events.iter().enumerate().filter_map(|(index, event)| match event.trigger {
            _ if self.ledger.fired.contains_key(&event_key(index, event)) => None,
            Trigger::At(at) => Some(self.started_at_ms().saturating_add(at)),
            Trigger::Launch { number, after_ms } => {
                let launched = self.ledger.instances.values().find(|record| record.number == number);
                launched.map(|record| record.launched_at_ms.saturating_add(after_ms))
            }
        });
        steps.chain(messages).chain(events).filter(|at| *at > now_ms).min()
    }

    /// An instance by its provider id. The zone in it must be right too.
    fn by_provider_id(&self, provider_id: &str) -> Option<&Record> {
        let id = provider_id.rsplit('/').next()?;
        self.ledger.instances.get(id).filter(|record| record.provider_id() == provider_id)
    }

    fn call(&mut self, now_ms: i64) -> Result<(), CloudError> {
        self.advance(now_ms);
        self.refusal(now_ms, false).map_or(Ok(()), Err)
    }

    /// How a call is refused, if it is. What is tied to a launch only touches launches.
    fn refusal(&mut self, now_ms: i64, launch: bool) -> Option<CloudError> {
        self.calls += 1;
        let (begin, call) = (self.started_at_ms().to_string(), self.calls.to_string());
        let drawn = draw_between(self.seed, &["call", &begin, &call], 0, 999_999);
        let applies = |event: &Event| {
            let share = match event.action {
                Action::Throttle { share_ppm } | Action::ServerError { share_ppm } => share_ppm,
                _ => 0,
            };
            drawn < share && (launch || matches!(event.trigger, Trigger::At(_)))
        };
        match self.condition(now_ms, applies)? {
            Action::Throttle { .. } => Some(CloudError::Throttled),
            _ => Some(CloudError::Other("an internal error has occurred (scripted)".to_owned())),
        }
    }

    /// The action of the first event of the script that holds now and applies; it counts as used once more.
    fn condition(&mut self, now_ms: i64, applies: impl Fn(&Event) -> bool) -> Option<Action> {
        let next = self.ledger.launches + 1;
        let (key, event) = self.active(now_ms, next).find(|(_, event)| applies(event))?;
        let (action, limited) = (event.action, event.count.is_some());
        if limited {
            self.record(Entry::Fired { event: key, times: 1 });
        }
        Some(action)
    }

    /// The events that hold at a time for the launch with a number, and are not used up.
    fn active(&self, now_ms: i64, next_launch: u64) -> impl Iterator<Item = (String, &Event)> {
        let started = self.started_at_ms();
        self.script.events.iter().enumerate().filter_map(move |(index, event)| {
            let holds = match event.trigger {
                Trigger::At(at) => {
                    let from = started.saturating_add(at);
                    from <= now_ms && event.lasts_ms.is_none_or(|lasts| now_ms < from.saturating_add(lasts))
                }
                Trigger::Launch { number, .. } => number == next_launch,
            };
            let key = event_key(index, event);
            let used = self.ledger.fired.get(&key).copied().unwrap_or(0);
            (holds && event.count.is_none_or(|count| used < count)).then_some((key, event))
        })
    }
}

fn interrupts_on_demand(kind: InstanceEvent, record: &Record) -> bool {
    kind == InstanceEvent::SpotInterruption && record.capacity_type != CapacityType::Spot
}

fn of_launch(event: &Event, offering: &Override, request: &LaunchRequest) -> bool {
    event.selector.matches_offering(&offering.instance_type, &offering.zone, offering.capacity_type)
        && event.selector.matches_claim(&request.node_claim, &request.node_pool)
}

/// What a used event is remembered by: its place and its content, so that a changed script is not taken for the old one.
fn event_key(index: usize, event: &Event) -> String {
    format!("{}-{:016x}", index + 1, draw(0, &[&format!("{event:?}")]))
}

#[cfg(test)]
mod fault_tests;

#[cfg(test)]
pub(crate) mod tests;
