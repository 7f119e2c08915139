//! Validation of single requirements, and of requirements that contradict each other.

use std::collections::{BTreeMap, BTreeSet};

use stowage_model::labels;

use crate::Requirement;
use crate::validation::{Invalid, is_label_value, is_qualified_name, not_a_label_value};

const OPERATORS: [&str; 8] = ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Gte", "Lte"];

/// Keys with a closed set of values.
const KNOWN_VALUES: [(&str, &[&str]); 2] = [
    (labels::CAPACITY_TYPE, &["on-demand", "reserved", "spot"]),
    (labels::INSTANCE_TENANCY, &["dedicated", "default"]),
];

/// The validation errors of each requirement of the list at `field`.
pub fn requirements(field: &str, list: &[Requirement]) -> Vec<Invalid> {
    let mut invalid = Vec::new();
    for (index, requirement) in list.iter().enumerate() {
        check(&format!("{field}[{index}]"), requirement, &mut invalid);
    }
    invalid
}

fn check(field: &str, requirement: &Requirement, invalid: &mut Vec<Invalid>) {
    let Requirement { key, operator, values, min_values } = requirement;
    let normal = labels::normalize_key(key);
    if !is_qualified_name(key) {
        invalid.push(Invalid::new(format_args!("{field}.key"), format_args!("'{key}' is not a label key")));
    } else if normal == labels::NODE_POOL {
        invalid.push(Invalid::new(
            format_args!("{field}.key"),
            format_args!("'{key}' is restricted: it is set to the name of the NodePool"),
        ));
    } else if labels::is_restricted(normal) {
        invalid.push(Invalid::new(
            format_args!("{field}.key"),
            format_args!("'{key}' is restricted: no requirement may name it"),
        ));
    }
    match operator.as_str() {
        "In" => {
            if values.is_empty() {
                invalid.push(Invalid::new(
                    format_args!("{field}.values"),
                    format_args!("operator 'In' on '{key}' needs at least one value"),
                ));
            }
            check_known_values(field, requirement, invalid);
        }
        "Gt" | "Lt" | "Gte" | "Lte" => {
            if values.len() != 1 || integer(&values[0]).is_none() {
                invalid.push(Invalid::new(
                    format_args!("{field}.values"),
                    format_args!(
                        "operator '{operator}' on '{key}' needs exactly one value, an integer of zero or more"
                    ),
                ));
            }
            // A value that isn't a number is reported above, so it is not reported as an invalid label value too.
            return;
        }
        other if !OPERATORS.contains(&other) => {
            invalid.push(Invalid::new(
                format_args!("{field}.operator"),
                format_args!("'{other}' is none of {}", OPERATORS.join(", ")),
            ));
        }
        _ => {}
    }
    for (index, value) in values.iter().enumerate().filter(|(_, value)| !is_label_value(value)) {
        invalid.push(Invalid::new(format_args!("{field}.values[{index}]"), not_a_label_value(value)));
    }
    if min_values.is_some_and(|min| !(1..=50).contains(&min)) {
        invalid.push(Invalid::new(format_args!("{field}.minValues"), "must be 1 to 50"));
    }
}

/// Impossible values are an error only when too few possible values remain, as in Karpenter.
fn check_known_values(field: &str, requirement: &Requirement, invalid: &mut Vec<Invalid>) {
    let Requirement { key, values, min_values, .. } = requirement;
    let key = labels::normalize_key(key);
    let distinct: BTreeSet<&str> = values.iter().map(String::as_str).collect();
    let mut possible = distinct.len();
    if let Some((_, known)) = KNOWN_VALUES.iter().find(|(known, _)| *known == key) {
        possible = distinct.iter().filter(|value| known.contains(value)).count();
        if possible == 0 && !values.is_empty() {
            invalid.push(Invalid::new(
                format_args!("{field}.values"),
                format_args!("none of '{}' is a value of '{key}': it has {}", values.join("', '"), known.join(", ")),
            ));
            return;
        }
    }
    if let Some(min) =
        min_values.filter(|min| !values.is_empty() && usize::try_from(*min).is_ok_and(|min| min > possible))
    {
        invalid.push(Invalid::new(
            format_args!("{field}.minValues"),
            format_args!("requires {min} values of '{key}', and only {possible} are possible"),
        ));
    }
}

/// Keys on which the requirements of the list at `field` and the template's labels contradict each other, each reported once.
/// Invalid entries are reported by [`requirements`]; `minValues` is left to the planner, which may lower it.
pub fn contradictions(field: &str, list: &[Requirement], template_labels: &BTreeMap<String, String>) -> Vec<Invalid> {
    let mut by_key: BTreeMap<&str, (Allowed, Vec<String>)> = BTreeMap::new();
    for requirement in list {
        let (allowed, said) = by_key.entry(labels::normalize_key(&requirement.key)).or_default();
        if allowed.narrow(requirement) {
            said.push(describe(requirement));
        }
    }
    for (key, value) in template_labels {
        if let Some((allowed, said)) = by_key.get_mut(labels::normalize_key(key)) {
            allowed.only([value.clone()].into());
            said.push(format!("label {key}={value}"));
        }
    }
    by_key
        .into_iter()
        .filter_map(|(key, (allowed, said))| {
            let why = allowed.contradiction()?;
            let subject = if said.len() > 1 { "contradict each other" } else { "can't be met" };
            Some(Invalid::new(field, format_args!("{subject} on '{key}': {why} ({})", said.join("; "))))
        })
        .collect()
}

fn describe(requirement: &Requirement) -> String {
    let Requirement { key, operator, values, .. } = requirement;
    let values = match operator.as_str() {
        "Exists" | "DoesNotExist" => String::new(),
        _ => format!(" [{}]", values.join(", ")),
    };
    format!("{key} {operator}{values}")
}

fn integer(text: &str) -> Option<i64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// The intersection of the requirements on one key.
#[derive(Clone, Debug, Default)]
struct Allowed {
    /// Values of In; `None` without such a requirement.
    only: Option<BTreeSet<String>>,
    /// Values of NotIn.
    not: BTreeSet<String>,
    /// Lower bound of Gt and Gte, inclusive; may exceed `i64::MAX`, which no value does.
    at_least: Option<i128>,
    /// Upper bound of Lt and Lte, inclusive.
    at_most: Option<i128>,
    /// A requirement demands that the label exists.
    present: bool,
    /// DoesNotExist: the label must be absent.
    absent: bool,
}

impl Allowed {
    /// Intersects with a requirement; false when the requirement is invalid and ignored.
    fn narrow(&mut self, requirement: &Requirement) -> bool {
        let Requirement { operator, values, .. } = requirement;
        let bound = || values.first().filter(|_| values.len() == 1).and_then(|value| integer(value)).map(i128::from);
        match operator.as_str() {
            "In" if !values.is_empty() => self.only(values.iter().cloned().collect()),
            "NotIn" => self.not.extend(values.iter().cloned()),
            "Exists" => self.present = true,
            "DoesNotExist" => self.absent = true,
            "Gt" | "Gte" => {
                let Some(bound) = bound() else { return false };
                let bound = bound + i128::from(operator == "Gt");
                self.at_least = Some(self.at_least.map_or(bound, |other| other.max(bound)));
                self.present = true;
            }
            "Lt" | "Lte" => {
                let Some(bound) = bound() else { return false };
                let bound = bound - i128::from(operator == "Lt");
                self.at_most = Some(self.at_most.map_or(bound, |other| other.min(bound)));
                self.present = true;
            }
            _ => return false,
        }
        true
    }

    fn only(&mut self, values: BTreeSet<String>) {
        self.present = true;
        self.only = Some(match self.only.take() {
            Some(only) => only.intersection(&values).cloned().collect(),
            None => values,
        });
    }

    /// The reason why no value is possible, or `None`.
    fn contradiction(&self) -> Option<&'static str> {
        if self.absent && self.present {
            return Some("it can't both be absent and have a value");
        }
        let least = self.at_least.unwrap_or(0).max(0);
        let most = self.at_most.unwrap_or(i128::from(i64::MAX)).min(i128::from(i64::MAX));
        let bounded = self.at_least.is_some() || self.at_most.is_some();
        let in_range =
            |value: &str| !bounded || integer(value).is_some_and(|value| (least..=most).contains(&i128::from(value)));
        let left = match &self.only {
            Some(only) => {
                Some(only.iter().filter(|value| !self.not.contains(*value) && in_range(value)).count() as i128)
            }
            // 4 and 04 are different label values; only the canonical spelling counts.
            None if bounded => {
                let excluded: BTreeSet<i64> =
                    self.not.iter().filter(|value| in_range(value)).filter_map(|value| integer(value)).collect();
                Some((most - least + 1).max(0) - excluded.len() as i128)
            }
            None => None,
        };
        match left {
            Some(left) if left <= 0 => Some("no value is left"),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requirement(text: &str) -> Requirement {
        let mut words = text.split(' ');
        let (key, operator) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
        let mut requirement = Requirement { key, operator, ..Requirement::default() };
        for word in words {
            match word.strip_prefix("min=") {
                Some(min) => requirement.min_values = min.parse().ok(),
                None => requirement.values.push(word.to_owned()),
            }
        }
        requirement
    }

    fn list(texts: &[&str]) -> Vec<Requirement> {
        texts.iter().map(|text| requirement(text)).collect()
    }

    #[test]
    fn each_invalid_requirement_names_its_member() {
        for (text, expected) in [
            ("a In", "r[0].values: operator 'In' on 'a' needs at least one value"),
            ("a Within b", "r[0].operator: 'Within' is none of In, NotIn, Exists, DoesNotExist, Gt, Lt, Gte, Lte"),
            ("a Gt b", "r[0].values: operator 'Gt' on 'a' needs exactly one value, an integer of zero or more"),
            ("a Lte", "r[0].values: operator 'Lte' on 'a' needs exactly one value, an integer of zero or more"),
            ("a Gte 1 2", "r[0].values: operator 'Gte' on 'a' needs exactly one value, an integer of zero or more"),
            ("a Lt -1", "r[0].values: operator 'Lt' on 'a' needs exactly one value, an integer of zero or more"),
            ("a/ Exists", "r[0].key: 'a/' is not a label key"),
            ("karpenter.sh/x Exists", "r[0].key: 'karpenter.sh/x' is restricted: no requirement may name it"),
            (
                "karpenter.sh/nodepool In a",
                "r[0].key: 'karpenter.sh/nodepool' is restricted: it is set to the name of the NodePool",
            ),
            (
                "kubernetes.io/hostname In a",
                "r[0].key: 'kubernetes.io/hostname' is restricted: no requirement may name it",
            ),
            ("a In b min=2", "r[0].minValues: requires 2 values of 'a', and only 1 are possible"),
            ("a Exists min=51", "r[0].minValues: must be 1 to 50"),
            (
                "karpenter.sh/capacity-type In cheap",
                "r[0].values: none of 'cheap' is a value of 'karpenter.sh/capacity-type': it has on-demand, reserved, spot",
            ),
            (
                "karpenter.sh/capacity-type In spot cheap min=2",
                "r[0].minValues: requires 2 values of 'karpenter.sh/capacity-type', and only 1 are possible",
            ),
        ] {
            let found: Vec<String> = requirements("r", &list(&[text])).iter().map(ToString::to_string).collect();
            assert_eq!(found, [expected], "{text}");
        }
        for text in [
            "karpenter.sh/capacity-type In spot cheap",
            "beta.kubernetes.io/arch In amd64",
            "karpenter.k8s.aws/instance-hypervisor NotIn",
            "example.com/a Exists min=5",
            "topology.k8s.aws/zone-id DoesNotExist",
        ] {
            assert_eq!(requirements("r", &list(&[text])), [], "{text}");
        }
    }

    #[test]
    fn requirements_without_a_common_value_contradict_each_other() {
        for texts in [
            &["a In x", "a In y"][..],
            &["a In x y", "a NotIn x y"],
            &["a In x", "a DoesNotExist"],
            &["a Exists", "a DoesNotExist"],
            &["a Gt 4", "a Lt 5"],
            &["a Gte 5", "a Lte 4"],
            &["a Gt 9223372036854775807", "a Exists"],
            &["a Lt 0"],
            &["a In 1 2", "a Gt 2"],
            &["a In x", "a Gt 2"],
            &["a Gte 4", "a Lte 5", "a NotIn 4 5"],
            &["kubernetes.io/arch In amd64", "beta.kubernetes.io/arch In arm64"],
        ] {
            let found = contradictions("r", &list(texts), &BTreeMap::new());
            assert_eq!(found.len(), 1, "{texts:?}: {found:?}");
            assert_eq!(found[0].field, "r");
        }
    }

    #[test]
    fn requirements_with_a_common_value_do_not_contradict_each_other() {
        for texts in [
            &["a In x y", "a In y z"][..],
            &["a In x y", "a NotIn x"],
            &["a NotIn x", "a DoesNotExist"],
            &["a NotIn x", "a NotIn y"],
            &["a Gt 4", "a Lt 6"],
            &["a Gte 4", "a Lte 6", "a NotIn 4 5"],
            &["a In 1 2 3", "a Gt 2"],
            &["a In x", "b In y"],
            &["a In", "a In x"],
            &["a In x y z", "a NotIn x", "a Exists min=3"],
            &["a Within x", "a In x"],
        ] {
            assert_eq!(contradictions("r", &list(texts), &BTreeMap::new()), [], "{texts:?}");
        }
    }

    #[test]
    fn a_contradiction_names_the_key_and_its_requirements() {
        let texts = ["topology.kubernetes.io/zone In a b", "failure-domain.beta.kubernetes.io/zone NotIn a b"];
        insta::assert_snapshot!(
            contradictions("spec.requirements", &list(&texts), &BTreeMap::new())[0],
            @"spec.requirements: contradict each other on 'topology.kubernetes.io/zone': no value is left (topology.kubernetes.io/zone In [a, b]; failure-domain.beta.kubernetes.io/zone NotIn [a, b])"
        );
    }

    #[test]
    fn a_label_of_the_template_counts_as_a_requirement() {
        let labels = BTreeMap::from([("team".to_owned(), "a".to_owned())]);
        assert_eq!(contradictions("r", &list(&["team In a b"]), &labels), []);
        insta::assert_snapshot!(
            contradictions("r", &list(&["team In b c"]), &labels)[0],
            @"r: contradict each other on 'team': no value is left (team In [b, c]; label team=a)"
        );
    }
}
