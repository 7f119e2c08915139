//! The script of a simulation: faults and events, their times and their targets. No clock; [`script_parser`](super::script_parser)
//! parses the text.
//!
//! A script is a YAML or JSON list. Each entry has a time (`at`, from the start of the simulation, or `launch`, the number of
//! an instance from 1), an action (`do`), and a selector of instances or offerings (`instanceType`, `zone`, `capacityType`, `nodeClaim`,
//! `nodePool`; `*` matches any run of characters, an absent field everything):
//!
//! ```yaml
//! - {at: 90s, do: spot-interruption, capacityType: spot, count: 2}
//! - {at: 0s, for: 5m, do: out-of-capacity, instanceType: "m7g.*", zone: us-east-1a}
//! - {launch: 3, do: slow-boot, delay: 4m}
//! - {launch: 5, after: 20s, do: kernel-panic}
//! ```

use std::time::Duration;

use stowage_model::draw::draw;
use stowage_model::offering::CapacityType;

/// The events of a simulation, in the order of the script.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    pub events: Vec<Event>,
}

/// One entry of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub trigger: Trigger,
    pub action: Action,
    pub selector: Selector,
    /// How long a condition lasts; `None` for ever.
    pub lasts: Option<Duration>,
    /// Maximum number of affected instances or calls; `None` for all.
    pub count: Option<u64>,
}

impl Event {
    /// Identifies the event in the journal: its position and its content, so that an event of a changed script is a new one. The
    /// text that is hashed is part of the journal's format.
    pub fn key(&self, index: usize) -> String {
        format!("{}-{:016x}", index + 1, draw(0, &[&self.content()]))
    }

    fn content(&self) -> String {
        let trigger = match self.trigger {
            Trigger::At(at) => format!("At({})", at.as_millis()),
            Trigger::Launch { number, after } => {
                format!("Launch {{ number: {number}, after_ms: {} }}", after.as_millis())
            }
        };
        let action = match self.action {
            Action::SlowBoot { delay } => format!("SlowBoot {{ delay_ms: {} }}", delay.as_millis()),
            Action::SlowDevicePlugin { delay } => format!("SlowDevicePlugin {{ delay_ms: {} }}", delay.as_millis()),
            other => format!("{other:?}"),
        };
        let (selector, lasts, count) = (&self.selector, self.lasts.map(|lasts| lasts.as_millis()), self.count);
        format!(
            "Event {{ trigger: {trigger}, action: {action}, selector: {selector:?}, lasts_ms: {lasts:?}, count: {count:?} }}"
        )
    }
}

/// When an event starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// At a time from the start of the simulation.
    At(Duration),
    /// At the launch of an instance.
    Launch {
        /// Number of the instance, from 1.
        number: u64,
        /// Delay from the launch; for instance events only.
        after: Duration,
    },
}

/// The action of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// An event of instances, once each.
    Instance(InstanceEvent),
    /// Matching offerings have no capacity.
    OutOfCapacity,
    /// This share of the calls, in millionths, is throttled.
    Throttle { share_ppm: i64 },
    /// This share of the calls, in millionths, fails with a server error and without effect.
    ServerError { share_ppm: i64 },
    /// Prices of matching offerings are multiplied by this many millionths.
    Price { factor_ppm: i64 },
    /// Matching launches boot after this delay.
    SlowBoot { delay: Duration },
    /// Matching launches never boot.
    NeverBoot,
    /// Extended resources of matching launches are reported this long after the Node.
    SlowDevicePlugin { delay: Duration },
    /// The instance is launched, but the call fails.
    LaunchErrorAfterSuccess,
}

/// An event of an instance. Its names are also the values of the annotation `simulated.stowage.dev/event`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceEvent {
    /// Spot interruption warning, and termination after the notice period.
    SpotInterruption,
    /// A rebalance recommendation.
    Rebalance,
    /// A scheduled maintenance event.
    ScheduledChange,
    /// Termination without a warning.
    Terminate,
    /// The instance keeps running, but its kubelet stops.
    KernelPanic,
}

impl InstanceEvent {
    const ALL: [(&'static str, Self); 5] = [
        ("spot-interruption", Self::SpotInterruption),
        ("rebalance", Self::Rebalance),
        ("scheduled-change", Self::ScheduledChange),
        ("terminate", Self::Terminate),
        ("kernel-panic", Self::KernelPanic),
    ];

    /// Parses a name.
    ///
    /// # Errors
    /// A message with the valid names.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::ALL.iter().find(|(name, _)| *name == text).map(|(_, event)| *event).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|(name, _)| *name).collect();
            format!("`{text}` is no event; expected one of {}", names.join(", "))
        })
    }
}

/// Selects instances or offerings. Patterns may contain `*`; an absent one matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    pub instance_type: Option<String>,
    pub zone: Option<String>,
    pub capacity_type: Option<CapacityType>,
    pub node_claim: Option<String>,
    pub node_pool: Option<String>,
}

impl Selector {
    /// Whether an offering matches; NodeClaim and NodePool are ignored.
    pub fn matches_offering(&self, instance_type: &str, zone: &str, capacity_type: CapacityType) -> bool {
        matches(self.instance_type.as_deref(), instance_type)
            && matches(self.zone.as_deref(), zone)
            && self.capacity_type.is_none_or(|wanted| wanted == capacity_type)
    }

    /// Whether a NodeClaim of a NodePool matches; the offering is ignored.
    pub fn matches_claim(&self, node_claim: &str, node_pool: &str) -> bool {
        matches(self.node_claim.as_deref(), node_claim) && matches(self.node_pool.as_deref(), node_pool)
    }
}

/// Whether `text` matches a pattern in which `*` stands for any characters.
fn matches(pattern: Option<&str>, text: &str) -> bool {
    let Some(pattern) = pattern else {
        return true;
    };
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else {
        return false;
    };
    let Some(last) = pieces.next_back() else {
        return rest.is_empty();
    };
    for piece in pieces {
        let Some(at) = rest.find(piece) else {
            return false;
        };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_an_event_in_a_journal_never_changes() {
        let script = "[{at: 90s, for: 5m, do: throttle, share: 0.5}, {launch: 3, do: slow-boot, delay: 4m, zone: a}, \
                      {launch: 5, after: 20s, do: kernel-panic}]";
        let events = Script::parse(script).unwrap().events;
        assert_eq!(
            events[0].content(),
            "Event { trigger: At(90000), action: Throttle { share_ppm: 500000 }, selector: Selector { instance_type: None, zone: None, \
             capacity_type: None, node_claim: None, node_pool: None }, lasts_ms: Some(300000), count: None }"
        );
        assert_eq!(
            events[1].content(),
            "Event { trigger: Launch { number: 3, after_ms: 0 }, action: SlowBoot { delay_ms: 240000 }, selector: Selector { \
             instance_type: None, zone: Some(\"a\"), capacity_type: None, node_claim: None, node_pool: None }, lasts_ms: None, \
             count: Some(1) }"
        );
        assert_eq!(
            events[2].content(),
            "Event { trigger: Launch { number: 5, after_ms: 20000 }, action: Instance(KernelPanic), selector: Selector { \
             instance_type: None, zone: None, capacity_type: None, node_claim: None, node_pool: None }, lasts_ms: None, \
             count: Some(1) }"
        );
    }

    #[test]
    fn a_star_matches_any_characters() {
        for (pattern, text, expected) in [
            (None, "m5.large", true),
            (Some("m5.large"), "m5.large", true),
            (Some("m5.large"), "m5.xlarge", false),
            (Some("m5.*"), "m5.xlarge", true),
            (Some("*.large"), "m5.large", true),
            (Some("*.large"), "m5.xlarge", false),
            (Some("m*.x*"), "m5.2xlarge", false),
            (Some("m*x*e"), "m5.2xlarge", true),
            (Some("*"), "", true),
            (Some("a*a"), "a", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern:?} {text}");
        }
    }
}
