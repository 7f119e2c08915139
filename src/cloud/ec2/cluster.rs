//! What instances must know of the cluster they join, and where that is found: in the settings, from EKS, from the API server.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::future::OptionFuture;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::config::Kubeconfig;
use kube::{Api, Client};

use super::Options;
use super::client::Clients;
use super::errors::ApiError;

/// CA of the cluster in every pod.
const POD_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// Why nothing can be launched for the cluster.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// EKS doesn't say where the cluster is.
    #[error(
        "the endpoint of cluster {cluster} is not known, set CLUSTER_ENDPOINT or let the controller call eks:DescribeCluster: {source}"
    )]
    Endpoint {
        /// Name of the cluster.
        cluster: String,
        /// What EKS said.
        source: ApiError,
    },
    /// EKS described the cluster without an endpoint.
    #[error("EKS names no endpoint of cluster {0}: it is not active yet, or set CLUSTER_ENDPOINT")]
    NoEndpoint(String),
    /// The API server doesn't tell its version.
    #[error("the version of the API server: {0}")]
    Version(#[from] kube::Error),
    /// EKS doesn't tell the version.
    #[error("the version of the cluster: {0}")]
    EksVersion(ApiError),
}

/// What instances must know of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterFacts {
    /// Name.
    pub name: String,
    /// URL of the API server.
    pub endpoint: String,
    /// CA of the API server: PEM in base64.
    pub ca_bundle: String,
    /// Version, as `1.34`.
    pub version: String,
    /// Addresses of services.
    pub service_cidr: Option<String>,
    /// Address of the cluster's DNS.
    pub dns_ip: Option<String>,
}

impl ClusterFacts {
    /// Whether services have IPv6 addresses.
    pub fn is_ipv6(&self) -> bool {
        self.dns_ip.as_deref().is_some_and(|ip| ip.contains(':'))
    }
}

/// Finds them.
///
/// # Errors
/// [`ClusterError`]; what AL2023 alone needs (the service CIDR) and the address of DNS may be missing.
pub async fn discover(client: &Client, clients: &Clients, options: &Options) -> Result<ClusterFacts, ClusterError> {
    discover_by(Some(client), clients, options).await
}

/// Finds them, without a client of the API server by what the settings and EKS tell.
///
/// # Errors
/// As [`discover`].
pub async fn discover_by(
    client: Option<&Client>,
    clients: &Clients,
    options: &Options,
) -> Result<ClusterFacts, ClusterError> {
    let name = &options.cluster_name;
    let needs_eks = options.cluster_endpoint.is_none() || options.eks_control_plane || client.is_none();
    let eks = if needs_eks || options.service_cidr.is_none() {
        let call = clients.eks.describe_cluster().name(name);
        call.send().await.map_err(ApiError::of("eks:DescribeCluster"))
    } else {
        Err(ApiError::unasked("eks:DescribeCluster"))
    };
    let described = eks.as_ref().ok().and_then(|answer| answer.cluster());
    let endpoint = match (&options.cluster_endpoint, &eks) {
        (Some(given), _) => given.clone(),
        (None, Err(error)) => return Err(ClusterError::Endpoint { cluster: name.clone(), source: error.clone() }),
        (None, Ok(_)) => {
            let found = described.and_then(|cluster| cluster.endpoint()).filter(|endpoint| !endpoint.is_empty());
            found.ok_or_else(|| ClusterError::NoEndpoint(name.clone()))?.to_owned()
        }
    };
    let version = if let (Some(client), false) = (client, options.eks_control_plane) {
        let version = client.apiserver_version().await?;
        minor_version(&version.major, &version.minor)
    } else {
        let found = described.and_then(|cluster| cluster.version()).map(str::to_owned);
        match (found, &eks) {
            (Some(version), _) => version,
            (None, Err(error)) => return Err(ClusterError::EksVersion(error.clone())),
            (None, Ok(_)) => return Err(ClusterError::NoEndpoint(name.clone())),
        }
    };
    let network = described.and_then(|cluster| cluster.kubernetes_network_config());
    let of_eks = network.and_then(|network| network.service_ipv4_cidr().or(network.service_ipv6_cidr()));
    let service_cidr = match (&options.service_cidr, of_eks) {
        (Some(given), _) => Some(given.clone()),
        (None, Some(found)) => Some(found.to_owned()),
        (None, None) => OptionFuture::from(client.map(own_service_cidr)).await.flatten(),
    };
    let ca_bundle = match (&options.cluster_ca_bundle, client) {
        (Some(given), _) => given.clone(),
        (None, Some(_)) => own_ca().await,
        (None, None) => {
            let authority = described.and_then(|cluster| cluster.certificate_authority());
            authority.and_then(|authority| authority.data()).unwrap_or_default().to_owned()
        }
    };
    let dns_ip = OptionFuture::from(client.map(dns_ip)).await.flatten();
    Ok(ClusterFacts { name: name.clone(), endpoint, ca_bundle, version, service_cidr, dns_ip })
}

/// `1` and `34+` as `1.34`.
fn minor_version(major: &str, minor: &str) -> String {
    format!("{}.{}", major.trim_end_matches('+'), minor.trim_end_matches('+'))
}

/// Address of the cluster's DNS; `None` where there is none, or it may not be read.
async fn dns_ip(client: &Client) -> Option<String> {
    let services: Api<Service> = Api::namespaced(client.clone(), "kube-system");
    match services.get("kube-dns").await {
        Ok(service) => service.spec?.cluster_ip.filter(|ip| !ip.is_empty() && ip != "None"),
        Err(error) => {
            tracing::info!(%error, "service kube-system/kube-dns could not be read, nodes find DNS by themselves");
            None
        }
    }
}

/// The CIDR that the API server gives services addresses of, where it has the API for it (1.33).
async fn own_service_cidr(client: &Client) -> Option<String> {
    let cidrs: Api<ServiceCIDR> = Api::all(client.clone());
    match cidrs.get("kubernetes").await {
        Ok(found) => found.spec?.cidrs?.into_iter().next(),
        Err(error) => {
            tracing::info!(%error, "the service CIDR is not known: AL2023 nodes need it, set STOWAGE_SERVICE_CIDR");
            None
        }
    }
}

/// The CA that this process trusts the API server by, base64 as it is in the file; empty where it is not found.
async fn own_ca() -> String {
    if let Ok(kubeconfig) = Kubeconfig::read()
        && let Some(ca) = of_kubeconfig(&kubeconfig).await
    {
        return ca;
    }
    match tokio::fs::read(POD_CA).await {
        Ok(pem) => STANDARD.encode(pem),
        Err(error) => {
            tracing::warn!(%error, "the CA of the API server is not known, set CLUSTER_CA_BUNDLE");
            String::new()
        }
    }
}

async fn of_kubeconfig(kubeconfig: &Kubeconfig) -> Option<String> {
    let current = kubeconfig.current_context.as_ref()?;
    let context = kubeconfig.contexts.iter().find(|context| context.name == *current)?.context.as_ref()?;
    let cluster = kubeconfig.clusters.iter().find(|cluster| cluster.name == context.cluster)?.cluster.as_ref()?;
    if let Some(data) = &cluster.certificate_authority_data {
        return Some(data.clone());
    }
    let pem = tokio::fs::read(cluster.certificate_authority.as_ref()?).await.ok()?;
    Some(STANDARD.encode(pem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_lose_their_plus() {
        assert_eq!(minor_version("1", "34+"), "1.34");
        assert_eq!(minor_version("1", "33"), "1.33");
    }

    #[test]
    fn an_ipv6_dns_makes_an_ipv6_cluster() {
        let facts = |ip: Option<&str>| ClusterFacts { dns_ip: ip.map(str::to_owned), ..ClusterFacts::default() };
        assert!(facts(Some("fd00::a")).is_ipv6());
        assert!(!facts(Some("10.0.0.10")).is_ipv6() && !facts(None).is_ipv6());
    }

    #[tokio::test]
    async fn the_ca_of_the_current_context_is_taken_as_it_is_written() {
        let config: Kubeconfig = serde_json::from_value(serde_json::json!({
            "current-context": "a",
            "contexts": [{"name": "a", "context": {"cluster": "one", "user": "u"}}],
            "clusters": [
                {"name": "other", "cluster": {"server": "https://x", "certificate-authority-data": "eA=="}},
                {"name": "one", "cluster": {"server": "https://y", "certificate-authority-data": "eQ=="}},
            ],
        }))
        .unwrap();
        assert_eq!(of_kubeconfig(&config).await.as_deref(), Some("eQ=="));
    }
}
