//! State of the simulation, and the journal entries that change it. Every change goes through [`EngineState::apply`], so that a
//! replayed journal restores the state.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Taint;
use serde::{Deserialize, Serialize};
use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;

use crate::{Instance, InstanceState, MessageKind};

/// An instance and its life cycle.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct InstanceRecord {
    /// Number of the launch in the simulation, from 1.
    pub number: u64,
    /// Such as `i-0123456789abcdef0`.
    pub id: String,
    /// Idempotency token of the launch.
    pub client_token: String,
    pub node_claim: String,
    pub node_pool: String,
    pub node_class: String,
    pub instance_type: String,
    pub zone: String,
    /// Capacity type, as the label value.
    #[serde(with = "capacity_type")]
    pub capacity_type: CapacityType,
    pub image_id: String,
    /// Such as `10.1.2.3`. The node name is derived from it.
    pub private_ip: String,
    /// Labels its kubelet registers with.
    pub labels: BTreeMap<String, String>,
    /// Taints its kubelet registers with.
    pub taints: Vec<Taint>,
    #[serde(rename = "launched_at_ms")]
    pub launched_at: UnixMillis,
    /// End of the pending state.
    #[serde(rename = "running_at_ms")]
    pub running_at: UnixMillis,
    /// Start of the kubelet.
    #[serde(rename = "boot_at_ms")]
    pub boot_at: UnixMillis,
    /// When it starts to shut down, once scheduled. May be in the future.
    #[serde(rename = "shutdown_at_ms")]
    pub shutdown_at: Option<UnixMillis>,
    /// When it is terminated.
    #[serde(rename = "gone_at_ms")]
    pub terminated_at: Option<UnixMillis>,
    pub node: NodeProgress,
}

/// The steps that are done for an instance's Node object.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[allow(clippy::struct_excessive_bools)] // Four independent facts, each set once.
pub struct NodeProgress {
    /// The kubelet registered the Node.
    pub registered: bool,
    /// A kernel panic stopped the kubelet.
    pub panicked: bool,
    /// The heartbeats are stopped.
    pub silenced: bool,
    /// The Node is deleted after the termination.
    pub removed: bool,
}

impl InstanceRecord {
    /// Such as `ip-10-1-2-3.ec2.internal`, the name a node has in us-east-1.
    pub fn node_name(&self) -> String {
        format!("ip-{}.ec2.internal", self.private_ip.replace('.', "-"))
    }

    /// Such as `aws:///us-east-1a/i-0123456789abcdef0`.
    pub fn provider_id(&self) -> String {
        format!("aws:///{}/{}", self.zone, self.id)
    }

    /// State at a time.
    pub fn state(&self, now: UnixMillis) -> InstanceState {
        let past = |at: Option<UnixMillis>| at.is_some_and(|at| at <= now);
        if past(self.terminated_at) {
            InstanceState::Terminated
        } else if past(self.shutdown_at) {
            InstanceState::ShuttingDown
        } else if now < self.running_at {
            InstanceState::Pending
        } else {
            InstanceState::Running
        }
    }

    /// Pending or running at a time.
    pub fn is_alive(&self, now: UnixMillis) -> bool {
        matches!(self.state(now), InstanceState::Pending | InstanceState::Running)
    }

    /// The instance as the EC2 API describes it at a time.
    pub fn describe(&self, now: UnixMillis) -> Instance {
        Instance {
            id: self.id.clone(),
            provider_id: self.provider_id(),
            client_token: self.client_token.clone(),
            node_claim: self.node_claim.clone(),
            instance_type: self.instance_type.clone(),
            zone: self.zone.clone(),
            capacity_type: self.capacity_type,
            reservation: None,
            partition: None,
            image_id: self.image_id.clone(),
            launched_at: self.launched_at,
            state: self.state(now),
        }
    }
}

/// A step in the life cycle of a Node object.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeStep {
    Registered,
    /// Heartbeats are stopped.
    Silenced,
    /// The Node is deleted.
    Removed,
}

/// A message in the interruption queue.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct QueuedMessage {
    /// Message id, also the receipt handle.
    pub id: String,
    #[serde(with = "message_kind")]
    pub kind: MessageKind,
    pub instance_id: String,
    /// When it is sent. May be in the future.
    #[serde(rename = "at_ms")]
    pub sent_at: UnixMillis,
}

/// A change of the state: one line of the journal.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "entry", rename_all = "kebab-case")]
pub enum JournalEntry {
    Started {
        #[serde(rename = "at_ms")]
        at: UnixMillis,
        /// Instances launched before this entry.
        launches: u64,
        /// Messages sent before this entry.
        messages: u64,
    },
    Launched(Box<InstanceRecord>),
    /// The shutdown of an instance was scheduled.
    Shutdown {
        id: String,
        #[serde(rename = "at_ms")]
        at: UnixMillis,
        #[serde(rename = "gone_at_ms")]
        terminated_at: UnixMillis,
    },
    /// The kubelet of an instance stopped.
    Panicked {
        id: String,
    },
    /// A step of an instance's Node is done.
    Node {
        id: String,
        step: NodeStep,
    },
    Sent(QueuedMessage),
    /// A message was deleted.
    Deleted {
        id: String,
    },
    /// A terminated instance is no longer described.
    Forgotten {
        id: String,
    },
}

/// The state of the simulation: the sum of all journal entries.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineState {
    pub started_at: Option<UnixMillis>,
    /// Instances launched so far.
    pub launches: u64,
    /// Messages sent so far.
    pub messages: u64,
    /// Instances by id.
    pub instances: BTreeMap<String, InstanceRecord>,
    /// Instance id by client token.
    pub tokens: BTreeMap<String, String>,
    /// Messages by id.
    pub queue: BTreeMap<String, QueuedMessage>,
}

impl EngineState {
    /// Applies a change. An entry about an unknown instance or message changes nothing: the journal may refer to a forgotten one.
    pub fn apply(&mut self, entry: &JournalEntry) {
        match entry {
            JournalEntry::Started { at, launches, messages } => {
                self.started_at = Some(*at);
                self.launches = self.launches.max(*launches);
                self.messages = self.messages.max(*messages);
            }
            JournalEntry::Launched(record) => {
                self.launches = self.launches.max(record.number);
                self.tokens.insert(record.client_token.clone(), record.id.clone());
                self.instances.insert(record.id.clone(), InstanceRecord::clone(record));
            }
            JournalEntry::Shutdown { id, at, terminated_at } => {
                if let Some(record) = self.instances.get_mut(id)
                    && record.shutdown_at.is_none_or(|earlier| *at < earlier)
                {
                    record.shutdown_at = Some(*at);
                    record.terminated_at = Some(*terminated_at);
                }
            }
            JournalEntry::Panicked { id } => {
                if let Some(record) = self.instances.get_mut(id) {
                    record.node.panicked = true;
                }
            }
            JournalEntry::Node { id, step } => {
                if let Some(record) = self.instances.get_mut(id) {
                    match step {
                        NodeStep::Registered => record.node.registered = true,
                        NodeStep::Silenced => record.node.silenced = true,
                        NodeStep::Removed => record.node.removed = true,
                    }
                }
            }
            JournalEntry::Sent(message) => {
                self.messages += 1;
                self.queue.insert(message.id.clone(), message.clone());
            }
            JournalEntry::Deleted { id } => {
                self.queue.remove(id);
            }
            JournalEntry::Forgotten { id } => {
                if let Some(record) = self.instances.remove(id) {
                    self.tokens.remove(&record.client_token);
                }
            }
        }
    }

    /// A minimal list of entries that restore this state.
    pub fn entries(&self) -> Vec<JournalEntry> {
        let mut out = Vec::new();
        if let Some(at) = self.started_at {
            // Replaying the queued messages counts them again.
            let messages = self.messages.saturating_sub(self.queue.len() as u64);
            out.push(JournalEntry::Started { at, launches: self.launches, messages });
        }
        out.extend(self.instances.values().map(|record| JournalEntry::Launched(Box::new(record.clone()))));
        out.extend(self.queue.values().map(|message| JournalEntry::Sent(message.clone())));
        out
    }
}

mod capacity_type {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use stowage_model::offering::CapacityType;

    #[allow(clippy::trivially_copy_pass_by_ref)] // The signature is serde's.
    pub(super) fn serialize<S: Serializer>(value: &CapacityType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(value.as_str())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<CapacityType, D::Error> {
        let text = String::deserialize(deserializer)?;
        CapacityType::parse(&text).ok_or_else(|| D::Error::custom(format!("`{text}` is no capacity type")))
    }
}

mod message_kind {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::MessageKind;

    const NAMES: [(MessageKind, &str); 6] = [
        (MessageKind::SpotInterruption, "spot-interruption"),
        (MessageKind::RebalanceRecommendation, "rebalance-recommendation"),
        (MessageKind::CapacityReservationInterruption, "capacity-reservation-interruption"),
        (MessageKind::ScheduledChange, "scheduled-change"),
        (MessageKind::Stopped, "stopped"),
        (MessageKind::StateChange, "state-change"),
    ];

    #[allow(clippy::trivially_copy_pass_by_ref)] // The signature is serde's.
    pub(super) fn serialize<S: Serializer>(value: &MessageKind, serializer: S) -> Result<S::Ok, S::Error> {
        let name = NAMES.iter().find(|(kind, _)| kind == value).map_or("", |(_, name)| *name);
        serializer.serialize_str(name)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MessageKind, D::Error> {
        let text = String::deserialize(deserializer)?;
        let found = NAMES.iter().find(|(_, name)| *name == text).map(|(kind, _)| *kind);
        found.ok_or_else(|| D::Error::custom(format!("`{text}` is no kind of message")))
    }
}
