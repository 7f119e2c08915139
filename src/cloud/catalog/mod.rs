//! The catalog: EC2's description of each instance type, and its conversion to the planner's [`Catalog`] (labels, capacity after
//! overhead, offerings, prices).
//!
//! The descriptions have three sources: the table embedded in the binary ([`embedded`]), a `--catalog` file ([`parse`]), and the EC2
//! API. No I/O here.

pub mod conversion;
pub mod embedded;
pub mod evaluated;
pub mod node_settings;
pub mod overhead;
pub mod price;
pub mod raw;
pub mod type_labels;

pub use crate::cloud::catalog::conversion::EBS_DRIVER;
pub use crate::cloud::catalog::embedded::embedded;
pub use crate::cloud::catalog::evaluated::Trial;
pub use crate::cloud::catalog::node_settings::NodeSettings;
pub use crate::cloud::catalog::price::SpotPricing;
pub use crate::cloud::catalog::raw::{
    RawAccelerator, RawCatalog, RawGpu, RawInstanceType, RawNeuronDevice, architecture, parse,
};

#[cfg(test)]
mod conformance_tests;

#[cfg(test)]
mod tests;
