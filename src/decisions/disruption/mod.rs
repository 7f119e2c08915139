//! Voluntary disruption: which nodes to remove, when, and when a marked node may be deleted.

pub mod blockers;
pub mod budget;
pub mod candidates;
pub mod consolidatable;
pub mod consolidation;
pub mod departure;
pub mod emptiness;
pub mod eviction_cost;
pub mod late_nodes;
pub mod ledger;
pub mod mark;
pub mod marked;
pub mod move_record;
pub mod moves;
pub mod node_facts;
pub mod obstacle;
pub mod outdated;
pub mod outdated_replacement;
pub mod progress;
pub mod reason;
pub mod simulated_removal;
pub mod size;
pub mod surge;
pub mod verdicts;
