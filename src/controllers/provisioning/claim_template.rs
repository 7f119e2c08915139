//! The NodeClaim of a planned node, and of a node of a static NodePool.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::ObjectMeta;
use kube::{Resource, ResourceExt};
use stowage_api::node_claim::ResourceRequirements;
use stowage_api::{NodeClaim, NodeClaimSpec, NodePool, Requirement, hash};
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_planner::PlannedNode;

use crate::state::plan_record::{MoveTerms, Owner, PlanRecord};
use crate::state::snapshot::Snapshot;

/// The NodeClaim of a planned node, with the plan in its annotations. Its pods have holds until `hold_until`, and those that a move
/// displaces longer.
pub fn claim_of(
    pool: &NodePool,
    node: &PlannedNode,
    snapshot: &Snapshot,
    hold_until: UnixMillis,
    of_move: Option<&MoveTerms>,
) -> NodeClaim {
    let pods: Vec<_> = node.pods.iter().map(|pod| &snapshot.problem.pods[*pod]).collect();
    let plan = PlanRecord {
        pods: pods.iter().map(|pod| pod.key.to_string()).collect(),
        owners: pods
            .iter()
            .filter(|pod| snapshot.displaced.contains(&*pod.key))
            .filter_map(|pod| {
                let owner = Owner::of(pod.owner.as_ref()?, &pod.key, snapshot.taken_at, of_move);
                Some((pod.key.to_string(), owner))
            })
            .collect(),
        hold_until,
    };
    let mut claim = claim_of_template(pool);
    let annotations = claim.annotations_mut();
    annotations.extend(plan.annotations());
    if let Some(choice) = node.choices.first() {
        let offering = format!("{}/{}/{}", choice.instance_type.name, choice.zone, choice.capacity_type);
        annotations.insert(labels::PLANNED_OFFERING.into(), offering);
    }
    if let Some(generation) = of_move.and_then(|of_move| of_move.generation) {
        annotations.insert(labels::REPLACEMENT_GENERATION.into(), generation.to_string());
    }
    if let Some(max_price) = node.max_price {
        annotations.insert(labels::MAX_PRICE.into(), format!("{:.6}", max_price.usd()));
    }
    let chosen = [labels::INSTANCE_TYPE, labels::ZONE, labels::CAPACITY_TYPE].map(|key| (key, values_of(node, key)));
    let of_template = &pool.spec.template.spec.requirements;
    let mut requirements: Vec<Requirement> = of_template
        .iter()
        .filter(|requirement| !chosen.iter().any(|(key, _)| requirement.key == *key))
        .chain(&node.requirements)
        .cloned()
        .collect();
    for (key, values) in chosen {
        let min_values = of_template.iter().find(|other| other.key == key).and_then(|r| r.min_values);
        requirements.push(Requirement { key: key.into(), operator: "In".into(), values, min_values });
    }
    if let Some(relaxed) = relax_min_values(&mut requirements, node) {
        claim.annotations_mut().insert(labels::MIN_VALUES_RELAXED.into(), relaxed.to_string());
    }
    claim.spec.requirements = requirements;
    claim.spec.resources.requests = node.requests.to_map();
    claim
}

/// The NodeClaim of a NodePool's template, without a plan: for any of its offerings, and without requests.
pub fn claim_of_template(pool: &NodePool) -> NodeClaim {
    let (template, name) = (&pool.spec.template, pool.name_any());
    let mut annotations = template.metadata.annotations.clone().unwrap_or_default();
    annotations.insert(labels::NODE_POOL_HASH.into(), hash::node_pool(&pool.spec));
    annotations.insert(labels::NODE_POOL_HASH_VERSION.into(), hash::NODE_POOL_VERSION.into());
    let mut own_labels = template.metadata.labels.clone().unwrap_or_default();
    own_labels.insert(labels::NODE_POOL.into(), name.clone());
    own_labels.insert(labels::EC2_NODE_CLASS.into(), template.spec.node_class_ref.name.clone());
    let owner = OwnerReference { block_owner_deletion: Some(true), ..pool.owner_ref(&()).unwrap_or_default() };
    let mut claim = NodeClaim::new(
        "",
        NodeClaimSpec {
            taints: template.spec.taints.clone().unwrap_or_default(),
            startup_taints: template.spec.startup_taints.clone().unwrap_or_default(),
            requirements: template.spec.requirements.clone(),
            resources: ResourceRequirements::default(),
            node_class_ref: template.spec.node_class_ref.clone(),
            termination_grace_period: template.spec.termination_grace_period.clone(),
            expire_after: template.spec.expire_after.clone(),
        },
    );
    claim.metadata = ObjectMeta {
        generate_name: Some(format!("{name}-")),
        labels: Some(own_labels),
        annotations: Some(annotations),
        owner_references: Some(vec![owner]),
        finalizers: Some(vec![labels::TERMINATION_FINALIZER.into()]),
        ..ObjectMeta::default()
    };
    claim
}

/// The NodeClaim of a planned node without what its pods contribute: without pods, requests and requirements of their own.
pub fn claim_without_pods(
    pool: &NodePool,
    node: &PlannedNode,
    snapshot: &Snapshot,
    hold_until: UnixMillis,
) -> NodeClaim {
    let (pods, requests, requirements) = Default::default();
    claim_of(pool, &PlannedNode { pods, requests, requirements, ..node.clone() }, snapshot, hold_until, None)
}

/// The distinct values of a label among a node's choices, in the order of the choices.
fn values_of(node: &PlannedNode, key: &str) -> Vec<String> {
    let mut values: Vec<String> = Vec::new();
    for value in node.choices.iter().filter_map(|choice| choice.label(key)) {
        if !values.iter().any(|have| have == value) {
            values.push(value.to_owned());
        }
    }
    values
}

/// Lowers `minValues` to the number of values among the choices if a `BestEffort` plan has fewer: the API server refuses a claim
/// with fewer values than its `minValues`. Returns whether one was lowered; `None` when the claim has none.
fn relax_min_values(requirements: &mut [Requirement], node: &PlannedNode) -> Option<bool> {
    let mut relaxed = None;
    for requirement in requirements {
        let Some(least) = requirement.min_values else { continue };
        let have = i64::try_from(values_of(node, &requirement.key).len()).unwrap_or(i64::MAX).max(1);
        let short = have < least;
        requirement.min_values = Some(least.min(have));
        relaxed = Some(relaxed.unwrap_or(false) || short);
    }
    relaxed
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use serde_json::json;
    use stowage_model::offering::{CapacityType, InstanceType};
    use stowage_model::resources::Resources;
    use stowage_model::units::MicroUsd;
    use stowage_planner::Choice;

    use super::*;

    /// A node with these choices of types, given by family and size, and zones.
    fn planned(types: &[(&str, &str)], zones: &[&str]) -> PlannedNode {
        let choice = |(family, size): &(&str, &str), zone: &str| Choice {
            instance_type: Arc::new(InstanceType {
                name: format!("{family}.{size}").into(),
                labels: BTreeMap::from([(labels::INSTANCE_FAMILY.to_owned(), (*family).to_owned())]),
                capacity: Resources::default(),
                allocatable: Resources::default(),
                volume_limits: BTreeMap::new(),
                offerings: Vec::new(),
            }),
            zone: zone.into(),
            capacity_type: CapacityType::OnDemand,
            price: MicroUsd(1),
        };
        let choices = types.iter().flat_map(|of_type| zones.iter().map(move |zone| choice(of_type, zone)));
        PlannedNode {
            pool: 0,
            choices: choices.collect(),
            max_price: None,
            pods: Vec::new(),
            requests: Resources::default(),
            requirements: Vec::new(),
        }
    }

    fn claim(node: &PlannedNode, requirements: &serde_json::Value) -> NodeClaim {
        let pool = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "p"}, "spec": {
            "template": {"spec": {"requirements": requirements,
                "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "c"}}}}});
        claim_of(&serde_json::from_value(pool).unwrap(), node, &Snapshot::default(), UnixMillis(1), None)
    }

    fn requirement(claim: &NodeClaim, key: &str) -> (Vec<String>, Option<i64>) {
        let found = claim.spec.requirements.iter().find(|r| r.key == key).unwrap();
        (found.values.clone(), found.min_values)
    }

    #[test]
    fn a_claim_names_the_types_zones_and_capacity_types_of_its_choices() {
        let node = planned(&[("m1", "x2"), ("c1", "x2")], &["z-b", "z-a"]);
        let of_pool = json!([{"key": labels::ZONE, "operator": "In", "values": ["z-a", "z-b", "z-c"]}]);
        let claim = claim(&node, &of_pool);
        assert_eq!(requirement(&claim, labels::INSTANCE_TYPE), (vec!["m1.x2".into(), "c1.x2".into()], None));
        assert_eq!(requirement(&claim, labels::ZONE), (vec!["z-b".into(), "z-a".into()], None));
        assert_eq!(requirement(&claim, labels::CAPACITY_TYPE), (vec!["on-demand".into()], None));
        assert_eq!(claim.spec.requirements.len(), 3);
        assert_eq!(claim.annotations()[labels::PLANNED_OFFERING], "m1.x2/z-b/on-demand");
        assert!(!claim.annotations().contains_key(labels::MIN_VALUES_RELAXED), "no minValues");
    }

    #[test]
    fn a_claim_names_its_maximum_price() {
        let node = planned(&[("m1", "x2")], &["z-a"]);
        let of = |max_price| claim(&PlannedNode { max_price, ..node.clone() }, &json!([]));
        assert_eq!(of(None).annotations().get(labels::MAX_PRICE), None);
        assert_eq!(of(Some(MicroUsd(48_005))).annotations()[labels::MAX_PRICE], "0.048005");
    }

    #[test]
    fn min_values_are_relaxed_to_the_number_of_values_of_the_choices() {
        let of_pool = |types: i64, families: i64| {
            json!([{"key": labels::INSTANCE_TYPE, "operator": "Exists", "minValues": types},
                {"key": labels::INSTANCE_FAMILY, "operator": "In", "values": ["m1", "c1", "r1"], "minValues": families}])
        };
        let node = planned(&[("m1", "x2"), ("c1", "x2"), ("c1", "x4")], &["z-a"]);
        for (types, families, want, relaxed) in
            [(3, 2, (3, 2), "false"), (3, 3, (3, 2), "true"), (5, 1, (3, 1), "true")]
        {
            let claim = claim(&node, &of_pool(types, families));
            let least = |key| requirement(&claim, key).1.unwrap();
            assert_eq!((least(labels::INSTANCE_TYPE), least(labels::INSTANCE_FAMILY)), want);
            assert_eq!(claim.annotations()[labels::MIN_VALUES_RELAXED], relaxed);
        }
    }
}
