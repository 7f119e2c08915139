//! What the last launches made their templates of, so that these are there before the next launch asks. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use kube::ResourceExt;
use kube::api::ObjectMeta;

use crate::api::{Ec2NodeClass, NodeClaim, NodePool};
use crate::cloud::LaunchRequest;
use crate::cloud::ec2::launch::request::TemplateInputs;
use crate::cloud::ec2::launch::select::{Candidate, Choice};
use crate::model::offering::{CapacityType, Catalog};
use crate::sync::lock;

/// Shapes that are kept of one NodePool's launches with one class. The list of instance types is no part of a template, so that
/// few shapes want the templates of many launches.
const MOST_OF_POOL: usize = 4;
/// Templates that all shapes together want: a fifth of what EC2 allows a region.
const MOST_TEMPLATES: usize = 1_000;
/// How long a shape is kept after its last launch, milliseconds.
const KEPT_MS: i64 = 3_600_000;

/// What templates of a launch are made of besides their [`TemplateInputs`].
#[derive(Clone, Debug)]
pub struct LaunchShape {
    /// The request: labels, taints, names of pool and class.
    pub request: LaunchRequest,
    /// Labels and spec of the claim.
    pub claim: NodeClaim,
    capacity_type: CapacityType,
    types: BTreeSet<String>,
}

impl LaunchShape {
    /// The shape of a launch; `None` where it goes into a capacity reservation, which has templates of its own.
    pub fn of(request: &LaunchRequest, claim: &NodeClaim, choice: &Choice) -> Option<Self> {
        if choice.reservation.is_some() {
            return None;
        }
        let request = LaunchRequest {
            client_token: String::new(),
            node_claim: String::new(),
            node_pool: request.node_pool.clone(),
            node_class: request.node_class.clone(),
            overrides: vec![],
            labels: request.labels.clone(),
            taints: request.taints.clone(),
            details: None,
        };
        let metadata = ObjectMeta { labels: claim.metadata.labels.clone(), ..ObjectMeta::default() };
        let claim = NodeClaim { metadata, spec: claim.spec.clone(), status: None };
        let types = choice.candidates.iter().map(|candidate| candidate.instance_type.name.to_string()).collect();
        Some(Self { request, claim, capacity_type: choice.capacity_type, types })
    }

    /// What would be launched by a catalog, as far as templates depend on it: the zones don't matter.
    pub fn choice(&self, catalog: &Catalog) -> Choice {
        let known = catalog.instance_types.iter().filter(|known| self.types.contains(&*known.name));
        let candidate = |known| Candidate { instance_type: Arc::clone(known), zones: BTreeMap::new() };
        Choice { capacity_type: self.capacity_type, reservation: None, candidates: known.map(candidate).collect() }
    }

    fn pool(&self) -> (&str, &str) {
        (&self.request.node_pool, &self.request.node_class)
    }
}

/// A shape and the templates that it wants.
#[derive(Debug)]
pub struct Kept {
    /// The shape.
    pub shape: LaunchShape,
    /// Its class, as last seen.
    pub class: Arc<Ec2NodeClass>,
    /// What the templates were made of.
    pub basis: TemplateInputs,
    /// Names of the templates. Those of two shapes of a pool and a class differ.
    pub names: BTreeSet<String>,
    /// When something was last launched, milliseconds since the epoch.
    pub used_ms: i64,
}

/// The shapes of the launches of the last hour.
#[derive(Debug, Default)]
pub struct LaunchShapes {
    kept: Mutex<Vec<Kept>>,
}

impl LaunchShapes {
    fn kept(&self) -> MutexGuard<'_, Vec<Kept>> {
        lock(&self.kept)
    }

    /// Takes a shape in, instead of one that wants the same templates. Where there are too many, those go that were not launched
    /// for longest.
    pub fn keep(&self, new: Kept) {
        let mut kept = self.kept();
        let same = |one: &&mut Kept| one.shape.pool() == new.shape.pool() && one.names == new.names;
        if let Some(known) = kept.iter_mut().find(same) {
            if known.used_ms <= new.used_ms {
                *known = new;
            }
            return;
        }
        let pool = new.shape.request.clone();
        kept.push(new);
        let of_pool = |one: &Kept| one.shape.pool() == (&*pool.node_pool, &*pool.node_class);
        if kept.iter().filter(|one| of_pool(one)).count() > MOST_OF_POOL {
            remove_oldest(&mut kept, of_pool);
        }
        while kept.iter().map(|one| one.names.len()).sum::<usize>() > MOST_TEMPLATES {
            remove_oldest(&mut kept, |_| true);
        }
    }

    /// Takes out the shapes of the last hour, and forgets older ones.
    pub fn take(&self, now_ms: i64) -> Vec<Kept> {
        let mut taken = std::mem::take(&mut *self.kept());
        taken.retain(|one| now_ms - one.used_ms < KEPT_MS);
        taken
    }

    /// Takes in how the classes are now. Shapes whose class or pool is gone or going, or has nothing to do with the other any more,
    /// are forgotten.
    pub fn observe(&self, classes: &[Arc<Ec2NodeClass>], pools: &[Arc<NodePool>]) {
        self.kept().retain_mut(|one| {
            let (pool, class) = one.shape.pool();
            let has_pool = pools.iter().any(|other| {
                let stays = other.metadata.deletion_timestamp.is_none();
                stays && other.name_any() == pool && other.spec.template.spec.node_class_ref.name == class
            });
            let stays =
                |other: &&Arc<Ec2NodeClass>| other.metadata.deletion_timestamp.is_none() && other.name_any() == class;
            let Some(class) = classes.iter().find(stays).filter(|_| has_pool) else { return false };
            one.class = Arc::clone(class);
            true
        });
    }
}

fn remove_oldest(kept: &mut Vec<Kept>, of: impl Fn(&Kept) -> bool) {
    let oldest = kept.iter().enumerate().filter(|(_, one)| of(one)).min_by_key(|(_, one)| one.used_ms);
    if let Some(index) = oldest.map(|(index, _)| index) {
        kept.remove(index);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::LazyLock;

    use serde_json::json;

    use super::*;
    use crate::cloud::ec2::launch::request::tests::{claim, class, facts, request};
    use crate::cloud::ec2::launch::select::choose;

    /// A launch of m5.large. The catalog behind it takes long to make.
    static LAUNCH: LazyLock<LaunchRequest> =
        LazyLock::new(|| request(class(json!({})), claim("2026-01-01T00:00:00Z", json!({})), &["m5.large"]));

    /// A shape of a pool that wants so many templates of its own.
    pub fn kept(pool: &str, own: &str, templates: usize, used_ms: i64) -> Kept {
        let request = LAUNCH.clone();
        let details = request.details.clone().unwrap();
        let choice = choose(&request.overrides, &details.catalog, true).unwrap();
        let request = LaunchRequest { node_pool: pool.to_owned(), ..request };
        let class = Arc::clone(&details.class);
        let basis = TemplateInputs { class: Arc::clone(&class), cluster: Arc::new(facts()), group: None };
        let names = (0..templates).map(|number| format!("{pool}/{own}/{number}")).collect();
        Kept { shape: LaunchShape::of(&request, &details.claim, &choice).unwrap(), class, basis, names, used_ms }
    }

    fn firsts(shapes: &LaunchShapes, now_ms: i64) -> Vec<String> {
        shapes.take(now_ms).into_iter().filter_map(|one| one.names.into_iter().next()).collect()
    }

    #[test]
    fn no_more_templates_are_wanted_than_leave_the_region_most_of_its_quota() {
        let shapes = LaunchShapes::default();
        for (pool, used_ms) in [("a", 3), ("b", 1), ("c", 2), ("d", 4)] {
            shapes.keep(kept(pool, "x", 300, used_ms));
        }
        assert_eq!(firsts(&shapes, 5), ["a/x/0", "c/x/0", "d/x/0"], "the one that was not launched for longest goes");
    }

    #[test]
    fn shapes_that_want_the_same_are_one_that_was_used_last() {
        let shapes = LaunchShapes::default();
        for used_ms in [1, 3, 2] {
            shapes.keep(kept("a", "x", 2, used_ms));
        }
        let taken = shapes.take(KEPT_MS + 2);
        assert_eq!(taken.iter().map(|one| one.used_ms).collect::<Vec<_>>(), [3]);
        for one in taken {
            shapes.keep(one);
        }
        assert!(shapes.take(KEPT_MS + 3).is_empty(), "an hour is over");
    }

    #[test]
    fn a_pool_has_four_shapes_whatever_others_have() {
        let shapes = LaunchShapes::default();
        shapes.keep(kept("b", "x", 1, 0));
        for (own, used_ms) in [("v", 2), ("w", 1), ("x", 3), ("y", 4), ("z", 5)] {
            shapes.keep(kept("a", own, 1, used_ms));
        }
        assert_eq!(firsts(&shapes, 6), ["b/x/0", "a/v/0", "a/x/0", "a/y/0", "a/z/0"]);
    }
}
