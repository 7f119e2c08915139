//! What each answer is judged to be, as it is printed.

use std::collections::HashMap;
use std::fmt::Write;

use aws_sdk_sqs::types::QueueAttributeName as Attribute;
use serde_json::json;

use super::*;
use crate::cloud::ec2::aws::client::wire;
use crate::cloud::ec2::aws::errors::{ApiError, class_of};
use crate::cloud::ec2::node_class::ami_alias;
use crate::cloud::ec2::node_class::ami_alias::one_of;
use crate::cloud::ec2::node_class::cluster_facts::{ClusterError, ClusterFacts};
use crate::cloud::ec2::node_class::images::{Image, ImageError};
use crate::cloud::ec2::node_class::subnets::Subnet;
use crate::cloud::ec2::offerings::region::Answers as RegionAnswers;
use crate::cloud::ec2::offerings::spot_prices::SpotHistory;
use crate::cloud::ec2::preflight::class::{Answers, Identity, Profile};
use crate::model::labels;
use crate::model::units::MicroUsd;
use crate::test_support::objects::node_class;

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
    deprecated_ms: Option<i64>,
) -> (Image, Vec<crate::api::node_class::AmiRequirement>) {
    let image = Image { id: id.into(), name: format!("node-{arch}"), created_ms: 1, deprecated_ms, arch };
    (image, vec![one_of(labels::ARCH, arch)])
}

fn good() -> Answers {
    Answers {
        subnets: Ok(vec![subnet("s-1", "a", 4000), subnet("s-2", "a", 91), subnet("s-3", "b", 251)]),
        security_groups: Ok(vec![("sg-1".into(), Some("nodes".into())), ("sg-2".into(), None)]),
        images: Some(Ok(vec![image("ami-1", "amd64", None)])),
        identity: Identity::Role(Ok(true), None),
        placement: None,
    }
}

#[test]
fn what_a_class_selects_is_judged() {
    let role = class(json!({"role": "path/nodes"}));
    let profiled = class(json!({"instanceProfile": "p"}));
    let denied = || error("ec2:DescribeSubnets", "UnauthorizedOperation", "You are not authorized");
    let nothing = Answers {
        subnets: Ok(vec![]),
        security_groups: Ok(vec![]),
        images: Some(Ok(vec![])),
        identity: Identity::Role(Ok(false), None),
        placement: Some(Ok(None)),
    };
    let doubtful = Answers {
        subnets: Ok(vec![subnet("s-1", "a", 9), subnet("s-2", "b", 900)]),
        images: Some(Ok(vec![image("ami-1", "arm64", Some(5))])),
        identity: Identity::Role(Err(error("iam:GetRole", "AccessDenied", "no")), Some("demo_1".into())),
        ..good()
    };
    let failing = Answers {
        subnets: Err(denied()),
        images: Some(Err(ImageError::Alias(ami_alias::parameters("al2@latest", "1.34").unwrap_err()))),
        identity: Identity::Profile(Ok(Profile::Missing)),
        ..good()
    };
    let exhausted = Answers {
        subnets: Ok(vec![subnet("s-1", "a", 0)]),
        images: None,
        identity: Identity::Profile(Ok(Profile::Empty)),
        ..good()
    };
    let all = [(&role, good()), (&role, nothing), (&role, doubtful), (&profiled, failing), (&profiled, exhausted)];
    let texts: Vec<String> = all.iter().map(|(class, answers)| text(&class::judge(class, answers, 10))).collect();
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn a_class_is_wrong_by_itself_only_for_what_the_cluster_does_not_decide() {
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
fn a_template_is_tried_with_a_profile_that_may_not_be_there_yet() {
    let (resolved, profile) = class::resolved(&class(json!({"role": "r"})), good(), 0);
    let status = resolved.status.unwrap();
    assert_eq!((profile, status.instance_profile.as_deref()), (None, Some("default-preflight")));
    assert_eq!((status.subnets.len(), status.amis.len()), (3, 1));
    let answers = Answers { identity: Identity::Profile(Ok(Profile::Of("r".into()))), ..good() };
    let (_, profile) = class::resolved(&class(json!({"instanceProfile": "p"})), answers, 0);
    assert_eq!(profile.as_deref(), Some("p"));
}

#[test]
fn the_queue_is_judged_by_what_events_need() {
    let gone = || Ok(());
    let judged = |attributes: &[(Attribute, &str)]| {
        let attributes: HashMap<_, _> =
            attributes.iter().map(|(key, value)| (key.clone(), (*value).to_owned())).collect();
        text(&queue::judge(Some("q"), Some(&Ok(queue::Queue { received: gone(), attributes: Ok(attributes) }))))
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
        text(&queue::judge(None, None)),
        text(&queue::judge(Some("q"), Some(&Err(error("sqs:GetQueueUrl", "QueueDoesNotExist", "no"))))),
        text(&queue::judge(Some("q"), Some(&Err(error("sqs:GetQueueUrl", "AccessDenied", "no"))))),
        judged(&[(Attribute::Policy, &good), (Attribute::SqsManagedSseEnabled, "true")]),
        judged(&[(Attribute::Policy, &wide), (Attribute::KmsMasterKeyId, "alias/own")]),
        judged(&[(Attribute::Policy, &denied), (Attribute::KmsMasterKeyId, "alias/aws/sqs")]),
        judged(&[(Attribute::Policy, &other)]),
        judged(&[(Attribute::Policy, "{")]),
        text(&queue::judge(
            Some("q"),
            Some(&Ok(queue::Queue {
                received: Err(error("sqs:ReceiveMessage", "AccessDenied", "no")),
                attributes: Err(error("sqs:GetQueueAttributes", "AccessDenied", "no")),
            })),
        )),
    ];
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn a_refused_api_says_what_is_lost() {
    let denied = |action| error(action, "UnauthorizedOperation", "You are not authorized");
    let live = RegionAnswers {
        types: Some(Ok([("m5.large".to_owned(), crate::cloud::catalog::embedded().instance_types[0].clone())].into())),
        zones: Some(Ok([("m5.large".to_owned(), ["a".to_owned(), "b".to_owned()].into())].into())),
        on_demand: Some(Ok([("m5.large".to_owned(), MicroUsd(96_000))].into())),
        spot: Some(Ok(SpotHistory {
            prices: [("m5.large".to_owned(), [("a".to_owned(), MicroUsd(1)), ("b".to_owned(), MicroUsd(2))].into())]
                .into(),
            ..SpotHistory::default()
        })),
    };
    let refused = RegionAnswers {
        types: Some(Err(denied("ec2:DescribeInstanceTypes"))),
        zones: Some(Ok(std::collections::BTreeMap::new())),
        on_demand: Some(Err(denied("pricing:GetProducts"))),
        spot: Some(Err(denied("ec2:DescribeSpotPriceHistory"))),
    };
    let isolated =
        RegionAnswers { on_demand: None, spot: Some(Ok(SpotHistory::default())), ..RegionAnswers::default() };
    let mut findings = [live, refused, isolated].iter().flat_map(account::region).collect::<Vec<_>>();
    findings.push(account::scores(&Err(denied("ec2:GetSpotPlacementScores"))));
    findings.push(account::scores(&Err(error("ec2:GetSpotPlacementScores", "DryRunOperation", "would have"))));
    let arn = || Ok("arn:aws:iam::111122223333:user/me".to_owned());
    let nobody = || Err(error("sts:GetCallerIdentity", "InvalidClientTokenId", "The token is invalid"));
    let key = ("AWS_ACCESS_KEY_ID", "AKIA");
    let irsa = [("AWS_ROLE_ARN", "arn:aws:iam::1:role/r"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "/irsa/token")];
    let agent = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.23/v1/credentials"),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "/pods/token"),
    ];
    for (answer, ec2_answers, environment) in [
        (arn(), true, vec![]),
        (nobody(), true, vec![]),
        (nobody(), false, vec![]),
        (nobody(), false, vec![irsa[0], irsa[1], agent[0], agent[1]]),
        (nobody(), false, agent.into()),
        (nobody(), false, vec![key, irsa[0], irsa[1]]),
    ] {
        let variable =
            |name: &str| environment.iter().find(|(known, _)| *known == name).map(|(_, is)| (*is).to_owned());
        findings.push(account::identity("us-east-1", &answer, ec2_answers, variable));
    }
    insta::assert_snapshot!(text(&findings));
}

#[test]
fn a_cluster_is_known_or_says_what_to_set() {
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
fn launch_rights_are_judged_by_dry_answers() {
    let dry = |action| Err(error(action, "DryRunOperation", "would have succeeded"));
    let denied = |action, of: &str| Err(error(action, "UnauthorizedOperation", of));
    let (template, fleet, run) = ("ec2:CreateLaunchTemplate", "ec2:CreateFleet", "ec2:RunInstances");
    let gone = || Err(error(fleet, "InvalidLaunchTemplateName.NotFoundException", "no such template"));
    let on_template =
        "not authorized to perform: ec2:CreateFleet on resource: arn:aws:ec2:us-east-1:1:launch-template/*";
    let findings = [
        launch::of_template(dry(template)),
        launch::of_template(denied(template, "no")),
        launch::of_template(Err(error(template, "InvalidUserData.Malformed", "User data is limited to 16384 bytes"))),
        launch::of_fleet(dry(fleet), "m5.large", false),
        launch::of_fleet(gone(), "m5.large", false),
        launch::of_fleet(gone(), "m5.large", true),
        launch::of_fleet(denied(fleet, on_template), "m5.large", false),
        launch::of_fleet(denied(fleet, on_template), "m5.large", true),
        launch::of_fleet(denied(fleet, "no"), "m5.large", false),
        launch::of_run(&[denied(run, "no"), dry(run)], "m5.large", Some("p")),
        launch::of_run(&[dry(run)], "m5.large", None),
        launch::of_run(&[denied(run, "no"), Err(error(run, "InvalidParameterValue", "x"))], "m5.large", None),
        launch::of_run(&[], "m5.large", None),
    ];
    insta::assert_snapshot!(text(&findings));
}

#[tokio::test]
async fn without_an_answer_the_error_is_one_line_without_innards() {
    let (clients, _) = wire::clients(Box::new(|_| None));
    let error = clients.ec2.describe_subnets().send().await.map_err(ApiError::of("ec2:DescribeSubnets")).unwrap_err();
    let text = finding::brief(&error);
    assert!(text.starts_with("ec2:DescribeSubnets: ") && text.contains("no answer"), "{text}");
    assert!(!text.contains('{') && !text.contains("ConnectorError"), "{text}");
    let long = crate::cloud::ec2::aws::errors::ApiError { message: "é".repeat(1_000), ..error };
    assert!(finding::brief(&long).chars().count() < 260);
}
