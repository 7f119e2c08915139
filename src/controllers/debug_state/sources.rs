//! Gathers the snapshot of a document.

use std::sync::{Arc, OnceLock, Weak};

use stowage_model::pod_class::PodClass;
use stowage_model::time::UnixMillis;

use crate::controllers::caps::Capped as CappedAction;
use crate::controllers::context::Context;
use crate::controllers::debug_state::document;
use crate::controllers::debug_state::snapshot::{Capped, ClusterCopy, LeaderCopy, MAX_ENTRIES, Process, Snapshot};
use crate::controllers::derived_state::DerivedState;
use crate::decisions::provisioning::quarantine::Cause;
use crate::state::Cluster;
use crate::sync::lock;

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
        document::render(&self.snapshot(process, now))
    }

    fn snapshot(&self, process: Process, now: UnixMillis) -> Snapshot {
        let cluster = ClusterCopy::of(&self.cluster.read());
        let holds = self.derived.last_holds();
        let ctx = self.leader.get().and_then(Weak::upgrade);
        let leader = ctx.map(|ctx| leader(&ctx, &cluster, now));
        Snapshot { now, process, watches: self.cluster.watch_signs().ages(now).collect(), cluster, holds, leader }
    }
}

fn leader(ctx: &Context, cluster: &ClusterCopy, now: UnixMillis) -> LeaderCopy {
    let (causes, pods_left_out) = {
        let (quarantine, backoff) = (lock(&ctx.quarantine), lock(&ctx.purchase_backoff));
        let cause = |class: &Result<Arc<PodClass>, String>| quarantine.cause(class.as_ref().ok()?, now);
        let in_vain = |key: &str| backoff.leaves_out(key).then_some(Cause::PurchasedInVain);
        let causes: Vec<Option<Cause>> = if quarantine.is_empty() && backoff.left_out().is_empty() {
            Vec::new()
        } else {
            cluster.pending.items.iter().map(|pod| cause(&pod.class).or_else(|| in_vain(&pod.key))).collect()
        };
        let left_out = quarantine.left_out(now).map(|(namespace, cause, until)| (Arc::clone(namespace), cause, until));
        (causes, Capped::of(left_out, quarantine.left_out(now).count()))
    };
    let supply_left_out = {
        let quarantine = lock(&ctx.supply_quarantine);
        let left_out = quarantine.left_out(now).map(|(source, until)| (source.kind(), source.name().to_owned(), until));
        Capped::of(left_out, quarantine.left_out(now).count())
    };
    let caps = [CappedAction::Purchase, CappedAction::Disruption].map(|what| {
        let most = ctx.most_per_minute(what);
        (what.label(), most, ctx.caps.admissible(what, most, now))
    });
    let reported = {
        let reported = lock(&ctx.reported);
        Capped::of(reported.iter().map(|(claim, reason)| (claim.clone(), *reason)), reported.len())
    };
    LeaderCopy {
        last_plan: lock(&ctx.last_plan).clone(),
        last_consolidation: lock(&ctx.last_consolidation).clone(),
        reported,
        causes,
        pods_left_out,
        supply_left_out,
        caps: caps.into(),
        offerings: ctx.cloud.capabilities().offering_status.map(|status| status.offering_state(MAX_ENTRIES, now)),
    }
}

#[cfg(test)]
mod tests;
