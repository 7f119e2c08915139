//! Handlers of probes and metrics.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use stowage_runtime::telemetry::Metrics;

use crate::server::accept::Peer;
use crate::server::app_state::AppState;
use crate::server::intake::{Share, busy, in_chunks, in_chunks_of};
use crate::server::middleware::error;

/// Liveness: 200, or 503 with each loop that is stuck in a turn, one per line. Independent of the API server and the cloud: an outage must
/// not restart the process, and requests that fail are progress.
pub(crate) async fn live(State(state): State<Arc<AppState>>) -> Response {
    let overdue = state.heartbeats.overdue(Instant::now());
    if overdue.is_empty() {
        return "ok\n".into_response();
    }
    let mut stuck = String::new();
    for turn in overdue {
        let (name, age, limit) = (turn.name, turn.age.as_secs(), turn.limit.as_secs());
        let _ = writeln!(stuck, "loop {name} is stuck: no progress for {age} s, the limit is {limit} s");
    }
    tracing::error!(loops = stuck.trim_end(), "liveness failed");
    (StatusCode::SERVICE_UNAVAILABLE, stuck).into_response()
}

/// Readiness: 200, or 503 with one reason per line.
pub(crate) async fn ready(State(state): State<Arc<AppState>>) -> Response {
    let missing = state.readiness.missing((state.now)());
    state.metrics.ready.set(i64::from(missing.is_empty()));
    if missing.is_empty() {
        return "ok\n".into_response();
    }
    let mut reasons = missing.join("\n");
    reasons.push('\n');
    (StatusCode::SERVICE_UNAVAILABLE, reasons).into_response()
}

/// Renders all metrics. Metrics that depend on the clock are set here. A client that reads slowly keeps a text in memory, so the number of
/// answers in progress is bounded.
pub(crate) async fn metrics(
    State(state): State<Arc<AppState>>,
    Extension(peer): Extension<Peer>,
    Extension(scrapes): Extension<Arc<Share>>,
) -> Response {
    let mut scrape = scrapes.portion(peer.ticket.peer());
    if !scrape.grow(1) {
        return busy("too many scrapes in progress");
    }
    let now = (state.now)();
    for (certificate, expires_at) in state.readiness.expiries() {
        // A float holds every lifetime of a certificate exactly.
        #[allow(clippy::cast_precision_loss)]
        let seconds = (expires_at.0.saturating_sub(now.0) / 1000) as f64;
        state.metrics.cert_expiry.with_label_values(&[certificate]).set(seconds);
    }
    state.metrics.ready.set(i64::from(state.readiness.missing(now).is_empty()));
    match state.metrics.text() {
        Ok(text) => {
            let content_type = (header::CONTENT_TYPE, Metrics::content_type());
            if let Some(series) = state.series.parts() {
                let parts = stream::iter([text.into()]).chain(series).boxed();
                return ([content_type], in_chunks_of(parts, scrape)).into_response();
            }
            let head = [content_type, (header::CONTENT_LENGTH, text.len().to_string())];
            (head, in_chunks(text.into(), scrape)).into_response()
        }
        Err(cause) => error(StatusCode::INTERNAL_SERVER_ERROR, &format!("can't encode the metrics: {cause}")),
    }
}
