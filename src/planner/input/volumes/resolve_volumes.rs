//! Translates the claims of a problem's pods into node terms and attachment resources, before planning.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use stowage_model::labels;
use stowage_model::pod_class::PodClass;
use stowage_model::resources::{UNLIMITED, attachments_of};

use crate::input::node::NodeState;
use crate::input::pod::PodEntry;
use crate::input::problem::Problem;
use crate::input::volumes::exclusive::shut_out;
use crate::input::volumes::free::assign;
use crate::input::volumes::needs::{Needs, VolumeProblem};
use crate::input::volumes::objects::Volumes;
use crate::input::volumes::shared::shared;

/// A problem whose pod classes include the constraints of their volumes.
pub(crate) struct Resolved {
    pub problem: Problem,
    /// Index of each pod in the given problem.
    pub pods: Vec<usize>,
    /// Pods, by index in the given problem, that no node can satisfy, and why.
    pub refused: Vec<(usize, VolumeProblem)>,
}

/// Resolves the claims of a problem; `None` where no pod has a claim.
pub(crate) fn resolve(problem: &Problem) -> Option<Resolved> {
    if problem.pods.iter().all(|pod| pod.claims.is_empty()) {
        return None;
    }
    let volumes = &problem.volumes;
    let assigned = assign(problem);
    let shared = shared(problem);
    let length = |claims: &BTreeSet<Arc<str>>| i64::try_from(claims.len()).unwrap_or(i64::MAX);
    let reserved = shared.iter().map(|(driver, claims)| (Arc::clone(driver), length(claims))).collect();
    let mut shut_out = shut_out(problem, &assigned);
    let mut resolver = Resolver { problem, limited: HashMap::new(), classes: HashMap::new() };
    let mut out = Resolved {
        problem: Problem {
            pods: Vec::with_capacity(problem.pods.len()),
            nodes: Vec::new(),
            pools: problem.pools.clone(),
            daemons: problem.daemons.clone(),
            namespaces: problem.namespaces.clone(),
            volumes: Arc::new(Volumes { reserved, ..Volumes::default() }),
            services: Arc::default(),
            settings: problem.settings.clone(),
        },
        pods: Vec::with_capacity(problem.pods.len()),
        refused: Vec::new(),
    };
    for (at, pod) in problem.pods.iter().enumerate() {
        let class = if pod.claims.is_empty() {
            Arc::clone(&pod.class)
        } else {
            match shut_out.remove(&at).map_or_else(|| volumes.needs(&pod.claims, &assigned), Err) {
                Ok(mut needs) => {
                    for (driver, claims) in &shared {
                        let used: BTreeSet<&Arc<str>> =
                            pod.claims.iter().filter(|claim| claims.contains(*claim)).collect();
                        if let Some(count) = needs.attach.get_mut(driver) {
                            *count -= i64::try_from(used.len()).unwrap_or(i64::MAX);
                        }
                    }
                    needs.attach.retain(|_, count| *count > 0);
                    resolver.with_needs(&pod.class, needs)
                }
                Err(why) => {
                    out.refused.push((at, why));
                    continue;
                }
            }
        };
        out.pods.push(at);
        out.problem.pods.push(PodEntry { class, ..pod.clone() });
    }
    let drivers: Vec<Arc<str>> =
        resolver.limited.into_iter().filter(|(_, limited)| *limited).map(|(driver, _)| driver).collect();
    out.problem.nodes.clone_from(&problem.nodes);
    for node in out.problem.nodes.iter_mut().filter(|node| node.schedulable) {
        if drivers.is_empty() {
            break;
        }
        let node = Arc::make_mut(node);
        let reported = volumes.limits.get(node.name.as_ref());
        let promised = promised_limits(problem, node);
        // Pods that share a claim share its attachment.
        let claims: BTreeSet<&Arc<str>> = node.pods.iter().flat_map(|pod| pod.claims.iter()).collect();
        let attached: Vec<Option<Arc<str>>> = claims.iter().map(|claim| volumes.driver_of(claim)).collect();
        for driver in &drivers {
            let limit = reported.and_then(|limits| limits.get(driver)).or_else(|| promised?.get(driver));
            let limit = limit.copied().unwrap_or(UNLIMITED);
            let used = attached.iter().flatten().filter(|have| *have == driver).count();
            let to_attach = shared.get(driver).into_iter().flatten().filter(|claim| !claims.contains(claim)).count();
            let left = limit.saturating_sub(i64::try_from(used + to_attach).unwrap_or(i64::MAX));
            node.allocatable.set(&attachments_of(driver), left.max(0));
        }
    }
    Some(out)
}

struct Resolver<'p> {
    problem: &'p Problem,
    /// Whether any node or instance type limits a driver.
    limited: HashMap<Arc<str>, bool>,
    classes: HashMap<(*const PodClass, Needs), Arc<PodClass>>,
}

impl Resolver<'_> {
    fn with_needs(&mut self, class: &Arc<PodClass>, mut needs: Needs) -> Arc<PodClass> {
        needs.attach.retain(|driver, _| {
            let known = self.limited.get(driver).copied();
            known.unwrap_or_else(|| {
                let limited = is_limited(self.problem, driver);
                self.limited.insert(Arc::clone(driver), limited);
                limited
            })
        });
        if needs == Needs::default() {
            return Arc::clone(class);
        }
        let made = self.classes.entry((Arc::as_ptr(class), needs)).or_insert_with_key(|(_, needs)| {
            let mut class = PodClass::clone(class);
            class.volume_terms.clone_from(&needs.terms);
            for (driver, count) in &needs.attach {
                class.requests.set(&attachments_of(driver), *count);
            }
            Arc::new(class)
        });
        Arc::clone(made)
    }
}

/// Attachment limits of a node's instance type, where a pool offers it.
fn promised_limits<'p>(problem: &'p Problem, node: &NodeState) -> Option<&'p BTreeMap<Arc<str>, i64>> {
    let (pool, name) = (node.labels.get(labels::NODE_POOL)?, node.labels.get(labels::INSTANCE_TYPE)?);
    let pool = problem.pools.iter().find(|have| *have.name == **pool)?;
    let types = &pool.catalog.instance_types;
    let at = types.binary_search_by(|have| have.name.as_ref().cmp(name)).ok()?;
    Some(&types[at].volume_limits)
}

fn is_limited(problem: &Problem, driver: &str) -> bool {
    problem.volumes.limits.values().any(|limits| limits.contains_key(driver))
        || problem
            .pools
            .iter()
            .any(|pool| pool.catalog.instance_types.iter().any(|t| t.volume_limits.contains_key(driver)))
}
