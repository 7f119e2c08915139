//! Drift hashes: annotations of a NodePool or EC2NodeClass that are copied to its NodeClaims and compared later.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt;
use serde_json::{Value, json};
use stowage_api::conditions::DRIFTED;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool, hash};
use stowage_model::labels;

use crate::state::object_ext::NodeClaimExt;

/// A hash and the version of the hash algorithm, with their annotation keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriftHash {
    pub key: &'static str,
    pub value: String,
    pub version_key: &'static str,
    pub version: &'static str,
}

impl DriftHash {
    /// The hash of the present template of a pool.
    pub fn of_pool(pool: &NodePool) -> Self {
        Self {
            key: labels::NODE_POOL_HASH,
            value: hash::node_pool(&pool.spec),
            version_key: labels::NODE_POOL_HASH_VERSION,
            version: hash::NODE_POOL_VERSION,
        }
    }

    /// The hash of the present spec of a class, for a cloud whose instances trust `ca`. The class keeps the version of its hash if it is
    /// known.
    pub fn of_class(class: &Ec2NodeClass, ca: &str) -> Self {
        let annotation = class.annotations().get(labels::EC2_NODE_CLASS_HASH_VERSION);
        let version = hash::NodeClassVersion::kept(annotation.map(String::as_str));
        Self {
            key: labels::EC2_NODE_CLASS_HASH,
            value: hash::node_class(&class.spec, version, ca),
            version_key: labels::EC2_NODE_CLASS_HASH_VERSION,
            version: version.as_str(),
        }
    }

    /// The annotations.
    pub fn annotations(&self) -> BTreeMap<&'static str, &str> {
        BTreeMap::from([(self.key, &*self.value), (self.version_key, self.version)])
    }

    /// Whether an object has the annotations.
    pub fn is_on(&self, object: &impl ResourceExt) -> bool {
        self.annotations().iter().all(|(key, value)| object.annotations().get(*key).is_some_and(|own| own == value))
    }

    /// Whether an object's hash has the present version.
    pub fn has_version(&self, object: &impl ResourceExt) -> bool {
        object.annotations().get(self.version_key).is_some_and(|version| version == self.version)
    }

    /// Patches for claims whose hash has another version than the owner's will have, by name: they get a hash of that version, so that
    /// another hash algorithm drifts no node. A drifted claim keeps its hash. Claims without a version get one when the owner's
    /// version changes, as in Karpenter; otherwise they are being launched.
    pub fn claim_patches(&self, owner: &impl ResourceExt, claims: &[Arc<NodeClaim>]) -> Vec<(String, Value)> {
        let owner_changes = !self.has_version(owner);
        let outdated = claims.iter().filter(|claim| {
            let version = claim.annotations().get(self.version_key);
            version.map_or(owner_changes, |version| version != self.version)
        });
        let patches = outdated.map(|claim| {
            let mut annotations = self.annotations();
            if claim.condition(DRIFTED).is_some() {
                annotations.remove(self.key);
            }
            (claim.name_any(), json!({"metadata": {"annotations": annotations}}))
        });
        patches.collect()
    }
}

#[cfg(test)]
mod tests {
    use stowage_test_objects as objects;

    use super::*;

    const KEY: &str = "example.com/hash";
    const VERSION_KEY: &str = "example.com/hash-version";

    fn claim(name: &str, version: &str, drifted: bool) -> Arc<NodeClaim> {
        let conditions = objects::conditions_true(if drifted { &["Drifted"] } else { &[] });
        let metadata = json!({"annotations": {(KEY): "1", (VERSION_KEY): version}});
        Arc::new(objects::claim(name, &json!({"metadata": metadata, "status": {"conditions": conditions}})))
    }

    #[test]
    fn a_class_keeps_a_version_that_a_release_of_karpenter_writes() {
        let of = |annotations: Value| {
            let class = objects::node_class("c", &json!({"metadata": {"annotations": annotations}}));
            let hash = DriftHash::of_class(&class, "ca");
            (hash.version, hash.value)
        };
        let version = |version: &str| of(json!({(labels::EC2_NODE_CLASS_HASH_VERSION): version}));
        let (v5, v6) = (version("v5"), version("v6"));
        assert_eq!((v5.0, v6.0), ("v5", "v6"));
        assert_ne!(v5.1, v6.1);
        for other in [of(json!({})), version("v4"), version("v7")] {
            assert_eq!(other, v6);
        }
    }

    #[test]
    fn c31_a_new_version_of_the_hash_drifts_no_node() {
        let hash = DriftHash { key: KEY, value: "2".into(), version_key: VERSION_KEY, version: "v2" };
        let claims = [claim("old", "v1", false), claim("drifted", "v1", true), claim("current", "v2", false)];
        assert_eq!(
            hash.claim_patches(&*claim("owner", "v1", false), &claims),
            [
                ("old".to_owned(), json!({"metadata": {"annotations": {(KEY): "2", (VERSION_KEY): "v2"}}})),
                ("drifted".to_owned(), json!({"metadata": {"annotations": {(VERSION_KEY): "v2"}}})),
            ]
        );
        // The owner was patched, and the process ended before all claims were: the rest follow.
        assert_eq!(hash.claim_patches(&*claim("owner", "v2", false), &claims).len(), 2);
        let unversioned = [Arc::new(objects::claim("new", &json!({})))];
        assert_eq!(hash.claim_patches(&*claim("owner", "v1", false), &unversioned).len(), 1);
        assert!(hash.claim_patches(&*claim("owner", "v2", false), &unversioned).is_empty(), "it is being launched");
        assert!(!hash.is_on(&*claim("owner", "v2", false)), "another hash of the same version");
    }
}
