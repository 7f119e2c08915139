//! Test objects: each function returns the minimal valid object of its kind, merged (RFC 7386) with a patch.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "an object that does not parse is a defect of the test"
)]

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::labels;
use stowage_model::offering::{CapacityType, Catalog, InstanceType, Offering};
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;

use stowage_model::instance::{Instance, InstanceState};

fn merged<K: DeserializeOwned>(mut object: Value, patch: &Value) -> K {
    json_patch::merge(&mut object, patch);
    serde_json::from_value(object).unwrap()
}

/// The NodeClaim `name` with the UID `uid-NAME` and the node class `default`.
pub fn claim(name: &str, patch: &Value) -> NodeClaim {
    let class = json!({"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"});
    let claim = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim",
        "metadata": {"name": name, "uid": format!("uid-{name}")},
        "spec": {"requirements": [], "nodeClassRef": class}});
    merged(claim, patch)
}

/// The status of a launched NodeClaim: its provider id `aws:///z/ID` and these conditions, True since 2026-01-01.
pub fn launched(id: &str, conditions: &[&str]) -> Value {
    json!({"providerID": format!("aws:///z/{id}"), "conditions": conditions_true(conditions)})
}

/// Conditions that are True since 2026-01-01.
pub fn conditions_true(types: &[&str]) -> Value {
    let condition = |type_: &&str| {
        json!({"type": type_, "status": "True", "reason": type_, "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    types.iter().map(condition).collect()
}

/// The Node `name` with the UID `uid-NAME`.
pub fn node(name: &str, patch: &Value) -> Node {
    merged(json!({"metadata": {"name": name, "uid": format!("uid-{name}")}, "spec": {}}), patch)
}

/// The pod `n/NAME` with the UID `uid-NAME` and no container.
pub fn pod(name: &str, patch: &Value) -> Pod {
    let meta = json!({"name": name, "namespace": "n", "uid": format!("uid-{name}")});
    merged(json!({"metadata": meta, "spec": {"containers": []}}), patch)
}

/// The PodDisruptionBudget `n/NAME` without a selector.
pub fn pod_budget(name: &str, patch: &Value) -> PodDisruptionBudget {
    merged(json!({"metadata": {"name": name, "namespace": "n", "uid": format!("uid-{name}")}, "spec": {}}), patch)
}

/// The NodePool `name` of the node class `default`.
pub fn node_pool(name: &str, patch: &Value) -> NodePool {
    let class = json!({"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"});
    let pool = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool",
        "metadata": {"name": name, "uid": format!("uid-{name}")},
        "spec": {"template": {"spec": {"requirements": [], "nodeClassRef": class}}}});
    merged(pool, patch)
}

/// The EC2NodeClass `name` with the role `role`.
pub fn node_class(name: &str, patch: &Value) -> Ec2NodeClass {
    let class = json!({"apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass",
        "metadata": {"name": name, "uid": format!("uid-{name}")},
        "spec": {"role": "role", "amiSelectorTerms": [], "subnetSelectorTerms": [], "securityGroupSelectorTerms": []}});
    merged(class, patch)
}

/// The running on-demand instance `id`, an m5.large in the zone z, launched at `launched_at` ms with `token`.
pub fn instance(id: &str, token: &str, launched_at: i64) -> Instance {
    Instance {
        id: id.into(),
        provider_id: format!("aws:///z/{id}"),
        client_token: token.into(),
        node_claim: "c".into(),
        instance_type: "m5.large".into(),
        zone: "z".into(),
        capacity_type: CapacityType::OnDemand,
        reservation: None,
        partition: None,
        image_id: "ami-1".into(),
        launched_at: UnixMillis(launched_at),
        state: InstanceState::Running,
    }
}

/// An available on-demand offering in a zone.
pub fn offering(zone: &str, price: i64) -> Offering {
    Offering {
        zone: zone.into(),
        capacity_type: CapacityType::OnDemand,
        price: MicroUsd(price),
        available: true,
        left: None,
        labels: Arc::default(),
        risk_permille: 0,
    }
}

/// An instance type with the labels of a Linux machine and these resources.
pub fn instance_type(name: &str, resources: &[(&str, &str)], offerings: Vec<Offering>) -> InstanceType {
    let own = [(labels::INSTANCE_TYPE, name), (labels::ARCH, "amd64"), (labels::OS, "linux")];
    let quantities: BTreeMap<String, _> = resources
        .iter()
        .map(|(key, value)| {
            ((*key).to_owned(), k8s_openapi::apimachinery::pkg::api::resource::Quantity((*value).to_owned()))
        })
        .collect();
    let resources = Resources::from_map(&quantities).unwrap();
    InstanceType {
        name: name.into(),
        labels: own.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        capacity: resources.clone(),
        allocatable: resources,
        volume_limits: BTreeMap::new(),
        offerings,
    }
}

/// A catalog of m5.large (2 CPUs, 8 GiB) in the zone z.
pub fn catalog() -> Catalog {
    let resources = [("cpu", "2"), ("memory", "8Gi"), ("pods", "29")];
    let large = instance_type("m5.large", &resources, vec![offering("z", 96_000)]);
    Catalog { region: "us-east-1".into(), instance_types: vec![Arc::new(large)] }
}
