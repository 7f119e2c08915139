//! Parses messages of the interruption queue: EventBridge events of EC2 and AWS Health, in JSON.
//!
//! Anyone with the right to send to the queue can write messages, so everything is validated here: size, envelope, and the form of
//! instance ids.

use std::collections::BTreeSet;

use serde::Deserialize;
use stowage_model::time::UnixMillis;

use crate::MessageKind;

/// Maximum body in bytes, the former limit of SQS; events have a few kilobytes.
const LARGEST_BODY: usize = 256 << 10;
/// Maximum length of an instance id.
const LONGEST_ID: usize = 40;

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EventKind {
    /// Spot interruption warning, two minutes ahead.
    SpotInterrupted,
    /// Elevated risk of spot interruption (rebalance recommendation).
    RebalanceRecommendation,
    /// The instance is stopping or stopped.
    InstanceStopped,
    /// The instance is shutting down or terminated.
    InstanceTerminated,
    /// Maintenance is scheduled.
    ScheduledChange,
    /// Interruption warning of the owner of the capacity reservation, two minutes ahead.
    CapacityReservationInterrupted,
}

impl EventKind {
    /// The label `message_type` of metrics, in Karpenter's spelling.
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

    /// The corresponding kind of the interruption controller.
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
    pub kind: EventKind,
    /// The instances; never empty, without duplicates.
    pub instances: Vec<String>,
    /// Time of the event by AWS's clock; `None` if absent.
    pub at: Option<UnixMillis>,
}

/// Why a message is deleted without effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dropped {
    /// The body is absent.
    Empty,
    /// The body is too large.
    TooLarge,
    /// The body is not the JSON of an event, or names no instance.
    Malformed,
    /// The event type is unknown.
    Unknown,
    /// The event needs no action, for example an instance that is running.
    Irrelevant,
    /// The event is of another account or region: nobody sends such events to the queue but by mistake or with intent.
    Foreign,
}

impl Dropped {
    /// The label `message_type` of metrics: Karpenter counts events without action as `no_op`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Empty | Self::Unknown | Self::Irrelevant => "no_op",
            Self::TooLarge | Self::Malformed => "malformed",
            Self::Foreign => "foreign",
        }
    }
}

/// The account and region whose events are accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub account: String,
    pub region: String,
}

impl Origin {
    /// The origin of a queue's own events. `None` if its URL does not contain an account, as that of an emulator may not.
    pub fn of_queue(url: &str, region: &str) -> Option<Self> {
        let account = url.rsplit('/').nth(1)?;
        let is_account = account.len() == 12 && account.bytes().all(|byte| byte.is_ascii_digit());
        is_account.then(|| Self { account: account.to_owned(), region: region.to_owned() })
    }

    /// AWS Health also delivers events of other regions.
    fn accepts(&self, envelope: &Envelope) -> bool {
        envelope.account == self.account && (envelope.region == self.region || envelope.source == "aws.health")
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
    account: String,
    #[serde(default)]
    region: String,
    #[serde(default)]
    time: Option<String>,
    #[serde(default)]
    detail: serde_json::Value,
}

/// The members of `detail` that are read, of all kinds.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Detail {
    #[serde(rename = "instance-id")]
    instance_id: String,
    state: String,
    service: String,
    #[serde(rename = "statusCode")]
    status: String,
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
    status: String,
}

/// Parses the body of a message. Without an origin, events of every account are accepted.
///
/// # Errors
/// Why the message has no effect.
pub fn parse(body: &str, origin: Option<&Origin>) -> Result<Event, Dropped> {
    if body.trim().is_empty() {
        return Err(Dropped::Empty);
    }
    if body.len() > LARGEST_BODY {
        return Err(Dropped::TooLarge);
    }
    // Serde also accepts a list for a struct.
    if !body.trim_start().starts_with('{') {
        return Err(Dropped::Malformed);
    }
    let envelope: Envelope = serde_json::from_str(body).map_err(|_| Dropped::Malformed)?;
    if envelope.version != "0" {
        return Err(Dropped::Unknown);
    }
    let route = route(&envelope.source, &envelope.detail_type).ok_or(Dropped::Unknown)?;
    if origin.is_some_and(|origin| !origin.accepts(&envelope)) {
        return Err(Dropped::Foreign);
    }
    let detail: Detail = serde_json::from_value(envelope.detail).map_err(|_| Dropped::Malformed)?;
    let kind = route(&detail).ok_or(Dropped::Irrelevant)?;
    let named: Vec<&str> = match kind {
        EventKind::ScheduledChange => {
            let open = detail.entities.iter().filter(|entity| entity.status != "RESOLVED");
            open.map(|entity| entity.value.as_str()).collect()
        }
        _ => vec![&detail.instance_id],
    };
    let instances: BTreeSet<String> = named.into_iter().filter_map(instance_id).map(str::to_owned).collect();
    if instances.is_empty() {
        return Err(Dropped::Malformed);
    }
    let at = envelope.time.and_then(|time| UnixMillis::parse_rfc3339(&time));
    Ok(Event { kind, instances: instances.into_iter().collect(), at })
}

/// The kind of an event by its details; `None` if no action is needed.
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
            // AWS Health repeats an event when it ends: the instance stays, and so does its node.
            let ours = detail.service == "EC2" && detail.category == "scheduledChange" && detail.status != "closed";
            ours.then_some(EventKind::ScheduledChange)
        },
        _ => return None,
    };
    Some(route)
}

/// The instance id in a name or ARN; `None` without one.
fn instance_id(text: &str) -> Option<&str> {
    let id = text.rsplit('/').next()?.trim();
    let digits = id.strip_prefix("i-")?;
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    (plain && id.len() <= LONGEST_ID).then_some(id)
}

#[cfg(test)]
mod tests;
