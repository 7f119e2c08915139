//! The mutating webhook: normalizes scheduling constraints of pods before the scheduler and the planner read them.
//!
//! [`review`] is a pure function from the bytes of an `AdmissionReview` to the response. A pod stays raw JSON, never a typed object:
//! fields newer than our types must survive. Rules change a copy; the difference becomes a JSON Patch; the patch is applied here first
//! and must produce exactly the copy, because a patch that the API server cannot apply rejects the pod even under
//! `failurePolicy: Ignore`. In any doubt the pod is allowed unchanged.
//!
//! No rule may relax a constraint, change a value that the user set, depend on sums of requests (sidecar injectors may run later),
//! or change its own output in a second run.

pub mod accelerator;
pub mod accelerator_requests;
pub mod accelerator_tolerations;
pub mod contradictions;
pub mod do_not_evict;
pub mod legacy_keys;
pub mod raw_pod;
pub mod review;
pub mod rule;
pub mod rule_list;

pub use crate::webhook::review::review;
