//! Moves: the removal of nodes with a place for every pod of them, divided into parts that do not depend on each other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stowage_api::Requirement;
use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;
use stowage_model::units::MicroUsd;
use stowage_planner::{Choice, ExistingNodePlacement, Plan, PlannedNode};

use crate::decisions::disruption::consolidation::balanced::Score;
use crate::decisions::disruption::node_facts::NodeFacts;
use crate::decisions::disruption::obstacle::MIN_ALTERNATIVES;
use crate::state::plan_record::MoveSource;
use crate::state::snapshot::Snapshot;

/// Nodes that are removed together, and where their pods go.
#[derive(Clone, Debug)]
pub struct Move {
    /// The removed nodes as they were when the move was planned, by NodeClaim.
    pub sources: BTreeMap<String, Arc<NodeFacts>>,
    /// What it was planned in; shared with the other moves of a decision.
    pub snapshot: Arc<Snapshot>,
    /// The places of the pods of its sources.
    pub plan: Plan,
    /// Hourly price of the sources less that of the new nodes.
    pub saving: MicroUsd,
    /// Of NodePools of its sources with the policy `Balanced`.
    pub scores: BTreeMap<String, Score>,
}

impl Move {
    /// Planned price of the new nodes per hour, by NodePool.
    pub fn purchases(&self) -> BTreeMap<Arc<str>, MicroUsd> {
        let mut out: BTreeMap<Arc<str>, MicroUsd> = BTreeMap::new();
        for node in &self.plan.new_nodes {
            let pool = &self.snapshot.problem.pools[node.pool].name;
            out.entry(Arc::clone(pool)).or_default().0 += price(node);
        }
        out
    }

    /// What it does, for people.
    pub fn described(&self) -> String {
        let (removed, saving) = (self.sources.len(), self.saving.usd());
        let nodes = if removed == 1 { "node" } else { "nodes" };
        let types = self.plan.new_nodes.iter().filter_map(|node| node.choices.first());
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for choice in types {
            *counts.entry(&*choice.instance_type.name).or_default() += 1;
        }
        let purchased = if counts.is_empty() {
            "purchase none".to_owned()
        } else {
            let counts = counts.iter().map(|(name, count)| format!("{count} {name}"));
            format!("purchase {}", counts.collect::<Vec<_>>().join(", "))
        };
        format!("remove {removed} {nodes} and {purchased}: saves {saving:.4} USD per hour")
    }

    /// Limits what the launches may cost: together at most `extra` more per hour than planned, in proportion to the planned prices.
    pub fn limit_prices(&mut self, extra: MicroUsd) {
        let total: i64 = self.plan.new_nodes.iter().map(price).sum();
        for node in &mut self.plan.new_nodes {
            let planned = price(node);
            let share = i128::from(extra.0.max(0)) * i128::from(planned) / i128::from(total.max(1));
            let most = MicroUsd(planned.saturating_add(i64::try_from(share).unwrap_or(i64::MAX)));
            node.max_price = Some(node.max_price.map_or(most, |known| known.min(most)));
        }
    }

    /// Leaves a new spot node that replaces one spot node only the cheapest of its instance types: those that are needed
    /// ([`MIN_ALTERNATIVES`], `minValues`). Whichever is launched, too few are cheaper to replace it in turn.
    ///
    /// # Errors
    /// Of so few types, an offering costs no more than its launch may.
    pub fn limit_alternatives(&mut self) -> Result<(), usize> {
        let (problem, sources) = (&self.snapshot.problem, self.sources_by_pod());
        for node in &mut self.plan.new_nodes {
            let pods = node.pods.iter().map(|pod| &problem.pods[*pod].key);
            let replaced: BTreeSet<&String> = pods.filter_map(|key| Some(&sources.get(key)?.claim)).collect();
            let replaces_one = replaced.len() == 1 && replaced.iter().all(|claim| self.sources[*claim].is_spot);
            if replaces_one && is_spot(node) {
                let allowed = |choice: &&Choice| node.max_price.is_none_or(|most| choice.price <= most);
                let choices: Vec<Choice> = node.choices.iter().filter(allowed).cloned().collect();
                let spot = choices.iter().filter(|choice| choice.capacity_type == CapacityType::Spot);
                let types = spot.map(|choice| &choice.instance_type.name).collect::<BTreeSet<_>>().len();
                if types < MIN_ALTERNATIVES {
                    return Err(types);
                }
                node.choices = cheapest(&choices, &problem.pools[node.pool].requirements);
            }
        }
        Ok(())
    }

    /// The replacements in a row that its new nodes are the last of.
    pub fn generation(&self, now: UnixMillis) -> u8 {
        let replacements = self.sources.values().filter_map(|facts| facts.replacements(now));
        replacements.map(|(generation, _)| generation).max().unwrap_or(0).saturating_add(1)
    }

    /// NodeClaims of the nodes that exist and take pods.
    pub fn targets(&self) -> impl Iterator<Item = &String> {
        let refs = self.plan.placements.iter().map(|placement| &self.snapshot.node_refs[placement.node]);
        refs.filter_map(|node_ref| node_ref.claim.as_ref())
    }

    /// Keys of the pods of a source that go to nodes without a NodeClaim, where no room can be kept.
    pub fn unheld(&self, source: &str) -> BTreeSet<String> {
        let of_source = self.sources.get(source).into_iter().flat_map(|facts| &facts.pods);
        let of_source: BTreeSet<&str> = of_source.map(|entry| &*entry.key).collect();
        let without = self.placements(|claim| claim.is_none()).flat_map(|placement| &placement.pods);
        let keys = without.map(|pod| &*self.snapshot.problem.pods[*pod].key);
        keys.filter(|key| of_source.contains(key)).map(str::to_owned).collect()
    }

    /// The part of its plan for which room is kept on nodes that exist.
    pub fn held_on_targets(&self) -> Plan {
        Plan { placements: self.placements(|claim| claim.is_some()).cloned().collect(), ..Plan::default() }
    }

    fn placements(&self, is_meant: impl Fn(Option<&String>) -> bool) -> impl Iterator<Item = &ExistingNodePlacement> {
        let refs = &self.snapshot.node_refs;
        self.plan.placements.iter().filter(move |placement| is_meant(refs[placement.node].claim.as_ref()))
    }

    /// Where each pod is moved from.
    pub fn sources_by_pod(&self) -> BTreeMap<Arc<str>, MoveSource> {
        let of_source = |(claim, facts): (&String, &Arc<NodeFacts>)| {
            let source = MoveSource { claim: claim.clone(), node: facts.node.clone() };
            facts.pods.iter().map(|entry| (Arc::clone(&entry.key), source.clone())).collect::<Vec<_>>()
        };
        self.sources.iter().flat_map(of_source).collect()
    }

    /// Keys of the pods of its plan.
    pub fn pods(&self) -> BTreeSet<&str> {
        self.plan.pods().map(|pod| &*self.snapshot.problem.pods[pod].key).collect()
    }
}

/// Whether it may be launched as a spot instance.
pub fn is_spot(node: &PlannedNode) -> bool {
    node.choices.iter().any(|choice| choice.capacity_type == CapacityType::Spot)
}

/// The choices of the cheapest instance types, as many as are needed.
fn cheapest(choices: &[Choice], requirements: &[Requirement]) -> Arc<[Choice]> {
    let mut types: Vec<&str> = Vec::new();
    let is_kept = |types: &[&str], choice: &&Choice| types.contains(&&*choice.instance_type.name);
    let suffices = |types: &[&str]| {
        let values = |key: &str| {
            let kept = choices.iter().filter(|choice| is_kept(types, choice));
            kept.filter_map(|choice| choice.label(key)).collect::<BTreeSet<_>>().len()
        };
        let holds = |least: i64, key: &str| usize::try_from(least).is_ok_and(|least| values(key) >= least);
        let all = |other: &Requirement| other.min_values.is_none_or(|least| holds(least, &other.key));
        types.len() >= MIN_ALTERNATIVES && requirements.iter().all(all)
    };
    for choice in choices {
        if !is_kept(&types, &choice) {
            if suffices(&types) {
                break;
            }
            types.push(&choice.instance_type.name);
        }
    }
    choices.iter().filter(|choice| is_kept(&types, choice)).cloned().collect()
}

fn price(node: &PlannedNode) -> i64 {
    node.choices.first().map_or(0, |choice| choice.price.0)
}

/// Divides a plan for the pods of these nodes: nodes whose pods share a new node are removed together, others by themselves. Room on nodes
/// that exist is kept for each pod, so that it connects none. `source_of` is the NodeClaim of a pod of the plan; pods without one wait.
pub fn split<'c>(
    sources: &BTreeMap<String, Arc<NodeFacts>>,
    snapshot: &Arc<Snapshot>,
    plan: &Plan,
    source_of: impl Fn(usize) -> Option<&'c str>,
) -> Vec<Move> {
    let mut parts = Parts::new(sources.keys().map(String::as_str));
    for node in &plan.new_nodes {
        let mut claims = node.pods.iter().filter_map(|pod| source_of(*pod));
        if let Some(first) = claims.next() {
            claims.for_each(|other| parts.join(first, other));
        }
    }
    let mut moves: BTreeMap<String, Move> = BTreeMap::new();
    for (claim, facts) in sources {
        let part = parts.find(claim).to_owned();
        let one = moves.entry(part).or_insert_with(|| Move {
            sources: BTreeMap::new(),
            snapshot: Arc::clone(snapshot),
            plan: Plan::default(),
            saving: MicroUsd(0),
            scores: BTreeMap::new(),
        });
        one.saving.0 += facts.price.0;
        one.sources.insert(claim.clone(), Arc::clone(facts));
    }
    for node in &plan.new_nodes {
        let claim = node.pods.iter().find_map(|pod| source_of(*pod));
        if let Some(one) = claim.and_then(|claim| moves.get_mut(parts.find(claim))) {
            one.saving.0 -= price(node);
            one.plan.cost.0 += price(node);
            one.plan.new_nodes.push(node.clone());
        }
    }
    for placement in &plan.placements {
        let mut of_part: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for pod in &placement.pods {
            if let Some(claim) = source_of(*pod) {
                of_part.entry(parts.find(claim)).or_default().push(*pod);
            }
        }
        for (part, pods) in of_part {
            if let Some(one) = moves.get_mut(part) {
                one.plan.placements.push(ExistingNodePlacement { node: placement.node, pods });
            }
        }
    }
    moves.into_values().collect()
}

/// Claims in disjoint sets, each with the least of its claims as its name.
struct Parts<'c>(BTreeMap<&'c str, &'c str>);

impl<'c> Parts<'c> {
    fn new(claims: impl Iterator<Item = &'c str>) -> Self {
        Self(claims.map(|claim| (claim, claim)).collect())
    }

    fn find<'a>(&'a self, claim: &'a str) -> &'a str
    where
        'c: 'a,
    {
        let mut at = claim;
        while let Some(next) = self.0.get(at).filter(|next| **next != at) {
            at = next;
        }
        at
    }

    fn join(&mut self, a: &str, b: &str) {
        let known = |claim: &str| self.0.get_key_value(self.find(claim)).map(|(name, _)| *name);
        if let (Some(a), Some(b)) = (known(a), known(b)) {
            let (least, other) = (a.min(b), a.max(b));
            self.0.insert(other, least);
        }
    }
}

#[cfg(test)]
mod tests;
