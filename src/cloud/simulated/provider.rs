//! The shell around the state machine: clock, locks, state file, and the [`Cloud`] trait.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::api::{Ec2NodeClass, NodeClaim};
use crate::cloud::catalog::{NodeSettings, embedded};
use crate::cloud::launch_group::LaunchGroup;
use crate::cloud::simulated::engine::{Ec2State, Pace};
use crate::cloud::simulated::journal::{Journal, JournalError};
use crate::cloud::simulated::node_steps::NodeAction;
use crate::cloud::simulated::record::{Ledger, NodeStep};
use crate::cloud::simulated::script::InstanceEvent;
use crate::cloud::simulated::spot_prices::SpotPriceModel;
use crate::cloud::simulated::{BootDelay, SimulatedConfig};
use crate::cloud::{
    Capabilities, Cloud, CloudError, Instance, LaunchError, LaunchRequest, Launched, Message, Override,
};
use crate::model::offering::{Catalog, InstanceType};
use crate::sync::lock;

/// Longest time without looking at the state again, whatever it says of its next change.
const LONGEST_NAP: Duration = Duration::from_secs(1);

/// Simulated EC2. Cheap to share behind an `Arc`; no method blocks on anything but its own short locks and the state file.
pub struct SimulatedEc2 {
    config: SimulatedConfig,
    clock: Clock,
    /// Locked before `market` wherever both are.
    engine: Mutex<Engine>,
    market: Mutex<SpotPriceModel>,
    /// Settings of the node classes seen so far, by name: a launch only names its class.
    settings: Mutex<BTreeMap<String, NodeSettings>>,
    changed: Notify,
}

type Clock = Box<dyn Fn() -> i64 + Send + Sync>;

/// The state machine with its journal, or what is needed to open it.
enum Engine {
    /// Another process, such as the leader before this one, still holds the state file.
    Waiting,
    Open {
        state: Box<Ec2State>,
        journal: Option<Journal>,
    },
}

impl fmt::Debug for SimulatedEc2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedEc2").field("config", &self.config).finish_non_exhaustive()
    }
}

impl SimulatedEc2 {
    /// Starts the simulation, or goes on with the one in the state file. While another process holds the state file, calls
    /// fail and say so, and the first call after it lets go takes over: a standby may start beside a leader.
    ///
    /// # Errors
    /// The state file can't be read, written or understood.
    pub fn open(config: SimulatedConfig) -> Result<Self, JournalError> {
        Self::with_clock(config, Box::new(wall_clock))
    }

    /// As [`SimulatedEc2::open`], with a clock of the caller's: milliseconds since the epoch.
    ///
    /// # Errors
    /// As [`SimulatedEc2::open`].
    pub fn with_clock(config: SimulatedConfig, clock: Clock) -> Result<Self, JournalError> {
        let raw = config.catalog.clone().unwrap_or_else(|| Arc::new(embedded().clone()));
        let ec2 = Self {
            market: Mutex::new(SpotPriceModel::new(raw, config.spot)),
            config,
            clock,
            engine: Mutex::new(Engine::Waiting),
            settings: Mutex::default(),
            changed: Notify::new(),
        };
        match ec2.start(&mut lock(&ec2.engine)) {
            Err(JournalError::InUse(path)) => {
                info!(state_file = %path.display(), "simulated EC2 waits for its state file");
            }
            other => other?,
        }
        Ok(ec2)
    }

    /// Opens the state file, if there is one, and the state machine on it.
    fn start(&self, engine: &mut Engine) -> Result<(), JournalError> {
        let (journal, ledger) = match &self.config.state_file {
            None => (None, Ledger::default()),
            Some(path) => {
                let (journal, ledger) = Journal::open(path)?;
                (Some(journal), ledger)
            }
        };
        let config = &self.config;
        let (least, most) = match config.boot_delay {
            BootDelay::Fixed(delay) => (delay, delay),
            BootDelay::Between(least, most) => (least, most),
        };
        let pace = Pace {
            boot_ms: (milliseconds(least), milliseconds(most)),
            pending_ms: milliseconds(config.api_delay),
            notice_ms: milliseconds(config.interruption_notice),
            shutdown_ms: milliseconds(config.shutdown_delay),
            visibility_ms: milliseconds(config.visibility_timeout),
            // As the interruption queue of Karpenter's CloudFormation template.
            retention_ms: 300_000,
        };
        let mut state = Ec2State::new(config.seed, pace, config.script.clone(), ledger, (self.clock)());
        lock(&self.market).set_moves(&config.script.events, state.started_at_ms());
        let mut journal = journal;
        if let Some(journal) = &mut journal {
            journal.append(&state.take_unwritten())?;
        }
        *engine = Engine::Open { state: Box::new(state), journal };
        Ok(())
    }

    /// Runs a step of the state machine and writes what it changed to the state file before its answer is used.
    fn step<T>(&self, step: impl FnOnce(&mut Ec2State, i64) -> T) -> Result<T, JournalError> {
        let mut engine = lock(&self.engine);
        if matches!(*engine, Engine::Waiting) {
            self.start(&mut engine)?;
        }
        let Engine::Open { state, journal } = &mut *engine else {
            // `start` opens the engine or fails.
            return Err(JournalError::InUse(self.config.state_file.clone().unwrap_or_default()));
        };
        let answer = step(state, (self.clock)());
        let entries = state.take_unwritten();
        if !entries.is_empty() {
            self.changed.notify_waiters();
        }
        match journal {
            Some(journal) => journal.append(&entries)?,
            None => drop(entries),
        }
        Ok(answer)
    }

    /// As [`SimulatedEc2::step`], for calls of the API.
    fn call<T>(&self, step: impl FnOnce(&mut Ec2State, i64) -> Result<T, CloudError>) -> Result<T, CloudError> {
        self.step(step).map_err(|error| CloudError::Other(error.to_string()))?
    }

    /// Makes something happen to an instance, found by its id or its node's name. For tests and the demo; people with
    /// kubectl use the annotation [`EVENT_ANNOTATION`](crate::cloud::simulated::EVENT_ANNOTATION).
    ///
    /// # Errors
    /// There is no such living instance, or a spot interruption is asked of an on-demand one.
    pub fn trigger(&self, id_or_node: &str, event: InstanceEvent) -> Result<(), CloudError> {
        self.call(|state, now| state.trigger(id_or_node, event, now))
    }

    /// At most so many things to be done to Node objects now, but nothing for the instances to skip.
    pub(crate) fn node_actions(&self, most: usize, skip: impl Fn(&str) -> bool) -> Vec<NodeAction> {
        self.step(|state, now| state.node_actions(now, most, skip)).unwrap_or_else(|error| {
            warn!(%error, "simulated EC2 does nothing");
            Vec::new()
        })
    }

    /// Notes that something was done to a Node.
    pub(crate) fn node_step_done(&self, id: &str, step: NodeStep) {
        if let Err(error) = self.step(|state, _| state.node_step_done(id, step)) {
            // The step is repeated after a restart, and every step may be repeated.
            warn!(%error, instance = id, "a step of a simulated node was not written down");
        }
    }

    /// An instance type as a node of a class, for the kubelet to report.
    pub(crate) fn shape(&self, instance_type: &str, node_class: &str) -> Option<InstanceType> {
        let settings = lock(&self.settings).get(node_class).cloned().unwrap_or_default();
        let market = lock(&self.market);
        let raw = market.raw();
        let entry = raw.instance_type(instance_type)?;
        // An instance that runs has a size: expressions that fail by now count as not set.
        let own = settings.on(entry).unwrap_or(Cow::Borrowed(&settings));
        Some(entry.as_node(&raw.region, &own, self.config.spot))
    }

    /// Waits until the state changes or the time of its next change comes.
    pub(crate) async fn idle(&self) {
        self.nap(LONGEST_NAP).await;
    }

    async fn nap(&self, longest: Duration) {
        let changed = self.changed.notified();
        let now = (self.clock)();
        let wake = self.step(|state, now| state.next_wake_ms(now)).ok().flatten();
        let wait = wake.map_or(longest, |at| {
            Duration::from_millis(u64::try_from(at.saturating_sub(now)).unwrap_or(0)).min(longest)
        });
        tokio::select! {
            () = changed => {}
            () = tokio::time::sleep(wait) => {}
        }
    }

    /// The time a call takes. After its effect, so that a caller who goes away meanwhile misses only the answer.
    async fn latency(&self) {
        if !self.config.api_delay.is_zero() {
            tokio::time::sleep(self.config.api_delay).await;
        }
    }
}

impl Cloud for SimulatedEc2 {
    fn catalog(&self, class: &Ec2NodeClass) -> Arc<Catalog> {
        let settings = NodeSettings::of(Some(class));
        let settings = if self.config.node_class_cel { settings.with_expressions(class) } else { settings };
        if let Some(name) = &class.metadata.name {
            let mut known = lock(&self.settings);
            if known.get(name) != Some(&settings) {
                known.insert(name.clone(), settings.clone());
            }
        }
        lock(&self.market).catalog(&settings, (self.clock)())
    }

    fn mark_unavailable(&self, offering: &Override) {
        lock(&self.market).mark_unavailable(offering, (self.clock)());
    }

    fn launch(&self, request: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>> {
        async move {
            let launched = self.step(|state, now| state.launch(&request, &lock(&self.market), now));
            self.latency().await;
            launched.map_err(|error| LaunchError::other(error.to_string()))?
        }
        .boxed()
    }

    fn describe<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>> {
        async move {
            let described = self.call(|state, now| state.describe(provider_id, now));
            self.latency().await;
            described
        }
        .boxed()
    }

    fn terminate<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>> {
        async move {
            let terminated = self.call(|state, now| state.terminate(provider_id, now));
            self.latency().await;
            terminated
        }
        .boxed()
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>> {
        async move {
            let listed = self.call(Ec2State::list);
            self.latency().await;
            listed
        }
        .boxed()
    }

    fn launched_for<'a>(&'a self, claim: &'a NodeClaim) -> BoxFuture<'a, Result<Vec<Instance>, CloudError>> {
        async move {
            let tokens = [Some(LaunchGroup::of(claim).id), claim.metadata.uid.clone()];
            let mut found = self.list().await?;
            found.retain(|instance| tokens.iter().flatten().any(|token| *token == instance.client_token));
            Ok(found)
        }
        .boxed()
    }

    fn receive_messages(&self) -> BoxFuture<'_, Result<Vec<Message>, CloudError>> {
        async move {
            let end = tokio::time::Instant::now() + self.config.poll;
            loop {
                let messages = self.call(Ec2State::receive)?;
                let left = end.saturating_duration_since(tokio::time::Instant::now());
                if !messages.is_empty() || left.is_zero() {
                    return Ok(messages);
                }
                self.nap(left).await;
            }
        }
        .boxed()
    }

    fn delete_messages<'a>(&'a self, receipts: &'a [String]) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            let deleted = self.call(|state, now| state.delete_messages(receipts, now));
            self.latency().await;
            deleted
        }
        .boxed()
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::default()
    }
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn wall_clock() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, milliseconds)
}

#[cfg(test)]
mod tests;
