//! Launches: choice of the offering, idempotency, states and drawn values.

use super::*;

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
fn an_instance_changes_state_on_time() {
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
