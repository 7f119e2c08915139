//! The AWS clients, configured from the SDK's environment: `AWS_REGION`, `AWS_ENDPOINT_URL` (also per service), profiles, and the
//! credential chain with IRSA and EKS Pod Identity.
//!
//! HTTP proxies of the environment are [honored](crate::ec2::aws::http_client). A call is attempted at most ten times, with jittered backoff up to 30 s, and every attempt passes the
//! [rate limit](crate::ec2::aws::rate_limited_http).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use aws_config::retry::RetryConfig;
use aws_config::stalled_stream_protection::StalledStreamProtectionConfig;
use aws_config::sts::AssumeRoleProvider;
use aws_config::timeout::{TimeoutConfig, TimeoutConfigBuilder};
use aws_config::{AppName, BehaviorVersion, Region, SdkConfig};
use aws_sdk_ec2::config::SharedCredentialsProvider;
use aws_sdk_ec2::config::retry::{RetryPartition, TokenBucket};
use aws_smithy_http_client::proxy::ProxyConfig;
use aws_smithy_runtime_api::client::interceptors::context::InterceptorContext;
use aws_smithy_runtime_api::client::orchestrator::OrchestratorError;
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::client::retries::classifiers::{ClassifyRetry, RetryAction};
use stowage_model::launch_timing::LAUNCH_CALL_TIMEOUT;
use stowage_runtime::telemetry::cloud_metrics::CloudMetrics;

use crate::ec2::aws::http_client;
use crate::ec2::aws::rate_limited_http::{CallGate, rate_limited};

/// Attempts per call, including the first.
pub(crate) const ATTEMPTS: u32 = 10;
/// Attempts per IAM call: IAM may be out of reach of a VPC for good, and a node class waits for it.
const IAM_ATTEMPTS: u32 = 3;
/// Session name for assumed roles.
const SESSION: &str = "stowage";
/// Mean of the first backoff; doubles up to [`MAX_BACKOFF`].
const INITIAL_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time without a byte of the response. A long poll of the queue takes 20 s; a repeated launch request is idempotent.
///
/// CreateFleet alone may take [`LAUNCH_CALL_TIMEOUT`].
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Why the clients can't be created.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Neither the environment nor the instance metadata service names a region.
    #[error("no AWS region is known: set AWS_REGION, or run where the instance metadata service answers")]
    NoRegion,
    /// The version of this program is not valid in a user agent.
    #[error("{0} can't be sent as the name of an application")]
    UserAgent(String),
}

/// Settings that override the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientOverrides {
    pub region: Option<String>,
    /// ARN of a role to assume.
    pub role: Option<String>,
    /// Attempts per call, for interactive commands.
    pub attempts: Option<u32>,
}

/// The clients of all AWS services in use.
#[derive(Clone, Debug)]
pub struct AwsClients {
    pub ec2: aws_sdk_ec2::Client,
    /// EC2 for CreateFleet, whose response may take minutes.
    pub fleet: aws_sdk_ec2::Client,
    /// The interruption queue.
    pub sqs: aws_sdk_sqs::Client,
    /// SSM parameters with image ids.
    pub ssm: aws_sdk_ssm::Client,
    /// On-demand prices, in [`pricing_region`].
    pub pricing: aws_sdk_pricing::Client,
    /// Instance profiles.
    pub iam: aws_sdk_iam::Client,
    /// The cluster, if EKS manages it.
    pub eks: aws_sdk_eks::Client,
    /// The caller identity.
    pub sts: aws_sdk_sts::Client,
    /// Zonal shifts of the cluster.
    pub arc: aws_sdk_arczonalshift::Client,
    /// Service quotas; used by `stowage preflight` only.
    pub quotas: aws_sdk_servicequotas::Client,
    /// Region of all clients except pricing.
    pub region: String,
    pub metrics: CloudMetrics,
    gate: Arc<CallGate>,
}

impl AwsClients {
    /// Creates the clients from the environment.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn from_environment() -> Result<Self, ConnectError> {
        Self::connect(ClientOverrides::default()).await
    }

    /// Creates the clients from the environment and `overrides`. A role that can't be assumed fails the first call.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn connect(overrides: ClientOverrides) -> Result<Self, ConnectError> {
        let name = format!("stowage-{}", env!("CARGO_PKG_VERSION"));
        let app = AppName::new(name.clone()).map_err(|_| ConnectError::UserAgent(name))?;
        let https = http_client::https(ProxyConfig::from_env());
        let gate = Arc::new(CallGate::default());
        // These timeouts apply to the credential calls.
        let mut loader = aws_config::defaults(BehaviorVersion::latest())
            .http_client(rate_limited(https, Arc::clone(&gate)))
            .timeout_config(timeouts(READ_TIMEOUT).build())
            .app_name(app);
        if let Some(region) = overrides.region {
            loader = loader.region(Region::new(region));
        }
        let mut config = loader.load().await;
        if let Some(role) = overrides.role {
            let assumed = AssumeRoleProvider::builder(role).session_name(SESSION).configure(&config).build().await;
            config = config.into_builder().credentials_provider(SharedCredentialsProvider::new(assumed)).build();
        }
        Self::new(&config, gate, overrides.attempts.unwrap_or(ATTEMPTS), READ_TIMEOUT)
    }

    /// Creates the clients from a configuration with an HTTP client, and sets retries and timeouts. An attempt fails when no byte
    /// arrives within `read_timeout`.
    pub(crate) fn new(
        config: &SdkConfig,
        gate: Arc<CallGate>,
        attempts: u32,
        read_timeout: Duration,
    ) -> Result<Self, ConnectError> {
        let region = config.region().ok_or(ConnectError::NoRegion)?.to_string();
        let retries = RetryConfig::standard()
            .with_max_attempts(attempts)
            .with_initial_backoff(INITIAL_BACKOFF)
            .with_max_backoff(MAX_BACKOFF);
        let timeouts = timeouts(read_timeout);
        let with_attempt_timeout = timeouts.clone().operation_attempt_timeout(read_timeout * 2).build();
        // The read timeout covers the response headers only; the connection may stall in the body.
        let stalled = StalledStreamProtectionConfig::enabled().upload_enabled(false).grace_period(read_timeout).build();
        let config = config
            .clone()
            .into_builder()
            .retry_config(retries.clone())
            .timeout_config(with_attempt_timeout)
            .stalled_stream_protection(stalled)
            .build();
        // The SDK stops retrying when most calls fail. During long throttling, backoff and the client's own rate limit are preferred.
        let retry_quota = TokenBucket::builder().capacity(5_000).refill_rate(50.0).build();
        let partition = RetryPartition::custom("stowage-ec2").token_bucket(retry_quota).build();
        // An attempt of an EC2 call includes the wait for the client's rate limit, which has no bound.
        let unbounded = timeouts.disable_operation_attempt_timeout().build();
        let ec2 =
            aws_sdk_ec2::config::Builder::from(&config).retry_partition(partition).timeout_config(unbounded).build();
        let slow = self::timeouts(LAUNCH_CALL_TIMEOUT).disable_operation_attempt_timeout().build();
        let stalled = StalledStreamProtectionConfig::enabled().upload_enabled(false);
        let fleet = ec2
            .to_builder()
            .timeout_config(slow)
            .stalled_stream_protection(stalled.grace_period(LAUNCH_CALL_TIMEOUT).build())
            .retry_classifier(NoRetryAfterTimeout)
            .build();
        let pricing = aws_sdk_pricing::config::Builder::from(&config).region(Region::new(pricing_region(&region)));
        let few = retries.with_max_attempts(attempts.min(IAM_ATTEMPTS));
        let iam = aws_sdk_iam::config::Builder::from(&config).retry_config(few).build();
        Ok(Self {
            ec2: aws_sdk_ec2::Client::from_conf(ec2),
            fleet: aws_sdk_ec2::Client::from_conf(fleet),
            sqs: aws_sdk_sqs::Client::new(&config),
            ssm: aws_sdk_ssm::Client::new(&config),
            pricing: aws_sdk_pricing::Client::from_conf(pricing.build()),
            iam: aws_sdk_iam::Client::from_conf(iam),
            eks: aws_sdk_eks::Client::new(&config),
            sts: aws_sdk_sts::Client::new(&config),
            arc: aws_sdk_arczonalshift::Client::new(&config),
            quotas: aws_sdk_servicequotas::Client::new(&config),
            region,
            metrics: CloudMetrics::new(),
            gate,
        })
    }

    /// Attempts so far, by EC2 action.
    pub fn attempts(&self) -> BTreeMap<String, u64> {
        self.gate.attempts()
    }
}

/// The launcher repeats a CreateFleet call that timed out, after a search for its instances.
#[derive(Debug)]
struct NoRetryAfterTimeout;

impl ClassifyRetry for NoRetryAfterTimeout {
    fn classify_retry(&self, context: &InterceptorContext) -> RetryAction {
        let error = context.output_or_error().and_then(Result::err).and_then(OrchestratorError::as_connector_error);
        if error.is_some_and(ConnectorError::is_timeout) {
            return RetryAction::RetryForbidden;
        }
        RetryAction::NoActionIndicated
    }

    fn name(&self) -> &'static str {
        "no retry after a timeout"
    }
}

fn timeouts(read_timeout: Duration) -> TimeoutConfigBuilder {
    TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).read_timeout(read_timeout)
}

/// The region whose Pricing endpoint serves `region`: few regions have an endpoint.
pub fn pricing_region(region: &str) -> &'static str {
    match region.split_once('-').map_or(region, |(area, _)| area) {
        "ap" => "ap-south-1",
        "cn" => "cn-northwest-1",
        "eu" => "eu-central-1",
        _ => "us-east-1",
    }
}

#[cfg(test)]
mod tests {
    use aws_sdk_ec2::config::Credentials;
    use futures::TryFutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::ec2::aws::errors::{ApiError, Class};
    use crate::test_support::fake_aws;

    /// The URL of a server that stalls after the first byte of each response body.
    async fn stalling_server() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let mut open = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).await.unwrap();
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n<").await.unwrap();
                open.push(stream);
            }
        });
        format!("http://{address}")
    }

    #[tokio::test]
    async fn a_response_that_stalls_in_its_body_fails_the_call() {
        let https = http_client::https(ProxyConfig::disabled());
        let gate = Arc::new(CallGate::default());
        let config = SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("us-east-1"))
            .endpoint_url(stalling_server().await)
            .credentials_provider(SharedCredentialsProvider::new(Credentials::new("id", "secret", None, None, "test")))
            .http_client(rate_limited(https, Arc::clone(&gate)))
            .build();
        let clients = AwsClients::new(&config, gate, 1, Duration::from_millis(200)).unwrap();
        let of_ec2 = clients.ec2.describe_subnets().send().map_err(ApiError::of("ec2:DescribeSubnets"));
        let of_ssm = clients.ssm.get_parameter().name("x").send().map_err(ApiError::of("ssm:GetParameter"));
        let both = futures::future::join(of_ec2.map_ok(|_| ()), of_ssm.map_ok(|_| ()));
        let (of_ec2, of_ssm) = tokio::time::timeout(Duration::from_secs(20), both).await.expect("the calls end");
        for error in [of_ec2.unwrap_err(), of_ssm.unwrap_err()] {
            assert_eq!(error.class, Class::NoResponse, "the effect of the call is unknown: {error}");
        }
    }

    #[tokio::test]
    async fn only_create_fleet_waits_minutes_and_is_not_repeated_by_the_client() {
        let (clients, seen) = fake_aws::clients(Box::new(|_| None));
        let read_timeout = |client: &aws_sdk_ec2::Client| client.config().timeout_config().unwrap().read_timeout();
        assert_eq!(read_timeout(&clients.fleet), Some(LAUNCH_CALL_TIMEOUT));
        assert_eq!(read_timeout(&clients.ec2), Some(READ_TIMEOUT));
        clients.fleet.create_fleet().send().await.unwrap_err();
        assert_eq!(seen.lock().unwrap().len(), 1, "the launcher repeats it");
        clients.ec2.describe_subnets().send().await.unwrap_err();
        assert_eq!(seen.lock().unwrap().len(), 3);
    }

    #[tokio::test]
    async fn every_client_retries_with_capped_backoff_and_overridable_attempts() {
        let region = Some("us-east-1".to_owned());
        for (attempts, expected) in [(None, 10), (Some(2), 2)] {
            let overrides = ClientOverrides { region: region.clone(), attempts, ..ClientOverrides::default() };
            let clients = AwsClients::connect(overrides).await.unwrap();
            for (service, retries) in [
                ("ec2", clients.ec2.config().retry_config()),
                ("ec2 for CreateFleet", clients.fleet.config().retry_config()),
                ("sqs", clients.sqs.config().retry_config()),
                ("ssm", clients.ssm.config().retry_config()),
                ("pricing", clients.pricing.config().retry_config()),
                ("eks", clients.eks.config().retry_config()),
                ("sts", clients.sts.config().retry_config()),
                ("arc", clients.arc.config().retry_config()),
                ("quotas", clients.quotas.config().retry_config()),
            ] {
                let retries = retries.unwrap();
                assert_eq!(
                    (retries.max_attempts(), retries.max_backoff()),
                    (expected, Duration::from_secs(30)),
                    "{service}"
                );
            }
            let of_iam = clients.iam.config().retry_config().unwrap();
            assert_eq!(of_iam.max_attempts(), expected.min(IAM_ATTEMPTS));
        }
    }

    #[tokio::test]
    async fn a_throttled_call_is_retried_and_attempts_are_counted_by_action() {
        let tries = std::sync::atomic::AtomicUsize::new(0);
        let (clients, seen) =
            fake_aws::clients(Box::new(move |_| match tries.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
                0 => fake_aws::error("RequestLimitExceeded", "slow down"),
                _ => fake_aws::ok("DescribeSubnets", "<subnetSet/>"),
            }));
        clients.ec2.describe_subnets().send().await.unwrap();
        assert_eq!(seen.lock().unwrap().len(), 2);
        assert_eq!(clients.attempts(), BTreeMap::from([("DescribeSubnets".to_owned(), 2)]));
    }
}
