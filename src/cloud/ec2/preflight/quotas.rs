//! EC2's quotas of vCPUs in the region: how many there are, and how many every instance of the account uses now.
//!
//! Families share quotas in groups. The standard group is always looked at; another where an instance of it runs, or where a
//! NodePool names it.

use std::collections::{BTreeMap, BTreeSet};

use aws_sdk_ec2::types::{Filter, Instance, InstanceLifecycleType};
use futures::future::join_all;

use crate::api::NodePool;
use crate::cloud::catalog::RawInstanceType;
use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::preflight::finding::{Finding, brief, fix};
use crate::model::labels;
use crate::model::offering::CapacityType;
use crate::model::requirement::Requirements;

const GET_QUOTA: &str = "servicequotas:GetServiceQuota";
/// Service Quotas' name of EC2.
const SERVICE: &str = "ec2";
/// Of a quota less than one in so many left is told.
const FEW: i64 = 5;
/// vCPUs that at least must be left for an instance.
const LEAST: i64 = 1;

/// Families that share quotas.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    /// As AWS calls it.
    name: &'static str,
    /// What their instance types begin with, up to the first digit or dash.
    prefixes: &'static [&'static str],
    /// Code of the quota of on-demand instances.
    on_demand: &'static str,
    /// Code of the quota of spot instances; `None` where there are none.
    spot: Option<&'static str>,
}

/// Codes are the same in every region.
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

/// One quota: a group by its place, and how it is bought.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quota {
    group: usize,
    spot: bool,
}

impl Quota {
    /// Every quota of a group.
    fn of_group(group: usize) -> impl Iterator<Item = Self> {
        [false, true].into_iter().map(move |spot| Self { group, spot }).filter(|quota| quota.code().is_some())
    }

    /// Its code; `None` where there is no such quota.
    fn code(self) -> Option<&'static str> {
        let group = &GROUPS[self.group];
        if self.spot { group.spot } else { Some(group.on_demand) }
    }

    fn check(self) -> String {
        format!("vCPU quota of {} {}", GROUPS[self.group].name, if self.spot { "spot" } else { "on-demand" })
    }
}

/// What was answered.
#[derive(Debug)]
pub struct Answers {
    /// vCPUs by quota.
    pub limits: BTreeMap<Quota, Result<i64, ApiError>>,
    /// vCPUs in use by quota.
    pub used: Result<BTreeMap<Quota, i64>, ApiError>,
}

/// The group of an instance type, an instance family or a category, by its place in [`GROUPS`].
fn group_of(name: &str) -> Option<usize> {
    let end = name.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(name.len());
    GROUPS.iter().position(|group| group.prefixes.contains(&&name[..end]))
}

/// The quotas that NodePools can come up against: the standard ones, and those of the families that they name. Spot or
/// on-demand where every pool says so.
pub fn wanted(pools: &[NodePool]) -> BTreeSet<Quota> {
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
            let requirements = Requirements::from_api(&pool.spec.template.spec.requirements).unwrap_or_default();
            requirements.get(labels::CAPACITY_TYPE).is_none_or(|types| types.contains(word.as_str()))
        };
        pools.is_empty() || pools.iter().any(admits)
    };
    let kinds = [false, true].map(admitted);
    groups.into_iter().flat_map(Quota::of_group).filter(|quota| kinds[usize::from(quota.spot)]).collect()
}

/// Asks for what instances use, and for the quotas of `wanted` and of whatever is in use.
pub async fn ask(
    clients: &Clients,
    wanted: BTreeSet<Quota>,
    types: Option<&BTreeMap<String, RawInstanceType>>,
) -> Answers {
    let used = used(clients, types).await;
    let mut all = wanted;
    all.extend(used.iter().flat_map(BTreeMap::keys));
    let limits = join_all(all.into_iter().map(|quota| async move { (quota, limit(clients, quota).await) })).await;
    Answers { limits: limits.into_iter().collect(), used }
}

/// vCPUs of a quota.
async fn limit(clients: &Clients, quota: Quota) -> Result<i64, ApiError> {
    let call = clients.quotas.get_service_quota().service_code(SERVICE).quota_code(quota.code().unwrap_or_default());
    let answer = call.send().await.map_err(ApiError::of(GET_QUOTA))?;
    let value = answer.quota.and_then(|quota| quota.value).unwrap_or_default();
    // AWS gives whole vCPUs as doubles; far fewer than 2^53.
    #[allow(clippy::cast_possible_truncation)]
    Ok(value as i64)
}

/// vCPUs of the account's instances that are up or coming up, by quota.
async fn used(
    clients: &Clients,
    types: Option<&BTreeMap<String, RawInstanceType>>,
) -> Result<BTreeMap<Quota, i64>, ApiError> {
    let up = Filter::builder().name("instance-state-name").values("pending").values("running").build();
    let mut pages = clients.ec2.describe_instances().filters(up).max_results(1000).into_paginator().send();
    let mut used = BTreeMap::new();
    while let Some(page) = pages.next().await {
        let page = page.map_err(ApiError::of("ec2:DescribeInstances"))?;
        for instance in page.reservations().iter().flat_map(aws_sdk_ec2::types::Reservation::instances) {
            if let Some((quota, vcpus)) = share(instance, types) {
                *used.entry(quota).or_default() += vcpus;
            }
        }
    }
    Ok(used)
}

/// What an instance takes of which quota; nothing where it is of a family without one, or in a capacity block.
fn share(instance: &Instance, types: Option<&BTreeMap<String, RawInstanceType>>) -> Option<(Quota, i64)> {
    let name = instance.instance_type()?.as_str();
    let lifecycle = instance.instance_lifecycle().map(InstanceLifecycleType::as_str).unwrap_or_default();
    if lifecycle == "capacity-block" {
        return None;
    }
    let quota = Quota { group: group_of(name)?, spot: lifecycle == "spot" };
    let listed = types.and_then(|types| types.get(name)).map(|entry| entry.vcpu);
    let told = || {
        let options = instance.cpu_options()?;
        Some(i64::from(options.core_count()?) * i64::from(options.threads_per_core()?))
    };
    Some((quota, listed.or_else(told)?))
}

/// What the answers mean. Where nothing is left of any quota of the standard group, no node can be launched.
pub fn judge(answers: &Answers) -> Vec<Finding> {
    let in_use = |quota: &Quota| answers.used.as_ref().map(|used| used.get(quota).copied().unwrap_or_default());
    let is_spent = |quota: &Quota, limit: &Result<i64, ApiError>| matches!((limit, in_use(quota)), (Ok(limit), Ok(used)) if limit - used < LEAST);
    let mut standard = answers.limits.iter().filter(|(quota, _)| quota.group == 0).peekable();
    let none_left = standard.peek().is_some() && standard.all(|(quota, limit)| is_spent(quota, limit));
    let of = |(quota, limit): (&Quota, &Result<i64, ApiError>)| {
        let finding = row(*quota, limit.as_ref(), in_use(quota));
        if none_left && quota.group == 0 {
            Finding::failed(&finding.check, finding.detail, finding.fix)
        } else {
            finding
        }
    };
    answers.limits.iter().map(of).collect()
}

fn row(quota: Quota, limit: Result<&i64, &ApiError>, used: Result<i64, &ApiError>) -> Finding {
    let (check, code) = (quota.check(), quota.code().unwrap_or_default());
    let limit = match limit {
        Ok(limit) => *limit,
        Err(error) if error.class == Class::Unauthorized => {
            let help = format!("allow {GET_QUOTA}, which only this check needs");
            return Finding::warning(&check, format!("not known: {}", brief(error)), help);
        }
        Err(error) => return Finding::warning(&check, format!("{code} is not known: {}", brief(error)), fix(error)),
    };
    let used = match used {
        Ok(used) => used,
        Err(error) => {
            let detail = format!("{limit} vCPUs; how many are in use is not known: {}", brief(error));
            return Finding::warning(&check, detail, fix(error));
        }
    };
    let left = (limit - used).max(0);
    let detail = format!("{used} of {limit} vCPUs are in use, {left} left");
    if left >= LEAST && left.saturating_mul(FEW) >= limit {
        return Finding::ok(&check, detail);
    }
    let more = limit.max(used).max(32).saturating_mul(2);
    let help = format!(
        "ask for more: aws service-quotas request-service-quota-increase --service-code {SERVICE} --quota-code {code} \
         --desired-value {more}"
    );
    Finding::warning(&check, detail, help)
}

#[cfg(test)]
mod tests;
