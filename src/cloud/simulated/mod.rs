//! Simulated EC2, inside the process: the embedded default cloud.
//!
//! - [`crate::cloud::simulated::engine`]: the state machine, without clock or I/O; [`record`] is what it remembers, [`crate::cloud::simulated::spot_prices`] its prices, [`node_steps`] what its
//!   instances mean for Node objects.
//! - [`script`]: what goes wrong, and when.
//! - [`journal`]: the state file, by which instances outlive the process.
//! - [`SimulatedEc2`]: the shell with clock and locks, which implements [`Cloud`](crate::cloud::Cloud).
//! - [`crate::cloud::simulated::fake_kubelet`]: the only file that talks to Kubernetes; it plays the instances' kubelets at boot and the cloud controller at the end.

pub mod engine;
pub mod fake_kubelet;
pub mod journal;
pub mod node_steps;
pub mod provider;
pub mod record;
pub mod script;
pub mod spot_prices;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use crate::cloud::simulated::fake_kubelet::EVENT_ANNOTATION;
pub use crate::cloud::simulated::journal::JournalError;
pub use crate::cloud::simulated::provider::SimulatedEc2;
pub use crate::cloud::simulated::script::{InstanceEvent, Script, ScriptError};

use crate::cloud::catalog::{RawCatalog, SpotPricing};

/// How long an instance takes from launch to a running kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootDelay {
    /// Always the same.
    Fixed(Duration),
    /// Each instance draws its own, between the two.
    Between(Duration, Duration),
}

/// Settings of the simulation.
#[derive(Clone, Debug)]
pub struct SimulatedConfig {
    /// Seed of every draw.
    pub seed: u64,
    /// Instance types and list prices; `None` takes the embedded catalog.
    pub catalog: Option<Arc<RawCatalog>>,
    /// Where spot prices come from.
    pub spot: SpotPricing,
    /// From launch to a running kubelet.
    pub boot_delay: BootDelay,
    /// How long each call takes, and how long an instance stays pending.
    pub api_delay: Duration,
    /// From shutting down to terminated.
    pub shutdown_delay: Duration,
    /// From the notice of a spot interruption to the end of the instance.
    pub interruption_notice: Duration,
    /// How long a receive waits for a message.
    pub poll: Duration,
    /// How long a received message stays hidden from others.
    pub visibility_timeout: Duration,
    /// Where instances are remembered across restarts; `None` forgets them.
    pub state_file: Option<PathBuf>,
    /// What goes wrong.
    pub script: Script,
    /// Whether kubelet configurations may hold expressions (the feature gate NodeClassCEL).
    pub node_class_cel: bool,
}

impl Default for SimulatedConfig {
    /// The embedded catalog, synthetic spot prices, a boot in 20 to 40 s, two minutes' notice, nothing scripted.
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
            script: Script::default(),
            node_class_cel: false,
        }
    }
}
