//! EC2's vCPU quotas in the region, and their use by the instances of the account.
//!
//! Groups of instance families share a quota. The standard group is always checked; another group where one of its instances
//! runs, or where a NodePool names one of its families.

use std::collections::{BTreeMap, BTreeSet};

use aws_sdk_ec2::types::{Filter, Instance, InstanceLifecycleType};
use futures::future::join_all;
use stowage_api::NodePool;
use stowage_api::parse_requirements;
use stowage_model::labels;
use stowage_model::offering::CapacityType;

use crate::catalog::RawInstanceType;
use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::preflight::finding::{Finding, brief, remediation};

const GET_QUOTA: &str = "servicequotas:GetServiceQuota";
/// The service code of EC2.
const SERVICE_CODE: &str = "ec2";
/// A quota with less than one in this many vCPUs left is a warning.
const WARNING_DIVISOR: i64 = 5;
/// vCPUs of the smallest instance.
const MIN_VCPUS: i64 = 1;

/// Instance families that share a quota.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    /// AWS's name.
    name: &'static str,
    /// Prefixes of their instance types, up to the first digit or dash.
    prefixes: &'static [&'static str],
    /// Code of the on-demand quota.
    on_demand: &'static str,
    /// Code of the spot quota; `None` where there is none.
    spot: Option<&'static str>,
}

/// The codes are the same in every region.
static GROUPS: [Group; 10] = [
    Group {
        name: "Standard",
        prefixes: &["a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"],
        on_demand: "L-1216C47A",
        spot: Some("L-34B43A08"),
    },
    Group { name: "G and VT", prefixes: &["g", "gr", "vt"], on_demand: "L-DB2E81BA", spot: Some("L-3819A6DF") },
    Group { name: "P", prefixes: &["p"], on_demand: "L-417A185B", spot: Some("L-7212CCBC") },
    Group { name: "Inf", prefixes: &["inf"], on_demand: "L-1945791B", spot: Some("L-B5D1601B") },
    Group { name: "Trn", prefixes: &["trn"], on_demand: "L-2C3B7624", spot: Some("L-6B0D517C") },
    Group { name: "X", prefixes: &["x"], on_demand: "L-7295265B", spot: Some("L-E3A00192") },
    Group { name: "F", prefixes: &["f"], on_demand: "L-74FC7D96", spot: Some("L-88CF9481") },
    Group { name: "DL", prefixes: &["dl"], on_demand: "L-6E869C2A", spot: Some("L-85EED4F7") },
    Group { name: "High Memory", prefixes: &["u"], on_demand: "L-43DA4232", spot: None },
    Group { name: "HPC", prefixes: &["hpc"], on_demand: "L-F7808C92", spot: None },
];

/// A quota: an index in [`GROUPS`], and the capacity type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quota {
    group: usize,
    spot: bool,
}

impl Quota {
    /// The quotas of a group.
    fn of_group(group: usize) -> impl Iterator<Item = Self> {
        [false, true].into_iter().map(move |spot| Self { group, spot }).filter(|quota| quota.code().is_some())
    }

    /// The quota code; `None` where there is no such quota.
    fn code(self) -> Option<&'static str> {
        let group = &GROUPS[self.group];
        if self.spot { group.spot } else { Some(group.on_demand) }
    }

    fn check(self) -> String {
        format!("vCPU quota of {} {}", GROUPS[self.group].name, if self.spot { "spot" } else { "on-demand" })
    }
}

/// Quotas and their use.
#[derive(Debug)]
pub struct QuotaUsage {
    /// vCPUs by quota.
    pub limits: BTreeMap<Quota, Result<i64, ApiError>>,
    /// vCPUs in use by quota.
    pub used: Result<BTreeMap<Quota, i64>, ApiError>,
}

/// The group of an instance type, family or category, as an index in [`GROUPS`].
fn group_of(name: &str) -> Option<usize> {
    let end = name.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(name.len());
    GROUPS.iter().position(|group| group.prefixes.contains(&&name[..end]))
}

/// The quotas that limit these NodePools: the standard ones, and those of the families that they name. Spot or on-demand only
/// where every pool requires it.
pub fn relevant(pools: &[NodePool]) -> BTreeSet<Quota> {
    const NAMING: [&str; 3] = [labels::INSTANCE_TYPE, labels::INSTANCE_FAMILY, labels::INSTANCE_CATEGORY];
    const GPU: &str = "karpenter.k8s.aws/instance-gpu-";
    const ACCELERATOR: &str = "karpenter.k8s.aws/instance-accelerator-";
    let named = |group: &str| GROUPS.iter().position(|known| known.name == group);
    let mut groups: BTreeSet<usize> = named("Standard").into_iter().collect();
    for requirement in pools.iter().flat_map(|pool| &pool.spec.template.spec.requirements) {
        let key = requirement.key.as_str();
        match requirement.operator.as_str() {
            "NotIn" | "DoesNotExist" => {}
            "In" if NAMING.contains(&key) => {
                groups.extend(requirement.values.iter().filter_map(|value| group_of(value)));
            }
            _ if key.starts_with(GPU) => groups.extend(["G and VT", "P"].into_iter().filter_map(named)),
            _ if key.starts_with(ACCELERATOR) => groups.extend(["Inf", "Trn"].into_iter().filter_map(named)),
            _ => {}
        }
    }
    let admitted = |spot: bool| {
        let word = if spot { CapacityType::Spot } else { CapacityType::OnDemand };
        let admits = |pool: &NodePool| {
            let requirements = parse_requirements(&pool.spec.template.spec.requirements).unwrap_or_default();
            requirements.get(labels::CAPACITY_TYPE).is_none_or(|types| types.contains(word.as_str()))
        };
        pools.is_empty() || pools.iter().any(admits)
    };
    let kinds = [false, true].map(admitted);
    groups.into_iter().flat_map(Quota::of_group).filter(|quota| kinds[usize::from(quota.spot)]).collect()
}

/// Reads the vCPUs in use, and the limits of `relevant` quotas and of those in use.
pub async fn fetch(
    clients: &AwsClients,
    relevant: BTreeSet<Quota>,
    types: Option<&BTreeMap<String, RawInstanceType>>,
) -> QuotaUsage {
    let used = used(clients, types).await;
    let mut all = relevant;
    all.extend(used.iter().flat_map(BTreeMap::keys));
    let limits = join_all(all.into_iter().map(|quota| async move { (quota, limit(clients, quota).await) })).await;
    QuotaUsage { limits: limits.into_iter().collect(), used }
}

/// The limit of a quota in vCPUs.
async fn limit(clients: &AwsClients, quota: Quota) -> Result<i64, ApiError> {
    let call =
        clients.quotas.get_service_quota().service_code(SERVICE_CODE).quota_code(quota.code().unwrap_or_default());
    let response = call.send().await.map_err(ApiError::of(GET_QUOTA))?;
    let value = response.quota.and_then(|quota| quota.value).unwrap_or_default();
    // AWS returns whole vCPUs as doubles, far below 2^53.
    #[allow(clippy::cast_possible_truncation)]
    Ok(value as i64)
}

/// vCPUs of the account's pending and running instances, by quota.
async fn used(
    clients: &AwsClients,
    types: Option<&BTreeMap<String, RawInstanceType>>,
) -> Result<BTreeMap<Quota, i64>, ApiError> {
    let active = Filter::builder().name("instance-state-name").values("pending").values("running").build();
    let mut pages = clients.ec2.describe_instances().filters(active).max_results(1000).into_paginator().send();
    let mut used = BTreeMap::new();
    while let Some(page) = pages.next().await {
        let page = page.map_err(ApiError::of("ec2:DescribeInstances"))?;
        for instance in page.reservations().iter().flat_map(aws_sdk_ec2::types::Reservation::instances) {
            if let Some((quota, vcpus)) = usage(instance, types) {
                *used.entry(quota).or_default() += vcpus;
            }
        }
    }
    Ok(used)
}

/// The quota of an instance and its vCPUs; `None` for a family without a quota, and for a capacity block.
fn usage(instance: &Instance, types: Option<&BTreeMap<String, RawInstanceType>>) -> Option<(Quota, i64)> {
    let name = instance.instance_type()?.as_str();
    let lifecycle = instance.instance_lifecycle().map(InstanceLifecycleType::as_str).unwrap_or_default();
    if lifecycle == "capacity-block" {
        return None;
    }
    let quota = Quota { group: group_of(name)?, spot: lifecycle == "spot" };
    let listed = types.and_then(|types| types.get(name)).map(|entry| entry.vcpu);
    let reported = || {
        let options = instance.cpu_options()?;
        Some(i64::from(options.core_count()?) * i64::from(options.threads_per_core()?))
    };
    Some((quota, listed.or_else(reported)?))
}

/// The findings about the quotas. With both quotas of the standard group exhausted no node can be launched.
pub fn findings(usage: &QuotaUsage) -> Vec<Finding> {
    let in_use = |quota: &Quota| usage.used.as_ref().map(|used| used.get(quota).copied().unwrap_or_default());
    let is_exhausted = |quota: &Quota, limit: &Result<i64, ApiError>| matches!((limit, in_use(quota)), (Ok(limit), Ok(used)) if limit - used < MIN_VCPUS);
    let mut standard = usage.limits.iter().filter(|(quota, _)| quota.group == 0).peekable();
    let none_left = standard.peek().is_some() && standard.all(|(quota, limit)| is_exhausted(quota, limit));
    let of = |(quota, limit): (&Quota, &Result<i64, ApiError>)| {
        let finding = row(*quota, limit.as_ref(), in_use(quota));
        if none_left && quota.group == 0 {
            Finding::failed(&finding.check, finding.detail, finding.fix)
        } else {
            finding
        }
    };
    usage.limits.iter().map(of).collect()
}

fn row(quota: Quota, limit: Result<&i64, &ApiError>, used: Result<i64, &ApiError>) -> Finding {
    let (check, code) = (quota.check(), quota.code().unwrap_or_default());
    let limit = match limit {
        Ok(limit) => *limit,
        Err(error) if error.class == Class::Unauthorized => {
            let help = format!("allow {GET_QUOTA}, which only this check needs");
            return Finding::warning(&check, format!("not known: {}", brief(error)), help);
        }
        Err(error) => {
            return Finding::warning(&check, format!("{code} is not known: {}", brief(error)), remediation(error));
        }
    };
    let used = match used {
        Ok(used) => used,
        Err(error) => {
            let detail = format!("{limit} vCPUs; how many are in use is not known: {}", brief(error));
            return Finding::warning(&check, detail, remediation(error));
        }
    };
    let left = (limit - used).max(0);
    let detail = format!("{used} of {limit} vCPUs are in use, {left} left");
    if left >= MIN_VCPUS && left.saturating_mul(WARNING_DIVISOR) >= limit {
        return Finding::ok(&check, detail);
    }
    let more = limit.max(used).max(32).saturating_mul(2);
    let help = format!(
        "request an increase: aws service-quotas request-service-quota-increase --service-code {SERVICE_CODE} --quota-code {code} \
         --desired-value {more}"
    );
    Finding::warning(&check, detail, help)
}

#[cfg(test)]
mod tests;
