//! From rejected pods to NodeClaims: the batch window, the plan, and the NodeClaims that carry it.

pub mod batch_window;
pub mod claim_template;
pub mod provisioner;
