//! Requirements on labels as sets of values: finite sets, complements, integer ranges, and whether absence is allowed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use crate::labels::normalize_key;

/// An invalid requirement.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequirementError {
    /// Not one of the eight operators.
    #[error(
        "requirement on {key}: operator {operator:?} is not one of In, NotIn, Exists, DoesNotExist, Gt, Lt, Gte, Lte"
    )]
    Operator {
        /// Label key.
        key: String,
        /// Operator as written.
        operator: String,
    },
    /// A numeric operator without exactly one integer.
    #[error("requirement on {key}: {operator} needs exactly one integer, got {values:?}")]
    Number {
        /// Label key.
        key: String,
        /// Operator as written.
        operator: String,
        /// Values as written.
        values: Vec<String>,
    },
}

/// The values a label may have, absence included.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueSet {
    /// Whether a node without the label is accepted.
    absent: bool,
    /// True: every value but `values`. False: only `values`.
    complement: bool,
    values: BTreeSet<Arc<str>>,
    /// Minimum integer, inclusive; with a bound, a value that is not an integer is rejected.
    least: Option<i64>,
    /// Maximum integer, inclusive.
    greatest: Option<i64>,
}

impl ValueSet {
    /// `In` one value.
    pub fn one(value: &str) -> Self {
        Self::any_of([value])
    }

    /// `In`.
    pub fn any_of<'a>(values: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            absent: false,
            complement: false,
            values: values.into_iter().map(Arc::from).collect(),
            least: None,
            greatest: None,
        }
    }

    /// `NotIn`: also true where the label is absent.
    pub fn none_of<'a>(values: impl IntoIterator<Item = &'a str>) -> Self {
        Self { absent: true, complement: true, ..Self::any_of(values) }
    }

    /// `Exists`.
    pub fn exists() -> Self {
        Self { complement: true, ..Self::any_of([]) }
    }

    /// `DoesNotExist`.
    pub fn does_not_exist() -> Self {
        Self { absent: true, ..Self::any_of([]) }
    }

    /// Whether it has a numeric bound.
    pub fn has_bounds(&self) -> bool {
        self.least.is_some() || self.greatest.is_some()
    }

    /// Integers from `least` to `greatest`, each inclusive and optional.
    pub fn between(least: Option<i64>, greatest: Option<i64>) -> Self {
        Self { least, greatest, ..Self::exists() }
    }

    /// The set of an operator and its values.
    ///
    /// # Errors
    /// The operator is unknown, or a numeric operator does not have exactly one integer.
    pub fn parse(key: &str, operator: &str, values: &[String]) -> Result<Self, RequirementError> {
        let strings = || values.iter().map(String::as_str);
        let number = || match values {
            [one] => one.trim().parse::<i64>().ok(),
            _ => None,
        };
        let numeric = || {
            number().ok_or_else(|| RequirementError::Number {
                key: key.into(),
                operator: operator.into(),
                values: values.to_vec(),
            })
        };
        Ok(match operator {
            "In" => Self::any_of(strings()),
            "NotIn" => Self::none_of(strings()),
            "Exists" => Self::exists(),
            "DoesNotExist" => Self::does_not_exist(),
            // No integer is beyond the last one: the set is empty, without absence.
            "Gt" => numeric()?.checked_add(1).map_or_else(|| Self::any_of([]), |n| Self::between(Some(n), None)),
            "Lt" => numeric()?.checked_sub(1).map_or_else(|| Self::any_of([]), |n| Self::between(None, Some(n))),
            "Gte" => Self::between(Some(numeric()?), None),
            "Lte" => Self::between(None, Some(numeric()?)),
            _ => {
                return Err(RequirementError::Operator { key: key.into(), operator: operator.into() });
            }
        })
    }

    fn in_bounds(&self, value: &str) -> bool {
        if self.least.is_none() && self.greatest.is_none() {
            return true;
        }
        value
            .parse::<i64>()
            .is_ok_and(|n| self.least.is_none_or(|least| n >= least) && self.greatest.is_none_or(|most| n <= most))
    }

    /// Whether a label with this value is accepted.
    pub fn contains(&self, value: &str) -> bool {
        self.values.contains(value) != self.complement && self.in_bounds(value)
    }

    /// Whether a label that may be absent is accepted.
    pub fn accepts(&self, value: Option<&str>) -> bool {
        value.map_or(self.absent, |value| self.contains(value))
    }

    /// Whether absence is accepted.
    pub fn accepts_absence(&self) -> bool {
        self.absent
    }

    /// The values, when they are finitely many by enumeration.
    pub fn finite(&self) -> Option<impl Iterator<Item = &Arc<str>>> {
        (!self.complement).then(|| self.values.iter().filter(|value| self.in_bounds(value)))
    }

    /// The values named, accepted or excluded.
    pub fn named(&self) -> impl Iterator<Item = &Arc<str>> {
        self.values.iter()
    }

    /// The intersection of both sets.
    #[must_use]
    pub fn intersect(&self, other: &Self) -> Self {
        let least = self.least.max(other.least);
        let greatest = match (self.greatest, other.greatest) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let absent = self.absent && other.absent;
        let (complement, values) = match (self.complement, other.complement) {
            (true, true) => (true, self.values.union(&other.values).cloned().collect()),
            (false, _) => (false, self.values.iter().filter(|v| other.contains(v)).cloned().collect()),
            (true, false) => (false, other.values.iter().filter(|v| self.contains(v)).cloned().collect()),
        };
        let mut out = Self { absent, complement, values, least, greatest };
        if !out.complement {
            out.values = out.values.iter().filter(|v| out.in_bounds(v)).cloned().collect();
            (out.least, out.greatest) = (None, None);
        }
        out
    }

    /// Whether some present value is accepted. An integer range whose every member is excluded has none.
    pub fn has_value(&self) -> bool {
        if !self.complement {
            return self.values.iter().any(|v| self.in_bounds(v));
        }
        self.some_value().is_some()
    }

    /// Whether nothing is accepted, not even absence.
    pub fn is_empty(&self) -> bool {
        !self.absent && !self.has_value()
    }

    /// A value of the set, the same each time: the first named one, or the least integer, or `any`.
    pub fn some_value(&self) -> Option<String> {
        if !self.complement {
            return self.values.iter().find(|v| self.in_bounds(v)).map(ToString::to_string);
        }
        if self.least.is_none() && self.greatest.is_none() {
            return std::iter::once("any".to_owned())
                .chain((0..=self.values.len()).map(|n| format!("any-{n}")))
                .find(|candidate| !self.values.contains(candidate.as_str()));
        }
        // One more candidate than there are exclusions is enough.
        let steps = i64::try_from(self.values.len()).unwrap_or(i64::MAX);
        let start = self.least.unwrap_or_else(|| self.greatest.unwrap_or(0).saturating_sub(steps));
        let end = self.greatest.unwrap_or(i64::MAX).min(start.saturating_add(steps));
        (start..=end).map(|n| n.to_string()).find(|candidate| !self.values.contains(candidate.as_str()))
    }
}

impl fmt::Display for ValueSet {
    /// Human-readable form: `In [a b]`, `NotIn [a]`, `Exists`, `Gte 5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = self.values.iter().map(AsRef::as_ref).collect::<Vec<&str>>().join(" ");
        if !self.complement {
            return match (self.values.is_empty(), self.absent) {
                (true, true) => f.write_str("DoesNotExist"),
                _ => write!(f, "In [{list}]"),
            };
        }
        let mut parts = Vec::new();
        if let Some(n) = self.least {
            parts.push(format!("Gte {n}"));
        }
        if let Some(n) = self.greatest {
            parts.push(format!("Lte {n}"));
        }
        if !self.values.is_empty() {
            parts.push(format!("NotIn [{list}]"));
        }
        if parts.is_empty() {
            parts.push(if self.absent { "anything".into() } else { "Exists".into() });
        }
        f.write_str(&parts.join(" and "))
    }
}

/// Requirements by key, each the intersection of all requirements on the key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Requirements {
    sets: BTreeMap<Arc<str>, ValueSet>,
}

impl Requirements {
    /// Adds a requirement; the key is normalized.
    pub fn require(&mut self, key: &str, set: &ValueSet) {
        let key = normalize_key(key);
        match self.sets.get_mut(key) {
            Some(present) => *present = present.intersect(set),
            None => {
                self.sets.insert(Arc::from(key), set.clone());
            }
        }
    }

    /// Every key with its set, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &ValueSet)> {
        self.sets.iter()
    }

    /// The set of a key.
    pub fn get(&self, key: &str) -> Option<&ValueSet> {
        self.sets.get(key)
    }

    /// Whether there is no requirement.
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// The first key whose set accepts nothing.
    pub fn contradiction(&self) -> Option<&str> {
        self.sets.iter().find(|(_, set)| set.is_empty()).map(|(key, _)| key.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(operator: &str, values: &[&str]) -> ValueSet {
        let values: Vec<String> = values.iter().map(|v| (*v).to_owned()).collect();
        ValueSet::parse("k", operator, &values).unwrap()
    }

    #[test]
    fn each_operator_accepts_the_same_values_as_in_kubernetes() {
        for (operator, values, label, want) in [
            ("In", &["a", "b"][..], Some("a"), true),
            ("In", &["a"], Some("b"), false),
            ("In", &["a"], None, false),
            ("In", &[], Some("a"), false),
            ("NotIn", &["a"], Some("a"), false),
            ("NotIn", &["a"], Some("b"), true),
            ("NotIn", &["a"], None, true),
            ("Exists", &[], Some(""), true),
            ("Exists", &[], None, false),
            ("DoesNotExist", &[], None, true),
            ("DoesNotExist", &[], Some("a"), false),
            ("Gt", &["4"], Some("5"), true),
            ("Gt", &["4"], Some("4"), false),
            ("Gt", &["4"], Some("five"), false),
            ("Gt", &["4"], None, false),
            ("Lt", &["4"], Some("3"), true),
            ("Lt", &["4"], Some("4"), false),
            ("Gte", &["4"], Some("4"), true),
            ("Lte", &["4"], Some("5"), false),
            ("Gt", &["9223372036854775807"], Some("1"), false),
        ] {
            assert_eq!(set(operator, values).accepts(label), want, "{operator} {values:?} on {label:?}");
        }
    }

    #[test]
    fn intersections_are_exact() {
        for (a, b, empty) in [
            (set("In", &["a"]), set("NotIn", &["a"]), true),
            (set("In", &["a", "b"]), set("NotIn", &["a"]), false),
            (set("In", &["a"]), set("In", &["b"]), true),
            (set("Exists", &[]), set("DoesNotExist", &[]), true),
            (set("NotIn", &["a"]), set("DoesNotExist", &[]), false),
            (set("Gt", &["4"]), set("Lt", &["5"]), true),
            (set("Gt", &["4"]), set("Lt", &["6"]), false),
            (set("Gt", &["4"]), set("In", &["4", "3"]), true),
            (set("Gt", &["9223372036854775807"]), set("Exists", &[]), true),
            (set("Lt", &["0"]), set("NotIn", &["-1"]), false),
        ] {
            assert_eq!(a.intersect(&b).is_empty(), empty, "{a} with {b}");
            assert_eq!(b.intersect(&a).is_empty(), empty, "{b} with {a}");
        }
    }

    #[test]
    fn a_range_whose_every_member_is_excluded_is_empty() {
        let range = ValueSet::between(Some(5), Some(6)).intersect(&set("NotIn", &["5", "6"]));
        assert!(range.is_empty());
        let one_left = ValueSet::between(Some(5), Some(7)).intersect(&set("NotIn", &["5", "6"]));
        assert_eq!(one_left.some_value().as_deref(), Some("7"));
        let below = ValueSet::between(None, Some(7)).intersect(&set("NotIn", &["7"]));
        assert_eq!(below.some_value().as_deref(), Some("6"));
    }

    #[test]
    fn b08_a_legacy_key_is_normalized() {
        let mut r = Requirements::default();
        r.require("failure-domain.beta.kubernetes.io/zone", &ValueSet::one("a"));
        r.require("topology.kubernetes.io/zone", &ValueSet::one("b"));
        assert_eq!(r.contradiction(), Some("topology.kubernetes.io/zone"));
    }

    #[test]
    fn b01_a_contradiction_names_its_key() {
        let mut r = Requirements::default();
        r.require("kubernetes.io/arch", &set("In", &["arm64"]));
        r.require("kubernetes.io/arch", &set("NotIn", &["arm64"]));
        assert_eq!(r.contradiction(), Some("kubernetes.io/arch"));
    }

    #[test]
    fn an_invalid_requirement_is_an_error_that_names_it() {
        assert!(matches!(ValueSet::parse("k", "Near", &[]), Err(RequirementError::Operator { .. })));
        assert!(matches!(ValueSet::parse("k", "Gt", &["x".into()]), Err(RequirementError::Number { .. })));
        assert!(matches!(ValueSet::parse("k", "Gt", &[]), Err(RequirementError::Number { .. })));
    }
}
