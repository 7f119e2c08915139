//! The verdict of a decision about each node, and which verdicts are reported now: those that changed, and each again from time to time, as events
//! do not last.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use stowage_model::events::DeclaredEvent;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;

use crate::decisions::disruption::blockers::Blocker;

/// What a decision found about a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub claim: String,
    /// Hourly price.
    pub price: MicroUsd,
    /// What its removal may save per hour: its price less what its pods are worth on nodes that can be launched.
    pub saving: MicroUsd,
    /// Why it stays. Empty: it is removed.
    pub blockers: Vec<Blocker>,
}

impl Verdict {
    /// A node that is not a candidate.
    pub fn stays(claim: String, price: MicroUsd, blocker: Blocker) -> Self {
        Self { claim, price, saving: MicroUsd(0), blockers: vec![blocker] }
    }

    /// The value of the label `blocker` of metrics.
    pub fn kind(&self) -> &'static str {
        self.blockers.first().map_or("none", Blocker::kind)
    }

    /// The event and its note. `None`: nothing is reported.
    pub fn event(&self) -> Option<(&'static DeclaredEvent, String)> {
        let reported = || self.blockers.iter().filter(|blocker| blocker.event().is_some());
        let event = reported().next()?.event()?;
        let reasons: Vec<String> = reported().map(ToString::to_string).collect();
        let (reasons, price) = (reasons.join("; "), self.price.usd());
        let has_figures = matches!(self.blockers[0], Blocker::SavesTooLittle { .. });
        let saving = if self.saving.0 > 0 && !has_figures {
            format!(", of which its removal could save up to {:.4}", self.saving.usd())
        } else {
            String::new()
        };
        Some((event, format!("node stays: {reasons}. It costs {price:.4} USD/h{saving}")))
    }
}

/// A transient blocker is reported when it lasts as long as this.
const SETTLED: Duration = Duration::from_mins(5);
/// Minimum time between two reports about a node.
const CHANGED: Duration = Duration::from_mins(2);
/// A verdict that stays is reported again after this time: the API server deletes events after an hour.
const REPEATED: Duration = Duration::from_mins(15);
/// Reports at once, and the time after which a further one is allowed: a tenant may block every node.
const BURST: i64 = 100;
const PERIOD: Duration = Duration::from_millis(500);

/// What was reported about each node. Without it, everything is reported again.
#[derive(Debug, Default)]
pub struct Reports {
    nodes: BTreeMap<String, Node>,
    /// Until when earlier reports use up the rate: further ones follow while this is less than [`BURST`] periods ahead.
    used_until: UnixMillis,
}

#[derive(Debug)]
struct Node {
    /// Identity of the blocker, and since when it is found.
    found: (u64, UnixMillis),
    reported: Option<(u64, UnixMillis)>,
}

impl Reports {
    /// The verdicts to report now, in order: of those that are due, the nodes that waited longest, within the rate.
    pub fn due<'v>(&mut self, verdicts: &'v [Verdict], now: UnixMillis) -> Vec<&'v Verdict> {
        let known: BTreeSet<&String> = verdicts.iter().map(|verdict| &verdict.claim).collect();
        self.nodes.retain(|claim, _| known.contains(claim));
        let mut due: Vec<(Option<UnixMillis>, &Verdict)> = Vec::new();
        for verdict in verdicts {
            let Some(blocker) = verdict.blockers.iter().find(|blocker| blocker.event().is_some()) else { continue };
            let identity = blocker.identity();
            let fresh = || Node { found: (identity, now), reported: None };
            let node = self.nodes.entry(verdict.claim.clone()).or_insert_with(fresh);
            if node.found.0 != identity {
                node.found = (identity, now);
            }
            let is_settled = !blocker.is_transient() || node.found.1.is_older_than(SETTLED, now);
            let is_new = node.reported.is_none_or(|(reported, at)| {
                at.is_older_than(if reported == identity { REPEATED } else { CHANGED }, now) || at > now
            });
            if is_settled && is_new {
                due.push((node.reported.map(|(_, at)| at), verdict));
            }
        }
        due.sort_by_key(|(reported, verdict)| (*reported, &verdict.claim));
        due.truncate(self.admit(due.len(), now));
        for (_, verdict) in &due {
            if let Some(node) = self.nodes.get_mut(&verdict.claim) {
                node.reported = Some((node.found.0, now));
            }
        }
        due.into_iter().map(|(_, verdict)| verdict).collect()
    }

    /// How many of `wanted` reports the rate allows.
    fn admit(&mut self, wanted: usize, now: UnixMillis) -> usize {
        let period = i64::try_from(PERIOD.as_millis()).unwrap_or(i64::MAX);
        // A time further ahead is from before the clock was set back.
        let used = (self.used_until.0.clamp(now.0, now.0 + BURST * period) - now.0 + period - 1) / period;
        let admitted = wanted.min(usize::try_from(BURST - used).unwrap_or(0));
        self.used_until = UnixMillis(now.0 + (used + i64::try_from(admitted).unwrap_or(BURST)) * period);
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: i64 = 60_000;

    fn verdict(claim: &str, blockers: Vec<Blocker>) -> Verdict {
        Verdict { claim: claim.into(), price: MicroUsd(384_000), saving: MicroUsd(221_000), blockers }
    }

    fn too_little(saving: i64) -> Blocker {
        Blocker::SavesTooLittle { saving: MicroUsd(saving), needed: MicroUsd(20_000) }
    }

    #[test]
    fn a_note_has_each_blocker_the_price_and_what_could_be_saved() {
        let pod = || "n/a".to_owned();
        for (blockers, expected) in [
            (vec![], None),
            (vec![Blocker::NotQuiet(UnixMillis(0))], None),
            (
                vec![Blocker::PodProtected(pod()), Blocker::Nominated(2)],
                Some(
                    "DisruptionBlocked: node stays: pod n/a has the annotation karpenter.sh/do-not-disrupt; the node is nominated \
                     for 2 pending pods. It costs 0.3840 USD/h, of which its removal could save up to 0.2210",
                ),
            ),
            (
                vec![too_little(12_300)],
                Some(
                    "Unconsolidatable: node stays: its removal would save 0.0123 USD/h, less than the 0.0200 USD/h that pay for the \
                     evictions and new nodes. It costs 0.3840 USD/h",
                ),
            ),
            (
                vec![too_little(-1)],
                Some(
                    "Unconsolidatable: node stays: can't replace with a cheaper node: the new nodes for its pods would cost as much \
                     or more. It costs 0.3840 USD/h",
                ),
            ),
        ] {
            let event = verdict("c", blockers).event();
            assert_eq!(event.map(|(event, note)| format!("{}: {note}", event.reason())).as_deref(), expected);
        }
    }

    #[test]
    fn a_verdict_is_reported_when_it_changes_and_every_fifteen_minutes() {
        let mut reports = Reports::default();
        let [a, b] = ["n/a", "n/b"].map(|pod| Blocker::PodProtected(pod.into()));
        for (seconds, blocker, expected) in [
            (0, &a, true),
            (1, &a, false),
            (899, &a, false),
            (900, &a, true),
            (1_000, &b, false),
            (1_010, &a, false),
            (1_020, &b, true),
            (1_900, &b, false),
            (1_920, &b, true),
            // Only a figure changes.
            (2_100, &too_little(1_000), true),
            (2_300, &too_little(2_000), false),
            (2_400, &Blocker::Undecided, false),
            (3_000, &too_little(2_000), true),
        ] {
            let verdicts = [verdict("c", vec![blocker.clone()])];
            assert_eq!(
                !reports.due(&verdicts, UnixMillis(seconds * 1_000)).is_empty(),
                expected,
                "{seconds} {blocker}"
            );
        }
        assert!(reports.due(&[], UnixMillis(3_000_000)).is_empty() && reports.nodes.is_empty());
    }

    #[test]
    fn a_transient_blocker_is_reported_when_it_lasts_five_minutes() {
        let mut reports = Reports::default();
        for (minute, blocker, expected) in [
            (0, Blocker::Nominated(1), false),
            (4, Blocker::Nominated(2), false),
            (5, Blocker::Nominated(1), true),
            (6, Blocker::NotInitialized, false),
            (8, Blocker::Nominated(1), false),
            (12, Blocker::Nominated(1), false),
            (20, Blocker::Nominated(1), true),
        ] {
            let verdicts = [verdict("c", vec![blocker])];
            assert_eq!(!reports.due(&verdicts, UnixMillis(minute * MINUTE)).is_empty(), expected, "{minute}");
        }
    }

    #[test]
    fn each_node_is_reported_in_turn_within_the_rate() {
        let mut reports = Reports::default();
        let all: Vec<Verdict> = (0..500).map(|n| verdict(&format!("c{n:03}"), vec![Blocker::NodeProtected])).collect();
        let mut reported = BTreeSet::new();
        for (seconds, expected) in [(0, 100), (1, 2), (2, 2), (51, 98), (200, 100), (300, 100), (400, 98), (500, 0)] {
            let due = reports.due(&all, UnixMillis(seconds * 1_000));
            assert_eq!(due.len(), expected, "after {seconds} s");
            reported.extend(due.iter().map(|verdict| verdict.claim.clone()));
        }
        assert_eq!(reported.len(), 500);
        assert_eq!(reports.due(&all, UnixMillis(900_000))[0].claim, "c000", "the first is due again");
        assert_eq!(reports.due(&all, UnixMillis(0)).len(), 0, "the rate holds when the clock is set back");
    }
}
