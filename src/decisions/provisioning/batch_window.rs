//! When a batch of pods is planned: soon for a single pod, at the end of the burst for a burst, and at a deadline during a long one.

use std::time::Duration;

use stowage_model::time::UnixMillis;

/// An open batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchWindow {
    /// When the first pod of the batch was observed.
    pub opened: UnixMillis,
    /// When the newest pod of the batch was observed.
    pub latest: UnixMillis,
    /// Number of pods without a hold that the scheduler has not attempted for [`QUIET_PERIOD`], those of the batch included: it is busy with a burst.
    pub unattempted: usize,
}

/// A batch closes this long after its newest pod when the scheduler is not busy: a controller that scales up creates its next pod sooner, and a
/// scheduler that is not busy attempts it sooner.
pub const QUIET_PERIOD: Duration = Duration::from_millis(100);

/// How long a batch may stay open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Idle time after the newest pod, while the scheduler is busy.
    pub idle: Duration,
    /// In any case.
    pub max: Duration,
}

/// `benches/arrivals.py` measures what a plan of what was rejected until then costs, compared with one plan of a whole burst.
const DEADLINE: Duration = Duration::from_secs(1);
/// Karpenter's defaults.
const IDLE: Duration = Duration::from_secs(1);
const MAX: Duration = Duration::from_secs(10);

impl BatchLimits {
    /// The settings. Where one is set, the default of the other is Karpenter's.
    pub fn new(idle: Option<Duration>, max: Option<Duration>) -> Self {
        let default_max = if idle.is_some() { MAX } else { DEADLINE };
        Self { idle: idle.unwrap_or(IDLE), max: max.unwrap_or(default_max) }
    }
}

/// When the batch closes if no other pod joins.
///
/// Without unattempted pods, no pod is about to join: the batch closes after [`QUIET_PERIOD`]. Pods that are created and bound at once don't count.
/// Otherwise it closes [`BatchLimits::idle`] after its newest pod. It never stays open longer than [`BatchLimits::max`].
pub fn closes_at(window: &BatchWindow, limits: BatchLimits) -> UnixMillis {
    quiet_from(window, limits).min(window.opened + limits.max).max(window.opened)
}

/// Whether no pod is about to join: otherwise the batch closes because its first pod has waited for [`BatchLimits::max`].
pub fn is_over(window: &BatchWindow, limits: BatchLimits, now: UnixMillis) -> bool {
    quiet_from(window, limits) <= now
}

fn quiet_from(window: &BatchWindow, limits: BatchLimits) -> UnixMillis {
    let wait = if window.unattempted == 0 { QUIET_PERIOD.min(limits.idle) } else { limits.idle };
    window.latest + wait
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closes(window: (i64, i64, usize), idle: u64, max: u64) -> i64 {
        let (opened, latest, unattempted) = window;
        let [opened, latest] = [opened, latest].map(UnixMillis);
        let window = BatchWindow { opened, latest, unattempted };
        closes_at(&window, BatchLimits { idle: Duration::from_millis(idle), max: Duration::from_millis(max) }).0
    }

    #[test]
    fn a_single_pod_is_planned_soon_and_a_burst_at_its_end_or_limit() {
        for (case, window, expected) in [
            ("a single pod", (1_000, 1_000, 0), 1_100),
            ("pods that are still rejected", (1_000, 1_900, 0), 2_000),
            ("pods that the scheduler has not attempted", (1_000, 1_050, 7), 2_050),
            ("a burst without end", (1_000, 10_990, 40), 11_000),
        ] {
            assert_eq!(closes(window, 1_000, 10_000), expected, "{case}");
        }
        assert_eq!(closes((1_000, 1_590, 40), 1_000, 600), 1_600);
        assert_eq!(closes((1_000, 1_900, 0), 1_000, 600), 1_600, "it is over");
    }

    #[test]
    fn both_durations_are_settings_whose_defaults_are_karpenters_where_one_is_set() {
        assert_eq!(closes((0, 0, 3), 20, 10_000), 20);
        assert_eq!(closes((0, 0, 3), 5_000, 300), 300);
        let five = Some(Duration::from_secs(5));
        for (idle, max, expected) in
            [(None, None, [1_000, 1_000]), (five, None, [5_000, 10_000]), (None, five, [1_000, 5_000])]
        {
            let limits = BatchLimits::new(idle, max);
            assert_eq!([limits.idle, limits.max].map(|limit| limit.as_millis()), expected);
        }
    }
}
