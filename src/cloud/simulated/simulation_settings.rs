//! Settings of the simulation.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::catalog::{RawCatalog, SpotPricing};

/// How long an instance takes from launch to a running kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootDelay {
    /// The same for every instance.
    Fixed(Duration),
    /// Drawn for each instance, between the two.
    Between(Duration, Duration),
}

/// Settings of the simulation.
#[derive(Clone, Debug)]
pub struct SimulatedConfig {
    /// Seed of every draw.
    pub seed: u64,
    /// Instance types and list prices; `None` for the embedded catalog.
    pub catalog: Option<Arc<RawCatalog>>,
    pub spot: SpotPricing,
    /// Time from launch to a running kubelet.
    pub boot_delay: BootDelay,
    /// Duration of each API call, and time that an instance stays pending.
    pub api_delay: Duration,
    /// Time from shutting down to terminated.
    pub shutdown_delay: Duration,
    /// Time from a spot interruption warning to the end of the instance.
    pub interruption_notice: Duration,
    /// How long a receive waits for a message.
    pub poll: Duration,
    /// How long a received message stays invisible to other receivers.
    pub visibility_timeout: Duration,
    /// The file that keeps instances across restarts; `None` keeps nothing.
    pub state_file: Option<PathBuf>,
    /// Whether kubelet configurations may contain CEL expressions (feature gate NodeClassCEL).
    pub node_class_cel: bool,
}

impl Default for SimulatedConfig {
    /// The embedded catalog, synthetic spot prices, a boot within 20 to 40 s, a warning of two minutes.
    fn default() -> Self {
        Self {
            seed: 1,
            catalog: None,
            spot: SpotPricing::Synthetic { seed: 1 },
            boot_delay: BootDelay::Between(Duration::from_secs(20), Duration::from_secs(40)),
            api_delay: Duration::from_millis(200),
            shutdown_delay: Duration::from_secs(5),
            interruption_notice: Duration::from_mins(2),
            poll: Duration::from_secs(1),
            visibility_timeout: Duration::from_secs(30),
            state_file: None,
            node_class_cel: false,
        }
    }
}

/// Durations of the simulation, as the state machine uses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timings {
    /// Minimum and maximum time from launch to a running kubelet; drawn for each instance.
    pub boot: (Duration, Duration),
    /// Time that an instance stays pending.
    pub pending: Duration,
    /// Time from a spot interruption warning to the shutdown.
    pub notice: Duration,
    /// Time from shutting down to terminated.
    pub shutdown: Duration,
    /// How long a received message stays invisible to other receivers.
    pub visibility: Duration,
    /// How long the queue keeps a message.
    pub retention: Duration,
}
