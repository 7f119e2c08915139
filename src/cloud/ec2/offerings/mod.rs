//! Offerings of the region: instance types, prices, spot risk, capacity errors, and the catalog of each node class.

pub mod catalog_cache;
pub mod catalog_key;
pub mod class_offerings;
pub mod discovered_memory;
pub mod instance_types;
pub mod interruption_history;
pub mod list_prices;
pub mod offering_store;
pub mod placement_score_table;
pub mod placement_scores;
pub mod refresh;
pub mod region;
pub mod region_snapshot;
pub mod reservation_counts;
pub mod shifted_zones;
pub mod spot_prices;
pub mod spot_risk;
pub mod unavailable;
