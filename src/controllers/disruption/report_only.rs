//! Disruption that is only reported: what the loops would disrupt now, as events, in the log and in the debug state.

use std::collections::BTreeMap;

use kube::ResourceExt;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::controllers::context::Context;
use crate::controllers::event_queue::EventQueue;
use crate::decisions::disruption::blockers::Blocker;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::decisions::disruption::verdicts::{Reports, Verdict};
use crate::decisions::lifecycle::expiration::expired;
use crate::decisions::lifecycle::node_repair::repairs;
use crate::state::pool_types::ReadyPool;

/// Claims that a log line names.
const MAX_LOGGED: usize = 20;

/// What was reported so far.
#[derive(Debug, Default)]
pub struct ReportOnly {
    reports: Reports,
}

impl ReportOnly {
    /// Reports nodes that would be disrupted now, with unhealthy and expired ones; each with the first of its reasons.
    pub fn report(
        &mut self,
        ctx: &Context,
        pools: &[ReadyPool],
        queue: &EventQueue,
        chosen: [(DisruptionReason, Vec<String>); 4],
        now: UnixMillis,
    ) {
        let mut found: BTreeMap<String, DisruptionReason> = BTreeMap::new();
        let (due, _) = expired(&ctx.cluster.read(), now);
        let expired = (DisruptionReason::Expired, due.iter().map(|claim| claim.name_any()).collect());
        let unhealthy = if ctx.settings.node_repair { repairs(&ctx.cluster.read(), now).due } else { Vec::new() };
        let unhealthy = (DisruptionReason::Unhealthy, unhealthy.iter().map(|repair| repair.claim.name_any()).collect());
        for (reason, claims) in [unhealthy, expired].into_iter().chain(chosen) {
            for claim in claims {
                found.entry(claim).or_insert(reason);
            }
        }
        let verdicts: Vec<Verdict> = {
            let state = ctx.cluster.read();
            let types = ctx.derived.facts(&state, pools).types;
            let price = |claim: &String| state.claims.get(claim).map(|claim| types.price(claim)).unwrap_or_default();
            let reported = |(claim, reason): (&String, &DisruptionReason)| {
                Verdict::stays(claim.clone(), price(claim), Blocker::ReportedOnly(*reason))
            };
            found.iter().map(reported).collect()
        };
        for verdict in self.reports.due(&verdicts, now) {
            let claim = ctx.cluster.read().claims.get(&verdict.claim).cloned();
            if let (Some(claim), Some((event, note))) = (claim, verdict.event()) {
                queue.emit_for_claim_and_node(ctx, &claim, event, &note);
            }
        }
        let before = std::mem::replace(&mut *lock(&ctx.reported), found.clone());
        if before != found {
            let of = |reason| found.values().filter(|found| **found == reason).count();
            let claims: Vec<&str> = found.keys().take(MAX_LOGGED).map(String::as_str).collect();
            tracing::info!(
                nodes = found.len(),
                unhealthy = of(DisruptionReason::Unhealthy),
                expired = of(DisruptionReason::Expired),
                empty = of(DisruptionReason::Empty),
                drifted = of(DisruptionReason::Drifted),
                underutilized = of(DisruptionReason::Underutilized),
                claims = claims.join(" "),
                "disruption is only reported, these nodes would be disrupted"
            );
        }
    }
}
