use std::fmt::Write as _;

use serde_json::json;

use super::*;
use crate::test_support::kubernetes::object_store::Refusal;
use crate::test_support::kubernetes::{FakeApi, Fault};

/// A lease of this holder, renewed at this second.
fn renew(api: &FakeApi, namespace: &str, holder: &str, second: u32) {
    let lease = json!({"metadata": {"name": KARPENTER_LEASE, "namespace": namespace}, "spec": {
        "holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": format!("2026-01-01T00:00:{second:02}.000000Z")}});
    api.put(&serde_json::from_value::<Lease>(lease).unwrap());
}

fn run_pod(api: &FakeApi, namespace: &str, name: &str) {
    let pod = json!({"metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [], "serviceAccountName": name}, "status": {"phase": "Running"}});
    api.put(&serde_json::from_value::<Pod>(pod).unwrap());
}

fn others(api: &FakeApi) -> OtherLeaders {
    OtherLeaders::new(api.client_without_retries(), "stowage", Some("own"))
}

/// Lets the time of the observed leases pass.
fn pass(others: &mut OtherLeaders, time: Duration) {
    for observed in others.observed.values_mut() {
        observed.since = observed.since.checked_sub(time).unwrap();
    }
}

fn leads(namespace: &str, holder: &str) -> Finding {
    Finding::Leads(OtherLeader { lease: format!("{namespace}/{KARPENTER_LEASE}"), holder: holder.into() })
}

#[tokio::test]
async fn a_lease_that_is_renewed_leads_until_it_is_released_or_not_renewed() {
    let api = FakeApi::default();
    let mut others = others(&api);
    assert_eq!(others.look().await, Finding::Alone);
    renew(&api, SYSTEM, "karpenter-1", 0);
    assert_eq!(others.look().await, Finding::Unknown, "it may be a lease of a controller that was removed");
    assert_eq!(others.look().await, Finding::Unknown);
    renew(&api, SYSTEM, "karpenter-1", 2);
    assert_eq!(others.look().await, leads(SYSTEM, "karpenter-1"));
    pass(&mut others, LEAST / 2);
    assert_eq!(others.look().await, leads(SYSTEM, "karpenter-1"), "not renewed for half of its duration");
    renew(&api, SYSTEM, "karpenter-2", 2);
    assert_eq!(others.look().await, leads(SYSTEM, "karpenter-2"), "another replica of it");
    pass(&mut others, LEAST);
    assert_eq!(others.look().await, Finding::Alone, "expired");
    renew(&api, SYSTEM, "karpenter-2", 30);
    assert_eq!(others.look().await, leads(SYSTEM, "karpenter-2"));
    renew(&api, SYSTEM, "", 31);
    assert_eq!(others.look().await, Finding::Alone, "released");
}

#[tokio::test]
async fn a_lease_that_nobody_renews_is_waited_for_once() {
    let api = FakeApi::default();
    let mut others = others(&api);
    renew(&api, SYSTEM, "karpenter-1", 0);
    assert_eq!(others.look().await, Finding::Unknown);
    pass(&mut others, LEAST);
    assert_eq!(others.look().await, Finding::Alone);
}

#[tokio::test]
async fn the_own_lease_and_leases_of_other_names_do_not_count() {
    let api = FakeApi::default();
    for (namespace, name) in [("own", "stowage"), (SYSTEM, "kube-scheduler")] {
        let lease = json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"holderIdentity": "h"}});
        api.put(&serde_json::from_value::<Lease>(lease).unwrap());
    }
    assert_eq!(others(&api).look().await, Finding::Alone);
    let mut without_lease = OtherLeaders::new(api.client_without_retries(), "stowage", None);
    api.entitle("system:serviceaccount:own:stowage");
    run_pod(&api, "own", "stowage");
    assert_eq!(without_lease.look().await, Finding::Unknown, "a process without a lease looks in its namespace, too");
    renew(&api, "own", "karpenter-1", 0);
    let mut others = others(&api);
    assert_eq!(others.look().await, Finding::Unknown, "Karpenter's lease, of another name, in the own namespace");
    renew(&api, "own", "karpenter-1", 2);
    assert_eq!(others.look().await, leads("own", "karpenter-1"));
}

#[tokio::test]
async fn a_tenant_who_writes_a_lease_stops_nobody() {
    let api = FakeApi::default();
    run_pod(&api, "tenant", "default");
    renew(&api, "tenant", "karpenter-1", 0);
    let mut others = others(&api);
    for second in 1..4 {
        renew(&api, "tenant", "karpenter-1", second);
        assert_eq!(others.look().await, Finding::Alone);
    }
    let reviews = |api: &FakeApi| api.lines().iter().filter(|line| line.contains("subjectaccessreviews")).count();
    assert_eq!(reviews(&api), 1, "the answer is remembered");
    run_pod(&api, "karpenter", "karpenter");
    api.entitle("system:serviceaccount:karpenter:karpenter");
    renew(&api, "karpenter", "karpenter-1", 0);
    assert_eq!(others.look().await, Finding::Unknown);
    renew(&api, "karpenter", "karpenter-1", 1);
    assert_eq!(others.look().await, leads("karpenter", "karpenter-1"));
}

#[tokio::test]
async fn the_leases_of_many_namespaces_are_checked_a_few_per_look() {
    let api = FakeApi::default();
    for tenant in 0..20 {
        let namespace = format!("tenant-{tenant:02}");
        run_pod(&api, &namespace, "default");
        renew(&api, &namespace, "h", 0);
    }
    let mut others = others(&api);
    let mut text = String::new();
    for _ in 0..4 {
        api.reset();
        let finding = others.look().await;
        let reviews = api.lines().iter().filter(|line| line.contains("subjectaccessreviews")).count();
        writeln!(text, "{finding:?}: {reviews} reviews, {} known", others.entitled.len()).unwrap();
    }
    insta::assert_snapshot!(text, @r"
    Unknown: 8 reviews, 8 known
    Unknown: 8 reviews, 16 known
    Alone: 4 reviews, 20 known
    Alone: 0 reviews, 20 known
    ");
    for tenant in 0..20 {
        renew(&api, &format!("tenant-{tenant:02}"), "", 1);
    }
    assert_eq!(others.look().await, Finding::Alone);
    assert_eq!((others.observed.len(), others.entitled.len()), (0, 0), "nothing is remembered of released leases");
}

/// Each request of a look, under each failure.
#[tokio::test]
async fn a_look_under_every_failure() {
    let failures = [
        ("403", Fault::Refused(Refusal { code: 403, ..Refusal::invalid("forbidden") })),
        ("429", Fault::Refused(Refusal::too_many_requests(1))),
        ("504", Fault::Refused(Refusal::gateway_timeout())),
        ("lost answer", Fault::LostAnswer),
    ];
    let mut text = String::new();
    for (name, fault) in failures {
        for line in ["GET leases", "GET pods/karpenter", "POST subjectaccessreviews"] {
            let api = FakeApi::default();
            run_pod(&api, "karpenter", "karpenter");
            api.entitle("system:serviceaccount:karpenter:karpenter");
            let mut others = others(&api);
            api.inject_on(line, fault.clone());
            renew(&api, "karpenter", "k", 0);
            let first = others.look().await;
            renew(&api, "karpenter", "k", 1);
            let second = others.look().await;
            api.reset();
            renew(&api, "karpenter", "k", 2);
            let third = others.look().await;
            writeln!(text, "{line} {name}: {first:?}, {second:?}, then {third:?}").unwrap();
        }
    }
    let text =
        text.replace(r#"Leads(OtherLeader { lease: "karpenter/karpenter-leader-election", holder: "k" })"#, "Leads");
    insta::assert_snapshot!(text, @r"
    GET leases 403: Alone, Alone, then Unknown
    GET pods/karpenter 403: Unknown, Leads, then Leads
    POST subjectaccessreviews 403: Unknown, Leads, then Leads
    GET leases 429: Unknown, Unknown, then Unknown
    GET pods/karpenter 429: Unknown, Unknown, then Leads
    POST subjectaccessreviews 429: Unknown, Unknown, then Leads
    GET leases 504: Unknown, Unknown, then Unknown
    GET pods/karpenter 504: Unknown, Unknown, then Leads
    POST subjectaccessreviews 504: Unknown, Unknown, then Leads
    GET leases lost answer: Unknown, Unknown, then Unknown
    GET pods/karpenter lost answer: Unknown, Unknown, then Leads
    POST subjectaccessreviews lost answer: Unknown, Unknown, then Leads
    ");
}
