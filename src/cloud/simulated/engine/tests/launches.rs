//! Launches: choice of the offering, idempotency, states and drawn values.

use std::collections::BTreeSet;

use super::*;

#[test]
fn a_launch_uses_the_cheapest_offering_and_reports_those_that_do_not_exist() {
    let unknown = [("m5.nonsense", "a", "spot"), ("u-6tb1.112xlarge", "a", "spot")];
    let wanted = [
        ("m5.large", "a", "on-demand"),
        ("m5.xlarge", "a", "spot"),
        // Equal prices: the caller's order decides.
        ("m5.large", "b", "spot"),
        ("m5.large", "a", "spot"),
    ];
    let mut simulation = Simulation::new();
    let launched = simulation.launch(&request("one", &[&unknown[..], &wanted].concat()), 10).unwrap();
    assert_eq!(launched.unavailable, unknown.each_ref().map(offering));
    let Instance { instance_type, zone, capacity_type, .. } = launched.instance;
    assert_eq!(Override { instance_type, zone, capacity_type }, offering(&wanted[2]));
    let error = simulation.launch(&request("two", &unknown), 10).unwrap_err();
    let LaunchError::InsufficientCapacity { unavailable } = &error else { panic!("{error}") };
    assert_eq!(unavailable.len(), 2);
    assert!(matches!(simulation.launch(&request("two", &[]), 0), Err(LaunchError::Other { .. })));
    assert_eq!(simulation.engine.list(at(10)).len(), 1);
}

#[test]
fn a_repeated_token_returns_the_same_instance() {
    let mut simulation = Simulation::new();
    let first = simulation.launched("one", 0);
    assert_eq!(simulation.launched("one", 50).id, first.id);
    assert_ne!(simulation.launched("two", 50).id, first.id);
    assert!(simulation.engine.terminate(&first.provider_id, at(60)));
    let after = simulation.launched("one", 60_000);
    assert_eq!((after.id, after.state), (first.id, InstanceState::Terminated));
    assert_eq!(simulation.engine.state.launches, 2);
}

#[test]
fn an_instance_changes_state_on_time() {
    let mut simulation = Simulation::new();
    let instance = simulation.launched("one", 0);
    assert_eq!(instance.state, InstanceState::Pending);
    assert_eq!(simulation.states(199), [InstanceState::Pending]);
    assert_eq!(simulation.states(200), [InstanceState::Running]);
    assert!(simulation.engine.terminate(&instance.provider_id, at(1_000)));
    assert!(simulation.engine.terminate(&instance.provider_id, at(2_000)), "repeating is no error");
    assert_eq!(simulation.states(5_999), [InstanceState::ShuttingDown]);
    assert_eq!(simulation.engine.list(at(5_999)).len(), 1);
    assert_eq!(simulation.states(6_000), [InstanceState::Terminated]);
    assert!(simulation.engine.list(at(6_000)).is_empty());
    assert!(!simulation.engine.terminate(&instance.provider_id, at(6_000)));
    let described = |simulation: &mut Simulation, millis| simulation.engine.describe(&instance.provider_id, at(millis));
    assert_eq!(described(&mut simulation, 3_605_999).map(|found| found.state), Some(InstanceState::Terminated));
    assert_eq!(described(&mut simulation, 3_606_000), None);
    assert!(!simulation.engine.terminate("aws:///us-east-1a/i-0", START));
    assert!(!simulation.engine.terminate("nonsense", START));
}

#[test]
fn identities_are_well_formed_and_unique() {
    let mut simulation = Simulation::new();
    let mut seen = BTreeSet::new();
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
fn boot_times_are_drawn_within_bounds() {
    let simulation = Simulation::new();
    let mut drawn = Engine::new(
        7,
        Timings { boot: (Duration::from_secs(20), Duration::from_secs(40)), ..timings() },
        EngineState::default(),
        START,
    );
    for n in 0..300 {
        drawn.launch(&request(&n.to_string(), &[("m5.large", "a", "spot")]), &simulation.prices, START).unwrap();
    }
    let boots: Vec<UnixMillis> = drawn.state.instances.values().map(|record| record.boot_at).collect();
    assert!(boots.iter().all(|boot| (at(20_000)..=at(40_000)).contains(boot)));
    assert!(boots.iter().min() < Some(&at(21_000)) && boots.iter().max() > Some(&at(39_000)));
}
