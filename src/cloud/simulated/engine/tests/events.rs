//! Events of instances, their messages, and throttled calls.

use super::*;

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
