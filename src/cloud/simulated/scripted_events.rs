//! The scripted events that apply at a time, and when the next ones are due. Reads the state; [`engine`](super::engine) changes it.

use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;

use crate::cloud::simulated::script::{Event, InstanceEvent, Script, Trigger};
use crate::cloud::simulated::state::{EngineState, InstanceRecord};
use crate::cloud::{LaunchRequest, Override};

/// The targets of an instance event that applies now: ids in the order of launch. `None` if the event was applied before or is not
/// due.
pub(crate) fn targets(
    key: &str,
    event: &Event,
    kind: InstanceEvent,
    state: &EngineState,
    now: UnixMillis,
) -> Option<Vec<String>> {
    if state.fired.contains_key(key) {
        return None;
    }
    let started_at = state.started_at.unwrap_or_default();
    let due = |record: &InstanceRecord| match event.trigger {
        Trigger::At(at) => started_at + at <= now,
        Trigger::Launch { number, after } => record.number == number && record.launched_at + after <= now,
    };
    let mut targets: Vec<&InstanceRecord> = state
        .instances
        .values()
        .filter(|record| due(record) && record.is_alive(now) && !interrupts_on_demand(kind, record))
        .filter(|record| {
            event.selector.matches_offering(&record.instance_type, &record.zone, record.capacity_type)
                && event.selector.matches_claim(&record.node_claim, &record.node_pool)
        })
        .collect();
    targets.sort_by_key(|record| record.number);
    let limit = event.count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    let ids: Vec<String> = targets.into_iter().take(limit).map(|record| record.id.clone()).collect();
    let is_applied = match event.trigger {
        Trigger::At(at) => started_at + at <= now,
        // The event waits until the instance exists.
        Trigger::Launch { .. } => !ids.is_empty(),
    };
    is_applied.then_some(ids)
}

/// The events that are active at a time for the launch with a number, below their limit, with their keys.
pub(crate) fn active<'a>(
    script: &'a Script,
    state: &'a EngineState,
    now: UnixMillis,
    next_launch: u64,
) -> impl Iterator<Item = (String, &'a Event)> {
    let started_at = state.started_at.unwrap_or_default();
    script.events.iter().enumerate().filter_map(move |(index, event)| {
        let is_active = match event.trigger {
            Trigger::At(at) => {
                let from = started_at + at;
                from <= now && event.lasts.is_none_or(|lasts| now < from + lasts)
            }
            Trigger::Launch { number, .. } => number == next_launch,
        };
        let key = event.key(index);
        let used = state.fired.get(&key).copied().unwrap_or(0);
        (is_active && event.count.is_none_or(|count| used < count)).then_some((key, event))
    })
}

/// The times at which the events that were never applied are due. An event of a launch has none until the instance exists.
pub(crate) fn due_times<'a>(script: &'a Script, state: &'a EngineState) -> impl Iterator<Item = UnixMillis> {
    let started_at = state.started_at.unwrap_or_default();
    script.events.iter().enumerate().filter_map(move |(index, event)| match event.trigger {
        _ if state.fired.contains_key(&event.key(index)) => None,
        Trigger::At(at) => Some(started_at + at),
        Trigger::Launch { number, after } => {
            let launched = state.instances.values().find(|record| record.number == number);
            launched.map(|record| record.launched_at + after)
        }
    })
}

pub(crate) fn interrupts_on_demand(kind: InstanceEvent, record: &InstanceRecord) -> bool {
    kind == InstanceEvent::SpotInterruption && record.capacity_type != CapacityType::Spot
}

pub(crate) fn matches_launch(event: &Event, offering: &Override, request: &LaunchRequest) -> bool {
    event.selector.matches_offering(&offering.instance_type, &offering.zone, offering.capacity_type)
        && event.selector.matches_claim(&request.node_claim, &request.node_pool)
}
