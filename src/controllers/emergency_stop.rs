//! The emergency stop and the caps per minute: bounds on what a defect, a wrong configuration or an attack can purchase and terminate.

use std::sync::Arc;
use std::time::Duration;

use stowage_model::events;
use stowage_model::pause::Pause;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::run_loop::{Pace, RunLoop};

const PACE: Pace = Pace { debounce: Duration::from_millis(50), resync: Duration::from_secs(10) };

impl Context {
    /// What is paused now.
    pub fn pause(&self) -> Pause {
        self.cluster.read().pause()
    }

    /// How many nodes may be purchased or disrupted now, or would be if disruption were not only reported.
    pub fn admissible(&self, what: Capped) -> usize {
        let pause = self.pause();
        let is_paused = match what {
            Capped::Purchase => pause.provisioning,
            Capped::Disruption => !pause.allows_decisions(),
        };
        if is_paused { 0 } else { self.caps.admissible(what, self.most_per_minute(what), clock::now()) }
    }

    fn is_paused(&self, what: Capped) -> bool {
        let pause = self.pause();
        match what {
            Capped::Purchase => pause.provisioning,
            Capped::Disruption => pause.disruption,
        }
    }

    /// The cap that applies now.
    pub fn most_per_minute(&self, what: Capped) -> usize {
        match what {
            Capped::Purchase => {
                let most = self.settings.max_purchases_per_minute;
                let claims = self.cluster.read().claims.len();
                let bound = lock(&self.supply_quarantine).purchases_per_minute(claims, clock::now());
                bound.map_or(most, |bound| bound.min(most))
            }
            Capped::Disruption => self.settings.max_disruptions_per_minute,
        }
    }

    /// How many of `wanted` nodes may be purchased or disrupted now. Reports the rest, except during a pause, which may have begun since
    /// the pass did.
    pub async fn admit(&self, what: Capped, wanted: usize) -> usize {
        if self.is_paused(what) {
            return 0;
        }
        let most = self.most_per_minute(what);
        let admitted = self.caps.admit(what, wanted, most, clock::now());
        if admitted < wanted {
            let action = what.label();
            tracing::warn!(action, wanted, admitted, most, "cap per minute reached, the rest waits");
            self.metrics.capped.with_label_values(&[action]).inc_by((wanted - admitted) as u64);
            let note = format!("the cap of {most} nodes per minute for {action}s is reached; the rest waits");
            self.emit_for_classes(events::RATE_CAPPED.note(&note)).await;
        }
        admitted
    }
}

/// Reports changes of the emergency stop until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut run_loop = RunLoop::new(&ctx.cluster, PACE);
    let mut last = Pause::default();
    loop {
        let pause = ctx.pause();
        for (scope, is_paused) in
            [("provisioning", pause.provisioning), ("disruption", pause.disruption), ("report", pause.report)]
        {
            ctx.metrics.paused.with_label_values(&[scope]).set(is_paused.into());
        }
        if pause != last {
            last = pause;
            let paused = pause.label();
            tracing::warn!(paused, "emergency stop changed");
            let note = format!("paused by the emergency stop: {paused}");
            let event =
                if pause == Pause::default() { events::RESUMED.note(&note) } else { events::PAUSED.note(&note) };
            ctx.emit_for_classes(event).await;
        }
        run_loop.next().await;
    }
}

#[cfg(test)]
mod write_tests;
