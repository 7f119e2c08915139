//! When a batch of pods is planned: soon for a single pod, at the end of the burst for a burst.

use std::time::Duration;

use crate::model::time::UnixMillis;

/// An open batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchWindow {
    /// When the first pod of the batch was observed.
    pub opened: UnixMillis,
    /// When the newest pod of the batch was observed.
    pub latest: UnixMillis,
    /// Number of pods that the scheduler has not attempted for [`QUIET_PERIOD`]: it is busy with a burst.
    pub unattempted: usize,
}

/// A batch closes this long after its newest pod when the scheduler is not busy: a controller that scales up creates its next pod sooner, and a
/// scheduler that is not busy attempts it sooner.
pub const QUIET_PERIOD: Duration = Duration::from_millis(100);

/// When the batch closes if no other pod joins.
///
/// Without unattempted pods, no pod is about to join: the batch closes after [`QUIET_PERIOD`]. Pods that are created and bound at once don't count.
/// Otherwise it closes `idle` after its newest pod. It never stays open longer than `max`.
pub fn closes_at(window: &BatchWindow, idle: Duration, max: Duration) -> UnixMillis {
    let wait = if window.unattempted == 0 { QUIET_PERIOD.min(idle) } else { idle };
    let idle_end = window.latest + wait;
    idle_end.min(window.opened + max).max(window.opened)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closes(window: (i64, i64, usize), idle: u64, max: u64) -> i64 {
        let (opened, latest, unattempted) = window;
        let [opened, latest] = [opened, latest].map(UnixMillis);
        let window = BatchWindow { opened, latest, unattempted };
        closes_at(&window, Duration::from_millis(idle), Duration::from_millis(max)).0
    }

    #[test]
    fn a_single_pod_is_planned_soon_and_a_burst_at_its_end() {
        for (case, window, expected) in [
            ("a single pod", (1_000, 1_000, 0), 1_100),
            ("pods that are still rejected", (1_000, 1_900, 0), 2_000),
            ("pods that the scheduler has not attempted", (1_000, 1_050, 7), 2_050),
            ("a burst without end", (1_000, 10_990, 40), 11_000),
        ] {
            assert_eq!(closes(window, 1_000, 10_000), expected, "{case}");
        }
    }

    #[test]
    fn both_durations_are_settings() {
        assert_eq!(closes((0, 0, 3), 20, 10_000), 20);
        assert_eq!(closes((0, 0, 3), 5_000, 300), 300);
    }
}
