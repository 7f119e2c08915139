use std::sync::atomic::{AtomicU64, Ordering};

use stowage_runtime::clock;
use stowage_runtime::telemetry::Metrics;

use super::*;
use crate::test_support::kubernetes::FakeApi;

#[tokio::test]
async fn a_cloud_that_is_not_available_is_tried_again_until_it_is() {
    let (tries, failed) = (AtomicU64::new(0), IntCounter::new("f", "f").unwrap());
    let attempt = || {
        let tried = tries.fetch_add(1, Ordering::SeqCst);
        async move { if tried == 3 { Ok("connected") } else { Err("no route") } }
    };
    let waits = (Duration::from_millis(1), Duration::from_millis(2));
    assert_eq!(retried("connecting", waits, &failed, attempt).await, "connected");
    assert_eq!(failed.get(), 3);
}

const LEASE: &str = "leases/kube-system/stowage";

fn candidate(api: &FakeApi, identity: &str) -> LeaderCandidate {
    LeaderCandidate::new(
        api.client_without_retries(),
        Some("kube-system".into()),
        "stowage",
        identity.into(),
        &Metrics::new(),
    )
}

fn holder(api: &FakeApi) -> Option<String> {
    api.stored(LEASE)?["spec"]["holderIdentity"].as_str().map(str::to_owned)
}

/// `a` leads without its cloud, which starts after `failures` failed attempts; `b` waits for the lease.
#[tokio::test]
async fn a_leader_that_can_not_start_its_cloud_gives_the_lease_back_and_stands_back() {
    let api = FakeApi::default();
    let state = AppState::new(Metrics::new(), clock::now);
    let (failed, (stop, mut stopped)) = (IntCounter::new("f", "f").unwrap(), watch::channel(false));
    let election = candidate(&api, "a");
    let timing = Timing {
        retry: (Duration::from_millis(5), Duration::from_millis(5)),
        give_up_after: Duration::from_millis(200),
        stand_back: Duration::from_hours(1),
    };
    let (connects, led) = (AtomicU64::new(0), std::sync::Mutex::new(Vec::new()));
    let connect = || {
        connects.fetch_add(1, Ordering::SeqCst);
        async { Ok::<(), &str>(()) }
    };
    let start = |()| {
        led.lock().unwrap().push((holder(&api), state.metrics.leader.get()));
        async { Err::<(), &str>("no region") }
    };
    let candidacy = Candidacy { timing, election: &election, state: &state, stopped: &mut stopped, failed: &failed };
    let other = async {
        let is_taken = async {
            while holder(&api).as_deref() != Some("a") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), is_taken).await.expect("the lease is taken");
        // Long before the lease of a replica that vanished expires.
        let other = candidate(&api, "b");
        tokio::time::timeout(Duration::from_secs(10), other.acquire()).await.expect("the lease is given back");
        assert_eq!((holder(&api).as_deref(), state.metrics.leader.get()), (Some("b"), 0));
        stop.send(true).unwrap();
    };
    let (result, ()) = tokio::join!(candidacy.lead_with(connect, start), other);
    assert!(matches!(result, Ok(None)), "it was stopped");
    let led = led.into_inner().unwrap();
    assert!(led.len() > 1 && led.iter().all(|led| *led == (Some("a".into()), 1)), "{led:?}");
    assert_eq!((connects.load(Ordering::SeqCst), failed.get()), (1, led.len() as u64), "it stands back");
    assert_eq!(holder(&api).as_deref(), Some("b"), "a stopped replica takes no lease of another");
}

#[tokio::test]
async fn a_replica_that_stood_back_connects_and_leads_again() {
    let api = FakeApi::default();
    let state = AppState::new(Metrics::new(), clock::now);
    let (failed, (_stop, mut stopped)) = (IntCounter::new("f", "f").unwrap(), watch::channel(false));
    let election = candidate(&api, "a");
    let wait = Duration::from_millis(20);
    let timing = Timing { retry: (wait, wait), give_up_after: wait / 2, stand_back: wait };
    let connects = AtomicU64::new(0);
    let connect = || {
        let connected = connects.fetch_add(1, Ordering::SeqCst);
        async move { Ok::<u64, &str>(connected) }
    };
    let start = |connected: u64| async move { if connected == 2 { Ok(connected) } else { Err("no region") } };
    let candidacy = Candidacy { timing, election: &election, state: &state, stopped: &mut stopped, failed: &failed };
    assert!(matches!(candidacy.lead_with(connect, start).await, Ok(Some(2))));
    assert_eq!((holder(&api).as_deref(), state.metrics.leader.get(), failed.get()), (Some("a"), 1, 2));
}
