use stowage_api::parse_requirements;
use stowage_model::events;
use stowage_test_objects::node_class;

use super::*;
use crate::ec2::aws::client::AwsClients;
use crate::ec2::launch::request::tests as fixtures;
use crate::ec2::node_class::class_store::NodeClassStore;
use crate::ec2::offerings::offering_store::OfferingStore;
use crate::ec2::options::Options;

fn validator(clients: AwsClients, options: Options) -> DryRunValidator {
    let options = Arc::new(options);
    let offerings = Arc::new(OfferingStore::new(&clients.region, Arc::clone(&options)));
    let node_classes = Arc::new(NodeClassStore::new(fixtures::facts()));
    DryRunValidator::new(Arc::new(LaunchContext::new(clients, options, offerings, node_classes)))
}

fn error(code: &str, message: &str) -> ApiError {
    let class = crate::ec2::aws::errors::class_of(code);
    ApiError { action: "ec2:X", code: code.into(), message: message.into(), class }
}

fn reason(outcome: DryRunOutcome) -> (&'static str, bool) {
    match outcome {
        DryRunOutcome::Passed => ("passed", true),
        DryRunOutcome::Final(Verdict::False(event, _)) => (event.reason(), true),
        DryRunOutcome::Transient(Verdict::False(event, _)) => (event.reason(), false),
        DryRunOutcome::Transient(Verdict::Unjudged(_)) => ("unjudged", false),
        DryRunOutcome::Final(other) | DryRunOutcome::Transient(other) => panic!("{other:?}"),
    }
}

#[test]
fn c33_each_denied_action_has_its_reason() {
    let denied = error("UnauthorizedOperation", "no");
    assert_eq!(reason(template_outcome(&denied)), ("CreateLaunchTemplateAuthCheckFailed", true));
    let long = error("InvalidUserData.Malformed", "User data is limited to 16384 bytes");
    assert_eq!(reason(template_outcome(&long)), ("UserDataSizeLimitExceeded", true));
    assert_eq!(reason(template_outcome(&error("InternalError", ""))), ("unjudged", false));
    assert_eq!(reason(fleet_outcome(Err(denied.clone()))), ("CreateFleetAuthCheckFailed", true));
    assert_eq!(reason(fleet_outcome(Err(error("DryRunOperation", "")))), ("passed", true));
    assert_eq!(reason(run_outcome(&[Err(denied)], true)), ("RunInstancesAuthCheckFailed", true));
}

#[test]
fn c33_one_permitted_subnet_suffices_else_the_first_decides() {
    let (denied, dry) = (error("UnauthorizedOperation", "no"), error("DryRunOperation", ""));
    assert_eq!(reason(run_outcome(&[Err(denied.clone()), Err(dry)], true)), ("passed", true));
    let responses = [Err(error("InvalidSubnetID.NotFound", "")), Err(denied)];
    assert_eq!(reason(run_outcome(&responses, true)), ("unjudged", false));
    assert_eq!(reason(run_outcome(&[], true)), ("unjudged", false));
}

#[tokio::test]
async fn c33_subnets_in_zones_without_the_type_are_tried_last() {
    let (clients, _) = crate::test_support::fake_aws::clients(Box::new(|_| None));
    let validator = validator(clients, Options::of("c1"));
    let mut class = fixtures::class(serde_json::json!({}));
    let subnets = &mut class.status.as_mut().unwrap().subnets;
    let second = serde_json::json!({"id": "subnet-b2", "zone": "us-east-1b", "zoneID": "use1-az2"});
    subnets.push(serde_json::from_value(second).unwrap());
    for (zones, expected) in [
        (&["us-east-1a", "us-east-1b"][..], ["subnet-a", "subnet-b", "subnet-b2"]),
        (&["us-east-1b"], ["subnet-b", "subnet-b2", "subnet-a"]),
    ] {
        let zones = zones.iter().map(|zone| (*zone).to_owned()).collect();
        let zones = Some(Ok([("m5.large".to_owned(), zones)].into()));
        validator
            .context
            .offerings
            .learn_region(crate::ec2::offerings::region_snapshot::RegionResponses { zones, ..Default::default() });
        let Ok(tried) = validator.inputs(&class, &[]) else { panic!("the class has something to launch") };
        assert_eq!((tried.instance_type.as_str(), &tried.subnets[..]), ("m5.large", &expected.map(str::to_owned)[..]));
    }
}

#[tokio::test]
async fn c33_dedicated_tenancy_is_tried_where_a_pool_admits_it() {
    let (clients, _) = crate::test_support::fake_aws::clients(Box::new(|_| None));
    let validator = validator(clients, Options::of("c1"));
    let class = fixtures::class(serde_json::json!({}));
    let tenancy = |operator: &str, values: &[&str]| {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        let key = labels::INSTANCE_TENANCY.to_owned();
        parse_requirements(&[Requirement { key, operator: operator.into(), values, min_values: None }]).unwrap()
    };
    let unrestricted = Requirements::default;
    for (what, demands, expected) in [
        ("no pool", vec![], "default"),
        ("a pool without a tenancy", vec![unrestricted()], "default"),
        ("shared hardware", vec![tenancy("In", &["default"])], "default"),
        ("not dedicated", vec![tenancy("NotIn", &["dedicated"])], "default"),
        ("dedicated", vec![tenancy("In", &["dedicated"])], "dedicated"),
        ("either", vec![tenancy("In", &["default", "dedicated"])], "dedicated"),
        ("any", vec![tenancy("Exists", &[])], "dedicated"),
        ("one of two pools", vec![unrestricted(), tenancy("In", &["dedicated"])], "dedicated"),
    ] {
        let Ok(tried) = validator.inputs(&class, &demands) else { panic!("the class has something to launch") };
        assert_eq!(tried.template.tenancy, expected, "{what}");
    }
}

#[test]
fn c33_an_unknown_profile_is_reported_only_if_the_user_named_it() {
    let unknown = || [Err(error("InvalidParameterValue", "Value (x) ... Invalid IAM Instance Profile name"))];
    assert_eq!(reason(run_outcome(&unknown(), true)), ("unjudged", false));
    assert_eq!(reason(run_outcome(&unknown(), false)), ("InstanceProfileNotFound", false));
}

#[tokio::test]
async fn invalid_user_data_is_reported_without_a_dry_run() {
    let class = |user_data: &str| {
        let mut class = fixtures::class(serde_json::json!({"amiFamily": "Bottlerocket", "userData": user_data}));
        class.metadata.uid = Some(user_data.to_owned());
        class
    };
    let (clients, seen) = crate::test_support::fake_aws::clients(Box::new(|_| None));
    let options = Options { dry_run: false, ..Options::of("c1") };
    let validator = validator(clients, options);
    let verdict = validator.validate(&class("settings = 3"), &[], UnixMillis(0)).await;
    assert!(matches!(verdict, Verdict::False(events::USER_DATA_INVALID, _)), "{verdict:?}");
    assert_eq!(validator.validate(&class("[settings.motd]"), &[], UnixMillis(0)).await, Verdict::True);
    assert!(seen.lock().unwrap().is_empty(), "EC2 was not called");
}

#[test]
fn c33_a_verdict_holds_for_half_an_hour_unless_an_annotation_changes() {
    let mut class = node_class("default", &serde_json::json!({}));
    let verdicts = Verdicts::default();
    verdicts.put("u".into(), inputs_of(&class, &[]), Verdict::True, UnixMillis(0));
    assert_eq!(verdicts.get("u", inputs_of(&class, &[]), UnixMillis(-1) + TTL), Some(Verdict::True));
    assert_eq!(verdicts.get("u", inputs_of(&class, &[]), UnixMillis(0) + TTL), None);
    class.metadata.annotations = Some([("touched".to_owned(), "1".to_owned())].into());
    assert_eq!(verdicts.get("u", inputs_of(&class, &[]), UnixMillis(1)), None);
}

#[test]
fn a_refusal_holds_for_90_seconds() {
    let verdicts = Verdicts::default();
    let refused = Verdict::False(stowage_model::events::RUN_INSTANCES_AUTH_CHECK_FAILED, "denied".into());
    verdicts.put("u".into(), 1, refused.clone(), UnixMillis(0));
    assert_eq!(verdicts.get("u", 1, UnixMillis(89_999)), Some(refused));
    assert_eq!(verdicts.get("u", 1, UnixMillis(90_000)), None);
}

#[test]
fn the_order_of_subnets_and_security_groups_does_not_change_a_verdict() {
    let mut class = fixtures::class(serde_json::json!({}));
    let status = class.status.as_mut().unwrap();
    let second = serde_json::json!({"id": "sg-2"});
    status.security_groups.push(serde_json::from_value(second).unwrap());
    let before = inputs_of(&class, &[]);
    let status = class.status.as_mut().unwrap();
    status.subnets.reverse();
    status.security_groups.reverse();
    assert_eq!(inputs_of(&class, &[]), before);
    class.status.as_mut().unwrap().subnets.pop();
    assert_ne!(inputs_of(&class, &[]), before, "another set of subnets");
}

#[tokio::test]
async fn the_dry_run_of_run_instances_has_the_metadata_options_of_the_class() {
    let (clients, seen) = crate::test_support::fake_aws::clients(Box::new(|request| match request.action.as_str() {
        "DescribeLaunchTemplates" => crate::test_support::fake_aws::ok(
            "DescribeLaunchTemplates",
            "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId></item></launchTemplates>",
        ),
        _ => crate::test_support::fake_aws::error("DryRunOperation", "would succeed"),
    }));
    let validator = validator(clients, Options::of("c1"));
    let zones = Some(Ok([("m5.large".to_owned(), ["us-east-1a".to_owned()].into())].into()));
    let responses = crate::ec2::offerings::region_snapshot::RegionResponses { zones, ..Default::default() };
    validator.context.offerings.learn_region(responses);
    let class = fixtures::class(serde_json::json!({"metadataOptions": {
        "httpEndpoint": "enabled", "httpProtocolIPv6": "disabled", "httpPutResponseHopLimit": 1, "httpTokens": "required",
    }}));
    assert_eq!(validator.validate(&class, &[], UnixMillis(0)).await, Verdict::True);
    let seen = seen.lock().unwrap();
    let call = seen.iter().find(|request| request.action == "RunInstances").unwrap();
    for (key, value) in [
        ("HttpTokens", "required"),
        ("HttpPutResponseHopLimit", "1"),
        ("HttpEndpoint", "enabled"),
        ("HttpProtocolIpv6", "disabled"),
        ("InstanceMetadataTags", "disabled"),
    ] {
        assert_eq!(call.form.get(&format!("MetadataOptions.{key}")).map(String::as_str), Some(value), "{key}");
    }
}
