//! Provisioning: which pods are planned together and when, what is purchased of a plan, which are left out, and how a plan changes the plans on existing NodeClaims.

pub mod batch_window;
pub mod certain_rejections;
pub mod commit;
pub mod culprit_search;
pub mod pending_zones;
pub mod plan_changes;
pub mod pod_queue;
pub mod purchase_backoff;
pub mod purchase_obstacle;
pub mod quarantine;
pub mod supply_quarantine;
pub mod supply_watch;
pub mod unschedulable;
