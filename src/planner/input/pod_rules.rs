//! Scheduling constraints of a pod's spec, converted to those of a class.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PodAffinityTerm, PodSpec, Toleration as ApiToleration, TopologySpreadConstraint};
use stowage_model::labels::normalize_key;
use stowage_model::pod_class::{HostPort, Namespaces, NodeTerm, PodClass, PodTerm, Selector, Spread, Toleration};
use stowage_model::requirement::ValueSet;

use crate::input::pod::Labels;
use crate::input::terms::{TermError, node_term, selector};

pub(crate) fn toleration(api: &ApiToleration) -> Toleration {
    Toleration {
        key: Arc::from(api.key.as_deref().unwrap_or_default()),
        exists: api.operator.as_deref() == Some("Exists"),
        value: Arc::from(api.value.as_deref().unwrap_or_default()),
        effect: Arc::from(api.effect.as_deref().unwrap_or_default()),
    }
}

pub(crate) fn host_ports(spec: &PodSpec) -> Vec<HostPort> {
    let host_network = spec.host_network == Some(true);
    let sidecars = spec.init_containers.iter().flatten().filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let mut ports: Vec<HostPort> = spec
        .containers
        .iter()
        .chain(sidecars)
        .flat_map(|container| container.ports.iter().flatten())
        .filter_map(|port| {
            let number = port.host_port.filter(|n| *n > 0).or(host_network.then_some(port.container_port))?;
            let ip = port.host_ip.as_deref().filter(|ip| !matches!(*ip, "0.0.0.0" | "::")).unwrap_or_default();
            let protocol = port.protocol.as_deref().unwrap_or("TCP");
            Some(HostPort { port: number, protocol: Arc::from(protocol), ip: Arc::from(ip) })
        })
        .collect();
    ports.sort();
    ports.dedup();
    ports
}

pub(crate) fn node_terms(spec: &PodSpec, class: &mut PodClass) -> Result<(), TermError> {
    let mut base = NodeTerm::default();
    for (key, value) in spec.node_selector.iter().flatten() {
        base.labels.require(key, &ValueSet::one(value));
    }
    let affinity = spec.affinity.as_ref().and_then(|a| a.node_affinity.as_ref());
    let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    match required {
        Some(selector) => {
            // An invalid term matches no node; the other terms still do.
            let mut wrong = None;
            for term in &selector.node_selector_terms {
                match node_term(term) {
                    Ok(term) => class.node_terms.push(term.and(&base)),
                    Err(problem) => wrong = Some(problem),
                }
            }
            class.node_terms.sort();
            class.node_terms.dedup();
            if let Some(problem) = wrong.filter(|_| class.node_terms.is_empty()) {
                return Err(problem);
            }
            if class.node_terms.is_empty() {
                class.node_terms.push(NodeTerm { never: true, ..base });
            }
        }
        None if base.labels.is_empty() => {}
        None => class.node_terms.push(base),
    }
    for preferred in
        affinity.iter().flat_map(|a| a.preferred_during_scheduling_ignored_during_execution.iter().flatten())
    {
        class.preferred_nodes.push((preferred.weight, node_term(&preferred.preference)?));
    }
    class.preferred_nodes.sort_by_key(|(weight, _)| -weight);
    Ok(())
}

/// Narrows a selector to the pod's own values of `keys` (`matchLabelKeys`), or excludes them (`mismatchLabelKeys`).
/// A key that the pod lacks is ignored, as by the API server.
fn narrow(selector: &mut Selector, keys: Option<&Vec<String>>, labels: &Labels, matching: bool) {
    for key in keys.into_iter().flatten() {
        let Some(value) = labels.get(key) else { continue };
        let set = if matching { ValueSet::one(value) } else { ValueSet::none_of([value.as_str()]) };
        match selector.terms.iter_mut().find(|(have, _)| **have == **key) {
            Some((_, have)) => *have = have.intersect(&set),
            None => selector.terms.push((Arc::from(key.as_str()), set)),
        }
    }
    selector.terms.sort();
}

pub(crate) fn spread(api: &TopologySpreadConstraint, labels: &Labels) -> Result<Spread, TermError> {
    const FIELD: &str = "spec.topologySpreadConstraints";
    let mut counted = api.label_selector.as_ref().map(|s| selector(s, FIELD)).transpose()?;
    if let Some(counted) = &mut counted {
        narrow(counted, api.match_label_keys.as_ref(), labels, true);
    }
    Ok(Spread {
        key: Arc::from(normalize_key(&api.topology_key)),
        max_skew: i64::from(api.max_skew).max(1),
        min_domains: i64::from(api.min_domains.unwrap_or(1)),
        selector: counted,
        hard: api.when_unsatisfiable != "ScheduleAnyway",
        honor_affinity: api.node_affinity_policy.as_deref() != Some("Ignore"),
        honor_taints: api.node_taints_policy.as_deref() == Some("Honor"),
    })
}

pub(crate) fn pod_term(api: &PodAffinityTerm, namespace: &str, labels: &Labels) -> Result<PodTerm, TermError> {
    const FIELD: &str = "spec.affinity.podAffinity";
    let mut about = api.label_selector.as_ref().map(|s| selector(s, FIELD)).transpose()?;
    if let Some(about) = &mut about {
        narrow(about, api.match_label_keys.as_ref(), labels, true);
        narrow(about, api.mismatch_label_keys.as_ref(), labels, false);
    }
    let mut namespaces = Namespaces {
        names: api.namespaces.iter().flatten().map(|n| Arc::from(n.as_str())).collect(),
        selector: api.namespace_selector.as_ref().map(|s| selector(s, FIELD)).transpose()?,
    };
    if namespaces.names.is_empty() && namespaces.selector.is_none() {
        namespaces.names.insert(Arc::from(namespace));
    }
    Ok(PodTerm { key: Arc::from(normalize_key(&api.topology_key)), selector: about, namespaces })
}
