//! NodePools, nodes and DaemonSets that are left out of plans for a while, because the planner panics over them whatever pods it plans.
//!
//! Nothing is purchased from such a NodePool. Of such a node the room is not used; its pods still count for topology unless the planner
//! panics over them, too. The node itself is left alone. New nodes reserve nothing for the pods of such a DaemonSet.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use stowage_model::time::UnixMillis;

use crate::state::snapshot::{NodeUse, Snapshot};

/// First and longest time that a NodePool or node is left out; it doubles with each failure.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(30), Duration::from_mins(5));
/// NodeClaims per minute while the room of a node is not used: this many, or this percentage of all NodeClaims if that is more. Pods that
/// fit on a node that is left out must not fill the cluster with purchases.
const PURCHASES: (usize, usize) = (20, 10);

/// A NodePool or a node, by name, or a DaemonSet, `namespace/name`. A node without a Node object has the name of its NodeClaim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    NodePool(Arc<str>),
    Node(Arc<str>),
    DaemonSet(Arc<str>),
}

impl Source {
    /// Values of the metric label `kind`.
    pub const KINDS: [&'static str; 3] = ["nodepool", "node", "daemonset"];

    /// The metric label `kind`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NodePool(_) => "nodepool",
            Self::Node(_) => "node",
            Self::DaemonSet(_) => "daemonset",
        }
    }

    pub fn name(&self) -> &str {
        let (Self::NodePool(name) | Self::Node(name) | Self::DaemonSet(name)) = self;
        name
    }

    /// The NodePools and nodes of a snapshot, in its order.
    pub fn pools_and_nodes(snapshot: &Snapshot) -> Vec<Self> {
        let pools = snapshot.problem.pools.iter().map(|pool| Self::NodePool(Arc::clone(&pool.name)));
        pools.chain(snapshot.problem.nodes.iter().map(|node| Self::Node(Arc::clone(&node.name)))).collect()
    }

    /// The DaemonSets of a snapshot, in its order.
    pub fn daemon_sets(snapshot: &Snapshot) -> Vec<Self> {
        snapshot.problem.daemons.iter().map(|daemon| Self::DaemonSet(Arc::clone(&daemon.key))).collect()
    }
}

#[derive(Debug)]
struct Entry {
    /// Of the NodePool: another one is planned with at once.
    generation: Option<i64>,
    keeps_pods: bool,
    until: UnixMillis,
    /// The time for which it is left out after the next failure.
    next: Duration,
}

/// The NodePools, nodes and DaemonSets that are left out, or were. At most as many as there are.
#[derive(Debug, Default)]
pub struct SupplyQuarantine {
    entries: BTreeMap<Source, Entry>,
}

impl SupplyQuarantine {
    /// Leaves a source out from `now` on. Returns for how long.
    pub fn add(&mut self, source: Source, generation: Option<i64>, keeps_pods: bool, now: UnixMillis) -> Duration {
        let entry = self.entries.entry(source);
        let entry = entry.or_insert(Entry { generation, keeps_pods, until: now, next: BACKOFF.0 });
        let wait = if entry.generation == generation { entry.next } else { BACKOFF.0 };
        *entry = Entry { generation, keeps_pods, until: now + wait, next: (wait * 2).min(BACKOFF.1) };
        wait
    }

    /// Whether a plan with this source failed before.
    pub fn has_failed(&self, source: &Source) -> bool {
        self.entries.contains_key(source)
    }

    /// Whether a source is left out at `now`.
    pub fn is_left_out(&self, source: &Source, now: UnixMillis) -> bool {
        self.entries.get(source).is_some_and(|entry| now < entry.until)
    }

    /// Forgets the sources that a plan passed with: those that were not left out of a plan at `now`.
    pub fn plan_passed(&mut self, now: UnixMillis) {
        self.entries.retain(|_, entry| now < entry.until);
    }

    /// Forgets the sources that no longer exist.
    pub fn retain(&mut self, exists: impl Fn(&Source) -> bool) {
        self.entries.retain(|source, _| exists(source));
    }

    /// Removes from a snapshot what is left out at `now`. `generation` is that of the NodePool of a name.
    pub fn leave_out(&self, snapshot: &mut Snapshot, generation: impl Fn(&str) -> Option<i64>, now: UnixMillis) {
        let waiting = |source: &Source| self.entries.get(source).filter(|entry| now < entry.until);
        if self.entries.values().all(|entry| entry.until <= now) {
            return;
        }
        snapshot.restrict(
            |pool| {
                waiting(&Source::NodePool(Arc::clone(pool))).is_none_or(|entry| entry.generation != generation(pool))
            },
            |node| match waiting(&Source::Node(Arc::clone(node))) {
                None => NodeUse::Whole,
                Some(entry) if entry.keeps_pods => NodeUse::PodsOnly,
                Some(_) => NodeUse::None,
            },
        );
        snapshot.problem.daemons.retain(|daemon| waiting(&Source::DaemonSet(Arc::clone(&daemon.key))).is_none());
    }

    /// The sources that are left out at `now`, with the end.
    pub fn left_out(&self, now: UnixMillis) -> impl Iterator<Item = (&Source, UnixMillis)> {
        self.entries.iter().filter(move |(_, entry)| now < entry.until).map(|(source, entry)| (source, entry.until))
    }

    /// How many sources of each of [`Source::KINDS`] are left out at `now`.
    pub fn counts(&self, now: UnixMillis) -> [usize; 3] {
        let left_out = || self.entries.iter().filter(|(_, entry)| now < entry.until);
        Source::KINDS.map(|kind| left_out().filter(|(source, _)| source.kind() == kind).count())
    }

    /// Whether a DaemonSet is left out at `now`.
    pub fn leaves_out_daemon_sets(&self, now: UnixMillis) -> bool {
        self.left_out(now).any(|(source, _)| matches!(source, Source::DaemonSet(_)))
    }

    /// Number of NodeClaims that may be created in any minute, in a cluster with this many; `None` while no node is left out.
    pub fn purchases_per_minute(&self, claims: usize, now: UnixMillis) -> Option<usize> {
        let (fixed, percent) = PURCHASES;
        (self.counts(now)[1] > 0).then(|| fixed.max(claims * percent / 100))
    }
}

#[cfg(test)]
mod tests {
    use stowage_planner::Daemon;

    use super::*;

    const NOW: UnixMillis = UnixMillis(1_000_000);

    #[test]
    fn a_source_is_left_out_for_longer_with_each_failure_until_a_plan_passes_with_it() {
        let (mut quarantine, node) = (SupplyQuarantine::default(), Source::Node("n".into()));
        let mut now = NOW;
        for seconds in [30, 60, 120, 240, 300, 300] {
            let wait = quarantine.add(node.clone(), None, false, now);
            assert_eq!(wait, Duration::from_secs(seconds));
            quarantine.plan_passed(now);
            assert!(quarantine.is_left_out(&node, now + wait - Duration::from_millis(1)), "a plan without it passed");
            now += wait;
            assert!(!quarantine.is_left_out(&node, now) && quarantine.has_failed(&node));
        }
        quarantine.plan_passed(now);
        assert!(!quarantine.has_failed(&node));
        quarantine.add(node.clone(), None, false, now);
        quarantine.retain(|_| false);
        assert!(!quarantine.has_failed(&node), "it no longer exists");
    }

    #[test]
    fn a_plan_reserves_nothing_for_a_daemon_set_that_is_left_out() {
        let daemon = |key: &str| Daemon { key: Arc::from(key), class: Arc::default(), labels: Arc::default() };
        let mut quarantine = SupplyQuarantine::default();
        quarantine.add(Source::DaemonSet("n/a".into()), None, false, NOW);
        assert_eq!((quarantine.counts(NOW), quarantine.purchases_per_minute(0, NOW)), ([0, 0, 1], None));
        for (now, expected) in [(NOW, &["n/b"][..]), (NOW + BACKOFF.0, &["n/a", "n/b"])] {
            let mut snapshot = Snapshot::default();
            snapshot.problem.daemons = vec![daemon("n/a"), daemon("n/b")];
            quarantine.leave_out(&mut snapshot, |_| None, now);
            assert_eq!(snapshot.problem.daemons.iter().map(|daemon| &*daemon.key).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn purchases_are_bounded_while_the_room_of_a_node_is_not_used() {
        let mut quarantine = SupplyQuarantine::default();
        quarantine.add(Source::NodePool("p".into()), Some(1), false, NOW);
        assert_eq!((quarantine.counts(NOW), quarantine.purchases_per_minute(5_000, NOW)), ([1, 0, 0], None));
        quarantine.add(Source::Node("n".into()), None, false, NOW);
        assert_eq!(quarantine.counts(NOW), [1, 1, 0]);
        assert_eq!([0, 5_000].map(|claims| quarantine.purchases_per_minute(claims, NOW)), [Some(20), Some(500)]);
        assert_eq!(quarantine.purchases_per_minute(0, NOW + BACKOFF.0), None);
    }
}
