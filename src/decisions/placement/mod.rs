//! Placement: how kube-scheduler is made to follow the plan, by nominations, the planned taint, and the view of the extender.

pub mod closure;
pub mod extender_view;
pub mod hold_events;
pub mod mode;
pub mod nominations;
pub mod opening;
pub mod planned_taint;
pub mod refusals;
