//! Small random problems with rules on several topology keys: plans bind in kube-scheduler's terms, and few leave out a pod that exhaustive
//! search places in addition. The search shares no code with the planner.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};

use crate::output::plan::Plan;
use crate::test_support::{HOST, World, ZONE, ZONES};

const KEYS: [&str; 4] = [ZONE, "kubernetes.io/arch", "karpenter.sh/capacity-type", HOST];
const VALUES: [&[&str]; 3] = [&ZONES, &["amd64", "arm64"], &["spot", "on-demand"]];
const ON_HOST: usize = 3;
/// Pods of a case, over all workloads.
const MAX_PODS: usize = 6;
/// Hosts that the search knows: existing nodes, and new nodes.
const MAX_HOSTS: usize = 6;
/// Share of the cases in which the heuristic may leave out a pod that has a place.
const MAX_LEFT_OUT_PERCENT: usize = 3;

/// The pods that a rule selects: those of one workload, or all.
type Of = Option<usize>;

#[derive(Clone, Copy, Debug)]
enum Rule {
    Spread { key: usize, skew: i64, min_domains: Option<i64>, honor: bool, of: Of },
    Apart { key: usize, of: Of },
    Near { key: usize, of: Of },
}

#[derive(Clone, Debug)]
struct Workload {
    pods: usize,
    /// Key and value of a node selector.
    only: Option<(usize, usize)>,
    rules: Vec<Rule>,
}

/// A pod of a workload that runs, and its anti-affinity.
#[derive(Clone, Copy, Debug)]
struct Running {
    of: usize,
    apart: Option<(usize, Of)>,
}

#[derive(Clone, Debug)]
struct Host {
    /// Value of each key; that of the host name is the host's index.
    at: [usize; 4],
    room: usize,
    exists: bool,
    running: Vec<Running>,
}

#[derive(Clone, Debug)]
struct Case {
    workloads: Vec<Workload>,
    /// Zone, architecture and capacity type of each NodePool.
    pools: Vec<[usize; 3]>,
    nodes: Vec<Host>,
}

/// Pods by workload and host.
type Counts = Vec<Vec<usize>>;

fn selects(of: Of, workload: usize) -> bool {
    of.is_none_or(|of| of == workload)
}

/// kube-scheduler's filters on a list of hosts.
struct Cluster<'c> {
    workloads: &'c [Workload],
    hosts: Vec<Host>,
    /// Whether a domain counts for a spread as soon as the pod may have a node there.
    strict: bool,
}

impl Cluster<'_> {
    fn accepts(&self, workload: usize, host: usize) -> bool {
        self.workloads[workload].only.is_none_or(|(key, value)| self.hosts[host].at[key] == value)
    }

    /// Pods that a rule selects in a domain, or everywhere.
    fn count(&self, bound: &Counts, of: Of, within: impl Fn(usize) -> bool) -> usize {
        let running = |host: usize| self.hosts[host].running.iter().filter(|pod| selects(of, pod.of)).count();
        let planned =
            |host: usize| (0..self.workloads.len()).filter(|w| selects(of, *w)).map(|w| bound[w][host]).sum::<usize>();
        (0..self.hosts.len()).filter(|host| within(*host)).map(|host| running(host) + planned(host)).sum()
    }

    fn binds(&self, bound: &Counts, used: &[bool], workload: usize, host: usize) -> bool {
        let here = &self.hosts[host];
        let together = |key: usize, other: usize| self.hosts[other].at[key] == here.at[key];
        if !self.accepts(workload, host) || bound.iter().map(|of| of[host]).sum::<usize>() >= here.room {
            return false;
        }
        let refused = (0..self.hosts.len()).any(|other| {
            let refuses = |key: usize, of: Of| selects(of, workload) && together(key, other);
            let running = self.hosts[other].running.iter().filter_map(|pod| pod.apart);
            let planned = (0..self.workloads.len()).filter(|w| bound[*w][other] > 0);
            running.clone().any(|(key, of)| refuses(key, of))
                || planned
                    .flat_map(|w| &self.workloads[w].rules)
                    .any(|rule| matches!(*rule, Rule::Apart { key, of } if refuses(key, of)))
        });
        !refused
            && self.workloads[workload].rules.iter().all(|rule| match *rule {
                Rule::Apart { key, of } => self.count(bound, of, |other| together(key, other)) == 0,
                Rule::Near { key, of } => {
                    self.count(bound, of, |other| together(key, other)) > 0
                        || (selects(of, workload) && self.count(bound, of, |_| true) == 0)
                }
                Rule::Spread { key, skew, min_domains, honor, of } => {
                    let counted = |other: usize| !honor || self.accepts(workload, other);
                    let domains = |open: bool| -> BTreeSet<usize> {
                        let is_domain = |other: &usize| {
                            let has_node = self.hosts[*other].exists || used[*other];
                            counted(*other) && (has_node || (open && self.accepts(workload, *other)))
                        };
                        (0..self.hosts.len()).filter(is_domain).map(|other| self.hosts[other].at[key]).collect()
                    };
                    let number = i64::try_from(domains(false).len()).unwrap();
                    let count = |domain: usize| {
                        let within = |other: usize| self.hosts[other].at[key] == domain && counted(other);
                        i64::try_from(self.count(bound, of, within)).unwrap()
                    };
                    let least = if number < min_domains.unwrap_or(1) {
                        0
                    } else {
                        domains(self.strict && key != ON_HOST).into_iter().map(count).min().unwrap_or(0)
                    };
                    count(here.at[key]) + i64::from(selects(of, workload)) - least <= skew
                }
            })
    }

    fn used(&self, counts: &Counts) -> Vec<bool> {
        (0..self.hosts.len()).map(|host| counts.iter().any(|of| of[host] > 0)).collect()
    }

    /// Whether every pod binds, given all others.
    fn holds(&self, counts: &Counts) -> bool {
        let used = self.used(counts);
        let mut others = counts.clone();
        (0..self.workloads.len()).all(|w| {
            (0..self.hosts.len()).filter(|host| counts[w][*host] > 0).all(|host| {
                others[w][host] -= 1;
                let binds = self.binds(&others, &used, w, host);
                others[w][host] += 1;
                binds
            })
        })
    }

    /// Whether kube-scheduler can bind the pods in some order.
    fn has_order(&self, counts: &Counts) -> bool {
        let used = self.used(counts);
        let mut seen: HashSet<Counts> = HashSet::new();
        let mut open = vec![vec![vec![0; self.hosts.len()]; self.workloads.len()]];
        while let Some(bound) = open.pop() {
            if bound == *counts {
                return true;
            }
            for w in 0..self.workloads.len() {
                for host in (0..self.hosts.len()).filter(|host| bound[w][*host] < counts[w][*host]) {
                    if self.binds(&bound, &used, w, host) {
                        let mut next = bound.clone();
                        next[w][host] += 1;
                        if seen.insert(next.clone()) {
                            open.push(next);
                        }
                    }
                }
            }
        }
        false
    }

    /// Whether all pods bind where they are planned if kube-scheduler tries them in an order, and refused pods again.
    fn replays(&self, counts: &Counts, order: &[(usize, usize)]) -> bool {
        let used = self.used(counts);
        let mut bound = vec![vec![0; self.hosts.len()]; self.workloads.len()];
        let mut waiting = order.to_vec();
        loop {
            let before = waiting.len();
            waiting.retain(|(w, host)| {
                let binds = self.binds(&bound, &used, *w, *host);
                bound[*w][*host] += usize::from(binds);
                !binds
            });
            if waiting.is_empty() || waiting.len() == before {
                return waiting.is_empty();
            }
        }
    }

    /// An assignment of all pods that are `placed`, by workload, and of further ones, where there is one.
    fn better(&self, placed: &[usize]) -> Option<Counts> {
        let mut counts = vec![vec![0; self.hosts.len()]; self.workloads.len()];
        let left: usize = self.workloads.iter().zip(placed).map(|(workload, placed)| workload.pods - placed).sum();
        self.search(&mut counts, (0, 0), (self.workloads[0].pods, left - 1), placed).then_some(counts)
    }

    /// Tries every number of pods of a workload on a host; `spare` pods may stay without one.
    fn search(
        &self,
        counts: &mut Counts,
        (w, host): (usize, usize),
        (left, spare): (usize, usize),
        placed: &[usize],
    ) -> bool {
        if host == self.hosts.len() {
            let enough = self.workloads[w].pods - left >= placed[w];
            let Some(spare) = spare.checked_sub(left).filter(|_| enough) else {
                return false;
            };
            return match self.workloads.get(w + 1) {
                Some(next) => self.search(counts, (w + 1, 0), (next.pods, spare), placed),
                None => self.holds(counts) && self.has_order(counts),
            };
        }
        let most = if self.accepts(w, host) { left } else { 0 };
        for pods in (0..=most).rev() {
            counts[w][host] = pods;
            if self.search(counts, (w, host + 1), (left - pods, spare), placed) {
                return true;
            }
        }
        counts[w][host] = 0;
        false
    }
}

impl Case {
    fn on_hosts(&self) -> bool {
        let on_host = |rule: &Rule| match *rule {
            Rule::Spread { key, .. } | Rule::Apart { key, .. } | Rule::Near { key, .. } => key == ON_HOST,
        };
        self.workloads.iter().flat_map(|workload| &workload.rules).any(on_host)
    }

    /// The existing nodes, and new nodes in each place.
    fn hosts(&self) -> Vec<Host> {
        let copies = if self.on_hosts() { 2 } else { 1 };
        let mut hosts = self.nodes.clone();
        for [zone, arch, capacity] in self.pools.iter().flat_map(|pool| std::iter::repeat_n(pool, copies)) {
            let at = [*zone, *arch, *capacity, hosts.len()];
            hosts.push(Host { at, room: MAX_PODS, exists: false, running: Vec::new() });
        }
        hosts.truncate(MAX_HOSTS);
        hosts
    }

    fn world(&self) -> World {
        let mut world = World::default();
        for (index, [zone, arch, capacity]) in self.pools.iter().enumerate() {
            let requirements = json!([
                {"key": KEYS[0], "operator": "In", "values": [VALUES[0][*zone]]},
                {"key": KEYS[1], "operator": "In", "values": [VALUES[1][*arch]]},
            ]);
            let pool = json!({"capacity-types": [VALUES[2][*capacity]], "requirements": requirements});
            world.pool(&format!("pool-{index}"), &pool);
        }
        for (index, host) in self.nodes.iter().enumerate() {
            let running: Vec<(Value, Value)> = host
                .running
                .iter()
                .map(|pod| (labels(pod.of), spec(None, pod.apart.map(|(key, of)| Rule::Apart { key, of }).as_slice())))
                .collect();
            let running: Vec<(&Value, &Value)> = running.iter().map(|(labels, spec)| (labels, spec)).collect();
            let cpus = i64::try_from(host.room + running.len()).unwrap();
            let node = world.node(&format!("n{index}"), VALUES[0][host.at[0]], cpus, &running);
            for key in 1..3 {
                node.labels.insert(KEYS[key].to_owned(), VALUES[key][host.at[key]].to_owned());
            }
        }
        for (index, workload) in self.workloads.iter().enumerate() {
            let spec = spec(workload.only, &workload.rules);
            world.pods(&format!("w{index}"), workload.pods, &labels(index), "1", "1Gi", &spec);
        }
        world
    }

    /// The hosts and counts of a plan, and its pods in plan order.
    fn planned(&self, world: &World, plan: &Plan) -> (Vec<Host>, Counts, Vec<(usize, usize)>) {
        let mut hosts = self.nodes.clone();
        let mut order = Vec::new();
        let workload = |pod: usize| {
            let name = world.problem.pods[pod].key.strip_prefix("default/w").unwrap();
            name.split('-').next().unwrap().parse::<usize>().unwrap()
        };
        for placement in &plan.placements {
            order.extend(placement.pods.iter().map(|pod| (workload(*pod), placement.node)));
        }
        for node in &plan.new_nodes {
            let choice = &node.choices[0];
            let value = |key: usize, value: &str| VALUES[key].iter().position(|have| *have == value).unwrap();
            let at = [
                value(0, &choice.zone),
                value(1, &choice.instance_type.labels[KEYS[1]]),
                value(2, &choice.capacity_type.to_string()),
                hosts.len(),
            ];
            order.extend(node.pods.iter().map(|pod| (workload(*pod), hosts.len())));
            hosts.push(Host { at, room: MAX_PODS, exists: false, running: Vec::new() });
        }
        let mut counts = vec![vec![0; hosts.len()]; self.workloads.len()];
        for (w, host) in &order {
            counts[*w][*host] += 1;
        }
        (hosts, counts, order)
    }

    /// The first rule that the plan of the case breaks, or else the pods that it leaves out though there is a place.
    fn judge(&self, seed: u64) -> Result<Option<String>, String> {
        let world = self.world();
        let plan = world.plan();
        let (hosts, counts, mut order) = self.planned(&world, &plan);
        let cluster = Cluster { workloads: &self.workloads, hosts, strict: false };
        if !cluster.holds(&counts) {
            return Err(format!("the plan breaks a rule: {counts:?}"));
        }
        if !cluster.has_order(&counts) {
            return Ok(Some(format!("the plan binds in no order: {counts:?}")));
        }
        let mut random = seed;
        // Affinity to pods of its own kind, and spreads over several keys, depend on the order in any plan.
        let free_order = |workload: &Workload| {
            let is_near = |rule: &Rule| matches!(rule, Rule::Near { .. });
            let is_spread = |rule: &&Rule| matches!(rule, Rule::Spread { .. });
            !workload.rules.iter().any(is_near) && workload.rules.iter().filter(is_spread).count() < 2
        };
        let orders = if self.workloads.iter().all(free_order) { 3 } else { 0 };
        for shuffled in ["plan order", "a random order", "another random order"].into_iter().take(orders) {
            if !cluster.replays(&counts, &order) {
                return Err(format!("the plan does not bind in {shuffled} {order:?}"));
            }
            for at in (1..order.len()).rev() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                order.swap(at, usize::try_from((random >> 33) % (at as u64 + 1)).unwrap());
            }
        }
        if plan.unschedulable.is_empty() {
            return Ok(None);
        }
        let cluster = Cluster { workloads: &self.workloads, hosts: self.hosts(), strict: true };
        let placed: Vec<usize> = counts.iter().map(|of| of.iter().sum()).collect();
        let reasons: BTreeMap<&str, &str> =
            plan.unschedulable.iter().map(|left| (&*world.problem.pods[left.pod].key, &*left.reason)).collect();
        let better = cluster.better(&placed);
        Ok(better.map(|better| format!("{counts:?}, but {better:?} exists: {reasons:?}\n{self:?}")))
    }
}

fn labels(workload: usize) -> Value {
    json!({"app": format!("w{workload}"), "all": "yes"})
}

fn spec(only: Option<(usize, usize)>, rules: &[Rule]) -> Value {
    let selector = |of: Of| match of {
        Some(workload) => json!({"matchLabels": {"app": format!("w{workload}")}}),
        None => json!({"matchLabels": {"all": "yes"}}),
    };
    let term = |key: usize, of: Of| json!({"topologyKey": KEYS[key], "labelSelector": selector(of)});
    let [mut spread, mut apart, mut near] = [const { Vec::new() }; 3];
    for rule in rules {
        match *rule {
            Rule::Apart { key, of } => apart.push(term(key, of)),
            Rule::Near { key, of } => near.push(term(key, of)),
            Rule::Spread { key, skew, min_domains, honor, of } => {
                let mut constraint = term(key, of);
                constraint["maxSkew"] = json!(skew);
                constraint["whenUnsatisfiable"] = json!("DoNotSchedule");
                constraint["nodeAffinityPolicy"] = json!(if honor { "Honor" } else { "Ignore" });
                if let Some(min_domains) = min_domains {
                    constraint["minDomains"] = json!(min_domains);
                }
                spread.push(constraint);
            }
        }
    }
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let mut spec = json!({"topologySpreadConstraints": spread,
        "affinity": {"podAffinity": {required: near}, "podAntiAffinity": {required: apart}}});
    if let Some((key, value)) = only {
        spec["nodeSelector"] = json!({KEYS[key]: VALUES[key][value]});
    }
    spec
}

fn rule(workloads: usize) -> impl Strategy<Value = Rule> {
    let of = move || prop_oneof![4 => (0..workloads).prop_map(Some), 1 => Just(None)];
    prop_oneof![
        (0..3_usize, 1..3_i64, prop::option::of(1..4_i64), any::<bool>(), of())
            .prop_map(|(key, skew, min_domains, honor, of)| Rule::Spread { key, skew, min_domains, honor, of }),
        (prop_oneof![3 => 0..3_usize, 1 => Just(ON_HOST)], of()).prop_map(|(key, of)| Rule::Apart { key, of }),
        (prop_oneof![3 => 0..3_usize, 1 => Just(ON_HOST)], of()).prop_map(|(key, of)| Rule::Near { key, of }),
    ]
}

fn workload(workloads: usize) -> impl Strategy<Value = Workload> {
    let place = (0..3_usize).prop_flat_map(|key| (Just(key), 0..VALUES[key].len()));
    let only = prop_oneof![2 => Just(None), 1 => place.prop_map(Some)];
    (1..=MAX_PODS, only, prop::collection::vec(rule(workloads), 0..3)).prop_map(|(pods, only, mut rules)| {
        // Two terms of required affinity must find one pod that both select: here, a pod has one such term, and one spread for each key.
        let mut seen = BTreeSet::new();
        rules.retain(|rule| match rule {
            Rule::Spread { key, .. } => seen.insert(*key),
            Rule::Near { .. } => seen.insert(KEYS.len()),
            Rule::Apart { .. } => true,
        });
        Workload { pods, only, rules }
    })
}

fn place() -> impl Strategy<Value = [usize; 3]> {
    (0..3_usize, 0..2_usize, 0..2_usize).prop_map(|(zone, arch, capacity)| [zone, arch, capacity])
}

fn node(workloads: usize) -> impl Strategy<Value = Host> {
    let of = move || prop_oneof![3 => (0..workloads).prop_map(Some), 1 => Just(None)];
    let apart = prop::option::weighted(0.3, (0..3_usize, of()));
    let running = (0..workloads, apart).prop_map(|(of, apart)| Running { of, apart });
    (place(), 0..3_usize, prop::collection::vec(running, 0..2)).prop_map(|([zone, arch, capacity], room, running)| {
        Host { at: [zone, arch, capacity, 0], room, exists: true, running }
    })
}

fn case() -> impl Strategy<Value = Case> {
    (1..5_usize)
        .prop_flat_map(|workloads| {
            (
                prop::collection::vec(workload(workloads), workloads),
                prop::collection::btree_set(place(), 1..5),
                prop::collection::vec(node(workloads), 0..3),
            )
        })
        .prop_map(|(mut workloads, pools, mut nodes)| {
            let mut left = MAX_PODS;
            let number = workloads.len();
            for (at, workload) in workloads.iter_mut().enumerate() {
                workload.pods = workload.pods.min(left - (number - at - 1));
                left -= workload.pods;
            }
            nodes.iter_mut().enumerate().for_each(|(index, node)| node.at[ON_HOST] = index);
            Case { workloads, pools: pools.into_iter().collect(), nodes }
        })
}

/// The number of cases, the same in every run; STOWAGE_EXHAUSTIVE_CASES tries more.
fn number_of_cases() -> usize {
    std::env::var("STOWAGE_EXHAUSTIVE_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(600)
}

#[test]
fn plans_bind_and_few_leave_out_pods_that_exhaustive_search_places() {
    let cases = number_of_cases();
    let mut runner =
        TestRunner::new_with_rng(ProptestConfig::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &[2; 32]));
    let mut left_out = Vec::new();
    for number in 0..cases {
        let case = case().new_tree(&mut runner).unwrap().current();
        match case.judge(number as u64) {
            Ok(None) => {}
            Ok(Some(why)) => left_out.push(why),
            Err(why) => panic!("case {number}: {why}\n{case:?}"),
        }
    }
    // Two groups that compete for the last room of existing nodes, and host affinity beside rules on other keys, are not searched.
    assert!(left_out.len() * 100 <= cases * MAX_LEFT_OUT_PERCENT, "{} of {cases} cases: {left_out:#?}", left_out.len());
}
