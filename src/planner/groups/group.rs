//! Groups: pods of one class that the same selectors select, which no rule distinguishes. All later stages work on groups with counts.

use std::collections::HashMap;
use std::sync::Arc;

use stowage_model::offering::CapacityType;
use stowage_model::pod_class::{NodeTerm, PodClass};

use crate::columns::bitset::Bits;
use crate::columns::dims::COMMON;
use crate::columns::sets::ColumnSets;
use crate::groups::host_rules::{HostCounters, HostRules};
use crate::groups::pod_selectors::Selectors;
use crate::input::pod::{Daemon, Labels};
use crate::input::settings::PreferencePolicy;

/// Pods that no rule of the problem distinguishes.
#[derive(Debug)]
pub(crate) struct Group {
    pub class: Arc<PodClass>,
    /// Controller of its pods, where the maximum of pods per controller and node is set.
    owner: Option<Arc<str>>,
    /// Indexes of the pods, in the order of their scheduler's queue.
    pub pods: Vec<usize>,
    /// Requests of one pod.
    pub need: Vec<i64>,
    /// Selectors that select its pods.
    pub matches: Arc<[u32]>,
    pub host: HostRules,
    /// Columns by preference level, most preferred first; the last level has all columns that its requirements allow.
    pub levels: Vec<Bits>,
    /// Columns whose domains count for its spread: volumes may exclude some of them for the pod, but not for the count.
    pub domains: Bits,
    /// Columns without a DaemonSet that its required anti-affinity excludes; `None` where there is no such DaemonSet.
    apart: Option<Bits>,
}

impl Group {
    /// What a pod adds to the load of its domains.
    pub fn weight(&self) -> i64 {
        self.need[0].saturating_add(self.need[1] >> 22).max(1)
    }

    /// What all pods together add to the load of their domains.
    pub fn total_weight(&self) -> i64 {
        self.weight().saturating_mul(i64::try_from(self.pods.len()).unwrap_or(i64::MAX))
    }
}

/// Groups the pods by class and matching selectors, in an order that does not depend on the order of the input.
pub(crate) fn group(
    column_sets: &mut ColumnSets<'_>,
    selectors: &mut Selectors<'_>,
    counters: &HostCounters,
) -> Vec<Group> {
    let problem = column_sets.problem;
    let mut ids: HashMap<(*const PodClass, Arc<[u32]>, Option<Arc<str>>), usize> = HashMap::new();
    let by_owner = problem.settings.workload_pods_per_node.is_some();
    let mut groups: Vec<Group> = Vec::new();
    // Pods of one workload are mostly adjacent: the last group is tried first.
    let mut last: Option<(*const PodClass, *const Labels, usize)> = None;
    for (at, pod) in problem.pods.iter().enumerate() {
        let (class, pod_labels) = (Arc::as_ptr(&pod.class), Arc::as_ptr(&pod.labels));
        if let Some((c, l, group)) = last
            && c == class
            && l == pod_labels
            && (!by_owner || groups[group].owner == pod.owner)
        {
            groups[group].pods.push(at);
            continue;
        }
        let matches = selectors.matching(pod);
        let owner = pod.owner.clone().filter(|_| by_owner);
        let group = *ids.entry((class, Arc::clone(&matches), owner.clone())).or_insert_with(|| {
            groups.push(Group {
                class: Arc::clone(&pod.class),
                owner,
                pods: Vec::new(),
                need: column_sets.dims.dense(&pod.class.requests),
                matches,
                host: HostRules::default(),
                levels: Vec::new(),
                domains: Bits::default(),
                apart: None,
            });
            groups.len() - 1
        });
        groups[group].pods.push(at);
        last = Some((class, pod_labels, group));
    }
    let position = |at: &usize| problem.pods[*at].queue_position();
    // When pods came decides which of them goes where, not what is purchased.
    let first_key = |group: &Group| group.pods.iter().map(|at| &problem.pods[*at].key).min();
    groups.sort_by(|a, b| first_key(a).cmp(&first_key(b)));
    for group in &mut groups {
        if !group.pods.is_sorted_by_key(position) {
            group.pods.sort_by(|a, b| position(a).cmp(&position(b)));
        }
        let class = Arc::clone(&group.class);
        group.host = counters.pending(&class, &group.matches, group.owner.as_ref(), selectors);
        if problem.settings.preference_policy == PreferencePolicy::Ignore {
            group.host.soft.clear();
            group.host.likes.clear();
        }
        group.domains = allowed(column_sets, &class, &group.need);
        group.apart = apart_from_daemons(column_sets, selectors, &class);
        let usable = usable(column_sets, group);
        group.levels = levels(column_sets, &class, &group.need, usable);
    }
    groups
}

/// Columns that the node constraints of a class allow, without regard to volumes, and that offer its extended resources.
fn allowed(column_sets: &mut ColumnSets<'_>, class: &PodClass, need: &[i64]) -> Bits {
    let extended = COMMON..need.len();
    let has_extended = extended.clone().any(|dim| need[dim] > 0);
    let mut allowed = column_sets.columns_for(class);
    if has_extended {
        let offered =
            column_sets.where_column(|column| extended.clone().all(|d| need[d] <= column_sets.room(column)[d]));
        allowed.and(&offered);
    }
    allowed
}

/// Columns without a DaemonSet that the required anti-affinity of a class excludes, on whatever key: the DaemonSet's pod is in the domain of
/// its node. `None` where there is no such DaemonSet.
fn apart_from_daemons(column_sets: &ColumnSets<'_>, selectors: &mut Selectors<'_>, class: &PodClass) -> Option<Bits> {
    let problem = column_sets.problem;
    if class.anti_affinity.is_empty() || problem.daemons.is_empty() {
        return None;
    }
    let excluded: Vec<u32> = class.anti_affinity.iter().filter_map(|term| selectors.add_term(term)).collect();
    let is_excluded =
        |daemon: &Daemon| selectors.matching(&daemon.pod()).iter().any(|selector| excluded.contains(selector));
    let daemons: Vec<bool> = problem.daemons.iter().map(is_excluded).collect();
    let is_apart = |column: usize| column_sets.daemons(column).iter().all(|daemon| !daemons[*daemon]);
    daemons.contains(&true).then(|| column_sets.where_column(is_apart))
}

/// Columns that a group's requirements, volumes and DaemonSets allow, counted reservations included, which its levels exclude.
pub(crate) fn usable(column_sets: &mut ColumnSets<'_>, group: &Group) -> Bits {
    let mut bits = group.domains.clone();
    if let Some(apart) = &group.apart {
        bits.and(apart);
    }
    if !group.class.volume_terms.is_empty() {
        bits.and(&column_sets.constrained(&group.class.volume_terms, &group.class));
    }
    bits
}

/// Columns by preference level, of those that are usable: each preferred node term that some column satisfies (highest weight first), then all columns; each of
/// them first without `PreferNoSchedule` taints (Karpenter core reference 3.6).
fn levels(column_sets: &mut ColumnSets<'_>, class: &PodClass, need: &[i64], mut required: Bits) -> Vec<Bits> {
    if column_sets.has_counted {
        required.and(&column_sets.where_column(|column| column_sets.columns[column].left.is_none()));
    }
    let mut sets: Vec<Bits> = Vec::new();
    if column_sets.problem.settings.preference_policy == PreferencePolicy::Respect {
        for (_, term) in &class.preferred_nodes {
            let mut preferred = column_sets.constrained(&with_term(class, term), class);
            preferred.and(&required);
            sets.push(preferred);
        }
    }
    sets.push(required.clone());
    if column_sets.problem.settings.prefer_spot {
        let spot =
            column_sets.where_column(|column| column_sets.columns[column].capacity_type != CapacityType::OnDemand);
        sets = sets.into_iter().flat_map(|set| [set.intersection(&spot), set]).collect();
    }
    let mut out: Vec<Bits> = Vec::new();
    let push = |column_sets: &mut ColumnSets<'_>, set: Bits, out: &mut Vec<Bits>| {
        if !set.is_empty() && !out.contains(&set) {
            let id = column_sets.column_set(set.clone());
            if column_sets.any_fits(id, need) {
                out.push(set);
            }
        }
    };
    if let Some(untainted) = column_sets.without_soft_taints(class) {
        for set in &sets {
            let mut clean = set.clone();
            clean.and(&untainted);
            push(column_sets, clean, &mut out);
        }
    }
    for set in sets {
        push(column_sets, set, &mut out);
    }
    if out.last() != Some(&required) {
        out.retain(|set| set != &required);
        out.push(required);
    }
    out
}

fn with_term(class: &PodClass, term: &NodeTerm) -> Vec<NodeTerm> {
    if class.node_terms.is_empty() {
        return vec![term.clone()];
    }
    class.node_terms.iter().map(|required| required.and(term)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_model::time::UnixMillis;

    use crate::test_support::World;
    use crate::test_support::plan_stages::instance;

    #[test]
    fn when_pods_came_orders_the_pods_of_a_group_and_not_the_groups() {
        let mut world = World::new();
        for name in ["a", "b"] {
            world.pods(name, 2, &json!({"app": name}), if name == "a" { "1" } else { "2" }, "1Gi", &json!({}));
        }
        for (pod, at) in world.problem.pods.iter_mut().zip([40, 30, 20, 10]) {
            pod.queued_at = UnixMillis(at);
        }
        let mut instance = instance(&world);
        let state = instance.state(false);
        let groups: Vec<&[usize]> = state.demand.groups.iter().map(|group| &*group.pods).collect();
        assert_eq!(groups, [[1, 0], [3, 2]]);
    }
}
