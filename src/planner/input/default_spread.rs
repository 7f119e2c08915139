//! Default topology spread constraints of kube-scheduler's `PodTopologySpread` plugin, for pods that declare no constraint.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, Service};
use serde::Deserialize;
use stowage_model::labels::normalize_key;
use stowage_model::pod_class::{Selector, Spread};
use stowage_model::requirement::ValueSet;

use crate::input::pod::{Labels, PodEntry};

/// Label under which the planner keeps the UID of a pod's controller, so that a selector can match it. On no object of the cluster.
pub(crate) const CONTROLLER: &str = "stowage.dev/controller-uid";

/// Constraints for pods that declare none; empty by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DefaultSpread {
    constraints: Vec<Constraint>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Constraint {
    key: Arc<str>,
    max_skew: i64,
    min_domains: i64,
    hard: bool,
    honor_affinity: bool,
    honor_taints: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Config {
    #[serde(default)]
    pod_topology_spread: PodTopologySpread,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PodTopologySpread {
    #[serde(default)]
    default_constraints: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    max_skew: i64,
    topology_key: String,
    when_unsatisfiable: String,
    #[serde(default)]
    min_domains: Option<i64>,
    #[serde(default)]
    node_affinity_policy: Option<String>,
    #[serde(default)]
    node_taints_policy: Option<String>,
    /// Without effect, as in kube-scheduler: the selector of the pod's controller or Services replaces that of the constraint.
    #[serde(default, rename = "matchLabelKeys")]
    _match_label_keys: Option<Vec<String>>,
}

impl DefaultSpread {
    /// Parses `podTopologySpread.defaultConstraints` from YAML or JSON; empty text means no constraint.
    ///
    /// # Errors
    /// Names the invalid field and the valid values. A selector is rejected, as by kube-scheduler: the selector of the pod's controller
    /// applies.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let config: Config = serde_saphyr::from_str(text).map_err(|error| {
            format!("{error}; podTopologySpread.defaultConstraints with maxSkew, topologyKey and whenUnsatisfiable is expected")
        })?;
        let mut constraints: Vec<Constraint> = Vec::new();
        for (at, entry) in config.pod_topology_spread.default_constraints.into_iter().enumerate() {
            let field = |name: &str| format!("podTopologySpread.defaultConstraints[{at}].{name}");
            if entry.max_skew < 1 {
                return Err(format!("{}: {} is not 1 or more", field("maxSkew"), entry.max_skew));
            }
            if entry.topology_key.is_empty() || entry.topology_key.contains(char::is_whitespace) {
                return Err(format!("{}: {:?} is not a label key", field("topologyKey"), entry.topology_key));
            }
            let hard = match entry.when_unsatisfiable.as_str() {
                "DoNotSchedule" => true,
                "ScheduleAnyway" => false,
                other => {
                    let name = field("whenUnsatisfiable");
                    return Err(format!("{name}: {other:?} is neither DoNotSchedule nor ScheduleAnyway"));
                }
            };
            let key: Arc<str> = Arc::from(normalize_key(&entry.topology_key));
            if constraints.iter().any(|have| have.key == key && have.hard == hard) {
                return Err(format!("{}: {key} is there twice with the same whenUnsatisfiable", field("topologyKey")));
            }
            let min_domains = entry.min_domains.unwrap_or(1);
            if min_domains < 1 {
                return Err(format!("{}: {min_domains} is not 1 or more", field("minDomains")));
            }
            let honor = |name: &str, policy: Option<&str>, default: bool| match policy {
                None => Ok(default),
                Some("Honor") => Ok(true),
                Some("Ignore") => Ok(false),
                Some(other) => Err(format!("{}: {other:?} is neither Honor nor Ignore", field(name))),
            };
            constraints.push(Constraint {
                key,
                max_skew: entry.max_skew,
                // As in kube-scheduler, a preference has no least number of domains.
                min_domains: if hard { min_domains } else { 1 },
                hard,
                honor_affinity: honor("nodeAffinityPolicy", entry.node_affinity_policy.as_deref(), true)?,
                honor_taints: honor("nodeTaintsPolicy", entry.node_taints_policy.as_deref(), false)?,
            });
        }
        Ok(Self { constraints })
    }

    pub fn is_empty(&self) -> bool {
        self.constraints.is_empty()
    }

    /// The constraints of a pod of this controller.
    pub(crate) fn of_controller(&self, uid: &str) -> Vec<Spread> {
        self.over(&Selector { terms: vec![(Arc::from(CONTROLLER), ValueSet::one(uid))] })
    }

    fn over(&self, selector: &Selector) -> Vec<Spread> {
        let spread = |constraint: &Constraint| Spread {
            key: Arc::clone(&constraint.key),
            max_skew: constraint.max_skew,
            min_domains: constraint.min_domains,
            selector: Some(selector.clone()),
            hard: constraint.hard,
            honor_affinity: constraint.honor_affinity,
            honor_taints: constraint.honor_taints,
        };
        self.constraints.iter().map(spread).collect()
    }
}

/// UID of the controller whose selector kube-scheduler applies to a default constraint. The selector of a `ReplicaSet` matches the pods of
/// one revision, which are the pods that it owns. Selectors of Services are ignored here: they can only narrow a controller's
/// pods, all of which have the same labels. Pods without such a controller use the selectors of their Services
/// ([`Services`]).
pub(crate) fn spreading_controller(pod: &Pod) -> Option<&str> {
    let owner = pod.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))?;
    let spreads = matches!(owner.kind.as_str(), "ReplicaSet" | "StatefulSet" | "ReplicationController");
    spreads.then_some(owner.uid.as_str())
}

/// Selectors of Services, and the default constraints of the pods that they select and that no controller spreads.
#[derive(Clone, Debug, Default)]
pub struct Services {
    spread: DefaultSpread,
    /// Selector by name, by namespace; Services without a selector are left out.
    selectors: BTreeMap<String, BTreeMap<String, Labels>>,
}

impl Services {
    pub fn new(spread: DefaultSpread) -> Self {
        Self { spread, selectors: BTreeMap::new() }
    }

    /// Adds or updates a Service.
    pub fn apply(&mut self, service: &Service) {
        let namespace = service.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
        let selector = service.spec.as_ref().and_then(|spec| spec.selector.clone()).unwrap_or_default();
        let name = service.metadata.name.clone().unwrap_or_default();
        if selector.is_empty() {
            self.delete(&format!("{namespace}/{name}"));
        } else {
            self.selectors.entry(namespace).or_default().insert(name, selector);
        }
    }

    /// Removes the Service of this `namespace/name`.
    pub fn delete(&mut self, key: &str) {
        let Some((namespace, name)) = key.split_once('/') else { return };
        if let Some(inside) = self.selectors.get_mut(namespace) {
            inside.remove(name);
            if inside.is_empty() {
                self.selectors.remove(namespace);
            }
        }
    }

    /// `namespace/name` of all Services with a selector.
    pub fn keys(&self) -> BTreeSet<String> {
        let inside = |(namespace, names): (&String, &BTreeMap<String, Labels>)| {
            names.keys().map(|name| format!("{namespace}/{name}")).collect::<Vec<_>>()
        };
        self.selectors.iter().flat_map(inside).collect()
    }

    /// Whether no pod can get a constraint.
    pub(crate) fn is_empty(&self) -> bool {
        self.spread.is_empty() || self.selectors.is_empty()
    }

    /// The default constraints over a selector.
    pub(crate) fn spread_over(&self, selector: &Selector) -> Vec<Spread> {
        self.spread.over(selector)
    }

    /// The selectors of all Services that select a pod, merged; `None` where no Service does.
    pub(crate) fn selecting(&self, pod: &PodEntry) -> Option<Labels> {
        let inside = self.selectors.get(&*pod.class.namespace)?.values();
        let selects = |selector: &&Labels| selector.iter().all(|(key, value)| pod.labels.get(key) == Some(value));
        let merged: Labels =
            inside.filter(selects).flatten().map(|(key, value)| (key.clone(), value.clone())).collect();
        (!merged.is_empty()).then_some(merged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constraints_are_parsed_and_errors_name_the_field() {
        let read = DefaultSpread::parse(
            "podTopologySpread:\n  defaultConstraints:\n  - {maxSkew: 5, topologyKey: failure-domain.beta.kubernetes.io/zone, whenUnsatisfiable: ScheduleAnyway}\n",
        )
        .unwrap();
        assert_eq!(&*read.constraints[0].key, "topology.kubernetes.io/zone");
        let every_field = "{podTopologySpread: {defaultConstraints: [{maxSkew: 1, topologyKey: z, whenUnsatisfiable: DoNotSchedule, \
            minDomains: 3, nodeAffinityPolicy: Ignore, nodeTaintsPolicy: Honor, matchLabelKeys: [pod-template-hash]}]}}";
        let read = &DefaultSpread::parse(every_field).unwrap().of_controller("u")[0];
        assert_eq!((read.min_domains, read.honor_affinity, read.honor_taints), (3, false, true));
        for text in ["", " \n", "{}", "podTopologySpread: {}"] {
            assert!(DefaultSpread::parse(text).unwrap().is_empty(), "{text:?}");
        }
        let one = |fields: &str| format!("{{podTopologySpread: {{defaultConstraints: [{fields}]}}}}");
        let good = "{maxSkew: 1, topologyKey: z, whenUnsatisfiable: DoNotSchedule}";
        for (text, want) in [
            (one("{maxSkew: 0, topologyKey: z, whenUnsatisfiable: DoNotSchedule}"), "[0].maxSkew: 0"),
            (one("{maxSkew: 1, topologyKey: '', whenUnsatisfiable: DoNotSchedule}"), "[0].topologyKey"),
            (one("{maxSkew: 1, topologyKey: z, whenUnsatisfiable: Never}"), "\"Never\" is neither"),
            (one("{maxSkew: 1, topologyKey: z}"), "whenUnsatisfiable"),
            (one("{maxSkew: 1, topologyKey: z, whenUnsatisfiable: DoNotSchedule, labelSelector: {}}"), "labelSelector"),
            (one(&format!("{good}, {good}")), "[1].topologyKey: z is there twice"),
            (one(&good.replace('}', ", minDomains: 0}")), "[0].minDomains: 0"),
            (one(&good.replace('}', ", nodeTaintsPolicy: Never}")), "[0].nodeTaintsPolicy: \"Never\""),
            ("profiles: []".to_owned(), "podTopologySpread"),
        ] {
            let error = DefaultSpread::parse(&text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
    }
}
