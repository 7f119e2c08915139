//! What instances must know of the cluster they join, and where that is found: in the settings, from EKS, from the API server.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::config::Kubeconfig;
use kube::{Api, Client};

use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::ApiError;
use crate::cloud::ec2::options::Options;

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

/// Finds them; without a client of the API server by what the settings and EKS tell. Of those `known` from before, each stays that
/// can't be read now.
///
/// # Errors
/// [`ClusterError`]; what AL2023 alone needs (the service CIDR) and the address of DNS may be missing.
pub async fn discover(
    client: Option<&Client>,
    clients: &Clients,
    options: &Options,
    known: Option<&ClusterFacts>,
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
    let known_cidr = known.and_then(|known| known.service_cidr.clone());
    let service_cidr = match (&options.service_cidr, of_eks, client) {
        (Some(given), ..) => Some(given.clone()),
        (None, Some(found), _) => Some(found.to_owned()),
        (None, None, None) => known_cidr,
        (None, None, Some(client)) => {
            let own = found_or_known(own_service_cidr(client).await, known_cidr.clone());
            // An API server without that API says that there is none; what EKS told before it failed stands.
            own.or(known_cidr.filter(|_| eks.is_err()))
        }
    };
    let ca_bundle = match (&options.cluster_ca_bundle, client) {
        (Some(given), _) => Some(given.clone()),
        (None, Some(_)) => own_ca().await,
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

/// What a read of the API server found: nothing where it says that there is none, what is known where it could not be asked.
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

/// Address of the cluster's DNS; `None` where there is none.
async fn dns_ip(client: &Client) -> Result<Option<String>, kube::Error> {
    let services: Api<Service> = Api::namespaced(client.clone(), "kube-system");
    let service = services.get("kube-dns").await.inspect_err(|error| {
        tracing::info!(%error, "service kube-system/kube-dns could not be read, unless its address is known nodes find DNS by themselves");
    })?;
    let ip = service.spec.and_then(|spec| spec.cluster_ip);
    Ok(ip.filter(|ip| !ip.is_empty() && ip != "None"))
}

/// The CIDR that the API server gives services addresses of, where it has the API for it (1.33).
async fn own_service_cidr(client: &Client) -> Result<Option<String>, kube::Error> {
    let cidrs: Api<ServiceCIDR> = Api::all(client.clone());
    let found = cidrs.get("kubernetes").await.inspect_err(|error| {
        tracing::info!(%error, "the service CIDR could not be read: AL2023 nodes need it, unless it is known set STOWAGE_SERVICE_CIDR");
    })?;
    Ok(found.spec.and_then(|spec| spec.cidrs?.into_iter().next()))
}

/// The CA that this process trusts the API server by, base64 as it is in the file; `None` where it is not found.
async fn own_ca() -> Option<String> {
    if let Ok(kubeconfig) = Kubeconfig::read()
        && let Some(ca) = of_kubeconfig(&kubeconfig).await
    {
        return Some(ca);
    }
    match tokio::fs::read(POD_CA).await {
        Ok(pem) => Some(STANDARD.encode(pem)),
        Err(error) => {
            tracing::warn!(%error, "the CA of the API server could not be read, unless it is known set CLUSTER_CA_BUNDLE");
            None
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
    fn what_can_not_be_read_again_stays_and_what_is_gone_goes() {
        let failed = |code: u16| {
            let status = serde_json::json!({"status": "Failure", "message": "m", "reason": "r", "code": code});
            Err(kube::Error::Api(Box::new(serde_json::from_value(status).unwrap())))
        };
        let lost = || Err(kube::Error::LinesCodecMaxLineLengthExceeded);
        for (what, read, known, expected) in [
            ("read", Ok(Some("new")), Some("old"), Some("new")),
            ("there is none", Ok(None), Some("old"), None),
            ("gone", failed(404), Some("old"), None),
            ("refused", failed(403), Some("old"), Some("old")),
            ("out of order", failed(500), Some("old"), Some("old")),
            ("no answer", lost(), Some("old"), Some("old")),
            ("no answer, and never was", lost(), None, None),
        ] {
            assert_eq!(found_or_known(read, known), expected, "{what}");
        }
    }

    #[tokio::test]
    async fn an_api_server_that_does_not_answer_takes_nothing_away() {
        // Nobody listens on port 1.
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let kube = Client::try_from(config).unwrap();
        let body = serde_json::json!({"cluster": {"version": "1.34", "endpoint": "https://eks"}}).to_string();
        let (clients, _) = crate::cloud::ec2::aws::client::wire::clients(Box::new(move |_| Some((200, body.clone()))));
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
