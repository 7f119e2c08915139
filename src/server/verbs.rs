//! Handlers of the webhook and the extender: decode the body, call a pure function, encode the result.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use crate::extender;
use crate::extender::{Answer, Denial, FilterArgs, PreemptArgs};
use crate::server::app_state::AppState;
use crate::server::intake::Body;
use crate::server::middleware::{WebhookResult, error};
use crate::webhook;

type Encoded = Result<Vec<u8>, String>;

/// `POST /v1/filter`.
pub(crate) async fn filter(State(state): State<Arc<AppState>>, body: Body) -> Response {
    verb("filter", state, body, |state, body| {
        let args: FilterArgs<'_> = parse("ExtenderArgs", body)?;
        let result = extender::filter(&state.requested_view(), (state.now)(), args);
        if result.answer == Answer::Stale {
            state.metrics.extender_stale.inc();
        }
        for denial in Denial::ALL {
            let count = result.denied.get(denial);
            if count > 0 {
                state.metrics.filter_denied.with_label_values(&[denial.as_str()]).inc_by(count);
            }
        }
        encode(&result)
    })
    .await
}

/// `POST /v1/prioritize`.
pub(crate) async fn prioritize(State(state): State<Arc<AppState>>, body: Body) -> Response {
    verb("prioritize", state, body, |state, body| {
        let args: FilterArgs<'_> = parse("ExtenderArgs", body)?;
        let (view, now) = (state.requested_view(), (state.now)());
        if view.is_stale(now) {
            state.metrics.extender_stale.inc();
        }
        encode(&extender::prioritize(&view, now, args))
    })
    .await
}

/// `POST /v1/preempt`.
pub(crate) async fn preempt(State(state): State<Arc<AppState>>, body: Body) -> Response {
    verb("preempt", state, body, |state, body| {
        let args: PreemptArgs<'_> = parse("ExtenderPreemptionArgs", body)?;
        let (view, now) = (state.requested_view(), (state.now)());
        if view.is_stale(now) {
            state.metrics.extender_stale.inc();
        }
        let result = extender::preempt(&view, now, args);
        for denial in Denial::ALL {
            let count = result.denied.get(denial);
            if count > 0 {
                state.metrics.preempt_dropped.with_label_values(&[denial.as_str()]).inc_by(count);
            }
        }
        encode(&result)
    })
    .await
}

/// `POST /mutate`.
pub(crate) async fn mutate(State(state): State<Arc<AppState>>, body: Body) -> Response {
    process(body, move |body| {
        let started = Instant::now();
        let review = webhook::review(body, &state.rules);
        state.metrics.webhook_seconds.with_label_values::<&str>(&[]).observe(started.elapsed().as_secs_f64());
        match review {
            Ok(review) => {
                for rule in &review.rules {
                    state.metrics.webhook_rules.with_label_values(&[*rule]).inc();
                }
                let mut response = axum::Json(review.response).into_response();
                response.extensions_mut().insert(WebhookResult(review.result.as_str()));
                response
            }
            Err(malformed) => error(StatusCode::BAD_REQUEST, &malformed.to_string()),
        }
    })
    .await
}

/// Runs an extender verb on a body and records its duration.
async fn verb(name: &'static str, state: Arc<AppState>, body: Body, run: fn(&AppState, &[u8]) -> Encoded) -> Response {
    process(body, move |body| {
        let started = Instant::now();
        let outcome = run(&state, body);
        state.metrics.extender_seconds.with_label_values(&[name]).observe(started.elapsed().as_secs_f64());
        match outcome {
            Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
            Err(malformed) => error(StatusCode::BAD_REQUEST, &malformed),
        }
    })
    .await
}

/// Runs `work` on a body: inline, or on a blocking thread when the body is large, few at a time. A panic propagates in both cases.
async fn process(body: Body, work: impl FnOnce(&[u8]) -> Response + Send + 'static) -> Response {
    if body.bytes.len() <= body.intake.bounds.large {
        return work(&body.bytes);
    }
    // A request that exceeds its time limit leaves the thread running: the permit goes with it.
    let permit = Arc::clone(&body.intake.processors).acquire_owned().await;
    let work = move || {
        let _permit = permit;
        work(&body.bytes)
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(response) => response,
        Err(failed) => match failed.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_cancelled) => error(StatusCode::SERVICE_UNAVAILABLE, "shutting down"),
        },
    }
}

fn parse<'a, T: Deserialize<'a>>(what: &str, body: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|cause| format!("the body is no {what}: {cause}"))
}

fn encode<T: Serialize>(answer: &T) -> Encoded {
    serde_json::to_vec(answer).map_err(|cause| format!("can't encode the answer: {cause}"))
}
