//! What is reported about pods that a plan leaves without a node. Tenants choose how many such pods there are and how often they are planned:
//! a pod and reason is reported once, and the number of lines and events is bounded.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use stowage_model::time::UnixMillis;
use stowage_planner::PodEntry;

/// Maximum number of reasons in a summary.
const MAX_REASONS: usize = 5;
/// Maximum number of pods that are reported one by one in [`PERIOD`].
const MAX_PODS: usize = 200;
/// See [`MAX_PODS`].
const PERIOD: Duration = Duration::from_secs(10);
/// An event about a pod is repeated after this time, while the pod has no node.
const REPEAT: Duration = Duration::from_mins(2);

/// The reports so far about pods that have no node.
#[derive(Debug, Default)]
pub struct UnschedulablePods {
    /// A hash of UID and reason, and when it was reported, by pod.
    reported: HashMap<Arc<str>, (u64, UnixMillis)>,
    period_began: UnixMillis,
    /// Pods reported one by one in the present period.
    in_period: usize,
}

/// What to report about a plan.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Pods to report one by one, as indexes into the argument.
    pub pods: Vec<usize>,
    /// Most frequent reasons with their numbers of pods; empty when every pod was reported with its reason before.
    pub reasons: Vec<(String, usize)>,
    /// Number of reasons that are left out.
    pub other_reasons: usize,
}

impl UnschedulablePods {
    /// Chooses what to report about the pods that a plan of `now` leaves without a node, with their reasons. Namespaces take turns.
    pub fn report(&mut self, pods: &[(&PodEntry, &str)], now: UnixMillis) -> Report {
        if self.period_began.is_older_than(PERIOD, now) {
            (self.period_began, self.in_period) = (now, 0);
        }
        let mut before = std::mem::take(&mut self.reported);
        let mut counts: HashMap<&str, usize> = HashMap::new();
        let mut fresh: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        let mut is_new = false;
        for (index, (pod, reason)) in pods.iter().enumerate() {
            *counts.entry(reason).or_default() += 1;
            let hash = hash(&(&pod.uid, reason));
            match before.remove(&pod.key).filter(|(old, _)| *old == hash) {
                Some((_, at)) if !at.is_older_than(REPEAT, now) => {
                    self.reported.insert(Arc::clone(&pod.key), (hash, at));
                }
                known => {
                    is_new |= known.is_none();
                    fresh.entry(&pod.class.namespace).or_default().push(index);
                }
            }
        }
        let mut report = Report { pods: in_turns(fresh, MAX_PODS.saturating_sub(self.in_period)), ..Report::default() };
        self.in_period += report.pods.len();
        for index in &report.pods {
            let (pod, reason) = &pods[*index];
            self.reported.insert(Arc::clone(&pod.key), (hash(&(&pod.uid, reason)), now));
        }
        if is_new && !report.pods.is_empty() {
            let mut reasons: Vec<(String, usize)> =
                counts.into_iter().map(|(reason, count)| (reason.to_owned(), count)).collect();
            reasons.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
            report.other_reasons = reasons.len().saturating_sub(MAX_REASONS);
            reasons.truncate(MAX_REASONS);
            report.reasons = reasons;
        }
        report
    }
}

/// The first members of each group in turns, at most `most`: no group keeps another one out.
pub fn in_turns<T>(groups: BTreeMap<&str, Vec<T>>, most: usize) -> Vec<T> {
    let mut turns: Vec<_> = groups.into_values().map(Vec::into_iter).collect();
    let mut out = Vec::new();
    while out.len() < most && !turns.is_empty() {
        turns.retain_mut(|turn| turn.next().map(|member| out.push(member)).is_some());
    }
    out.truncate(most);
    out
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
