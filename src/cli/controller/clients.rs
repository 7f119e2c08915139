//! Clients of the API server, one per purpose. Each has a time limit: a connection to an API server that vanished gives no error by itself
//! for a quarter of an hour.

use std::time::Duration;

use anyhow::Context as _;
use kube::client::ClientBuilder;
use kube::{Client, Config};
use tower::buffer::BufferLayer;
use tower::retry::RetryLayer;

use crate::cli::controller::api_calls::ApiCalls;
use crate::controllers::context::Clients;
use crate::controllers::retry_policy::retry_policy;

/// Time limit of a write's response: an admission webhook of others may take 30 s.
const WRITES: Duration = Duration::from_secs(35);
/// Time limit between two reads of a watch, which the API server ends after [`crate::state::watch::WATCH_SECONDS`].
const WATCHES: Duration = Duration::from_secs(40);
/// Time limit of reading or writing the lease, which expires after 15 s.
const LEASE: Duration = Duration::from_secs(5);

/// Requests that wait for a connection, as in [`Client::new`].
const QUEUE: usize = 1024;

/// Time limit of a connection attempt.
const CONNECT: Duration = Duration::from_secs(5);

/// The clients.
pub(crate) struct KubeClients {
    /// Reads and writes of the reconcilers.
    pub(crate) reconcilers: Clients,
    /// Watches. A time limit for responses would end them.
    pub(crate) watches: Client,
}

impl KubeClients {
    pub(crate) fn new(config: &Config, calls: &ApiCalls) -> anyhow::Result<Self> {
        Ok(Self {
            reconcilers: Clients {
                writes: client(config, calls, WRITES, true).context("creating a Kubernetes client")?,
                plans: client(config, calls, WRITES, true).context("creating a Kubernetes client for plans")?,
                evictions: client(config, calls, WRITES, false)
                    .context("creating a Kubernetes client for evictions")?,
            },
            watches: client(config, calls, WATCHES, true).context("creating a Kubernetes client for watches")?,
        })
    }
}

/// The client of the leader election, whose connections are those of the current runtime. Renewals do not queue behind hundreds of
/// writes, and retries would outlast the lease.
pub(crate) fn lease(config: &Config, calls: &ApiCalls) -> anyhow::Result<Client> {
    client(config, calls, LEASE, false).context("creating a Kubernetes client for the lease")
}

/// A client whose responses must progress within `limit`. Each attempt of a retried request is recorded.
fn client(config: &Config, calls: &ApiCalls, limit: Duration, retry: bool) -> Result<Client, kube::Error> {
    let mut config = config.clone();
    config.read_timeout = Some(limit);
    config.connect_timeout = Some(limit.min(CONNECT));
    // A connection that was idle is not over its limit when the next request is written.
    config.reset_reader_on_write = true;
    // The retries of kube would be hidden from the layer.
    config.default_retry = false;
    let builder = ClientBuilder::try_from(config)?.with_layer(calls).with_layer(&BufferLayer::new(QUEUE));
    Ok(if retry { builder.with_layer(&RetryLayer::new(retry_policy())).build() } else { builder.build() })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use kube::Api;
    use stowage_runtime::telemetry::Metrics;
    use tokio::net::TcpListener;

    use std::sync::Arc;

    use super::*;
    use crate::cli::controller::api_calls::IN_FLIGHT;

    fn calls() -> ApiCalls {
        ApiCalls { metrics: Metrics::new(), signs: Arc::default() }
    }

    /// The API server of these tests accepts connections and never answers.
    #[tokio::test]
    async fn f8_a_server_that_never_answers_is_an_error_within_the_limit() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = Config::new(format!("http://{}", silent.local_addr().unwrap()).parse().unwrap());
        let accepted = tokio::spawn(async move {
            let mut open = Vec::new();
            loop {
                open.push(silent.accept().await.unwrap());
            }
        });
        for retry in [false, true] {
            let nodes: Api<Node> = Api::all(client(&config, &calls(), Duration::from_millis(20), retry).unwrap());
            let read = tokio::time::timeout(Duration::from_secs(30), nodes.get("n")).await;
            assert!(read.expect("an error, not a wait").is_err(), "retry {retry}");
        }
        accepted.abort();
    }

    #[tokio::test]
    async fn a_burst_of_requests_is_sent_a_few_at_a_time() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = Config::new(format!("http://{}", silent.local_addr().unwrap()).parse().unwrap());
        let clients = KubeClients::new(&config, &calls()).unwrap().reconcilers;
        let nodes: Api<Node> = Api::all(clients.writes);
        let mut burst = tokio::task::JoinSet::new();
        for _ in 0..IN_FLIGHT * 3 {
            let nodes = nodes.clone();
            burst.spawn(async move { nodes.get("n").await });
        }
        // Each request in flight has a connection of its own.
        let mut open = Vec::new();
        for _ in 0..IN_FLIGHT {
            open.push(silent.accept().await.unwrap());
        }
        let more = tokio::time::timeout(Duration::from_millis(200), silent.accept()).await;
        assert!(more.is_err(), "more than {IN_FLIGHT} requests at a time");
        let of_plans: Api<Node> = Api::all(clients.plans);
        burst.spawn(async move { of_plans.get("n").await });
        let of_plan = tokio::time::timeout(Duration::from_secs(30), silent.accept()).await;
        assert!(of_plan.is_ok(), "the write of a plan does not queue behind them");
        open.clear();
        assert!(silent.accept().await.is_ok(), "the next ones follow");
    }

    #[tokio::test]
    async fn every_client_has_a_limit_below_the_term_of_what_it_serves() {
        assert!(LEASE * 2 <= Duration::from_secs(10), "two attempts within the renewal deadline");
        assert!(WATCHES > Duration::from_secs(u64::from(crate::state::watch::WATCH_SECONDS) + 5));
        let config = Config::new("http://127.0.0.1:1".parse().unwrap());
        assert!(KubeClients::new(&config, &calls()).is_ok());
    }
}
