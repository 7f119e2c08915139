//! Whether an account is fit for the controller: what it will ask for is asked for once, and each answer is judged.
//!
//! Nothing is changed: calls that would make something are dry. A message of the queue may be received, but not hidden or deleted.
//! What an answer means is decided by pure functions from the answer to a [`Finding`]; one file for each part asks and judges.

pub mod account;
pub mod class;
pub mod finding;
pub mod launch;
pub mod queue;
pub mod quotas;

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::{Client, ResourceExt};

pub use crate::cloud::ec2::preflight::finding::{Finding, Grade};

use crate::api::{Ec2NodeClass, NodePool};
use crate::cloud::ec2::Ec2Provider;
use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::bootstrap::kubelet_validation;
use crate::cloud::ec2::bootstrap::kubelet_validation::Gate;
use crate::cloud::ec2::launch::dry_run_type::demands;
use crate::cloud::ec2::node_class::cluster_facts::{ClusterFacts, discover};
use crate::cloud::ec2::node_class::images::Parameters;
use crate::cloud::ec2::offerings::prices;
use crate::cloud::ec2::offerings::refresh::Feeds;
use crate::cloud::ec2::offerings::region::Part;
use crate::cloud::ec2::options::Options;
use crate::model::requirement::Requirements;

/// Where the node classes come from, and so whom to ask about the cluster first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The cluster.
    Cluster,
    /// Files: it may be that there is no way to the cluster.
    Files,
}

/// Asks and judges. Never fails: what could not be asked is a finding.
pub async fn check(
    clients: &Clients,
    options: &Options,
    kube: Option<&Client>,
    origin: Origin,
    classes: &[Ec2NodeClass],
    pools: &[NodePool],
) -> Vec<Finding> {
    let priced = prices::can_be_asked(&clients.region, options.isolated_vpc);
    let feeds = Feeds { ec2: clients.ec2.clone(), pricing: priced.then(|| clients.pricing.clone()) };
    let parts = BTreeSet::from(Part::ALL);
    let (identity, answers) =
        futures::join!(account::ask(clients), feeds.ask(&clients.region, &parts, crate::clock::now().0));
    let reached = !matches!(&answers.types, Some(Err(_)));
    let variable = |name: &str| std::env::var(name).ok();
    let mut findings = vec![account::identity(&clients.region, &identity, reached, variable)];
    findings.extend(account::region(&answers));
    if identity.is_err() && !reached {
        // Every other call would fail the same way.
        return findings;
    }
    let types = answers.types.as_ref().and_then(|types| types.as_ref().ok());
    let (reads, scores, cluster, queue, quotas) = futures::join!(
        account::reads(clients),
        account::ask_scores(clients),
        cluster(clients, options, kube, origin),
        queue::ask(clients, options.interruption_queue.as_deref()),
        quotas::ask(clients, quotas::wanted(pools), types),
    );
    findings.push(account::scores(&scores));
    findings.extend(reads);
    findings.extend(quotas::judge(&quotas));
    findings.push(account::cluster(&cluster));
    findings.extend(queue::judge(options.interruption_queue.as_deref(), queue.as_ref()));
    let ec2 = cluster.ok().map(|facts| Ec2Provider::new(clients.clone(), options.clone(), facts));
    if let Some(ec2) = &ec2 {
        ec2.learn_region(answers);
    }
    if classes.is_empty() {
        let detail = "there is no EC2NodeClass, so nothing can be launched".to_owned();
        findings.push(Finding::warning("nodeclass", detail, "make one, or name a manifest by --file".to_owned()));
    }
    let parameters = Parameters::default();
    for class in classes {
        let demands = demands(pools, &class.name_any());
        findings.extend(of_class(clients, options, &parameters, ec2.as_ref(), class, &demands).await);
    }
    findings
}

async fn cluster(
    clients: &Clients,
    options: &Options,
    kube: Option<&Client>,
    origin: Origin,
) -> Result<ClusterFacts, crate::cloud::ec2::node_class::cluster_facts::ClusterError> {
    if origin == Origin::Cluster {
        return discover(kube, clients, options, None).await;
    }
    match (discover(None, clients, options, None).await, kube) {
        (Err(_), Some(kube)) => discover(Some(kube), clients, options, None).await,
        (answer, _) => answer,
    }
}

async fn of_class(
    clients: &Clients,
    options: &Options,
    parameters: &Parameters,
    ec2: Option<&Ec2Provider>,
    class: &Ec2NodeClass,
    demands: &[Requirements],
) -> Vec<Finding> {
    let facts = ec2.map(|ec2| ec2.facts.load_full());
    let now = crate::clock::now().0;
    let version = facts.as_ref().map(|facts| facts.version.as_str());
    let answers = class::ask(clients, parameters, class, version, now).await;
    let mut findings = class::judge(class, &answers, now);
    let cidr = facts.as_ref().and_then(|facts| facts.service_cidr.as_deref());
    let (settings, region) = (options.settings(class), ec2.map(Ec2Provider::snapshot));
    let types = region.map(|region| Arc::clone(&region.types)).unwrap_or_default();
    let kubelet = kubelet_validation::validate(&class.spec, Gate::of(options, &settings, &types));
    findings.extend(class::settings(class, cidr, facts.is_some(), &kubelet));
    if let (Some(ec2), Some(Ok(group))) = (ec2, &answers.placement) {
        ec2.know_group(class, group.clone());
    }
    let (resolved, profile) = class::resolved(class, answers, now);
    let tried = match ec2 {
        Some(ec2) => launch::rights(ec2, &resolved, demands, profile).await,
        None => vec![Finding::warning(
            "launch rights",
            "not tried, since the cluster is not known".to_owned(),
            "see the row about the cluster".to_owned(),
        )],
    };
    findings.extend(tried);
    let name = class.name_any();
    findings.into_iter().map(|finding| finding.of(&name)).collect()
}

#[cfg(test)]
mod tests;
