//! The state machine at explicit times.

mod events;
mod journal;
mod launches;
mod nodes;

use std::sync::Arc;

use stowage_model::offering::CapacityType;

use super::*;
use crate::catalog::{SpotPricing, embedded};

const START: UnixMillis = UnixMillis(1_000_000);

/// A time in milliseconds after the start.
pub fn at(millis: i64) -> UnixMillis {
    UnixMillis(START.0 + millis)
}

pub fn timings() -> Timings {
    Timings {
        boot: (Duration::from_secs(30), Duration::from_secs(30)),
        pending: Duration::from_millis(200),
        notice: Duration::from_mins(2),
        shutdown: Duration::from_secs(5),
        visibility: Duration::from_secs(30),
        retention: Duration::from_mins(5),
    }
}

pub struct Simulation {
    pub engine: Engine,
    pub prices: SpotPriceModel,
}

impl Simulation {
    pub fn new() -> Self {
        Self::resumed(EngineState::default(), START)
    }

    pub fn resumed(state: EngineState, now: UnixMillis) -> Self {
        let prices = SpotPriceModel::new(Arc::new(embedded().clone()), SpotPricing::ratio(0.5).unwrap());
        Self { engine: Engine::new(7, timings(), state, now), prices }
    }

    pub fn launch(&mut self, request: &LaunchRequest, millis: i64) -> Result<Launched, LaunchError> {
        self.engine.launch(request, &self.prices, at(millis))
    }

    pub fn launched(&mut self, claim: &str, millis: i64) -> Instance {
        self.launch(&request(claim, &[("m5.large", "a", "spot")]), millis).unwrap().instance
    }

    pub fn messages(&mut self, millis: i64) -> Vec<(MessageKind, String)> {
        let received = self.engine.receive(at(millis));
        received.into_iter().map(|message| (message.kind, message.instance_id)).collect()
    }

    pub fn states(&mut self, millis: i64) -> Vec<InstanceState> {
        self.engine.state.instances.values().map(|record| record.state(at(millis))).collect()
    }

    pub fn steps(&mut self, millis: i64) -> Vec<NodeStep> {
        self.engine.node_actions(at(millis), usize::MAX, |_| false).into_iter().map(|action| action.step).collect()
    }
}

pub fn offering((instance_type, zone, capacity): &(&str, &str, &str)) -> Override {
    Override {
        instance_type: (*instance_type).to_owned(),
        zone: format!("us-east-1{zone}"),
        capacity_type: CapacityType::parse(capacity).unwrap(),
    }
}

pub fn request(claim: &str, overrides: &[(&str, &str, &str)]) -> LaunchRequest {
    LaunchRequest {
        client_token: format!("uid-{claim}"),
        node_claim: claim.to_owned(),
        node_pool: "pool".to_owned(),
        node_class: "class".to_owned(),
        overrides: overrides.iter().map(offering).collect(),
        labels: BTreeMap::from([("team".to_owned(), "a".to_owned())]),
        taints: Vec::new(),
        details: None,
    }
}
