//! Provisioning: which pods are planned together and when, and how a plan changes the plans on existing NodeClaims.

pub mod batch_window;
pub mod plan_changes;
pub mod pod_queue;
