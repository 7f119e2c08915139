//! The drift hash of an EC2NodeClass.

use crate::api::{Ec2NodeClass, hash};
use crate::controllers::drift_hash::DriftHash;
use crate::model::labels;

/// The hash of the present spec, for a cloud whose instances trust `ca`.
pub fn drift_hash(class: &Ec2NodeClass, ca: &str) -> DriftHash {
    DriftHash {
        key: labels::EC2_NODE_CLASS_HASH,
        value: hash::node_class(&class.spec, ca),
        version_key: labels::EC2_NODE_CLASS_HASH_VERSION,
        version: hash::NODE_CLASS_VERSION,
    }
}

/// Whether the hash on a class is that of its present spec.
pub fn is_up_to_date(class: &Ec2NodeClass, ca: &str) -> bool {
    drift_hash(class, ca).is_on(class)
}
