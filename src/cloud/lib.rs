//! The cloud behind the plan: the interface [`Cloud`], Amazon EC2, and the simulated EC2 that is the embedded default.

pub mod ami_family;
mod call_error;
pub mod catalog;
pub mod ec2;
mod interface;
mod kubelet_config;
mod launch_request;
mod message;
mod node_class_resolution;
pub mod offering_state;
mod optional_api;
pub mod simulated;
#[cfg(test)]
mod test_support;

pub use stowage_model::drift_reason::Drift;
pub use stowage_model::instance::{Instance, InstanceState};
pub use stowage_model::reservation::ReservedIn;

pub use crate::call_error::{CloudError, without_encoded_details};

pub use crate::interface::{
    Capabilities, Cloud, ClusterObserver, InstanceEvents, InstanceTagging, NodeClassCloud, OfferingStatus,
    ServiceStatus, Untagged,
};
pub use crate::launch_request::{LaunchDetails, LaunchError, LaunchRequest, Launched, Override};
pub use crate::message::{Message, MessageKind};
pub use crate::node_class_resolution::{Resolution, Verdict};
pub use crate::optional_api::OptionalApi;

/// Parsers of outside input, for the fuzz targets.
#[doc(hidden)]
pub mod parsers {
    pub use crate::ec2::bootstrap::user_data::{UserDataInput, ignored_settings, user_data};
    pub use crate::ec2::interruption::messages::parse as queue_message;
}
