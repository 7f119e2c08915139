//! The mutating webhook's verdict: constraints made right before the scheduler or the planner sees them.
//!
//! [`review`] is a pure function from the bytes of an `AdmissionReview` to its answer. A pod is handled as the raw JSON that came in,
//! never as a typed object: fields newer than our types must survive. Rules change a copy; the difference becomes a JSON Patch;
//! the patch is applied here first and must give exactly the copy, because a patch that the API server can't apply rejects the pod
//! even under `failurePolicy: Ignore`. In any doubt the pod is allowed as it is.
//!
//! What no rule may do: loosen a constraint, touch a value that the user set, decide on sums of requests (sidecar injectors may run
//! after us), or change its own output when it is run again.

pub mod accelerator;
pub mod accelerator_requests;
pub mod accelerator_tolerations;
pub mod contradictions;
pub mod do_not_evict;
pub mod legacy_keys;
pub mod pod;
pub mod registry;
pub mod review;
pub mod rule;

pub use crate::webhook::review::review;
