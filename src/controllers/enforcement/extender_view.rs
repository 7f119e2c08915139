//! Rebuilds the extender's view of nodes and holds, on every replica.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;

use crate::clock;
use crate::controllers::derived_state::DerivedState;
use crate::controllers::run_loop::{Pace, RunLoop};
use crate::decisions::placement::view::view_input;
use crate::extender::View;
use crate::state::Cluster;

const PACE: Pace = Pace { debounce: Duration::from_millis(20), resync: Duration::from_millis(500) };

/// Kinds that the view is made of.
const KINDS: [&str; 3] = ["pods", "nodes", "nodeclaims"];

/// Runs until the process ends.
pub async fn run(cluster: Arc<Cluster>, derived: Arc<DerivedState>, view: Arc<ArcSwap<View>>) {
    let mut run_loop = RunLoop::new(&cluster, PACE);
    loop {
        let now = clock::now();
        // Before the state is read, so that the view is not older than it states.
        let as_of = cluster.watch_signs().as_of(&KINDS, now);
        let input = {
            let state = cluster.read();
            view_input(&state, &derived.holds(&state, now), as_of)
        };
        view.store(Arc::new(View::build(input)));
        run_loop.next().await;
    }
}
