//! Values of EC2 metrics that are recorded where the event happens.

use stowage_model::time::UnixMillis;
use stowage_runtime::telemetry::cloud_metrics::CloudMetrics;

use crate::ec2::interruption::sqs_queue::Received;
use crate::{CloudError, LaunchError};

/// The `error` label of a failed launch, by Karpenter's names; empty where Karpenter has no name.
pub(crate) fn launch_error(error: &LaunchError) -> &'static str {
    match error {
        LaunchError::InsufficientCapacity { .. } => "InsufficientCapacityError",
        LaunchError::NodeClassNotReady { .. } => "NodeClassNotReadyError",
        LaunchError::Rejected { .. } | LaunchError::NoSpotRole | LaunchError::Throttled | LaunchError::Other { .. } => {
            ""
        }
    }
}

/// The `error` label of other failed calls. Karpenter names only a missing NodeClaim, which is not an error here.
pub(crate) fn cloud_error(_: &CloudError) -> &'static str {
    ""
}

/// Observes the age of interruption events when their messages were received.
pub(crate) fn received(metrics: &CloudMetrics, events: &[Received], now: UnixMillis) {
    for event in events {
        metrics.message_seconds.observe(now.saturating_since(event.at).as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use stowage_model::events;

    use super::*;
    use crate::ec2::interruption::messages::EventKind;

    #[test]
    fn the_age_of_events_is_observed_and_never_negative() {
        let metrics = CloudMetrics::new();
        let event = |at| Received {
            receipt: String::new(),
            kind: EventKind::SpotInterrupted,
            instance_id: "i-1".into(),
            at: UnixMillis(at),
        };
        received(&metrics, &[event(1_500), event(9_000)], UnixMillis(4_000));
        assert_eq!(metrics.message_seconds.get_sample_count(), 2);
        assert!((metrics.message_seconds.get_sample_sum() - 2.5).abs() < 1e-9);
    }

    #[test]
    fn failed_launches_have_karpenters_error_names() {
        let out = LaunchError::InsufficientCapacity { unavailable: vec![] };
        let refused = LaunchError::Rejected { event: events::LAUNCH_FAILED, message: String::new() };
        let not_ready = LaunchError::NodeClassNotReady { name: "n".into(), reason: String::new() };
        let names = [out, not_ready, refused].map(|error| launch_error(&error));
        assert_eq!(names, ["InsufficientCapacityError", "NodeClassNotReadyError", ""]);
    }
}
