//! An independent checker of plans, which shares only the types of problem and plan with the solver: it places every pod on a
//! list of labeled nodes and checks the rules of kube-scheduler one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stowage_api::Requirement;
use stowage_model::labels::USD_PER_HOUR;
use stowage_model::offering::{OFFERING_LABELS, Offering};
use stowage_model::pod_class::{Namespaces, Selector};
use stowage_model::requirement::ValueSet;
use stowage_model::resources::Resources;

use crate::input::pod::{Labels, PodEntry};
use crate::input::pool::Pool;
use crate::input::problem::Problem;
use crate::output::plan::{Choice, Plan, PlannedNode};

struct Place<'p> {
    labels: Labels,
    name: String,
    room: Resources,
    taints: &'p [k8s_openapi::api::core::v1::Taint],
    pods: Vec<&'p PodEntry>,
    new: Vec<&'p PodEntry>,
    /// Volumes that can be attached, by driver.
    volumes: BTreeMap<Arc<str>, i64>,
}

/// The first rule that a plan breaks.
pub(crate) fn check(problem: &Problem, plan: &Plan) -> Result<(), String> {
    let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
    let everywhere = plan
        .new_nodes
        .iter()
        .flat_map(|n| &n.pods)
        .chain(plan.placements.iter().flat_map(|p| &p.pods))
        .chain(plan.unschedulable.iter().map(|u| &u.pod));
    for pod in everywhere {
        *seen.entry(*pod).or_default() += 1;
    }
    if seen.len() != problem.pods.len() || seen.values().any(|n| *n != 1) {
        return Err(format!("{} of {} pods are in the plan exactly once", seen.len(), problem.pods.len()));
    }
    let mut places: Vec<Place<'_>> = Vec::new();
    for node in &problem.nodes {
        let mut room = node.allocatable.clone();
        room.sub(&node.daemon_reserve);
        places.push(Place {
            labels: node.labels.clone(),
            name: node.name.to_string(),
            room,
            taints: &node.taints,
            pods: node.pods.iter().collect(),
            new: Vec::new(),
            volumes: problem.volumes.limits.get(&*node.name).cloned().unwrap_or_default(),
        });
    }
    for placement in &plan.placements {
        if !problem.nodes[placement.node].schedulable {
            return Err(format!("{} takes no pods", problem.nodes[placement.node].name));
        }
        places[placement.node].new.extend(placement.pods.iter().map(|pod| &problem.pods[*pod]));
    }
    let mut cost = 0;
    let mut used: BTreeMap<usize, (Resources, i64)> = BTreeMap::new();
    for (at, node) in plan.new_nodes.iter().enumerate() {
        let pool = &problem.pools[node.pool];
        let first = node.choices.first().ok_or("a node without choices")?;
        if node.pods.is_empty() {
            return Err("an empty node".into());
        }
        cost += first.price.0;
        let spent = used.entry(node.pool).or_default();
        // Limits hold whichever choice is launched.
        let mut most = Resources::default();
        for choice in node.choices.iter() {
            let mut charge = choice.instance_type.capacity.clone();
            charge.set(USD_PER_HOUR, choice.price.0);
            most.raise_to(&charge);
        }
        spent.0.add(&most);
        spent.1 += 1;
        let types: BTreeSet<_> = node.choices.iter().map(|c| c.instance_type.name.clone()).collect();
        if types.len() > 60 {
            return Err(format!("{} types to choose from", types.len()));
        }
        named(pool, node)?;
        for choice in node.choices.iter() {
            let offered = choice.instance_type.offerings.iter().find(|o| {
                o.available
                    && o.zone == choice.zone
                    && o.capacity_type == choice.capacity_type
                    && o.price == choice.price
            });
            let Some(offered) = offered else {
                return Err(format!("{} is not offered in {}", choice.instance_type.name, choice.zone));
            };
            let mut labels = choice.instance_type.labels.clone();
            labels.extend((*offered.labels).clone());
            labels.extend(pool.labels.clone());
            labels.insert("topology.kubernetes.io/zone".into(), choice.zone.to_string());
            labels.insert("karpenter.sh/capacity-type".into(), choice.capacity_type.to_string());
            labels.insert("kubernetes.io/hostname".into(), format!("new-{at}"));
            for pin in &node.requirements {
                labels.insert(pin.key.clone(), pin.values[0].clone());
            }
            for r in &pool.requirements {
                let set = ValueSet::parse(&r.key, &r.operator, &r.values).map_err(|e| e.to_string())?;
                if !set.accepts(labels.get(&r.key).map(String::as_str)) {
                    return Err(format!("{} breaks its pool's requirement on {}", choice.instance_type.name, r.key));
                }
            }
            let mut room = choice.instance_type.allocatable.clone();
            let mut daemons = Resources::default();
            for daemon in &problem.daemons {
                let runs = daemon.class.requests.has_devices(&choice.instance_type.allocatable);
                let need = daemon.class.requests.foreseeable();
                let types = &pool.catalog.instance_types;
                let too_large = types.iter().all(|instance_type| !need.fits(&instance_type.allocatable));
                if runs
                    && !too_large
                    && daemon.class.accepts_node(&labels, "new")
                    && daemon.class.untolerated(&pool.taints).is_none()
                {
                    daemons.add(&need);
                }
            }
            if !daemons.fits(&room) {
                return Err(format!("{} is too small for its daemons", choice.instance_type.name));
            }
            room.sub(&daemons);
            let place = Place {
                labels,
                name: format!("new-{at}"),
                room,
                taints: &pool.taints,
                pods: Vec::new(),
                new: node.pods.iter().map(|pod| &problem.pods[*pod]).collect(),
                volumes: choice.instance_type.volume_limits.clone(),
            };
            fits(&place)?;
            volumes(problem, &place)?;
            if std::ptr::eq(choice, first) {
                places.push(place);
            }
        }
    }
    if cost != plan.cost.0 {
        return Err(format!("cost {} is not the sum {cost}", plan.cost.0));
    }
    for (pool, (capacity, nodes)) in used {
        let pool = &problem.pools[pool];
        for name in &pool.limited {
            let limit = pool.limits.as_ref().map_or(0, |l| l.get(name));
            if capacity.get(name) > 0 && pool.usage.get(name) + capacity.get(name) > limit {
                return Err(format!("limit on {name} of {} exceeded", pool.name));
            }
        }
        if pool.node_limit.is_some_and(|limit| pool.node_count + nodes > limit) {
            return Err(format!("limit on nodes of {} exceeded", pool.name));
        }
    }
    for place in &places {
        fits(place)?;
        volumes(problem, place)?;
    }
    between_pods(problem, &places)
}

/// A claim names types, zones and capacity types: every offered combination of them within its maximum price must be among the choices.
fn named(pool: &Pool, node: &PlannedNode) -> Result<(), String> {
    let accepts = |offering: &Offering, r: &Requirement| {
        let set = ValueSet::parse(&r.key, &r.operator, &r.values).unwrap();
        !OFFERING_LABELS.contains(&r.key.as_str()) || set.accepts(offering.label(&r.key))
    };
    let is = |choice: &Choice, name: &str, offering: &Offering| {
        (&*choice.instance_type.name, &choice.zone, choice.capacity_type)
            == (name, &offering.zone, offering.capacity_type)
    };
    if let Some(choice) = node.choices.iter().find(|choice| node.max_price.is_some_and(|most| choice.price > most)) {
        return Err(format!("{} costs {} micro-USD", choice.instance_type.name, choice.price.0));
    }
    let types: BTreeMap<_, _> = node.choices.iter().map(|c| (&c.instance_type.name, &c.instance_type)).collect();
    for (name, found) in types {
        for offering in found.offerings.iter().filter(|offering| offering.available && offering.left.is_none()) {
            if node.max_price.is_some_and(|most| offering.price > most) {
                continue;
            }
            let asked = pool.requirements.iter().chain(&node.requirements).all(|r| accepts(offering, r));
            let zone = node.choices.iter().any(|choice| choice.zone == offering.zone);
            let capacity_type = node.choices.iter().any(|choice| choice.capacity_type == offering.capacity_type);
            if asked && zone && capacity_type && !node.choices.iter().any(|choice| is(choice, name, offering)) {
                return Err(format!(
                    "{name} in {} as {} may be launched but is not a choice",
                    offering.zone, offering.capacity_type
                ));
            }
        }
    }
    Ok(())
}

fn fits(place: &Place<'_>) -> Result<(), String> {
    let mut total = Resources::default();
    for pod in place.pods.iter().chain(&place.new) {
        total.add(&pod.class.requests);
    }
    if !place.new.is_empty() && !total.fits(&place.room) {
        return Err(format!("{}: {total} over {}", place.name, place.room));
    }
    let mut ports = Vec::new();
    for pod in place.pods.iter().chain(&place.new) {
        let others = ports.len();
        for port in &pod.class.host_ports {
            let clash = ports[..others].iter().any(|(have, ip): &(_, std::sync::Arc<str>)| {
                *have == (port.port, port.protocol.clone()) && (ip.is_empty() || port.ip.is_empty() || *ip == port.ip)
            });
            if clash {
                return Err(format!("{}: host port {} twice", place.name, port.port));
            }
            ports.push(((port.port, port.protocol.clone()), port.ip.clone()));
        }
    }
    for pod in &place.new {
        if !pod.class.accepts_node(&place.labels, &place.name) {
            return Err(format!("{} does not accept {}", pod.key, place.name));
        }
        if pod.class.untolerated(place.taints).is_some() {
            return Err(format!("{} does not tolerate {}", pod.key, place.name));
        }
    }
    Ok(())
}

fn volumes(problem: &Problem, place: &Place<'_>) -> Result<(), String> {
    let all = &problem.volumes;
    for pod in &place.new {
        for claim in pod.claims.iter() {
            let found = all.claims.get(&**claim).ok_or_else(|| format!("{} has no claim {claim}", pod.key))?;
            let class = found.storage_class.as_ref().and_then(|name| all.classes.get(&**name));
            let volume = found.volume.as_ref().and_then(|name| all.volumes.get(&**name));
            let terms = volume.map(|volume| &volume.terms).or(class.map(|class| &class.terms));
            let terms = terms.map_or(&[][..], Vec::as_slice);
            if !terms.is_empty() && !terms.iter().any(|term| term.accepts(&place.labels, &place.name)) {
                return Err(format!("{}: the volume of {claim} is not at {}", pod.key, place.name));
            }
        }
    }
    if place.new.is_empty() {
        return Ok(());
    }
    let attached: BTreeSet<&Arc<str>> = place.pods.iter().chain(&place.new).flat_map(|pod| pod.claims.iter()).collect();
    for (driver, limit) in &place.volumes {
        let of_driver = attached.iter().filter(|claim| {
            let claim = all.claims.get(&****claim);
            let volume = claim.and_then(|c| c.volume.as_ref()).and_then(|name| all.volumes.get(&**name));
            let class = claim.and_then(|c| c.storage_class.as_ref()).and_then(|name| all.classes.get(&**name));
            volume.map_or_else(|| class.and_then(|c| c.driver.as_ref()), |v| v.driver.as_ref()) == Some(driver)
        });
        if i64::try_from(of_driver.count()).unwrap() > *limit {
            return Err(format!("{}: more than {limit} volumes of {driver}", place.name));
        }
    }
    Ok(())
}

fn selects(problem: &Problem, selector: Option<&Selector>, namespaces: &Namespaces, pod: &PodEntry) -> bool {
    let none = Labels::new();
    let labels = problem.namespaces.get(pod.class.namespace.as_ref()).unwrap_or(&none);
    let inside = namespaces.names.contains(&pod.class.namespace)
        || namespaces.selector.as_ref().is_some_and(|s| s.selects(labels));
    inside && selector.is_some_and(|s| s.selects(&pod.labels))
}

fn between_pods(problem: &Problem, places: &[Place<'_>]) -> Result<(), String> {
    let all =
        |place: &'_ Place<'_>| -> Vec<PodEntry> { place.pods.iter().chain(&place.new).map(|p| (*p).clone()).collect() };
    let domain = |place: &Place<'_>, key: &str| place.labels.get(key).cloned();
    for (at, place) in places.iter().enumerate() {
        for (running, pod) in place.pods.iter().map(|p| (true, p)).chain(place.new.iter().map(|p| (false, p))) {
            for term in &pod.class.anti_affinity {
                for (other_at, other) in places.iter().enumerate() {
                    if domain(place, &term.key).is_none() || domain(place, &term.key) != domain(other, &term.key) {
                        continue;
                    }
                    let others = if running {
                        other.new.clone()
                    } else {
                        other.pods.iter().chain(&other.new).copied().collect()
                    };
                    for near in others {
                        if near.key != pod.key && selects(problem, term.selector.as_ref(), &term.namespaces, near) {
                            return Err(format!("{} and {} are together on {at} and {other_at}", pod.key, near.key));
                        }
                    }
                }
            }
            if running {
                continue;
            }
            // A pod that only some of the required terms select is not counted.
            let wanted = |p: &PodEntry| {
                pod.class.affinity.iter().all(|t| selects(problem, t.selector.as_ref(), &t.namespaces, p))
            };
            for term in &pod.class.affinity {
                if domain(place, &term.key).is_none() {
                    return Err(format!("{} has no {} for the affinity of {}", place.name, term.key, pod.key));
                }
                let same = |other: &&Place<'_>| domain(other, &term.key) == domain(place, &term.key);
                let near = places.iter().filter(same).flat_map(&all);
                let mut matching = near.filter(|p| p.key != pod.key && wanted(p));
                let own = wanted(pod);
                let anywhere = places.iter().flat_map(&all).filter(|p| p.key != pod.key && wanted(p));
                if matching.next().is_none() && (!own || anywhere.count() > 0) {
                    return Err(format!("{} has no pod for its affinity on {}", pod.key, term.key));
                }
            }
            for spread in pod.class.spread.iter().filter(|s| s.hard) {
                if domain(place, &spread.key).is_none() {
                    return Err(format!("{} has no {} for the spread of {}", place.name, spread.key, pod.key));
                }
                let namespaces = Namespaces { names: [pod.class.namespace.clone()].into(), selector: None };
                let mut counts: BTreeMap<String, i64> = BTreeMap::new();
                for other in places {
                    let counted = !spread.honor_affinity || pod.class.accepts_node(&other.labels, &other.name);
                    let tolerated = !spread.honor_taints || pod.class.untolerated(other.taints).is_none();
                    // kube-scheduler skips nodes that lack the key of any hard constraint of the pod.
                    let mut keys = pod.class.spread.iter().filter(|s| s.hard).map(|s| &s.key);
                    let labeled = keys.all(|key| domain(other, key).is_some());
                    let Some(domain) = domain(other, &spread.key).filter(|_| counted && tolerated && labeled) else {
                        continue;
                    };
                    let matching = all(other)
                        .iter()
                        .filter(|p| !p.deleting)
                        .filter(|p| selects(problem, spread.selector.as_ref(), &namespaces, p))
                        .count();
                    *counts.entry(domain).or_default() += i64::try_from(matching).unwrap();
                }
                let few = i64::try_from(counts.len()).unwrap() < spread.min_domains;
                let least = if few { 0 } else { counts.values().min().copied().unwrap_or(0) };
                let here = domain(place, &spread.key).and_then(|d| counts.get(&d).copied()).unwrap_or(0);
                if here - least > spread.max_skew {
                    return Err(format!("{}: skew {} on {}: {counts:?}", pod.key, here - least, spread.key));
                }
            }
        }
    }
    Ok(())
}
