//! Loops that go on after a panic: a defect in one of them stops neither the others nor webhook and extender.

use std::time::{Duration, Instant};

use prometheus::IntCounterVec;
use stowage_runtime::sync::heartbeat;
use stowage_runtime::sync::panics::catch_async;

/// First and longest wait before a loop that panicked starts over; the wait doubles with each panic.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// Runs a loop, and starts it over when it panics. Ends when the loop ends without a panic.
pub async fn supervised<F>(name: &'static str, panics: IntCounterVec, run: impl Fn() -> F)
where
    F: Future<Output = ()>,
{
    supervised_with(BACKOFF, name, panics, run).await;
}

async fn supervised_with<F>(
    (first, longest): (Duration, Duration),
    name: &'static str,
    panics: IntCounterVec,
    run: impl Fn() -> F,
) where
    F: Future<Output = ()>,
{
    let mut wait = first;
    // Before the first panic: an alert on an increase would miss it.
    panics.with_label_values(&[name]).inc_by(0);
    loop {
        let started = Instant::now();
        let Err(panic) = catch_async(run()).await else { return };
        panics.with_label_values(&[name]).inc();
        heartbeat::fail();
        if started.elapsed() > longest {
            wait = first;
        }
        tracing::error!(name, %panic, seconds = wait.as_secs(), "loop panicked, starting it over");
        heartbeat::rest(tokio::time::sleep(wait)).await;
        wait = (wait * 2).min(longest);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use stowage_runtime::sync::heartbeat::Heartbeats;
    use stowage_runtime::telemetry::Metrics;

    use super::*;

    #[tokio::test]
    async fn a_loop_that_panics_starts_over_with_backoff_and_is_not_stuck_meanwhile() {
        const BACKOFF: (Duration, Duration) = (Duration::from_millis(40), Duration::from_millis(100));
        let (metrics, heartbeats, runs) = (Metrics::new(), Heartbeats::default(), AtomicU32::new(0));
        let run = || {
            let run = runs.fetch_add(1, Ordering::SeqCst);
            async move { assert!(run == 3, "run {run}") }
        };
        let begin = Instant::now();
        let supervised = supervised_with(BACKOFF, "l", metrics.loop_panics.clone(), run);
        let supervised = heartbeats.run("l", Duration::ZERO, supervised);
        let observed = async {
            tokio::time::sleep(BACKOFF.0 / 2).await;
            assert!(heartbeats.overdue(Instant::now() + Duration::from_hours(1)).is_empty(), "it rests");
        };
        tokio::join!(supervised, observed);
        assert!(begin.elapsed() >= Duration::from_millis(40 + 80 + 100));
        assert_eq!(metrics.loop_panics.with_label_values(&["l"]).get(), 3);
    }
}
