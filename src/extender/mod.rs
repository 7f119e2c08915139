//! The scheduler extender's verdicts: which nodes a pod may take, and which it should prefer.
//!
//! Synchronous functions over an immutable [`View`]: no clock, no client, no lock. The controllers publish the next view whenever
//! holds, plans or nodes change, and also on a timer (a view older than its `max_age` restrains no pod, so that a stalled watch
//! never prevents a pod from starting). Handlers load the current view and call [`filter`], [`prioritize`] or [`preempt`].
//!
//! The protocol is that of `k8s.io/kube-scheduler/extender/v1`. Three of its rules shape this module:
//! a pod that must wait is denied node by node, never by `Error` (which would make it `SchedulerError`, hidden from autoscalers);
//! `NodeNames: null` means that no node fits, so the response always has a list; a name that was not in the request fails the whole pod.

pub mod filter;
pub mod name;
pub mod pod_fields;
pub mod preempt;
pub mod prioritize;
pub mod request_quantity;
pub mod room;
pub mod view;
pub mod wire;

pub use crate::extender::filter::filter;
pub use crate::extender::pod_fields::ExtenderPod;
pub use crate::extender::preempt::preempt;
pub use crate::extender::prioritize::prioritize;
pub use crate::extender::room::{Hold, NodeRoom};
pub use crate::extender::view::{DEFAULT_MAX_AGE, PlannedPod, View, ViewInput};
pub use crate::extender::wire::{Answer, Denial, FilterArgs, PreemptArgs};

#[cfg(test)]
mod tests;
