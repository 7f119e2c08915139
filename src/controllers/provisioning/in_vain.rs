//! Reports purchases in vain: by an event on the pod and its NodePool, a log line and a metric.

use std::collections::BTreeMap;
use std::sync::Arc;

use stowage_model::events;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::controllers::context::{Context, pod_reference, reference};
use crate::decisions::provisioning::purchase_backoff::PurchaseInVain;

/// Maximum number of pods that one pass emits events and log lines for.
const MAX_EVENTS: usize = 50;
/// Maximum length of the reason in an event, in characters.
const MAX_REASON: usize = 300;

/// Reports the purchases in vain since the last pass. Events are emitted in the background.
pub fn report_in_vain(ctx: &Arc<Context>, now: UnixMillis) {
    let reports = lock(&ctx.purchase_backoff).take_reports();
    if reports.is_empty() {
        return;
    }
    let mut pools: BTreeMap<&str, (usize, &PurchaseInVain)> = BTreeMap::new();
    for report in reports.iter().filter(|report| report.is_first) {
        ctx.metrics.purchased_in_vain.with_label_values(&[&report.pool]).inc();
        pools.entry(&report.pool).or_insert((0, report)).0 += 1;
    }
    let mut notes = Vec::new();
    for report in reports.iter().take(MAX_EVENTS) {
        let PurchaseInVain { claim, node, pool, pod, nodes, reason, .. } = report;
        let node = node.as_deref().unwrap_or_default();
        let seconds = report.retry_at.saturating_since(now).as_secs();
        tracing::warn!(
            pod,
            claim,
            node,
            node_pool = pool,
            nodes,
            retry_seconds = seconds,
            reason,
            "node did not take the pod it was purchased for"
        );
        if let Some((namespace, name)) = pod.split_once('/') {
            notes.push((pod_reference(namespace, name, &report.uid), note_on_pod(report, seconds)));
        }
    }
    {
        let state = ctx.cluster.read();
        for (pool, (nodes, first)) in pools {
            let Some(pool) = state.pools.get(pool) else { continue };
            let note = format!(
                "{} did not take pods that they were purchased for, such as {} for {}",
                counted(nodes),
                first.claim,
                first.pod
            );
            notes.push((reference(&**pool), note));
        }
    }
    let ctx = Arc::clone(ctx);
    tokio::spawn(async move {
        for (about, note) in notes {
            ctx.emit(about, events::PURCHASED_IN_VAIN.note(&note)).await;
        }
    });
}

fn counted(nodes: usize) -> String {
    if nodes == 1 { "1 node".to_owned() } else { format!("{nodes} nodes") }
}

fn note_on_pod(report: &PurchaseInVain, seconds: u64) -> String {
    let nodes = counted(usize::try_from(report.nodes).unwrap_or(usize::MAX));
    let last = report.node.as_deref().unwrap_or(&report.claim);
    let when = if seconds == 0 { "at once".to_owned() } else { format!("in {seconds} s") };
    let reason: String = report.reason.chars().take(MAX_REASON).collect();
    let reason = if reason.is_empty() { "for an unknown reason".to_owned() } else { reason };
    format!(
        "{nodes} purchased for it in vain; the last one is {last}: {reason}; it is planned on a new node again {when}"
    )
}
