use super::*;
use crate::catalog::embedded;

#[test]
fn a_region_has_a_few_groups_of_many_types() {
    let types = embedded().instance_types.iter().map(|entry| (entry.name.clone(), entry.clone())).collect();
    let groups = groups(&types);
    assert!(groups.len() <= MAX_GROUPS);
    for group in ["c/amd64", "c/arm64", "m/amd64", "m/arm64", "r/amd64", "r/arm64"] {
        assert!(groups[group].len() >= MIN_TYPES, "{group}");
    }
    assert!(groups["m/amd64"].contains(&"m7i.large".to_owned()));
    for names in groups.values() {
        assert!(names.iter().all(|name| !name.contains("metal")));
        assert!(names.windows(2).all(|pair| pair[0] < pair[1]), "the same request each time");
    }
}

#[test]
fn a_score_applies_to_the_types_of_its_group_for_an_hour() {
    let groups: Groups = [("m/amd64".to_owned(), vec!["m5.large".to_owned()])].into();
    let read_at = UnixMillis(1_000);
    let mut table = ScoreTable::new(&groups, read_at);
    assert_eq!(table.len(), 0);
    let score = |id: &str, score| SpotPlacementScore::builder().availability_zone_id(id).score(score).build();
    let zone_ids = [("us-east-1a".to_owned(), "use1-az6".to_owned())].into();
    let all = [score("use1-az6", 3), score("use1-az9", 4), score("use1-az6", 11), score("use1-az6", 0)];
    table.add("m/amd64", &all, &zone_ids);
    assert_eq!((table.len(), table.score("m5.large", "us-east-1a", read_at)), (1, Some(3)));
    assert_eq!(table.score("m5.large", "us-east-1b", read_at), None);
    assert_eq!(table.score("c5.large", "us-east-1a", read_at), None);
    assert_eq!(table.score("m5.large", "us-east-1a", read_at + MAX_AGE), Some(3));
    assert_eq!(table.score("m5.large", "us-east-1a", read_at + MAX_AGE + Duration::from_millis(1)), None);
}
