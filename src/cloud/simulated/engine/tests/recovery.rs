//! Faults: claims are launched and terminated under each fault, as the controller does it: transient failures are retried with
//! exponential backoff, and a launch without capacity is re-planned without the unavailable offerings. No claim is launched twice or
//! lost, and the time to recovery is bounded.

use std::collections::HashSet;

use super::*;

const CLAIMS: usize = 50;
/// First and longest wait after a failure in milliseconds, as in the NodeClaim lifecycle controller.
const BACKOFF_MILLIS: (i64, i64) = (250, 10_000);
const OFFERINGS: [(&str, &str, &str); 4] = [
    ("m5.large", "a", "spot"),
    ("m5.large", "b", "spot"),
    ("m5.large", "a", "on-demand"),
    ("m5.xlarge", "c", "on-demand"),
];

/// Repeats a call until it succeeds; returns its result and the time in milliseconds. Fails after ten minutes.
fn retry<T, E>(mut millis: i64, mut call: impl FnMut(i64) -> Result<T, E>) -> (T, i64) {
    let begin = millis;
    let mut wait = BACKOFF_MILLIS.0;
    loop {
        assert!(millis - begin < 600_000, "no recovery within ten minutes");
        if let Ok(result) = call(millis) {
            return (result, millis);
        }
        millis += wait;
        wait = (wait * 2).min(BACKOFF_MILLIS.1);
    }
}

/// Launches a claim; returns its instance and the time of the launch in milliseconds.
fn launch(simulation: &mut Simulation, claim: &str, millis: i64) -> (Instance, i64) {
    let mut unavailable_offerings: HashSet<Override> = HashSet::new();
    retry(millis, |millis| {
        let mut wanted = request(claim, &[]);
        wanted.overrides =
            OFFERINGS.iter().map(offering).filter(|offering| !unavailable_offerings.contains(offering)).collect();
        if wanted.overrides.is_empty() {
            // All are unavailable: try every offering again after the backoff.
            unavailable_offerings.clear();
            return Err(());
        }
        match simulation.launch(&wanted, millis) {
            Ok(launched) => Ok(launched.instance),
            Err(LaunchError::InsufficientCapacity { unavailable }) => {
                unavailable_offerings.extend(unavailable);
                Err(())
            }
            Err(_) => Err(()),
        }
    })
}

/// Launches fifty claims under a script and terminates them. Returns the longest time to an instance in milliseconds.
fn recovery_millis(script: &str) -> i64 {
    let mut simulation = Simulation::new(script);
    let begin = 1_000;
    let mut worst = 0;
    let mut ids = BTreeSet::new();
    for number in 0..CLAIMS {
        let (instance, had) = launch(&mut simulation, &format!("claim-{number}"), begin);
        worst = worst.max(had - begin);
        ids.insert(instance.provider_id);
    }
    assert_eq!(ids.len(), CLAIMS, "two claims have the same instance");
    let (listed, end) = retry(begin + worst, |millis| simulation.engine.list(at(millis)));
    let living = listed.into_iter().map(|instance| instance.provider_id).collect::<BTreeSet<_>>();
    assert_eq!(living, ids, "instances without a claim, or claims without an instance");
    for id in &ids {
        retry(end, |millis| simulation.engine.terminate(id, at(millis)));
    }
    let (listed, _) = retry(end + 600_000, |millis| simulation.engine.list(at(millis)));
    assert!(listed.iter().all(|instance| instance.state == InstanceState::Terminated), "{listed:?}");
    worst
}

#[test]
fn nothing_is_delayed_without_a_fault() {
    assert_eq!(recovery_millis("[]"), 0);
}

#[test]
fn throttling_of_four_calls_in_five_only_delays() {
    let worst = recovery_millis("[{at: 0s, do: throttle, share: 0.8}]");
    assert!((1_000..300_000).contains(&worst), "{worst}");
}

#[test]
fn server_errors_only_delay() {
    let worst = recovery_millis("[{at: 0s, do: server-error, share: 0.5}]");
    assert!((1_000..120_000).contains(&worst), "{worst}");
}

#[test]
fn launches_recover_after_an_outage() {
    let worst = recovery_millis("[{at: 0s, for: 30s, do: server-error}]");
    assert!((29_000..45_000).contains(&worst), "{worst}");
}

#[test]
fn lost_responses_launch_nothing_twice() {
    let worst = recovery_millis("[{at: 0s, do: launch-error-after-success, count: 40}]");
    assert!(worst <= BACKOFF_MILLIS.0, "{worst}");
}

#[test]
fn missing_spot_capacity_uses_on_demand_at_once() {
    let worst = recovery_millis("[{at: 0s, do: out-of-capacity, capacityType: spot}]");
    assert!(worst == 0, "one call tries all offerings: {worst}");
}

#[test]
fn missing_capacity_of_all_offerings_waits() {
    let worst = recovery_millis("[{at: 0s, for: 20s, do: out-of-capacity}]");
    assert!((19_000..40_000).contains(&worst), "{worst}");
}

#[test]
fn a_partially_launched_plan_uses_other_offerings() {
    let worst = recovery_millis("[{at: 0s, do: out-of-capacity, instanceType: m5.large, count: 20}]");
    assert!(worst < 10_000, "{worst}");
}
