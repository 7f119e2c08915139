//! Provisioning: unschedulable pods become NodeClaims.

pub mod claim_dry_run;
pub mod claim_template;
pub mod in_vain;
pub mod isolation;
pub mod plan_writer;
pub mod pod_events;
pub mod provisioner;
pub mod quarantine;
pub mod rejections;
pub mod supply;
