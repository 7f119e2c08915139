//! Amazon EC2 through the AWS SDK. Requests and the interpretation of responses are pure functions, tested with tables; the calls
//! around them only send, page and delegate. Nothing that the planner calls does I/O.
//!
//! Groups, bottom to top; imports point downwards only:
//!
//! | group | contents |
//! |---|---|
//! | [`options`], [`tags`], [`placement_group`], [`boot_image`], [`failing_apis`] | shared types |
//! | [`aws`] | clients, rate limits, error classes, call batching |
//! | [`bootstrap`] | user data and kubelet configuration of instances |
//! | [`offerings`] | what can be bought, and what has no capacity ([`offerings::store`]) |
//! | [`node_class`] | the AWS resources of a class, and drift from them ([`node_class::store`]) |
//! | [`instances`], [`interruption`] | instances ([`instances::store`]), and the interruption queue |
//! | [`launch`] | CreateFleet, launch templates, dry runs |
//! | [`provider`] | the provider: wiring, background loops, the interface [`crate::Cloud`], metrics |
//! | [`preflight`] | checks of an account that change nothing |

pub(crate) mod aws;
pub(crate) mod boot_image;
pub(crate) mod bootstrap;
pub(crate) mod failing_apis;
pub(crate) mod instances;
pub(crate) mod interruption;
pub(crate) mod launch;
pub(crate) mod node_class;
pub(crate) mod offerings;
pub(crate) mod options;
pub(crate) mod placement_group;
pub mod preflight;
pub(crate) mod provider;
pub(crate) mod tags;

pub use crate::ec2::aws::client::{AwsClients, ClientOverrides};
pub use crate::ec2::options::Options;
pub use crate::ec2::provider::Ec2Provider;
pub use crate::ec2::provider::provider_metrics::publish;

#[cfg(test)]
mod live_tests;
