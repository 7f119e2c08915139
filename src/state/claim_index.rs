//! NodeClaims by what a snapshot asks of all of them, kept up with every change, so that it need not look at each.

use std::collections::{BTreeSet, HashMap};

use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::model::labels;
use crate::model::resources::Resources;
use crate::state::snapshot::is_leaving;

/// What the NodeClaims of a NodePool have in sum.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// Capacity, of those that report one.
    pub capacity: Resources,
    /// How many there are.
    pub count: i64,
    /// Names of those that report no capacity yet.
    pub unsized_claims: BTreeSet<String>,
}

/// The index. Claims on their way out are no part of their pool's usage.
#[derive(Debug, Default)]
pub struct ClaimIndex {
    by_provider_id: HashMap<String, BTreeSet<String>>,
    /// Claims whose node is about to go.
    pub leaving: BTreeSet<String>,
    by_pool: HashMap<String, Usage>,
}

impl ClaimIndex {
    /// Takes in a claim that it doesn't know.
    pub fn add(&mut self, name: &str, claim: &NodeClaim) {
        if let Some(id) = provider_id(claim) {
            self.by_provider_id.entry(id.to_owned()).or_default().insert(name.to_owned());
        }
        if is_leaving(claim) {
            self.leaving.insert(name.to_owned());
        } else if let Some(pool) = claim.labels().get(labels::NODE_POOL) {
            let usage = self.by_pool.entry(pool.clone()).or_default();
            usage.count += 1;
            match reported(claim) {
                Some(capacity) => usage.capacity.add(&capacity),
                None => drop(usage.unsized_claims.insert(name.to_owned())),
            }
        }
    }

    /// Forgets a claim, given as it was added.
    pub fn remove(&mut self, name: &str, claim: &NodeClaim) {
        if let Some(id) = provider_id(claim)
            && let Some(names) = self.by_provider_id.get_mut(id)
        {
            names.remove(name);
            if names.is_empty() {
                self.by_provider_id.remove(id);
            }
        }
        if !self.leaving.remove(name)
            && let Some(pool) = claim.labels().get(labels::NODE_POOL)
            && let Some(usage) = self.by_pool.get_mut(pool)
        {
            usage.count -= 1;
            usage.unsized_claims.remove(name);
            if let Some(capacity) = reported(claim) {
                usage.capacity.sub(&capacity);
            }
            if usage.count == 0 {
                self.by_pool.remove(pool);
            }
        }
    }

    /// The claim of this provider id.
    pub fn of_provider_id(&self, id: &str) -> Option<&str> {
        self.by_provider_id.get(id)?.last().map(String::as_str)
    }

    /// What the claims of a pool have in sum.
    pub fn usage(&self, pool: &str) -> Usage {
        self.by_pool.get(pool).cloned().unwrap_or_default()
    }
}

fn provider_id(claim: &NodeClaim) -> Option<&str> {
    claim.status.as_ref()?.provider_id.as_deref()
}

/// The capacity that a claim reports; one that can't be read is none at all.
pub fn reported(claim: &NodeClaim) -> Option<Resources> {
    let capacity = claim.status.as_ref().map(|status| &status.capacity).filter(|capacity| !capacity.is_empty())?;
    Some(Resources::from_map(capacity).unwrap_or_default())
}
