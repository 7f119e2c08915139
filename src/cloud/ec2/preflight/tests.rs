//! The findings for each response, as they are printed.

use std::collections::HashMap;
use std::fmt::Write;

use aws_sdk_sqs::types::QueueAttributeName as Attribute;
use serde_json::json;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;
use stowage_test_objects::node_class;

use super::*;
use crate::ec2::Ec2Provider;
use crate::ec2::aws::errors::{ApiError, class_of};
use crate::ec2::launch::request::tests as fixtures;
use crate::ec2::node_class::ami_alias;
use crate::ec2::node_class::ami_alias::one_of;
use crate::ec2::node_class::cluster_facts::{ClusterError, ClusterFacts};
use crate::ec2::node_class::images::{Image, ImageError};
use crate::ec2::node_class::subnets::Subnet;
use crate::ec2::offerings::region_snapshot::RegionResponses;
use crate::ec2::offerings::spot_prices::SpotHistory;
use crate::ec2::options::Options;
use crate::ec2::preflight::class::{ClassChecks, NodeIdentity, ProfileState};
use crate::test_support::fake_aws;

fn error(action: &'static str, code: &str, message: &str) -> ApiError {
    ApiError { action, code: code.into(), message: message.into(), class: class_of(code) }
}

fn text(findings: &[Finding]) -> String {
    findings.iter().fold(String::new(), |mut out, one| {
        let fix = if one.fix.is_empty() { String::new() } else { format!(" -> {}", one.fix) };
        let _ = writeln!(out, "{} [{}] {}{fix}", one.check, one.result.as_str(), one.detail);
        out
    })
}

fn class(spec: serde_json::Value) -> Ec2NodeClass {
    let mut whole = json!({"role": null, "amiSelectorTerms": [{"id": "ami-1"}]});
    json_patch::merge(&mut whole, &spec);
    node_class("default", &json!({"spec": whole}))
}

fn subnet(id: &str, zone: &str, free: i64) -> Subnet {
    Subnet { id: id.into(), zone: zone.into(), zone_id: None, free }
}

fn image(
    id: &str,
    arch: &'static str,
    deprecated_at: Option<i64>,
) -> (Image, Vec<stowage_api::node_class::AmiRequirement>) {
    let image = Image {
        id: id.into(),
        name: format!("node-{arch}"),
        created_at: UnixMillis(1),
        deprecated_at: deprecated_at.map(UnixMillis),
        arch,
    };
    (image, vec![one_of(labels::ARCH, arch)])
}

fn good() -> ClassChecks {
    ClassChecks {
        subnets: Ok(vec![subnet("s-1", "a", 4000), subnet("s-2", "a", 91), subnet("s-3", "b", 251)]),
        security_groups: Ok(vec![("sg-1".into(), Some("nodes".into())), ("sg-2".into(), None)]),
        images: Some(Ok(vec![image("ami-1", "amd64", None)])),
        identity: NodeIdentity::Role(Ok(true), None),
        placement: None,
    }
}

#[test]
fn each_selection_of_a_class_has_a_finding() {
    let role = class(json!({"role": "path/nodes"}));
    let profiled = class(json!({"instanceProfile": "p"}));
    let denied = || error("ec2:DescribeSubnets", "UnauthorizedOperation", "You are not authorized");
    let nothing = ClassChecks {
        subnets: Ok(vec![]),
        security_groups: Ok(vec![]),
        images: Some(Ok(vec![])),
        identity: NodeIdentity::Role(Ok(false), None),
        placement: Some(Ok(None)),
    };
    let doubtful = ClassChecks {
        subnets: Ok(vec![subnet("s-1", "a", 9), subnet("s-2", "b", 900)]),
        images: Some(Ok(vec![image("ami-1", "arm64", Some(5))])),
        identity: NodeIdentity::Role(Err(error("iam:GetRole", "AccessDenied", "no")), Some("demo_1".into())),
        ..good()
    };
    let failing = ClassChecks {
        subnets: Err(denied()),
        images: Some(Err(ImageError::Alias(ami_alias::parameters("al2@latest", "1.34").unwrap_err()))),
        identity: NodeIdentity::Profile(Ok(ProfileState::Missing)),
        ..good()
    };
    let exhausted = ClassChecks {
        subnets: Ok(vec![subnet("s-1", "a", 0)]),
        images: None,
        identity: NodeIdentity::Profile(Ok(ProfileState::WithoutRole)),
        ..good()
    };
    let all = [(&role, good()), (&role, nothing), (&role, doubtful), (&profiled, failing), (&profiled, exhausted)];
    let texts: Vec<String> =
        all.iter().map(|(class, checks)| text(&class::findings(class, checks, UnixMillis(10)))).collect();
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn settings_are_checked_without_aws_resources() {
    let al2023 = class(json!({"amiFamily": "AL2023", "role": "r"}));
    let tagged = class(json!({"amiFamily": "Custom", "role": "r", "tags": {"karpenter.sh/nodepool": "x"}}));
    let all = [
        class::settings(&al2023, Some("10.0.0.0/16"), true, &Ok(None)),
        class::settings(&al2023, None, true, &Ok(None)),
        class::settings(&al2023, None, false, &Ok(None)),
        class::settings(&tagged, None, true, &Ok(None)),
    ];
    insta::assert_snapshot!(all.iter().map(|findings| text(findings)).collect::<String>());
}

#[test]
fn a_class_without_a_profile_is_resolved_with_a_placeholder_name() {
    let (resolved, profile) = class::resolved(&class(json!({"role": "r"})), good(), UnixMillis(0));
    let status = resolved.status.unwrap();
    assert_eq!((profile, status.instance_profile.as_deref()), (None, Some("default-preflight")));
    assert_eq!((status.subnets.len(), status.amis.len()), (3, 1));
    let checks = ClassChecks { identity: NodeIdentity::Profile(Ok(ProfileState::WithRole("r".into()))), ..good() };
    let (_, profile) = class::resolved(&class(json!({"instanceProfile": "p"})), checks, UnixMillis(0));
    assert_eq!(profile.as_deref(), Some("p"));
}

#[test]
fn the_queue_must_exist_be_readable_and_accept_events() {
    let readable = || Ok(());
    let findings_of = |attributes: &[(Attribute, &str)]| {
        let attributes: HashMap<_, _> =
            attributes.iter().map(|(key, value)| (key.clone(), (*value).to_owned())).collect();
        text(&queue_access::findings(
            Some("q"),
            Some(&Ok(queue_access::QueueResponses { received: readable(), attributes: Ok(attributes) })),
        ))
    };
    let statement = |effect: &str, principal: serde_json::Value, action: serde_json::Value| {
        json!({"Statement": [{"Effect": effect, "Principal": principal, "Action": action}]}).to_string()
    };
    let events = json!({"Service": ["events.amazonaws.com", "sqs.amazonaws.com"]});
    let good = statement("Allow", events.clone(), json!("sqs:SendMessage"));
    let denied = statement("Deny", events.clone(), json!(["sqs:SendMessage"]));
    let other = statement("Allow", json!({"AWS": "arn:aws:iam::1:root"}), json!("sqs:*"));
    let wide = statement("Allow", json!("*"), json!(["SQS:SendMessage"]));
    let texts = [
        text(&queue_access::findings(None, None)),
        text(&queue_access::findings(Some("q"), Some(&Err(error("sqs:GetQueueUrl", "QueueDoesNotExist", "no"))))),
        text(&queue_access::findings(Some("q"), Some(&Err(error("sqs:GetQueueUrl", "AccessDenied", "no"))))),
        findings_of(&[(Attribute::Policy, &good), (Attribute::SqsManagedSseEnabled, "true")]),
        findings_of(&[(Attribute::Policy, &wide), (Attribute::KmsMasterKeyId, "alias/own")]),
        findings_of(&[(Attribute::Policy, &denied), (Attribute::KmsMasterKeyId, "alias/aws/sqs")]),
        findings_of(&[(Attribute::Policy, &other)]),
        findings_of(&[(Attribute::Policy, "{")]),
        text(&queue_access::findings(
            Some("q"),
            Some(&Ok(queue_access::QueueResponses {
                received: Err(error("sqs:ReceiveMessage", "AccessDenied", "no")),
                attributes: Err(error("sqs:GetQueueAttributes", "AccessDenied", "no")),
            })),
        )),
    ];
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn a_denied_api_has_a_consequence_and_a_remediation() {
    let denied = |action| error(action, "UnauthorizedOperation", "You are not authorized");
    let live = RegionResponses {
        types: Some(Ok([("m5.large".to_owned(), crate::catalog::embedded().instance_types[0].clone())].into())),
        zones: Some(Ok([("m5.large".to_owned(), ["a".to_owned(), "b".to_owned()].into())].into())),
        on_demand: Some(Ok([("m5.large".to_owned(), MicroUsd(96_000))].into())),
        spot: Some(Ok(SpotHistory {
            prices: [("m5.large".to_owned(), [("a".to_owned(), MicroUsd(1)), ("b".to_owned(), MicroUsd(2))].into())]
                .into(),
            ..SpotHistory::default()
        })),
    };
    let refused = RegionResponses {
        types: Some(Err(denied("ec2:DescribeInstanceTypes"))),
        zones: Some(Ok(std::collections::BTreeMap::new())),
        on_demand: Some(Err(denied("pricing:GetProducts"))),
        spot: Some(Err(denied("ec2:DescribeSpotPriceHistory"))),
    };
    let isolated =
        RegionResponses { on_demand: None, spot: Some(Ok(SpotHistory::default())), ..RegionResponses::default() };
    let mut findings = [live, refused, isolated].iter().flat_map(account::region).collect::<Vec<_>>();
    findings.push(account::scores(&Err(denied("ec2:GetSpotPlacementScores"))));
    findings.push(account::scores(&Err(error("ec2:GetSpotPlacementScores", "DryRunOperation", "would have"))));
    let arn = || Ok("arn:aws:iam::111122223333:user/me".to_owned());
    let invalid_token = || Err(error("sts:GetCallerIdentity", "InvalidClientTokenId", "The token is invalid"));
    let key = ("AWS_ACCESS_KEY_ID", "AKIA");
    let irsa = [("AWS_ROLE_ARN", "arn:aws:iam::1:role/r"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "/irsa/token")];
    let agent = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.23/v1/credentials"),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "/pods/token"),
    ];
    for (answer, ec2_responds, environment) in [
        (arn(), true, vec![]),
        (invalid_token(), true, vec![]),
        (invalid_token(), false, vec![]),
        (invalid_token(), false, vec![irsa[0], irsa[1], agent[0], agent[1]]),
        (invalid_token(), false, agent.into()),
        (invalid_token(), false, vec![key, irsa[0], irsa[1]]),
    ] {
        let variable =
            |name: &str| environment.iter().find(|(known, _)| *known == name).map(|(_, is)| (*is).to_owned());
        findings.push(account::identity("us-east-1", &answer, ec2_responds, variable));
    }
    insta::assert_snapshot!(text(&findings));
}

#[test]
fn an_unknown_cluster_has_a_remediation() {
    let facts = ClusterFacts {
        name: "demo".into(),
        endpoint: "https://api".into(),
        ca_bundle: "Y2E=".into(),
        version: "1.34".into(),
        ..ClusterFacts::default()
    };
    let source = || error("eks:DescribeCluster", "ResourceNotFoundException", "No cluster found for name: demo.");
    let all = [
        Ok(facts.clone()),
        Ok(ClusterFacts { ca_bundle: String::new(), service_cidr: Some("10.0.0.0/16".into()), ..facts }),
        Err(ClusterError::Endpoint { cluster: "demo".into(), source: source() }),
        Err(ClusterError::EksVersion(source())),
        Err(ClusterError::NoEndpoint("demo".into())),
    ];
    insta::assert_snapshot!(text(&all.iter().map(account::cluster).collect::<Vec<_>>()));
}

#[test]
fn launch_permissions_follow_from_dry_run_responses() {
    let dry = |action| Err(error(action, "DryRunOperation", "would have succeeded"));
    let denied = |action, of: &str| Err(error(action, "UnauthorizedOperation", of));
    let (template, fleet, run) = ("ec2:CreateLaunchTemplate", "ec2:CreateFleet", "ec2:RunInstances");
    let gone = || Err(error(fleet, "InvalidLaunchTemplateName.NotFoundException", "no such template"));
    let on_template =
        "not authorized to perform: ec2:CreateFleet on resource: arn:aws:ec2:us-east-1:1:launch-template/*";
    let findings = [
        launch_rights::of_template(dry(template)),
        launch_rights::of_template(denied(template, "no")),
        launch_rights::of_template(Err(error(
            template,
            "InvalidUserData.Malformed",
            "User data is limited to 16384 bytes",
        ))),
        launch_rights::of_fleet(dry(fleet), "m5.large", false),
        launch_rights::of_fleet(gone(), "m5.large", false),
        launch_rights::of_fleet(gone(), "m5.large", true),
        launch_rights::of_fleet(denied(fleet, on_template), "m5.large", false),
        launch_rights::of_fleet(denied(fleet, on_template), "m5.large", true),
        launch_rights::of_fleet(denied(fleet, "no"), "m5.large", false),
        launch_rights::of_run(&[denied(run, "no"), dry(run)], "m5.large", Some("p")),
        launch_rights::of_run(&[dry(run)], "m5.large", None),
        launch_rights::of_run(&[denied(run, "no"), Err(error(run, "InvalidParameterValue", "x"))], "m5.large", None),
        launch_rights::of_run(&[], "m5.large", None),
    ];
    insta::assert_snapshot!(text(&findings));
}

#[tokio::test]
async fn an_error_without_a_response_is_one_line() {
    let (clients, _) = fake_aws::clients(Box::new(|_| None));
    let error = clients.ec2.describe_subnets().send().await.map_err(ApiError::of("ec2:DescribeSubnets")).unwrap_err();
    let text = finding::brief(&error);
    assert!(text.starts_with("ec2:DescribeSubnets: ") && text.contains("no answer"), "{text}");
    assert!(!text.contains('{') && !text.contains("ConnectorError"), "{text}");
    let long = crate::ec2::aws::errors::ApiError { message: "é".repeat(1_000), ..error };
    assert!(finding::brief(&long).chars().count() < 260);
}

#[tokio::test]
async fn the_dry_run_of_run_instances_has_the_metadata_options_of_the_class() {
    let (clients, seen) = fake_aws::clients(Box::new(|request| match request.action.as_str() {
        "DescribeLaunchTemplates" => fake_aws::ok("DescribeLaunchTemplates", "<launchTemplates/>"),
        _ => fake_aws::error("DryRunOperation", "would succeed"),
    }));
    let ec2 = Ec2Provider::new(clients, Options::of("c1"), fixtures::facts());
    let zones = Some(Ok([("m5.large".to_owned(), ["us-east-1a".to_owned()].into())].into()));
    ec2.offerings.learn_region(RegionResponses { zones, ..Default::default() });
    let class = fixtures::class(json!({"metadataOptions": {"httpTokens": "required"}}));
    launch_rights::rights(&ec2, &class, &[], None).await;
    let seen = seen.lock().unwrap();
    let call = seen.iter().find(|request| request.action == "RunInstances").unwrap();
    assert_eq!(call.form["MetadataOptions.HttpTokens"], "required");
}
