//! The zones that waiting pods may be in, for metrics (Karpenter core reference 8).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use stowage_model::labels;
use stowage_model::pod_class::NodeTerm;
use stowage_planner::PodEntry;

use crate::decisions::gauges::Series;
use crate::state::snapshot::Demand;
use crate::state::tables::ClusterState;

/// The controller that plans the pods.
const CONTROLLER: &str = "provisioner";
/// Of a pod that may be in several zones.
const FLEXIBLE: &str = "flexible";
/// Of a pod that may be in none: its node affinity and its volumes exclude each other.
const NONE: &str = "none";

/// Numbers of waiting pods by controller and by the only zone that node affinity and volumes leave them; `flexible` for several, `none` without one.
pub fn pending_by_zone(state: &ClusterState, demand: &Demand) -> Series<2> {
    let mut by_class: HashMap<*const (), String> = HashMap::new();
    let mut out = Series::new();
    for key in demand.pending.iter().chain(&demand.displaced) {
        let Some(Ok(entry)) = state.pods.get(key).map(|pod| &pod.entry) else { continue };
        let zone = if entry.claims.is_empty() {
            let class = Arc::as_ptr(&entry.class).cast();
            by_class.entry(class).or_insert_with(|| effective_zone(state, entry)).clone()
        } else {
            effective_zone(state, entry)
        };
        *out.entry([CONTROLLER.to_owned(), zone]).or_default() += 1.0;
    }
    out
}

fn effective_zone(state: &ClusterState, pod: &PodEntry) -> String {
    // Volumes that cannot be placed anywhere are an error of the plan, not a constraint.
    let volumes = state.volumes.node_terms(&pod.claims).unwrap_or_default();
    let all = [&pod.class.node_terms[..], &volumes];
    let Some(named) = all.iter().find_map(|terms| zones(terms)) else { return FLEXIBLE.to_owned() };
    let mut possible = named.into_iter().filter(|zone| all.iter().all(|terms| accept(terms, zone)));
    match (possible.next(), possible.next()) {
        (None, _) => NONE.to_owned(),
        (Some(zone), None) => zone.to_owned(),
        (Some(_), Some(_)) => FLEXIBLE.to_owned(),
    }
}

/// The zones that these alternatives name; `None` if one of them names none.
fn zones(terms: &[NodeTerm]) -> Option<BTreeSet<&str>> {
    let mut out = BTreeSet::new();
    for term in terms {
        out.extend(term.labels.get(labels::ZONE)?.finite()?.map(|zone| &**zone));
    }
    (!terms.is_empty()).then_some(out)
}

fn accept(terms: &[NodeTerm], zone: &str) -> bool {
    let accepts = |term: &NodeTerm| term.labels.get(labels::ZONE).is_none_or(|set| set.contains(zone));
    terms.is_empty() || terms.iter().any(accepts)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::time::UnixMillis;
    use stowage_test_objects as objects;

    use super::*;

    /// A node affinity with these alternatives: zones that each names, or excludes.
    fn affinity(terms: &[(&str, &[&str])]) -> Value {
        let term = |(operator, zones): &(&str, &[&str])| json!({"matchExpressions": [{"key": labels::ZONE, "operator": operator, "values": zones}]});
        let terms: Vec<Value> = terms.iter().map(term).collect();
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}})
    }

    #[test]
    fn pods_count_by_the_zone_that_node_affinity_and_volumes_leave_them() {
        let mut state = ClusterState::default();
        let claim = json!({"metadata": {"name": "data", "namespace": "n", "annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
            "spec": {"volumeName": "v", "accessModes": ["ReadWriteOnce"]}, "status": {"phase": "Bound"}});
        let terms = json!([{"matchExpressions": [{"key": labels::ZONE, "operator": "In", "values": ["b"]}]}]);
        let volume =
            json!({"metadata": {"name": "v"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}});
        state.apply_volume_claim(&serde_json::from_value(claim).unwrap());
        state.apply_volume(&serde_json::from_value(volume).unwrap());
        let mount = json!([{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]);
        let demand = [
            ("anywhere", json!({}), "flexible"),
            ("in-a", json!({"nodeSelector": {labels::ZONE: "a"}}), "a"),
            ("in-a-too", json!({"nodeSelector": {labels::ZONE: "a"}}), "a"),
            ("in-two", json!({"affinity": affinity(&[("In", &["a", "b"])])}), "flexible"),
            ("in-a-or-not-c", json!({"affinity": affinity(&[("In", &["a"]), ("NotIn", &["c"])])}), "flexible"),
            ("with-volume", json!({"volumes": mount}), "b"),
            ("in-two-with-volume", json!({"volumes": mount, "affinity": affinity(&[("In", &["a", "b"])])}), "b"),
            ("not-b-with-volume", json!({"volumes": mount, "affinity": affinity(&[("NotIn", &["b"])])}), "none"),
        ];
        for (name, spec, expected) in &demand {
            state.apply_pod(&objects::pod(name, &json!({"spec": spec})), UnixMillis(1));
            let pending = BTreeSet::from([format!("n/{name}")]);
            let found = pending_by_zone(&state, &Demand { pending, ..Demand::default() });
            assert_eq!(found, Series::from([([CONTROLLER.to_owned(), (*expected).to_owned()], 1.0)]), "{name}");
        }
        let pending = demand.iter().map(|(name, ..)| format!("n/{name}")).collect();
        let found = pending_by_zone(&state, &Demand { pending, ..Demand::default() });
        let counts: Vec<String> = found.iter().map(|([_, zone], pods)| format!("{zone} {pods}")).collect();
        assert_eq!(counts, ["a 2", "b 2", "flexible 3", "none 1"]);
    }
}
