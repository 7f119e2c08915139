//! The CEL expressions of a kubelet configuration, and their values on an instance type (Karpenter's feature gate NodeClassCEL).

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use stowage_api::validation::is_quantity;

use crate::kubelet_config::expression::{Expression, ExpressionError, Variables};
use crate::kubelet_config::programs::program;
use crate::kubelet_config::{Kubelet, KubeletMap, MaxPods};

/// Members of the configuration that may contain expressions by resource.
const RESERVED: [&str; 2] = ["kubeReserved", "systemReserved"];

/// The expressions of a configuration by member.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Expressions {
    max_pods: Option<String>,
    /// Of [`RESERVED`], in its order.
    reserved: [BTreeMap<String, String>; 2],
}

/// The properties of an instance type that expressions can use.
#[derive(Clone, Copy, Debug)]
pub struct InstanceTypeFacts<'a> {
    /// Such as `m7g.large`.
    pub instance_type: &'a str,
    /// Default vCPUs.
    pub vcpus: i64,
    /// Memory before any overhead.
    pub memory_mib: i64,
    /// Network interfaces of the default network card.
    pub default_enis: i64,
    /// IPv4 addresses of an interface.
    pub ips_per_eni: i64,
    /// Maximum number of pods where the class does not set it.
    pub default_pods: i64,
    /// `maxPods` of the class, where it is a number.
    pub class_pods: Option<i64>,
}

/// The values of the expressions on an instance type, in the kubelet's notation.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Evaluated {
    /// `maxPods`, where it is an expression.
    pub max_pods: Option<i32>,
    /// Values of `kubeReserved` by resource, without failed ones.
    pub kube_reserved: BTreeMap<String, String>,
    /// Values of `systemReserved` by resource, without failed ones.
    pub system_reserved: BTreeMap<String, String>,
}

/// An expression without a usable value on an instance type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("spec.kubelet.{place}: the expression {text:?} can't be used on {instance_type}: {source}")]
pub struct Unusable {
    /// The member, such as `maxPods` or `kubeReserved[cpu]`.
    pub place: String,
    pub text: String,
    pub instance_type: String,
    pub source: ExpressionError,
}

/// Parsed expressions, for evaluation on many instance types.
#[derive(Debug)]
pub struct Compiled<'a> {
    max_pods: Option<Entry<'a>>,
    reserved: [Vec<(&'a str, Entry<'a>)>; 2],
}

#[derive(Debug)]
struct Entry<'a> {
    text: &'a str,
    read: Result<Arc<Expression>, ExpressionError>,
}

impl<'a> Entry<'a> {
    fn of(text: &'a String) -> Self {
        Self { text, read: program(text) }
    }

    fn number(&self, variables: &Variables<'_>) -> Result<i64, ExpressionError> {
        self.read.as_ref().map_err(Clone::clone)?.number(variables)
    }

    fn unusable(&self, place: String, machine: &InstanceTypeFacts<'_>, source: ExpressionError) -> Unusable {
        Unusable { place, text: self.text.to_owned(), instance_type: machine.instance_type.to_owned(), source }
    }
}

impl Expressions {
    /// The expressions of a configuration; `None` where there are none.
    pub fn of(kubelet: &Kubelet) -> Option<Self> {
        let expressions = |amounts: Option<&BTreeMap<String, String>>| -> BTreeMap<String, String> {
            let found = amounts.into_iter().flatten().filter(|(_, amount)| !is_quantity(amount));
            found.map(|(resource, text)| (resource.clone(), text.clone())).collect()
        };
        let max_pods = match &kubelet.max_pods {
            Some(MaxPods::Expression(text)) => Some(text.clone()),
            _ => None,
        };
        let reserved = [expressions(kubelet.kube_reserved.as_ref()), expressions(kubelet.system_reserved.as_ref())];
        (max_pods.is_some() || reserved.iter().any(|amounts| !amounts.is_empty()))
            .then_some(Self { max_pods, reserved })
    }

    /// Parses the expressions. A parse error is returned by the evaluation.
    pub fn compile(&self) -> Compiled<'_> {
        let reserved = self
            .reserved
            .each_ref()
            .map(|amounts| amounts.iter().map(|(resource, text)| (resource.as_str(), Entry::of(text))).collect());
        Compiled { max_pods: self.max_pods.as_ref().map(Entry::of), reserved }
    }
}

impl Compiled<'_> {
    /// Evaluates the expressions on an instance type. A reserved amount that fails counts as not set and is returned.
    ///
    /// # Errors
    /// `maxPods` fails: the capacity of such a node is unknown.
    pub fn on(&self, machine: &InstanceTypeFacts<'_>) -> Result<(Evaluated, Vec<Unusable>), Unusable> {
        let mut variables = Variables {
            vcpus: machine.vcpus,
            memory_mib: machine.memory_mib,
            default_enis: machine.default_enis,
            ips_per_eni: machine.ips_per_eni,
            max_pods: machine.default_pods,
            instance_type: machine.instance_type,
        };
        let max_pods = match &self.max_pods {
            None => None,
            Some(entry) => {
                let pods = entry.number(&variables).and_then(pods);
                Some(pods.map_err(|error| entry.unusable("maxPods".to_owned(), machine, error))?)
            }
        };
        variables.max_pods = max_pods.map(i64::from).or(machine.class_pods).unwrap_or(machine.default_pods);
        let mut dropped = Vec::new();
        let mut amounts = |at: usize| {
            let mut out = BTreeMap::new();
            for (resource, entry) in &self.reserved[at] {
                match entry.number(&variables).and_then(|number| quantity(resource, number)) {
                    Ok(amount) => {
                        out.insert((*resource).to_owned(), amount);
                    }
                    Err(error) => {
                        dropped.push(entry.unusable(format!("{}[{resource}]", RESERVED[at]), machine, error));
                    }
                }
            }
            out
        };
        let (kube_reserved, system_reserved) = (amounts(0), amounts(1));
        Ok((Evaluated { max_pods, kube_reserved, system_reserved }, dropped))
    }
}

impl Evaluated {
    /// A configuration with its expressions replaced by these values.
    pub fn apply_to(&self, map: &KubeletMap) -> KubeletMap {
        let mut out = map.clone();
        if let Some(pods) = self.max_pods {
            out.insert("maxPods".to_owned(), pods.into());
        }
        for (name, amounts) in RESERVED.into_iter().zip([&self.kube_reserved, &self.system_reserved]) {
            if let Some(Value::Object(entries)) = out.get_mut(name) {
                entries.retain(|_, amount| amount.as_str().is_none_or(is_quantity));
                entries.extend(amounts.iter().map(|(resource, amount)| (resource.clone(), amount.as_str().into())));
            }
        }
        out
    }
}

/// A number of pods.
fn pods(number: i64) -> Result<i32, ExpressionError> {
    match i32::try_from(number) {
        Ok(pods) if pods >= 0 => Ok(pods),
        _ if number < 0 => Err(ExpressionError::Negative(number)),
        _ => Err(ExpressionError::TooLarge(number)),
    }
}

/// An amount of a resource in the unit of its expressions, rounded up to the resource's step.
fn quantity(resource: &str, number: i64) -> Result<String, ExpressionError> {
    let (unit, step) = match resource {
        "cpu" => ("m", 10),
        "memory" => ("Mi", 16),
        "ephemeral-storage" => ("Gi", 1),
        _ => ("", 1),
    };
    let number = u64::try_from(number).map_err(|_| ExpressionError::Negative(number))?;
    let rounded = number.checked_next_multiple_of(step).filter(|rounded| i64::try_from(*rounded).is_ok());
    rounded.map(|amount| format!("{amount}{unit}")).ok_or_else(|| ExpressionError::Unbounded(number.to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const M5_LARGE: InstanceTypeFacts<'_> = InstanceTypeFacts {
        instance_type: "m5.large",
        vcpus: 2,
        memory_mib: 8192,
        default_enis: 3,
        ips_per_eni: 10,
        default_pods: 29,
        class_pods: None,
    };

    fn map(value: Value) -> KubeletMap {
        serde_json::from_value(value).unwrap()
    }

    fn on(kubelet: Value, machine: &InstanceTypeFacts<'_>) -> Result<(Evaluated, Vec<Unusable>), Unusable> {
        let kubelet = Kubelet::parse(Some(&map(kubelet))).unwrap();
        Expressions::of(&kubelet).unwrap().compile().on(machine)
    }

    #[test]
    fn c34_reserved_amounts_are_rounded_up_in_their_resources_unit() {
        for (resource, text, expected) in [
            ("cpu", "max_pods * 0 + 1", "10m"),
            ("cpu", "60 + vcpus * 5", "70m"),
            ("cpu", "vcpus + 69", "80m"),
            ("cpu", "70.9 + 0.05", "70m"),
            ("memory", "11 * max_pods + 255", "576Mi"),
            ("memory", "max_pods * 0", "0Mi"),
            ("memory", "memory_mib / 512", "16Mi"),
            ("memory", "memory_mib / 512 + 1", "32Mi"),
            ("ephemeral-storage", "vcpus * 1", "2Gi"),
            ("ephemeral-storage", "2.9 + 0.0", "2Gi"),
            ("pid", "max_pods * 100", "2900"),
        ] {
            for field in RESERVED {
                let read = Kubelet::parse(Some(&map(json!({field: {resource: text}})))).unwrap();
                let (evaluated, dropped) = Expressions::of(&read).unwrap().compile().on(&M5_LARGE).unwrap();
                let mut both = [evaluated.kube_reserved, evaluated.system_reserved];
                both.sort_by_key(BTreeMap::len);
                assert_eq!(both[1].get(resource).map(String::as_str), Some(expected), "{field} {resource} {text}");
                assert!(both[0].is_empty() && dropped.is_empty(), "{text}");
            }
        }
    }

    #[test]
    fn c34_max_pods_is_the_default_in_its_own_expression_only() {
        let pods = |kubelet: Value, class_pods: Option<i64>| {
            let (evaluated, _) = on(kubelet, &InstanceTypeFacts { class_pods, ..M5_LARGE }).unwrap();
            (evaluated.max_pods, evaluated.kube_reserved.get("pid").cloned())
        };
        let reserved = json!({"pid": "max_pods * 1"});
        assert_eq!(pods(json!({"maxPods": "max_pods + 1"}), None), (Some(30), None));
        assert_eq!(
            pods(json!({"maxPods": "max_pods + 1", "kubeReserved": reserved}), None),
            (Some(30), Some("30".into()))
        );
        assert_eq!(pods(json!({"maxPods": 7, "kubeReserved": reserved}), Some(7)), (None, Some("7".into())));
        assert_eq!(pods(json!({"kubeReserved": reserved}), None), (None, Some("29".into())));
    }

    #[test]
    fn c34_an_invalid_max_pods_fails_the_evaluation() {
        for (text, expected) in [
            ("0", Ok(0)),
            ("2147483647", Ok(i32::MAX)),
            ("2147483648", Err("above the maximum of 2147483647")),
            ("0 - vcpus", Err("the result -2 is negative")),
            ("-0.9", Ok(0)),
            ("0.0 / 0.0", Err("NaN")),
            ("vcpus / 0", Err("Division by zero")),
            ("'many'", Err("a string")),
            ("nonsense", Err("Undeclared reference to 'nonsense'")),
            ("1 +", Err("no CEL expression")),
        ] {
            let result = on(json!({"maxPods": text, "kubeReserved": {"cpu": "vcpus * 1"}}), &M5_LARGE);
            match (result, expected) {
                (Ok((evaluated, _)), Ok(pods)) => assert_eq!(evaluated.max_pods, Some(pods), "{text}"),
                (Err(error), Err(part)) => {
                    let message = error.to_string();
                    assert!(message.starts_with("spec.kubelet.maxPods: the expression "), "{message}");
                    assert!(message.contains(part) && message.contains("on m5.large"), "{message}");
                }
                (result, _) => panic!("{text}: {result:?}"),
            }
        }
    }

    #[test]
    fn c34_a_failed_or_negative_reserved_amount_is_dropped_and_reported() {
        let (evaluated, dropped) = on(
            json!({
                "kubeReserved": {"cpu": "vcpus / 0", "memory": "0 - vcpus", "pid": "vcpus * 1", "ephemeral-storage": "1Gi"},
                "systemReserved": {"cpu": "nonsense", "memory": "1.0 / 0.0", "pid": "9223372036854775807 - 1",
                    "ephemeral-storage": "true"},
            }),
            &M5_LARGE,
        )
        .unwrap();
        assert_eq!(evaluated.kube_reserved, [("pid".to_owned(), "2".to_owned())].into());
        assert_eq!(evaluated.system_reserved, [("pid".to_owned(), "9223372036854775806".to_owned())].into());
        let places: Vec<&str> = dropped.iter().map(|dropped| dropped.place.as_str()).collect();
        assert_eq!(
            places,
            [
                "kubeReserved[cpu]",
                "kubeReserved[memory]",
                "systemReserved[cpu]",
                "systemReserved[ephemeral-storage]",
                "systemReserved[memory]"
            ]
        );
        let (_, dropped) = on(json!({"kubeReserved": {"cpu": "9223372036854775806 + 1"}}), &M5_LARGE).unwrap();
        assert_eq!(dropped[0].source, ExpressionError::Unbounded(i64::MAX.to_string()), "nothing above it to round to");
    }

    #[test]
    fn c34_values_replace_expressions_in_the_configuration() {
        let kubelet = map(json!({
            "maxPods": "vcpus * 10", "kubeReserved": {"cpu": "vcpus * 35", "memory": "1Gi", "pid": "nonsense"},
            "systemReserved": {"memory": "memory_mib / 10"}, "serializeImagePulls": false,
        }));
        let read = Kubelet::parse(Some(&kubelet)).unwrap();
        let (evaluated, _) = Expressions::of(&read).unwrap().compile().on(&M5_LARGE).unwrap();
        let put = evaluated.apply_to(&kubelet);
        assert_eq!(
            json!(put),
            json!({
                "maxPods": 20, "kubeReserved": {"cpu": "70m", "memory": "1Gi"}, "systemReserved": {"memory": "832Mi"},
                "serializeImagePulls": false,
            })
        );
        assert!(!Kubelet::parse(Some(&put)).unwrap().has_expressions());
    }

    #[test]
    fn a_configuration_of_numbers_has_no_expressions() {
        for kubelet in [json!({}), json!({"maxPods": 10, "kubeReserved": {"cpu": "100m"}, "systemReserved": null})] {
            assert_eq!(Expressions::of(&Kubelet::parse(Some(&map(kubelet))).unwrap()), None);
        }
    }
}
