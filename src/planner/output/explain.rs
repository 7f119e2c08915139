//! Why a pod is unschedulable: one line with a reason per NodePool. Tests and users match on these texts.

use std::sync::Arc;

use crate::model::labels;
use crate::model::labels::is_label_value;
use crate::model::pod_class::{NodeTerm, PodClass};
use crate::model::requirement::{Requirements, ValueSet};
use crate::model::resources::{attached_by, is_in_bytes};
use crate::model::units::{Bytes, Millicores};
use crate::planner::columns::dims::{COMMON, fits};
use crate::planner::columns::sets::ColumnSets;
use crate::planner::columns::variants::{MAX_VARIANTS, well_known};
use crate::planner::groups::group::Group;
use crate::planner::groups::topology::counts::Topology;
use crate::planner::input::pool::Pool;
use crate::planner::input::problem::Problem;
use crate::planner::input::settings::NodeSizes;
use crate::planner::state::budget::Budget;

/// Why no NodePool can provide a node for a pod of `group` in the topology domains of `pins`.
pub(crate) fn explain(
    column_sets: &ColumnSets<'_>,
    topology: &Topology,
    budgets: &[Budget],
    group: &Group,
    pins: &[(usize, usize)],
) -> String {
    let class = &group.class;
    for term in &class.node_terms {
        if let Some(key) = term.labels.contradiction()
            && class.node_terms.len() == 1
        {
            return format!("its own requirements on {key} contradict each other");
        }
    }
    let problem = column_sets.problem;
    if problem.pools.is_empty() {
        return "no NodePool is ready, and no node has room".to_owned();
    }
    let mut lines: Vec<String> = Vec::new();
    for (at, pool) in problem.pools_by_name() {
        let why =
            pool_reason(column_sets, topology, &budgets[at], group, pins, at).unwrap_or_else(|| rules_text(class));
        lines.push(format!("NodePool {}: {why}", pool.name));
    }
    let needs = extended_requests(column_sets, group);
    if needs.is_empty() { lines.join("; ") } else { format!("needs {needs}; {}", lines.join("; ")) }
}

/// The extended resources that a pod requests, volume attachments left out.
fn extended_requests(column_sets: &ColumnSets<'_>, group: &Group) -> String {
    let requests = column_sets.dims.sparse(&group.need);
    let extended = requests.extended.iter().filter(|(name, _)| attached_by(name).is_none());
    let text = |(name, n): (&Arc<str>, &i64)| {
        if is_in_bytes(name) { format!("{} {name}", Bytes(*n).human()) } else { format!("{n} {name}") }
    };
    extended.map(text).collect::<Vec<_>>().join(", ")
}

/// The rules of a class that depend on other pods, one of which no new node meets.
fn rules_text(class: &PodClass) -> String {
    let rules = [
        ("pod affinity", !class.affinity.is_empty()),
        ("pod anti-affinity", !class.anti_affinity.is_empty()),
        ("topology spread constraints", class.spread.iter().any(|spread| spread.hard)),
        ("host ports", !class.host_ports.is_empty()),
    ];
    let own: Vec<&str> = rules.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
    if own.is_empty() {
        return "the rules of other pods leave it no node".into();
    }
    format!("no new node meets its {}", own.join(", "))
}

/// The first check that rules a NodePool out; `None` where only the rules between pods of one node remain.
fn pool_reason(
    column_sets: &ColumnSets<'_>,
    topology: &Topology,
    budget: &Budget,
    group: &Group,
    pins: &[(usize, usize)],
    pool_index: usize,
) -> Option<String> {
    let problem: &Problem = column_sets.problem;
    let (pool, class) = (&problem.pools[pool_index], &group.class);
    if let Some(taint) = class.untolerated(&pool.taints) {
        let value = taint.value.as_deref().map_or(String::new(), |v| format!("={v}"));
        return Some(format!("taint {}{value}:{} is not tolerated", taint.key, taint.effect));
    }
    let of_pool: Vec<usize> = (0..column_sets.columns.len()).filter(|c| column_sets.pool(*c) == pool_index).collect();
    if of_pool.is_empty() {
        let sizes = problem.settings.node_sizes != NodeSizes::default();
        let of_size = if sizes { " of the node sizes that are set" } else { "" };
        return Some(format!("its requirements leave no available instance type{of_size}"));
    }
    if let Some(conflict) = conflict(pool, class) {
        return Some(conflict);
    }
    if !of_pool.iter().any(|c| satisfies_terms(column_sets, &class.volume_terms, *c)) {
        return Some(format!("its volumes ask for {}, where it has no instance type", terms_text(&class.volume_terms)));
    }
    let required = group.levels.last()?;
    let has_extended =
        |column: usize| group.need.iter().zip(column_sets.room(column)).skip(COMMON).all(|(need, room)| need <= room);
    let constrained: Vec<usize> =
        of_pool.iter().copied().filter(|c| satisfies_terms(column_sets, &class.node_terms, *c)).collect();
    let in_domains = |c: &usize| pins.iter().all(|(key, domain)| topology.keys[*key].columns[*domain].contains(*c));
    let domains =
        pins.iter().map(|(key, domain)| topology.keys[*key].values[*domain].to_string()).collect::<Vec<_>>().join(", ");
    let location = if domains.is_empty() { required_zones(class) } else { format!(" in {domains}") };
    if constrained.is_empty() {
        if let Some(key) = crowded_out(column_sets, &of_pool, pool, class) {
            return Some(format!(
                "pods of this plan ask for more values of {key} than the {MAX_VARIANTS} that a plan considers; the pod is planned again in \
                 seconds, when others have their nodes"
            ));
        }
        return Some(format!("no instance type has {}", terms_text(&class.node_terms)));
    }
    let with_volumes = |c: &usize| satisfies_terms(column_sets, &class.volume_terms, *c);
    if !constrained.iter().any(with_volumes) {
        let (own, volumes) = (terms_text(&class.node_terms), terms_text(&class.volume_terms));
        return Some(format!("no instance type has {own} where its volumes are: {volumes}"));
    }
    if !constrained.iter().any(|c| has_extended(*c) && in_domains(c) && with_volumes(c)) {
        let requests = column_sets.dims.sparse(&group.need);
        let missing = requests.extended.keys().map(AsRef::as_ref).collect::<Vec<&str>>().join(", ");
        if missing.is_empty() {
            return Some(format!("no instance type is offered{location}"));
        }
        return Some(format!("allows no type with {missing}{location}"));
    }
    let usable: Vec<usize> = required.iter().filter(|c| column_sets.pool(*c) == pool_index && in_domains(c)).collect();
    let holding: Vec<usize> = usable.iter().copied().filter(|c| fits(&group.need, column_sets.room(*c))).collect();
    if holding.is_empty() {
        let only_daemons_overflow =
            |c: &usize| !fits(column_sets.overhead(*c), &column_sets.dims.dense_of(column_sets.instance_type(*c)));
        if !usable.is_empty() && usable.iter().all(only_daemons_overflow) {
            return Some("no instance type holds its DaemonSets together".to_owned());
        }
        let largest = usable.iter().max_by_key(|c| {
            let room = column_sets.room(**c);
            (room[0], room[1], std::cmp::Reverse(**c))
        })?;
        let room: Vec<i64> = column_sets.room(*largest).iter().map(|amount| (*amount).max(0)).collect();
        let mut room = column_sets.dims.sparse(&room);
        room.extended.retain(|name, _| class.requests.extended.contains_key(name));
        return Some(format!(
            "no instance type holds {} (largest: {} with {room} after overhead)",
            class.requests,
            column_sets.instance_type(*largest).name,
        ));
    }
    let smallest = holding.iter().min_by_key(|c| (column_sets.columns[**c].price, **c))?;
    let allowed = holding.iter().any(|c| budget.allows(&column_sets.instance_type(*c).capacity));
    if !allowed {
        let capacity = &column_sets.instance_type(*smallest).capacity;
        let name = budget.exceeded_limit(capacity).unwrap_or("nodes");
        return Some(format!("limit on {name} reached ({})", limit_text(pool, name)));
    }
    if pool.requirements.iter().any(|r| r.min_values.is_some()) {
        let within = if budget.is_limited() { ", within its limits," } else { "" };
        return Some(format!("too few instance types hold it{within} for the pool's minValues"));
    }
    None
}

fn limit_text(pool: &Pool, name: &str) -> String {
    if name == "nodes" {
        return format!("nodes {} of {}", pool.node_count, pool.node_limit.unwrap_or(0));
    }
    let limit = pool.limits.as_ref().map_or(0, |l| l.get(name));
    let used = pool.usage.get(name);
    match name {
        "cpu" => format!("cpu {} of {} before this plan", Millicores(used), Millicores(limit)),
        _ if is_in_bytes(name) => {
            format!("{name} {} of {} before this plan", Bytes(used).human(), Bytes(limit).human())
        }
        _ => format!("{name} {used} of {limit} before this plan"),
    }
}

/// The first requirement on which the class and the NodePool conflict, if each of the class's node terms has such a conflict.
fn conflict(pool: &Pool, class: &PodClass) -> Option<String> {
    let requirements = Requirements::from_api(&pool.requirements).ok()?;
    let mut first: Option<String> = None;
    for term in &class.node_terms {
        let mut found = None;
        for (key, set) in term.labels.iter() {
            let fixed = pool.labels.get(key.as_ref()).map(|value| ValueSet::one(value));
            let of_pool = fixed.as_ref().or_else(|| requirements.get(key));
            if let Some(of_pool) = of_pool
                && set.intersect(of_pool).is_empty()
            {
                found = Some(format!("requirement {key} {set} conflicts with the pool's {of_pool}"));
                break;
            }
        }
        first = first.or(Some(found?));
    }
    first
}

/// The label that the NodePool leaves open, and whose value that the pod requires is not among the values of its columns.
fn crowded_out<'c>(
    column_sets: &ColumnSets<'_>,
    columns: &[usize],
    pool: &Pool,
    class: &'c PodClass,
) -> Option<&'c str> {
    let open = Requirements::from_api(&pool.requirements).ok()?;
    let crowded = |(key, set): &(&'c Arc<str>, &ValueSet)| {
        let is_open = !well_known(key) && !pool.labels.contains_key(&***key) && open.get(key).is_some();
        let has_value = || set.finite().is_some_and(|mut values| values.any(|value| is_label_value(value)));
        is_open && has_value() && !columns.iter().any(|column| set.accepts(column_sets.label(*column, key)))
    };
    class.node_terms.iter().flat_map(|term| term.labels.iter()).find(crowded).map(|(key, _)| &**key)
}

/// Whether one of `terms` accepts a column, or there are none. No term can name a node that does not exist yet.
fn satisfies_terms(column_sets: &ColumnSets<'_>, terms: &[NodeTerm], column: usize) -> bool {
    terms.is_empty()
        || terms.iter().any(|term| {
            !term.never
                && term.name.as_ref().is_none_or(|set| set.finite().is_none())
                && term.labels.iter().all(|(key, set)| {
                    if **key == *labels::HOSTNAME {
                        set.finite().is_none()
                    } else {
                        set.accepts(column_sets.label(column, key))
                    }
                })
        })
}

/// Node terms as text, alternatives joined by `or`.
fn terms_text(terms: &[NodeTerm]) -> String {
    let terms: Vec<String> = terms
        .iter()
        .map(|term| {
            let mut parts: Vec<String> = term.labels.iter().map(|(key, set)| format!("{key} {set}")).collect();
            if let Some(name) = &term.name {
                parts.push(format!("metadata.name {name}"));
            }
            parts.join(" and ")
        })
        .collect();
    terms.join(", or ")
}

/// ` in` the zones that a class with one node term requires; empty otherwise.
fn required_zones(class: &PodClass) -> String {
    match class.node_terms.as_slice() {
        [term] => term.labels.get(labels::ZONE).map_or(String::new(), |set| match set.finite() {
            Some(zones) => format!(" in {}", zones.map(AsRef::as_ref).collect::<Vec<&str>>().join(", ")),
            None => String::new(),
        }),
        _ => String::new(),
    }
}
