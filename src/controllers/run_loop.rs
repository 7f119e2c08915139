//! The wait between two passes of a controller that follows the state.

use std::time::Duration;

use stowage_runtime::sync::heartbeat;
use tokio::sync::{Notify, watch};

use crate::state::Cluster;

/// How often a controller runs.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Minimum time from a change to the next pass, so that one pass handles a burst of changes.
    pub debounce: Duration,
    /// Maximum time without a pass when nothing changes; [`Duration::MAX`] for no limit.
    pub resync: Duration,
}

/// The wait of one controller, which ends its turn ([`heartbeat`]). Create it before the first pass, so that no change is missed.
#[derive(Debug)]
pub struct RunLoop {
    changes: watch::Receiver<u64>,
    pace: Pace,
}

impl RunLoop {
    pub fn new(cluster: &Cluster, pace: Pace) -> Self {
        Self { changes: cluster.changes(), pace }
    }

    /// Waits for a change of the state, at most the resync period, and then for the debounce period.
    pub async fn next(&mut self) {
        self.next_within(self.pace.resync).await;
    }

    /// [`Self::next`] with another resync period.
    pub async fn next_within(&mut self, resync: Duration) {
        let wait = async {
            let _ = tokio::time::timeout(resync, self.changes.changed()).await;
            tokio::time::sleep(self.pace.debounce).await;
        };
        heartbeat::rest(wait).await;
        self.changes.mark_unchanged();
    }

    /// [`Self::next`] that `wake` ends like a change, and `urgent` at once: also during the debounce period.
    pub async fn next_or(&mut self, wake: impl Future<Output = ()>, urgent: &Notify) {
        let wait = async {
            let debounced = tokio::select! {
                _ = self.changes.changed() => true,
                () = wake => true,
                () = urgent.notified() => false,
                () = tokio::time::sleep(self.pace.resync) => true,
            };
            if debounced {
                tokio::select! {
                    () = tokio::time::sleep(self.pace.debounce) => {}
                    () = urgent.notified() => {}
                }
            }
        };
        heartbeat::rest(wait).await;
        self.changes.mark_unchanged();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_millis(200) };

    #[tokio::test]
    async fn changes_before_and_during_a_wait_start_one_pass() {
        let cluster = Cluster::default();
        let mut run_loop = RunLoop::new(&cluster, Pace { resync: Duration::MAX, ..PACE });
        cluster.update(|_| {});
        let begin = Instant::now();
        let burst = async {
            tokio::time::sleep(PACE.debounce / 2).await;
            cluster.update(|_| {});
        };
        tokio::join!(run_loop.next(), burst);
        assert!(begin.elapsed() >= PACE.debounce);
        assert!(!run_loop.changes.has_changed().unwrap(), "the second change belongs to the same pass");
    }

    #[tokio::test]
    async fn a_pass_starts_without_a_change_after_the_resync_period() {
        let cluster = Cluster::default();
        let begin = Instant::now();
        RunLoop::new(&cluster, PACE).next().await;
        assert!(begin.elapsed() >= PACE.resync + PACE.debounce);
    }

    #[tokio::test]
    async fn an_urgent_notification_skips_both_periods() {
        let (cluster, urgent) = (Cluster::default(), Notify::new());
        let hour = Duration::from_hours(1);
        let mut run_loop = RunLoop::new(&cluster, Pace { debounce: hour, resync: hour });
        urgent.notify_one();
        run_loop.next_or(std::future::pending(), &urgent).await;
        cluster.update(|_| {});
        urgent.notify_one();
        run_loop.next_or(std::future::pending(), &urgent).await;
    }
}
