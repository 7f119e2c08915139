use super::*;
use crate::cloud::catalog::embedded;
use crate::cloud::ec2::aws::client::wire;

fn snapshot() -> RegionSnapshot {
    let mut snapshot = RegionSnapshot::stand_in("us-east-1", embedded(), 0);
    snapshot.zone_ids = Arc::new([("us-east-1a".to_owned(), "use1-az6".to_owned())].into());
    snapshot
}

#[test]
fn a_region_has_a_few_groups_of_many_types() {
    let groups = groups(&snapshot().types);
    assert!(groups.len() <= MOST_GROUPS);
    for group in ["c/amd64", "c/arm64", "m/amd64", "m/arm64", "r/amd64", "r/arm64"] {
        assert!(groups[group].len() >= FEWEST_TYPES, "{group}");
    }
    assert!(groups["m/amd64"].contains(&"m7i.large".to_owned()));
    for names in groups.values() {
        assert!(names.iter().all(|name| !name.contains("metal")));
        assert!(names.windows(2).all(|pair| pair[0] < pair[1]), "the same request each time");
    }
}

#[test]
fn a_score_holds_for_the_types_of_its_group_in_its_zone_for_an_hour() {
    let groups: Groups = [("m/amd64".to_owned(), vec!["m5.large".to_owned()])].into();
    let mut table = ScoreTable::new(&groups, 1_000);
    assert!(table.is_empty());
    let score = |id: &str, score| SpotPlacementScore::builder().availability_zone_id(id).score(score).build();
    let all = [score("use1-az6", 3), score("use1-az9", 4), score("use1-az6", 11), score("use1-az6", 0)];
    table.add("m/amd64", &all, &snapshot().zone_ids);
    assert_eq!((table.len(), table.score("m5.large", "us-east-1a", 1_000)), (1, Some(3)));
    assert_eq!(table.score("m5.large", "us-east-1b", 1_000), None);
    assert_eq!(table.score("c5.large", "us-east-1a", 1_000), None);
    assert_eq!(table.score("m5.large", "us-east-1a", 1_000 + STALE_MS), Some(3));
    assert_eq!(table.score("m5.large", "us-east-1a", 1_001 + STALE_MS), None);
}

#[tokio::test]
async fn each_group_is_one_request_for_single_zones() {
    let (clients, seen) = wire::clients(Box::new(|_| {
        let scores = "<spotPlacementScoreSet><item><region>us-east-1</region><availabilityZoneId>use1-az6</availabilityZoneId>\
            <score>4</score></item></spotPlacementScoreSet>";
        wire::ok("GetSpotPlacementScores", scores)
    }));
    let table = get_scores(&clients.ec2, &snapshot(), &ScoreSettings::default(), 5).await.unwrap();
    assert_eq!(table.score("m7i.large", "us-east-1a", 5), Some(4));
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
async fn a_refusal_turns_scores_off_and_too_many_requests_wait_for_the_next_day() {
    for (code, expected) in [
        ("UnauthorizedOperation", Next::Stop),
        ("MaxConfigLimitExceeded", Next::Wait(NEXT_DAY)),
        ("InvalidParameterValue", Next::Wait(PERIOD)),
    ] {
        let (clients, seen) = wire::clients(Box::new(move |_| wire::refusal(code, "no")));
        let error = get_scores(&clients.ec2, &snapshot(), &ScoreSettings::default(), 5).await.unwrap_err();
        assert_eq!(after(&error), expected, "{code}");
        assert_eq!(seen.lock().unwrap().len(), 1, "the first failure ends it");
    }
}
