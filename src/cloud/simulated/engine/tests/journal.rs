//! Restoring the state from the journal.

use super::*;

#[test]
fn a_replayed_journal_restores_the_state() {
    let mut simulation = Simulation::new();
    let mut written = Vec::new();
    let first = simulation.launched("one", 0);
    written.extend(simulation.engine.take_pending_entries());
    let second = simulation.launched("two", 2_000);
    simulation.engine.trigger(&first.id, InstanceEvent::SpotInterruption, at(5_000)).unwrap();
    simulation.engine.node_step_done(&first.id, NodeStep::Registered);
    simulation.engine.terminate(&second.provider_id, at(9_000));
    let received = simulation.engine.receive(at(9_000));
    simulation.engine.delete_messages(&[received[0].receipt.clone()], at(9_000));
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

    let mut resumed = Simulation::resumed(compacted, at(60_000));
    assert_eq!(resumed.engine.started_at(), START);
    assert_eq!(resumed.launched("one", 60_000).id, first.id, "no instance is launched twice");
    let third = resumed.launched("three", 60_000);
    assert_ne!(third.id, first.id);
    assert_eq!(resumed.states(125_000).iter().filter(|state| **state == InstanceState::ShuttingDown).count(), 1);
}
