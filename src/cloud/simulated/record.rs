//! What the simulation remembers of itself: the entries of its journal and the ledger they add up to.
//! Every change goes through [`Ledger::apply`], so a replayed journal gives the very state that wrote it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Taint;
use serde::{Deserialize, Serialize};

use crate::cloud::{Instance, InstanceState, MessageKind};
use crate::model::offering::CapacityType;
use crate::model::time::UnixMillis;

/// An instance and how far its life has come. Times are milliseconds since the epoch.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Record {
    /// Number of the instance in its simulation, from 1.
    pub number: u64,
    /// As `i-0123456789abcdef0`.
    pub id: String,
    /// Token it was launched with.
    pub client_token: String,
    /// NodeClaim it was launched for.
    pub node_claim: String,
    /// NodePool of that NodeClaim.
    pub node_pool: String,
    /// EC2NodeClass of that NodeClaim.
    pub node_class: String,
    /// Instance type.
    pub instance_type: String,
    /// Zone.
    pub zone: String,
    /// Capacity type, as the label value.
    #[serde(with = "capacity_type")]
    pub capacity_type: CapacityType,
    /// Image.
    pub image_id: String,
    /// Address within the network, as `10.1.2.3`; also the node's name.
    pub private_ip: String,
    /// Labels its kubelet registers with.
    pub labels: BTreeMap<String, String>,
    /// Taints its kubelet registers with.
    pub taints: Vec<Taint>,
    /// When it was launched.
    pub launched_at_ms: i64,
    /// When it stops being pending.
    pub running_at_ms: i64,
    /// When its kubelet starts; `None` never.
    pub boot_at_ms: Option<i64>,
    /// When extended resources appear, where not with the node.
    pub devices_at_ms: Option<i64>,
    /// When it begins to shut down, once that is certain. May lie ahead.
    pub shutdown_at_ms: Option<i64>,
    /// When it is terminated.
    pub gone_at_ms: Option<i64>,
    /// What has been done to its Node.
    pub node: NodeProgress,
}

/// What has been done to an instance's Node object.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[allow(clippy::struct_excessive_bools)] // Four independent facts, each set once.
pub struct NodeProgress {
    /// The kubelet has registered it.
    pub registered: bool,
    /// Its extended resources were reported.
    pub devices: bool,
    /// Its kubelet fell silent by a scripted kernel panic.
    pub panicked: bool,
    /// Its heartbeats were stopped.
    pub silenced: bool,
    /// It was deleted after the instance was gone.
    pub removed: bool,
}

impl Record {
    /// As `ip-10-1-2-3.ec2.internal`, the name a node has in us-east-1.
    pub fn node_name(&self) -> String {
        format!("ip-{}.ec2.internal", self.private_ip.replace('.', "-"))
    }

    /// As `aws:///us-east-1a/i-0123456789abcdef0`.
    pub fn provider_id(&self) -> String {
        format!("aws:///{}/{}", self.zone, self.id)
    }

    /// State at a time.
    pub fn state(&self, now_ms: i64) -> InstanceState {
        let past = |at: Option<i64>| at.is_some_and(|at| at <= now_ms);
        if past(self.gone_at_ms) {
            InstanceState::Terminated
        } else if past(self.shutdown_at_ms) {
            InstanceState::ShuttingDown
        } else if now_ms < self.running_at_ms {
            InstanceState::Pending
        } else {
            InstanceState::Running
        }
    }

    /// Neither shutting down nor gone at a time.
    pub fn lives(&self, now_ms: i64) -> bool {
        matches!(self.state(now_ms), InstanceState::Pending | InstanceState::Running)
    }

    /// The instance as the cloud describes it at a time.
    pub fn describe(&self, now_ms: i64) -> Instance {
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
            launched_at: UnixMillis(self.launched_at_ms),
            state: self.state(now_ms),
        }
    }
}

/// A step in the life of a Node object that was done.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeStep {
    /// Registered.
    Registered,
    /// Extended resources reported.
    Devices,
    /// Heartbeats stopped.
    Silenced,
    /// Deleted.
    Removed,
}

/// A message waiting in the queue.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct QueuedMessage {
    /// Identity and receipt.
    pub id: String,
    /// What it says.
    #[serde(with = "message_kind")]
    pub kind: MessageKind,
    /// Instance.
    pub instance_id: String,
    /// When it is sent. May lie ahead.
    pub at_ms: i64,
}

/// A change of the simulation, one line of its journal.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "entry", rename_all = "kebab-case")]
pub enum Entry {
    /// The simulation began.
    Started {
        /// When.
        at_ms: i64,
        /// How many instances were launched before this line.
        launches: u64,
        /// How many messages were sent before this line.
        messages: u64,
    },
    /// An instance was launched.
    Launched(Box<Record>),
    /// The end of an instance became certain.
    Shutdown {
        /// Instance.
        id: String,
        /// When it begins to shut down.
        at_ms: i64,
        /// When it is terminated.
        gone_at_ms: i64,
    },
    /// Its kubelet fell silent.
    Panicked {
        /// Instance.
        id: String,
    },
    /// Something was done to its Node.
    Node {
        /// Instance.
        id: String,
        /// What.
        step: NodeStep,
    },
    /// A message was sent.
    Sent(QueuedMessage),
    /// A message was deleted.
    Deleted {
        /// Message.
        id: String,
    },
    /// An event of the script was used.
    Fired {
        /// Which.
        event: String,
        /// How many times.
        times: u64,
    },
    /// A terminated instance is no longer described.
    Forgotten {
        /// Instance.
        id: String,
    },
}

/// What all entries so far add up to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    /// When the simulation began.
    pub started_at_ms: Option<i64>,
    /// Instances launched so far.
    pub launches: u64,
    /// Messages sent so far.
    pub messages: u64,
    /// Instances by id.
    pub instances: BTreeMap<String, Record>,
    /// Instance id by client token.
    pub tokens: BTreeMap<String, String>,
    /// Messages by id.
    pub queue: BTreeMap<String, QueuedMessage>,
    /// How often each event of the script was used.
    pub fired: BTreeMap<String, u64>,
}

impl Ledger {
    /// Takes a change in. An entry about something unknown changes nothing: a journal may tell of an instance that was forgotten.
    pub fn apply(&mut self, entry: &Entry) {
        match entry {
            Entry::Started { at_ms, launches, messages } => {
                self.started_at_ms = Some(*at_ms);
                self.launches = self.launches.max(*launches);
                self.messages = self.messages.max(*messages);
            }
            Entry::Launched(record) => {
                self.launches = self.launches.max(record.number);
                self.tokens.insert(record.client_token.clone(), record.id.clone());
                self.instances.insert(record.id.clone(), Record::clone(record));
            }
            Entry::Shutdown { id, at_ms, gone_at_ms } => {
                if let Some(record) = self.instances.get_mut(id)
                    && record.shutdown_at_ms.is_none_or(|earlier| *at_ms < earlier)
                {
                    record.shutdown_at_ms = Some(*at_ms);
                    record.gone_at_ms = Some(*gone_at_ms);
                }
            }
            Entry::Panicked { id } => {
                if let Some(record) = self.instances.get_mut(id) {
                    record.node.panicked = true;
                }
            }
            Entry::Node { id, step } => {
                if let Some(record) = self.instances.get_mut(id) {
                    match step {
                        NodeStep::Registered => record.node.registered = true,
                        NodeStep::Devices => record.node.devices = true,
                        NodeStep::Silenced => record.node.silenced = true,
                        NodeStep::Removed => record.node.removed = true,
                    }
                }
            }
            Entry::Sent(message) => {
                self.messages += 1;
                self.queue.insert(message.id.clone(), message.clone());
            }
            Entry::Deleted { id } => {
                self.queue.remove(id);
            }
            Entry::Fired { event, times } => *self.fired.entry(event.clone()).or_default() += times,
            Entry::Forgotten { id } => {
                if let Some(record) = self.instances.remove(id) {
                    self.tokens.remove(&record.client_token);
                }
            }
        }
    }

    /// The fewest entries that give this ledger.
    pub fn entries(&self) -> Vec<Entry> {
        let mut out = Vec::new();
        if let Some(at_ms) = self.started_at_ms {
            // Replaying the messages below counts them again.
            let messages = self.messages.saturating_sub(self.queue.len() as u64);
            out.push(Entry::Started { at_ms, launches: self.launches, messages });
        }
        out.extend(self.instances.values().map(|record| Entry::Launched(Box::new(record.clone()))));
        out.extend(self.queue.values().map(|message| Entry::Sent(message.clone())));
        out.extend(self.fired.iter().map(|(event, times)| Entry::Fired { event: event.clone(), times: *times }));
        out
    }
}

mod capacity_type {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::model::offering::CapacityType;

    #[allow(clippy::trivially_copy_pass_by_ref)] // The signature is serde's.
    pub fn serialize<S: Serializer>(value: &CapacityType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(value.as_str())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<CapacityType, D::Error> {
        let text = String::deserialize(deserializer)?;
        CapacityType::parse(&text).ok_or_else(|| D::Error::custom(format!("`{text}` is no capacity type")))
    }
}

mod message_kind {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::cloud::MessageKind;

    const NAMES: [(MessageKind, &str); 6] = [
        (MessageKind::SpotInterruption, "spot-interruption"),
        (MessageKind::RebalanceRecommendation, "rebalance-recommendation"),
        (MessageKind::CapacityReservationInterruption, "capacity-reservation-interruption"),
        (MessageKind::ScheduledChange, "scheduled-change"),
        (MessageKind::Stopped, "stopped"),
        (MessageKind::StateChange, "state-change"),
    ];

    #[allow(clippy::trivially_copy_pass_by_ref)] // The signature is serde's.
    pub fn serialize<S: Serializer>(value: &MessageKind, serializer: S) -> Result<S::Ok, S::Error> {
        let name = NAMES.iter().find(|(kind, _)| kind == value).map_or("", |(_, name)| *name);
        serializer.serialize_str(name)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MessageKind, D::Error> {
        let text = String::deserialize(deserializer)?;
        let found = NAMES.iter().find(|(_, name)| *name == text).map(|(kind, _)| *kind);
        found.ok_or_else(|| D::Error::custom(format!("`{text}` is no kind of message")))
    }
}
