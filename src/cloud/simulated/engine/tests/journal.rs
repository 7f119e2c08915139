//! Restoring the state from the journal.

use super::*;

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
