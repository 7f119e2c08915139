//! The NodePools that a plan can tell apart: where there are many, those that no pod of the plan can use, and those that are like another one for
//! all of its pods, are left out. Columns then grow with what pods ask for, not with NodePools times offerings.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use stowage_api::Requirement;
use stowage_api::parse_requirements;
use stowage_model::offering::{Catalog, OFFERING_LABELS};
use stowage_model::pod_class::{NodeTerm, PodClass};
use stowage_model::requirement::ValueSet;

use crate::columns::variants::well_known;
use crate::input::pool::Pool;
use crate::input::problem::Problem;

/// NodePools up to which all are kept, so that the column table stays the same from plan to plan, and reasons name each of them.
const FEW_POOLS: usize = 128;
/// Comparisons of NodePools with what pods ask for, of each kind; NodePools beyond that are kept.
const MAX_COMPARISONS: usize = 1_000_000;

/// A problem with fewer NodePools.
#[derive(Debug)]
pub(crate) struct Reduced {
    pub problem: Problem,
    /// Indexes of its NodePools in the given problem.
    pub pools: Vec<usize>,
}

/// The problem with the NodePools that matter to its plan; `None` where all do, or where they are few. The plan is the same.
pub(crate) fn with_relevant_pools(problem: &Problem) -> Option<Reduced> {
    if problem.pools.len() <= FEW_POOLS { None } else { reduced(problem) }
}

/// [`with_relevant_pools`], also where NodePools are few.
pub(crate) fn reduced(problem: &Problem) -> Option<Reduced> {
    let asked = Asked::of(problem);
    let mut unlimited = HashSet::new();
    let mut comparisons = 0;
    let mut pools = Vec::new();
    for (at, pool) in problem.pools_by_name() {
        let traits = asked.traits_of(pool);
        // The first of equal ones by name is used for all nodes, as long as its limits allow.
        if unlimited.contains(&traits) || (comparisons < MAX_COMPARISONS && asked.is_for_none(pool, &mut comparisons)) {
            continue;
        }
        if pool.node_limit.is_none() && pool.limited.is_empty() {
            unlimited.insert(traits);
        }
        pools.push(at);
    }
    if pools.is_empty() {
        // The reasons why pods are unschedulable name one.
        pools.extend(problem.pools_by_name().next().map(|(at, _)| at));
    }
    pools.sort_unstable();
    (pools.len() < problem.pools.len()).then(|| {
        let kept = pools.iter().map(|at| problem.pools[*at].clone()).collect();
        Reduced { problem: Problem { pools: kept, ..problem.clone() }, pools }
    })
}

/// What pods ask of the labels that only NodePools set.
struct Asked<'p> {
    /// Distinct classes of the pods to place.
    classes: Vec<&'p PodClass>,
    /// Sets that node terms name, by key.
    sets: BTreeMap<&'p str, Vec<&'p ValueSet>>,
    /// Keys of which every value counts: those of rules between pods.
    keys: BTreeSet<&'p str>,
}

/// What distinguishes a NodePool for the pods of a plan.
#[derive(PartialEq, Eq, Hash)]
struct Traits<'p> {
    catalog: *const Catalog,
    weight: i32,
    requirements: &'p [Requirement],
    taints: Vec<(&'p str, Option<&'p str>, &'p str)>,
    /// Labels whose value counts.
    labels: Vec<(&'p str, &'p str)>,
    /// Whether its nodes are in each set of [`Asked::sets`].
    is_in: Vec<bool>,
}

impl<'p> Asked<'p> {
    fn of(problem: &'p Problem) -> Self {
        let mut seen = HashSet::new();
        let mut fresh = |class: &'p Arc<PodClass>| seen.insert(Arc::as_ptr(class)).then_some(&**class);
        let classes: Vec<&PodClass> = problem.pods.iter().filter_map(|pod| fresh(&pod.class)).collect();
        let daemons: Vec<&PodClass> = problem.daemons.iter().filter_map(|daemon| fresh(&daemon.class)).collect();
        // Of the pods that run, only these keep others off new nodes.
        let running = problem.nodes.iter().flat_map(|node| node.pods.exclusive()).filter_map(fresh);
        let mut sets: HashMap<&str, HashSet<&ValueSet>> = HashMap::new();
        let mut keys: BTreeSet<&str> = running.flat_map(|class| &class.anti_affinity).map(|term| &*term.key).collect();
        for class in classes.iter().copied().chain(daemons) {
            let preferred = class.preferred_nodes.iter().map(|(_, term)| term);
            for (key, set) in
                class.node_terms.iter().chain(&class.volume_terms).chain(preferred).flat_map(|term| term.labels.iter())
            {
                sets.entry(key).or_default().insert(set);
            }
            let preferred = class.preferred_affinity.iter().chain(&class.preferred_anti_affinity).map(|(_, term)| term);
            let terms = class.affinity.iter().chain(&class.anti_affinity).chain(preferred).map(|term| &*term.key);
            keys.extend(class.spread.iter().map(|spread| &*spread.key).chain(terms));
        }
        let comparisons = sets.values().map(HashSet::len).sum::<usize>().saturating_mul(problem.pools.len());
        if comparisons > MAX_COMPARISONS {
            keys.extend(sets.drain().map(|(key, _)| key));
        }
        let sets = sets.into_iter().map(|(key, sets)| (key, Vec::from_iter(sets))).collect();
        Self { classes, sets, keys }
    }

    fn traits_of(&self, pool: &'p Pool) -> Traits<'p> {
        let is_required = |key: &str| pool.requirements.iter().any(|requirement| requirement.key == key);
        let counts = |key: &str| {
            well_known(key) || OFFERING_LABELS.contains(&key) || self.keys.contains(key) || is_required(key)
        };
        let value = |key: &str| pool.labels.get(key).map(String::as_str);
        Traits {
            catalog: Arc::as_ptr(&pool.catalog),
            weight: pool.weight,
            requirements: &pool.requirements,
            taints: pool.taints.iter().map(of_taint).collect(),
            labels: pool.labels.iter().filter(|(key, _)| counts(key)).map(|(key, value)| (&**key, &**value)).collect(),
            is_in: self
                .sets
                .iter()
                .flat_map(|(key, sets)| sets.iter().map(move |set| set.accepts(value(key))))
                .collect(),
        }
    }

    /// Whether no pod to place can use nodes of a NodePool: by its taints, or by a label or requirement.
    fn is_for_none(&self, pool: &Pool, comparisons: &mut usize) -> bool {
        let Ok(requirements) = parse_requirements(&pool.requirements) else { return false };
        let conflicts = |term: &NodeTerm| {
            term.labels.iter().any(|(key, set)| match pool.labels.get(&**key) {
                Some(value) => !set.contains(value),
                None => requirements.get(key).is_some_and(|of_pool| set.intersect(of_pool).is_empty()),
            })
        };
        self.classes.iter().all(|class| {
            *comparisons += 1 + class.node_terms.len();
            class.untolerated(&pool.taints).is_some()
                || (!class.node_terms.is_empty() && class.node_terms.iter().all(conflicts))
        })
    }
}

fn of_taint(taint: &Taint) -> (&str, Option<&str>, &str) {
    (&taint.key, taint.value.as_deref(), &taint.effect)
}
