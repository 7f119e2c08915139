//! Reports the pods that are left out of plans: by an event and a log line.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use stowage_model::events;
use stowage_model::pod_class::PodClass;
use stowage_planner::PodEntry;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::controllers::context::{Context, pod_reference};
use crate::decisions::provisioning::quarantine::Cause;

/// Maximum number of pods that one plan emits events for.
const MAX_EVENTS: usize = 50;

/// Leaves pods out of plans for a while. `problem` is the error, for their events, which are emitted in the background.
pub fn quarantine(ctx: &Arc<Context>, pods: &[PodEntry], cause: Cause, problem: &str) {
    let mut classes: HashMap<*const PodClass, Option<u64>> = HashMap::new();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut notes = Vec::new();
    {
        let (mut quarantine, now) = (lock(&ctx.quarantine), clock::now());
        for pod in pods {
            *counts.entry(&pod.class.namespace).or_default() += 1;
            let seconds = classes
                .entry(Arc::as_ptr(&pod.class))
                .or_insert_with(|| quarantine.add(&pod.class, cause, now).map(|wait| wait.as_secs()));
            if let (Some(seconds), true) = (seconds, notes.len() < MAX_EVENTS) {
                let name = pod.key.split_once('/').map_or(&*pod.key, |(_, name)| name);
                let about = pod_reference(&pod.class.namespace, name, &pod.uid);
                notes.push((about, format!("left out of plans for {seconds} s: {problem}")));
            }
        }
    }
    for (namespace, pods) in counts.into_iter().take(MAX_EVENTS) {
        tracing::warn!(namespace, pods, cause = cause.as_str(), problem, "pods left out of plans");
    }
    let ctx = Arc::clone(ctx);
    tokio::spawn(async move {
        for (pod, note) in notes {
            ctx.emit(pod, events::QUARANTINED.note(&note)).await;
        }
    });
}
