//! Bin packing: existing nodes first, then reserved capacity, then purchases at dual prices; small instances exactly. Stages are
//! functions of the plan state; a complete plan is improved elsewhere.

pub mod colocation;
pub mod exact;
pub mod fill_existing;
pub mod min_values;
pub mod nameable;
pub mod purchase;
pub mod refill;
pub mod reserved;
pub mod strategy;
pub mod substitutes;
