//! Plan enforcement: makes kube-scheduler follow the plan, by nominations, the taint of planned nodes, and the view that the extender
//! answers from.

pub mod extender_view;
pub mod nominated_events;
pub mod nominations;
pub mod opening;
pub mod planned_taint;
