//! A layer around the clients of the API server. It limits the requests in flight. Of every attempt it records the duration and the
//! result, the server's time, and that the calling loop makes progress; of watches also each event and bookmark, which the watcher of
//! kube-runtime does not report.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll};
use std::time::Instant;

use axum::body::{Bytes, HttpBody};
use futures::FutureExt;
use futures::future::BoxFuture;
use hyper::body::{Frame, SizeHint};
use hyper::header::DATE;
use hyper::{Method, Request, Response};
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::fmt::rfc2822::DateTimeParser;
use kube::client::Body;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;
use stowage_runtime::telemetry::Metrics;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tower::{BoxError, Layer, Service};

use crate::state::watch_signs::WatchSigns;

/// Requests of a client that wait for their response at a time: hundreds of nodes that start up at once would occupy the API server so much
/// that kube-scheduler, the kubelets and the lease wait, too. Twice what a loop sends to pods at once, whose webhooks may be slow.
pub(crate) const IN_FLIGHT: usize = 32;

/// The response body type of [`kube::client::ClientBuilder`].
pub(crate) type DynBody = dyn HttpBody<Data = Bytes, Error = BoxError> + Send + Unpin;

/// The layer.
#[derive(Clone, Debug)]
pub(crate) struct ApiCalls {
    pub(crate) metrics: Metrics,
    pub(crate) signs: Arc<WatchSigns>,
}

impl<S> Layer<S> for ApiCalls {
    type Service = Recorded<S>;

    fn layer(&self, inner: S) -> Recorded<S> {
        Recorded { inner, calls: self.clone(), in_flight: Arc::new(Semaphore::new(IN_FLIGHT)) }
    }
}

/// The service around a client's connection.
#[derive(Clone, Debug)]
pub(crate) struct Recorded<S> {
    inner: S,
    calls: ApiCalls,
    in_flight: Arc<Semaphore>,
}

impl<S> Service<Request<Body>> for Recorded<S>
where
    S: Service<Request<Body>, Response = Response<Box<DynBody>>, Error = BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<Box<DynBody>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut task::Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let call = Call::of(request.method(), request.uri().path(), request.uri().query().unwrap_or_default());
        let (calls, in_flight) = (self.calls.clone(), Arc::clone(&self.in_flight));
        // Nothing is sent before the future is polled.
        let response = self.inner.call(request);
        async move {
            // In a task of its own: a caller that polls something else meanwhile keeps no permit.
            let mut attempt = JoinSet::new();
            attempt.spawn(async move {
                let _permit = in_flight.acquire().await?;
                let started = Instant::now();
                let response = response.await;
                calls.record(&call, started, response.as_ref().ok());
                Ok::<_, BoxError>((response?, call, calls.signs))
            });
            let ended = attempt.join_next().await;
            heartbeat::progress();
            let (response, call, signs) = ended.ok_or("the attempt never began")???;
            if call.verb != "watch" || !response.status().is_success() {
                return Ok(response);
            }
            Ok(response
                .map(|body| Box::new(WatchBody { body, kind: call.resource, failed: false, signs }) as Box<DynBody>))
        }
        .boxed()
    }
}

impl ApiCalls {
    fn record(&self, call: &Call, started: Instant, response: Option<&Response<Box<DynBody>>>) {
        let code = response.map_or_else(|| "none".to_owned(), |response| response.status().as_u16().to_string());
        self.metrics.api_requests.with_label_values(&[call.verb, &call.resource, &code]).inc();
        self.metrics
            .api_seconds
            .with_label_values(&[call.verb, &call.resource])
            .observe(started.elapsed().as_secs_f64());
        if let Some(time) = response.and_then(server_time)
            && let Some(correction) = clock::synchronize(time)
        {
            tracing::warn!(
                seconds = correction.as_secs(),
                "the clock of this machine differs from the API server's, using the API server's"
            );
        }
    }
}

/// The `Date` of a response; in the middle of its second.
fn server_time(response: &Response<Box<DynBody>>) -> Option<Timestamp> {
    let text = response.headers().get(DATE)?.to_str().ok()?;
    let time = DateTimeParser::new().parse_timestamp(text).ok()?;
    time.checked_add(std::time::Duration::from_millis(500)).ok()
}

/// What a request does. Few combinations exist: names of objects are left out.
#[derive(Debug, PartialEq, Eq)]
struct Call {
    verb: &'static str,
    /// Plural name, with the subresource after a slash.
    resource: String,
}

impl Call {
    fn of(method: &Method, path: &str, query: &str) -> Self {
        let mut parts = path.split('/').filter(|part| !part.is_empty());
        // `/api/v1/…` or `/apis/group/version/…`
        let skipped = if parts.next() == Some("apis") { 2 } else { 1 };
        let parts: Vec<&str> = parts.skip(skipped).collect();
        let parts = match *parts {
            ["namespaces", _, _, ..] if parts[2] != "status" => &parts[2..],
            _ => &parts[..],
        };
        let resource = match *parts {
            [resource, _, subresource, ..] => format!("{resource}/{subresource}"),
            [resource, ..] => resource.to_owned(),
            [] => String::new(),
        };
        let watch = query.split('&').any(|pair| matches!(pair, "watch=true" | "watch=1" | "watch"));
        let verb = match *method {
            Method::GET if watch => "watch",
            Method::GET if parts.len() < 2 => "list",
            Method::GET => "get",
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ => "other",
        };
        Self { verb, resource }
    }
}

/// The body of a watch. Each part of it is a sign of the watch, and so is its regular end, unless it has an error.
struct WatchBody {
    body: Box<DynBody>,
    kind: String,
    failed: bool,
    signs: Arc<WatchSigns>,
}

/// How the API server begins an event that is an error, such as that the watch must start over.
const ERROR: &[u8] = br#"{"type":"ERROR""#;

impl HttpBody for WatchBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = task::ready!(Pin::new(&mut *self.body).poll_frame(cx));
        heartbeat::progress();
        self.failed |= match &frame {
            Some(Ok(frame)) => frame.data_ref().is_some_and(|data| data.starts_with(ERROR)),
            Some(Err(_)) => true,
            None => false,
        };
        if !self.failed {
            self.signs.record(&self.kind, clock::now());
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests;
