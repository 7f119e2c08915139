//! The catalog: EC2's description of each instance type, and its conversion to the planner's [`Catalog`] (labels, capacity after
//! overhead, offerings, prices).
//!
//! The descriptions have three sources: the table embedded in the binary ([`embedded`]), a `--catalog` file ([`parse`]), and the EC2
//! API. No I/O here.

pub(crate) mod conversion;
pub(crate) mod embedded;
pub(crate) mod evaluated;
pub(crate) mod node_settings;
pub(crate) mod overhead;
pub(crate) mod price;
pub(crate) mod raw;
pub(crate) mod type_labels;

pub use crate::catalog::conversion::EBS_DRIVER;
pub use crate::catalog::embedded::embedded;
pub use crate::catalog::evaluated::Trial;
pub use crate::catalog::node_settings::NodeSettings;
pub use crate::catalog::price::SpotPricing;
pub use crate::catalog::raw::{
    RawAccelerator, RawCatalog, RawGpu, RawInstanceType, RawNeuronDevice, architecture, parse,
};

#[cfg(test)]
mod conformance_tests;

#[cfg(test)]
mod tests;
