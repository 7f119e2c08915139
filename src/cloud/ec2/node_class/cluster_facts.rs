//! Facts about the cluster that instances need to join it, from the options, EKS and the API server.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::config::Kubeconfig;
use kube::{Api, Client};

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::ApiError;
use crate::ec2::options::Options;

/// Path of the cluster CA in every pod.
const POD_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";

/// Why the facts can't be discovered.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// EKS does not describe the cluster.
    #[error(
        "the endpoint of cluster {cluster} is not known, set CLUSTER_ENDPOINT or let the controller call eks:DescribeCluster: {source}"
    )]
    Endpoint { cluster: String, source: ApiError },
    /// EKS described the cluster without an endpoint.
    #[error("EKS names no endpoint of cluster {0}: it is not active yet, or set CLUSTER_ENDPOINT")]
    NoEndpoint(String),
    /// The API server does not report its version.
    #[error("the version of the API server: {0}")]
    Version(#[from] kube::Error),
    /// EKS does not report the version.
    #[error("the version of the cluster: {0}")]
    EksVersion(ApiError),
}

/// Facts about the cluster that instances need to join it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterFacts {
    pub name: String,
    /// URL of the API server.
    pub endpoint: String,
    /// CA of the API server: PEM in base64.
    pub ca_bundle: String,
    /// Kubernetes version, such as `1.34`.
    pub version: String,
    /// CIDR of services.
    pub service_cidr: Option<String>,
    /// IP address of the cluster DNS.
    pub dns_ip: Option<String>,
}

impl ClusterFacts {
    /// Whether services have IPv6 addresses.
    pub fn is_ipv6(&self) -> bool {
        self.dns_ip.as_deref().is_some_and(|ip| ip.contains(':'))
    }
}

/// Discovers the facts; without a client of the API server from the options and EKS alone. A fact that can't be read keeps its value
/// in `known`.
///
/// # Errors
/// [`ClusterError`]. The service CIDR (needed by AL2023 only) and the DNS address may be missing.
pub async fn discover(
    client: Option<&Client>,
    clients: &AwsClients,
    options: &Options,
    known: Option<&ClusterFacts>,
) -> Result<ClusterFacts, ClusterError> {
    let name = &options.cluster_name;
    let needs_eks = options.cluster_endpoint.is_none() || options.eks_control_plane || client.is_none();
    let eks = if needs_eks || options.service_cidr.is_none() {
        let call = clients.eks.describe_cluster().name(name);
        call.send().await.map_err(ApiError::of("eks:DescribeCluster"))
    } else {
        Err(ApiError::not_called("eks:DescribeCluster"))
    };
    let described = eks.as_ref().ok().and_then(|response| response.cluster());
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
    let eks_cidr = network.and_then(|network| network.service_ipv4_cidr().or(network.service_ipv6_cidr()));
    let known_cidr = known.and_then(|known| known.service_cidr.clone());
    let service_cidr = match (&options.service_cidr, eks_cidr, client) {
        (Some(given), ..) => Some(given.clone()),
        (None, Some(found), _) => Some(found.to_owned()),
        (None, None, None) => known_cidr,
        (None, None, Some(client)) => {
            let found = found_or_known(service_cidr_of_api_server(client).await, known_cidr.clone());
            // An API server without that API responds with 404; the value that EKS reported before it failed is kept.
            found.or(known_cidr.filter(|_| eks.is_err()))
        }
    };
    let ca_bundle = match (&options.cluster_ca_bundle, client) {
        (Some(given), _) => Some(given.clone()),
        (None, Some(_)) => trusted_ca().await,
        (None, None) => {
            let authority = described.and_then(|cluster| cluster.certificate_authority());
            authority.and_then(|authority| authority.data()).map(str::to_owned)
        }
    };
    let ca_bundle = ca_bundle
        .filter(|ca| !ca.is_empty())
        .or_else(|| known.map(|known| known.ca_bundle.clone()))
        .unwrap_or_default();
    let dns_ip = match client {
        Some(client) => found_or_known(dns_ip(client).await, known.and_then(|known| known.dns_ip.clone())),
        None => None,
    };
    Ok(ClusterFacts { name: name.clone(), endpoint, ca_bundle, version, service_cidr, dns_ip })
}

/// The result of a read from the API server: `None` on 404, the known value on other errors.
fn found_or_known<T>(read: Result<Option<T>, kube::Error>, known: Option<T>) -> Option<T> {
    match read {
        Ok(found) => found,
        Err(kube::Error::Api(status)) if status.code == 404 => None,
        Err(_) => known,
    }
}

/// `1` and `34+` as `1.34`.
fn minor_version(major: &str, minor: &str) -> String {
    format!("{}.{}", major.trim_end_matches('+'), minor.trim_end_matches('+'))
}

/// IP address of the cluster DNS; `None` where there is none.
async fn dns_ip(client: &Client) -> Result<Option<String>, kube::Error> {
    let services: Api<Service> = Api::namespaced(client.clone(), "kube-system");
    let service = services.get("kube-dns").await.inspect_err(|error| {
        tracing::info!(%error, "service kube-system/kube-dns not readable, nodes detect the DNS address");
    })?;
    let ip = service.spec.and_then(|spec| spec.cluster_ip);
    Ok(ip.filter(|ip| !ip.is_empty() && ip != "None"))
}

/// The service CIDR of the API server, which reports it from Kubernetes 1.33 on.
async fn service_cidr_of_api_server(client: &Client) -> Result<Option<String>, kube::Error> {
    let cidrs: Api<ServiceCIDR> = Api::all(client.clone());
    let found = cidrs.get("kubernetes").await.inspect_err(|error| {
        tracing::warn!(%error, "could not read the service CIDR, which AL2023 nodes need; set STOWAGE_SERVICE_CIDR unless it is already known");
    })?;
    Ok(found.spec.and_then(|spec| spec.cidrs?.into_iter().next()))
}

/// The CA with which this process trusts the API server: PEM in base64, as in the kubeconfig; `None` where it is not found.
async fn trusted_ca() -> Option<String> {
    if let Ok(kubeconfig) = Kubeconfig::read()
        && let Some(ca) = ca_of_kubeconfig(&kubeconfig).await
    {
        return Some(ca);
    }
    match tokio::fs::read(POD_CA).await {
        Ok(pem) => Some(STANDARD.encode(pem)),
        Err(error) => {
            tracing::warn!(%error, "could not read the CA of the API server; set CLUSTER_CA_BUNDLE unless it is already known");
            None
        }
    }
}

async fn ca_of_kubeconfig(kubeconfig: &Kubeconfig) -> Option<String> {
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
    fn the_minor_version_has_no_plus_sign() {
        assert_eq!(minor_version("1", "34+"), "1.34");
        assert_eq!(minor_version("1", "33"), "1.33");
    }

    #[test]
    fn an_unreadable_fact_is_kept_and_a_deleted_one_is_dropped() {
        let failed = |code: u16| {
            let status = serde_json::json!({"status": "Failure", "message": "m", "reason": "r", "code": code});
            Err(kube::Error::Api(Box::new(serde_json::from_value(status).unwrap())))
        };
        let lost = || Err(kube::Error::LinesCodecMaxLineLengthExceeded);
        for (what, read, known, expected) in [
            ("read", Ok(Some("new")), Some("old"), Some("new")),
            ("there is none", Ok(None), Some("old"), None),
            ("deleted", failed(404), Some("old"), None),
            ("refused", failed(403), Some("old"), Some("old")),
            ("failed", failed(500), Some("old"), Some("old")),
            ("no response", lost(), Some("old"), Some("old")),
            ("no response and no known value", lost(), None, None),
        ] {
            assert_eq!(found_or_known(read, known), expected, "{what}");
        }
    }

    #[tokio::test]
    async fn facts_are_kept_while_the_api_server_does_not_respond() {
        // No server listens on port 1.
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let kube = Client::try_from(config).unwrap();
        let body = serde_json::json!({"cluster": {"version": "1.34", "endpoint": "https://eks"}}).to_string();
        let (clients, _) = crate::test_support::fake_aws::clients(Box::new(move |_| Some((200, body.clone()))));
        let options = Options { eks_control_plane: true, ..Options::of("c1") };
        let known = ClusterFacts {
            service_cidr: Some("10.100.0.0/16".into()),
            dns_ip: Some("10.100.0.10".into()),
            ca_bundle: "Y2EK".into(),
            ..ClusterFacts::default()
        };
        let facts = discover(Some(&kube), &clients, &options, Some(&known)).await.unwrap();
        assert_eq!((&*facts.version, &*facts.endpoint), ("1.34", "https://eks"));
        assert_eq!((facts.service_cidr, facts.dns_ip), (known.service_cidr, known.dns_ip));
    }

    #[test]
    fn a_cluster_with_an_ipv6_dns_address_is_ipv6() {
        let facts = |ip: Option<&str>| ClusterFacts { dns_ip: ip.map(str::to_owned), ..ClusterFacts::default() };
        assert!(facts(Some("fd00::a")).is_ipv6());
        assert!(!facts(Some("10.0.0.10")).is_ipv6() && !facts(None).is_ipv6());
    }

    #[tokio::test]
    async fn the_ca_of_the_current_context_is_used_unchanged() {
        let config: Kubeconfig = serde_json::from_value(serde_json::json!({
            "current-context": "a",
            "contexts": [{"name": "a", "context": {"cluster": "one", "user": "u"}}],
            "clusters": [
                {"name": "other", "cluster": {"server": "https://x", "certificate-authority-data": "eA=="}},
                {"name": "one", "cluster": {"server": "https://y", "certificate-authority-data": "eQ=="}},
            ],
        }))
        .unwrap();
        assert_eq!(ca_of_kubeconfig(&config).await.as_deref(), Some("eQ=="));
    }
}
