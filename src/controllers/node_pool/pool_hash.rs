//! The drift hash of a NodePool.

use crate::api::{NodePool, hash};
use crate::controllers::drift_hash::DriftHash;
use crate::model::labels;

/// The hash of the present template.
pub fn drift_hash(pool: &NodePool) -> DriftHash {
    DriftHash {
        key: labels::NODE_POOL_HASH,
        value: hash::node_pool(&pool.spec),
        version_key: labels::NODE_POOL_HASH_VERSION,
        version: hash::NODE_POOL_VERSION,
    }
}

/// Whether the hash on a pool is that of its present template.
pub fn is_up_to_date(pool: &NodePool) -> bool {
    drift_hash(pool).is_on(pool)
}
