//! The interruption queue: long polls of SQS, message formats, and receipts.

pub mod messages;
pub mod receipts;
pub mod sqs_queue;
