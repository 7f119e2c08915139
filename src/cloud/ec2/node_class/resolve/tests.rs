use stowage_model::events;
use stowage_test_objects::node_class;

use super::*;
use crate::ec2::aws::errors::Class;
use crate::ec2::bootstrap::kubelet_validation;
use crate::ec2::bootstrap::kubelet_validation::Gate;
use crate::ec2::node_class::select_capacity_reservations::tests::reservation;
use serde_json::json;

fn class(spec: serde_json::Value) -> Ec2NodeClass {
    let mut whole = json!({"role": null});
    json_patch::merge(&mut whole, &spec);
    node_class("default", &json!({"spec": whole}))
}

fn throttled() -> ApiError {
    ApiError { action: "ec2:X", code: "RequestLimitExceeded".into(), message: "m".into(), class: Class::Throttled }
}

fn subnet() -> Subnet {
    Subnet { id: "subnet-1".into(), zone: "a".into(), zone_id: None, free: 1 }
}

fn responses() -> ClassResponses {
    ClassResponses {
        subnets: Ok(vec![subnet()]),
        security_groups: Ok(vec![("sg-1".into(), None)]),
        images: Ok(vec![]),
        profile: Ok("profile".into()),
        placement: None,
        reservations: None,
    }
}

fn verdict<'a>(verdicts: &'a [(&'static str, Verdict)], kind: &str) -> &'a Verdict {
    &verdicts.iter().find(|(other, _)| *other == kind).unwrap().1
}

#[test]
fn an_empty_selection_is_false_and_its_list_is_empty() {
    let before = Ec2NodeClassStatus { subnets: subnets::status(vec![subnet()]), ..Ec2NodeClassStatus::default() };
    let nothing =
        ClassResponses { subnets: Ok(vec![]), security_groups: Ok(vec![]), placement: Some(Ok(None)), ..responses() };
    let (status, verdicts) = resolved_status(&before, nothing, UnixMillis(0));
    assert!(status.subnets.is_empty());
    let kinds: Vec<&str> = verdicts.iter().map(|(kind, _)| *kind).chain([conditions::VALIDATION_SUCCEEDED]).collect();
    assert_eq!(kinds, conditions::EC2_NODE_CLASS_DEPENDENTS);
    for (kind, reason) in [
        (SUBNETS_READY, "SubnetsNotFound"),
        (SECURITY_GROUPS_READY, "SecurityGroupsNotFound"),
        (AMIS_READY, "AMINotFound"),
        (PLACEMENT_GROUP_READY, "PlacementGroupNotFound"),
    ] {
        assert!(matches!(verdict(&verdicts, kind), Verdict::False(found, _) if found.reason() == reason), "{kind}");
    }
    assert_eq!(verdict(&verdicts, INSTANCE_PROFILE_READY), &Verdict::True);
    assert_eq!(status.instance_profile.as_deref(), Some("profile"));
}

#[test]
fn a_failed_api_keeps_its_part_of_the_status() {
    let before = Ec2NodeClassStatus {
        subnets: subnets::status(vec![subnet()]),
        instance_profile: Some("old".into()),
        ..Ec2NodeClassStatus::default()
    };
    let failed = ClassResponses {
        subnets: Err(throttled()),
        profile: Err(throttled()),
        images: Err(ImageError::Api(throttled())),
        placement: Some(Err(throttled())),
        ..responses()
    };
    let (status, verdicts) = resolved_status(&before, failed, UnixMillis(0));
    assert_eq!((status.subnets.len(), status.instance_profile.as_deref()), (1, Some("old")));
    for kind in [SUBNETS_READY, INSTANCE_PROFILE_READY, AMIS_READY] {
        assert!(matches!(verdict(&verdicts, kind), Verdict::Unjudged(_)), "{kind}");
    }
    assert!(matches!(
        verdict(&verdicts, PLACEMENT_GROUP_READY),
        Verdict::False(events::PLACEMENT_GROUP_RESOLUTION_FAILED, _)
    ));
}

#[test]
fn unreadable_reservations_are_reported_and_do_not_block_the_class() {
    let known = reservation("cr-1", "capacity-block", Some(UnixMillis(41 * 60_000)));
    let before = Ec2NodeClassStatus { capacity_reservations: vec![known.clone()], ..Ec2NodeClassStatus::default() };
    let (status, verdicts) = resolved_status(&before, responses(), UnixMillis(0));
    assert_eq!(verdict(&verdicts, CAPACITY_RESERVATIONS_READY), &Verdict::True, "without terms");
    assert!(status.capacity_reservations.is_empty());
    let none = ClassResponses { reservations: Some(Ok(vec![])), ..responses() };
    let (status, verdicts) = resolved_status(&before, none, UnixMillis(0));
    assert_eq!(
        (verdict(&verdicts, CAPACITY_RESERVATIONS_READY), status.capacity_reservations.len()),
        (&Verdict::True, 0)
    );
    let found = select_capacity_reservations::DescribedReservation { status: known, available: 1 };
    let (status, verdicts) = resolved_status(
        &Ec2NodeClassStatus::default(),
        ClassResponses { reservations: Some(Ok(vec![found])), ..responses() },
        UnixMillis(0),
    );
    assert_eq!((verdict(&verdicts, CAPACITY_RESERVATIONS_READY), &status), (&Verdict::True, &with(&status, &before)));
    let failed = || ClassResponses { reservations: Some(Err(throttled())), ..responses() };
    let (status, verdicts) = resolved_status(&before, failed(), UnixMillis(0));
    assert_eq!(status.capacity_reservations, before.capacity_reservations);
    assert!(matches!(
        verdict(&verdicts, CAPACITY_RESERVATIONS_READY),
        Verdict::Degraded(events::CAPACITY_RESERVATIONS_UNREADABLE, _)
    ));
    let (status, _) = resolved_status(&before, failed(), UnixMillis(60_000));
    assert_eq!(status.capacity_reservations[0].state, "expiring", "time passes without the API");
    let (status, verdicts) = resolved_status(&Ec2NodeClassStatus::default(), failed(), UnixMillis(0));
    assert!(status.capacity_reservations.is_empty());
    let Verdict::Degraded(_, message) = verdict(&verdicts, CAPACITY_RESERVATIONS_READY) else { panic!("reported") };
    assert!(message.contains("none is used") && message.contains("RequestLimitExceeded"), "{message}");
}

/// A status with the reservations of another.
fn with(status: &Ec2NodeClassStatus, other: &Ec2NodeClassStatus) -> Ec2NodeClassStatus {
    Ec2NodeClassStatus { capacity_reservations: other.capacity_reservations.clone(), ..status.clone() }
}

#[test]
fn c29_an_alias_without_images_for_the_version_is_reported() {
    let error = crate::ec2::node_class::ami_alias::parameters("al2@latest", "1.34").unwrap_err();
    let (_, verdicts) = resolved_status(
        &Ec2NodeClassStatus::default(),
        ClassResponses { images: Err(error.into()), ..responses() },
        UnixMillis(0),
    );
    assert!(matches!(verdict(&verdicts, AMIS_READY), Verdict::False(events::UNSUPPORTED_ALIAS, _)));
}

fn all_true() -> Vec<(&'static str, Verdict)> {
    BEFORE_VALIDATION.map(|kind| (kind, Verdict::True)).into()
}

fn reason(class: &Ec2NodeClass, verdicts: &[(&'static str, Verdict)], cidr: Option<&str>) -> Option<&'static str> {
    let kubelet = kubelet_validation::validate(&class.spec, Gate::Off);
    validate(class, verdicts, cidr, kubelet.as_ref().err()).map(|verdict| match verdict {
        Verdict::False(event, _) => event.reason(),
        Verdict::Unknown(reason, _) => reason,
        Verdict::True | Verdict::Degraded(..) | Verdict::Unjudged(_) => "",
    })
}

#[test]
fn c33_validation_reports_the_first_problem() {
    let al2023 = class(json!({"amiFamily": "AL2023", "kubelet": {"nonsense": 1}}));
    assert_eq!(reason(&al2023, &all_true(), None), Some("ClusterCIDRResolutionFailed"));
    assert_eq!(reason(&al2023, &all_true(), Some("10.0.0.0/16")), Some("InvalidKubeletConfiguration"));
    let tagged = class(json!({"amiFamily": "Custom", "tags": {"karpenter.sh/nodepool": "x"}}));
    let mut verdicts = all_true();
    verdicts[0].1 = Verdict::False(events::AMI_NOT_FOUND, String::new());
    assert_eq!(reason(&tagged, &verdicts, None), Some("DependenciesNotReady"));
    verdicts[0].1 = Verdict::Unjudged(String::new());
    assert!(matches!(validate(&tagged, &verdicts, None, None), Some(Verdict::Unknown("DependenciesNotReady", _))));
    assert_eq!(reason(&tagged, &all_true(), None), Some("TagValidationFailed"));
    let many = |count| (0..count).map(|n| (format!("tag-{n}"), json!(""))).collect::<serde_json::Map<_, _>>();
    let with_tags = |count| class(json!({"amiFamily": "Custom", "tags": many(count)}));
    assert_eq!(
        reason(&with_tags(45), &all_true(), None),
        Some("TagValidationFailed"),
        "six more and a launch is refused"
    );
    assert_eq!(reason(&with_tags(44), &all_true(), None), None);
    assert_eq!(reason(&class(json!({"amiFamily": "Custom"})), &all_true(), None), None, "dry runs decide");
}
