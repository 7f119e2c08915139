//! Faults: claims are launched and gone again under each of them, as the service does it: what fails passingly is tried again
//! after a wait that doubles, what finds no capacity is planned anew without what was found short. None is launched twice or
//! forgotten, and the time to recovery is bounded.

use std::collections::{BTreeSet, HashSet};

use super::*;
use crate::cloud::simulated::engine::tests::{START, Simulation, offering, request};

const CLAIMS: usize = 50;
/// First and longest wait after a failure, milliseconds, as the life of a NodeClaim has them.
const BACKOFF_MS: (i64, i64) = (250, 10_000);
const OFFERINGS: [(&str, &str, &str); 4] = [
    ("m5.large", "a", "spot"),
    ("m5.large", "b", "spot"),
    ("m5.large", "a", "on-demand"),
    ("m5.xlarge", "c", "on-demand"),
];

/// Repeats a call until it does not fail; returns its answer and when it was given. Longer than ten minutes is for ever.
fn insist<T, E>(mut at: i64, mut call: impl FnMut(i64) -> Result<T, E>) -> (T, i64) {
    let begin = at;
    let mut wait = BACKOFF_MS.0;
    loop {
        assert!(at - begin < 600_000, "it does not recover");
        if let Ok(answer) = call(at) {
            return (answer, at);
        }
        at += wait;
        wait = (wait * 2).min(BACKOFF_MS.1);
    }
}

/// Launches a claim at `at`; returns its instance and when it had it.
fn launch(simulation: &mut Simulation, claim: &str, at: i64) -> (Instance, i64) {
    let mut short: HashSet<Override> = HashSet::new();
    insist(at, |at| {
        let mut wanted = request(claim, &[]);
        wanted.overrides = OFFERINGS.iter().map(offering).filter(|offering| !short.contains(offering)).collect();
        if wanted.overrides.is_empty() {
            // What was found short is tried again after a while.
            short.clear();
            return Err(());
        }
        match simulation.launch(&wanted, at) {
            Ok(launched) => Ok(launched.instance),
            Err(LaunchError::InsufficientCapacity { unavailable }) => {
                short.extend(unavailable);
                Err(())
            }
            Err(_) => Err(()),
        }
    })
}

/// Launches fifty claims under a script and ends them again. Returns the longest that one waited for its instance, milliseconds.
fn live_through(script: &str) -> i64 {
    let mut simulation = Simulation::new(script);
    let begin = 1_000;
    let mut worst = 0;
    let mut ids = BTreeSet::new();
    for number in 0..CLAIMS {
        let (instance, had) = launch(&mut simulation, &format!("claim-{number}"), begin);
        worst = worst.max(had - begin);
        ids.insert(instance.provider_id);
    }
    assert_eq!(ids.len(), CLAIMS, "two claims were given one instance");
    let at = begin + worst;
    let (listed, at) = insist(at, |at| simulation.state.list(START + at));
    let living = listed.into_iter().map(|instance| instance.provider_id).collect::<BTreeSet<_>>();
    assert_eq!(living, ids, "instances that no claim has, or claims without one");
    for id in &ids {
        insist(at, |at| simulation.state.terminate(id, START + at));
    }
    let (listed, _) = insist(at + 600_000, |at| simulation.state.list(START + at));
    assert!(listed.iter().all(|instance| instance.state == InstanceState::Terminated), "{listed:?}");
    println!("{script}: the last claim had its instance after {worst} ms");
    worst
}

#[test]
fn nothing_fails_without_a_fault() {
    assert_eq!(live_through("[]"), 0);
}

#[test]
fn throttling_of_four_calls_in_five_delays_and_no_more() {
    let worst = live_through("[{at: 0s, do: throttle, share: 0.8}]");
    assert!((1_000..300_000).contains(&worst), "{worst}");
}

#[test]
fn errors_of_ec2_itself_delay_and_no_more() {
    let worst = live_through("[{at: 0s, do: server-error, share: 0.5}]");
    assert!((1_000..120_000).contains(&worst), "{worst}");
}

#[test]
fn an_outage_is_over_when_it_ends() {
    let worst = live_through("[{at: 0s, for: 30s, do: server-error}]");
    assert!((29_000..45_000).contains(&worst), "{worst}");
}

#[test]
fn lost_answers_launch_nothing_twice() {
    let worst = live_through("[{at: 0s, do: launch-error-after-success, count: 40}]");
    assert!(worst <= BACKOFF_MS.0, "{worst}");
}

#[test]
fn want_of_capacity_moves_on_to_what_is_left_at_once() {
    let worst = live_through("[{at: 0s, do: out-of-capacity, capacityType: spot}]");
    assert!(worst == 0, "one call tries them all: {worst}");
}

#[test]
fn want_of_all_capacity_waits_for_some() {
    let worst = live_through("[{at: 0s, for: 20s, do: out-of-capacity}]");
    assert!((19_000..40_000).contains(&worst), "{worst}");
}

#[test]
fn a_plan_that_is_launched_in_part_gets_the_rest_elsewhere() {
    let worst = live_through("[{at: 0s, do: out-of-capacity, instanceType: m5.large, count: 20}]");
    assert!(worst < 10_000, "{worst}");
}
