use super::*;
use crate::catalog::embedded;
use crate::test_support::fake_aws;

fn snapshot() -> RegionSnapshot {
    let mut snapshot = RegionSnapshot::embedded("us-east-1", embedded());
    snapshot.zone_ids = Arc::new([("us-east-1a".to_owned(), "use1-az6".to_owned())].into());
    snapshot
}

#[tokio::test]
async fn each_group_is_one_request_for_single_zones() {
    let (clients, seen) = fake_aws::clients(Box::new(|_| {
        let scores = "<spotPlacementScoreSet><item><region>us-east-1</region><availabilityZoneId>use1-az6</availabilityZoneId>\
            <score>4</score></item></spotPlacementScoreSet>";
        fake_aws::ok("GetSpotPlacementScores", scores)
    }));
    let table = get_scores(&clients.ec2, &snapshot(), &ScoreSettings::default(), UnixMillis(5)).await.unwrap();
    assert_eq!(table.score("m7i.large", "us-east-1a", UnixMillis(5)), Some(4));
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), groups(&snapshot().types).len());
    for (key, value) in [
        ("SingleAvailabilityZone", "true"),
        ("TargetCapacity", "64"),
        ("TargetCapacityUnitType", "vcpu"),
        ("RegionName.1", "us-east-1"),
    ] {
        assert_eq!(seen[0].form.get(key).map(String::as_str), Some(value), "{key}");
    }
}

#[tokio::test]
async fn a_denied_call_is_not_retried_and_too_many_requests_wait_a_day() {
    for (code, expected) in [
        ("UnauthorizedOperation", Retry::Never),
        ("MaxConfigLimitExceeded", Retry::After(TOO_MANY_REQUESTS_WAIT)),
        ("InvalidParameterValue", Retry::After(PERIOD)),
    ] {
        let (clients, seen) = fake_aws::clients(Box::new(move |_| fake_aws::error(code, "no")));
        let error = get_scores(&clients.ec2, &snapshot(), &ScoreSettings::default(), UnixMillis(5)).await.unwrap_err();
        assert_eq!(retry(&error), expected, "{code}");
        assert_eq!(seen.lock().unwrap().len(), 1, "the first failure ends it");
    }
}
