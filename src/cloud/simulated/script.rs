//! The script of a simulation: what goes wrong, when, and with which instances. Text to data; no clock here.
//!
//! A script is a YAML or JSON list. Each entry says when (`at`, counted from the start of the simulation, or `launch`, the number of
//! an instance from 1), what (`do`), and with which instances or offerings (`instanceType`, `zone`, `capacityType`, `nodeClaim`,
//! `nodePool`; `*` matches any run of characters, an absent field everything):
//!
//! ```yaml
//! - {at: 90s, do: spot-interruption, capacityType: spot, count: 2}
//! - {at: 0s, for: 5m, do: out-of-capacity, instanceType: "m7g.*", zone: us-east-1a}
//! - {launch: 3, do: slow-boot, delay: 4m}
//! - {launch: 5, after: 20s, do: kernel-panic}
//! ```

use serde_json::{Map, Value};

use crate::model::offering::CapacityType;

/// Why a script can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    /// Not YAML.
    #[error("the script is neither YAML nor JSON: {0}")]
    Syntax(String),
    /// Not a list of objects.
    #[error("the script is not a list of entries, each as {{at: 30s, do: throttle, for: 10s}}")]
    NotAList,
    /// A field of an entry is wrong.
    #[error("entry {entry} of the script, field `{field}`: {problem}")]
    Field {
        /// Place in the list, from 1.
        entry: usize,
        /// Field.
        field: String,
        /// What is wrong and what would be right.
        problem: String,
    },
}

/// What happens in a simulation, in the order of the script.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// The entries.
    pub events: Vec<Event>,
}

/// One entry of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When it begins.
    pub trigger: Trigger,
    /// What happens.
    pub action: Action,
    /// To which instances or offerings.
    pub selector: Selector,
    /// How long a condition holds, in milliseconds; `None` for ever.
    pub lasts_ms: Option<i64>,
    /// How many instances or calls it touches at most; `None` all.
    pub count: Option<u64>,
}

/// When an event begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// Milliseconds from the start of the simulation.
    At(i64),
    /// With an instance, counted from 1.
    Launch {
        /// Number of the instance.
        number: u64,
        /// Milliseconds from its launch; only for what happens to instances.
        after_ms: i64,
    },
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// To instances, once.
    Instance(InstanceEvent),
    /// Matching offerings have no capacity.
    OutOfCapacity,
    /// This share of the calls is throttled.
    Throttle {
        /// Millionths.
        share_ppm: i64,
    },
    /// This share of the calls fails in EC2 itself, without effect.
    ServerError {
        /// Millionths.
        share_ppm: i64,
    },
    /// Prices of matching offerings are multiplied by this many millionths.
    Price {
        /// Millionths.
        factor_ppm: i64,
    },
    /// Matching launches boot after this many milliseconds.
    SlowBoot {
        /// Milliseconds.
        delay_ms: i64,
    },
    /// Matching launches never boot.
    NeverBoot,
    /// Extended resources of matching launches appear this many milliseconds after the node.
    SlowDevicePlugin {
        /// Milliseconds.
        delay_ms: i64,
    },
    /// The instance is launched, but the call fails.
    LaunchErrorAfterSuccess,
}

/// What can happen to an instance. Also the values of the annotation `simulated.stowage.dev/event`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceEvent {
    /// Notice of a spot interruption, and the end when the notice is over.
    SpotInterruption,
    /// A rebalance recommendation.
    Rebalance,
    /// A scheduled maintenance event.
    ScheduledChange,
    /// Terminated behind everyone's back.
    Terminate,
    /// The instance runs on, but its kubelet is silent.
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

    /// Parses its name.
    ///
    /// # Errors
    /// The names there are.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::ALL.iter().find(|(name, _)| *name == text).map(|(_, event)| *event).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|(name, _)| *name).collect();
            format!("`{text}` is no event; expected one of {}", names.join(", "))
        })
    }
}

/// Which instances or offerings an event is about. Patterns may hold `*`; an absent one matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// Instance type.
    pub instance_type: Option<String>,
    /// Zone.
    pub zone: Option<String>,
    /// Capacity type.
    pub capacity_type: Option<CapacityType>,
    /// NodeClaim.
    pub node_claim: Option<String>,
    /// NodePool.
    pub node_pool: Option<String>,
}

impl Selector {
    /// Whether an offering matches; NodeClaim and NodePool are not looked at.
    pub fn matches_offering(&self, instance_type: &str, zone: &str, capacity_type: CapacityType) -> bool {
        matches(self.instance_type.as_deref(), instance_type)
            && matches(self.zone.as_deref(), zone)
            && self.capacity_type.is_none_or(|wanted| wanted == capacity_type)
    }

    /// Whether a NodeClaim of a NodePool matches; the offering is not looked at.
    pub fn matches_claim(&self, node_claim: &str, node_pool: &str) -> bool {
        matches(self.node_claim.as_deref(), node_claim) && matches(self.node_pool.as_deref(), node_pool)
    }
}

/// Whether `text` fits a pattern in which `*` stands for any run of characters.
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

impl Script {
    /// Reads a script; an empty text is an empty script.
    ///
    /// # Errors
    /// Names the entry, the field and what would be right.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let without_comments = text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        if without_comments {
            return Ok(Self::default());
        }
        let value: Value = serde_saphyr::from_str(text).map_err(|error| ScriptError::Syntax(error.to_string()))?;
        let Value::Array(entries) = value else {
            return Err(ScriptError::NotAList);
        };
        let parse = |(index, entry): (usize, Value)| match entry {
            Value::Object(fields) => Entry { number: index + 1, fields }.parse(),
            _ => Err(ScriptError::NotAList),
        };
        Ok(Self { events: entries.into_iter().enumerate().map(parse).collect::<Result<_, _>>()? })
    }
}

/// An entry while it is read: each field is taken out, and what is left over at the end is unknown.
struct Entry {
    number: usize,
    fields: Map<String, Value>,
}

const ACTIONS: &str = "spot-interruption, rebalance, scheduled-change, terminate, kernel-panic, out-of-capacity, throttle, \
                       server-error, price, slow-boot, never-boot, slow-device-plugin, launch-error-after-success";

impl Entry {
    fn wrong<T>(&self, field: &str, problem: impl Into<String>) -> Result<T, ScriptError> {
        Err(ScriptError::Field { entry: self.number, field: field.to_owned(), problem: problem.into() })
    }

    fn parse(mut self) -> Result<Event, ScriptError> {
        let action = self.action()?;
        let trigger = self.trigger(action)?;
        let lasts_ms = self.duration("for")?;
        if lasts_ms.is_some() && (matches!(action, Action::Instance(_)) || matches!(trigger, Trigger::Launch { .. })) {
            return self
                .wrong("for", "only goes with `at` and something that lasts, such as out-of-capacity or throttle");
        }
        let count = match (self.count()?, trigger, action) {
            // What is tied to one launch is over after one try, unless told otherwise.
            (None, Trigger::Launch { .. }, _) => Some(1),
            (Some(_), _, Action::Price { .. }) => return self.wrong("count", "does not go with price"),
            (count, _, _) => count,
        };
        let selector = Selector {
            instance_type: self.text("instanceType")?,
            zone: self.text("zone")?,
            capacity_type: match self.text("capacityType")? {
                None => None,
                Some(text) => match CapacityType::parse(&text) {
                    Some(parsed) => Some(parsed),
                    None => {
                        return self.wrong(
                            "capacityType",
                            format!("`{text}` is no capacity type; expected spot or on-demand"),
                        );
                    }
                },
            },
            node_claim: self.text("nodeClaim")?,
            node_pool: self.text("nodePool")?,
        };
        if let Some(unknown) = self.fields.keys().next() {
            let known = "at, launch, after, do, for, delay, factor, share, count, instanceType, zone, capacityType, nodeClaim, nodePool";
            return self.wrong(unknown, format!("does not go with this entry; the fields are {known}"));
        }
        Ok(Event { trigger, action, selector, lasts_ms, count })
    }

    fn action(&mut self) -> Result<Action, ScriptError> {
        let Some(name) = self.text("do")? else {
            return self.wrong("do", format!("is missing; expected one of {ACTIONS}"));
        };
        if let Ok(event) = InstanceEvent::parse(&name) {
            return Ok(Action::Instance(event));
        }
        match name.as_str() {
            "out-of-capacity" => Ok(Action::OutOfCapacity),
            "throttle" => Ok(Action::Throttle { share_ppm: self.share()? }),
            "server-error" => Ok(Action::ServerError { share_ppm: self.share()? }),
            "never-boot" => Ok(Action::NeverBoot),
            "launch-error-after-success" => Ok(Action::LaunchErrorAfterSuccess),
            "slow-boot" => Ok(Action::SlowBoot { delay_ms: self.required_duration("delay")? }),
            "slow-device-plugin" => Ok(Action::SlowDevicePlugin { delay_ms: self.required_duration("delay")? }),
            "price" => Ok(Action::Price { factor_ppm: self.factor()? }),
            _ => self.wrong("do", format!("`{name}` is no action; expected one of {ACTIONS}")),
        }
    }

    fn trigger(&mut self, action: Action) -> Result<Trigger, ScriptError> {
        let at = self.duration("at")?;
        let launch = self.number("launch")?;
        let after = self.duration("after")?;
        match (at, launch) {
            (Some(_), _) if after.is_some() => self.wrong("after", "only goes with `launch`"),
            (Some(at), None) => Ok(Trigger::At(at)),
            (None, Some(_)) if matches!(action, Action::Price { .. }) => self.wrong("launch", "price goes with `at`"),
            (None, Some(_)) if after.is_some() && !matches!(action, Action::Instance(_)) => {
                self.wrong("after", "only goes with what happens to instances, such as spot-interruption")
            }
            (None, Some(number)) => Ok(Trigger::Launch { number, after_ms: after.unwrap_or(0) }),
            (Some(_), Some(_)) => self.wrong("launch", "does not go with `at`; keep one of them"),
            (None, None) => self.wrong("at", "is missing; expected `at` (as 30s) or `launch` (as 3)"),
        }
    }

    fn factor(&mut self) -> Result<i64, ScriptError> {
        let value = self.fields.remove("factor").and_then(|value| value.as_f64());
        match value {
            Some(factor) if (0.0..=1000.0).contains(&factor) => {
                // In range by the guard, so the cast only drops the fraction that rounding has made zero.
                #[allow(clippy::cast_possible_truncation)]
                let ppm = (factor * 1e6).round() as i64;
                Ok(ppm)
            }
            _ => self.wrong("factor", "expected a number from 0 to 1000 that prices are multiplied by, as 1.5"),
        }
    }

    fn share(&mut self) -> Result<i64, ScriptError> {
        let value = self.fields.remove("share").map_or(Some(1.0), |value| value.as_f64());
        match value {
            Some(share) if (0.0..=1.0).contains(&share) => {
                // In range by the guard, so the cast only drops the fraction that rounding has made zero.
                #[allow(clippy::cast_possible_truncation)]
                let ppm = (share * 1e6).round() as i64;
                Ok(ppm)
            }
            _ => self.wrong("share", "expected the share of the calls, a number from 0 to 1, as 0.8"),
        }
    }

    fn count(&mut self) -> Result<Option<u64>, ScriptError> {
        self.number("count")
    }

    fn number(&mut self, field: &str) -> Result<Option<u64>, ScriptError> {
        match self.fields.remove(field) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) if number > 0 => Ok(Some(number)),
                _ => self.wrong(field, format!("{value} is no count; expected a whole number from 1")),
            },
        }
    }

    fn text(&mut self, field: &str) -> Result<Option<String>, ScriptError> {
        match self.fields.remove(field) {
            None => Ok(None),
            Some(Value::String(text)) if !text.is_empty() => Ok(Some(text)),
            Some(other) => self.wrong(field, format!("{other} is no text")),
        }
    }

    fn required_duration(&mut self, field: &str) -> Result<i64, ScriptError> {
        match self.duration(field)? {
            Some(duration) => Ok(duration),
            None => self.wrong(field, "is missing; expected a duration, as 4m"),
        }
    }

    fn duration(&mut self, field: &str) -> Result<Option<i64>, ScriptError> {
        match self.fields.remove(field) {
            None => Ok(None),
            Some(Value::String(text)) => match milliseconds(&text) {
                Some(duration) => Ok(Some(duration)),
                None => self.wrong(field, format!("`{text}` is no duration; expected as 30s, 500ms or 1h30m")),
            },
            Some(other) => self.wrong(field, format!("{other} is no duration; expected as 30s, 500ms or 1h30m")),
        }
    }
}

/// Milliseconds of a duration as `1h30m`, `45s` or `500ms`, at most a year.
fn milliseconds(text: &str) -> Option<i64> {
    const YEAR: i64 = 365 * 24 * 3_600_000;
    let mut total = 0_i64;
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let amount: i64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let unit = match &rest[..letters] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return None,
        };
        rest = &rest[letters..];
        total = total.checked_add(amount.checked_mul(unit)?).filter(|total| *total <= YEAR)?;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_read_as_yaml_and_as_json() {
        let yaml = "# what goes wrong\n- {at: 1h30m, do: spot-interruption, capacityType: spot, count: 2}\n\
                    - at: 0s\n  for: 5m\n  do: out-of-capacity\n  instanceType: \"m7g.*\"\n  zone: us-east-1a\n\
                    - {launch: 3, do: slow-boot, delay: 4m}\n- {launch: 5, after: 20s, do: kernel-panic, nodePool: p}\n\
                    - {at: 500ms, do: price, factor: 1.5}\n";
        let json = r#"[{"at": "1h30m", "do": "spot-interruption", "capacityType": "spot", "count": 2},
            {"at": "0s", "for": "5m", "do": "out-of-capacity", "instanceType": "m7g.*", "zone": "us-east-1a"},
            {"launch": 3, "do": "slow-boot", "delay": "4m"}, {"launch": 5, "after": "20s", "do": "kernel-panic", "nodePool": "p"},
            {"at": "500ms", "do": "price", "factor": 1.5}]"#;
        let parsed = Script::parse(yaml).unwrap();
        assert_eq!(parsed, Script::parse(json).unwrap());
        assert_eq!(
            parsed.events[0],
            Event {
                trigger: Trigger::At(5_400_000),
                action: Action::Instance(InstanceEvent::SpotInterruption),
                selector: Selector { capacity_type: Some(CapacityType::Spot), ..Selector::default() },
                lasts_ms: None,
                count: Some(2),
            }
        );
        assert_eq!((parsed.events[1].lasts_ms, parsed.events[1].count), (Some(300_000), None));
        assert_eq!(parsed.events[2].action, Action::SlowBoot { delay_ms: 240_000 });
        assert_eq!(parsed.events[2].count, Some(1));
        assert_eq!(parsed.events[3].trigger, Trigger::Launch { number: 5, after_ms: 20_000 });
        assert_eq!(parsed.events[4].action, Action::Price { factor_ppm: 1_500_000 });
        assert_eq!(Script::parse("\n# nothing\n").unwrap(), Script::default());
        let share = |text| Script::parse(text).unwrap().events[0].action;
        assert_eq!(share("[{at: 0s, do: throttle, share: 0.8}]"), Action::Throttle { share_ppm: 800_000 });
        assert_eq!(share("[{at: 0s, do: server-error}]"), Action::ServerError { share_ppm: 1_000_000 });
    }

    #[test]
    fn what_is_wrong_with_a_script_is_named() {
        let durations = "expected as 30s, 500ms or 1h30m";
        let cases = [
            ("at: 3s", "the script is not a list of entries, each as {at: 30s, do: throttle, for: 10s}".to_owned()),
            ("- throttle", "the script is not a list of entries, each as {at: 30s, do: throttle, for: 10s}".to_owned()),
            ("- {at: 3s}", format!("entry 1 of the script, field `do`: is missing; expected one of {ACTIONS}")),
            (
                "- {at: 3s, do: throttle}\n- {at: 3s, do: spot-interupt}",
                format!("entry 2 of the script, field `do`: `spot-interupt` is no action; expected one of {ACTIONS}"),
            ),
            (
                "- {do: throttle}",
                "entry 1 of the script, field `at`: is missing; expected `at` (as 30s) or `launch` (as 3)".to_owned(),
            ),
            ("- {at: 30, do: throttle}", format!("entry 1 of the script, field `at`: 30 is no duration; {durations}")),
            ("- {at: 3d, do: throttle}", format!("entry 1 of the script, field `at`: `3d` is no duration; {durations}")),
            (
                "- {at: 3s, launch: 1, do: throttle}",
                "entry 1 of the script, field `launch`: does not go with `at`; keep one of them".to_owned(),
            ),
            (
                "- {launch: 0, do: throttle}",
                "entry 1 of the script, field `launch`: 0 is no count; expected a whole number from 1".to_owned(),
            ),
            (
                "- {launch: 1, do: slow-boot}",
                "entry 1 of the script, field `delay`: is missing; expected a duration, as 4m".to_owned(),
            ),
            (
                "- {at: 1s, do: price, factor: -1}",
                "entry 1 of the script, field `factor`: expected a number from 0 to 1000 that prices are multiplied by, as 1.5".to_owned(),
            ),
            (
                "- {at: 1s, do: throttle, share: 2}",
                "entry 1 of the script, field `share`: expected the share of the calls, a number from 0 to 1, as 0.8".to_owned(),
            ),
            (
                "- {at: 1s, do: throttle, capacityType: cheap}",
                "entry 1 of the script, field `capacityType`: `cheap` is no capacity type; expected spot or on-demand".to_owned(),
            ),
            (
                "- {at: 1s, do: rebalance, for: 3s}",
                "entry 1 of the script, field `for`: only goes with `at` and something that lasts, such as out-of-capacity or throttle".to_owned(),
            ),
            (
                "- {at: 1s, do: throttle, instance-type: m5.large}",
                "entry 1 of the script, field `instance-type`: does not go with this entry; the fields are at, launch, after, do, for, delay, \
                 factor, share, count, instanceType, zone, capacityType, nodeClaim, nodePool"
                    .to_owned(),
            ),
            (
                "- {at: 1s, do: throttle, delay: 3s}",
                "entry 1 of the script, field `delay`: does not go with this entry; the fields are at, launch, after, do, for, delay, \
                 factor, share, count, instanceType, zone, capacityType, nodeClaim, nodePool"
                    .to_owned(),
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(Script::parse(text).unwrap_err().to_string(), expected, "{text}");
        }
        assert!(matches!(Script::parse("- {at: 3s, do: [}"), Err(ScriptError::Syntax(_))));
    }

    #[test]
    fn patterns_match_with_stars() {
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

    #[test]
    fn durations_are_read() {
        for (text, expected) in [
            ("0s", Some(0)),
            ("1h2m3s4ms", Some(3_723_004)),
            ("90s", Some(90_000)),
            ("", None),
            ("s", None),
            ("5", None),
            ("-5s", None),
            ("9999999999999h", None),
        ] {
            assert_eq!(milliseconds(text), expected, "{text}");
        }
    }
}
