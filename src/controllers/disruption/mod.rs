//! Voluntary disruption: empty, drifted, expiring and underutilized nodes; and the mark, the taint and the deletion of every disruption.

pub mod advance;
pub mod blocked;
pub mod consolidatable;
pub mod consolidation;
pub mod departure;
pub mod disruption_metrics;
pub mod least_cost;
pub mod mark;
pub mod outdated_replacement;
pub mod replacement;
pub mod report_only;
pub mod roll_back;
pub mod run;
pub mod scores;
mod simulated_removal;
pub mod start;
mod surge;
pub mod taint;
