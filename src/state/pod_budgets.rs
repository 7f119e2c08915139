//! PodDisruptionBudgets, reduced to what decides whether the API server would evict a pod now.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt;
use stowage_model::pod_class::Selector;
use stowage_planner::{Labels, selector};

use crate::state::pods::PodRecord;

/// A namespace with more budgets that require no value of a label is not searched: its pods count as blocked.
const MAX_UNINDEXED: usize = 100;

/// Why a pod cannot be evicted now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvictionBlock {
    /// This budget (`namespace/name`) allows no disruption now.
    Exhausted(String),
    /// Two budgets (`namespace/name`) select the pod: the API server refuses to evict it.
    Several(String, String),
    /// The namespace has too many budgets to search.
    TooManyBudgets,
}

/// A budget.
#[derive(Debug, PartialEq, Eq)]
struct PodBudget {
    /// `None` selects no pod; without requirements it selects every pod of the namespace.
    selector: Option<Selector>,
    /// Allows an eviction now. False while its status is older than its spec: the API server then refuses evictions.
    allows: bool,
    /// `unhealthyPodEvictionPolicy: AlwaysAllow`.
    evicts_unhealthy: bool,
}

impl PodBudget {
    fn new(budget: &PodDisruptionBudget) -> Self {
        let (spec, status) = (budget.spec.as_ref(), budget.status.as_ref());
        let current = status.is_some_and(|status| {
            status.observed_generation.unwrap_or_default() >= budget.metadata.generation.unwrap_or_default()
        });
        let parsed = spec.and_then(|spec| spec.selector.as_ref()).map(|api| selector(api, "spec.selector"));
        let (selector, valid) = match parsed.transpose() {
            Ok(selector) => (selector, true),
            Err(error) => {
                let (namespace, name) = (budget.namespace().unwrap_or_default(), budget.name_any());
                tracing::warn!(namespace, name, %error, "invalid pod disruption budget blocks its namespace");
                (Some(Selector::default()), false)
            }
        };
        Self {
            selector,
            allows: valid && current && status.is_some_and(|status| status.disruptions_allowed > 0),
            evicts_unhealthy: spec.and_then(|spec| spec.unhealthy_pod_eviction_policy.as_deref())
                == Some("AlwaysAllow"),
        }
    }

    /// A label of which it requires one of these values, if any.
    fn index_term(&self) -> Option<(&Arc<str>, Vec<&Arc<str>>)> {
        let mut terms = self.selector.as_ref()?.terms.iter();
        terms.find_map(|(key, set)| {
            let values = set.finite().filter(|_| !set.accepts_absence())?;
            Some((key, values.collect()))
        })
    }

    fn selects(&self, labels: &Labels) -> bool {
        self.selector.as_ref().is_some_and(|selector| selector.selects(labels))
    }
}

/// The budgets of a namespace by name. A pod is compared with those that its labels lead to, not with all of them.
#[derive(Debug, Default)]
struct NamespaceBudgets {
    by_name: BTreeMap<String, PodBudget>,
    /// Names of the budgets that require this value of a label.
    by_label: HashMap<Arc<str>, HashMap<Arc<str>, BTreeSet<String>>>,
    /// Names of the budgets that select pods and require no value of a label.
    unindexed: BTreeSet<String>,
}

impl NamespaceBudgets {
    fn insert(&mut self, name: String, budget: PodBudget) {
        if self.by_name.get(&name) == Some(&budget) {
            return;
        }
        self.remove(&name);
        if let Some((key, values)) = budget.index_term() {
            let by_value = self.by_label.entry(Arc::clone(key)).or_default();
            for value in values {
                by_value.entry(Arc::clone(value)).or_default().insert(name.clone());
            }
        } else if budget.selector.is_some() {
            self.unindexed.insert(name.clone());
        }
        self.by_name.insert(name, budget);
    }

    fn remove(&mut self, name: &str) {
        let Some(budget) = self.by_name.remove(name) else { return };
        self.unindexed.remove(name);
        let Some((key, values)) = budget.index_term() else { return };
        let Some(by_value) = self.by_label.get_mut(key) else { return };
        for value in values {
            if let Some(names) = by_value.get_mut(value) {
                names.remove(name);
                if names.is_empty() {
                    by_value.remove(value);
                }
            }
        }
        if by_value.is_empty() {
            self.by_label.remove(key);
        }
    }

    /// The budgets that select a pod with these labels, in no particular order.
    fn selecting<'a>(&'a self, labels: &'a Labels) -> impl Iterator<Item = (&'a String, &'a PodBudget)> {
        let indexed = labels.iter().filter_map(|(key, value)| self.by_label.get(&**key)?.get(&**value)).flatten();
        let candidates = indexed.chain(&self.unindexed).filter_map(|name| Some((name, self.by_name.get(name)?)));
        candidates.filter(|(_, budget)| budget.selects(labels))
    }
}

/// The PodDisruptionBudgets of the cluster.
#[derive(Debug, Default)]
pub struct PodBudgets {
    namespaces: HashMap<String, NamespaceBudgets>,
}

impl PodBudgets {
    /// Applies a budget.
    pub fn apply(&mut self, budget: &PodDisruptionBudget) {
        let namespace = self.namespaces.entry(budget.namespace().unwrap_or_default()).or_default();
        namespace.insert(budget.name_any(), PodBudget::new(budget));
    }

    /// Removes the budget `namespace/name`.
    pub fn delete(&mut self, key: &str) {
        let Some((namespace, name)) = key.split_once('/') else { return };
        let Some(budgets) = self.namespaces.get_mut(namespace) else { return };
        budgets.remove(name);
        if budgets.by_name.is_empty() {
            self.namespaces.remove(namespace);
        }
    }

    /// The budgets as `namespace/name`.
    pub fn keys(&self) -> BTreeSet<String> {
        let keys = self.namespaces.iter();
        keys.flat_map(|(namespace, budgets)| budgets.by_name.keys().map(move |name| format!("{namespace}/{name}")))
            .collect()
    }

    /// What refuses the eviction of a pod now. Pods that a drain does not evict are never blocked: finished, terminating and
    /// protected pods, mirror pods, and pods that tolerate the disruption taint (Karpenter core reference 4.2).
    pub fn block(&self, pod: &PodRecord) -> Option<EvictionBlock> {
        let budgets = self.namespaces.get(&pod.namespace)?;
        if !pod.drainable() || pod.deleted_at.is_some() || pod.do_not_disrupt {
            return None;
        }
        if budgets.unindexed.len() > MAX_UNINDEXED {
            return Some(EvictionBlock::TooManyBudgets);
        }
        // A pod that cannot be parsed counts as a pod without labels.
        let none = Labels::default();
        let labels = pod.entry.as_ref().map_or(&none, |entry| &entry.labels);
        let mut selecting = budgets.selecting(labels);
        let (first, budget) = selecting.next()?;
        let key = |name: &str| format!("{}/{name}", pod.namespace);
        if let Some((second, _)) = selecting.next() {
            let (first, second) = if first < second { (first, second) } else { (second, first) };
            return Some(EvictionBlock::Several(key(first), key(second)));
        }
        let evicted = budget.allows || (budget.evicts_unhealthy && !pod.is_ready());
        (!evicted).then(|| EvictionBlock::Exhausted(key(first)))
    }
}

#[cfg(test)]
mod tests;
