//! The state machine at explicit times.

use std::sync::Arc;

use super::*;
use crate::cloud::catalog::{SpotPricing, embedded};

pub const START: UnixMillis = UnixMillis(1_000_000);

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
    pub fn new(script: &str) -> Self {
        Self::resumed(script, EngineState::default(), START)
    }

    fn resumed(script: &str, state: EngineState, now: UnixMillis) -> Self {
        let script = Script::parse(script).unwrap();
        let mut prices = SpotPriceModel::new(Arc::new(embedded().clone()), SpotPricing::ratio(0.5).unwrap());
        let engine = Engine::new(7, timings(), script, state, now);
        prices.set_price_changes(&engine.script.events, engine.started_at());
        Self { engine, prices }
    }

    pub fn launch(&mut self, request: &LaunchRequest, millis: i64) -> Result<Launched, LaunchError> {
        self.engine.launch(request, &self.prices, at(millis))
    }

    fn launched(&mut self, claim: &str, millis: i64) -> Instance {
        self.launch(&request(claim, &[("m5.large", "a", "spot")]), millis).unwrap().instance
    }

    fn messages(&mut self, millis: i64) -> Vec<(MessageKind, String)> {
        let received = self.engine.receive(at(millis)).unwrap();
        received.into_iter().map(|message| (message.kind, message.instance_id)).collect()
    }

    fn states(&mut self, millis: i64) -> Vec<InstanceState> {
        self.engine.state.instances.values().map(|record| record.state(at(millis))).collect()
    }

    fn steps(&mut self, millis: i64) -> Vec<NodeStep> {
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

#[test]
fn a_launch_uses_the_cheapest_offering_with_capacity_and_reports_the_others() {
    let wanted = [
        ("m5.large", "a", "on-demand"),
        ("m5.xlarge", "a", "spot"),
        ("m5.large", "b", "spot"),
        ("m5.large", "a", "spot"),
    ];
    let short = |n: usize| wanted[n..].iter().rev().map(offering).collect::<Vec<_>>();
    for (script, chosen, expected) in [
        // Equal prices: the caller's order decides.
        ("", 2, vec![]),
        ("[{at: 0s, do: out-of-capacity, zone: us-east-1b}]", 3, vec![offering(&wanted[2])]),
        (
            "[{at: 0s, do: out-of-capacity, capacityType: spot, instanceType: m5.large}]",
            0,
            short(2).into_iter().rev().collect(),
        ),
        ("[{at: 0s, do: out-of-capacity, capacityType: spot, zone: us-east-1a}]", 2, vec![]),
        ("[{at: 0s, do: out-of-capacity, nodeClaim: \"other-*\"}]", 2, vec![]),
    ] {
        let mut simulation = Simulation::new(script);
        let launched = simulation.launch(&request("one", &wanted), 10).unwrap();
        let got = (launched.instance.instance_type.as_str(), &launched.instance.zone, launched.instance.capacity_type);
        let want = offering(&wanted[chosen]);
        assert_eq!(got, (want.instance_type.as_str(), &want.zone, want.capacity_type), "{script}");
        assert_eq!(launched.unavailable, expected, "{script}");
    }
}

#[test]
fn a_price_change_changes_the_choice() {
    let wanted = [("m5.large", "a", "on-demand"), ("m5.large", "a", "spot")];
    let mut simulation = Simulation::new("[{at: 10s, for: 10s, do: price, factor: 3, capacityType: spot}]");
    for (millis, expected) in
        [(9_999, CapacityType::Spot), (10_000, CapacityType::OnDemand), (20_000, CapacityType::Spot)]
    {
        let launched = simulation.launch(&request(&millis.to_string(), &wanted), millis).unwrap();
        assert_eq!(launched.instance.capacity_type, expected, "{millis}");
    }
}

#[test]
fn a_launch_without_any_capacity_reports_every_offering() {
    let mut simulation = Simulation::new("[{at: 0s, for: 10s, do: out-of-capacity}]");
    let wanted = [("m5.large", "a", "spot"), ("m5.nonsense", "a", "spot"), ("u-6tb1.112xlarge", "a", "spot")];
    let error = simulation.launch(&request("one", &wanted), 9_999).unwrap_err();
    let LaunchError::InsufficientCapacity { unavailable } = &error else { panic!("{error}") };
    assert_eq!(unavailable.len(), 3);
    assert!(simulation.engine.list(at(9_999)).unwrap().is_empty());
    let again = simulation.launch(&request("one", &wanted), 10_000).unwrap();
    assert_eq!(again.unavailable.len(), 2, "unknown offerings stay unavailable");
    assert!(matches!(simulation.launch(&request("two", &[]), 0), Err(LaunchError::Other { .. })));
}

#[test]
fn a_repeated_token_returns_the_same_instance() {
    let mut simulation = Simulation::new("");
    let first = simulation.launched("one", 0);
    assert_eq!(simulation.launched("one", 50).id, first.id);
    assert_ne!(simulation.launched("two", 50).id, first.id);
    assert!(simulation.engine.terminate(&first.provider_id, at(60)).unwrap());
    let after = simulation.launched("one", 60_000);
    assert_eq!((after.id, after.state), (first.id, InstanceState::Terminated));
    assert_eq!(simulation.engine.state.launches, 2);
}

#[test]
fn a_launch_that_fails_after_success_is_found_by_its_token() {
    let mut simulation = Simulation::new("[{launch: 1, do: launch-error-after-success}]");
    let lost = request("one", &[("m5.large", "a", "spot")]);
    assert!(matches!(simulation.launch(&lost, 0), Err(LaunchError::Other { .. })));
    let listed = simulation.engine.list(at(1)).unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(simulation.launch(&lost, 10).unwrap().instance.id, listed[0].id);
    assert_eq!(simulation.engine.list(at(20)).unwrap().len(), 1);
}

#[test]
fn an_instance_goes_through_its_states_in_time() {
    let mut simulation = Simulation::new("");
    let instance = simulation.launched("one", 0);
    assert_eq!(instance.state, InstanceState::Pending);
    assert_eq!(simulation.states(199), [InstanceState::Pending]);
    assert_eq!(simulation.states(200), [InstanceState::Running]);
    assert!(simulation.engine.terminate(&instance.provider_id, at(1_000)).unwrap());
    assert!(simulation.engine.terminate(&instance.provider_id, at(2_000)).unwrap(), "repeating is no error");
    assert_eq!(simulation.states(5_999), [InstanceState::ShuttingDown]);
    assert_eq!(simulation.engine.list(at(5_999)).unwrap().len(), 1);
    assert_eq!(simulation.states(6_000), [InstanceState::Terminated]);
    assert!(simulation.engine.list(at(6_000)).unwrap().is_empty());
    assert!(!simulation.engine.terminate(&instance.provider_id, at(6_000)).unwrap());
    let described =
        |simulation: &mut Simulation, millis| simulation.engine.describe(&instance.provider_id, at(millis)).unwrap();
    assert_eq!(described(&mut simulation, 3_605_999).map(|found| found.state), Some(InstanceState::Terminated));
    assert_eq!(described(&mut simulation, 3_606_000), None);
    assert!(!simulation.engine.terminate("aws:///us-east-1a/i-0", START).unwrap());
    assert!(!simulation.engine.terminate("nonsense", START).unwrap());
}

#[test]
fn identities_are_well_formed_and_unique() {
    let mut simulation = Simulation::new("");
    let mut seen = std::collections::BTreeSet::new();
    for n in 0..2_000 {
        let instance = simulation.launched(&n.to_string(), n);
        assert_eq!(instance.id.len(), 19, "{}", instance.id);
        assert_eq!(instance.provider_id, format!("aws:///us-east-1a/{}", instance.id));
        let name = simulation.engine.state.instances[&instance.id].node_name();
        assert!(name.starts_with("ip-10-") && name.ends_with(".ec2.internal"), "{name}");
        assert!(seen.insert(instance.id) && seen.insert(name));
    }
}

#[test]
fn node_actions_are_in_the_order_of_launch_without_skipped_instances() {
    let mut simulation = Simulation::new("");
    let ids: Vec<String> = (0..5).map(|n| simulation.launched(&n.to_string(), n).id).collect();
    let actions = simulation.engine.node_actions(at(60_000), 3, |id| id == ids[1]);
    let chosen: Vec<&String> = actions.iter().map(|action| &action.record.id).collect();
    assert_eq!(chosen, [&ids[0], &ids[2], &ids[3]]);
}

#[test]
fn a_node_is_registered_at_boot_silenced_at_shutdown_and_then_removed() {
    let mut simulation = Simulation::new("");
    let instance = simulation.launched("one", 0);
    assert_eq!(simulation.engine.next_wake(START), Some(at(30_000)));
    assert!(simulation.steps(29_999).is_empty());
    assert_eq!(simulation.steps(30_000), [NodeStep::Registered]);
    assert_eq!(simulation.steps(31_000), [NodeStep::Registered], "until it is reported as done");
    simulation.engine.node_step_done(&instance.id, NodeStep::Registered);
    assert!(simulation.steps(31_000).is_empty());
    simulation.engine.terminate(&instance.provider_id, at(40_000)).unwrap();
    assert_eq!(simulation.steps(40_000), [NodeStep::Silenced]);
    simulation.engine.node_step_done(&instance.id, NodeStep::Silenced);
    assert!(simulation.steps(44_999).is_empty());
    assert_eq!(simulation.engine.next_wake(at(40_001)), Some(at(45_000)));
    assert_eq!(simulation.steps(45_000), [NodeStep::Removed]);
    simulation.engine.node_step_done(&instance.id, NodeStep::Removed);
    assert!(simulation.steps(100_000).is_empty());
}

#[test]
fn an_instance_that_shuts_down_before_it_boots_gets_no_node() {
    let mut simulation = Simulation::new("");
    let early = simulation.launched("early", 0);
    simulation.engine.terminate(&early.provider_id, at(10_000)).unwrap();
    assert!(simulation.steps(100_000).is_empty());
    let late = simulation.launched("late", 200_000);
    assert_eq!(simulation.steps(230_000), [NodeStep::Registered]);
    simulation.engine.terminate(&late.provider_id, at(240_000)).unwrap();
    assert!(simulation.steps(240_001).is_empty(), "too late to register");
    assert_eq!(simulation.steps(245_000), [NodeStep::Removed]);
}

#[test]
fn boot_times_are_scripted_or_drawn_within_bounds() {
    let script = "[{launch: 1, do: slow-boot, delay: 4m}, {launch: 2, do: never-boot},
                   {at: 1m, for: 1m, do: slow-boot, delay: 1s, instanceType: m5.*, count: 1},
                   {launch: 4, do: slow-device-plugin, delay: 20s}]";
    let mut simulation = Simulation::new(script);
    for (claim, millis) in [("one", 0), ("two", 0), ("three", 60_000), ("four", 60_000)] {
        simulation.launched(claim, millis);
    }
    let mut records: Vec<&InstanceRecord> = simulation.engine.state.instances.values().collect();
    records.sort_by_key(|record| record.number);
    let boots: Vec<Option<UnixMillis>> = records.iter().map(|record| record.boot_at).collect();
    assert_eq!(boots, [Some(at(240_000)), None, Some(at(61_000)), Some(at(90_000))]);
    assert_eq!(records[3].devices_at, Some(at(110_000)));
    assert_eq!(records[2].devices_at, None);
    let id = records[3].id.clone();
    simulation.engine.node_step_done(&id, NodeStep::Registered);
    let devices = |simulation: &mut Simulation, millis| simulation.steps(millis).contains(&NodeStep::Devices);
    assert!(!devices(&mut simulation, 109_999) && devices(&mut simulation, 110_000));

    let mut drawn = Engine::new(
        7,
        Timings { boot: (Duration::from_secs(20), Duration::from_secs(40)), ..timings() },
        Script::default(),
        EngineState::default(),
        START,
    );
    for n in 0..300 {
        drawn.launch(&request(&n.to_string(), &[("m5.large", "a", "spot")]), &simulation.prices, START).unwrap();
    }
    let boots: Vec<UnixMillis> = drawn.state.instances.values().filter_map(|record| record.boot_at).collect();
    assert!(boots.iter().all(|boot| (at(20_000)..=at(40_000)).contains(boot)));
    assert!(boots.iter().min() < Some(&(at(21_000))) && boots.iter().max() > Some(&(at(39_000))));
}

#[test]
fn a_spot_interruption_sends_a_warning_and_then_terminates() {
    let mut simulation = Simulation::new("[{at: 60s, do: spot-interruption, count: 1}]");
    let on_demand = simulation.launch(&request("od", &[("m5.large", "a", "on-demand")]), 0).unwrap().instance;
    let spot = simulation.launched("spot", 1);
    let other = simulation.launched("other", 2);
    assert!(simulation.messages(59_999).is_empty());
    assert_eq!(simulation.messages(60_000), [(MessageKind::SpotInterruption, spot.id.clone())]);
    assert!(simulation.messages(60_001).is_empty(), "invisible to other receivers");
    assert_eq!(
        simulation.messages(90_000),
        [(MessageKind::SpotInterruption, spot.id.clone())],
        "visible again when not deleted"
    );
    let living = |simulation: &mut Simulation, millis| {
        let listed = simulation.engine.list(at(millis)).unwrap();
        listed.into_iter().filter(|i| i.state == InstanceState::Running).map(|i| i.id).collect::<Vec<_>>()
    };
    assert_eq!(living(&mut simulation, 179_999), [on_demand.id.clone(), spot.id.clone(), other.id.clone()]);
    assert_eq!(living(&mut simulation, 180_000), [on_demand.id, other.id]);
    let messages = simulation.messages(180_000);
    assert!(messages.contains(&(MessageKind::StateChange, spot.id)), "{messages:?}");
}

#[test]
fn a_deleted_message_never_returns_and_an_old_one_expires() {
    let mut simulation =
        Simulation::new("[{at: 0s, do: rebalance, count: 1}, {at: 1s, do: scheduled-change, count: 1}]");
    let instance = simulation.launched("one", 0);
    simulation.engine.advance(at(1_000));
    // The rebalance at the start found no instance; the scheduled change did.
    let received = simulation.engine.receive(at(2_000)).unwrap();
    assert_eq!(received.len(), 1);
    assert_eq!((received[0].kind, received[0].at), (MessageKind::ScheduledChange, at(1_000)));
    simulation.engine.delete_messages(&[received[0].receipt.clone()], at(3_000)).unwrap();
    simulation.engine.delete_messages(&[received[0].receipt.clone()], at(3_000)).unwrap();
    assert!(simulation.messages(100_000).is_empty());
    simulation.engine.trigger(&instance.id, InstanceEvent::Rebalance, at(200_000)).unwrap();
    assert!(simulation.messages(500_000).is_empty(), "the queue keeps a message for five minutes");
    assert!(simulation.engine.state.queue.is_empty());
}

#[test]
fn an_earlier_shutdown_replaces_a_later_one() {
    let mut simulation = Simulation::new("");
    let instance = simulation.launched("one", 0);
    simulation.engine.trigger(&instance.id, InstanceEvent::SpotInterruption, at(1_000)).unwrap();
    simulation.engine.terminate(&instance.provider_id, at(10_000)).unwrap();
    assert_eq!(simulation.states(15_000), [InstanceState::Terminated]);
    let kinds: Vec<MessageKind> = simulation.messages(15_000).into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, [MessageKind::SpotInterruption, MessageKind::StateChange]);
    simulation.engine.advance(at(200_000));
    assert_eq!(simulation.engine.state.queue.len(), 2, "one state change, not two");
}

#[test]
fn an_event_applies_to_the_numbered_instance_once_after_its_delay() {
    let mut simulation = Simulation::new("[{launch: 2, after: 20s, do: terminate}]");
    let first = simulation.launched("one", 0);
    let second = simulation.launched("two", 1_000);
    assert_eq!(simulation.engine.next_wake(at(1_000)), Some(at(21_000)));
    simulation.engine.advance(at(20_999));
    assert!(simulation.engine.state.instances[&second.id].shutdown_at.is_none());
    simulation.engine.advance(at(21_000));
    simulation.engine.advance(at(22_000));
    assert_eq!(simulation.engine.state.instances[&second.id].shutdown_at, Some(at(21_000)));
    assert!(simulation.engine.state.instances[&first.id].shutdown_at.is_none());
}

#[test]
fn a_triggered_event_selects_the_instance_by_id_or_node_name() {
    let mut simulation = Simulation::new("");
    let spot = simulation.launched("one", 0);
    let on_demand = simulation.launch(&request("od", &[("m5.large", "a", "on-demand")]), 0).unwrap().instance;
    let node = simulation.engine.state.instances[&spot.id].node_name();
    simulation.engine.trigger(&node, InstanceEvent::KernelPanic, at(40_000)).unwrap();
    assert!(
        simulation.steps(40_000).iter().all(|step| *step == NodeStep::Registered),
        "a panicked kernel registers nothing"
    );
    assert_eq!(simulation.states(41_000), [InstanceState::Running; 2]);
    let error =
        simulation.engine.trigger(&on_demand.id, InstanceEvent::SpotInterruption, START).unwrap_err().to_string();
    assert!(error.ends_with("is on-demand, only spot instances are interrupted; use terminate"), "{error}");
    let error = simulation.engine.trigger("i-0", InstanceEvent::Terminate, START).unwrap_err().to_string();
    assert_eq!(error, "no living simulated instance has the id or node name i-0");
}

#[test]
fn a_kernel_panic_silences_a_registered_node_until_its_termination() {
    let mut simulation = Simulation::new("[{launch: 1, after: 60s, do: kernel-panic}]");
    let instance = simulation.launched("one", 0);
    simulation.engine.node_step_done(&instance.id, NodeStep::Registered);
    assert_eq!(simulation.steps(60_000), [NodeStep::Silenced]);
    simulation.engine.node_step_done(&instance.id, NodeStep::Silenced);
    assert!(simulation.steps(600_000).is_empty());
    simulation.engine.terminate(&instance.provider_id, at(700_000)).unwrap();
    assert_eq!(simulation.steps(705_000), [NodeStep::Removed]);
}

#[test]
fn throttling_lasts_for_its_duration_or_its_count() {
    let mut simulation = Simulation::new("[{at: 10s, for: 5s, do: throttle}, {launch: 1, do: throttle, count: 2}]");
    let wanted = request("one", &[("m5.large", "a", "spot")]);
    for _ in 0..2 {
        assert_eq!(simulation.launch(&wanted, 0).unwrap_err(), LaunchError::Throttled);
        assert!(simulation.engine.list(START).is_ok(), "an event of a launch throttles launches only");
    }
    let instance = simulation.launch(&wanted, 0).unwrap().instance;
    for millis in [10_000, 14_999] {
        assert_eq!(simulation.launch(&wanted, millis).unwrap_err(), LaunchError::Throttled);
        assert_eq!(simulation.engine.list(at(millis)), Err(CloudError::Throttled));
        assert_eq!(simulation.engine.describe(&instance.provider_id, at(millis)), Err(CloudError::Throttled));
        assert_eq!(simulation.engine.terminate(&instance.provider_id, at(millis)), Err(CloudError::Throttled));
        assert_eq!(simulation.engine.receive(at(millis)), Err(CloudError::Throttled));
        assert_eq!(simulation.engine.delete_messages(&["m".to_owned()], at(millis)), Err(CloudError::Throttled));
    }
    assert_eq!(simulation.engine.list(at(15_000)).unwrap().len(), 1);
}

#[test]
fn a_replayed_journal_restores_the_state() {
    let script = "[{at: 5s, do: spot-interruption, count: 1}, {launch: 2, do: out-of-capacity}]";
    let mut simulation = Simulation::new(script);
    let mut written = Vec::new();
    let first = simulation.launched("one", 0);
    written.extend(simulation.engine.take_pending_entries());
    assert!(simulation.launch(&request("two", &[("m5.large", "a", "spot")]), 1_000).is_err());
    let second = simulation.launched("two", 2_000);
    simulation.engine.advance(at(5_000));
    simulation.engine.node_step_done(&first.id, NodeStep::Registered);
    simulation.engine.terminate(&second.provider_id, at(9_000)).unwrap();
    let received = simulation.engine.receive(at(9_000)).unwrap();
    simulation.engine.delete_messages(&[received[0].receipt.clone()], at(9_000)).unwrap();
    written.extend(simulation.engine.take_pending_entries());

    let mut replayed = EngineState::default();
    for entry in &written {
        replayed.apply(entry);
    }
    assert_eq!(replayed, simulation.engine.state);
    let mut compacted = EngineState::default();
    for entry in &replayed.entries() {
        compacted.apply(entry);
    }
    assert_eq!(compacted, replayed);

    let mut resumed = Simulation::resumed(script, compacted, at(60_000));
    assert_eq!(resumed.engine.started_at(), START);
    assert_eq!(resumed.launched("one", 60_000).id, first.id, "no instance is launched twice");
    let third = resumed.launched("three", 60_000);
    assert_ne!(third.id, first.id);
    assert!(resumed.engine.state.instances[&third.id].shutdown_at.is_none(), "an applied event is not applied again");
    assert_eq!(resumed.states(125_000).iter().filter(|state| **state == InstanceState::ShuttingDown).count(), 1);
}
