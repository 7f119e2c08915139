//! The settings of a class on each instance type, where its kubelet configuration contains CEL expressions.

use std::borrow::Cow;

use crate::catalog::node_settings::{NodeSettings, Reserved, reserved};
use crate::catalog::overhead::default_pods;
use crate::catalog::raw::RawInstanceType;
use crate::kubelet_config::expressions::{Compiled, Evaluated, Expressions, InstanceTypeFacts, Unusable};

/// The result of evaluating the expressions on many instance types.
#[derive(Debug, Default)]
pub struct Trial {
    /// Why `maxPods` fails on an instance type: the class cannot launch nodes.
    pub failed: Option<Unusable>,
    /// The first reserved amount that fails and counts as not set.
    pub dropped: Option<Unusable>,
    /// Number of failed reserved amounts over all instance types.
    pub drops: usize,
}

impl NodeSettings {
    /// Evaluates the expressions on an instance type; `None` where there are none.
    ///
    /// # Errors
    /// The expression for `maxPods` fails.
    pub fn evaluated_on(&self, entry: &RawInstanceType) -> Result<Option<Evaluated>, Unusable> {
        let compiled = self.expressions.as_ref().map(Expressions::compile);
        compiled.map(|compiled| Ok(compiled.on(&self.machine(entry))?.0)).transpose()
    }

    /// These settings for one instance type: expressions are replaced by numbers.
    ///
    /// # Errors
    /// The expression for `maxPods` fails.
    pub fn on(&self, entry: &RawInstanceType) -> Result<Cow<'_, Self>, Unusable> {
        Ok(match self.evaluated_on(entry)? {
            None => Cow::Borrowed(self),
            Some(evaluated) => Cow::Owned(self.with(&evaluated)),
        })
    }

    /// These settings for each of some instance types, in their order; empty where the expression for `maxPods` fails on any of them,
    /// as in Karpenter. Failures are logged.
    pub fn on_each<'a>(&self, entries: impl IntoIterator<Item = &'a RawInstanceType>) -> Vec<Cow<'_, Self>> {
        let Some(compiled) = self.expressions.as_ref().map(Expressions::compile) else {
            return entries.into_iter().map(|_| Cow::Borrowed(self)).collect();
        };
        let mut each = Vec::new();
        let trial = self.walk(&compiled, entries, |evaluated| each.push(Cow::Owned(self.with(&evaluated))));
        if let Some(unusable) = &trial.dropped {
            tracing::warn!(failures = trial.drops, expression = %unusable, "ignored unusable reserved amount");
        }
        if let Some(unusable) = &trial.failed {
            tracing::error!(expression = %unusable, "class has no offerings, maxPods cannot be evaluated");
            each.clear();
        }
        each
    }

    /// Evaluates the expressions on instance types; the result is empty where there are no expressions.
    pub fn try_on<'a>(&self, entries: impl IntoIterator<Item = &'a RawInstanceType>) -> Trial {
        let compiled = self.expressions.as_ref().map(Expressions::compile);
        compiled.map(|compiled| self.walk(&compiled, entries, |_| {})).unwrap_or_default()
    }

    fn walk<'a>(
        &self,
        compiled: &Compiled<'_>,
        entries: impl IntoIterator<Item = &'a RawInstanceType>,
        mut each: impl FnMut(Evaluated),
    ) -> Trial {
        let mut trial = Trial::default();
        for entry in entries {
            match compiled.on(&self.machine(entry)) {
                Ok((evaluated, dropped)) => {
                    trial.drops += dropped.len();
                    trial.dropped = trial.dropped.or_else(|| dropped.into_iter().next());
                    each(evaluated);
                }
                Err(unusable) => {
                    trial.failed = Some(unusable);
                    break;
                }
            }
        }
        trial
    }

    fn machine<'a>(&self, entry: &'a RawInstanceType) -> InstanceTypeFacts<'a> {
        InstanceTypeFacts {
            instance_type: &entry.name,
            vcpus: entry.vcpu,
            memory_mib: entry.memory_mib,
            default_enis: entry.default_card_enis.unwrap_or(entry.enis),
            ips_per_eni: entry.ipv4_per_eni,
            default_pods: default_pods(entry, self),
            class_pods: self.max_pods,
        }
    }

    fn with(&self, evaluated: &Evaluated) -> Self {
        let kube = reserved(Some(evaluated.kube_reserved.clone()));
        let system = reserved(Some(evaluated.system_reserved.clone()));
        Self {
            expressions: None,
            max_pods: evaluated.max_pods.map(i64::from).or(self.max_pods),
            kube_reserved: kube.over(&self.kube_reserved),
            system_reserved: system.over(&self.system_reserved),
            ..self.clone()
        }
    }
}

impl Reserved {
    /// These amounts, with defaults from `below`.
    fn over(self, below: &Self) -> Self {
        Self {
            cpu: self.cpu.or(below.cpu),
            memory: self.memory.or(below.memory),
            ephemeral_storage: self.ephemeral_storage.or(below.ephemeral_storage),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_api::Ec2NodeClass;

    use super::*;
    use crate::catalog::overhead::MIB;
    use crate::catalog::{SpotPricing, embedded};

    fn class(family: &str, kubelet: Value) -> Ec2NodeClass {
        Ec2NodeClass::new("default", serde_json::from_value(json!({"amiFamily": family, "kubelet": kubelet})).unwrap())
    }

    /// Pods, allocatable millicores and kube-reserved MiB of an instance type, with the gate on.
    fn sizes(name: &str, class: &Ec2NodeClass) -> (i64, i64, i64) {
        let settings = NodeSettings::of(Some(class)).with_expressions(class);
        let entry = embedded().instance_type(name).unwrap();
        let node = entry.as_node("us-east-1", &settings.on(entry).unwrap(), SpotPricing::Off);
        let kept = (node.capacity.memory.0 - node.allocatable.memory.0) / MIB - 100;
        (node.capacity.pods, node.allocatable.cpu.0, kept)
    }

    #[test]
    fn c34_capacity_and_overhead_follow_the_expressions_on_each_type() {
        let all = json!({
            "maxPods": "min(110, vcpus * 10)",
            "kubeReserved": {"cpu": "30 * vcpus + 1", "memory": "11 * max_pods + 255"},
            "systemReserved": {"memory": "memory_mib / 64", "cpu": "100m"},
        });
        // 61 m and 475 MiB are rounded up to 70 m and 480 MiB.
        assert_eq!(sizes("m5.large", &class("AL2023", all.clone())), (20, 2000 - 70 - 100, 480 + 128));
        assert_eq!(sizes("m5.4xlarge", &class("Bottlerocket", all)), (110, 16000 - 490 - 100, 1472 + 1024));
        let pods = json!({"maxPods": "max_pods * 2", "podsPerCore": 20});
        assert_eq!(sizes("m5.large", &class("AL2023", pods.clone())).0, 40, "58 pods, 20 for each of two cores");
        assert_eq!(sizes("m5.large", &class("Windows2022", pods)).0, 40);
        let dropped = json!({"kubeReserved": {"cpu": "vcpus / 0", "memory": "-1.5"}});
        assert_eq!(
            sizes("m5.large", &class("AL2023", dropped)),
            sizes("m5.large", &class("AL2023", json!({}))),
            "as if not set"
        );
    }

    #[test]
    fn c34_expressions_count_as_unset_while_the_gate_is_off() {
        let class = class("AL2023", json!({"maxPods": "5", "kubeReserved": {"cpu": "vcpus * 500", "memory": "1Gi"}}));
        let settings = NodeSettings::of(Some(&class));
        let entry = embedded().instance_type("m5.large").unwrap();
        assert_eq!(settings.on(entry).unwrap().as_ref(), &settings);
        let node = entry.as_node("us-east-1", &settings, SpotPricing::Off);
        assert_eq!((node.capacity.pods, node.allocatable.cpu.0), (29, 1930));
        assert_eq!((node.capacity.memory.0 - node.allocatable.memory.0) / MIB, 1024 + 100, "quantities stay");
    }

    #[test]
    fn c34_a_class_has_no_offerings_where_max_pods_fails_on_any_type() {
        let of = |max_pods: &str| {
            let class = class("AL2023", json!({"maxPods": max_pods}));
            let settings = NodeSettings::of(Some(&class)).with_expressions(&class);
            let trial = settings.try_on(&embedded().instance_types);
            (embedded().with_settings(&settings, SpotPricing::Off).instance_types.len(), trial.failed)
        };
        assert_eq!(of("vcpus * 10"), (embedded().instance_types.len(), None));
        let (offered, failed) = of("instance_type == 'm5.large' ? -1 : 10");
        assert_eq!((offered, failed.unwrap().instance_type.as_str()), (0, "m5.large"));
    }

    #[test]
    fn c34_failed_amounts_are_counted_over_all_types() {
        let class = class("AL2023", json!({"kubeReserved": {"cpu": "instance_type.startsWith('m5.') ? -1 : 100"}}));
        let settings = NodeSettings::of(Some(&class)).with_expressions(&class);
        let trial = settings.try_on(&embedded().instance_types);
        let of_family = embedded().instance_types.iter().filter(|entry| entry.name.starts_with("m5.")).count();
        assert_eq!((trial.failed, trial.drops), (None, of_family));
        assert!(trial.dropped.unwrap().instance_type.starts_with("m5."));
        assert_eq!(settings.on_each(&embedded().instance_types).len(), embedded().instance_types.len());
    }
}
