//! When to plan: at once for a lone pod, after the burst for a burst.

/// What a window has seen. Times are milliseconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// When the first pod that needs a node was seen.
    pub opened_ms: i64,
    /// When the newest pod that needs a node was seen.
    pub latest_ms: i64,
    /// When any pod was last created in the cluster.
    pub last_created_ms: i64,
    /// Pods that the scheduler hasn't tried yet.
    pub untried: usize,
}

/// A window with nothing untried closes after so long without news, milliseconds: a controller that scales up creates
/// its next pod sooner than this.
pub const QUIET_MS: i64 = 100;

/// When the window closes if nothing more happens, milliseconds since the epoch.
///
/// Where no pod waits for its first try and none was created lately, nobody is about to join: the window closes after
/// [`QUIET_MS`]. Otherwise it closes when it was idle for `idle_ms`, and in any case `max_ms` after it opened.
pub fn closes_at(window: &Window, idle_ms: i64, max_ms: i64) -> i64 {
    let quiet_since = window.latest_ms.max(window.last_created_ms);
    let idle = if window.untried == 0 { quiet_since + QUIET_MS.min(idle_ms) } else { window.latest_ms + idle_ms };
    idle.min(window.opened_ms + max_ms).max(window.opened_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lone_pod_is_planned_at_once_and_a_burst_is_waited_out() {
        let window =
            |opened_ms, latest_ms, last_created_ms, untried| Window { opened_ms, latest_ms, last_created_ms, untried };
        for (case, window, closes) in [
            ("a lone pod", window(1_000, 1_000, 990, 0), 1_100),
            ("pods still being created", window(1_000, 1_050, 1_900, 0), 2_000),
            ("pods the scheduler has not tried", window(1_000, 1_050, 1_040, 7), 2_050),
            ("a burst without end", window(1_000, 10_990, 10_995, 40), 11_000),
        ] {
            assert_eq!(closes_at(&window, 1_000, 10_000), closes, "{case}");
        }
    }

    #[test]
    fn the_windows_are_settings() {
        let window = Window { opened_ms: 0, latest_ms: 0, last_created_ms: 0, untried: 3 };
        assert_eq!(closes_at(&window, 20, 10_000), 20);
        assert_eq!(closes_at(&window, 5_000, 300), 300);
    }
}
