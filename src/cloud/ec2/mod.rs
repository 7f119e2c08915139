//! EC2 through the AWS SDK.
//!
//! Reading is apart from asking: what an answer means is a pure function over the SDK's types, tested with tables; the
//! shells around only call, page and hand over. Nothing here is asked for on the planner's path: what it needs is kept in
//! [`region::Region`].

pub mod class_view;
pub mod interruption_history;
pub mod messages;
pub mod offerings;
pub mod placement_scores;
pub mod prices;
pub mod queue;
pub mod receipts;
pub mod refresh;
pub mod region;
pub mod spot_prices;
pub mod spot_risk;
pub mod status_checks;
pub mod types;

#[cfg(test)]
mod live_tests;
