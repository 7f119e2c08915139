use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::*;
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};
use std::fmt::Write as _;

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

fn described(outcome: Result<ElectionOutcome, kube::Error>) -> String {
    match outcome {
        Ok(ElectionOutcome::Leading) => "leads".into(),
        Ok(ElectionOutcome::Following) => "follows".into(),
        Ok(ElectionOutcome::Conflict) => "overtaken".into(),
        Err(kube::Error::Api(status)) => format!("error {}", status.code),
        Err(error) => format!("error {error}"),
    }
}

fn holder(api: &FakeApi) -> String {
    api.stored(LEASE).map_or_else(|| "no lease".into(), |lease| lease["spec"]["holderIdentity"].to_string())
}

/// A lease that `a` holds.
async fn held_by_a() -> FakeApi {
    let api = FakeApi::default();
    assert_eq!(described(candidate(&api, "a").attempt().await), "leads");
    api.reset();
    api
}

#[tokio::test]
async fn the_first_candidate_creates_the_lease_and_the_second_follows() {
    let api = FakeApi::default();
    let (mut a, mut b) = (candidate(&api, "a"), candidate(&api, "b"));
    assert_eq!(described(a.attempt().await), "leads");
    assert_eq!(described(b.attempt().await), "follows");
    assert_eq!(described(a.attempt().await), "leads");
    let (get, put) = (format!("GET {LEASE}"), format!("PUT {LEASE}"));
    assert_eq!(api.lines(), [&get, "POST leases/kube-system", &get, &put].map(str::to_owned));
    let lease = api.stored(LEASE).unwrap();
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 15);
    assert_eq!(lease["spec"]["leaseTransitions"], 0);
    assert_eq!(holder(&api), r#""a""#);
}

#[tokio::test]
async fn a_renewal_reads_the_lease_only_after_a_failed_attempt() {
    let api = held_by_a().await;
    let mut a = candidate(&api, "a");
    assert_eq!(described(a.attempt().await), "leads");
    for (faults, outcome, requests) in [(1, "overtaken", "PUT"), (0, "leads", "GET, PUT"), (0, "leads", "PUT")] {
        api.reset();
        api.inject(Fault::WrittenByAnother, faults, |request| request.method == "PUT");
        assert_eq!(described(a.attempt().await), outcome);
        let made: Vec<String> = api.lines().iter().map(|line| line.replace(&format!(" {LEASE}"), "")).collect();
        assert_eq!(made.join(", "), requests);
    }
    let mut b = candidate(&api, "b");
    b.timing.duration = Duration::ZERO;
    assert_eq!(described(b.attempt().await), "leads", "the lease of a has expired");
    assert_eq!(described(a.attempt().await), "overtaken");
    assert_eq!(described(a.attempt().await), "follows");
    assert_eq!(holder(&api), r#""b""#);
}

#[tokio::test]
async fn a_failed_renewal_is_repeated_after_the_wait_for_a_retry() {
    let api = held_by_a().await;
    let (put, get) = (format!("PUT {LEASE}"), format!("GET {LEASE}"));
    let made = |line: &str| api.lines().iter().filter(|made| *made == line).count();
    api.inject_on(&put, Fault::Refused(Refusal::gateway_timeout()));
    let (mut a, b) = (impatient(&api, "a", NEVER), impatient(&api, "b", NEVER));
    (a.timing.renew_deadline, a.timing.retry) = (NEVER, NEVER);
    // The other candidate, with the same period, shows that many periods have passed.
    let periods_pass = async {
        while made(&put) == 0 || made(&get) < 50 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        why = a.renew() => panic!("{why}"),
        () = b.acquire() => panic!("two lead"),
        () = periods_pass => assert_eq!(made(&put), 1),
    }
}

#[tokio::test]
async fn a_lease_is_acquired_when_it_was_released_or_not_renewed() {
    let api = held_by_a().await;
    candidate(&api, "b").try_release().await.unwrap();
    assert_eq!(holder(&api), r#""a""#, "only its holder releases it");
    candidate(&api, "a").try_release().await.unwrap();
    assert_eq!(holder(&api), "null");
    assert_eq!(described(candidate(&api, "b").attempt().await), "leads");
    assert_eq!(api.stored(LEASE).unwrap()["spec"]["leaseTransitions"], 1);
    let mut c = candidate(&api, "c");
    assert_eq!(described(c.attempt().await), "follows");
    let (holder_seen, renewed, since) = c.observed.take().unwrap();
    c.observed = Some((holder_seen, renewed, since.checked_sub(TIMING.duration).unwrap()));
    assert_eq!(described(c.attempt().await), "leads", "fifteen seconds by its own clock without a renewal");
}

/// The write of a renewal, of a first acquisition, and of a release, each under every failure; then once more, undisturbed.
#[tokio::test]
async fn the_lease_under_every_failure() {
    let conflict = Fault::Refused(Refusal { code: 409, ..Refusal::invalid("conflict") });
    let failures = [
        ("written by another", Fault::WrittenByAnother),
        ("409", conflict),
        ("404", Fault::DeletedByAnother),
        ("422", Fault::Refused(Refusal::invalid("invalid"))),
        ("429", Fault::Refused(Refusal::too_many_requests(2))),
        ("504", Fault::Refused(Refusal::gateway_timeout())),
        ("lost answer", Fault::LostAnswer),
        ("no answer", Fault::NoAnswer),
    ];
    let mut text = String::new();
    for (name, fault) in failures {
        let of = |method: &'static str| {
            move |request: &crate::test_support::kubernetes::Recorded| request.method.as_str() == method
        };
        let stopped = async |api: &FakeApi, done: &mut (dyn Future<Output = String> + Unpin)| {
            tokio::select! {
                biased;
                done = done => done,
                () = api.stopped() => "stopped".into(),
            }
        };
        let mut line = format!("{name}:");
        let api = FakeApi::default();
        api.inject(fault.clone(), 1, of("POST"));
        let mut a = candidate(&api, "a");
        let first = stopped(&api, &mut Box::pin(async { described(a.attempt().await) })).await;
        write!(line, " create {first}, then {}", described(candidate(&api, "a").attempt().await)).unwrap();
        let api = held_by_a().await;
        api.inject(fault.clone(), 1, of("PUT"));
        let mut a = candidate(&api, "a");
        let renewal = stopped(&api, &mut Box::pin(async { described(a.attempt().await) })).await;
        write!(line, "; renew {renewal}, then {}", described(candidate(&api, "a").attempt().await)).unwrap();
        let api = held_by_a().await;
        api.inject(fault, 1, of("PUT"));
        let a = candidate(&api, "a");
        let back =
            Box::pin(async { a.try_release().await.map_or_else(|error| described(Err(error)), |()| "ok".into()) });
        let released = stopped(&api, &mut { back }).await;
        writeln!(line, "; release {released}, then held by {}", holder(&api)).unwrap();
        text += &line;
    }
    insta::assert_snapshot!(text, @r#"
    written by another: create leads, then leads; renew overtaken, then leads; release error 409, then held by "a"
    409: create overtaken, then leads; renew overtaken, then leads; release error 409, then held by "a"
    404: create leads, then leads; renew error 404, then leads; release error 404, then held by no lease
    422: create error 422, then leads; renew error 422, then leads; release error 422, then held by "a"
    429: create error 429, then leads; renew error 429, then leads; release error 429, then held by "a"
    504: create error 504, then leads; renew error 504, then leads; release error 504, then held by "a"
    lost answer: create error ServiceError: connection reset, then leads; renew error ServiceError: connection reset, then leads; release error ServiceError: connection reset, then held by null
    no answer: create stopped, then leads; renew stopped, then leads; release stopped, then held by "a"
    "#);
}

#[tokio::test]
async fn two_candidates_that_see_a_free_lease_do_not_both_lead() {
    let api = held_by_a().await;
    candidate(&api, "a").try_release().await.unwrap();
    api.inject(Fault::WrittenByAnother, 1, |request| request.method == "PUT");
    assert_eq!(described(candidate(&api, "b").attempt().await), "overtaken");
    assert_eq!(holder(&api), "null");
    assert_eq!(api.stored(LEASE).unwrap()["metadata"]["annotations"], json!({"other.example/wrote": "an annotation"}));
}

/// A candidate whose periods are short, and whose lease expires only if `duration` passes.
fn impatient(api: &FakeApi, identity: &str, duration: Duration) -> LeaderCandidate {
    let millis = Duration::from_millis;
    let timing = Timing { period: millis(1), duration, renew_deadline: millis(50), retry: millis(1), look: millis(1) };
    LeaderCandidate { timing, ..candidate(api, identity) }
}

const NEVER: Duration = Duration::from_hours(1);

#[tokio::test]
async fn a_candidate_acquires_a_lease_that_is_released_and_one_that_expires() {
    let api = held_by_a().await;
    let mut b = impatient(&api, "b", NEVER);
    assert_eq!(described(b.attempt().await), "follows");
    let waiting = tokio::spawn(async move { b.acquire().await });
    impatient(&api, "a", NEVER).release().await;
    waiting.await.unwrap();
    assert_eq!(holder(&api), r#""b""#);
    let begin = Instant::now();
    let duration = Duration::from_millis(20);
    impatient(&api, "c", duration).acquire().await;
    assert!(begin.elapsed() >= duration, "not before the lease of b expired");
    assert_eq!(holder(&api), r#""c""#);
}

#[tokio::test]
async fn a_leader_renews_until_another_replica_leads() {
    let api = held_by_a().await;
    let mut a = impatient(&api, "a", NEVER);
    a.timing.renew_deadline = NEVER;
    let renewals = async {
        while api.lines().iter().filter(|line| line.starts_with("PUT")).count() < 3 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        why = a.renew() => panic!("{why}"),
        () = renewals => {}
    }
    impatient(&api, "b", Duration::ZERO).acquire().await;
    assert_eq!(a.renew().await, "another replica leads now");
    assert_eq!(holder(&api), r#""b""#);
}

/// The main runtime has one thread, and the test holds it: a leader whose threads get no CPU time.
#[test]
fn a_leader_that_is_busy_renews_its_lease() {
    let main = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let own = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let api = main.block_on(held_by_a());
    let a = {
        let _entered = own.enter();
        let patient = Timing { renew_deadline: NEVER, ..impatient(&api, "a", NEVER).timing };
        LeaderCandidate { timing: patient, ..candidate(&api, "a") }
    };
    let renewals = || api.lines().iter().filter(|line| line.starts_with("PUT")).count();
    main.block_on(async {
        let mut leading = Box::pin(a.renew());
        assert!(futures::poll!(&mut leading).is_pending());
        let begin = Instant::now();
        while renewals() < 3 {
            assert!(begin.elapsed() < Duration::from_mins(1), "no renewal while the leader is busy");
            std::hint::spin_loop();
        }
        assert!(futures::poll!(&mut leading).is_pending(), "it still leads");
    });
    let renewed = renewals();
    drop(own);
    assert!(renewals() <= renewed + 1, "a leader that stopped renewing writes no lease");
}

#[tokio::test]
async fn a_leader_that_can_not_renew_stops_leading_at_the_deadline() {
    for fault in [Fault::Refused(Refusal::gateway_timeout()), Fault::NoAnswer] {
        let api = held_by_a().await;
        api.inject_on(&format!("PUT {LEASE}"), fault.clone());
        let a = impatient(&api, "a", NEVER);
        let begin = Instant::now();
        assert_eq!(a.renew().await, "no renewal succeeded for ten seconds");
        assert!(begin.elapsed() >= a.timing.renew_deadline, "{fault:?}");
    }
}

#[tokio::test]
async fn a_release_is_attempted_three_times() {
    let api = held_by_a().await;
    let put = format!("PUT {LEASE}");
    let attempts = |api: &FakeApi| api.lines().iter().filter(|line| **line == put).count();
    api.inject_on(&put, Fault::Refused(Refusal::gateway_timeout()));
    impatient(&api, "a", NEVER).release().await;
    assert_eq!((attempts(&api), holder(&api)), (3, r#""a""#.to_owned()));
    api.reset();
    api.inject(Fault::Refused(Refusal::gateway_timeout()), 2, |request| request.method == "PUT");
    impatient(&api, "a", NEVER).release().await;
    assert_eq!((attempts(&api), holder(&api)), (3, "null".to_owned()));
}

fn lease_of(namespace: &str, second: u32) -> Lease {
    serde_json::from_value(json!({"metadata": {"name": "stowage", "namespace": namespace}, "spec": {
        "holderIdentity": "other", "renewTime": format!("2026-01-01T00:00:{second:02}.000000Z")}}))
    .unwrap()
}

/// Runs a pod in a namespace whose service account may create NodeClaims.
fn run_controller(api: &FakeApi, namespace: &str) {
    api.entitle(&format!("system:serviceaccount:{namespace}:controller"));
    let pod = json!({"metadata": {"name": "c", "namespace": namespace},
        "spec": {"containers": [], "serviceAccountName": "controller"}, "status": {"phase": "Running"}});
    api.put(&serde_json::from_value::<Pod>(pod).unwrap());
}

/// Yields until the other leader's metric has this value.
async fn other_leader(candidate: &LeaderCandidate, value: i64) {
    while candidate.has_other.get() != value {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_candidate_waits_for_the_leader_of_another_namespace_and_writes_no_lease() {
    let api = FakeApi::default();
    run_controller(&api, "karpenter");
    api.put(&lease_of("karpenter", 0));
    let a = impatient(&api, "a", NEVER);
    let other = a.other();
    let renewing = async {
        for second in (0..60).cycle() {
            api.put(&lease_of("karpenter", second));
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = a.acquire() => panic!("two lead"),
        () = other_leader(&a, 1) => {}
        () = renewing => {}
    }
    assert_eq!(other.borrow().as_ref().map(|other| other.lease.as_str()), Some("karpenter/stowage"));
    assert_eq!(holder(&api), "no lease");
    let mut released = lease_of("karpenter", 0);
    released.spec.as_mut().unwrap().holder_identity = None;
    api.put(&released);
    a.acquire().await;
    assert_eq!((a.has_other.get(), other.borrow().is_none(), holder(&api)), (0, true, r#""a""#.into()));
}

#[tokio::test]
async fn a_leader_gives_way_to_the_leader_of_another_namespace() {
    let api = held_by_a().await;
    run_controller(&api, "karpenter");
    api.put(&lease_of("karpenter", 0));
    let mut a = impatient(&api, "a", NEVER);
    a.timing.renew_deadline = NEVER;
    a.timing.period = Duration::from_millis(10);
    let lines = || api.lines().iter().filter(|line| *line == "GET leases").count();
    let renewing = async {
        // A lease that nobody renews ends no leadership.
        while lines() < 6 {
            tokio::task::yield_now().await;
        }
        for second in (1..60).cycle() {
            api.put(&lease_of("karpenter", second));
            tokio::task::yield_now().await;
        }
    };
    let why = tokio::select! {
        why = a.renew() => why,
        () = renewing => unreachable!("endless"),
    };
    assert_eq!(why, "other leads, too, with the lease karpenter/stowage");
}

#[tokio::test]
async fn of_two_candidates_of_different_namespaces_at_most_one_leads() {
    for _ in 0..20 {
        let api = FakeApi::default();
        for namespace in ["a", "b"] {
            run_controller(&api, namespace);
        }
        let of = |namespace: &str| {
            let impatient = impatient(&api, namespace, NEVER);
            LeaderCandidate { namespace: Some(namespace.to_owned()), ..impatient }
        };
        let (a, b) = (of("a"), of("b"));
        let (first, second) = tokio::select! {
            () = a.acquire() => (&a, &b),
            () = b.acquire() => (&b, &a),
        };
        // The first one renews, as a leader does.
        let leading = async {
            loop {
                first.clone().attempt().await.unwrap();
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = second.acquire() => panic!("both lead"),
            () = leading => unreachable!("endless"),
            () = other_leader(second, 1) => {}
        }
    }
}
