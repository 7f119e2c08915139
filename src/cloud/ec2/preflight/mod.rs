//! Checks whether an AWS account, its region and its node classes are ready for the controller (`stowage preflight`).
//!
//! Nothing is changed: calls that would change something are dry runs. A queue message may be received, but stays visible. In each
//! file one function calls the APIs, and pure functions turn the responses into [`Finding`]s.

pub(crate) mod account;
pub(crate) mod class;
pub(crate) mod finding;
pub(crate) mod launch_rights;
pub mod leases;
pub(crate) mod queue_access;
pub(crate) mod quotas;

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::{Client, ResourceExt};
use stowage_api::{Ec2NodeClass, NodePool};
use stowage_model::requirement::Requirements;
use stowage_runtime::clock;

pub use crate::ec2::preflight::finding::{CheckResult, Finding};

use crate::ec2::Ec2Provider;
use crate::ec2::aws::client::AwsClients;
use crate::ec2::bootstrap::kubelet_validation;
use crate::ec2::bootstrap::kubelet_validation::Gate;
use crate::ec2::launch::dry_run_type::demands;
use crate::ec2::node_class::cluster_facts::{ClusterFacts, discover};
use crate::ec2::node_class::images::SsmParameterCache;
use crate::ec2::offerings::list_prices;
use crate::ec2::offerings::refresh::RegionApis;
use crate::ec2::offerings::region_snapshot::Dataset;
use crate::ec2::options::Options;

/// Where the node classes come from. It decides the preferred source of cluster facts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassSource {
    Cluster,
    /// Files: the cluster may be unreachable.
    Files,
}

/// Runs all checks. Never fails: a failed call is a finding.
pub async fn check(
    clients: &AwsClients,
    options: &Options,
    kube: Option<&Client>,
    origin: ClassSource,
    classes: &[Ec2NodeClass],
    pools: &[NodePool],
) -> Vec<Finding> {
    let priced = list_prices::has_pricing_api(&clients.region, options.isolated_vpc);
    let apis = RegionApis { ec2: clients.ec2.clone(), pricing: priced.then(|| clients.pricing.clone()) };
    let datasets = BTreeSet::from(Dataset::ALL);
    let (identity, responses) =
        futures::join!(account::caller_identity(clients), apis.fetch(&clients.region, &datasets, clock::now()));
    let ec2_responds = !matches!(&responses.types, Some(Err(_)));
    let variable = |name: &str| std::env::var(name).ok();
    let mut findings = vec![account::identity(&clients.region, &identity, ec2_responds, variable)];
    findings.extend(account::region(&responses));
    if identity.is_err() && !ec2_responds {
        // Every other call would fail the same way.
        return findings;
    }
    let types = responses.types.as_ref().and_then(|types| types.as_ref().ok());
    let (reads, scores, cluster, queue, quotas) = futures::join!(
        account::reads(clients),
        account::dry_run_scores(clients),
        cluster(clients, options, kube, origin),
        queue_access::fetch(clients, options.interruption_queue.as_deref()),
        quotas::fetch(clients, quotas::relevant(pools), types),
    );
    findings.push(account::scores(&scores));
    findings.extend(reads);
    findings.extend(quotas::findings(&quotas));
    findings.push(account::cluster(&cluster));
    findings.extend(queue_access::findings(options.interruption_queue.as_deref(), queue.as_ref()));
    let ec2 = cluster.ok().map(|facts| Ec2Provider::new(clients.clone(), options.clone(), facts));
    if let Some(ec2) = &ec2 {
        ec2.offerings.learn_region(responses);
    }
    if classes.is_empty() {
        let detail = "there is no EC2NodeClass, so no node can be launched".to_owned();
        findings.push(Finding::warning("nodeclass", detail, "create one, or pass a manifest with --file".to_owned()));
    }
    let parameters = SsmParameterCache::default();
    for class in classes {
        let demands = demands(pools, &class.name_any());
        findings.extend(of_class(clients, options, &parameters, ec2.as_ref(), class, &demands).await);
    }
    findings
}

async fn cluster(
    clients: &AwsClients,
    options: &Options,
    kube: Option<&Client>,
    origin: ClassSource,
) -> Result<ClusterFacts, crate::ec2::node_class::cluster_facts::ClusterError> {
    if origin == ClassSource::Cluster {
        return discover(kube, clients, options, None).await;
    }
    match (discover(None, clients, options, None).await, kube) {
        (Err(_), Some(kube)) => discover(Some(kube), clients, options, None).await,
        (facts, _) => facts,
    }
}

async fn of_class(
    clients: &AwsClients,
    options: &Options,
    parameters: &SsmParameterCache,
    ec2: Option<&Ec2Provider>,
    class: &Ec2NodeClass,
    demands: &[Requirements],
) -> Vec<Finding> {
    let facts = ec2.map(|ec2| ec2.node_classes.cluster());
    let now = clock::now();
    let version = facts.as_ref().map(|facts| facts.version.as_str());
    let checks = class::fetch(clients, parameters, class, version, now).await;
    let mut findings = class::findings(class, &checks, now);
    let cidr = facts.as_ref().and_then(|facts| facts.service_cidr.as_deref());
    let (settings, region) = (options.settings(class), ec2.map(|ec2| ec2.offerings.snapshot()));
    let types = region.map(|region| Arc::clone(&region.types)).unwrap_or_default();
    let kubelet = kubelet_validation::validate(&class.spec, Gate::of(options, &settings, &types));
    findings.extend(class::settings(class, cidr, facts.is_some(), &kubelet));
    if let (Some(ec2), Some(Ok(group))) = (ec2, &checks.placement) {
        ec2.node_classes.set_placement_group(class, group.clone());
    }
    let (resolved, profile) = class::resolved(class, checks, now);
    let rights = match ec2 {
        Some(ec2) => launch_rights::rights(ec2, &resolved, demands, profile).await,
        None => vec![Finding::warning(
            "launch rights",
            "not checked, since the cluster is unknown".to_owned(),
            "see the row about the cluster".to_owned(),
        )],
    };
    findings.extend(rights);
    let name = class.name_any();
    findings.into_iter().map(|finding| finding.of_class(&name)).collect()
}

#[cfg(test)]
mod tests;
