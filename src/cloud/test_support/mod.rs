//! What tests of several modules share.

pub mod fake_aws;
