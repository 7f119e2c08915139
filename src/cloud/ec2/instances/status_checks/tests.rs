use aws_sdk_ec2::primitives::DateTime;
use aws_sdk_ec2::types::{InstanceStatusDetails, InstanceStatusEvent, StatusName};
use stowage_model::instance_health::Remedy;

use super::*;
use crate::ec2::aws::errors::Class;
use crate::test_support::fake_aws;

const NOW: UnixMillis = UnixMillis(1_800_000_000_000);

fn check(status: StatusType, since: Option<UnixMillis>) -> InstanceStatusSummary {
    let detail = InstanceStatusDetails::builder()
        .name(StatusName::Reachability)
        .status(status)
        .set_impaired_since(since.map(|since| DateTime::from_millis(since.0)))
        .build();
    InstanceStatusSummary::builder().details(detail).build()
}

fn event(code: &str, description: &str) -> InstanceStatusEvent {
    InstanceStatusEvent::builder().code(code.into()).description(description).build()
}

fn one(status: InstanceStatus) -> Option<(Remedy, Vec<Category>)> {
    let found = unhealthy(&[status], NOW);
    assert!(found.len() < 2);
    found.first().map(|found| (found.remedy(), found.categories.iter().copied().collect()))
}

#[test]
fn c38_a_check_failed_for_two_minutes_forces_and_a_scheduled_event_drains() {
    let status = || InstanceStatus::builder().instance_id("i-1");
    let failed = |millis: u64| check(StatusType::Failed, Some(NOW - Duration::from_millis(millis)));
    for (what, status, expected) in [
        (
            "failing long",
            status().instance_status(failed(120_000)),
            Some((Remedy::Force, vec![Category::InstanceStatus])),
        ),
        ("failing just now", status().instance_status(failed(119_999)), None),
        ("since unknown", status().instance_status(check(StatusType::Failed, None)), None),
        ("passed", status().instance_status(check(StatusType::Passed, Some(UnixMillis(0)))), None),
        ("starting", status().system_status(check(StatusType::Initializing, Some(UnixMillis(0)))), None),
        ("system", status().system_status(failed(500_000)), Some((Remedy::Force, vec![Category::SystemStatus]))),
        (
            "event",
            status().events(event("instance-retirement", "The instance runs on degraded hardware")),
            Some((Remedy::Drain, vec![Category::EventStatus])),
        ),
        ("done", status().events(event("system-reboot", "[Completed] Scheduled reboot")), None),
        ("canceled", status().events(event("system-reboot", "[Canceled] Scheduled reboot")), None),
        ("unknown event", status().events(event("instance-unknown", "!")), None),
        (
            "one done, one ahead",
            status().events(event("system-reboot", "[Completed] x")).events(event("instance-stop", "y")),
            Some((Remedy::Drain, vec![Category::EventStatus])),
        ),
        (
            "both",
            status().instance_status(failed(120_000)).events(event("instance-stop", "y")),
            Some((Remedy::Force, vec![Category::InstanceStatus, Category::EventStatus])),
        ),
    ] {
        assert_eq!(one(status.build()), expected, "{what}");
    }
}

#[test]
fn an_instance_of_several_scans_is_reported_once() {
    let status = || InstanceStatus::builder().instance_id("i-1");
    let found = unhealthy(
        &[
            status().instance_status(check(StatusType::Failed, Some(UnixMillis(0)))).build(),
            status().system_status(check(StatusType::Failed, Some(UnixMillis(0)))).build(),
            InstanceStatus::builder().events(event("instance-stop", "without an instance")).build(),
        ],
        NOW,
    );
    let expected = [Category::InstanceStatus, Category::SystemStatus].into();
    assert_eq!(found, [Unhealthy { instance_id: "i-1".into(), categories: expected }]);
}

#[tokio::test]
async fn three_scans_are_paged() {
    let (clients, requests) = fake_aws::clients(Box::new(|request| {
        let by = request.form["Filter.1.Name"].as_str();
        let item =
            |id: &str| format!("<instanceStatusSet><item><instanceId>{id}</instanceId></item></instanceStatusSet>");
        let page = match (by, request.form.get("NextToken").map(String::as_str)) {
            ("system-status.status", None) => item("i-2") + "<nextToken>t</nextToken>",
            ("system-status.status", Some("t")) => item("i-3"),
            ("event.code", None) => item("i-4"),
            _ => item("i-1"),
        };
        fake_aws::ok("DescribeInstanceStatus", &page)
    }));
    let found = describe_statuses(&clients.ec2).await.unwrap();
    let ids: Vec<_> = found.iter().filter_map(|status| status.instance_id()).collect();
    assert_eq!(ids, ["i-1", "i-2", "i-3", "i-4"]);
    let requests = requests.lock().unwrap();
    assert_eq!(requests.len(), 4);
    let codes = requests.iter().find(|request| request.form["Filter.1.Name"] == "event.code").unwrap();
    assert_eq!(codes.form["Filter.1.Value.5"], "instance-stop");
}

#[tokio::test]
async fn an_unauthorized_call_is_an_error() {
    let (clients, _) = fake_aws::clients(Box::new(|_| fake_aws::error("UnauthorizedOperation", "no")));
    assert_eq!(describe_statuses(&clients.ec2).await.unwrap_err().class, Class::Unauthorized);
}
