use serde_json::json;

use super::*;

fn body(source: &str, detail_type: &str, detail: serde_json::Value) -> String {
    json!({
        "version": "0", "id": "e1", "detail-type": detail_type, "source": source, "account": "111122223333",
        "time": "2026-01-01T00:00:00Z", "region": "us-west-2", "resources": ["arn:aws:ec2:us-west-2:instance/i-1"],
        "detail": detail,
    })
    .to_string()
}

/// 2026-01-01T00:00:00Z.
const EVENT_AT: UnixMillis = UnixMillis(1_767_225_600_000);

const SPOT: &str = "EC2 Spot Instance Interruption Warning";
const STATE: &str = "EC2 Instance State-change Notification";
const HEALTH: &str = "AWS Health Event";

#[test]
fn c37_every_kind_of_event_is_parsed() {
    let scheduled = |entities: serde_json::Value| json!({"service": "EC2", "eventTypeCategory": "scheduledChange", "eventTypeCode": "X", "affectedEntities": entities});
    for (source, detail_type, detail, kind, instances) in [
        (
            "aws.ec2",
            SPOT,
            json!({"instance-id": "i-1", "instance-action": "terminate"}),
            EventKind::SpotInterrupted,
            vec!["i-1"],
        ),
        (
            "aws.ec2",
            "EC2 Instance Rebalance Recommendation",
            json!({"instance-id": "i-1"}),
            EventKind::RebalanceRecommendation,
            vec!["i-1"],
        ),
        (
            "aws.ec2",
            "EC2 Capacity Reservation Instance Interruption Warning",
            json!({"instance-id": "i-1", "instance-action": "terminate"}),
            EventKind::CapacityReservationInterrupted,
            vec!["i-1"],
        ),
        ("aws.ec2", STATE, json!({"instance-id": "i-1", "state": "stopping"}), EventKind::InstanceStopped, vec!["i-1"]),
        ("aws.ec2", STATE, json!({"instance-id": "i-1", "state": "STOPPED"}), EventKind::InstanceStopped, vec!["i-1"]),
        (
            "aws.ec2",
            STATE,
            json!({"instance-id": "i-1", "state": "shutting-down"}),
            EventKind::InstanceTerminated,
            vec!["i-1"],
        ),
        (
            "aws.ec2",
            STATE,
            json!({"instance-id": "i-1", "state": "terminated"}),
            EventKind::InstanceTerminated,
            vec!["i-1"],
        ),
        (
            "aws.health",
            HEALTH,
            scheduled(json!([{"entityValue": "i-2"}, {"entityValue": "i-1"}, {"entityValue": "i-2"}])),
            EventKind::ScheduledChange,
            vec!["i-1", "i-2"],
        ),
        (
            "aws.health",
            HEALTH,
            scheduled(json!([{"entityValue": "arn:aws:ec2:us-west-2:1:instance/i-3"}, {"entityValue": "vol-1"}])),
            EventKind::ScheduledChange,
            vec!["i-3"],
        ),
    ] {
        let expected =
            Event { kind, instances: instances.into_iter().map(str::to_owned).collect(), at: Some(EVENT_AT) };
        assert_eq!(parse(&body(source, detail_type, detail), None), Ok(expected), "{detail_type}");
    }
}

#[test]
fn c37_malformed_and_unknown_messages_are_distinguished() {
    let spot = body("aws.ec2", SPOT, json!({"instance-id": "i-1"}));
    for (text, expected) in [
        (String::new(), Dropped::Empty),
        (" \n".to_owned(), Dropped::Empty),
        ("hello".to_owned(), Dropped::Malformed),
        ("[]".to_owned(), Dropped::Malformed),
        ("{}".to_owned(), Dropped::Unknown),
        (spot[..spot.len() - 1].to_owned(), Dropped::Malformed),
        (spot.replace("\"0\"", "\"1\""), Dropped::Unknown),
        (spot.replace("aws.ec2", "aws.s3"), Dropped::Unknown),
        (body("aws.ec2", HEALTH, json!({})), Dropped::Unknown),
        (body("aws.ec2", "EC2 Fleet State Change", json!({})), Dropped::Unknown),
        (body("aws.ec2", SPOT, json!(null)), Dropped::Malformed),
        (body("aws.ec2", SPOT, json!({})), Dropped::Malformed),
        (body("aws.ec2", SPOT, json!({"instance-id": 7})), Dropped::Malformed),
        (body("aws.ec2", SPOT, json!({"instance-id": "i-"})), Dropped::Malformed),
        (body("aws.ec2", SPOT, json!({"instance-id": "i-../x;"})), Dropped::Malformed),
        (body("aws.ec2", SPOT, json!({"instance-id": format!("i-{}", "a".repeat(60))})), Dropped::Malformed),
        (body("aws.ec2", STATE, json!({"instance-id": "i-1", "state": "running"})), Dropped::Irrelevant),
        (body("aws.ec2", STATE, json!({"instance-id": "i-1"})), Dropped::Irrelevant),
        (
            body("aws.health", HEALTH, json!({"service": "RDS", "eventTypeCategory": "scheduledChange"})),
            Dropped::Irrelevant,
        ),
        (body("aws.health", HEALTH, json!({"service": "EC2", "eventTypeCategory": "issue"})), Dropped::Irrelevant),
        (
            body("aws.health", HEALTH, json!({"service": "EC2", "eventTypeCategory": "scheduledChange"})),
            Dropped::Malformed,
        ),
        (format!("{spot}{}", " ".repeat(LARGEST_BODY)), Dropped::TooLarge),
        ("[".repeat(10_000), Dropped::Malformed),
    ] {
        assert_eq!(parse(&text, None), Err(expected), "{}", &text[..text.len().min(200)]);
    }
}

#[test]
fn an_event_without_a_valid_time_is_accepted() {
    let spot = body("aws.ec2", SPOT, json!({"instance-id": "i-1"}));
    for time in ["\"yesterday\"", "null"] {
        let event = parse(&spot.replace("\"2026-01-01T00:00:00Z\"", time), None).unwrap();
        assert_eq!((event.kind, event.at), (EventKind::SpotInterrupted, None));
    }
}

#[test]
fn metric_labels_are_karpenters() {
    assert_eq!(EventKind::CapacityReservationInterrupted.label(), "capacity_reservation_interrupted");
    assert_eq!((Dropped::Unknown.label(), Dropped::Malformed.label()), ("no_op", "malformed"));
}

#[test]
fn events_of_another_account_or_region_are_dropped() {
    let origin =
        |account, region| Origin::of_queue(&format!("https://sqs.us-west-2.amazonaws.com/{account}/q"), region);
    let spot = body("aws.ec2", SPOT, json!({"instance-id": "i-1"}));
    let ended =
        json!({"service": "EC2", "eventTypeCategory": "scheduledChange", "affectedEntities": [{"entityValue": "i-1"}]});
    let health = body("aws.health", HEALTH, ended);
    for (account, region, ec2, of_health) in [
        ("111122223333", "us-west-2", true, true),
        ("111122223333", "us-east-1", false, true),
        ("444455556666", "us-west-2", false, false),
        ("queue", "us-east-1", true, true),
    ] {
        let origin = origin(account, region);
        let accepted = [&spot, &health].map(|text| parse(text, origin.as_ref()));
        assert_eq!(accepted.each_ref().map(Result::is_ok), [ec2, of_health], "{account} {region}");
        assert!(accepted.iter().all(|event| !matches!(event, Err(why) if *why != Dropped::Foreign)));
    }
}

#[test]
fn a_scheduled_change_that_has_ended_is_irrelevant() {
    let event = |status: &str, entity: &str| {
        let entities = json!([{"entityValue": "i-1", "status": entity}, {"entityValue": "i-2"}]);
        let detail = json!({"service": "EC2", "eventTypeCategory": "scheduledChange", "statusCode": status, "affectedEntities": entities});
        parse(&body("aws.health", HEALTH, detail), None).map(|event| event.instances)
    };
    assert_eq!(event("open", "IMPAIRED").unwrap(), ["i-1", "i-2"]);
    assert_eq!(event("upcoming", "RESOLVED").unwrap(), ["i-2"]);
    assert_eq!(event("closed", "IMPAIRED"), Err(Dropped::Irrelevant));
}
