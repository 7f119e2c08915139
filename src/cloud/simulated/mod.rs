//! Simulated EC2 inside the process, for tests and demos.
//!
//! - [`engine`] is the state machine, without clock and I/O; [`state`] its data, [`new_instance`] and [`node_steps`] its instances
//!   and their Node objects, [`instance_event`] what happens to them, [`spot_prices`] its prices.
//! - [`provider`] adds the clock, the locks and the state file ([`journal`]), and implements [`Cloud`](crate::cloud::Cloud).
//! - [`fake_kubelet`] is the only module that calls Kubernetes: it acts as the kubelets and the cloud controller manager.

pub mod engine;
pub mod engine_state;
pub mod fake_kubelet;
pub mod instance_event;
pub mod journal;
pub(crate) mod new_instance;
pub mod node_steps;
pub mod provider;
pub mod simulation_settings;
pub mod spot_price_model;

pub use crate::cloud::simulated::provider::SimulatedEc2;
pub use crate::cloud::simulated::simulation_settings::{BootDelay, SimulatedConfig};
