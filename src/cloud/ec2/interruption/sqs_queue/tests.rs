use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::*;
use crate::MessageKind;
use crate::test_support::fake_aws;

const URL: &str = "https://sqs.us-east-1.amazonaws.com/000000000000/q";
/// 2026-01-01T00:00:00Z.
const EVENT_AT: UnixMillis = UnixMillis(1_767_225_600_000);

fn event(detail_type: &str, detail: Value) -> String {
    let source = if detail_type.starts_with("AWS") { "aws.health" } else { "aws.ec2" };
    json!({"version": "0", "detail-type": detail_type, "source": source, "time": "2026-01-01T00:00:00Z", "detail": detail,
        "account": "000000000000", "region": "us-east-1"})
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
        "SentTimestamp": (EVENT_AT.0 + 500).to_string(), "ApproximateReceiveCount": "1",
        "ApproximateFirstReceiveTimestamp": (EVENT_AT.0 + 2_000).to_string()}})
}

type Requests = Arc<Mutex<Vec<fake_aws::Request>>>;

/// A queue with the same batch at every poll, and its requests. Deletion fails for the handles for which `keeps` is true.
fn queue(batch: Value, keeps: impl Fn(&str) -> bool + Send + Sync + 'static) -> (Queue, Requests) {
    let (clients, requests) = fake_aws::clients(Box::new(move |request| {
        let response = match request.action.as_str() {
            "GetQueueUrl" => json!({"QueueUrl": URL}),
            "ReceiveMessage" => json!({"Messages": batch}),
            _ => deletion(&request.body, &keeps),
        };
        Some((200, response.to_string()))
    }));
    (Queue::new(clients.sqs, "q"), requests)
}

/// SQS's response to a DeleteMessageBatch.
fn deletion(body: &str, keeps: &impl Fn(&str) -> bool) -> Value {
    let body: Value = serde_json::from_str(body).unwrap();
    let entries = body["Entries"].as_array().unwrap().iter().cloned();
    let (kept, deleted): (Vec<_>, Vec<_>) = entries.partition(|entry| keeps(entry["ReceiptHandle"].as_str().unwrap()));
    let failed = |entry: &Value| json!({"Id": entry["Id"], "Code": "InternalError", "SenderFault": false});
    json!({
        "Successful": deleted.iter().map(|entry| json!({"Id": entry["Id"]})).collect::<Vec<_>>(),
        "Failed": kept.iter().map(failed).collect::<Vec<_>>(),
    })
}

/// The handles of each DeleteMessageBatch.
fn deletes(requests: &Requests) -> Vec<Vec<String>> {
    let handles = |body: &Value| {
        let entries = body["Entries"].as_array().unwrap();
        let ids: std::collections::BTreeSet<_> = entries.iter().map(|entry| entry["Id"].as_str().unwrap()).collect();
        assert_eq!(ids.len(), entries.len(), "SQS requires distinct ids");
        entries.iter().map(|entry| entry["ReceiptHandle"].as_str().unwrap().to_owned()).collect()
    };
    bodies(requests, "DeleteMessageBatch").iter().map(handles).collect()
}

fn receipts(all: &[&str]) -> Vec<String> {
    all.iter().map(|receipt| (*receipt).to_owned()).collect()
}

/// The bodies of the requests of an action.
fn bodies(requests: &Requests, action: &str) -> Vec<Value> {
    let requests = requests.lock().unwrap();
    let of_action = requests.iter().filter(|request| request.action == action);
    of_action.map(|request| serde_json::from_str(&request.body).unwrap()).collect()
}

#[tokio::test]
async fn c37_a_poll_returns_events_and_deletes_messages_without_effect() {
    let running = event("EC2 Instance State-change Notification", json!({"instance-id": "i-9", "state": "running"}));
    let batch = json!([
        message("h1", &spot("i-1")),
        message("h2", "not json"),
        message("h3", &health(&["i-3", "i-2"])),
        message("h4", &running),
        message("h5", ""),
        message("h6", &event("EC2 Fleet State Change", json!({}))),
    ]);
    let (queue, requests) = queue(batch, |_| false);
    let events = queue.receive(|| EVENT_AT + Duration::from_secs(2)).await.unwrap();
    let lines: Vec<_> = events.iter().map(|e| (e.receipt.as_str(), e.kind, e.instance_id.as_str(), e.at)).collect();
    assert_eq!(
        lines,
        [
            ("h1", EventKind::SpotInterrupted, "i-1", EVENT_AT),
            ("h3#0", EventKind::ScheduledChange, "i-2", EVENT_AT),
            ("h3#1", EventKind::ScheduledChange, "i-3", EVENT_AT),
        ]
    );
    assert_eq!(deletes(&requests), [["h2", "h4", "h5", "h6"]], "in one call");

    queue.delete(&receipts(&["h3#1"])).await.unwrap();
    assert_eq!(deletes(&requests).len(), 1, "i-2 is not handled yet");
    queue.delete(&receipts(&["h3#0", "h1"])).await.unwrap();
    assert_eq!(deletes(&requests)[1..], [["h3", "h1"]]);

    let counts = queue.counts();
    let expected = [("malformed", 1), ("no_op", 3), ("scheduled_change", 1), ("spot_interrupted", 1)];
    assert_eq!((counts.received, counts.deleted), (expected.into(), 6));

    let poll = &bodies(&requests, "ReceiveMessage")[0];
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
    assert_eq!(bodies(&requests, "GetQueueUrl"), [json!({"QueueName": "q"})]);
}

#[tokio::test]
async fn c37_a_batch_is_deleted_in_one_call_and_failed_deletions_block_no_others() {
    let batch: Vec<Value> = (0..10).map(|n| message(&format!("h{n}"), &spot(&format!("i-{n}")))).collect();
    let kept = Arc::new(Mutex::new(vec!["h3"]));
    let keeps = Arc::clone(&kept);
    let (queue, requests) = queue(json!(batch), move |handle| keeps.lock().unwrap().contains(&handle));
    let all: Vec<String> = queue.receive(|| EVENT_AT).await.unwrap().into_iter().map(|event| event.receipt).collect();
    assert_eq!(bodies(&requests, "DeleteMessageBatch").len(), 0, "nothing is deleted before it is handled");
    queue.delete(&all).await.unwrap();
    assert_eq!(deletes(&requests), [(0..10).map(|n| format!("h{n}")).collect::<Vec<_>>()]);
    assert_eq!(queue.counts().deleted, 9);
    // It is received again and deleted.
    kept.lock().unwrap().clear();
    queue.delete(&receipts(&["h3"])).await.unwrap();
    assert_eq!(queue.counts().deleted, 10);
}

#[tokio::test]
async fn a_call_deletes_at_most_ten_messages() {
    let (queue, requests) = queue(json!([]), |_| false);
    queue.delete(&[]).await.unwrap();
    assert_eq!(deletes(&requests).len(), 0);
    let many: Vec<String> = (0..23).map(|n| format!("h{n}")).collect();
    queue.delete(&many).await.unwrap();
    assert_eq!(deletes(&requests).iter().map(Vec::len).collect::<Vec<_>>(), [10, 10, 3]);
    assert_eq!((deletes(&requests).concat(), queue.counts().deleted), (many, 23));
}

#[tokio::test]
async fn failed_deletions_of_messages_without_effect_block_no_event() {
    let batch = json!([message("h1", "not json"), message("h2", &spot("i-2"))]);
    let (clients, _) = fake_aws::clients(Box::new(move |request| match request.action.as_str() {
        "GetQueueUrl" => Some((200, json!({"QueueUrl": URL}).to_string())),
        "ReceiveMessage" => Some((200, json!({"Messages": batch}).to_string())),
        _ => Some((403, json!({"__type": "com.amazonaws.sqs#AccessDenied", "message": "no"}).to_string())),
    }));
    let queue = Queue::new(clients.sqs, "q");
    let events = queue.receive(|| EVENT_AT).await.unwrap();
    assert_eq!(events.iter().map(|event| event.instance_id.as_str()).collect::<Vec<_>>(), ["i-2"]);
    assert_eq!(queue.counts().deleted, 0);
}

#[tokio::test]
async fn a_failed_delete_can_be_repeated() {
    let failures = AtomicUsize::new(0);
    let batch = json!([message("h", &health(&["i-1", "i-2"]))]);
    let (clients, _) = fake_aws::clients(Box::new(move |request| match request.action.as_str() {
        "GetQueueUrl" => Some((200, json!({"QueueUrl": URL}).to_string())),
        "ReceiveMessage" => Some((200, json!({"Messages": batch}).to_string())),
        _ if failures.fetch_add(1, Ordering::SeqCst) == 0 => {
            Some((400, json!({"__type": "com.amazonaws.sqs#QueueDoesNotExist", "message": "no"}).to_string()))
        }
        _ => Some((200, deletion(&request.body, &|_| false).to_string())),
    }));
    let queue = Queue::new(clients.sqs, "q");
    let events = queue.receive(|| EVENT_AT).await.unwrap();
    let [first, second] = [0, 1].map(|n| vec![events[n].receipt.clone()]);
    queue.delete(&first).await.unwrap();
    assert!(queue.delete(&second).await.is_err());
    assert_eq!(queue.counts().deleted, 0);
    queue.delete(&second).await.unwrap();
    assert_eq!(queue.counts().deleted, 1);
}

#[tokio::test]
async fn the_url_of_a_missing_queue_is_resolved_again() {
    let polls = AtomicUsize::new(0);
    let urls = AtomicUsize::new(0);
    let missing = || {
        let body = json!({"__type": "com.amazonaws.sqs#QueueDoesNotExist", "message": "no such queue"});
        Some((400, body.to_string()))
    };
    let (clients, requests) = fake_aws::clients(Box::new(move |request| match request.action.as_str() {
        "GetQueueUrl" if urls.fetch_add(1, Ordering::SeqCst) == 0 => missing(),
        "GetQueueUrl" => Some((200, json!({"QueueUrl": URL}).to_string())),
        _ if polls.fetch_add(1, Ordering::SeqCst) == 1 => missing(),
        _ => Some((200, "{}".into())),
    }));
    let queue = Queue::new(clients.sqs, "q");
    let error = queue.receive(|| UnixMillis(0)).await.unwrap_err();
    assert_eq!((error.action, error.class), ("sqs:GetQueueUrl", Class::NotFound));
    assert_eq!(queue.receive(|| UnixMillis(0)).await.unwrap(), []);
    assert_eq!(queue.receive(|| UnixMillis(0)).await.unwrap_err().action, "sqs:ReceiveMessage");
    assert_eq!(queue.receive(|| UnixMillis(0)).await.unwrap(), []);
    assert_eq!(bodies(&requests, "GetQueueUrl").len(), 3);
}

#[test]
fn event_times_are_converted_to_the_local_clock() {
    let sent = Some(UnixMillis(9_000));
    let first = |received| Times { sent, first_received: Some(UnixMillis(received)), is_first: true };
    let again = Times { sent, first_received: Some(UnixMillis(10_000)), is_first: false };
    let hour = 3_600_000;
    for (what, event, times, now, expected) in [
        ("clocks agree", Some(8_000), first(10_000), 10_000, 8_000),
        ("an hour ahead", Some(8_000), first(10_000), 10_000 + hour, 8_000 + hour),
        ("an hour behind", Some(8_000), first(10_000), 10_000 - hour, 8_000 - hour),
        ("no time in the event", None, first(10_000), 10_000, 9_000),
        ("no time at all", None, Times::default(), 10_000, 10_000),
        ("in the future", Some(90_000), Times::default(), 10_000, 10_000),
        ("received again, offset unknown", Some(8_000), again, 99_000, 8_000),
    ] {
        let local = Skew::default().local_time(event.map(UnixMillis), &times, UnixMillis(now));
        assert_eq!(local, UnixMillis(expected), "{what}");
    }
    let mut skew = Skew::default();
    let event = Some(UnixMillis(8_000));
    skew.local_time(event, &first(10_000), UnixMillis(10_000 + hour));
    let local = skew.local_time(event, &again, UnixMillis(99_000 + hour));
    assert_eq!(local, UnixMillis(8_000 + hour), "the offset of the last message applies");
}

#[test]
fn every_event_kind_has_a_message_kind() {
    for (kind, expected) in [
        (EventKind::SpotInterrupted, MessageKind::SpotInterruption),
        (EventKind::CapacityReservationInterrupted, MessageKind::CapacityReservationInterruption),
        (EventKind::RebalanceRecommendation, MessageKind::RebalanceRecommendation),
        (EventKind::InstanceStopped, MessageKind::Stopped),
        (EventKind::InstanceTerminated, MessageKind::StateChange),
        (EventKind::ScheduledChange, MessageKind::ScheduledChange),
    ] {
        let message: Message =
            Received { receipt: "r".into(), kind, instance_id: "i-1".into(), at: UnixMillis(4) }.into();
        assert_eq!((message.kind, message.receipt.as_str(), message.at), (expected, "r", UnixMillis(4)));
    }
}
