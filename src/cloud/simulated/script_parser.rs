//! Parses the script of a simulation. Errors name the entry, the field and the expected value.

use std::time::Duration;

use serde_json::{Map, Value};
use stowage_model::offering::CapacityType;

use crate::cloud::simulated::script::{Action, Event, InstanceEvent, Script, Selector, Trigger};

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
        field: String,
        /// What is wrong and what would be right.
        problem: String,
    },
}

impl Script {
    /// Parses a script; an empty text is an empty script.
    ///
    /// # Errors
    /// [`ScriptError`] with the entry, the field and the expected value.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let is_empty = text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        if is_empty {
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

/// An entry during parsing: each known field is removed, and the remaining ones are unknown.
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
        let lasts = self.duration("for")?;
        if lasts.is_some() && (matches!(action, Action::Instance(_)) || matches!(trigger, Trigger::Launch { .. })) {
            return self
                .wrong("for", "is only valid with `at` and an action that lasts, such as out-of-capacity or throttle");
        }
        let count = match (self.count()?, trigger, action) {
            // An event of one launch applies once by default.
            (None, Trigger::Launch { .. }, _) => Some(1),
            (Some(_), _, Action::Price { .. }) => return self.wrong("count", "is not valid with price"),
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
            return self.wrong(unknown, format!("is not valid in this entry; the fields are {known}"));
        }
        Ok(Event { trigger, action, selector, lasts, count })
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
            "slow-boot" => Ok(Action::SlowBoot { delay: self.required_duration("delay")? }),
            "slow-device-plugin" => Ok(Action::SlowDevicePlugin { delay: self.required_duration("delay")? }),
            "price" => Ok(Action::Price { factor_ppm: self.factor()? }),
            _ => self.wrong("do", format!("`{name}` is no action; expected one of {ACTIONS}")),
        }
    }

    fn trigger(&mut self, action: Action) -> Result<Trigger, ScriptError> {
        let at = self.duration("at")?;
        let launch = self.number("launch")?;
        let after = self.duration("after")?;
        match (at, launch) {
            (Some(_), _) if after.is_some() => self.wrong("after", "is only valid with `launch`"),
            (Some(at), None) => Ok(Trigger::At(at)),
            (None, Some(_)) if matches!(action, Action::Price { .. }) => {
                self.wrong("launch", "price is only valid with `at`")
            }
            (None, Some(_)) if after.is_some() && !matches!(action, Action::Instance(_)) => {
                self.wrong("after", "is only valid with an event of instances, such as spot-interruption")
            }
            (None, Some(number)) => Ok(Trigger::Launch { number, after: after.unwrap_or_default() }),
            (Some(_), Some(_)) => self.wrong("launch", "is not valid with `at`; keep one of them"),
            (None, None) => self.wrong("at", "is missing; expected `at` (as 30s) or `launch` (as 3)"),
        }
    }

    fn factor(&mut self) -> Result<i64, ScriptError> {
        let value = self.fields.remove("factor").and_then(|value| value.as_f64());
        match value {
            Some(factor) if (0.0..=1000.0).contains(&factor) => {
                // Rounded and in range, so the cast is exact.
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
                // Rounded and in range, so the cast is exact.
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

    fn required_duration(&mut self, field: &str) -> Result<Duration, ScriptError> {
        match self.duration(field)? {
            Some(duration) => Ok(duration),
            None => self.wrong(field, "is missing; expected a duration, as 4m"),
        }
    }

    fn duration(&mut self, field: &str) -> Result<Option<Duration>, ScriptError> {
        match self.fields.remove(field) {
            None => Ok(None),
            Some(Value::String(text)) => match parse_duration(&text) {
                Some(duration) => Ok(Some(duration)),
                None => self.wrong(field, format!("`{text}` is no duration; expected as 30s, 500ms or 1h30m")),
            },
            Some(other) => self.wrong(field, format!("{other} is no duration; expected as 30s, 500ms or 1h30m")),
        }
    }
}

/// Parses a duration as `1h30m`, `45s` or `500ms`, at most a year.
fn parse_duration(text: &str) -> Option<Duration> {
    const YEAR: Duration = Duration::from_hours(365 * 24);
    let mut total = Duration::ZERO;
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let amount: u64 = rest[..digits].parse().ok()?;
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
        let part = Duration::from_millis(amount.checked_mul(unit)?);
        total = total.checked_add(part).filter(|total| *total <= YEAR)?;
    }
    Some(total)
}

#[cfg(test)]
mod tests;
