use super::*;
use crate::ec2::aws::filters::tests::text;
use crate::test_support::fake_aws;

const MINUTE: Duration = Duration::from_mins(1);

/// A reservation of m5.large in us-east-1a that ends at a time, or never.
pub fn reservation(id: &str, kind: &str, end: Option<UnixMillis>) -> CapacityReservationStatus {
    CapacityReservationStatus {
        availability_zone: "us-east-1a".into(),
        end_time: end.map(|end| Time(Timestamp::from_millisecond(end.0).unwrap())),
        id: id.into(),
        instance_match_criteria: "targeted".into(),
        instance_type: "m5.large".into(),
        owner_id: "111122223333".into(),
        reservation_type: kind.into(),
        interruptible: Some(false),
        state: "active".into(),
    }
}

fn term(json: serde_json::Value) -> CapacityReservationSelectorTerm {
    serde_json::from_value(json).unwrap()
}

#[test]
fn each_id_has_its_own_call_and_other_terms_combine_their_filters() {
    let terms = [
        term(serde_json::json!({"id": "cr-1"})),
        term(
            serde_json::json!({"tags": {"team": "*", "env": "prod"}, "ownerID": "111122223333", "instanceMatchCriteria": "open"}),
        ),
        term(serde_json::json!({"id": "cr-2"})),
        term(serde_json::json!({"id": "cr-1"})),
    ];
    let calls: Vec<Vec<String>> = queries(&terms)
        .iter()
        .map(|query| match query {
            Query::Id(id) => vec![id.clone()],
            Query::Filters(filters) => text(filters),
        })
        .collect();
    let filters = ["tag:env=prod", "tag-key=team", "owner-id=111122223333", "instance-match-criteria=open"];
    assert_eq!(calls, [vec!["cr-1"], filters.to_vec(), vec!["cr-2"]]);
    assert!(queries(&[]).is_empty());
}

fn item(id: &str, more: &str) -> String {
    format!(
        "<item><capacityReservationId>{id}</capacityReservationId><ownerId>111122223333</ownerId><instanceType>m5.large</instanceType>\
         <availabilityZone>us-east-1a</availabilityZone><availableInstanceCount>3</availableInstanceCount>{more}</item>"
    )
}

fn response(items: &str, more: &str) -> Option<(u16, String)> {
    let set = format!("<capacityReservationSet>{items}</capacityReservationSet>{more}");
    fake_aws::ok("DescribeCapacityReservations", &set)
}

const TARGETED: &str = "<instanceMatchCriteria>targeted</instanceMatchCriteria>";

#[tokio::test]
async fn reservations_are_found_on_all_pages_and_an_unknown_id_selects_nothing() {
    let (clients, seen) = fake_aws::clients(Box::new(|request| match request.form.get("CapacityReservationId.1") {
        Some(_) => fake_aws::error("InvalidCapacityReservationId.NotFound", "cr-9"),
        None if request.form.contains_key("NextToken") => response(&item("cr-2", TARGETED), ""),
        None => response(&item("cr-1", TARGETED), "<nextToken>more</nextToken>"),
    }));
    let terms = [term(serde_json::json!({"id": "cr-9"})), term(serde_json::json!({"tags": {"a": "b"}}))];
    let found = find(&clients, &terms).await.unwrap();
    let ids: Vec<(&str, i64)> = found.iter().map(|one| (one.status.id.as_str(), one.available)).collect();
    assert_eq!(ids, [("cr-1", 3), ("cr-2", 3)]);
    let seen = seen.lock().unwrap();
    let by_id = seen.iter().find(|request| request.form.contains_key("CapacityReservationId.1")).unwrap();
    assert_eq!((&*by_id.form["Filter.1.Name"], by_id.form.get("MaxResults")), ("state", None));
    let by_tag = seen.iter().find(|request| !request.form.contains_key("CapacityReservationId.1")).unwrap();
    assert_eq!((&*by_tag.form["Filter.2.Value.1"], &*by_tag.form["MaxResults"]), ("active", "1000"));
}

#[tokio::test]
async fn a_reservation_with_unexpected_values_is_ignored() {
    let block = "<reservationType>capacity-block</reservationType><endDate>2026-01-02T03:04:05.600Z</endDate><interruptible>false</interruptible>";
    let items = [
        item("cr-1", TARGETED),
        item("cr-2", "<instanceMatchCriteria>sometimes</instanceMatchCriteria>"),
        item("cr-3", &format!("{TARGETED}<reservationType>lunar</reservationType>")),
        item("cr-4", &format!("{TARGETED}{block}")),
        item("CR-5", TARGETED),
        item("cr-6", TARGETED).replace("111122223333", "self"),
    ];
    let (clients, _) = fake_aws::clients(Box::new(move |_| response(&items.concat(), "")));
    let found = find(&clients, &[term(serde_json::json!({"instanceMatchCriteria": "open"}))]).await.unwrap();
    let ids: Vec<&str> = found.iter().map(|one| one.status.id.as_str()).collect();
    assert_eq!(ids, ["cr-1", "cr-4"]);
    assert_eq!(found[0].status.reservation_type, "default");
    assert_eq!(found[1].status.end_time.as_ref().unwrap().0.to_string(), "2026-01-02T03:04:05Z");
}

#[tokio::test]
async fn a_refusal_and_an_unusable_response_are_returned_after_few_attempts() {
    let ask = async |response: Option<(u16, String)>| {
        let (clients, seen) = fake_aws::clients(Box::new(move |_| response.clone()));
        let error = find(&clients, &[term(serde_json::json!({"id": "cr-1"}))]).await.unwrap_err();
        let calls = seen.lock().unwrap().len();
        (error, calls)
    };
    let (error, calls) = ask(fake_aws::error("UnauthorizedOperation", "no")).await;
    assert_eq!((error.class, calls), (Class::Unauthorized, 1));
    let (error, calls) = ask(Some((500, "<!doctype html><title>500 Internal Server Error</title>".into()))).await;
    assert!(error.class == Class::Server && calls <= 3, "{error}, {calls} calls");
}

#[test]
fn the_status_is_sorted_without_duplicates_and_expired_reservations() {
    let list = [
        reservation("cr-2", "default", None),
        reservation("cr-1", "default", Some(UnixMillis(10_000))),
        reservation("cr-3", "default", Some(UnixMillis(1_000))),
        reservation("cr-2", "default", None),
    ];
    let ids: Vec<String> = status(list, UnixMillis(1_000)).into_iter().map(|one| one.id).collect();
    assert_eq!(ids, ["cr-1", "cr-2"]);
}

#[test]
fn c40_a_capacity_block_is_expiring_forty_minutes_before_its_end() {
    let end = UnixMillis(0) + 100 * MINUTE;
    let list = [reservation("cr-1", "capacity-block", Some(end)), reservation("cr-2", "default", Some(end))];
    let states = |now| status(list.clone(), now).into_iter().map(|one| one.state).collect::<Vec<_>>();
    assert_eq!(states(end - 40 * MINUTE - Duration::from_millis(1)), ["active", "active"]);
    assert_eq!(states(end - 40 * MINUTE), ["expiring", "active"]);
    assert_eq!(states(end), Vec::<String>::new());
    let again = |now| changes_in(&list, now);
    assert_eq!(again(end - 50 * MINUTE), Some(10 * MINUTE), "to the -40th minute");
    assert_eq!(again(end - 40 * MINUTE), Some(40 * MINUTE), "to the end");
    assert_eq!(again(end), None);
    assert_eq!(changes_in(&[reservation("cr-3", "default", None)], UnixMillis(0)), None);
}
