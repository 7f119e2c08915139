use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::super::client::wire;
use super::*;
use crate::cloud::MessageKind;

const URL: &str = "https://sqs.us-east-1.amazonaws.com/000000000000/q";
/// 2026-01-01T00:00:00Z.
const EVENT_MS: i64 = 1_767_225_600_000;

fn event(detail_type: &str, detail: Value) -> String {
    let source = if detail_type.starts_with("AWS") { "aws.health" } else { "aws.ec2" };
    json!({"version": "0", "detail-type": detail_type, "source": source, "time": "2026-01-01T00:00:00Z", "detail": detail})
        .to_string()
}

fn spot(id: &str) -> String {
    event("EC2 Spot Instance Interruption Warning", json!({"instance-id": id, "instance-action": "terminate"}))
}

fn health(ids: &[&str]) -> String {
    let entities: Vec<Value> = ids.iter().map(|id| json!({"entityValue": id})).collect();
    event(
        "AWS Health Event",
        json!({"service": "EC2", "eventTypeCategory": "scheduledChange", "affectedEntities": entities}),
    )
}

fn message(handle: &str, body: &str) -> Value {
    json!({"MessageId": handle, "ReceiptHandle": handle, "Body": body, "Attributes": {
        "SentTimestamp": (EVENT_MS + 500).to_string(), "ApproximateReceiveCount": "1",
        "ApproximateFirstReceiveTimestamp": (EVENT_MS + 2_000).to_string()}})
}

type Seen = Arc<Mutex<Vec<wire::Seen>>>;

/// A queue that gives one batch, and what it was asked.
fn queue(batch: Value) -> (Queue, Seen) {
    let (clients, seen) = wire::clients(Box::new(move |seen| {
        let answer = match seen.action.as_str() {
            "GetQueueUrl" => json!({"QueueUrl": URL}),
            "ReceiveMessage" => json!({"Messages": batch}),
            _ => json!({}),
        };
        Some((200, answer.to_string()))
    }));
    (Queue::new(clients.sqs, "q"), seen)
}

fn asked(seen: &Seen, action: &str) -> Vec<Value> {
    let seen = seen.lock().unwrap();
    seen.iter().filter(|one| one.action == action).map(|one| serde_json::from_str(&one.body).unwrap()).collect()
}

#[tokio::test]
async fn c37_a_poll_gives_events_and_deletes_what_has_no_effect() {
    let running = event("EC2 Instance State-change Notification", json!({"instance-id": "i-9", "state": "running"}));
    let batch = json!([
        message("h1", &spot("i-1")),
        message("h2", "not json"),
        message("h3", &health(&["i-3", "i-2"])),
        message("h4", &running),
        message("h5", ""),
        message("h6", &event("EC2 Fleet State Change", json!({}))),
    ]);
    let (queue, seen) = queue(batch);
    let events = queue.receive(|| EVENT_MS + 2_000).await.unwrap();
    let lines: Vec<_> = events.iter().map(|e| (e.receipt.as_str(), e.kind, e.instance_id.as_str(), e.at_ms)).collect();
    assert_eq!(
        lines,
        [
            ("h1", EventKind::SpotInterrupted, "i-1", EVENT_MS),
            ("h3#0", EventKind::ScheduledChange, "i-2", EVENT_MS),
            ("h3#1", EventKind::ScheduledChange, "i-3", EVENT_MS),
        ]
    );
    let deleted = |seen: &Seen| {
        let deletes = asked(seen, "DeleteMessage");
        deletes.iter().map(|body| body["ReceiptHandle"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(deleted(&seen), ["h2", "h4", "h5", "h6"]);

    queue.delete("h3#1").await.unwrap();
    assert_eq!(deleted(&seen).len(), 4, "i-2 is still to be handled");
    queue.delete("h3#0").await.unwrap();
    queue.delete("h1").await.unwrap();
    assert_eq!(deleted(&seen)[4..], ["h3", "h1"]);

    let counts = queue.counts();
    let expected = [("malformed", 1), ("no_op", 3), ("scheduled_change", 1), ("spot_interrupted", 1)];
    assert_eq!((counts.received, counts.deleted), (expected.into(), 6));

    let poll = &asked(&seen, "ReceiveMessage")[0];
    for (key, value) in [
        ("QueueUrl", json!(URL)),
        ("MaxNumberOfMessages", json!(10)),
        ("VisibilityTimeout", json!(20)),
        ("WaitTimeSeconds", json!(20)),
        ("MessageAttributeNames", json!(["All"])),
    ] {
        assert_eq!(poll[key], value, "{key}");
    }
    assert!(poll["MessageSystemAttributeNames"].as_array().unwrap().contains(&json!("SentTimestamp")));
    assert_eq!(asked(&seen, "GetQueueUrl"), [json!({"QueueName": "q"})]);
}

#[tokio::test]
async fn a_message_that_is_not_deleted_leaves_its_others_alone_and_a_failed_delete_may_be_repeated() {
    let failures = AtomicUsize::new(0);
    let batch = json!([message("h", &health(&["i-1", "i-2"]))]);
    let (clients, _) = wire::clients(Box::new(move |seen| match seen.action.as_str() {
        "GetQueueUrl" => Some((200, json!({"QueueUrl": URL}).to_string())),
        "ReceiveMessage" => Some((200, json!({"Messages": batch}).to_string())),
        _ if failures.fetch_add(1, Ordering::SeqCst) == 0 => {
            Some((400, json!({"__type": "com.amazonaws.sqs#ReceiptHandleIsInvalid", "message": "no"}).to_string()))
        }
        _ => Some((200, "{}".into())),
    }));
    let queue = Queue::new(clients.sqs, "q");
    let events = queue.receive(|| EVENT_MS).await.unwrap();
    queue.delete(&events[0].receipt).await.unwrap();
    assert!(queue.delete(&events[1].receipt).await.is_err());
    assert_eq!(queue.counts().deleted, 0);
    queue.delete(&events[1].receipt).await.unwrap();
    assert_eq!(queue.counts().deleted, 1);
}

#[tokio::test]
async fn a_queue_that_comes_late_or_goes_is_looked_for_again() {
    let polls = AtomicUsize::new(0);
    let urls = AtomicUsize::new(0);
    let missing = || {
        let body = json!({"__type": "com.amazonaws.sqs#QueueDoesNotExist", "message": "no such queue"});
        Some((400, body.to_string()))
    };
    let (clients, seen) = wire::clients(Box::new(move |seen| match seen.action.as_str() {
        "GetQueueUrl" if urls.fetch_add(1, Ordering::SeqCst) == 0 => missing(),
        "GetQueueUrl" => Some((200, json!({"QueueUrl": URL}).to_string())),
        _ if polls.fetch_add(1, Ordering::SeqCst) == 1 => missing(),
        _ => Some((200, "{}".into())),
    }));
    let queue = Queue::new(clients.sqs, "q");
    let error = queue.receive(|| 0).await.unwrap_err();
    assert_eq!((error.action, error.class), ("sqs:GetQueueUrl", Class::NotFound));
    assert_eq!(queue.receive(|| 0).await.unwrap(), []);
    assert_eq!(queue.receive(|| 0).await.unwrap_err().action, "sqs:ReceiveMessage");
    assert_eq!(queue.receive(|| 0).await.unwrap(), []);
    assert_eq!(asked(&seen, "GetQueueUrl").len(), 3);
}

#[test]
fn times_of_events_are_told_by_this_machines_clock() {
    let first = |received| Times { sent: Some(9_000), first_received: Some(received), is_first: true };
    let again = Times { sent: Some(9_000), first_received: Some(10_000), is_first: false };
    let hour = 3_600_000;
    for (what, event, times, now, expected) in [
        ("clocks agree", Some(8_000), first(10_000), 10_000, 8_000),
        ("an hour ahead", Some(8_000), first(10_000), 10_000 + hour, 8_000 + hour),
        ("an hour behind", Some(8_000), first(10_000), 10_000 - hour, 8_000 - hour),
        ("no time in the event", None, first(10_000), 10_000, 9_000),
        ("no time at all", None, Times::default(), 10_000, 10_000),
        ("in the future", Some(90_000), Times::default(), 10_000, 10_000),
        ("received again, nothing known", Some(8_000), again, 99_000, 8_000),
    ] {
        assert_eq!(Skew::default().local_time(event, &times, now), expected, "{what}");
    }
    let mut skew = Skew::default();
    skew.local_time(Some(8_000), &first(10_000), 10_000 + hour);
    assert_eq!(skew.local_time(Some(8_000), &again, 99_000 + hour), 8_000 + hour, "what the last message told holds");
}

#[test]
fn the_controller_gets_messages_in_its_own_shape() {
    for (kind, expected) in [
        (EventKind::SpotInterrupted, MessageKind::SpotInterruption),
        (EventKind::CapacityReservationInterrupted, MessageKind::CapacityReservationInterruption),
        (EventKind::RebalanceRecommendation, MessageKind::RebalanceRecommendation),
        (EventKind::InstanceStopped, MessageKind::Stopped),
        (EventKind::InstanceTerminated, MessageKind::StateChange),
        (EventKind::ScheduledChange, MessageKind::ScheduledChange),
    ] {
        let message: Message = Received { receipt: "r".into(), kind, instance_id: "i-1".into(), at_ms: 4 }.into();
        assert_eq!((message.kind, message.receipt.as_str(), message.at_ms), (expected, "r", 4));
    }
}
