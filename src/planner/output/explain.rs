//! Why a pod is unschedulable: one line with the reasons of the NodePools. Tests and users match on these texts.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use stowage_api::parse_requirements;
use stowage_model::labels;
use stowage_model::labels::is_label_value;
use stowage_model::pod_class::{NodeTerm, PodClass};
use stowage_model::requirement::{Requirements, ValueSet};
use stowage_model::resources::{attached_by, human, is_in_bytes};
use stowage_model::units::Bytes;

use crate::columns::bitset::Bits;
use crate::columns::dims::{COMMON, fits};
use crate::columns::sets::ColumnSets;
use crate::columns::variants::{MAX_VARIANTS, well_known};
use crate::groups::group::Group;
use crate::groups::topology::counts::Topology;
use crate::input::pool::Pool;
use crate::input::settings::NodeSizes;
use crate::state::pool_budget::Budget;

/// Reasons that are given, and NodePools that are named for each of them.
const MAX_REASONS: usize = 20;
const MAX_NAMES: usize = 3;

/// Explains groups of one plan. The work for each is one pass over the words of a few column sets, and a few steps per NodePool.
pub(crate) struct Explainer<'e, 'p> {
    column_sets: &'e mut ColumnSets<'p>,
    topology: &'e Topology,
    budgets: &'e [Budget],
    /// In order of name.
    pools: Vec<PoolColumns<'p>>,
}

/// A NodePool, its requirements if they are valid, and its columns.
struct PoolColumns<'p> {
    index: usize,
    pool: &'p Pool,
    requirements: Option<Requirements>,
    columns: Range<usize>,
}

impl PoolColumns<'_> {
    fn has_any(&self, of: &Bits) -> bool {
        of.within(self.columns.clone()).next().is_some()
    }
}

/// What a group may use, whatever the NodePool.
struct Allowed {
    /// What its volumes allow, its node constraints, and both.
    volumes: Bits,
    constraints: Bits,
    both: Bits,
    /// `both` in the domains of its pins, and the columns that its least preferred level allows there.
    in_domains: Bits,
    usable: Bits,
    /// Names of the domains.
    domains: String,
    /// Labels whose values a user chooses and the class requires, and the columns that have one of the values that it accepts.
    chosen: Vec<(Arc<str>, Bits)>,
}

impl<'e, 'p> Explainer<'e, 'p> {
    pub fn new(column_sets: &'e mut ColumnSets<'p>, topology: &'e Topology, budgets: &'e [Budget]) -> Self {
        let problem = column_sets.problem;
        // The columns of a NodePool follow each other.
        let mut columns = vec![0..0; problem.pools.len()];
        for shape in &column_sets.shapes {
            let pool = column_sets.variants[shape.variant].pool;
            let first = if columns[pool].is_empty() { shape.first } else { columns[pool].start };
            columns[pool] = first..shape.end;
        }
        let of_pool = |(index, pool): (usize, &'p Pool)| PoolColumns {
            index,
            pool,
            requirements: parse_requirements(&pool.requirements).ok(),
            columns: columns[index].clone(),
        };
        let pools = problem.pools_by_name().map(of_pool).collect();
        Self { column_sets, topology, budgets, pools }
    }

    /// Why no NodePool can provide a node for a pod of `group` in the topology domains of `pins`.
    pub fn explain(&mut self, group: &Group, pins: &[(usize, usize)]) -> String {
        let class = &group.class;
        for term in &class.node_terms {
            if let Some(key) = term.labels.contradiction()
                && class.node_terms.len() == 1
            {
                return format!("its own requirements on {key} contradict each other");
            }
        }
        if self.pools.is_empty() {
            return "no NodePool is ready, and no node has room".to_owned();
        }
        let allowed = self.allowed(group, pins);
        let mut reasons: Vec<Reason<'_>> = Vec::new();
        let mut position: HashMap<String, usize> = HashMap::new();
        for of in &self.pools {
            let foreign = foreign_reason(of, class, &allowed);
            let is_foreign = foreign.is_some();
            let why = foreign.or_else(|| self.pool_reason(of, group, &allowed)).unwrap_or_else(|| rules_text(class));
            let at = *position.entry(why).or_insert_with_key(|why| {
                reasons.push(Reason { why: why.clone(), is_foreign, pools: Vec::new() });
                reasons.len() - 1
            });
            reasons[at].pools.push(&of.pool.name);
        }
        let mut lines: Vec<String> = first_reasons(&mut reasons).iter().map(Reason::text).collect();
        let left_out: usize = reasons.iter().skip(MAX_REASONS).map(|reason| reason.pools.len()).sum();
        if left_out > 0 {
            lines.push(format!("{left_out} more NodePools have other reasons"));
        }
        let needs = extended_requests(self.column_sets, group);
        if needs.is_empty() { lines.join("; ") } else { format!("needs {needs}; {}", lines.join("; ")) }
    }

    fn allowed(&mut self, group: &Group, pins: &[(usize, usize)]) -> Allowed {
        let class = &group.class;
        let volumes = self.column_sets.by_terms(&class.volume_terms);
        let constraints = self.column_sets.by_terms(&class.node_terms);
        let both = constraints.intersection(&volumes);
        let (mut in_domains, mut names) = (both.clone(), Vec::new());
        let mut usable = group.levels.last().cloned().unwrap_or_else(|| Bits::empty(self.column_sets.columns.len()));
        for (key, domain) in pins {
            let key = &self.topology.keys[*key];
            in_domains.and(&key.columns[*domain]);
            usable.and(&key.columns[*domain]);
            names.push(key.values[*domain].to_string());
        }
        let terms = class.node_terms.iter().flat_map(|term| term.labels.iter());
        let chosen = terms
            .filter(|(key, set)| {
                !well_known(key) && set.finite().is_some_and(|mut values| values.any(|value| is_label_value(value)))
            })
            .map(|(key, set)| (Arc::clone(key), self.column_sets.requirement(key, set).clone()))
            .collect();
        Allowed { volumes, constraints, both, in_domains, usable, domains: names.join(", "), chosen }
    }
}

/// A reason and the names of its NodePools.
struct Reason<'p> {
    why: String,
    /// Whether the NodePools are for other pods.
    is_foreign: bool,
    pools: Vec<&'p str>,
}

impl Reason<'_> {
    fn text(&self) -> String {
        let (names, why) = (&self.pools, &self.why);
        if let [name] = names[..] {
            return format!("NodePool {name}: {why}");
        }
        if names.len() <= MAX_NAMES + 1 {
            return format!("NodePools {}: {why}", names.join(", "));
        }
        format!("NodePools {} and {} others: {why}", names[..MAX_NAMES].join(", "), names.len() - MAX_NAMES)
    }
}

/// The reasons that are given, in the order of their NodePools. If there are too many, those of NodePools for other pods come last and are left out first.
fn first_reasons<'r, 'p>(reasons: &'r mut [Reason<'p>]) -> &'r [Reason<'p>] {
    if reasons.len() > MAX_REASONS {
        reasons.sort_by_key(|reason| reason.is_foreign);
    }
    &reasons[..reasons.len().min(MAX_REASONS)]
}

/// Why a NodePool is for other pods: a taint that is not tolerated, or a requirement that conflicts with those of the class.
fn foreign_reason(of: &PoolColumns<'_>, class: &PodClass, allowed: &Allowed) -> Option<String> {
    if let Some(taint) = class.untolerated(&of.pool.taints) {
        let value = taint.value.as_deref().map_or(String::new(), |v| format!("={v}"));
        return Some(format!("taint {}{value}:{} is not tolerated", taint.key, taint.effect));
    }
    // A column that the class accepts excludes a conflict.
    if of.columns.is_empty() || of.has_any(&allowed.constraints) { None } else { conflict(of, class) }
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

impl Explainer<'_, '_> {
    /// The first check that rules a NodePool out that is not foreign; `None` where only the rules between pods of one node remain.
    fn pool_reason(&self, of: &PoolColumns<'_>, group: &Group, allowed: &Allowed) -> Option<String> {
        let (column_sets, class) = (&*self.column_sets, &group.class);
        if of.columns.is_empty() {
            let sizes = column_sets.problem.settings.node_sizes != NodeSizes::default();
            let of_size = if sizes { " of the node sizes that are set" } else { "" };
            return Some(format!("its requirements leave no available instance type{of_size}"));
        }
        if !of.has_any(&allowed.volumes) {
            let volumes = terms_text(&class.volume_terms);
            return Some(format!("its volumes ask for {volumes}, where it has no instance type"));
        }
        if !of.has_any(&allowed.constraints) {
            if let Some(key) = crowded_out(of, allowed) {
                return Some(format!(
                    "pods of this plan ask for more values of {key} than the {MAX_VARIANTS} that a plan considers; the pod is planned again \
                     in seconds, when others have their nodes"
                ));
            }
            return Some(format!("no instance type has {}", terms_text(&class.node_terms)));
        }
        if !of.has_any(&allowed.both) {
            let (own, volumes) = (terms_text(&class.node_terms), terms_text(&class.volume_terms));
            return Some(format!("no instance type has {own} where its volumes are: {volumes}"));
        }
        let has_extended = |column: usize| {
            group.need.iter().zip(column_sets.room(column)).skip(COMMON).all(|(need, room)| need <= room)
        };
        if !allowed.in_domains.within(of.columns.clone()).any(has_extended) {
            let domains = &allowed.domains;
            let location = if domains.is_empty() { required_zones(class) } else { format!(" in {domains}") };
            let requests = column_sets.dims.sparse(&group.need);
            let missing = requests.extended.keys().map(AsRef::as_ref).collect::<Vec<&str>>().join(", ");
            if missing.is_empty() {
                return Some(format!("no instance type is offered{location}"));
            }
            return Some(format!("allows no type with {missing}{location}"));
        }
        self.size_reason(of, group, allowed)
    }

    /// Why none of the columns that a group may use can be purchased for it: their size, a limit of the NodePool, or its `minValues`.
    fn size_reason(&self, of: &PoolColumns<'_>, group: &Group, allowed: &Allowed) -> Option<String> {
        let (column_sets, pool, class) = (&*self.column_sets, of.pool, &group.class);
        let usable = || allowed.usable.within(of.columns.clone());
        let holding = || usable().filter(|column| fits(&group.need, column_sets.room(*column)));
        let Some(first) = holding().next() else {
            let overflows = |column: usize| {
                let allocatable = column_sets.dims.dense_of(column_sets.instance_type(column));
                !fits(column_sets.overhead(column), &allocatable)
            };
            let largest = usable().max_by_key(|column| {
                let room = column_sets.room(*column);
                (room[0], room[1], Reverse(*column))
            })?;
            if usable().all(overflows) {
                return Some("no instance type holds its DaemonSets together".to_owned());
            }
            let room: Vec<i64> = column_sets.room(largest).iter().map(|amount| (*amount).max(0)).collect();
            let mut room = column_sets.dims.sparse(&room);
            room.extended.retain(|name, _| class.requests.extended.contains_key(name));
            return Some(format!(
                "no instance type holds {} (largest: {} with {room} after overhead)",
                class.requests,
                column_sets.instance_type(largest).name,
            ));
        };
        let budget = &self.budgets[of.index];
        if !holding().any(|column| budget.allows(column_sets.charge(column))) {
            let smallest = holding().min_by_key(|column| (column_sets.columns[*column].price, *column));
            let charge = column_sets.charge(smallest.unwrap_or(first));
            let name = budget.exceeded_limit(charge).unwrap_or("nodes");
            return Some(format!("limit on {name} reached ({})", limit_text(pool, name)));
        }
        if pool.requirements.iter().any(|r| r.min_values.is_some()) {
            let within = if budget.is_limited() { ", within its limits," } else { "" };
            return Some(format!("too few instance types hold it{within} for the pool's minValues"));
        }
        None
    }
}

/// The label that the NodePool leaves open, and whose value that the pod requires is not among the values of its columns.
fn crowded_out<'a>(of: &PoolColumns<'_>, allowed: &'a Allowed) -> Option<&'a str> {
    let open = of.requirements.as_ref()?;
    let is_open = |key: &str| !of.pool.labels.contains_key(key) && open.get(key).is_some();
    let crowded = |(key, columns): &&(Arc<str>, Bits)| is_open(key) && !of.has_any(columns);
    allowed.chosen.iter().find(crowded).map(|(key, _)| &**key)
}

fn limit_text(pool: &Pool, name: &str) -> String {
    if name == "nodes" {
        return format!("nodes {} of {}", pool.node_count, pool.node_limit.unwrap_or(0));
    }
    let limit = pool.limits.as_ref().map_or(0, |l| l.get(name));
    format!("{name} {} of {} before this plan", human(name, pool.usage.get(name)), human(name, limit))
}

/// The first requirement on which the class and the NodePool conflict, if each of the class's node terms has such a conflict.
fn conflict(of: &PoolColumns<'_>, class: &PodClass) -> Option<String> {
    let requirements = of.requirements.as_ref()?;
    let mut first: Option<String> = None;
    for term in &class.node_terms {
        let mut found = None;
        for (key, set) in term.labels.iter() {
            let fixed = of.pool.labels.get(key.as_ref()).map(|value| ValueSet::one(value));
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
