//! Gathers the document.

use std::sync::{Arc, OnceLock, Weak};

use stowage_model::time::UnixMillis;
use stowage_runtime::sync::heartbeat::Turn;
use stowage_runtime::sync::lock;

use crate::controllers::caps::Capped;
use crate::controllers::context::Context;
use crate::controllers::debug_state::document::{
    Cap, Consolidation, DebugState, Leader, List, Loop, MAX_ENTRIES, Offerings, Pending, PlanSummary, QuarantinedClass,
    QuarantinedSource, Watch, WouldDisrupt,
};
use crate::controllers::derived_state::DerivedState;
use crate::decisions::provisioning::quarantine::Cause;
use crate::state::Cluster;

/// What the process knows about itself.
#[derive(Debug, Default)]
pub struct Process {
    pub version: &'static str,
    pub leading_since: Option<UnixMillis>,
    /// Why it is not ready.
    pub not_ready: Vec<&'static str>,
    /// The turns of its loops.
    pub turns: Vec<Turn>,
}

/// Where the state of a replica is.
#[derive(Debug)]
pub struct DebugSources {
    cluster: Arc<Cluster>,
    derived: Arc<DerivedState>,
    leader: OnceLock<Weak<Context>>,
}

impl DebugSources {
    pub fn new(cluster: Arc<Cluster>, derived: Arc<DerivedState>) -> Self {
        Self { cluster, derived, leader: OnceLock::new() }
    }

    /// Adds what the leader knows. A process leads once.
    pub fn set_leader(&self, ctx: &Arc<Context>) {
        let _ = self.leader.set(Arc::downgrade(ctx));
    }

    /// The document at `now`. Each lock is held for the copy of at most a few thousand entries.
    pub fn document(&self, process: Process, now: UnixMillis) -> Vec<u8> {
        let mut document = DebugState::of_tables(&self.cluster.read(), now);
        document.version = process.version;
        document.leading = process.leading_since.is_some();
        document.leading_since = process.leading_since.map(UnixMillis::rfc3339);
        document.not_ready = process.not_ready;
        document.loops = process.turns.iter().map(Loop::of).collect();
        let watch = |(kind, age, lists): (_, std::time::Duration, _)| Watch { kind, age_seconds: age.as_secs(), lists };
        document.watches = self.cluster.watch_signs().ages(now).map(watch).collect();
        if let Some((at, holds)) = self.derived.last_holds() {
            document.add_holds(at, &holds);
        }
        if let Some(ctx) = self.leader.get().and_then(Weak::upgrade) {
            let last_plan = lock(&ctx.last_plan).clone();
            document.add_reasons(&causes(&ctx, &document.pending_pods.items, now), last_plan.as_deref());
            document.leader = Some(leader(&ctx, last_plan.as_deref().map(PlanSummary::of), now));
        }
        document.render()
    }
}

/// Why each of these pods is left out of plans.
fn causes(ctx: &Context, pods: &[Pending], now: UnixMillis) -> Vec<Option<Cause>> {
    let (quarantine, backoff) = (lock(&ctx.quarantine), lock(&ctx.purchase_backoff));
    if quarantine.is_empty() && backoff.left_out().is_empty() {
        return Vec::new();
    }
    let in_vain = |key: &str| backoff.leaves_out(key).then_some(Cause::PurchasedInVain);
    let cause = |pod: &Pending| pod.class.as_ref().and_then(|class| quarantine.cause(class, now));
    pods.iter().map(|pod| cause(pod).or_else(|| in_vain(&pod.key))).collect()
}

fn leader(ctx: &Context, last_plan: Option<PlanSummary>, now: UnixMillis) -> Leader {
    let quarantined_pod_classes = {
        let quarantine = lock(&ctx.quarantine);
        let entries =
            quarantine.left_out(now).map(|(namespace, cause, until)| QuarantinedClass::of(namespace, cause, until));
        List::of(entries, quarantine.left_out(now).count())
    };
    let quarantined_supply = {
        let quarantine = lock(&ctx.supply_quarantine);
        let entries =
            quarantine.left_out(now).map(|(source, until)| QuarantinedSource::of(source.kind(), source.name(), until));
        List::of(entries, quarantine.left_out(now).count())
    };
    let would_disrupt = {
        let reported = lock(&ctx.reported);
        List::of(reported.iter().map(|(claim, reason)| WouldDisrupt::of(claim, *reason)), reported.len())
    };
    let cap = |what: Capped| {
        let per_minute = ctx.most_per_minute(what);
        Cap { action: what.label(), per_minute, left: ctx.caps.admissible(what, per_minute, now) }
    };
    let offerings = ctx.cloud.capabilities().offering_status;
    Leader {
        last_plan,
        last_consolidation: lock(&ctx.last_consolidation).as_ref().map(Consolidation::of),
        would_disrupt,
        quarantined_pod_classes,
        quarantined_supply,
        caps: [Capped::Purchase, Capped::Disruption].map(cap).into(),
        offerings: offerings.map(|status| Offerings::of(&status.offering_state(MAX_ENTRIES, now), now)),
    }
}

#[cfg(test)]
mod tests;
