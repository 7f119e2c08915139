//! Index of NodeClaims by provider ID and by NodePool, and of leaving NodeClaims; updated with every change of a claim.

use std::collections::{BTreeSet, HashMap};

use stowage_api::NodeClaim;
use stowage_model::resources::Resources;

use crate::state::object_ext::{NodeClaimExt, ObjectExt};

/// Totals over the NodeClaims of a NodePool.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// Capacity of the claims that report it.
    pub capacity: Resources,
    /// Number of claims.
    pub count: i64,
    /// Names of the claims that report no capacity yet.
    pub unsized_claims: BTreeSet<String>,
}

/// The index. Leaving claims do not count toward the usage of their pool.
#[derive(Debug, Default)]
pub struct ClaimIndex {
    by_provider_id: HashMap<String, BTreeSet<String>>,
    /// Names of deleted claims and of claims marked for disruption.
    pub leaving: BTreeSet<String>,
    by_pool: HashMap<String, Usage>,
    /// Names of the claims of each pool, leaving ones included.
    names_by_pool: HashMap<String, BTreeSet<String>>,
}

impl ClaimIndex {
    /// Adds a claim that is not in the index.
    pub fn add(&mut self, name: &str, claim: &NodeClaim) {
        if let Some(id) = claim.provider_id() {
            self.by_provider_id.entry(id.to_owned()).or_default().insert(name.to_owned());
        }
        if let Some(pool) = claim.node_pool() {
            self.names_by_pool.entry(pool.to_owned()).or_default().insert(name.to_owned());
        }
        if claim.is_leaving() {
            self.leaving.insert(name.to_owned());
        } else if let Some(pool) = claim.node_pool() {
            let usage = self.by_pool.entry(pool.to_owned()).or_default();
            usage.count += 1;
            match reported_capacity(claim) {
                Some(capacity) => usage.capacity.add(&capacity),
                None => drop(usage.unsized_claims.insert(name.to_owned())),
            }
        }
    }

    /// Removes a claim; `claim` must be equal to the claim that was added.
    pub fn remove(&mut self, name: &str, claim: &NodeClaim) {
        if let Some(id) = claim.provider_id()
            && let Some(names) = self.by_provider_id.get_mut(id)
        {
            names.remove(name);
            if names.is_empty() {
                self.by_provider_id.remove(id);
            }
        }
        if let Some(pool) = claim.node_pool()
            && let Some(names) = self.names_by_pool.get_mut(pool)
        {
            names.remove(name);
            if names.is_empty() {
                self.names_by_pool.remove(pool);
            }
        }
        if !self.leaving.remove(name)
            && let Some(pool) = claim.node_pool()
            && let Some(usage) = self.by_pool.get_mut(pool)
        {
            usage.count -= 1;
            usage.unsized_claims.remove(name);
            if let Some(capacity) = reported_capacity(claim) {
                usage.capacity.sub(&capacity);
            }
            if usage.count == 0 {
                self.by_pool.remove(pool);
            }
        }
    }

    /// The claim with a provider ID.
    pub fn of_provider_id(&self, id: &str) -> Option<&str> {
        self.by_provider_id.get(id)?.last().map(String::as_str)
    }

    /// Every claim with a provider ID.
    pub fn all_of_provider_id(&self, id: &str) -> impl Iterator<Item = &String> {
        self.by_provider_id.get(id).into_iter().flatten()
    }

    /// Names of the claims of a pool, leaving ones included.
    pub fn of_pool(&self, pool: &str) -> impl Iterator<Item = &String> {
        self.names_by_pool.get(pool).into_iter().flatten()
    }

    /// Totals over the claims of a pool.
    pub fn usage(&self, pool: &str) -> Usage {
        self.by_pool.get(pool).cloned().unwrap_or_default()
    }
}

/// The capacity in a claim's status; zero when it can't be parsed, `None` when it is empty.
pub fn reported_capacity(claim: &NodeClaim) -> Option<Resources> {
    let capacity = claim.status.as_ref().map(|status| &status.capacity).filter(|capacity| !capacity.is_empty())?;
    Some(Resources::from_map(capacity).unwrap_or_default())
}
