//! Provisioning: unschedulable pods become NodeClaims.

pub mod claim_template;
pub mod plan_writer;
pub mod pod_events;
pub mod provisioner;
