use std::sync::Mutex;

use super::*;
use crate::test_support::fake_aws;

fn item(id: &str, more: &str) -> String {
    format!(
        "<item><instancesSet><item><instanceId>{id}</instanceId><instanceType>m5.large</instanceType><imageId>ami-1</imageId>\
         <instanceState><name>running</name></instanceState><placement><availabilityZone>us-east-1a</availabilityZone></placement>\
         <launchTime>2026-01-02T03:04:05.000Z</launchTime>{more}</item></instancesSet></item>"
    )
}

fn reservations(items: &str) -> Option<(u16, String)> {
    fake_aws::ok("DescribeInstances", &format!("<reservationSet>{items}</reservationSet>"))
}

fn ids(request: &fake_aws::Request) -> Vec<String> {
    (1..).map_while(|n| request.form.get(&format!("InstanceId.{n}")).cloned()).collect()
}

fn counted(seen: &Mutex<Vec<fake_aws::Request>>) -> Vec<usize> {
    seen.lock().unwrap().iter().map(|request| ids(request).len()).collect()
}

#[test]
fn instance_ids_are_parsed_from_provider_ids() {
    for (provider_id, expected) in [
        ("aws:///us-east-1a/i-0123", Some("i-0123")),
        ("aws:///i-0123", Some("i-0123")),
        ("kwok-aws:///a/i-0123", None),
        ("aws:///us-east-1a/", None),
        ("i-0123", None),
    ] {
        assert_eq!(instance_id(provider_id), expected, "{provider_id}");
    }
    assert_eq!(provider_id("a", "i-1"), "aws:///a/i-1");
}

#[tokio::test]
async fn an_instance_is_converted_with_its_tags_and_capacity_type() {
    let (clients, _) = fake_aws::clients(Box::new(|_| {
        let tags = format!(
            "<tagSet><item><key>{LAUNCH_TAG}</key><value>uid</value></item><item><key>{CLAIM_TAG}</key><value>claim</value></item></tagSet>"
        );
        let spot = item("i-1", &format!("{tags}<spotInstanceRequestId>sir-1</spotInstanceRequestId>"));
        // An on-demand instance that EC2 placed into an open reservation.
        let open = item(
            "i-2",
            "<capacityReservationId>cr-1</capacityReservationId><subnetId>subnet-1</subnetId>\
             <groupSet><item><groupId>sg-1</groupId></item></groupSet>",
        );
        reservations(&(spot + &open))
    }));
    let found = of_cluster(&clients, "c1").await.unwrap();
    assert_eq!(
        found[0].0,
        Instance {
            id: "i-1".into(),
            provider_id: "aws:///us-east-1a/i-1".into(),
            client_token: "uid".into(),
            node_claim: "claim".into(),
            instance_type: "m5.large".into(),
            zone: "us-east-1a".into(),
            capacity_type: CapacityType::Spot,
            reservation: None,
            partition: None,
            image_id: "ami-1".into(),
            launched_at: UnixMillis(1_767_323_045_000),
            state: InstanceState::Running,
        }
    );
    assert_eq!(found[1].0.capacity_type, CapacityType::OnDemand);
    let facts = InstanceFacts {
        security_groups: ["sg-1".to_owned()].into(),
        subnet: Some("subnet-1".into()),
        reservation: None,
    };
    assert_eq!(found[1].1, facts);
}

#[tokio::test]
async fn c39_only_instances_with_the_clusters_and_a_pools_tags_are_listed() {
    let (clients, seen) = fake_aws::clients(Box::new(|_| reservations("")));
    assert!(of_cluster(&clients, "c1").await.unwrap().is_empty());
    let form = &seen.lock().unwrap()[0].form;
    let filter = |n: usize| (form[&format!("Filter.{n}.Name")].as_str(), form[&format!("Filter.{n}.Value.1")].as_str());
    assert_eq!(filter(1), ("tag-key", labels::NODE_POOL));
    assert_eq!(filter(2), ("tag-key", labels::EC2_NODE_CLASS));
    assert_eq!(filter(3), ("tag:eks:eks-cluster-name", "c1"));
}

#[tokio::test]
async fn only_instances_restricted_to_a_reservation_are_reserved() {
    let (clients, _) = fake_aws::clients(Box::new(|_| {
        let only = "<capacityReservationSpecification><capacityReservationPreference>capacity-reservations-only</capacityReservationPreference></capacityReservationSpecification>";
        let id = "<capacityReservationId>cr-1</capacityReservationId>";
        let lifecycle = |kind: &str| format!("{id}{only}<instanceLifecycle>{kind}</instanceLifecycle>");
        reservations(
            &[
                item("i-1", &format!("{id}{only}")),
                item("i-2", &lifecycle("capacity-block")),
                item("i-3", &lifecycle("interruptible-capacity-reservation")),
                item("i-4", only),
                item("i-5", id),
            ]
            .concat(),
        )
    }));
    let found = of_cluster(&clients, "c1").await.unwrap();
    let kinds: Vec<_> = found.iter().map(|(one, _)| one.reservation.as_ref().map(|one| (&*one.id, one.kind))).collect();
    let of = |kind| Some(("cr-1", kind));
    assert_eq!(
        kinds,
        [
            of(ReservationKind::OnDemand),
            of(ReservationKind::CapacityBlock),
            of(ReservationKind::Interruptible),
            None,
            None
        ]
    );
    let types: Vec<_> = found.iter().map(|(one, _)| one.capacity_type).collect();
    let (reserved, on_demand) = (CapacityType::Reserved, CapacityType::OnDemand);
    assert_eq!(types, [reserved, reserved, reserved, on_demand, on_demand]);
}

#[tokio::test]
async fn the_partition_is_that_of_ec2() {
    let (clients, _) = fake_aws::clients(Box::new(|_| {
        let placed = |id: &str, number: i32| {
            let zone = "<availabilityZone>us-east-1a</availabilityZone>";
            item(id, "").replace(zone, &format!("{zone}<partitionNumber>{number}</partitionNumber>"))
        };
        reservations(&(placed("i-1", 3) + &placed("i-2", 0) + &item("i-3", "")))
    }));
    let found = of_cluster(&clients, "c1").await.unwrap();
    assert_eq!(found.iter().map(|(one, _)| one.partition).collect::<Vec<_>>(), [Some(3), None, None]);
}

#[tokio::test]
async fn unknown_ids_do_not_hide_the_others() {
    let gone = ["i-gone", "i-lost"];
    // EC2 names the unknown ids, or some of them; without names each id gets a call of its own.
    for (named, expected) in [
        ("The instance IDs 'i-gone, i-lost' do not exist", vec![4, 2]),
        ("The instance ID 'i-gone' does not exist", vec![4, 3, 1, 1, 1]),
        ("not found", vec![4, 1, 1, 1, 1]),
    ] {
        let (clients, seen) = fake_aws::clients(Box::new(move |request| {
            let ids = ids(request);
            if ids.iter().any(|id| gone.contains(&id.as_str())) {
                return fake_aws::error("InvalidInstanceID.NotFound", named);
            }
            reservations(&ids.iter().map(|id| item(id, "")).collect::<String>())
        }));
        let describer = describer(&clients);
        let ask = |id: &str| describer.ask(id.to_owned());
        let responses = futures::future::join4(ask("i-1"), ask("i-gone"), ask("i-2"), ask("i-lost")).await;
        assert!(matches!(responses.0, Some(Ok(Some(_)))) && matches!(responses.2, Some(Ok(Some(_)))));
        assert_eq!((responses.1, responses.3), (Some(Ok(None)), Some(Ok(None))));
        assert_eq!(counted(&seen), expected, "{named}");
    }
}

#[tokio::test]
async fn terminated_instances_of_a_batch_cost_no_further_call() {
    let (clients, seen) = fake_aws::clients(Box::new(|_| reservations(&item("i-1", ""))));
    let ids: Vec<String> = (1..=500).map(|n| format!("i-{n}")).collect();
    let found = describe_all(clients, ids).await;
    assert_eq!(found.values().filter(|one| matches!(one, Ok(Some(_)))).count(), 1);
    assert_eq!((found.len(), counted(&seen)), (500, vec![500]));
}

#[tokio::test]
async fn an_unauthorized_describe_is_not_repeated_for_each_id() {
    let (clients, seen) = fake_aws::clients(Box::new(|_| fake_aws::error("UnauthorizedOperation", "no")));
    let responses = describe_all(clients, vec!["i-1".into(), "i-2".into()]).await;
    assert!(
        responses.values().all(|response| response.as_ref().is_err_and(|error| error.class == Class::Unauthorized))
    );
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn terminations_share_a_call_and_missing_ids_get_their_own() {
    let (clients, seen) = fake_aws::clients(Box::new(|request| {
        let ids = ids(request);
        if ids == ["i-gone"] {
            return fake_aws::error("InvalidInstanceID.NotFound", "i-gone");
        }
        let going = ids.iter().filter(|id| *id != "i-gone").map(|id| {
            format!("<item><instanceId>{id}</instanceId><currentState><name>shutting-down</name></currentState></item>")
        });
        fake_aws::ok("TerminateInstances", &format!("<instancesSet>{}</instancesSet>", going.collect::<String>()))
    }));
    let terminator = terminator(&clients);
    let ask = |id: &str| terminator.ask(id.to_owned());
    let responses = futures::future::join3(ask("i-1"), ask("i-gone"), ask("i-2")).await;
    assert_eq!(responses, (Some(Ok(true)), Some(Ok(false)), Some(Ok(true))));
    assert_eq!(counted(&seen), [3, 1]);
}

#[tokio::test]
async fn the_instances_of_several_launch_groups_are_found_in_one_call() {
    let (clients, seen) = fake_aws::clients(Box::new(|_| {
        let of = |id: &str, group: &str| {
            item(id, &format!("<tagSet><item><key>{LAUNCH_TAG}</key><value>{group}</value></item></tagSet>"))
        };
        reservations(&[of("i-1", "a"), of("i-2", "b"), of("i-3", "a")].concat())
    }));
    let finder = finder(&clients, "c1");
    let responses = futures::future::join_all(["a", "b", "c"].map(|group| finder.ask(group.to_owned()))).await;
    let ids = |found: Vec<Instance>| found.into_iter().map(|one| one.id).collect::<Vec<_>>();
    let found: Vec<_> = responses.into_iter().map(|response| ids(response.unwrap().unwrap())).collect();
    assert_eq!(found, [vec!["i-1", "i-3"], vec!["i-2"], vec![]]);
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 1);
    let form = &seen[0].form;
    assert_eq!(form["Filter.1.Name"], "tag:stowage.dev/launch");
    let asked: BTreeSet<&str> = (1..=3).map(|n| &*form[&format!("Filter.1.Value.{n}")]).collect();
    assert_eq!(asked, ["a", "b", "c"].into());
    assert_eq!((&*form["Filter.2.Value.1"], &*form["Filter.3.Name"]), ("c1", "instance-state-name"));
}

#[tokio::test]
async fn a_failed_search_fails_for_each_group() {
    let (clients, _) = fake_aws::clients(Box::new(|_| fake_aws::error("UnauthorizedOperation", "no")));
    let responses = of_launch_groups(clients, "c1".into(), vec!["a".into(), "b".into()]).await;
    assert_eq!(responses.len(), 2);
    assert!(
        responses.values().all(|response| response.as_ref().is_err_and(|error| error.class == Class::Unauthorized))
    );
}

#[tokio::test]
async fn instances_of_a_launch_group_are_found_by_tag_oldest_first() {
    let (clients, seen) = fake_aws::clients(Box::new(|_| {
        let young = item("i-1", "").replace("2026-01-02", "2026-01-03");
        reservations(&(young + &item("i-2", "")))
    }));
    let found = of_launch_group(&clients, "c1", "group").await.unwrap();
    assert_eq!(found.iter().map(|instance| &*instance.id).collect::<Vec<_>>(), ["i-2", "i-1"]);
    let form = &seen.lock().unwrap()[0].form;
    assert_eq!((&*form["Filter.1.Name"], &*form["Filter.1.Value.1"]), ("tag:stowage.dev/launch", "group"));
    assert_eq!(form["Filter.3.Value.2"], "running");
}
