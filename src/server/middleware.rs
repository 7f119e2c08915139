//! Middleware: time limits, panics, client certificates, request counters.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::FutureExt;
use prometheus::IntGauge;
use serde_json::json;

use crate::server::accept::{Peer, Presented};
use crate::server::app_state::AppState;
use crate::server::client_access::Access;

#[derive(Clone, Debug)]
pub(crate) struct Guard {
    pub(crate) state: Arc<AppState>,
    pub(crate) request_timeout: Duration,
}

/// Result of a review, for the counter; an extension of the response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WebhookResult(pub(crate) &'static str);

/// An error response as JSON. The body is complete, so that `Content-Length` is set and the connection stays open.
pub(crate) fn error(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "error": message }))).into_response()
}

/// Turns a panic into 500 and a request over the time limit into 408, and counts the responses.
pub(crate) async fn guard(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let metrics = &guard.state.metrics;
    let verb = match request.uri().path() {
        "/mutate" => Some("mutate"),
        "/v1/filter" => Some("filter"),
        "/v1/prioritize" => Some("prioritize"),
        "/v1/preempt" => Some("preempt"),
        _ => None,
    };
    let _in_flight = InFlight::new(&metrics.in_flight);
    let run = AssertUnwindSafe(next.run(request)).catch_unwind();
    let response = match tokio::time::timeout(guard.request_timeout, run).await {
        Ok(Ok(response)) => response,
        Ok(Err(_panic)) => {
            metrics.panics.inc();
            tracing::error!(verb, "handler panicked, answered 500");
            error(StatusCode::INTERNAL_SERVER_ERROR, "internal error")
        }
        Err(_elapsed) => error(StatusCode::REQUEST_TIMEOUT, "the request took too long"),
    };
    match verb {
        Some("mutate") => {
            let status = response.status();
            let result = response.extensions().get::<WebhookResult>().map_or(status.as_str(), |result| result.0);
            metrics.webhook_requests.with_label_values(&[result]).inc();
        }
        Some(verb) => metrics.extender_requests.with_label_values(&[verb, response.status().as_str()]).inc(),
        None => {}
    }
    response
}

/// Counts a request on its connection, which is not idle meanwhile.
pub(crate) async fn track(Extension(peer): Extension<Peer>, request: Request, next: Next) -> Response {
    let _request = peer.ticket.request();
    next.run(request).await
}

/// Counts a request in flight until it is answered or dropped with its connection.
struct InFlight<'a>(&'a IntGauge);

impl<'a> InFlight<'a> {
    fn new(gauge: &'a IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Admits the scheduler to the extender.
pub(crate) async fn require_scheduler(Extension(peer): Extension<Peer>, request: Request, next: Next) -> Response {
    match peer.access.extender {
        Access::Granted => next.run(request).await,
        Access::NoCertificate => error(
            StatusCode::FORBIDDEN,
            "the extender needs a client certificate signed by its client CA: set certFile and keyFile in the scheduler's tlsConfig",
        ),
        Access::OtherName(names) => error(
            StatusCode::FORBIDDEN,
            &format!(
                "the extender does not accept a client certificate of {names}: use the certificate of the scheduler, or add its name to --extender-client-names"
            ),
        ),
    }
}

/// Admits the API server to the webhook; anyone without a client CA for the webhook.
pub(crate) async fn require_api_server(Extension(peer): Extension<Peer>, request: Request, next: Next) -> Response {
    match peer.access.webhook {
        Access::Granted => next.run(request).await,
        Access::NoCertificate => error(
            StatusCode::FORBIDDEN,
            "the webhook needs a client certificate signed by --webhook-client-ca: give the API server one by its AdmissionConfiguration",
        ),
        Access::OtherName(names) => error(
            StatusCode::FORBIDDEN,
            &format!(
                "the webhook does not accept a client certificate of {names}: use the certificate of the API server, or add its name to --webhook-client-names"
            ),
        ),
    }
}

/// Admits operators to the state. A connection may outlive the certificate of an operator, so that each request is decided on.
pub(crate) async fn require_operator(Extension(peer): Extension<Peer>, request: Request, next: Next) -> Response {
    match peer.presented.as_ref().map_or(Access::NoCertificate, Presented::access_to_state) {
        Access::Granted => next.run(request).await,
        Access::NoCertificate => error(
            StatusCode::FORBIDDEN,
            "the state needs a client certificate signed by the client CA of the extender, for a name of --debug-client-names",
        ),
        Access::OtherName(names) => error(
            StatusCode::FORBIDDEN,
            &format!(
                "a client certificate of {names} may not read the state: use one for a name of --debug-client-names"
            ),
        ),
    }
}
