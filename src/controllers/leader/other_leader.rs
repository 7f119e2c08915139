//! Reports another leader, for which this process waits.

use std::convert::Infallible;
use std::time::Duration;

use stowage_model::events;
use stowage_runtime::clock;
use tokio::sync::watch::Receiver;

use crate::controllers::context::reference;
use crate::controllers::event_recorder::EventRecorder;
use crate::controllers::leader::other_leaders::OtherLeader;
use crate::state::Cluster;

/// How often the event is repeated: the API server removes events after an hour.
const REPEAT: Duration = Duration::from_mins(10);

/// Logs each change of the other leader, and emits an event on every EC2NodeClass while there is one.
pub async fn report(
    mut other: Receiver<Option<OtherLeader>>,
    recorder: EventRecorder,
    cluster: &Cluster,
) -> Infallible {
    let mut was = None;
    loop {
        let leads = other.borrow_and_update().clone();
        match (&was, &leads) {
            (Some(_), None) => tracing::info!("no other controller leads any more"),
            (_, Some(OtherLeader { lease, holder })) if was != leads => {
                tracing::warn!(lease, holder, "another controller leads, waiting until its lease expires");
            }
            _ => {}
        }
        if let Some(OtherLeader { lease, holder }) = &leads {
            let note = format!(
                "{holder} leads with the lease {lease}; nothing is purchased or disrupted by this replica until that ends"
            );
            let classes: Vec<_> = cluster.read().classes.values().cloned().collect();
            for class in classes {
                recorder.emit(&reference(&*class), events::OTHER_LEADER.note(&note), clock::now()).await;
            }
        }
        was = leads;
        // The sender lives as long as the candidate.
        let _ = tokio::time::timeout(REPEAT, other.changed()).await;
    }
}
