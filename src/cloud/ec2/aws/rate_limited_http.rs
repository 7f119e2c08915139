//! An HTTP client that delays every request until the [rate limit](crate::ec2::aws::rate_limit) admits it, and counts requests by
//! EC2 action. Retries of the SDK pass it, too.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_ec2::config::SharedHttpClient;
use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::orchestrator::HttpRequest;
use stowage_runtime::clock;
use stowage_runtime::sync::{heartbeat, lock};

use crate::ec2::aws::rate_limit;
use crate::ec2::aws::rate_limit::Limits;

/// The rate limits of all clients, and the number of attempts by EC2 action.
#[derive(Debug, Default)]
pub(crate) struct CallGate {
    limits: Mutex<Limits>,
    attempts: Mutex<BTreeMap<String, u64>>,
}

impl CallGate {
    /// Attempts so far, by EC2 action.
    pub(crate) fn attempts(&self) -> BTreeMap<String, u64> {
        lock(&self.attempts).clone()
    }

    /// Counts an attempt and returns the time to wait before it is sent.
    fn admit(&self, request: &HttpRequest) -> Duration {
        let Some(action) = request.body().bytes().and_then(rate_limit::action) else {
            return Duration::ZERO;
        };
        *lock(&self.attempts).entry(action.to_owned()).or_default() += 1;
        match rate_limit::kind(action) {
            None => Duration::ZERO,
            Some(kind) => lock(&self.limits).take(kind, clock::now()),
        }
    }
}

/// Wraps an HTTP client so that every request passes `gate` first.
pub(crate) fn rate_limited(inner: SharedHttpClient, gate: Arc<CallGate>) -> SharedHttpClient {
    http_client_fn(move |settings, components| {
        let connector = inner.http_connector(settings, components);
        SharedHttpConnector::new(RateLimited { connector, gate: Arc::clone(&gate) })
    })
}

struct RateLimited {
    connector: SharedHttpConnector,
    gate: Arc<CallGate>,
}

impl fmt::Debug for RateLimited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimited").finish_non_exhaustive()
    }
}

impl HttpConnector for RateLimited {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let wait = self.gate.admit(&request);
        let connector = self.connector.clone();
        HttpConnectorFuture::new(async move {
            if !wait.is_zero() {
                heartbeat::rest(tokio::time::sleep(wait)).await;
            }
            let response = connector.call(request).await;
            heartbeat::progress();
            response
        })
    }
}
