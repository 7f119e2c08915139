//! The simulated provider: the state machine with a clock, locks and the state file, behind the [`Cloud`] trait.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use stowage_api::launch_group::LaunchGroup;
use stowage_api::{Ec2NodeClass, NodeClaim};
use stowage_model::offering::{Catalog, InstanceType};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::catalog::{NodeSettings, embedded};
use crate::launch_request::launchable;
use crate::simulated::engine::Engine;
use crate::simulated::engine_state::{EngineState, NodeStep};
use crate::simulated::instance_event::InstanceEvent;
use crate::simulated::journal::{Journal, JournalError};
use crate::simulated::node_steps::NodeAction;
use crate::simulated::simulation_settings::{BootDelay, SimulatedConfig, Timings};
use crate::simulated::spot_price_model::SpotPriceModel;
use crate::{Capabilities, Cloud, CloudError, Instance, LaunchError, LaunchRequest, Launched, Message, Override};

/// Longest wait for a change of the state.
const MAX_IDLE: Duration = Duration::from_secs(1);

/// Simulated EC2. Methods block only on their own short locks and on the state file.
pub struct SimulatedEc2 {
    config: SimulatedConfig,
    clock: ClockFn,
    /// Locked before `prices`.
    simulation: Mutex<Simulation>,
    prices: Mutex<SpotPriceModel>,
    /// Settings by name of the node class: a launch request contains the name only.
    settings: Mutex<BTreeMap<String, NodeSettings>>,
    changed: Notify,
}

/// Returns the current time.
type ClockFn = Box<dyn Fn() -> UnixMillis + Send + Sync>;

enum Simulation {
    /// Another process, such as the previous leader, still holds the state file.
    WaitingForStateFile,
    Running {
        engine: Box<Engine>,
        journal: Option<Journal>,
    },
}

impl fmt::Debug for SimulatedEc2 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedEc2").field("config", &self.config).finish_non_exhaustive()
    }
}

impl SimulatedEc2 {
    /// Starts the simulation, or resumes the one in the state file. While another process holds the state file, calls fail, and the
    /// first call after its release takes over: a standby may run next to a leader.
    ///
    /// # Errors
    /// The state file can't be read, written or parsed.
    pub fn open(config: SimulatedConfig) -> Result<Self, JournalError> {
        Self::with_clock(config, Box::new(clock::now))
    }

    /// As [`SimulatedEc2::open`], with a clock of the caller.
    ///
    /// # Errors
    /// As [`SimulatedEc2::open`].
    pub fn with_clock(config: SimulatedConfig, clock: ClockFn) -> Result<Self, JournalError> {
        let raw = config.catalog.clone().unwrap_or_else(|| Arc::new(embedded().clone()));
        let ec2 = Self {
            prices: Mutex::new(SpotPriceModel::new(raw, config.spot)),
            config,
            clock,
            simulation: Mutex::new(Simulation::WaitingForStateFile),
            settings: Mutex::default(),
            changed: Notify::new(),
        };
        match ec2.start(&mut lock(&ec2.simulation)) {
            Err(JournalError::InUse(path)) => {
                info!(state_file = %path.display(), "waiting for the state file of the simulated EC2");
            }
            other => other?,
        }
        Ok(ec2)
    }

    /// Opens the state file, if one is configured, and starts the state machine.
    fn start(&self, simulation: &mut Simulation) -> Result<(), JournalError> {
        let (journal, state) = match &self.config.state_file {
            None => (None, EngineState::default()),
            Some(path) => {
                let (journal, state) = Journal::open(path)?;
                (Some(journal), state)
            }
        };
        let config = &self.config;
        let boot = match config.boot_delay {
            BootDelay::Fixed(delay) => (delay, delay),
            BootDelay::Between(shortest, longest) => (shortest, longest),
        };
        let timings = Timings {
            boot,
            pending: config.api_delay,
            notice: config.interruption_notice,
            shutdown: config.shutdown_delay,
            visibility: config.visibility_timeout,
            // As the interruption queue of Karpenter's CloudFormation template.
            retention: Duration::from_mins(5),
        };
        let mut engine = Engine::new(config.seed, timings, state, (self.clock)());
        let mut journal = journal;
        if let Some(journal) = &mut journal {
            journal.append(&engine.take_pending_entries())?;
        }
        *simulation = Simulation::Running { engine: Box::new(engine), journal };
        Ok(())
    }

    /// Runs a step of the state machine, and writes its journal entries before the result is used.
    fn step<T>(&self, step: impl FnOnce(&mut Engine, UnixMillis) -> T) -> Result<T, JournalError> {
        let mut simulation = lock(&self.simulation);
        if matches!(*simulation, Simulation::WaitingForStateFile) {
            self.start(&mut simulation)?;
        }
        let Simulation::Running { engine, journal } = &mut *simulation else {
            // `start` makes it running or fails.
            return Err(JournalError::InUse(self.config.state_file.clone().unwrap_or_default()));
        };
        let result = step(engine, (self.clock)());
        let entries = engine.take_pending_entries();
        if !entries.is_empty() {
            self.changed.notify_waiters();
        }
        match journal {
            Some(journal) => journal.append(&entries)?,
            None => drop(entries),
        }
        Ok(result)
    }

    /// As [`SimulatedEc2::step`], for API calls.
    fn call<T>(&self, step: impl FnOnce(&mut Engine, UnixMillis) -> T) -> Result<T, CloudError> {
        self.step(step).map_err(|error| CloudError::Other(error.to_string()))
    }

    /// Applies an event to an instance, selected by its id or node name. With kubectl, use the annotation
    /// `simulated.stowage.dev/event` instead.
    ///
    /// # Errors
    /// There is no such running instance, or a spot interruption is requested for an on-demand one.
    pub fn trigger(&self, id_or_node: &str, event: InstanceEvent) -> Result<(), CloudError> {
        self.call(|engine, now| engine.trigger(id_or_node, event, now))?
    }

    /// The due steps of Node objects, at most `limit`, without the instances to skip.
    pub(crate) fn node_actions(&self, limit: usize, skip: impl Fn(&str) -> bool) -> Vec<NodeAction> {
        self.step(|engine, now| engine.node_actions(now, limit, skip)).unwrap_or_else(|error| {
            warn!(%error, "simulated EC2 is not available");
            Vec::new()
        })
    }

    /// Records that a step of an instance's Node is done.
    pub(crate) fn node_step_done(&self, id: &str, step: NodeStep) {
        if let Err(error) = self.step(|engine, _| engine.node_step_done(id, step)) {
            // Steps are idempotent, and this one is repeated after a restart.
            warn!(%error, instance = id, "could not record a step of a simulated node");
        }
    }

    /// The resources and labels that a node of a class reports.
    pub(crate) fn instance_type(&self, instance_type: &str, node_class: &str) -> Option<InstanceType> {
        let settings = lock(&self.settings).get(node_class).cloned().unwrap_or_default();
        let prices = lock(&self.prices);
        let raw = prices.raw();
        let entry = raw.instance_type(instance_type)?;
        // The instance is already running: an expression that fails now counts as not set.
        let settings = settings.on(entry).unwrap_or(Cow::Borrowed(&settings)).into_owned();
        Some(entry.as_node(&raw.region, &settings, self.config.spot))
    }

    /// Waits until the state changes.
    pub(crate) async fn wait_for_change(&self) {
        self.wait_at_most(MAX_IDLE).await;
    }

    async fn wait_at_most(&self, longest: Duration) {
        let changed = self.changed.notified();
        let now = (self.clock)();
        let wake = self.step(|engine, now| engine.next_wake(now)).ok().flatten();
        let wait = wake.map_or(longest, |at| at.saturating_since(now).min(longest));
        tokio::select! {
            () = changed => {}
            () = tokio::time::sleep(wait) => {}
        }
    }

    /// Waits for the duration of an API call, after its effect: a caller that is canceled meanwhile loses the response only.
    async fn api_delay(&self) {
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
            let mut by_class = lock(&self.settings);
            if by_class.get(name) != Some(&settings) {
                by_class.insert(name.clone(), settings.clone());
            }
        }
        lock(&self.prices).catalog(&settings, (self.clock)())
    }

    fn mark_unavailable(&self, offering: &Override) {
        lock(&self.prices).mark_unavailable(offering, (self.clock)());
    }

    fn launch(&self, request: LaunchRequest) -> BoxFuture<'_, Result<Launched, LaunchError>> {
        async move {
            if let Some(details) = &request.details {
                launchable(&details.class)?;
            }
            let launched = self.step(|engine, now| engine.launch(&request, &lock(&self.prices), now));
            self.api_delay().await;
            launched.map_err(|error| LaunchError::other(error.to_string()))?
        }
        .boxed()
    }

    fn describe<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<Option<Instance>, CloudError>> {
        async move {
            let described = self.call(|engine, now| engine.describe(provider_id, now));
            self.api_delay().await;
            described
        }
        .boxed()
    }

    fn terminate<'a>(&'a self, provider_id: &'a str) -> BoxFuture<'a, Result<bool, CloudError>> {
        async move {
            let terminated = self.call(|engine, now| engine.terminate(provider_id, now));
            self.api_delay().await;
            terminated
        }
        .boxed()
    }

    fn list(&self) -> BoxFuture<'_, Result<Vec<Instance>, CloudError>> {
        async move {
            let listed = self.call(Engine::list);
            self.api_delay().await;
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
                let messages = self.call(Engine::receive)?;
                let left = end.saturating_duration_since(tokio::time::Instant::now());
                if !messages.is_empty() || left.is_zero() {
                    return Ok(messages);
                }
                self.wait_at_most(left).await;
            }
        }
        .boxed()
    }

    fn delete_messages<'a>(&'a self, receipts: &'a [String]) -> BoxFuture<'a, Result<(), CloudError>> {
        async move {
            let deleted = self.call(|engine, now| engine.delete_messages(receipts, now));
            self.api_delay().await;
            deleted
        }
        .boxed()
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::default()
    }
}

#[cfg(test)]
mod tests;
