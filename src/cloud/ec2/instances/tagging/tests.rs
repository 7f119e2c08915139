//! Tagging: missing tags, shared calls, failures.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::*;
use crate::ec2::launch::request::tests::facts;
use crate::ec2::options::Options;
use crate::ec2::provider::Ec2Provider;
use crate::test_support::fake_aws;
use crate::test_support::fake_aws::Request;
use crate::{OptionalApi, ServiceStatus};

const CLAIM: &str = "karpenter.sh/nodeclaim";
const CLUSTER: &str = "eks:eks-cluster-name";

fn due(ids: &[&str]) -> Vec<Untagged> {
    let one = |id: &&str| Untagged {
        provider_id: format!("aws:///us-east-1a/{id}"),
        node: format!("node-{id}"),
        claim: format!("claim-{id}"),
    };
    ids.iter().map(one).collect()
}

/// The members of a list in a request.
fn listed(request: &Request, name: &str) -> Vec<String> {
    (1..).map_while(|n| request.form.get(&name.replace('N', &n.to_string())).cloned()).collect()
}

/// Describes the instances of a request with their `tags`; an instance for which `tags` returns `None` fails the call.
fn described(request: &Request, tags: impl Fn(&str) -> Option<Vec<&'static str>>) -> Option<(u16, String)> {
    let mut items = Vec::new();
    for id in listed(request, "InstanceId.N") {
        let Some(tags) = tags(&id) else { return fake_aws::error("InvalidInstanceID.NotFound", &id) };
        let tags: Vec<String> =
            tags.iter().map(|key| format!("<item><key>{key}</key><value>x</value></item>")).collect();
        let item = format!("<item><instanceId>{id}</instanceId><tagSet>{}</tagSet></item>", tags.concat());
        items.push(format!("<item><instancesSet>{item}</instancesSet></item>"));
    }
    fake_aws::ok("DescribeInstances", &format!("<reservationSet>{}</reservationSet>", items.concat()))
}

fn created() -> Option<(u16, String)> {
    fake_aws::ok("CreateTags", "<return>true</return>")
}

fn ec2(respond: fake_aws::Responder) -> (Ec2Provider, Arc<std::sync::Mutex<Vec<Request>>>) {
    let (clients, seen) = fake_aws::clients(respond);
    (Ec2Provider::new(clients, Options::of("c1"), facts()), seen)
}

/// Tags the instances without pauses. Returns the outcomes in the order of `due`.
async fn outcomes(ec2: &Ec2Provider, due: &[Untagged]) -> Vec<Result<(), CloudError>> {
    let mut all: Vec<TagOutcome> = ec2.tagger.tag_all(due, Duration::ZERO).collect().await;
    all.sort_by_key(|(at, _)| *at);
    let places: Vec<usize> = all.iter().map(|(at, _)| *at).collect();
    assert_eq!(places, (0..due.len()).collect::<Vec<_>>(), "each has one outcome");
    all.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Resources and keys of each CreateTags call.
fn written(seen: &[Request]) -> Vec<(Vec<String>, Vec<String>)> {
    let calls = seen.iter().filter(|request| request.action == "CreateTags");
    calls.map(|request| (listed(request, "ResourceId.N"), listed(request, "Tag.N.Key"))).collect()
}

fn call(ids: &[&str], keys: &[&str]) -> (Vec<String>, Vec<String>) {
    let owned = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect();
    (owned(ids), owned(keys))
}

#[test]
fn c20_missing_tags_are_added_and_a_users_name_is_kept() {
    let present = |keys: &[&str]| keys.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect();
    let keys = |have: &[&str]| missing(&present(have), "node", "claim", "c1").into_keys().collect::<Vec<_>>();
    assert_eq!(keys(&[]), ["Name", CLUSTER, CLAIM]);
    assert_eq!(keys(&["Name", CLUSTER]), [CLAIM]);
    assert!(keys(&["Name", CLUSTER, CLAIM]).is_empty());
}

#[tokio::test]
async fn c20_instances_are_read_in_one_call_and_equal_tags_are_written_in_one() {
    let (ec2, seen) = ec2(Box::new(|request| match request.action.as_str() {
        "DescribeInstances" => described(request, |id| {
            Some(match id {
                "i-full" => vec!["Name", CLUSTER, CLAIM],
                "i-unnamed" => vec![CLUSTER, CLAIM],
                _ => vec!["Name", CLAIM],
            })
        }),
        _ => created(),
    }));
    let due = due(&["i-1", "i-full", "i-2", "i-unnamed"]);
    assert_eq!(outcomes(&ec2, &due).await, [Ok(()), Ok(()), Ok(()), Ok(())]);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.iter().filter(|request| request.action == "DescribeInstances").count(), 1);
    let mut written = written(&seen);
    written.sort();
    assert_eq!(written, [call(&["i-1", "i-2"], &[CLUSTER]), call(&["i-unnamed"], &["Name"])]);
    let named = seen.iter().find(|request| request.form.get("Tag.1.Key").is_some_and(|key| key == "Name")).unwrap();
    assert_eq!(named.form["Tag.1.Value"], "node-i-unnamed");
}

#[tokio::test]
async fn c20_instances_are_read_in_batches() {
    let (ec2, seen) = ec2(Box::new(|request| described(request, |_| Some(vec!["Name", CLUSTER, CLAIM]))));
    let ids: Vec<String> = (0..=READ_BATCH).map(|n| format!("i-{n}")).collect();
    let due = due(&ids.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(outcomes(&ec2, &due).await.iter().all(Result::is_ok));
    let sizes: Vec<usize> = seen.lock().unwrap().iter().map(|request| listed(request, "InstanceId.N").len()).collect();
    assert_eq!(sizes, [READ_BATCH, 1]);
}

#[tokio::test]
async fn c20_a_terminated_instance_is_skipped_and_fails_no_other() {
    let (ec2, seen) = ec2(Box::new(|request| match request.action.as_str() {
        "DescribeInstances" => described(request, |id| {
            (id != "i-gone").then(|| if id == "i-full" { vec!["Name", CLUSTER, CLAIM] } else { vec!["Name", CLAIM] })
        }),
        // Terminated after DescribeInstances.
        _ if listed(request, "ResourceId.N").contains(&"i-going".to_owned()) => {
            fake_aws::error("InvalidInstanceID.NotFound", "i-going")
        }
        _ => created(),
    }));
    let due = due(&["i-1", "i-gone", "i-going", "i-full"]);
    assert_eq!(outcomes(&ec2, &due).await, [Ok(()), Ok(()), Ok(()), Ok(())]);
    let keys = [CLUSTER];
    let calls = [call(&["i-1", "i-going"], &keys), call(&["i-1"], &keys), call(&["i-going"], &keys)];
    assert_eq!(written(&seen.lock().unwrap()), calls);
    assert!(ec2.failing_apis().is_empty());
}

#[tokio::test]
async fn c20_only_calls_that_write_tags_are_followed_by_a_pause() {
    let (ec2, seen) = ec2(Box::new(|request| match request.action.as_str() {
        "DescribeInstances" => described(request, |id| {
            Some(if id.starts_with("i-full") { vec!["Name", CLUSTER, CLAIM] } else { vec![CLUSTER, CLAIM] })
        }),
        _ => created(),
    }));
    let (pause, begin) = (Duration::from_millis(40), Instant::now());
    let lacking = due(&["i-1", "i-2", "i-3"]);
    assert_eq!(ec2.tagger.tag_all(&lacking, pause).count().await, 3);
    assert!(begin.elapsed() >= pause * 3, "{:?}", begin.elapsed());
    assert_eq!(written(&seen.lock().unwrap()).len(), 3);
    let full = due(&["i-full1", "i-full2"]);
    let all = ec2.tagger.tag_all(&full, Duration::MAX).count();
    assert_eq!(tokio::time::timeout(Duration::from_secs(30), all).await, Ok(2));
}

#[tokio::test]
async fn outcomes_without_a_write_do_not_wait_for_writes() {
    let (ec2, _) = ec2(Box::new(|request| match request.action.as_str() {
        "DescribeInstances" => {
            described(request, |id| Some(if id == "i-full" { vec!["Name", CLUSTER, CLAIM] } else { vec![] }))
        }
        _ => created(),
    }));
    let due = due(&["i-1", "i-full"]);
    let mut all = std::pin::pin!(ec2.tagger.tag_all(&due, Duration::MAX));
    assert_eq!(tokio::time::timeout(Duration::from_secs(30), all.next()).await, Ok(Some((1, Ok(())))));
}

#[tokio::test]
async fn tagging_is_degraded_until_the_last_instance_is_tagged() {
    let is_refused = Arc::new(AtomicBool::new(true));
    let refused_now = Arc::clone(&is_refused);
    let (ec2, _) = ec2(Box::new(move |request| match request.action.as_str() {
        "DescribeInstances" => described(request, |_| Some(vec![CLUSTER, CLAIM])),
        _ if refused_now.load(Ordering::SeqCst) && request.form["ResourceId.1"] != "i-ours" => {
            fake_aws::error("UnauthorizedOperation", "You are not authorized")
        }
        _ => created(),
    }));
    let all = due(&["i-1", "i-ours", "i-2"]);
    let found = outcomes(&ec2, &all).await;
    assert!(matches!(found[0], Err(CloudError::Refused(_))) && matches!(found[2], Err(CloudError::Refused(_))));
    assert_eq!(found[1], Ok(()));
    let reported = ec2.failing_apis();
    assert_eq!(
        reported.keys().copied().collect::<Vec<_>>(),
        [OptionalApi::InstanceTags],
        "a success for another instance does not end it"
    );
    let note = &reported[&OptionalApi::InstanceTags];
    assert!(note.contains("allow ec2:CreateTags") && note.contains("UnauthorizedOperation"), "{note}");
    assert!(outcomes(&ec2, &all[..1]).await[0].is_err());
    assert!(!ec2.failing_apis().is_empty());
    is_refused.store(false, Ordering::SeqCst);
    assert_eq!(outcomes(&ec2, &all[..1]).await, [Ok(())]);
    assert!(ec2.failing_apis().is_empty());
}

#[tokio::test]
async fn an_instance_that_is_no_longer_due_does_not_count_as_degraded() {
    let (ec2, _) = ec2(Box::new(|request| match request.action.as_str() {
        "DescribeInstances" => described(request, |_| Some(vec![])),
        _ => fake_aws::error("TagLimitExceeded", "too many"),
    }));
    assert!(outcomes(&ec2, &due(&["i-1"])).await[0].is_err());
    let note = &ec2.failing_apis()[&OptionalApi::InstanceTags];
    assert!(note.contains("TagLimitExceeded") && !note.contains("policy"), "{note}");
    assert!(outcomes(&ec2, &[]).await.is_empty());
    assert!(ec2.failing_apis().is_empty());
}

#[tokio::test]
async fn a_failed_read_fails_all_and_writes_nothing() {
    let (ec2, seen) = ec2(Box::new(|_| fake_aws::error("UnauthorizedOperation", "no")));
    assert!(outcomes(&ec2, &due(&["i-1", "i-2"])).await.iter().all(Result::is_err));
    assert_eq!(seen.lock().unwrap().len(), 1);
}
