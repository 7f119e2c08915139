//! Bin packing: existing nodes first, then reserved capacity, then purchases at dual prices; small instances exactly.

pub mod exact;
pub mod reserved;
pub mod strategy;
