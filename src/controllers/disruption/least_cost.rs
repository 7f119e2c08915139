//! Sets the gauge of what the nodes of all pods would cost at least, beside the bill.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stowage_model::units::MicroUsd;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::Context;
use crate::controllers::disruption::simulated_removal::least_cost;

/// How often the bound is computed at most.
const PERIOD: Duration = Duration::from_secs(20);
/// Pause after a computation, as a multiple of its duration: it takes at most a twentieth of one core.
const PAUSE: u32 = 20;

/// Labels of gauges without labels.
const NONE: [&str; 0] = [];

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    loop {
        let begin = Instant::now();
        pass(&ctx).await;
        heartbeat::rest(tokio::time::sleep(PERIOD.max(begin.elapsed() * PAUSE))).await;
    }
}

/// Computes the bound and sets the gauge.
async fn pass(ctx: &Arc<Context>) {
    let of = Arc::clone(ctx);
    let bound = tokio::task::spawn_blocking(move || least_cost(&of, &of.ready_pools(), clock::now())).await;
    show(ctx, bound.ok().flatten());
}

/// Sets the gauge, or removes it where there is no bound.
fn show(ctx: &Context, bound: Option<MicroUsd>) {
    let gauge = &ctx.metrics.least_cost;
    match bound {
        Some(bound) => gauge.with_label_values(&NONE).set(bound.usd()),
        // An error: there is no such series.
        None => drop(gauge.remove_label_values(&NONE)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::placement::mode::PlacementMode;
    use crate::test_support::kubernetes::FakeApi;
    use crate::test_support::scripted_cloud::FakeCloud;

    #[tokio::test]
    async fn a_leader_shows_the_bound_and_removes_it_when_there_is_none() {
        let api = FakeApi::default();
        api.put(&objects::node_pool("p", &json!({})));
        let ctx = api.context(Arc::new(FakeCloud::default()), PlacementMode::Nominate);
        let shown = || ctx.metrics.least_cost.with_label_values(&NONE).get();
        show(&ctx, Some(MicroUsd(1_500_000)));
        assert!((shown() - 1.5).abs() < 1e-9);
        pass(&ctx).await;
        assert!(shown().abs() < 1e-9, "nothing runs");
        show(&ctx, None);
        assert!(ctx.metrics.least_cost.remove_label_values(&NONE).is_err());
    }
}
