//! TODO-DOC cloud::ec2::interruption

pub mod messages;
pub mod queue;
pub mod receipts;
