//! Launch templates: contents, store in EC2, the templates that recent launches used, and pre-creation.

pub mod prewarm;
pub mod recent;
pub mod spec;
pub mod template_store;
