//! The provider with EC2 in memory.

mod degraded;
mod fake_ec2;
mod instances;
mod launches;
