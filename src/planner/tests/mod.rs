//! Behaviors of the planner as tables, and properties of every plan, on a small catalog.
//!
//! `b01` to `b42` are numbered behaviors of Karpenter core reference 14; the others are about disruption and the lifecycle of nodes.

mod affinity;
mod choices;
mod column_cache;
mod domains;
mod exhaustive;
mod free_volumes;
mod monotone;
mod nodes;
mod offerings;
mod open_labels;
mod optimum;
mod places;
mod pools;
mod properties;
mod relevant_pools;
mod requirements;
mod resources;
mod settings;
mod spread;
mod tenants;
mod volumes;
