use serde_json::{Value, json};
use stowage_test_objects::node_pool;

use super::*;
use crate::catalog::embedded;
use crate::ec2::aws::errors::class_of;
use crate::ec2::preflight::finding::CheckResult;
use crate::test_support::fake_aws;

fn pool(requirements: Value) -> NodePool {
    node_pool("default", &json!({"spec": {"template": {"spec": {"requirements": requirements}}}}))
}

fn needs(key: &str, operator: &str, values: &[&str]) -> Value {
    json!({"key": key, "operator": operator, "values": values})
}

fn checks(quotas: &BTreeSet<Quota>) -> Vec<String> {
    quotas.iter().map(|quota| quota.check().replace("vCPU quota of ", "")).collect()
}

fn error(code: &str) -> ApiError {
    ApiError { action: GET_QUOTA, code: code.into(), message: "m".into(), class: class_of(code) }
}

const ON_DEMAND: Quota = Quota { group: 0, spot: false };
const SPOT: Quota = Quota { group: 0, spot: true };

#[test]
fn every_embedded_type_except_macs_has_a_quota() {
    for entry in &embedded().instance_types {
        let group = group_of(&entry.name).map(|group| GROUPS[group].name);
        assert_eq!(group.is_none(), entry.name.starts_with("mac"), "{}", entry.name);
    }
    for (name, group) in [
        ("m7g.large", "Standard"),
        ("im4gn.large", "Standard"),
        ("is4gen.large", "Standard"),
        ("d3en.xlarge", "Standard"),
        ("dl1.24xlarge", "DL"),
        ("g5.xlarge", "G and VT"),
        ("vt1.3xlarge", "G and VT"),
        ("p4d", "P"),
        ("p", "P"),
        ("inf2.xlarge", "Inf"),
        ("i4i.large", "Standard"),
        ("trn1.2xlarge", "Trn"),
        ("t3.micro", "Standard"),
        ("u-6tb1.112xlarge", "High Memory"),
        ("u7i-12tb.224xlarge", "High Memory"),
        ("x2gd.medium", "X"),
        ("hpc7g.4xlarge", "HPC"),
        ("h1.2xlarge", "Standard"),
    ] {
        assert_eq!(group_of(name).map(|group| GROUPS[group].name), Some(group), "{name}");
    }
    let mut codes: Vec<&str> = (0..GROUPS.len()).flat_map(Quota::of_group).filter_map(Quota::code).collect();
    let count = codes.len();
    codes.sort_unstable();
    codes.dedup();
    assert_eq!((codes.len(), count), (18, 18), "each code once");
}

#[test]
fn the_relevant_quotas_follow_from_the_requirements_of_the_pools() {
    let gpus = needs("karpenter.k8s.aws/instance-gpu-name", "Exists", &[]);
    for (pools, expected) in [
        (vec![], vec!["Standard on-demand", "Standard spot"]),
        (vec![json!([])], vec!["Standard on-demand", "Standard spot"]),
        (vec![json!([needs(labels::CAPACITY_TYPE, "In", &["on-demand"])])], vec!["Standard on-demand"]),
        (vec![json!([needs(labels::CAPACITY_TYPE, "NotIn", &["on-demand"])])], vec!["Standard spot"]),
        (
            vec![json!([needs(labels::CAPACITY_TYPE, "In", &["spot"])]), json!([])],
            vec!["Standard on-demand", "Standard spot"],
        ),
        (
            vec![json!([
                needs(labels::INSTANCE_FAMILY, "In", &["g5", "m5"]),
                needs(labels::CAPACITY_TYPE, "In", &["spot"])
            ])],
            vec!["Standard spot", "G and VT spot"],
        ),
        (
            vec![json!([needs(labels::INSTANCE_TYPE, "In", &["trn1.2xlarge", "u-6tb1.112xlarge"])])],
            vec!["Standard on-demand", "Standard spot", "Trn on-demand", "Trn spot", "High Memory on-demand"],
        ),
        (
            vec![json!([needs(labels::INSTANCE_CATEGORY, "NotIn", &["p", "x"])])],
            vec!["Standard on-demand", "Standard spot"],
        ),
        (
            vec![json!([gpus, needs(labels::CAPACITY_TYPE, "In", &["on-demand"])])],
            vec!["Standard on-demand", "G and VT on-demand", "P on-demand"],
        ),
    ] {
        let pools: Vec<NodePool> = pools.into_iter().map(pool).collect();
        assert_eq!(checks(&relevant(&pools)), expected, "{pools:?}");
    }
}

#[test]
fn a_nearly_exhausted_quota_is_a_warning_with_a_remediation() {
    let gpu = Quota { group: 1, spot: false };
    let results = |limits: &[(Quota, Result<i64, ApiError>)], used: Result<&[(Quota, i64)], ApiError>| {
        let limits = limits.iter().map(|(quota, limit)| (*quota, limit.clone())).collect();
        findings(&QuotaUsage { limits, used: used.map(|used| used.iter().copied().collect()) })
    };
    let found = results(&[(ON_DEMAND, Ok(256)), (SPOT, Ok(256)), (gpu, Ok(0))], Ok(&[(ON_DEMAND, 100), (SPOT, 240)]));
    let text = |finding: &Finding| format!("{} [{}] {}", finding.check, finding.result.as_str(), finding.detail);
    assert_eq!(
        found.iter().map(text).collect::<Vec<_>>(),
        [
            "vCPU quota of Standard on-demand [ok] 100 of 256 vCPUs are in use, 156 left",
            "vCPU quota of Standard spot [warning] 240 of 256 vCPUs are in use, 16 left",
            "vCPU quota of G and VT on-demand [warning] 0 of 0 vCPUs are in use, 0 left",
        ]
    );
    assert!(
        found[1].fix.ends_with("--service-code ec2 --quota-code L-34B43A08 --desired-value 512"),
        "{}",
        found[1].fix
    );
    let results_of = |found: Vec<Finding>| found.iter().map(|finding| finding.result).collect::<Vec<_>>();
    let exhausted = results(&[(ON_DEMAND, Ok(8)), (SPOT, Ok(8)), (gpu, Ok(8))], Ok(&[(ON_DEMAND, 8), (SPOT, 9)]));
    assert_eq!(
        results_of(exhausted),
        [CheckResult::Failed, CheckResult::Failed, CheckResult::Ok],
        "nothing can be launched"
    );
    let spot_exhausted = results(&[(ON_DEMAND, Ok(64)), (SPOT, Ok(8))], Ok(&[(SPOT, 8)]));
    assert_eq!(results_of(spot_exhausted), [CheckResult::Ok, CheckResult::Warning], "on-demand nodes can be launched");
    let refused = results(&[(ON_DEMAND, Err(error("AccessDeniedException"))), (SPOT, Ok(8))], Ok(&[(SPOT, 8)]));
    assert_eq!(results_of(refused.clone()), [CheckResult::Warning, CheckResult::Warning]);
    assert_eq!(refused[0].fix, "allow servicequotas:GetServiceQuota, which only this check needs");
    let unknown = results(&[(ON_DEMAND, Err(error("NoSuchResourceException")))], Ok(&[]));
    assert!(unknown[0].detail.starts_with("L-1216C47A is not known: "), "{}", unknown[0].detail);
    let uncounted = results(&[(ON_DEMAND, Ok(8))], Err(error("UnauthorizedOperation")));
    assert_eq!(results_of(uncounted), [CheckResult::Warning]);
    assert!(results(&[], Ok(&[])).is_empty());
}

#[tokio::test]
async fn instances_count_by_group_and_capacity_type() {
    let (clients, seen) = fake_aws::clients(Box::new(|request| {
        if request.action == "GetServiceQuota" {
            let value = if request.body.contains("L-1216C47A") { "256.0" } else { "64.0" };
            return Some((200, format!("{{\"Quota\": {{\"Value\": {value}}}}}")));
        }
        let item = |kind: &str, more: &str| {
            format!("<item><instanceId>i-1</instanceId><instanceType>{kind}</instanceType>{more}</item>")
        };
        let spot = "<instanceLifecycle>spot</instanceLifecycle>";
        let block = "<instanceLifecycle>capacity-block</instanceLifecycle>";
        let cpus = "<cpuOptions><coreCount>4</coreCount><threadsPerCore>2</threadsPerCore></cpuOptions>";
        let all = [
            item("m5.large", ""),
            item("c5.xlarge", ""),
            item("m5.large", spot),
            item("g99.new", cpus),
            item("g99.new", ""),
            item("p4d.24xlarge", block),
            item("mac2.metal", ""),
        ];
        let set =
            format!("<reservationSet><item><instancesSet>{}</instancesSet></item></reservationSet>", all.concat());
        fake_aws::ok("DescribeInstances", &set)
    }));
    let types = embedded().instance_types.iter().map(|entry| (entry.name.clone(), entry.clone())).collect();
    let usage = fetch(&clients, relevant(&[]), Some(&types)).await;
    let gpu = Quota { group: 1, spot: false };
    assert_eq!(usage.used, Ok(BTreeMap::from([(ON_DEMAND, 6), (SPOT, 2), (gpu, 8)])));
    assert_eq!(usage.limits, BTreeMap::from([(ON_DEMAND, Ok(256)), (SPOT, Ok(64)), (gpu, Ok(64))]));
    let calls = seen.lock().unwrap().iter().filter(|request| request.action == "GetServiceQuota").count();
    assert_eq!(calls, 3, "the standard quotas and those in use");
}
