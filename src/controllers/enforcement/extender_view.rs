//! Updates the extender's view of nodes and holds, on every replica. Where kube-scheduler does not ask the extender, the view is only
//! kept fresh enough for the first request.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures::FutureExt;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::heartbeat;
use tokio::sync::Notify;

use crate::controllers::derived_state::DerivedState;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::placement::extender_view::ViewCache;
use crate::decisions::placement::mode::PlacementMode;
use crate::extender::View;
use crate::state::Cluster;

const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_millis(500) };
/// How often the view is updated while nobody asks for it: three times in [`crate::extender::DEFAULT_MAX_AGE`].
const IDLE_PERIOD: Duration = Duration::from_secs(20);
/// After a request, the view follows every change for this long.
const FOLLOW_AFTER_REQUEST: Duration = Duration::from_mins(1);

/// Kinds that the view is made of.
const KINDS: [&str; 3] = ["pods", "nodes", "nodeclaims"];

/// Replaces the view by one that restrains no pod when a panic unwinds: the last one would remain until the loop succeeds again.
struct ClearOnPanic<'a>(&'a ArcSwap<View>);

impl Drop for ClearOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(Arc::default());
        }
    }
}

/// Runs until the process ends. `requests` is notified of requests that read the view.
pub async fn run(
    cluster: Arc<Cluster>,
    derived: Arc<DerivedState>,
    view: Arc<ArcSwap<View>>,
    placement: PlacementMode,
    requests: Arc<Notify>,
) {
    let _clear = ClearOnPanic(&view);
    let mut run_loop = RunLoop::new(&cluster, PACE);
    let mut cache = ViewCache::default();
    let mut follow_until = if placement == PlacementMode::Extender { UnixMillis::MAX } else { UnixMillis::MIN };
    loop {
        let now = clock::now();
        // Before the state is read, so that the view is not older than it states.
        let as_of = cluster.watch_signs().as_of(&KINDS, now);
        let next = {
            let state = cluster.read();
            cache.update(&state, &derived.holds(&state, now), as_of)
        };
        view.store(Arc::new(next));
        let mut requested = requests.notified().now_or_never().is_some();
        if requested || now < follow_until {
            run_loop.next().await;
        } else {
            requested = heartbeat::rest(tokio::time::timeout(IDLE_PERIOD, requests.notified())).await.is_ok();
        }
        if requested {
            follow_until = follow_until.max(clock::now() + FOLLOW_AFTER_REQUEST);
        }
    }
}

#[cfg(test)]
mod tests {
    use stowage_runtime::sync::panics::catch;

    use super::*;
    use crate::extender::ViewInput;

    #[test]
    fn after_a_panic_the_view_restrains_no_pod() {
        let now = clock::now();
        let view = ArcSwap::from_pointee(View::build(ViewInput { as_of: now, ..ViewInput::default() }));
        {
            let _clear = ClearOnPanic(&view);
        }
        assert!(!view.load().is_stale(now), "a loop that ends keeps its view");
        let panicked = catch(|| {
            let _clear = ClearOnPanic(&view);
            panic!("a defect");
        });
        assert!(panicked.is_err() && view.load().is_stale(now));
    }
}
