//! Bin packing: existing nodes first, then reserved capacity, then purchases at dual prices; small instances exactly.

pub mod budget;
pub mod demand;
pub mod exact;
pub mod existing;
pub mod reserved;
pub mod strategy;
