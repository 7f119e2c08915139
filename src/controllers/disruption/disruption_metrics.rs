//! Counts the decisions of voluntary disruption, labeled as Karpenter labels them (Karpenter core reference 8).

use std::collections::BTreeSet;
use std::time::Duration;

use stowage_runtime::telemetry::controllers::ControllerMetrics;

use crate::controllers::context::Context;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::object_ext::ObjectExt;

/// Karpenter's types of consolidation.
const EMPTY: &str = "empty";
const MULTI: &str = "multi";
const SINGLE: &str = "single";

/// Removal of nodes: for a reason, how many, and whether others replace them.
#[derive(Clone, Copy, Debug)]
pub struct Removed {
    pub reason: DisruptionReason,
    pub nodes: usize,
    pub has_replacements: bool,
}

impl Removed {
    /// Decision, reason and type of consolidation.
    fn labels(self) -> [&'static str; 3] {
        let decision = if self.has_replacements { "replace" } else { "delete" };
        [decision, self.reason.metric_label(), consolidation_type(self.reason, self.nodes)]
    }
}

/// The type of consolidation; empty for other reasons.
fn consolidation_type(reason: DisruptionReason, nodes: usize) -> &'static str {
    match reason {
        DisruptionReason::Empty => EMPTY,
        DisruptionReason::Underutilized if nodes > 1 => MULTI,
        DisruptionReason::Underutilized => SINGLE,
        _ => "",
    }
}

/// Counts a decision that began, once, and once for each NodePool of its nodes.
pub fn count_begun<'c>(ctx: &Context, removed: Removed, claims: impl IntoIterator<Item = &'c String>) {
    let [decision, reason, kind] = removed.labels();
    ctx.metrics.decisions.with_label_values(&[decision, reason, kind]).inc();
    let state = ctx.cluster.read();
    let pool_of = |claim: &String| Some(state.claims.get(claim)?.node_pool()?.to_owned());
    let pools: BTreeSet<String> = claims.into_iter().filter_map(pool_of).collect();
    for pool in pools {
        ctx.metrics.decisions_by_pool.with_label_values(&[&pool, decision, reason, kind]).inc();
    }
}

/// Counts a decision that was taken back.
pub fn count_taken_back(ctx: &Context, removed: Removed) {
    ctx.metrics.decisions_failed.with_label_values(&removed.labels()).inc();
}

/// Counts chosen nodes that changed before their removal began.
pub fn count_changed(ctx: &Context, reason: DisruptionReason, nodes: usize) {
    let counter = ctx.metrics.failed_validations.with_label_values(&[consolidation_type(reason, nodes)]);
    counter.inc_by(u64::try_from(nodes).unwrap_or(u64::MAX));
}

/// Records how long a choice took.
pub fn observe(ctx: &Context, reason: DisruptionReason, took: Duration) {
    let kind = consolidation_type(reason, usize::MAX);
    ctx.metrics.evaluation_seconds.with_label_values(&[reason.metric_label(), kind]).observe(took.as_secs_f64());
}

/// Counts a search that ran out of time.
pub fn count_timeout(ctx: &Context) {
    ctx.metrics.consolidation_timeouts.with_label_values(&[MULTI]).inc();
}

/// Series that are there before anything is counted: an alert on an increase would miss the first one.
pub fn preset(metrics: &ControllerMetrics) {
    for kind in [MULTI, SINGLE] {
        metrics.consolidation_timeouts.with_label_values(&[kind]).inc_by(0);
    }
    for reason in [DisruptionReason::Empty, DisruptionReason::Underutilized, DisruptionReason::Drifted] {
        for (nodes, has_replacements) in [(1, false), (2, false), (1, true), (2, true)] {
            let removed = Removed { reason, nodes, has_replacements };
            metrics.decisions_failed.with_label_values(&removed.labels()).inc_by(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_have_karpenters_labels() {
        use DisruptionReason::{Drifted, Empty, Underutilized};
        for (reason, nodes, has_replacements, labels) in [
            (Empty, 3, false, ["delete", "empty", "empty"]),
            (Underutilized, 1, false, ["delete", "underutilized", "single"]),
            (Underutilized, 2, true, ["replace", "underutilized", "multi"]),
            (Drifted, 2, true, ["replace", "drifted", ""]),
        ] {
            assert_eq!(Removed { reason, nodes, has_replacements }.labels(), labels);
        }
    }
}
