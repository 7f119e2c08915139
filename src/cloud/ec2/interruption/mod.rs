//! The interruption queue: long polls of SQS, message formats, and receipts.

pub mod messages;
pub mod queue;
pub mod receipts;
