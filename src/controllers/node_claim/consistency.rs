//! Compares nodes with what was launched, and writes the condition ConsistentStateFound.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::conditions::Conditions;
use stowage_api::{NodeClaim, conditions};
use stowage_model::events;
use stowage_runtime::sync::heartbeat;

use crate::controllers::condition_writer::write_condition;
use crate::controllers::context::{Context, ignore_not_found};
use crate::decisions::lifecycle::consistency::issues;
use crate::state::object_ext::NodeClaimExt;

/// How often every node is compared.
const PERIOD: Duration = Duration::from_mins(10);
/// Wait between two parts of a pass, and the claims that one part writes: after an upgrade every claim lacks the condition.
const REST: Duration = Duration::from_secs(1);
const MAX_WRITES: usize = 20;

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    loop {
        let mut done = BTreeSet::new();
        while pass(&ctx, &mut done).await {
            heartbeat::rest(tokio::time::sleep(REST)).await;
        }
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
    }
}

/// Sets the condition by what a node lacks. Returns whether it changed.
pub fn set(list: &mut Conditions<'_>, issues: &[String]) -> bool {
    if issues.is_empty() {
        return list.set_true(conditions::CONSISTENT_STATE_FOUND);
    }
    list.set_false(conditions::CONSISTENT_STATE_FOUND, conditions::CONSISTENCY_CHECK_FAILED, "Consistency Check Failed")
}

/// Reports what nodes lack, and writes conditions that are out of date: of claims that are not `done` yet, as many as one part may. Returns whether there
/// are more.
async fn pass(ctx: &Context, done: &mut BTreeSet<String>) -> bool {
    let due: Vec<(Arc<NodeClaim>, Arc<Node>, Vec<String>)> = {
        let state = ctx.cluster.read();
        let others = state.claims.iter().filter(|(name, _)| !done.contains(*name));
        let outdated = others.filter_map(|(_, claim)| {
            let node = state.node_of(claim)?;
            let issues = issues(claim, node)?;
            let is_true =
                claim.condition(conditions::CONSISTENT_STATE_FOUND).is_some_and(|found| found.status == "True");
            (!issues.is_empty() || !is_true).then(|| (Arc::clone(claim), Arc::clone(node), issues))
        });
        outdated.take(MAX_WRITES).collect()
    };
    for (claim, node, issues) in &due {
        done.insert(claim.name_any());
        for issue in issues {
            tracing::warn!(claim = claim.name_any(), node = node.name_any(), issue, "node is not what was launched");
            ctx.emit_for_claim(claim, events::FAILED_CONSISTENCY_CHECK.note(issue)).await;
        }
        if let Err(error) = ignore_not_found(write_condition(ctx, claim, |list| set(list, issues)).await) {
            tracing::debug!(claim = claim.name_any(), %error, "failed to write the condition of a node's consistency, retrying");
        }
    }
    due.len() == MAX_WRITES
}

#[cfg(test)]
mod write_tests;
