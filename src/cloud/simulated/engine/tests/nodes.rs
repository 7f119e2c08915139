//! Steps of Node objects.

use super::*;

#[test]
fn node_actions_are_in_the_order_of_launch_without_skipped_instances() {
    let mut simulation = Simulation::new();
    let ids: Vec<String> = (0..5).map(|n| simulation.launched(&n.to_string(), n).id).collect();
    let actions = simulation.engine.node_actions(at(60_000), 3, |id| id == ids[1]);
    let chosen: Vec<&String> = actions.iter().map(|action| &action.record.id).collect();
    assert_eq!(chosen, [&ids[0], &ids[2], &ids[3]]);
}

#[test]
fn a_node_is_registered_at_boot_silenced_at_shutdown_and_then_removed() {
    let mut simulation = Simulation::new();
    let instance = simulation.launched("one", 0);
    assert_eq!(simulation.engine.next_wake(START), Some(at(30_000)));
    assert!(simulation.steps(29_999).is_empty());
    assert_eq!(simulation.steps(30_000), [NodeStep::Registered]);
    assert_eq!(simulation.steps(31_000), [NodeStep::Registered], "until it is reported as done");
    simulation.engine.node_step_done(&instance.id, NodeStep::Registered);
    assert!(simulation.steps(31_000).is_empty());
    simulation.engine.terminate(&instance.provider_id, at(40_000));
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
    let mut simulation = Simulation::new();
    let early = simulation.launched("early", 0);
    simulation.engine.terminate(&early.provider_id, at(10_000));
    assert!(simulation.steps(100_000).is_empty());
    let late = simulation.launched("late", 200_000);
    assert_eq!(simulation.steps(230_000), [NodeStep::Registered]);
    simulation.engine.terminate(&late.provider_id, at(240_000));
    assert!(simulation.steps(240_001).is_empty(), "too late to register");
    assert_eq!(simulation.steps(245_000), [NodeStep::Removed]);
}

#[test]
fn a_kernel_panic_silences_a_registered_node_until_its_termination() {
    let mut simulation = Simulation::new();
    let instance = simulation.launched("one", 0);
    simulation.engine.node_step_done(&instance.id, NodeStep::Registered);
    simulation.engine.trigger(&instance.id, InstanceEvent::KernelPanic, at(60_000)).unwrap();
    assert_eq!(simulation.steps(60_000), [NodeStep::Silenced]);
    simulation.engine.node_step_done(&instance.id, NodeStep::Silenced);
    assert!(simulation.steps(600_000).is_empty());
    simulation.engine.terminate(&instance.provider_id, at(700_000));
    assert_eq!(simulation.steps(705_000), [NodeStep::Removed]);
}
