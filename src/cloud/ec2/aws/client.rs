//! Clients of the AWS services, made from the SDK's own environment: `AWS_REGION`, `AWS_ENDPOINT_URL` (also one for each
//! service), profiles, and the credential chain with IRSA's web identity and Pod Identity's container credentials.
//!
//! TLS is rustls with ring. Every attempt of every call passes the rate limit of [`rate`](crate::cloud::ec2::aws::rate_limit); a call is tried at most ten times,
//! with jittered backoff up to 30 s.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_config::retry::RetryConfig;
use aws_config::stalled_stream_protection::StalledStreamProtectionConfig;
use aws_config::sts::AssumeRoleProvider;
use aws_config::timeout::{TimeoutConfig, TimeoutConfigBuilder};
use aws_config::{AppName, BehaviorVersion, Region, SdkConfig};
use aws_sdk_ec2::config::retry::{RetryPartition, TokenBucket};
use aws_sdk_ec2::config::{SharedCredentialsProvider, SharedHttpClient};
use aws_smithy_http_client::tls;
use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::orchestrator::HttpRequest;

use crate::cloud::ec2::aws::rate_limit;
use crate::cloud::ec2::aws::rate_limit::Limits;
use crate::sync::lock;
use crate::telemetry::cloud::CloudMetrics;

/// Attempts of a call, the first included.
const ATTEMPTS: u32 = 10;
/// Name of the session in which a role is assumed.
const SESSION: &str = "stowage";
/// Mean of the first wait between two attempts; it doubles up to [`LONGEST_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
/// Longest wait between two attempts.
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);
/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the first byte of an answer, and between two parts of it. A long poll of the queue takes 20 s; a launch that
/// is asked for again is not launched again.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why there are no clients.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Neither the environment nor the instance metadata service names a region.
    #[error("no AWS region is known: set AWS_REGION, or run where the instance metadata service answers")]
    NoRegion,
    /// The version of this program is no user agent.
    #[error("{0} can't be sent as the name of an application")]
    UserAgent(String),
}

/// What is not as the environment says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instead {
    /// Another region.
    pub region: Option<String>,
    /// ARN of a role that is assumed first.
    pub role: Option<String>,
    /// Fewer attempts of each call, for one who waits for the answer.
    pub attempts: Option<u32>,
}

/// A client of every service that is talked to.
#[derive(Clone, Debug)]
pub struct Clients {
    /// EC2.
    pub ec2: aws_sdk_ec2::Client,
    /// The interruption queue.
    pub sqs: aws_sdk_sqs::Client,
    /// Parameters that name images.
    pub ssm: aws_sdk_ssm::Client,
    /// On-demand prices, in the region that serves them.
    pub pricing: aws_sdk_pricing::Client,
    /// Instance profiles.
    pub iam: aws_sdk_iam::Client,
    /// The cluster, where EKS runs it.
    pub eks: aws_sdk_eks::Client,
    /// Who we are.
    pub sts: aws_sdk_sts::Client,
    /// Zones that the cluster is shifted away from.
    pub arc: aws_sdk_arczonalshift::Client,
    /// Quotas, which only `stowage preflight` asks for.
    pub quotas: aws_sdk_servicequotas::Client,
    /// Region of all of them but pricing.
    pub region: String,
    /// What is counted and timed.
    pub metrics: CloudMetrics,
    calls: Arc<Calls>,
}

impl Clients {
    /// Clients of what the environment says.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn from_environment() -> Result<Self, ConnectError> {
        Self::connect(Instead::default()).await
    }

    /// Clients of what the environment says, but for some things. That a role can't be assumed shows with the first call.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn connect(instead: Instead) -> Result<Self, ConnectError> {
        let name = format!("stowage-{}", env!("CARGO_PKG_VERSION"));
        let app = AppName::new(name.clone()).map_err(|_| ConnectError::UserAgent(name))?;
        let https = aws_smithy_http_client::Builder::new()
            .tls_provider(tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring))
            .build_https();
        let calls = Arc::new(Calls::default());
        // These time-outs are those of the calls for credentials.
        let mut loader = aws_config::defaults(BehaviorVersion::latest())
            .http_client(paced(https, Arc::clone(&calls)))
            .timeout_config(waits(PATIENCE).build())
            .app_name(app);
        if let Some(region) = instead.region {
            loader = loader.region(Region::new(region));
        }
        let mut config = loader.load().await;
        if let Some(role) = instead.role {
            let assumed = AssumeRoleProvider::builder(role).session_name(SESSION).configure(&config).build().await;
            config = config.into_builder().credentials_provider(SharedCredentialsProvider::new(assumed)).build();
        }
        Self::new(&config, calls, instead.attempts.unwrap_or(ATTEMPTS), PATIENCE)
    }

    /// Clients of a configuration that already has its HTTP client; retries and time-outs are set here. An attempt ends when
    /// nothing came for `patience`.
    fn new(config: &SdkConfig, calls: Arc<Calls>, attempts: u32, patience: Duration) -> Result<Self, ConnectError> {
        let region = config.region().ok_or(ConnectError::NoRegion)?.to_string();
        let retries = RetryConfig::standard()
            .with_max_attempts(attempts)
            .with_initial_backoff(FIRST_BACKOFF)
            .with_max_backoff(LONGEST_BACKOFF);
        let waits = waits(patience);
        let timeouts = waits.clone().operation_attempt_timeout(patience * 2).build();
        // The read time-out ends with the head of an answer; a connection may die after it.
        let stalled = StalledStreamProtectionConfig::enabled().upload_enabled(false).grace_period(patience).build();
        let config = config
            .clone()
            .into_builder()
            .retry_config(retries)
            .timeout_config(timeouts)
            .stalled_stream_protection(stalled)
            .build();
        // The SDK stops retrying when most calls fail. Under a throttling that lasts we'd rather wait: the limit above is ours.
        let patient = TokenBucket::builder().capacity(5_000).refill_rate(50.0).build();
        let partition = RetryPartition::custom("stowage-ec2").token_bucket(patient).build();
        // An attempt of EC2's may wait for our own rate limit, for as long as it takes: only what comes after is bounded.
        let unbounded = waits.disable_operation_attempt_timeout().build();
        let ec2 =
            aws_sdk_ec2::config::Builder::from(&config).retry_partition(partition).timeout_config(unbounded).build();
        let pricing = aws_sdk_pricing::config::Builder::from(&config).region(Region::new(pricing_region(&region)));
        Ok(Self {
            ec2: aws_sdk_ec2::Client::from_conf(ec2),
            sqs: aws_sdk_sqs::Client::new(&config),
            ssm: aws_sdk_ssm::Client::new(&config),
            pricing: aws_sdk_pricing::Client::from_conf(pricing.build()),
            iam: aws_sdk_iam::Client::new(&config),
            eks: aws_sdk_eks::Client::new(&config),
            sts: aws_sdk_sts::Client::new(&config),
            arc: aws_sdk_arczonalshift::Client::new(&config),
            quotas: aws_sdk_servicequotas::Client::new(&config),
            region,
            metrics: CloudMetrics::new(),
            calls,
        })
    }

    /// Attempts made so far by EC2 action.
    pub fn calls(&self) -> BTreeMap<String, u64> {
        lock(&self.calls.made).clone()
    }
}

/// Longest waits for a connection, and for an answer.
fn waits(patience: Duration) -> TimeoutConfigBuilder {
    TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).read_timeout(patience)
}

/// The rate limit and the count of what passed it.
#[derive(Debug, Default)]
struct Calls {
    limits: Mutex<Limits>,
    made: Mutex<BTreeMap<String, u64>>,
}

impl Calls {
    /// Notes an attempt, and says how long it has to wait.
    fn admit(&self, request: &HttpRequest) -> Duration {
        let Some(action) = request.body().bytes().and_then(rate_limit::action) else {
            return Duration::ZERO;
        };
        *lock(&self.made).entry(action.to_owned()).or_default() += 1;
        match rate_limit::kind(action) {
            None => Duration::ZERO,
            Some(kind) => lock(&self.limits).take(kind, crate::clock::now().0),
        }
    }
}

/// An HTTP client whose every request passes the rate limit first.
fn paced(inner: SharedHttpClient, calls: Arc<Calls>) -> SharedHttpClient {
    http_client_fn(move |settings, components| {
        let connector = inner.http_connector(settings, components);
        SharedHttpConnector::new(Paced { connector, calls: Arc::clone(&calls) })
    })
}

struct Paced {
    connector: SharedHttpConnector,
    calls: Arc<Calls>,
}

impl fmt::Debug for Paced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paced").finish_non_exhaustive()
    }
}

impl HttpConnector for Paced {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let wait = self.calls.admit(&request);
        if wait.is_zero() {
            return self.connector.call(request);
        }
        let connector = self.connector.clone();
        HttpConnectorFuture::new(async move {
            tokio::time::sleep(wait).await;
            connector.call(request).await
        })
    }
}

/// The region whose Pricing endpoint serves `region`: only a few regions have one.
pub fn pricing_region(region: &str) -> &'static str {
    match region.split_once('-').map_or(region, |(area, _)| area) {
        "ap" => "ap-south-1",
        "cn" => "cn-northwest-1",
        "eu" => "eu-central-1",
        _ => "us-east-1",
    }
}

#[cfg(test)]
pub(crate) mod wire {
    //! A stand-in for the network: answers come from a function of the request.

    use aws_sdk_ec2::config::{Credentials, SharedCredentialsProvider};
    use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
    use aws_smithy_runtime_api::client::result::ConnectorError;
    use aws_smithy_runtime_api::http::StatusCode;

    use super::*;

    /// A request as it would have gone out.
    #[derive(Clone, Debug)]
    pub struct Seen {
        /// EC2's action or the operation of another service.
        pub action: String,
        /// Form members of EC2 and IAM; empty for JSON.
        pub form: BTreeMap<String, String>,
        /// The body as it was sent.
        pub body: String,
    }

    /// What answers: a status, and a body; no answer at all is `None`.
    pub type Answer = Box<dyn Fn(&Seen) -> Option<(u16, String)> + Send + Sync>;

    struct Network {
        answer: Answer,
        seen: Arc<Mutex<Vec<Seen>>>,
    }

    impl fmt::Debug for Network {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Network")
        }
    }

    impl HttpConnector for Network {
        fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
            let body = String::from_utf8_lossy(request.body().bytes().unwrap_or_default()).into_owned();
            let form = decode(&body);
            let target = request.headers().get("x-amz-target").and_then(|target| target.rsplit('.').next());
            let action = form.get("Action").map(String::as_str).or(target).unwrap_or_default().to_owned();
            let seen = Seen { action, form, body };
            let answer = (self.answer)(&seen);
            self.seen.lock().unwrap().push(seen);
            HttpConnectorFuture::ready(match answer {
                Some((status, body)) => {
                    let status = StatusCode::try_from(status).unwrap();
                    Ok(HttpResponse::new(status, body.into()))
                }
                None => Err(ConnectorError::timeout("no answer".into())),
            })
        }
    }

    /// Clients in us-east-1 whose requests go to `answer`, and the list of them. Nothing is waited for between attempts.
    pub fn clients(answer: Answer) -> (Clients, Arc<Mutex<Vec<Seen>>>) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let connector = SharedHttpConnector::new(Network { answer, seen: Arc::clone(&seen) });
        let network = http_client_fn(move |_, _| connector.clone());
        let calls = Arc::new(Calls::default());
        let config = SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("us-east-1"))
            .credentials_provider(SharedCredentialsProvider::new(Credentials::new("id", "secret", None, None, "test")))
            .http_client(paced(network, Arc::clone(&calls)))
            .build();
        let mut clients = Clients::new(&config, calls, ATTEMPTS, PATIENCE).unwrap();
        let quick = RetryConfig::standard().with_max_attempts(2).with_initial_backoff(Duration::from_millis(1));
        let conf = clients.ec2.config().to_builder().retry_config(quick).build();
        clients.ec2 = aws_sdk_ec2::Client::from_conf(conf);
        (clients, seen)
    }

    /// An answer of EC2 for an action: `inner` in its envelope; an `Option` since it stands beside no answer at all.
    #[allow(clippy::unnecessary_wraps)]
    pub fn ok(action: &str, inner: &str) -> Option<(u16, String)> {
        let body = format!(
            r#"<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>{inner}</{action}Response>"#
        );
        Some((200, body))
    }

    /// A refusal of EC2.
    #[allow(clippy::unnecessary_wraps)]
    pub fn refusal(code: &str, message: &str) -> Option<(u16, String)> {
        let body = format!(
            "<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors><RequestID>r</RequestID></Response>"
        );
        Some((400, body))
    }

    fn decode(body: &str) -> BTreeMap<String, String> {
        let pairs = body.split('&').filter_map(|pair| pair.split_once('='));
        pairs.map(|(key, value)| (unescape(key), unescape(value))).collect()
    }

    fn unescape(text: &str) -> String {
        let mut out = Vec::new();
        let mut bytes = text.bytes();
        while let Some(byte) = bytes.next() {
            if byte == b'%' {
                let hex: Vec<u8> = bytes.by_ref().take(2).collect();
                out.push(u8::from_str_radix(std::str::from_utf8(&hex).unwrap(), 16).unwrap());
            } else {
                out.push(if byte == b'+' { b' ' } else { byte });
            }
        }
        String::from_utf8(out).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use aws_sdk_ec2::config::Credentials;
    use futures::TryFutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::cloud::ec2::aws::errors::{ApiError, Class};

    /// A server that answers each request with the head of an answer and its first byte, and then with nothing.
    async fn dying_server() -> String {
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
    async fn a_connection_that_dies_within_an_answer_ends_the_call() {
        let https = aws_smithy_http_client::Builder::new()
            .tls_provider(tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring))
            .build_https();
        let calls = Arc::new(Calls::default());
        let config = SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("us-east-1"))
            .endpoint_url(dying_server().await)
            .credentials_provider(SharedCredentialsProvider::new(Credentials::new("id", "secret", None, None, "test")))
            .http_client(paced(https, Arc::clone(&calls)))
            .build();
        let clients = Clients::new(&config, calls, 1, Duration::from_millis(200)).unwrap();
        let of_ec2 = clients.ec2.describe_subnets().send().map_err(ApiError::of("ec2:DescribeSubnets"));
        let of_ssm = clients.ssm.get_parameter().name("x").send().map_err(ApiError::of("ssm:GetParameter"));
        let both = futures::future::join(of_ec2.map_ok(|_| ()), of_ssm.map_ok(|_| ()));
        let (of_ec2, of_ssm) = tokio::time::timeout(Duration::from_secs(20), both).await.expect("the calls end");
        for error in [of_ec2.unwrap_err(), of_ssm.unwrap_err()] {
            assert_eq!(error.class, Class::Unanswered, "whether it had an effect is not known: {error}");
        }
    }

    #[tokio::test]
    async fn every_client_makes_ten_attempts_half_a_minute_apart_at_most_unless_told_otherwise() {
        let region = Some("us-east-1".to_owned());
        for (attempts, expected) in [(None, 10), (Some(2), 2)] {
            let instead = Instead { region: region.clone(), attempts, ..Instead::default() };
            let clients = Clients::connect(instead).await.unwrap();
            for (service, retries) in [
                ("ec2", clients.ec2.config().retry_config()),
                ("sqs", clients.sqs.config().retry_config()),
                ("ssm", clients.ssm.config().retry_config()),
                ("pricing", clients.pricing.config().retry_config()),
                ("iam", clients.iam.config().retry_config()),
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
        }
    }

    #[tokio::test]
    async fn attempts_are_counted_by_action_and_a_throttled_call_is_tried_again() {
        let tries = std::sync::atomic::AtomicUsize::new(0);
        let (clients, seen) =
            wire::clients(Box::new(move |_| match tries.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
                0 => wire::refusal("RequestLimitExceeded", "slow down"),
                _ => wire::ok("DescribeSubnets", "<subnetSet/>"),
            }));
        clients.ec2.describe_subnets().send().await.unwrap();
        assert_eq!(seen.lock().unwrap().len(), 2);
        assert_eq!(clients.calls(), BTreeMap::from([("DescribeSubnets".to_owned(), 2)]));
    }
}
