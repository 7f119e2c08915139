//! What the messages of the interruption queue say: EventBridge events of EC2 and AWS Health, in JSON.
//!
//! Anyone who may send to the queue writes them, so nothing is believed but what is looked at here: size, envelope, and that
//! an instance id looks like one.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;

use crate::cloud::MessageKind;

/// The largest body that is read, bytes. SQS's own limit was this for long; events are a few kilobytes.
const LARGEST_BODY: usize = 256 << 10;
/// The longest instance id.
const LONGEST_ID: usize = 40;

/// What an event says of its instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EventKind {
    /// Two minutes' notice of a spot interruption.
    SpotInterrupted,
    /// Raised risk of one.
    RebalanceRecommendation,
    /// It stops or has stopped.
    InstanceStopped,
    /// It shuts down or has terminated.
    InstanceTerminated,
    /// Maintenance is scheduled.
    ScheduledChange,
    /// Two minutes' notice by the owner of the capacity reservation.
    CapacityReservationInterrupted,
}

impl EventKind {
    /// The `message_type` of metrics, Karpenter's word.
    pub fn label(self) -> &'static str {
        match self {
            Self::SpotInterrupted => "spot_interrupted",
            Self::RebalanceRecommendation => "rebalance_recommendation",
            Self::InstanceStopped => "instance_stopped",
            Self::InstanceTerminated => "instance_terminated",
            Self::ScheduledChange => "scheduled_change",
            Self::CapacityReservationInterrupted => "capacity_reservation_interrupted",
        }
    }

    /// The kind that the interruption controller knows.
    pub fn message_kind(self) -> MessageKind {
        match self {
            Self::SpotInterrupted => MessageKind::SpotInterruption,
            Self::CapacityReservationInterrupted => MessageKind::CapacityReservationInterruption,
            Self::RebalanceRecommendation => MessageKind::RebalanceRecommendation,
            Self::InstanceStopped => MessageKind::Stopped,
            Self::InstanceTerminated => MessageKind::StateChange,
            Self::ScheduledChange => MessageKind::ScheduledChange,
        }
    }
}

/// An event about instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What it says.
    pub kind: EventKind,
    /// Of which instances; never empty, each once.
    pub instances: Vec<String>,
    /// When it happened by AWS's clock, milliseconds since the epoch; `None` when the event doesn't say.
    pub at_ms: Option<i64>,
}

/// Why a message is deleted without effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dropped {
    /// No body.
    Empty,
    /// Too large to be an event.
    TooLarge,
    /// Not the JSON of an event, or without the instance it is about.
    Malformed,
    /// An event that nobody here knows.
    Unknown,
    /// An event of a known kind that asks for nothing, as that an instance runs.
    Irrelevant,
}

impl Dropped {
    /// The `message_type` of metrics: Karpenter counts what asks for nothing as `no_op`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Empty | Self::Unknown | Self::Irrelevant => "no_op",
            Self::TooLarge | Self::Malformed => "malformed",
        }
    }
}

#[derive(Deserialize)]
struct Envelope {
    #[serde(default)]
    version: String,
    #[serde(default)]
    source: String,
    #[serde(default, rename = "detail-type")]
    detail_type: String,
    #[serde(default)]
    time: Option<String>,
    #[serde(default)]
    detail: serde_json::Value,
}

/// Members of the details that are looked at, of every kind.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Detail {
    #[serde(rename = "instance-id")]
    instance_id: String,
    state: String,
    service: String,
    #[serde(rename = "eventTypeCategory")]
    category: String,
    #[serde(rename = "affectedEntities")]
    entities: Vec<Entity>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entity {
    #[serde(rename = "entityValue")]
    value: String,
}

/// Reads the body of a message.
///
/// # Errors
/// It has no effect: why.
pub fn parse(body: &str) -> Result<Event, Dropped> {
    if body.trim().is_empty() {
        return Err(Dropped::Empty);
    }
    if body.len() > LARGEST_BODY {
        return Err(Dropped::TooLarge);
    }
    // Serde would take the members from a list, too.
    if !body.trim_start().starts_with('{') {
        return Err(Dropped::Malformed);
    }
    let envelope: Envelope = serde_json::from_str(body).map_err(|_| Dropped::Malformed)?;
    if envelope.version != "0" {
        return Err(Dropped::Unknown);
    }
    let route = route(&envelope.source, &envelope.detail_type).ok_or(Dropped::Unknown)?;
    let detail: Detail = serde_json::from_value(envelope.detail).map_err(|_| Dropped::Malformed)?;
    let kind = route(&detail).ok_or(Dropped::Irrelevant)?;
    let named: Vec<&str> = match kind {
        EventKind::ScheduledChange => detail.entities.iter().map(|entity| entity.value.as_str()).collect(),
        _ => vec![&detail.instance_id],
    };
    let instances: BTreeSet<String> = named.into_iter().filter_map(instance_id).map(str::to_owned).collect();
    if instances.is_empty() {
        return Err(Dropped::Malformed);
    }
    let at_ms = envelope.time.and_then(|time| time.parse::<Timestamp>().ok()).map(Timestamp::as_millisecond);
    Ok(Event { kind, instances: instances.into_iter().collect(), at_ms })
}

/// What an event of a kind says, by its details; `None` for nothing.
type Route = fn(&Detail) -> Option<EventKind>;

fn route(source: &str, detail_type: &str) -> Option<Route> {
    let route: Route = match (source, detail_type) {
        ("aws.ec2", "EC2 Spot Instance Interruption Warning") => |_| Some(EventKind::SpotInterrupted),
        ("aws.ec2", "EC2 Instance Rebalance Recommendation") => |_| Some(EventKind::RebalanceRecommendation),
        ("aws.ec2", "EC2 Capacity Reservation Instance Interruption Warning") => {
            |_| Some(EventKind::CapacityReservationInterrupted)
        }
        ("aws.ec2", "EC2 Instance State-change Notification") => {
            |detail| match detail.state.to_ascii_lowercase().as_str() {
                "stopping" | "stopped" => Some(EventKind::InstanceStopped),
                "shutting-down" | "terminated" => Some(EventKind::InstanceTerminated),
                _ => None,
            }
        }
        ("aws.health", "AWS Health Event") => |detail| {
            let ours = detail.service == "EC2" && detail.category == "scheduledChange";
            ours.then_some(EventKind::ScheduledChange)
        },
        _ => return None,
    };
    Some(route)
}

/// The instance id in a name or ARN; `None` where there is none.
fn instance_id(text: &str) -> Option<&str> {
    let id = text.rsplit('/').next()?.trim();
    let digits = id.strip_prefix("i-")?;
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    (plain && id.len() <= LONGEST_ID).then_some(id)
}

#[cfg(test)]
mod tests;
