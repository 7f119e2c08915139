//! The shapes of recent launches, from which templates are created before the next launch needs them. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kube::ResourceExt;
use kube::api::ObjectMeta;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::offering::{CapacityType, Catalog};
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::LaunchRequest;
use crate::ec2::launch::request::TemplateInputs;
use crate::ec2::launch::select::{Choice, TypeOffer};

/// Maximum shapes of a NodePool and a class. Templates do not contain the list of instance types, so that few shapes cover the
/// templates of many launches.
const MAX_SHAPES_OF_POOL: usize = 4;
/// Maximum templates of all shapes: a fifth of the quota of a region.
const MAX_TEMPLATES: usize = 1_000;
/// How long a shape is kept after its last launch.
const RETENTION: Duration = Duration::from_hours(1);

/// The inputs of the templates of a launch except the [`TemplateInputs`].
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
    /// The shape of a launch; `None` for a launch into a capacity reservation, whose template names the reservation.
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

    /// The offerings of `catalog` for this shape, as far as templates depend on them: without zones.
    pub fn choice(&self, catalog: &Catalog) -> Choice {
        let known = catalog.instance_types.iter().filter(|known| self.types.contains(&*known.name));
        let candidate = |known| TypeOffer { instance_type: Arc::clone(known), zones: BTreeMap::new() };
        Choice { capacity_type: self.capacity_type, reservation: None, candidates: known.map(candidate).collect() }
    }

    fn pool(&self) -> (&str, &str) {
        (&self.request.node_pool, &self.request.node_class)
    }
}

/// A shape and its templates.
#[derive(Debug)]
pub struct RecentShape {
    pub shape: LaunchShape,
    /// The class as last observed.
    pub class: Arc<Ec2NodeClass>,
    /// The inputs of the templates.
    pub template_inputs: TemplateInputs,
    /// Names of the templates. Two shapes of the same pool and class differ in them.
    pub names: BTreeSet<String>,
    /// The last launch.
    pub used_at: UnixMillis,
}

/// The shapes of the launches of the last hour.
#[derive(Debug, Default)]
pub struct RecentShapes {
    kept: Mutex<Vec<RecentShape>>,
}

impl RecentShapes {
    fn kept(&self) -> MutexGuard<'_, Vec<RecentShape>> {
        lock(&self.kept)
    }

    /// Adds a shape, or replaces the shape with the same templates. Evicts the least recently used shapes over the limits.
    pub fn keep(&self, new: RecentShape) {
        let mut kept = self.kept();
        let same = |one: &&mut RecentShape| one.shape.pool() == new.shape.pool() && one.names == new.names;
        if let Some(known) = kept.iter_mut().find(same) {
            if known.used_at <= new.used_at {
                *known = new;
            }
            return;
        }
        let pool = new.shape.request.clone();
        kept.push(new);
        let of_pool = |one: &RecentShape| one.shape.pool() == (&*pool.node_pool, &*pool.node_class);
        if kept.iter().filter(|one| of_pool(one)).count() > MAX_SHAPES_OF_POOL {
            remove_oldest(&mut kept, of_pool);
        }
        while kept.iter().map(|one| one.names.len()).sum::<usize>() > MAX_TEMPLATES {
            remove_oldest(&mut kept, |_| true);
        }
    }

    /// Removes all shapes and returns the shapes of the last hour.
    pub fn take(&self, now: UnixMillis) -> Vec<RecentShape> {
        let mut taken = std::mem::take(&mut *self.kept());
        taken.retain(|one| !one.used_at.is_older_than(RETENTION, now));
        taken
    }

    /// Updates the classes of the shapes. Deletes shapes whose class or pool no longer exists, is being deleted, or no longer
    /// references the other.
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

fn remove_oldest(kept: &mut Vec<RecentShape>, of: impl Fn(&RecentShape) -> bool) {
    let oldest = kept.iter().enumerate().filter(|(_, one)| of(one)).min_by_key(|(_, one)| one.used_at);
    if let Some(index) = oldest.map(|(index, _)| index) {
        kept.remove(index);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::LazyLock;

    use serde_json::json;

    use super::*;
    use crate::ec2::launch::request::tests::{claim, class, facts, request};
    use crate::ec2::launch::select::choose;

    /// A launch of m5.large, shared because its catalog is slow to build.
    static LAUNCH: LazyLock<LaunchRequest> =
        LazyLock::new(|| request(class(json!({})), claim("2026-01-01T00:00:00Z", json!({})), &["m5.large"]));

    /// A shape of a pool with this number of templates.
    pub fn recent_shape(pool: &str, own: &str, templates: usize, used_at: UnixMillis) -> RecentShape {
        let request = LAUNCH.clone();
        let details = request.details.clone().unwrap();
        let choice = choose(&request.overrides, &details.catalog, true).unwrap();
        let request = LaunchRequest { node_pool: pool.to_owned(), ..request };
        let class = Arc::clone(&details.class);
        let cluster = Arc::new(facts());
        let template_inputs = TemplateInputs { class: Arc::clone(&class), cluster, placement_group: None };
        let names = (0..templates).map(|number| format!("{pool}/{own}/{number}")).collect();
        let shape = LaunchShape::of(&request, &details.claim, &choice).unwrap();
        RecentShape { shape, class, template_inputs, names, used_at }
    }

    fn firsts(shapes: &RecentShapes, now: UnixMillis) -> Vec<String> {
        shapes.take(now).into_iter().filter_map(|one| one.names.into_iter().next()).collect()
    }

    #[test]
    fn shapes_never_use_most_of_the_template_quota() {
        let shapes = RecentShapes::default();
        for (pool, used_at) in [("a", 3), ("b", 1), ("c", 2), ("d", 4)] {
            shapes.keep(recent_shape(pool, "x", 300, UnixMillis(used_at)));
        }
        assert_eq!(
            firsts(&shapes, UnixMillis(5)),
            ["a/x/0", "c/x/0", "d/x/0"],
            "the least recently used shape is evicted"
        );
    }

    #[test]
    fn shapes_with_equal_templates_are_merged() {
        let shapes = RecentShapes::default();
        for used_at in [1, 3, 2].map(UnixMillis) {
            shapes.keep(recent_shape("a", "x", 2, used_at));
        }
        let taken = shapes.take(UnixMillis(2) + RETENTION);
        assert_eq!(taken.iter().map(|one| one.used_at.0).collect::<Vec<_>>(), [3]);
        for one in taken {
            shapes.keep(one);
        }
        assert!(shapes.take(UnixMillis(3) + RETENTION).is_empty(), "expired after an hour");
    }

    #[test]
    fn a_pool_has_at_most_four_shapes() {
        let shapes = RecentShapes::default();
        shapes.keep(recent_shape("b", "x", 1, UnixMillis(0)));
        for (own, used_at) in [("v", 2), ("w", 1), ("x", 3), ("y", 4), ("z", 5)] {
            shapes.keep(recent_shape("a", own, 1, UnixMillis(used_at)));
        }
        assert_eq!(firsts(&shapes, UnixMillis(6)), ["b/x/0", "a/v/0", "a/x/0", "a/y/0", "a/z/0"]);
    }
}
