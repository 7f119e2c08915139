//! Voluntary disruption: empty, drifted, expiring and underutilized nodes; and the mark and taint of every disruption.

pub mod advance;
pub mod blocked;
pub mod consolidatable;
pub mod consolidation;
pub mod mark;
pub mod metrics;
pub mod outdated_replacement;
pub mod replacement;
pub mod report_only;
pub mod roll_back;
pub mod run;
pub mod scores;
mod simulate;
pub mod start;
mod surge;
pub mod taint;
