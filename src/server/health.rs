//! Probes and metrics.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::server::middleware::error;
use crate::server::state::AppState;
use crate::telemetry::Metrics;

/// Alive as long as it can answer: never depends on the API server, whose outage must not restart us.
pub(crate) async fn live() -> &'static str {
    "ok\n"
}

/// 200 when ready, else 503 with one reason a line.
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

/// Every metric as text. Those that depend on the clock are set here.
pub(crate) async fn metrics(State(state): State<Arc<AppState>>) -> Response {
    let now_ms = (state.now)();
    for (certificate, expires_at_ms) in state.readiness.expiries() {
        // Seconds past 2^53 are no certificate's life.
        #[allow(clippy::cast_precision_loss)]
        let seconds = (expires_at_ms.saturating_sub(now_ms) / 1000) as f64;
        state.metrics.cert_expiry.with_label_values(&[certificate]).set(seconds);
    }
    state.metrics.ready.set(i64::from(state.readiness.missing(now_ms).is_empty()));
    match state.metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, Metrics::content_type())], text).into_response(),
        Err(cause) => error(StatusCode::INTERNAL_SERVER_ERROR, &format!("can't encode the metrics: {cause}")),
    }
}
