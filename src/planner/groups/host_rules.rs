//! Rules about the pods on one node: rules on the host name, and host ports, become caps on counters per node.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use stowage_model::labels;
use stowage_model::pod_class::{HostPort, Namespaces, PodClass, Spread};

use crate::groups::pod_selectors::Selectors;
use crate::input::pod::PodEntry;
use crate::input::problem::Problem;
use crate::input::settings::PreferencePolicy;

/// Rules of a group about the pods on the same node. Ids name counters that every node has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostRules {
    /// Counters that a pod of the group raises.
    pub raises: Vec<u32>,
    /// Maximum value of a counter on its node, the pod itself included.
    pub caps: Vec<(u32, i32)>,
    /// Counters that are preferred low on its node (soft spread, preferred anti-affinity).
    pub soft: Vec<u32>,
    /// Counters that are preferred above zero on its node (preferred affinity).
    pub likes: Vec<u32>,
    /// Counters that must be above zero on its node (required affinity), and whether the pod itself raises them.
    pub wants: Vec<(u32, bool)>,
}

impl HostRules {
    pub fn is_free(&self) -> bool {
        self.raises.is_empty()
            && self.caps.is_empty()
            && self.soft.is_empty()
            && self.likes.is_empty()
            && self.wants.is_empty()
    }
}

/// Namespace and UID of a controller: a UID may be copied to another namespace.
type Controller = (Arc<str>, Arc<str>);

fn controller_of(pod: &PodEntry) -> Option<Controller> {
    Some((Arc::clone(&pod.class.namespace), Arc::clone(pod.owner.as_ref()?)))
}

/// The counters that nodes have: per selector, host port and controller.
#[derive(Debug, Default)]
pub(crate) struct HostCounters {
    of_selector: HashMap<u32, u32>,
    /// Such as `of_selector`, for spread constraints, which ignore pods being deleted.
    of_spread: HashMap<u32, u32>,
    of_port: HashMap<HostPort, u32>,
    /// Counters of pods of one controller; `per_owner` is the maximum on a node.
    of_owner: HashMap<Controller, u32>,
    per_owner: Option<i32>,
    len: u32,
}

impl HostCounters {
    pub fn len(&self) -> usize {
        self.len as usize
    }

    fn selector(&mut self, selector: u32) {
        number(&mut self.of_selector, selector, &mut self.len);
    }

    fn spread(&mut self, selector: u32) {
        number(&mut self.of_spread, selector, &mut self.len);
    }

    fn port(&mut self, port: &HostPort) {
        if !self.of_port.contains_key(port) {
            self.of_port.insert(port.clone(), self.len);
            self.len += 1;
        }
    }

    fn owner(&mut self, owner: Controller) {
        if let Entry::Vacant(entry) = self.of_owner.entry(owner) {
            entry.insert(self.len);
            self.len += 1;
        }
    }

    /// Rules of a pending pod of this class that these selectors select. `owner` is its controller, where the maximum of pods per
    /// controller and node is set.
    pub fn pending(
        &self,
        class: &PodClass,
        matches: &[u32],
        owner: Option<&Arc<str>>,
        selectors: &mut Selectors,
    ) -> HostRules {
        let mut rules = self.rules(class, matches, selectors, true);
        rules.raises.extend(matches.iter().filter_map(|s| self.of_spread.get(s)));
        let counter = owner.and_then(|owner| self.of_owner.get(&(Arc::clone(&class.namespace), Arc::clone(owner))));
        if let (Some(counter), Some(most)) = (counter, self.per_owner) {
            rules.raises.push(*counter);
            rules.caps.push((*counter, most));
            rules.caps.sort_unstable();
        }
        rules
    }

    /// Rules of a pod, `pending` or running: the counters that it raises and caps.
    fn rules(&self, class: &PodClass, matches: &[u32], selectors: &mut Selectors, pending: bool) -> HostRules {
        let mut rules = HostRules {
            raises: matches.iter().filter_map(|s| self.of_selector.get(s).copied()).collect(),
            ..HostRules::default()
        };
        let mut cap = |counter: u32, at_most: i64| {
            let at_most = i32::try_from(at_most).unwrap_or(i32::MAX);
            match rules.caps.iter_mut().find(|(have, _)| *have == counter) {
                Some((_, have)) => *have = (*have).min(at_most),
                None => rules.caps.push((counter, at_most)),
            }
        };
        let on_host = |key: &Arc<str>| **key == *labels::HOSTNAME;
        for term in class.anti_affinity.iter().filter(|t| on_host(&t.key)) {
            if let Some(id) = selectors.add_term(term)
                && let Some(counter) = self.of_selector.get(&id)
            {
                cap(*counter, i64::from(matches.contains(&id)));
            }
        }
        if pending {
            for spread in class.spread.iter().filter(|s| s.hard && on_host(&s.key)) {
                if let Some(counter) = self.spread_counter(class, spread, selectors) {
                    // A new node is always possible, so the minimum over nodes is zero.
                    cap(counter, spread.max_skew);
                }
            }
        }
        for port in &class.host_ports {
            for (other, counter) in &self.of_port {
                let same_port = other.port == port.port && other.protocol == port.protocol;
                if same_port && (other == port || other.ip.is_empty() || port.ip.is_empty()) {
                    // A pod does not conflict with its own ports.
                    cap(*counter, i64::from(class.host_ports.contains(other)));
                }
            }
        }
        for port in &class.host_ports {
            rules.raises.extend(self.of_port.get(port));
        }
        if pending {
            for spread in class.spread.iter().filter(|s| !s.hard && on_host(&s.key)) {
                rules.soft.extend(self.spread_counter(class, spread, selectors));
            }
            for (_, term) in class.preferred_anti_affinity.iter().filter(|(_, t)| on_host(&t.key)) {
                rules.soft.extend(selectors.add_term(term).and_then(|id| self.of_selector.get(&id)));
            }
            for (_, term) in class.preferred_affinity.iter().filter(|(_, t)| on_host(&t.key)) {
                rules.likes.extend(selectors.add_term(term).and_then(|id| self.of_selector.get(&id)));
            }
            if class.affinity.iter().any(|t| on_host(&t.key))
                && let Some(id) = selectors.add_required(&class.affinity)
                && let Some(counter) = self.of_selector.get(&id)
            {
                rules.wants.push((*counter, matches.contains(&id)));
            }
        }
        rules.caps.sort_unstable();
        rules.soft.sort_unstable();
        rules.soft.dedup();
        rules
    }

    fn spread_counter(&self, class: &PodClass, spread: &Spread, selectors: &mut Selectors) -> Option<u32> {
        let id = add_spread(selectors, class, spread)?;
        self.of_spread.get(&id).copied()
    }

    /// Rules of a running pod.
    pub fn running(&self, pod: &PodEntry, selectors: &mut Selectors) -> HostRules {
        if self.len == 0 {
            return HostRules::default();
        }
        let matches = selectors.matching(pod);
        let mut rules = self.rules(&pod.class, &matches, selectors, false);
        if !pod.deleting {
            rules.raises.extend(matches.iter().filter_map(|s| self.of_spread.get(s)));
        }
        rules.raises.extend(controller_of(pod).and_then(|controller| self.of_owner.get(&controller)));
        rules
    }

    /// Rules of a daemon: only its host ports are relevant.
    pub fn daemon(&self, class: &PodClass, selectors: &mut Selectors) -> HostRules {
        if self.of_port.is_empty() { HostRules::default() } else { self.rules(class, &[], selectors, false) }
    }
}

/// Assigns the next counter to a selector without one.
fn number(of: &mut HashMap<u32, u32>, selector: u32, next: &mut u32) {
    of.entry(selector).or_insert_with(|| {
        *next += 1;
        *next - 1
    });
}

/// The selector of a spread constraint, over the pod's own namespace.
pub(crate) fn add_spread(selectors: &mut Selectors, class: &PodClass, spread: &Spread) -> Option<u32> {
    let namespaces = Namespaces { names: [Arc::clone(&class.namespace)].into(), selector: None };
    selectors.add(spread.selector.as_ref(), &namespaces)
}

/// Registers every selector and host counter that the rules of the problem use.
pub(crate) fn register(problem: &Problem) -> (Selectors<'_>, HostCounters) {
    let mut selectors = Selectors::new(&problem.namespaces);
    let mut counters = HostCounters::default();
    let respect = problem.settings.preference_policy == PreferencePolicy::Respect;
    let mut seen: HashSet<*const PodClass> = HashSet::new();
    // Classes by their first pod key: the order of the input must not change the ids.
    let mut first: HashMap<*const PodClass, &PodEntry> = HashMap::new();
    for pod in &problem.pods {
        let have = first.entry(Arc::as_ptr(&pod.class)).or_insert(pod);
        if pod.key < have.key {
            *have = pod;
        }
    }
    let mut first: Vec<&PodEntry> = first.into_values().collect();
    first.sort_by(|a, b| a.key.cmp(&b.key));
    for pod in first {
        seen.insert(Arc::as_ptr(&pod.class));
        let class = &pod.class;
        for spread in class.spread.iter().filter(|s| s.hard || respect) {
            let id = add_spread(&mut selectors, class, spread);
            if *spread.key == *labels::HOSTNAME
                && let Some(id) = id
            {
                counters.spread(id);
            }
        }
        if let Some(id) = selectors.add_required(&class.affinity)
            && class.affinity.iter().any(|term| *term.key == *labels::HOSTNAME)
        {
            counters.selector(id);
        }
        let preferred = class.preferred_affinity.iter().chain(&class.preferred_anti_affinity).map(|(_, term)| term);
        for term in class.anti_affinity.iter().chain(preferred.filter(|_| respect)) {
            if let Some(id) = selectors.add_term(term)
                && *term.key == *labels::HOSTNAME
            {
                counters.selector(id);
            }
        }
        for port in &class.host_ports {
            counters.port(port);
        }
    }
    // Of the rules of running pods only required anti-affinity and host ports constrain new pods.
    let mut nodes: Vec<_> = problem.nodes.iter().filter(|node| !node.pods.exclusive().is_empty()).collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    for class in nodes.into_iter().flat_map(|node| node.pods.exclusive()) {
        if !seen.insert(Arc::as_ptr(class)) {
            continue;
        }
        for term in &class.anti_affinity {
            if let Some(id) = selectors.add_term(term)
                && *term.key == *labels::HOSTNAME
            {
                counters.selector(id);
            }
        }
        if !counters.of_port.is_empty() {
            class.host_ports.iter().for_each(|port| counters.port(port));
        }
    }
    if problem.settings.workload_pods_per_node.is_some() {
        counters.per_owner = problem.settings.workload_pods_per_node;
        let owners: BTreeSet<Controller> = problem.pods.iter().filter_map(controller_of).collect();
        for owner in owners {
            counters.owner(owner);
        }
    }
    // Without a pending pod with a host port, no port can conflict.
    if !counters.of_port.is_empty() {
        problem.daemons.iter().flat_map(|d| &d.class.host_ports).for_each(|port| counters.port(port));
    }
    (selectors, counters)
}
