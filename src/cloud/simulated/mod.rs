//! Simulated EC2 inside the process, for tests and demos.
//!
//! - [`engine`] is the state machine, without clock and I/O; [`engine_state`] its data, [`new_instance`] and [`node_steps`] its instances
//!   and their Node objects, [`instance_event`] what happens to them, [`spot_price_model`] its prices.
//! - [`provider`] adds the clock, the locks and the state file ([`journal`]), and implements [`Cloud`](crate::Cloud).
//! - [`fake_kubelet`] is the only module that calls Kubernetes: it acts as the kubelets and the cloud controller manager.

pub(crate) mod engine;
pub(crate) mod engine_state;
pub(crate) mod fake_kubelet;
pub(crate) mod instance_event;
pub(crate) mod journal;
pub(crate) mod new_instance;
pub(crate) mod node_steps;
pub(crate) mod provider;
pub(crate) mod simulation_settings;
pub(crate) mod spot_price_model;

pub use crate::simulated::new_instance::IMAGE_ID;
pub use crate::simulated::provider::SimulatedEc2;
pub use crate::simulated::simulation_settings::{BootDelay, SimulatedConfig};
