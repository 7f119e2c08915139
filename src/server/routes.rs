//! Routes of each listener.

use std::sync::Arc;

use axum::Extension;
use axum::Router;
use axum::http::StatusCode;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};

use crate::server::app_state::AppState;
use crate::server::intake::{Intake, Share};
use crate::server::middleware::{Guard, error, guard, require_api_server, require_operator, require_scheduler, track};
use crate::server::server_settings::ServerConfig;
use crate::server::{debug, health, verbs};

/// Answers of `/metrics` in progress, in total and per peer.
const SCRAPES: usize = 8;
const SCRAPES_PER_PEER: usize = 2;

/// Answers of `/debug/state` in progress, in total and per peer.
const STATES: usize = 4;
const STATES_PER_PEER: usize = 2;

/// The HTTPS listener.
pub(crate) fn https(config: &ServerConfig, state: &Arc<AppState>) -> Router {
    let extender = Router::new()
        .route("/v1/filter", post(verbs::filter))
        .route("/v1/prioritize", post(verbs::prioritize))
        .route("/v1/preempt", post(verbs::preempt))
        .layer(Extension(Intake::new(config.extender)))
        .route_layer(from_fn(require_scheduler));
    let webhook = Router::new()
        .route("/mutate", post(verbs::mutate))
        .layer(Extension(Intake::new(config.webhook)))
        .route_layer(from_fn(require_api_server));
    let debug = Router::new()
        .route("/debug/state", get(debug::state))
        .layer(Extension(Share::new(STATES, STATES_PER_PEER, 0)))
        .route_layer(from_fn(require_operator));
    let guarded = Guard { state: Arc::clone(state), request_timeout: config.request_timeout };
    extender
        .merge(webhook)
        .merge(debug)
        .merge(probes())
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(guarded, guard))
        .layer(from_fn(track))
        .with_state(Arc::clone(state))
}

/// The health listener.
pub(crate) fn health(state: &Arc<AppState>) -> Router {
    probes().fallback(not_found).layer(from_fn(track)).with_state(Arc::clone(state))
}

/// The metrics listener.
pub(crate) fn metrics(state: &Arc<AppState>) -> Router {
    Router::new()
        .route("/metrics", get(health::metrics))
        .layer(Extension(Share::new(SCRAPES, SCRAPES_PER_PEER, 0)))
        .fallback(not_found)
        .layer(from_fn(track))
        .with_state(Arc::clone(state))
}

fn probes() -> Router<Arc<AppState>> {
    Router::new()
        .route("/livez", get(health::live))
        .route("/healthz", get(health::live))
        .route("/readyz", get(health::ready))
}

async fn not_found() -> Response {
    error(StatusCode::NOT_FOUND, "no such path")
}

async fn wrong_method() -> Response {
    error(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method")
}
