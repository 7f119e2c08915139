use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use stowage_api::hash;
use stowage_model::events::DeclaredEvent;

use super::*;
use crate::CloudError;
use crate::ec2::launch::request::tests::{claim, class, facts};
use crate::ec2::options::Options;
use crate::ec2::provider::Ec2Provider;
use crate::test_support::fake_aws;
use crate::{Cloud, NodeClassCloud};

/// A change of a claim.
type Change<'a> = &'a dyn Fn(&mut NodeClaim);

const CA: &str = "Y2EK";
const VERSION: &str = labels::EC2_NODE_CLASS_HASH_VERSION;
const HASH: &str = labels::EC2_NODE_CLASS_HASH;

/// A class with the hash annotations that the controller sets.
fn stamped(spec: Value) -> Ec2NodeClass {
    let mut class = class(spec);
    let annotations = class.metadata.annotations.get_or_insert_default();
    annotations.insert(HASH.into(), hash::node_class(&class.spec, hash::NodeClassVersion::V6, CA));
    annotations.insert(VERSION.into(), "v6".into());
    class
}

/// A claim launched from a class.
fn launched(class: &Ec2NodeClass) -> NodeClaim {
    let mut claim = claim("2026-01-01T00:00:00Z", json!({}));
    claim.metadata.annotations = class.metadata.annotations.clone();
    let own = claim.metadata.labels.get_or_insert_default();
    own.insert(labels::INSTANCE_TYPE.into(), "m5.large".into());
    claim.status =
        Some(serde_json::from_value(json!({"imageID": "ami-x86", "providerID": "aws:///us-east-1a/i-1"})).unwrap());
    claim
}

fn type_labels() -> BTreeMap<String, String> {
    BTreeMap::from([(labels::ARCH.to_owned(), "amd64".to_owned())])
}

fn instance() -> InstanceFacts {
    InstanceFacts { security_groups: ["sg-1".to_owned()].into(), subnet: Some("subnet-a".into()), reservation: None }
}

fn event_of(
    claim: &NodeClaim,
    class: &Ec2NodeClass,
    instance: &InstanceFacts,
) -> Result<Option<&'static DeclaredEvent>, DriftError> {
    let own = type_labels();
    let found =
        DriftInputs { type_labels: Some(&own), instance: Some(instance), placement_group: ResolvedGroup::Absent };
    Ok(drift_reason(claim, class, &found)?.map(|drift| drift.event))
}

#[test]
fn c31_a_changed_field_of_the_instance_drifts_and_a_changed_selector_does_not() {
    let base = json!({"kubelet": {"maxPods": 12}, "tags": {"a": "b"}});
    let claim = launched(&stamped(base.clone()));
    let drifts = Ok(Some(events::NODE_CLASS_DRIFT));
    for (patch, expected) in [
        (json!({}), Ok(None)),
        (json!({"userData": "echo"}), drifts.clone()),
        (json!({"role": "another"}), drifts.clone()),
        (json!({"role": null, "instanceProfile": "given"}), drifts.clone()),
        (json!({"tags": {"a": "c"}}), drifts.clone()),
        (json!({"blockDeviceMappings": [{"deviceName": "/dev/xvda", "ebs": {"volumeSize": "30Gi"}}]}), drifts.clone()),
        (json!({"instanceStorePolicy": "RAID0"}), drifts.clone()),
        (
            json!({"networkInterfaces": [{"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"}]}),
            drifts.clone(),
        ),
        (json!({"detailedMonitoring": true}), drifts.clone()),
        (json!({"associatePublicIPAddress": true}), drifts.clone()),
        (json!({"metadataOptions": {"httpTokens": "optional"}}), drifts.clone()),
        (json!({"connectionTracking": {"udpTimeout": 45}}), drifts.clone()),
        (json!({"context": "context-1"}), drifts.clone()),
        (json!({"cpuOptions": {"nestedVirtualization": "enabled"}}), drifts.clone()),
        (json!({"placementGroupSelector": {"name": "g"}}), drifts.clone()),
        (json!({"amiFamily": "Bottlerocket"}), drifts.clone()),
        // The same bytes in another order.
        (json!({"kubelet": {"maxPods": 21}}), drifts),
        (json!({"subnetSelectorTerms": [{"id": "subnet-a"}]}), Ok(None)),
        (json!({"securityGroupSelectorTerms": [{"name": "web"}]}), Ok(None)),
        (json!({"amiSelectorTerms": [{"name": "image-*"}]}), Ok(None)),
        (json!({"capacityReservationSelectorTerms": [{"id": "cr-1"}]}), Ok(None)),
        (json!({"ipPrefixCount": 4}), Ok(None)),
    ] {
        let mut spec = base.clone();
        for (key, value) in patch.as_object().unwrap() {
            spec[key] = value.clone();
        }
        assert_eq!(event_of(&claim, &stamped(spec), &instance()), expected, "{patch}");
    }
}

#[test]
fn c31_absent_hashes_and_hashes_of_another_version_are_no_drift() {
    let (before, after) = (stamped(json!({})), stamped(json!({"userData": "echo"})));
    let without = |key: &str| {
        let mut claim = launched(&before);
        claim.annotations_mut().remove(key);
        claim
    };
    let mut old = launched(&before);
    old.annotations_mut().insert(VERSION.into(), "v5".into());
    let mut unstamped = after.clone();
    unstamped.annotations_mut().clear();
    for (what, claim, class, expected) in [
        ("both present", launched(&before), &after, Some(events::NODE_CLASS_DRIFT)),
        ("no hash on the claim", without(HASH), &after, None),
        ("no version on the claim", without(VERSION), &after, None),
        ("another version", old, &after, None),
        ("nothing on the class", launched(&before), &unstamped, None),
    ] {
        assert_eq!(event_of(&claim, class, &instance()), Ok(expected), "{what}");
    }
}

#[test]
fn c31_setting_the_family_that_the_alias_implies_is_no_drift() {
    let terms = json!([{"alias": "al2023@latest"}]);
    let implied = stamped(json!({"amiFamily": null, "amiSelectorTerms": terms}));
    let explicit = stamped(json!({"amiFamily": "AL2023", "amiSelectorTerms": terms}));
    assert_eq!(event_of(&launched(&implied), &explicit, &instance()), Ok(None));
}

#[test]
fn c32_the_resolved_class_is_compared_with_the_instance_in_order() {
    let class = stamped(json!({}));
    let other_image = |claim: &mut NodeClaim| {
        if let Some(status) = &mut claim.status {
            status.image_id = Some("ami-old".into());
        }
    };
    let grouped = |claim: &mut NodeClaim| {
        claim.labels_mut().insert(labels::PLACEMENT_GROUP_ID.into(), "pg-1".into());
    };
    let groups = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<BTreeSet<String>>();
    let wrong = InstanceFacts {
        security_groups: groups(&["sg-2"]),
        subnet: Some("subnet-x".into()),
        reservation: Some("cr-x".into()),
    };
    let untouched = |_: &mut NodeClaim| {};
    let cases: Vec<(&str, Change<'_>, InstanceFacts, Option<&'static DeclaredEvent>)> = vec![
        ("no drift", &untouched, instance(), None),
        ("image before all else", &other_image, wrong.clone(), Some(events::AMI_DRIFT)),
        ("groups before subnet", &grouped, wrong.clone(), Some(events::SECURITY_GROUP_DRIFT)),
        (
            "an additional group",
            &untouched,
            InstanceFacts { security_groups: groups(&["sg-1", "sg-2"]), ..instance() },
            Some(events::SECURITY_GROUP_DRIFT),
        ),
        ("groups not reported", &untouched, InstanceFacts { security_groups: groups(&[]), ..instance() }, None),
        (
            "subnet before reservation",
            &grouped,
            InstanceFacts { security_groups: groups(&["sg-1"]), ..wrong.clone() },
            Some(events::SUBNET_DRIFT),
        ),
        (
            "reservation before placement group",
            &grouped,
            InstanceFacts { reservation: Some("cr-x".into()), ..instance() },
            Some(events::CAPACITY_RESERVATION_DRIFT),
        ),
        ("placement group", &grouped, instance(), Some(events::PLACEMENT_GROUP_DRIFT)),
    ];
    for (what, change, instance, expected) in cases {
        let mut claim = launched(&class);
        change(&mut claim);
        assert_eq!(event_of(&claim, &class, &instance), Ok(expected), "{what}");
    }
    let mut fewer = class.clone();
    if let Some(status) = &mut fewer.status {
        status.security_groups.push(stowage_api::node_class::SecurityGroupStatus { id: "sg-9".into(), name: None });
    }
    assert_eq!(
        event_of(&launched(&class), &fewer, &instance()),
        Ok(Some(events::SECURITY_GROUP_DRIFT)),
        "a missing group"
    );
}

#[test]
fn c32_a_placement_group_is_compared_by_id_after_its_resolution() {
    let class = stamped(json!({"placementGroupSelector": {"name": "g"}}));
    let own = type_labels();
    let mut claim = launched(&class);
    let evaluate = |claim: &NodeClaim, placement_group| {
        let found = DriftInputs { type_labels: Some(&own), instance: Some(&instance()), placement_group };
        drift_reason(claim, &class, &found).map(|drift| drift.map(|drift| drift.event))
    };
    assert_eq!(evaluate(&claim, ResolvedGroup::Id("pg-1")), Ok(Some(events::PLACEMENT_GROUP_DRIFT)));
    assert_eq!(evaluate(&claim, ResolvedGroup::Unknown), Err(DriftError::PlacementGroupUnknown));
    claim.labels_mut().insert(labels::PLACEMENT_GROUP_ID.into(), "pg-1".into());
    assert_eq!(evaluate(&claim, ResolvedGroup::Id("pg-1")), Ok(None));
    assert_eq!(evaluate(&claim, ResolvedGroup::Absent), Ok(Some(events::PLACEMENT_GROUP_DRIFT)));
}

#[test]
fn c32_a_missing_input_is_an_error_and_no_drift() {
    let class = stamped(json!({}));
    let own = type_labels();
    let evaluate = |claim: &NodeClaim, class: &Ec2NodeClass, found: DriftInputs<'_>| drift_reason(claim, class, &found);
    let facts = instance();
    let whole = DriftInputs { type_labels: Some(&own), instance: Some(&facts), placement_group: ResolvedGroup::Absent };
    let mut imageless = launched(&class);
    imageless.status = None;
    assert_eq!(evaluate(&imageless, &class, whole), Err(DriftError::NoImageId));
    let untyped = DriftInputs { type_labels: None, ..whole };
    assert_eq!(evaluate(&launched(&class), &class, untyped), Err(DriftError::UnknownType("m5.large".into())));
    let unlisted = DriftInputs { instance: None, ..whole };
    assert_eq!(evaluate(&launched(&class), &class, unlisted), Err(DriftError::InstanceUnknown));
    let strange = BTreeMap::from([(labels::ARCH.to_owned(), "riscv64".to_owned())]);
    let unbootable = DriftInputs { type_labels: Some(&strange), ..whole };
    assert_eq!(evaluate(&launched(&class), &class, unbootable), Err(DriftError::NoImageFor("m5.large".into())));
    let with = |change: fn(&mut stowage_api::Ec2NodeClassStatus)| {
        let mut changed = class.clone();
        change(changed.status.get_or_insert_default());
        evaluate(&launched(&class), &changed, whole)
    };
    assert_eq!(with(|status| status.amis.clear()), Err(DriftError::NoImages));
    assert_eq!(with(|status| status.security_groups.clear()), Err(DriftError::NoSecurityGroups));
    assert_eq!(with(|status| status.subnets.clear()), Err(DriftError::NoSubnets));
}

#[tokio::test]
async fn c32_a_reservation_that_expired_under_an_instance_is_no_drift() {
    let asked = Arc::new(Mutex::new(vec![]));
    let seen = Arc::clone(&asked);
    let (clients, _) = fake_aws::clients(Box::new(move |request| {
        let alone = request.form.contains_key("InstanceId.1");
        seen.lock().unwrap().push(alone);
        let reserved = "<capacityReservationId>cr-x</capacityReservationId><capacityReservationSpecification>\
             <capacityReservationPreference>capacity-reservations-only</capacityReservationPreference></capacityReservationSpecification>";
        let item = format!(
            "<item><instancesSet><item><instanceId>i-1</instanceId><instanceType>m5.large</instanceType><subnetId>subnet-a</subnetId>\
             <groupSet><item><groupId>sg-1</groupId></item></groupSet>{}</item></instancesSet></item>",
            if alone { "" } else { reserved }
        );
        fake_aws::ok("DescribeInstances", &format!("<reservationSet>{item}</reservationSet>"))
    }));
    let ec2 = Ec2Provider::new(clients, Options::of("c1"), facts());
    let class = stamped(json!({}));
    let claim = launched(&class);
    let unlisted = ec2.drift(&claim, &class).await.unwrap_err();
    assert_eq!(unlisted, CloudError::Other(DriftError::InstanceUnknown.to_string()));
    ec2.list().await.unwrap();
    assert_eq!(ec2.drift(&claim, &class).await, Ok(None));
    assert_eq!(*asked.lock().unwrap(), [false, true], "re-validated with a call for the one instance");
}
