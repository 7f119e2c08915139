//! Surge before evict: what a pod says of it. Such a pod leaves its ReplicaSet, which creates its successor, and is evicted when the successor is ready.

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use stowage_model::labels;

/// A pod of a ReplicaSet that surges. When it leaves the ReplicaSet, this becomes its annotation [`labels::SURGED`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surge {
    /// Name and UID of the ReplicaSet.
    pub replica_set: String,
    pub uid: String,
    /// The value of the label [`labels::POD_TEMPLATE_HASH`]: without it, the pod does not belong to the ReplicaSet.
    pub hash: String,
    /// How many pods of the ReplicaSet were ready when it left, itself included; `None` before. A number and no time: clocks differ.
    pub ready: Option<usize>,
}

impl Surge {
    /// `None` for a pod that does not surge: its owner does not ask for it, or it belongs to no ReplicaSet of a Deployment.
    pub fn of(pod: &Pod) -> Option<Self> {
        let meta = &pod.metadata;
        let annotation = |key: &str| meta.annotations.as_ref()?.get(key);
        let hash = meta.labels.as_ref().and_then(|labels| labels.get(labels::POD_TEMPLATE_HASH));
        if let Some(text) = annotation(labels::SURGED) {
            return serde_json::from_str(text).ok().filter(|surge: &Self| surge.ready.is_some() && hash.is_none());
        }
        let owner = meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))?;
        let is_wanted = annotation(labels::SURGE).is_some_and(|value| value == "true") && owner.kind == "ReplicaSet";
        let hash = hash.filter(|_| is_wanted)?.clone();
        Some(Self { replica_set: owner.name.clone(), uid: owner.uid.clone(), hash, ready: None })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;

    #[test]
    fn a_pod_of_a_deployment_surges_if_its_owner_asks_for_it() {
        let of_kind = |kind: &str| json!([{"apiVersion": "apps/v1", "kind": kind, "name": "web-7d", "uid": "rs", "controller": true}]);
        let asked = json!({(labels::SURGE): "true"});
        let hash = json!({(labels::POD_TEMPLATE_HASH): "7d"});
        let left = r#"{"replica_set": "web-7d", "uid": "rs", "hash": "7d", "ready": 5}"#;
        let surge = |ready| Some(Surge { replica_set: "web-7d".into(), uid: "rs".into(), hash: "7d".into(), ready });
        for (case, annotations, labels, owners, expected) in [
            ("asked", asked.clone(), hash.clone(), of_kind("ReplicaSet"), surge(None)),
            ("not asked", json!({}), hash.clone(), of_kind("ReplicaSet"), None),
            ("refused", json!({(labels::SURGE): "false"}), hash.clone(), of_kind("ReplicaSet"), None),
            ("of a StatefulSet", asked.clone(), hash.clone(), of_kind("StatefulSet"), None),
            ("of a ReplicaSet without a Deployment", asked.clone(), json!({}), of_kind("ReplicaSet"), None),
            ("without a controller", asked, hash.clone(), json!([]), None),
            ("it left", json!({(labels::SURGED): left}), json!({}), json!([]), surge(Some(5))),
            ("it is back", json!({(labels::SURGED): left}), hash, json!([]), None),
            ("not understood", json!({(labels::SURGED): "yes"}), json!({}), json!([]), None),
            (
                "how many were ready is not known",
                json!({(labels::SURGED): left.replace('5', "null")}),
                json!({}),
                json!([]),
                None,
            ),
        ] {
            let meta: Value = json!({"annotations": annotations, "labels": labels, "ownerReferences": owners});
            assert_eq!(Surge::of(&objects::pod("a", &json!({"metadata": meta}))), expected, "{case}");
        }
    }
}
