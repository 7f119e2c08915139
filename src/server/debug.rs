//! The handler of `/debug/state`: what this replica believes, as JSON.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::server::accept::Peer;
use crate::server::app_state::AppState;
use crate::server::intake::{Share, busy, in_chunks};
use crate::server::middleware::error;

/// How long a document is answered again: however many clients ask, it is made once in this time.
const FRESH: Duration = Duration::from_secs(1);

/// `GET /debug/state`. A client that reads slowly keeps a document in memory, so the number of answers in progress is bounded.
pub(crate) async fn state(
    State(state): State<Arc<AppState>>,
    Extension(peer): Extension<Peer>,
    Extension(answers): Extension<Arc<Share>>,
) -> Response {
    let mut answer = answers.portion(peer.ticket.peer());
    if !answer.grow(1) {
        return busy("too many answers in progress");
    }
    let Some(render) = state.debug.render() else {
        return error(StatusCode::SERVICE_UNAVAILABLE, "starting");
    };
    let mut last = state.debug.last().await;
    let fresh = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH).map(|(_, document)| document.clone());
    let document = if let Some(document) = fresh {
        document
    } else {
        // Not on a thread that drives connections. The lock goes with it: a source that hangs takes one thread, not one per request.
        let make = move || {
            let document = Bytes::from(render());
            *last = Some((Instant::now(), document.clone()));
            document
        };
        match tokio::task::spawn_blocking(make).await {
            Ok(document) => document,
            Err(failed) => match failed.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_cancelled) => return error(StatusCode::SERVICE_UNAVAILABLE, "shutting down"),
            },
        }
    };
    let head = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::CONTENT_LENGTH, document.len().to_string()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
    ];
    (head, in_chunks(document, answer)).into_response()
}
