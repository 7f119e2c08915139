//! The cloud behind the plan: the interface [`Cloud`], Amazon EC2, and the simulated EC2 that is the embedded default.

pub mod ami_family;
pub mod call_error;
pub mod catalog;
pub mod ec2;
pub mod interface;
pub mod kubelet_config;
pub mod launch_request;
pub mod message;
pub mod node_class_resolution;
pub mod offering_state;
pub mod optional_api;
pub mod simulated;

pub use stowage_model::drift_reason::Drift;
pub use stowage_model::instance::{Instance, InstanceState};
pub use stowage_model::reservation::ReservedIn;

pub use crate::cloud::call_error::{CloudError, without_encoded_details};

pub use crate::cloud::interface::{
    Capabilities, Cloud, ClusterObserver, InstanceEvents, InstanceTagging, NodeClassCloud, OfferingStatus,
    ServiceStatus, Untagged,
};
pub use crate::cloud::launch_request::{LaunchDetails, LaunchError, LaunchRequest, Launched, Override};
pub use crate::cloud::message::{Message, MessageKind};
pub use crate::cloud::node_class_resolution::{Resolution, Verdict};
pub use crate::cloud::optional_api::OptionalApi;
