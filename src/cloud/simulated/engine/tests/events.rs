//! Events of instances, and their messages.

use super::*;

#[test]
fn a_spot_interruption_sends_a_warning_and_then_terminates() {
    let mut simulation = Simulation::new();
    let on_demand = simulation.launch(&request("od", &[("m5.large", "a", "on-demand")]), 0).unwrap().instance;
    let spot = simulation.launched("spot", 1);
    let other = simulation.launched("other", 2);
    assert!(simulation.messages(59_999).is_empty());
    simulation.engine.trigger(&spot.id, InstanceEvent::SpotInterruption, at(60_000)).unwrap();
    assert_eq!(simulation.messages(60_000), [(MessageKind::SpotInterruption, spot.id.clone())]);
    assert!(simulation.messages(60_001).is_empty(), "invisible to other receivers");
    assert_eq!(
        simulation.messages(90_000),
        [(MessageKind::SpotInterruption, spot.id.clone())],
        "visible again when not deleted"
    );
    let living = |simulation: &mut Simulation, millis| {
        let listed = simulation.engine.list(at(millis));
        listed.into_iter().filter(|i| i.state == InstanceState::Running).map(|i| i.id).collect::<Vec<_>>()
    };
    assert_eq!(living(&mut simulation, 179_999), [on_demand.id.clone(), spot.id.clone(), other.id.clone()]);
    assert_eq!(living(&mut simulation, 180_000), [on_demand.id, other.id]);
    let messages = simulation.messages(180_000);
    assert!(messages.contains(&(MessageKind::StateChange, spot.id)), "{messages:?}");
}

#[test]
fn a_deleted_message_never_returns_and_an_old_one_expires() {
    let mut simulation = Simulation::new();
    let instance = simulation.launched("one", 0);
    simulation.engine.trigger(&instance.id, InstanceEvent::ScheduledChange, at(1_000)).unwrap();
    let received = simulation.engine.receive(at(2_000));
    assert_eq!(received.len(), 1);
    assert_eq!((received[0].kind, received[0].at), (MessageKind::ScheduledChange, at(1_000)));
    simulation.engine.delete_messages(&[received[0].receipt.clone()], at(3_000));
    simulation.engine.delete_messages(&[received[0].receipt.clone()], at(3_000));
    assert!(simulation.messages(100_000).is_empty());
    simulation.engine.trigger(&instance.id, InstanceEvent::Rebalance, at(200_000)).unwrap();
    assert!(simulation.messages(500_000).is_empty(), "the queue keeps a message for five minutes");
    assert!(simulation.engine.state.queue.is_empty());
}

#[test]
fn an_earlier_shutdown_replaces_a_later_one() {
    let mut simulation = Simulation::new();
    let instance = simulation.launched("one", 0);
    simulation.engine.trigger(&instance.id, InstanceEvent::SpotInterruption, at(1_000)).unwrap();
    simulation.engine.terminate(&instance.provider_id, at(10_000));
    assert_eq!(simulation.states(15_000), [InstanceState::Terminated]);
    let kinds: Vec<MessageKind> = simulation.messages(15_000).into_iter().map(|(kind, _)| kind).collect();
    assert_eq!(kinds, [MessageKind::SpotInterruption, MessageKind::StateChange]);
    simulation.engine.advance(at(200_000));
    assert_eq!(simulation.engine.state.queue.len(), 2, "one state change, not two");
}

#[test]
fn a_triggered_event_selects_the_instance_by_id_or_node_name() {
    let mut simulation = Simulation::new();
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
