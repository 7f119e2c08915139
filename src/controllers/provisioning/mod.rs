//! TODO-DOC controllers::provisioning

pub mod batch_window;
pub mod claim_template;
pub mod provisioner;
