//! NodePools as the planner reads them.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use stowage_api::parse_requirements;
use stowage_api::{NodePool, Requirement};
use stowage_model::labels;
use stowage_model::labels::normalize_key;
use stowage_model::offering::Catalog;
use stowage_model::requirement::RequirementError;
use stowage_model::resources::{ResourceError, Resources};

use crate::input::pod::Labels;

/// A NodePool with its catalog.
#[derive(Clone, Debug)]
pub struct Pool {
    pub name: Arc<str>,
    /// Higher first; an absent weight is 0.
    pub weight: i32,
    /// Template labels, with `karpenter.sh/nodepool` and the node class label.
    pub labels: Labels,
    /// Permanent taints.
    pub taints: Vec<Taint>,
    /// Requirements of the template.
    pub requirements: Vec<Requirement>,
    /// Upper bound on the pool's total capacity by resource; a resource that `limited` does not name is unbounded.
    pub limits: Option<Resources>,
    /// `limits.nodes`.
    pub node_limit: Option<i64>,
    /// The resources that `limits` names: a named zero is a bound of zero.
    pub limited: Vec<Arc<str>>,
    /// Capacity of the pool's nodes, launching nodes included, nodes being deleted not.
    pub usage: Resources,
    /// Nodes of the pool, launching nodes included.
    pub node_count: i64,
    pub catalog: Arc<Catalog>,
}

/// A NodePool that is excluded from planning.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("NodePool {pool}: {problem}")]
pub struct PoolError {
    /// Name of the NodePool.
    pub pool: String,
    /// Field and error.
    #[source]
    pub problem: PoolProblem,
}

/// The error of a NodePool.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolProblem {
    /// No name.
    #[error("metadata.name is missing")]
    Nameless,
    /// An operator or its values.
    #[error("spec.template.spec.requirements: {0}")]
    Requirement(RequirementError),
    /// No value satisfies all requirements on a key.
    #[error(
        "spec.template.spec.requirements: the requirements on {0} contradict each other, no value satisfies all of them"
    )]
    Contradiction(String),
    /// A label that only Stowage or the kubelet may set.
    #[error("{field}: label {key} is restricted, remove it")]
    Restricted {
        /// Field path.
        field: &'static str,
        /// Label key.
        key: String,
    },
    /// A limit.
    #[error("spec.limits: resource {}: {}", .0.resource, .0.source)]
    Limits(ResourceError),
}

impl Pool {
    /// Parses a NodePool. `usage` is the capacity of its nodes and `node_count` their number, launching nodes included, nodes being deleted
    /// not.
    ///
    /// # Errors
    /// An invalid requirement or limit, requirements that contradict each other, a restricted label.
    pub fn new(
        node_pool: &NodePool,
        catalog: Arc<Catalog>,
        usage: Resources,
        node_count: i64,
    ) -> Result<Self, PoolError> {
        let name = node_pool.metadata.name.clone().unwrap_or_default();
        Self::read(&name, node_pool, catalog, usage, node_count).map_err(|problem| PoolError { pool: name, problem })
    }

    fn read(
        name: &str,
        node_pool: &NodePool,
        catalog: Arc<Catalog>,
        usage: Resources,
        node_count: i64,
    ) -> Result<Self, PoolProblem> {
        if name.is_empty() {
            return Err(PoolProblem::Nameless);
        }
        let template = &node_pool.spec.template;
        let mut node_labels = Labels::new();
        for (key, value) in template.metadata.labels.iter().flatten() {
            if restricted(key) {
                return Err(PoolProblem::Restricted { field: "spec.template.metadata.labels", key: key.clone() });
            }
            node_labels.insert(normalize_key(key).to_owned(), value.clone());
        }
        node_labels.insert(labels::NODE_POOL.to_owned(), name.to_owned());
        let class_ref = &template.spec.node_class_ref;
        if !class_ref.kind.is_empty() {
            let key = format!("{}/{}", class_ref.group, class_ref.kind.to_lowercase());
            node_labels.insert(key, class_ref.name.clone());
        }
        let requirements: Vec<Requirement> = template
            .spec
            .requirements
            .iter()
            .map(|r| Requirement { key: normalize_key(&r.key).to_owned(), ..r.clone() })
            .collect();
        for r in &requirements {
            if restricted(&r.key) {
                let field = "spec.template.spec.requirements";
                return Err(PoolProblem::Restricted { field, key: r.key.clone() });
            }
        }
        let merged = parse_requirements(&requirements).map_err(PoolProblem::Requirement)?;
        if let Some(key) = merged.contradiction() {
            return Err(PoolProblem::Contradiction(key.to_owned()));
        }
        for (key, set) in merged.iter() {
            if node_labels.get(key.as_ref()).is_some_and(|value| !set.contains(value)) {
                return Err(PoolProblem::Contradiction(key.to_string()));
            }
        }
        let limits = node_pool.spec.limits.as_ref();
        let mut bounds = limits.map(Resources::from_map).transpose().map_err(PoolProblem::Limits)?;
        let node_limit = bounds.as_mut().filter(|_| limits.is_some_and(|l| l.contains_key("nodes"))).map(|bounds| {
            let nodes = bounds.get("nodes");
            bounds.set("nodes", 0);
            nodes
        });
        Ok(Self {
            name: Arc::from(name),
            weight: node_pool.spec.weight.unwrap_or(0),
            labels: node_labels,
            taints: template.spec.taints.clone().unwrap_or_default(),
            requirements,
            limits: bounds,
            node_limit,
            limited: limits
                .iter()
                .flat_map(|l| l.keys())
                .filter(|key| *key != "nodes")
                .map(|key| Arc::from(key.as_str()))
                .collect(),
            usage,
            node_count,
            catalog,
        })
    }
}

/// Labels a NodePool may not set: the host name and everything under `karpenter.sh` but the capacity type
/// (Karpenter core reference 1.3).
fn restricted(key: &str) -> bool {
    let domain = key.split_once('/').map_or("", |(domain, _)| domain);
    key == labels::HOSTNAME
        || (key != labels::CAPACITY_TYPE && (domain == "karpenter.sh" || domain.ends_with(".karpenter.sh")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(spec: Value) -> Result<Pool, PoolError> {
        let mut object = json!({"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "p"}, "spec": {
            "template": {"spec": {"requirements": [], "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "c"}}}}});
        let merge = object["spec"].as_object_mut().unwrap();
        merge.extend(spec.as_object().unwrap().clone());
        Pool::new(&serde_json::from_value(object).unwrap(), Arc::default(), Resources::default(), 0)
    }

    fn template(metadata: Value, requirements: Value) -> Value {
        json!({"template": {"metadata": metadata, "spec": {"requirements": requirements,
            "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "c"}}}})
    }

    #[test]
    fn a_pool_carries_its_own_labels_and_limits() {
        let pool = read(json!({"limits": {"cpu": "10", "memory": "0", "nodes": "3"}, "weight": 7})).unwrap();
        assert_eq!(pool.labels[labels::NODE_POOL], "p");
        assert_eq!(pool.labels[labels::EC2_NODE_CLASS], "c");
        assert_eq!((pool.weight, pool.node_limit), (7, Some(3)));
        assert_eq!(pool.limits.as_ref().unwrap().cpu.0, 10_000);
        assert_eq!(pool.limited, [Arc::from("cpu"), Arc::from("memory")]);
    }

    #[test]
    fn b10_a_restricted_label_is_rejected() {
        for (metadata, requirements, want) in [
            (json!({"labels": {"kubernetes.io/hostname": "h"}}), json!([]), "kubernetes.io/hostname"),
            (json!({"labels": {"karpenter.sh/nodepool": "x"}}), json!([]), "karpenter.sh/nodepool"),
            (json!({}), json!([{"key": "karpenter.sh/x", "operator": "Exists"}]), "karpenter.sh/x"),
        ] {
            let error = read(template(metadata, requirements)).unwrap_err().to_string();
            assert!(error.contains(want) && error.contains("restricted") && error.contains("NodePool p"), "{error}");
        }
        assert!(read(template(json!({"labels": {"mykarpenter.sh/x": "1"}}), json!([]))).is_ok());
    }

    #[test]
    fn b01_contradictory_requirements_are_an_error_with_the_key() {
        let arch =
            |operator: &str| json!({"key": "beta.kubernetes.io/arch", "operator": operator, "values": ["arm64"]});
        let error = read(template(json!({}), json!([arch("In"), arch("NotIn")]))).unwrap_err().to_string();
        assert!(error.contains("kubernetes.io/arch"), "{error}");
        let label =
            template(json!({"labels": {"team": "a"}}), json!([{"key": "team", "operator": "In", "values": ["b"]}]));
        assert!(read(label).unwrap_err().to_string().contains("team"));
    }
}
