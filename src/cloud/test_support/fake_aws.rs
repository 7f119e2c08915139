//! AWS endpoints in memory: a test supplies a function from the request to the response.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_config::retry::RetryConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_ec2::config::{Credentials, SharedCredentialsProvider};
use aws_smithy_runtime_api::client::http::{HttpConnector, HttpConnectorFuture, SharedHttpConnector, http_client_fn};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::http::StatusCode;

use crate::ec2::aws::client::{ATTEMPTS, AwsClients, READ_TIMEOUT};
use crate::ec2::aws::rate_limited_http::{CallGate, rate_limited};

/// A request that a client sent.
#[derive(Clone, Debug)]
pub struct Request {
    /// The EC2 action, or the operation of another service.
    pub action: String,
    /// Form fields of EC2 and IAM; empty for JSON.
    pub form: BTreeMap<String, String>,
    pub body: String,
}

/// Responds to a request with status and body; `None` is a timeout.
pub type Responder = Box<dyn Fn(&Request) -> Option<(u16, String)> + Send + Sync>;

struct Endpoint {
    respond: Responder,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Endpoint")
    }
}

impl HttpConnector for Endpoint {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let body = String::from_utf8_lossy(request.body().bytes().unwrap_or_default()).into_owned();
        let form = decode(&body);
        let target = request.headers().get("x-amz-target").and_then(|target| target.rsplit('.').next());
        let action = form.get("Action").map(String::as_str).or(target).unwrap_or_default().to_owned();
        let request = Request { action, form, body };
        let response = (self.respond)(&request);
        self.requests.lock().unwrap().push(request);
        HttpConnectorFuture::ready(match response {
            Some((status, body)) => {
                let status = StatusCode::try_from(status).unwrap();
                Ok(HttpResponse::new(status, body.into()))
            }
            None => Err(ConnectorError::timeout("no answer".into())),
        })
    }
}

/// AwsClients in us-east-1 whose requests go to `respond`, and the requests so far. EC2 calls are attempted twice, without backoff.
pub fn clients(respond: Responder) -> (AwsClients, Arc<Mutex<Vec<Request>>>) {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let connector = SharedHttpConnector::new(Endpoint { respond, requests: Arc::clone(&requests) });
    let network = http_client_fn(move |_, _| connector.clone());
    let gate = Arc::new(CallGate::default());
    let config = SdkConfig::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .credentials_provider(SharedCredentialsProvider::new(Credentials::new("id", "secret", None, None, "test")))
        .http_client(rate_limited(network, Arc::clone(&gate)))
        .build();
    let mut clients = AwsClients::new(&config, gate, ATTEMPTS, READ_TIMEOUT).unwrap();
    let quick = RetryConfig::standard().with_max_attempts(2).with_initial_backoff(Duration::from_millis(1));
    for client in [&mut clients.ec2, &mut clients.fleet] {
        let conf = client.config().to_builder().retry_config(quick.clone()).build();
        *client = aws_sdk_ec2::Client::from_conf(conf);
    }
    (clients, requests)
}

/// A successful EC2 response: `inner` in the envelope of the action. An `Option`, as a [`Responder`] returns.
#[allow(clippy::unnecessary_wraps)]
pub fn ok(action: &str, inner: &str) -> Option<(u16, String)> {
    let body = format!(
        r#"<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>{inner}</{action}Response>"#
    );
    Some((200, body))
}

/// An error response of EC2.
#[allow(clippy::unnecessary_wraps)]
pub fn error(code: &str, message: &str) -> Option<(u16, String)> {
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
