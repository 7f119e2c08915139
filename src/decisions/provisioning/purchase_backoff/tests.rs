use proptest::prelude::*;
use serde_json::json;
use stowage_model::labels;
use stowage_model::resources::Resources;
use stowage_test_objects as objects;

use super::*;
use crate::decisions::demand::demand;
use crate::decisions::holds::{HOLD_LAUNCH, HOLD_READY, resolve};
use crate::state::plan_record::PlanRecord;

const START: UnixMillis = UnixMillis(1_800_000_000_000);
const BOOT: Duration = Duration::from_secs(20);
/// How long a node without pods exists.
const EMPTY: Duration = Duration::from_secs(75);

/// What becomes of the nodes that are purchased for a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// They take it.
    None,
    /// A pod that no plan expects is bound first: a DaemonSet that is larger than its template, or a pod that a webhook enlarged.
    Filled,
    /// Pods that needed a node, too, take the room: a scheduler binds them.
    Used,
    /// Something makes a pod for each node, for a scheduler to bind.
    Pinned,
    /// The hold ends after its time: a scheduler plugin that refuses, a taint of another controller, a limit of a CSI driver.
    Refused,
    /// They have a taint that their NodePool does not have.
    Tainted,
    /// They never initialize: a startup taint that nobody removes.
    NeverInitialized,
    /// They end before the pod is bound.
    Interrupted,
}

const FAILING: [Cause; 6] =
    [Cause::Filled, Cause::Pinned, Cause::Refused, Cause::Tainted, Cause::NeverInitialized, Cause::Interrupted];

const FILLED: &str = "it lacks cpu, pods that were not planned there are n/filler-claim-0";

struct Bought {
    claim: String,
    pod: String,
    at: UnixMillis,
    booted: Option<UnixMillis>,
}

/// A cluster in which each pod that a plan includes gets a node of its own, and kube-scheduler and the kubelets do as the causes say.
struct World {
    state: ClusterState,
    backoff: PurchaseBackoff,
    causes: BTreeMap<String, Cause>,
    nodes: Vec<Bought>,
    purchases: BTreeMap<String, Vec<UnixMillis>>,
    now: UnixMillis,
    /// CPU that the pods of [`Cause::Filled`] request.
    filler: &'static str,
    /// Creation of the pods that are put.
    created: UnixMillis,
}

impl World {
    fn new() -> Self {
        let (state, backoff) = (ClusterState::default(), PurchaseBackoff::default());
        let (causes, purchases) = (BTreeMap::new(), BTreeMap::new());
        Self { state, backoff, causes, nodes: Vec::new(), purchases, now: START, filler: "1500m", created: START }
    }

    fn pod(&mut self, name: &str, owner: &str, cause: Cause) {
        self.causes.insert(format!("n/{name}"), cause);
        self.put_pod(name, owner, None);
    }

    fn put_pod(&mut self, name: &str, owner: &str, node: Option<&str>) {
        let cpu = if name.starts_with("filler") { self.filler } else { "1500m" };
        let owners =
            json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": owner, "controller": true}]);
        let owners = if owner.is_empty() { json!([]) } else { owners };
        let condition =
            json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"});
        let conditions = if node.is_none() { json!([condition]) } else { json!([]) };
        let containers = json!([{"name": "c", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]);
        let meta = json!({"ownerReferences": owners, "creationTimestamp": self.created.rfc3339()});
        let patch = json!({"metadata": meta, "spec": {"nodeName": node, "containers": containers},
            "status": {"conditions": conditions}});
        self.state.apply_pod(&objects::pod(name, &patch), self.now);
    }

    fn put_claim(&mut self, claim: &str, pods: &[String], hold_until: UnixMillis, conditions: &[&str]) {
        let plan = PlanRecord { pods: pods.to_vec(), owners: BTreeMap::new(), hold_until };
        let status = if conditions.is_empty() { json!({}) } else { objects::launched(claim, conditions) };
        let meta = json!({"annotations": plan.annotations(), "labels": {(labels::NODE_POOL): "p"}, "creationTimestamp": self.now.rfc3339()});
        self.state.apply_claim(objects::claim(claim, &json!({"metadata": meta, "status": status})));
    }

    /// One second: the nodes boot, kube-scheduler binds, and what the backoff does not leave out is purchased a node.
    fn step(&mut self) {
        self.now += Duration::from_secs(1);
        let due: Vec<usize> = (0..self.nodes.len()).filter(|at| self.nodes[*at].booted.is_none()).collect();
        for at in due.into_iter().filter(|at| self.nodes[*at].at + BOOT <= self.now).collect::<Vec<_>>() {
            self.boot(at);
        }
        self.remove_empty();
        let holds = resolve(&self.state, self.now);
        let pending = demand(&self.state, &holds, self.now).pending;
        self.backoff.observe(&self.state, &holds, &pending.iter().collect(), |_| false, self.now);
        for pod in pending {
            if !self.backoff.leaves_out(&pod) {
                self.purchase(&pod);
            }
        }
    }

    fn purchase(&mut self, pod: &str) {
        let claim = format!("claim-{}", self.nodes.len());
        self.put_claim(&claim, &[pod.to_owned()], self.now + HOLD_LAUNCH, &[]);
        self.backoff.purchased(&self.state, &claim, [pod.to_owned()].into_iter(), self.now);
        self.put_claim(&claim, &[pod.to_owned()], self.now + HOLD_LAUNCH, &["Launched"]);
        self.purchases.entry(pod.to_owned()).or_default().push(self.now);
        self.nodes.push(Bought { claim, pod: pod.to_owned(), at: self.now, booted: None });
    }

    fn boot(&mut self, at: usize) {
        let (claim, pod) = (self.nodes[at].claim.clone(), self.nodes[at].pod.clone());
        self.nodes[at].booted = Some(self.now);
        let cause = self.causes.get(&pod).copied().unwrap_or(Cause::None);
        if cause == Cause::Interrupted {
            self.state.delete_claim(&claim);
            return;
        }
        let allocatable = json!({"cpu": "2", "memory": "4Gi", "pods": "10"});
        let foreign = json!([{"key": "of-another", "effect": "NoSchedule"}]);
        let taints = if cause == Cause::Tainted { foreign } else { json!([]) };
        let spec = json!({"providerID": format!("aws:///z/{claim}"), "taints": taints});
        let meta = json!({"creationTimestamp": self.now.rfc3339()});
        let node = json!({"metadata": meta, "spec": spec, "status": {"allocatable": allocatable}});
        self.state.apply_node(objects::node(&claim, &node));
        if cause == Cause::NeverInitialized {
            return;
        }
        self.put_claim(
            &claim,
            std::slice::from_ref(&pod),
            self.now + HOLD_READY,
            &["Launched", "Registered", "Initialized"],
        );
        match cause {
            Cause::None => {
                let owner = self.state.pods[&pod].entry.as_ref().unwrap().owner.clone().unwrap_or_default();
                self.put_pod(pod.strip_prefix("n/").unwrap(), &owner, Some(&claim));
            }
            Cause::Filled => self.put_pod(&format!("filler-{claim}"), "", Some(&claim)),
            Cause::Used | Cause::Pinned => {
                self.created = if cause == Cause::Used { START } else { self.now };
                self.put_pod(&format!("other-{claim}"), "", None);
                self.put_pod(&format!("other-{claim}"), "", Some(&claim));
            }
            _ => {}
        }
    }

    fn remove_empty(&mut self) {
        for bought in &self.nodes {
            let is_old = bought.booted.is_some_and(|at| at + EMPTY <= self.now);
            let bound = self.state.pods.get(&bought.pod).is_some_and(|pod| pod.node.as_deref() == Some(&*bought.claim));
            if is_old && !bound && self.causes.get(&bought.pod) != Some(&Cause::NeverInitialized) {
                self.state.delete_claim(&bought.claim);
                self.state.delete_node(&bought.claim);
            }
        }
    }

    fn run(&mut self, seconds: usize) {
        (0..seconds).for_each(|_| self.step());
    }

    fn bought_for(&self, pod: &str) -> Vec<u64> {
        let since = |at: &UnixMillis| at.saturating_since(START).as_secs();
        self.purchases.get(pod).map(|all| all.iter().map(since).collect()).unwrap_or_default()
    }

    fn is_bound(&self, pod: &str) -> bool {
        self.state.pods.get(pod).is_some_and(|pod| pod.node.is_some())
    }
}

/// The largest number of purchases within any ten minutes.
fn most_in_window(purchases: &[u64]) -> usize {
    purchases
        .iter()
        .map(|first| purchases.iter().filter(|at| (*first..first + 600).contains(at)).count())
        .max()
        .unwrap_or(0)
}

#[test]
fn a_pod_that_no_new_node_takes_is_purchased_ever_fewer_nodes() {
    for (cause, expected) in [
        (Cause::Filled, vec![1, 21, 101, 721, 1941]),
        (Cause::Refused, vec![1, 81, 221, 901]),
        (Cause::Interrupted, vec![1, 21, 101, 721, 1941]),
        (Cause::NeverInitialized, vec![1, 301, 661, 1561]),
    ] {
        let mut world = World::new();
        world.pod("a", "", cause);
        world.run(2_000);
        assert_eq!(world.bought_for("n/a"), expected, "{cause:?}");
    }
}

#[test]
fn of_the_pods_of_one_workload_one_at_a_time_tests_a_new_node() {
    let mut world = World::new();
    for index in 0..20 {
        world.pod(&format!("a{index}"), "replica-set", Cause::Filled);
    }
    world.pod("other", "another", Cause::None);
    world.run(21);
    assert_eq!(world.purchases.values().map(Vec::len).sum::<usize>(), 21 + 1, "all, then one of the workload");
    world.run(600);
    let bought: usize = world.purchases.values().map(Vec::len).sum();
    assert!((23..=25).contains(&bought), "{bought} nodes in ten minutes");
    world.causes.values_mut().for_each(|cause| *cause = Cause::None);
    world.run(400);
    assert!((0..20).all(|index| world.is_bound(&format!("n/a{index}"))), "after one success, all are planned");
    assert!(world.backoff.pods.is_empty() && world.backoff.expected.is_empty());
    assert!(world.backoff.is_suspect(&world.state, "n/a0"), "its next pods are planned with what was seen");
    world.now += MEMORY;
    world.run(1);
    assert!(!world.backoff.has_failures() && world.backoff.seen.is_empty());
}

#[test]
fn an_accident_of_one_node_does_not_hold_up_a_workload_whose_pods_are_bound() {
    let mut world = World::new();
    world.pod("a", "replica-set", Cause::None);
    world.run(30);
    for name in ["b", "c", "d"] {
        world.pod(name, "replica-set", Cause::Interrupted);
    }
    world.run(25);
    for name in ["n/b", "n/c", "n/d"] {
        assert_eq!(world.bought_for(name), [31, 51], "{name}");
    }
}

/// Without a scheduler that follows the plan, pods take each other's nodes: each such node serves a pod that needed one. That has a bound, too.
#[test]
fn a_node_that_other_pods_need_as_much_is_not_in_vain_up_to_a_bound() {
    let mut world = World::new();
    world.pod("a", "replica-set", Cause::Used);
    world.run(150);
    assert_eq!(world.bought_for("n/a"), [1, 21, 41, 61, 81, 101, 121, 141]);
    assert!(world.backoff.take_reports().is_empty());
    world.run(450);
    assert!(world.bought_for("n/a").len() <= MAX_USES_IN_WINDOW + MAX_IN_WINDOW, "{:?}", world.bought_for("n/a"));
    assert!(!world.backoff.take_reports().is_empty());
}

#[test]
fn a_new_pod_of_a_workload_that_fails_waits_with_the_others() {
    let mut world = World::new();
    world.pod("a", "replica-set", Cause::Refused);
    world.run(310);
    assert_eq!(world.bought_for("n/a"), [1, 81, 221]);
    world.state.delete_pod("n/a", world.now);
    world.pod("b", "replica-set", Cause::Refused);
    world.pod("c", "another", Cause::None);
    world.run(60);
    assert_eq!((world.bought_for("n/b").len(), world.is_bound("n/c")), (0, true));
    world.run(400);
    assert_eq!(world.bought_for("n/b").len(), 1);
}

#[test]
fn a_change_of_what_new_nodes_are_like_ends_the_wait_within_the_bound() {
    let mut world = World::new();
    world.pod("a", "replica-set", Cause::Filled);
    world.run(30);
    let pool = |generation: i64| objects::node_pool("p", &json!({"metadata": {"generation": generation}}));
    world.state.apply_pool(pool(1));
    world.run(20);
    assert_eq!(world.bought_for("n/a"), [1, 21, 41], "not a minute later");
    for generation in 2..300 {
        world.state.apply_pool(pool(generation));
        world.run(1);
    }
    assert_eq!(world.bought_for("n/a").len(), 3, "at most three in ten minutes");
}

/// The nodes that the pod `a` is planned on next, by what was seen on those before: the requests of daemons and the taints of the NodePool.
fn amended(world: &World) -> (Vec<i64>, Vec<String>) {
    let pool = objects::node_pool("p", &json!({}));
    let pool = stowage_planner::Pool::new(&pool, Arc::new(objects::catalog()), Resources::default(), 0);
    let mut problem = Problem { pools: vec![pool.unwrap()], ..Problem::default() };
    world.backoff.amend(&mut problem);
    let daemons = problem.daemons.iter().map(|daemon| daemon.class.requests.cpu.0).collect();
    (daemons, problem.pools[0].taints.iter().map(|taint| taint.key.clone()).collect())
}

#[test]
fn the_next_node_has_room_for_what_took_the_room_of_the_last_one_unless_that_grows() {
    let mut world = World::new();
    world.pod("a", "replica-set", Cause::Filled);
    world.run(20);
    assert!(!world.backoff.is_suspect(&world.state, "n/a"));
    assert_eq!(amended(&world), (vec![], vec![]));
    world.run(5);
    assert!(world.backoff.is_suspect(&world.state, "n/a"));
    assert_eq!(amended(&world), (vec![1_500], vec![]));
    world.run(30);
    assert_eq!(amended(&world), (vec![1_500], vec![]), "the next one was filled likewise");
    world.filler = "1700m";
    world.run(80);
    assert_eq!(world.bought_for("n/a").len(), 3);
    assert_eq!(amended(&world), (vec![], vec![]), "nodes would grow without an end");
}

#[test]
fn a_taint_of_the_last_node_counts_for_ten_minutes() {
    let mut world = World::new();
    world.pod("a", "", Cause::Tainted);
    world.run(85);
    assert_eq!(amended(&world), (vec![], vec!["of-another".to_owned()]));
    assert_eq!(world.backoff.take_reports()[0].reason, "it has the taint of-another");
    world.nodes.clear();
    world.now += WINDOW;
    world.run(1);
    assert_eq!(amended(&world), (vec![], vec![]));
}

#[test]
fn a_pod_that_changes_does_not_wait() {
    let mut world = World::new();
    world.pod("a", "", Cause::Filled);
    world.run(45);
    let containers = json!([{"name": "c", "resources": {"requests": {"cpu": "1500m", "memory": "1Gi"}}}]);
    let spec = json!({"containers": containers, "tolerations": [{"key": "k", "operator": "Exists"}]});
    let mut changed = objects::pod("a", &json!({"spec": spec}));
    changed.status = serde_json::from_value(json!({"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}]}))
    .unwrap();
    world.state.apply_pod(&changed, world.now);
    world.run(1);
    assert_eq!(world.bought_for("n/a"), [1, 21, 46]);
}

#[test]
fn a_purchase_without_an_instance_is_not_in_vain() {
    let mut world = World::new();
    world.pod("a", "", Cause::None);
    for number in 0..10 {
        let claim = format!("c{number}");
        world.put_claim(&claim, &["n/a".to_owned()], world.now + HOLD_LAUNCH, &[]);
        world.backoff.purchased(&world.state, &claim, ["n/a".to_owned()].into_iter(), world.now);
        let holds = resolve(&world.state, world.now);
        world.backoff.observe(&world.state, &holds, &BTreeSet::new(), |_| false, world.now);
        world.state.delete_claim(&claim);
        let (holds, pod) = (resolve(&world.state, world.now), "n/a".to_owned());
        world.backoff.observe(&world.state, &holds, &BTreeSet::from([&pod]), |_| false, world.now);
        assert!(!world.backoff.leaves_out("n/a"), "EC2 had no capacity");
    }
    assert!(world.backoff.take_reports().is_empty());
}

#[test]
fn the_next_leader_continues_with_the_purchases_of_the_last() {
    let mut world = World::new();
    world.pod("a", "", Cause::Filled);
    world.run(10);
    world.backoff = PurchaseBackoff::default();
    world.run(12);
    let reports = world.backoff.take_reports();
    assert_eq!(reports.len(), 1, "{reports:?}");
    let report = &reports[0];
    assert_eq!((&*report.claim, report.node.as_deref(), &*report.pool), ("claim-0", Some("claim-0"), "p"));
    assert_eq!((&*report.pod, report.nodes, &*report.reason, report.is_first), ("n/a", 1, FILLED, true));
}

#[test]
fn a_displaced_pod_that_its_new_node_does_not_take_is_left_out_like_others() {
    let mut world = World::new();
    world.put_pod("old", "replica-set", Some("leaving"));
    let owners = json!({"n/old": {"uid": "replica-set", "at_ms": world.now.0}}).to_string();
    let put = |world: &mut World, hold: Duration| {
        let hold_until = world.now + hold;
        let annotations = json!({(labels::PLANNED_PODS): "[\"n/old\"]", (labels::PLANNED_OWNERS): owners,
            (labels::HOLD_UNTIL): hold_until.rfc3339()});
        let status = objects::launched("c", &["Launched"]);
        world
            .state
            .apply_claim(objects::claim("c", &json!({"metadata": {"annotations": annotations}, "status": status})));
    };
    put(&mut world, HOLD_LAUNCH);
    world.backoff.purchased(&world.state, "c", ["n/old".to_owned()].into_iter(), world.now);
    let observe = |world: &mut World| {
        world.now += Duration::from_secs(1);
        let holds = resolve(&world.state, world.now);
        let pending = demand(&world.state, &holds, world.now).pending;
        world.backoff.observe(&world.state, &holds, &pending.iter().collect(), |_| false, world.now);
    };
    observe(&mut world);
    world.state.delete_pod("n/old", world.now);
    observe(&mut world);
    let created = json!({"metadata": {"creationTimestamp": world.now.rfc3339()}});
    world.put_pod("new", "replica-set", None);
    let mut new = objects::pod("new", &created);
    new.metadata.owner_references = serde_json::from_value(
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "replica-set", "controller": true}]),
    )
    .unwrap();
    new.status = serde_json::from_value(json!({"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}]}))
    .unwrap();
    world.state.apply_pod(&new, world.now);
    observe(&mut world);
    assert!(world.backoff.take_reports().is_empty(), "it has the room of the old one");
    put(&mut world, Duration::ZERO);
    observe(&mut world);
    let reports = world.backoff.take_reports();
    assert_eq!(reports.iter().map(|report| &*report.pod).collect::<Vec<_>>(), ["n/new"]);
}

fn cause() -> impl Strategy<Value = Cause> {
    prop::sample::select(FAILING.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever the cause, however it changes, and whatever else changes: at most three nodes in ten minutes for a pod, and other pods get
    /// their nodes meanwhile.
    #[test]
    fn at_most_three_nodes_are_purchased_in_vain_for_a_pod_in_ten_minutes(
        workloads in prop::collection::vec((cause(), 1..6_usize, any::<bool>()), 1..4),
        changes in prop::collection::vec((0..1_500_usize, cause(), any::<bool>()), 0..12),
        arrivals in prop::collection::vec(0..1_400_usize, 1..6),
    ) {
        let mut world = World::new();
        for (at, (cause, pods, owned)) in workloads.iter().enumerate() {
            for pod in 0..*pods {
                world.pod(&format!("w{at}-{pod}"), if *owned { ["x", "y", "z"][at] } else { "" }, *cause);
            }
        }
        for second in 0..1_500 {
            for (_, cause, pool) in changes.iter().filter(|change| change.0 == second) {
                let failing = world.causes.values_mut().filter(|known| **known != Cause::None);
                failing.for_each(|known| *known = *cause);
                if *pool {
                    let meta = json!({"metadata": {"generation": second}});
                    world.state.apply_pool(objects::node_pool("p", &meta));
                }
            }
            for number in 0..arrivals.iter().filter(|at| **at == second).count() {
                world.pod(&format!("good-{second}-{number}"), "good", Cause::None);
            }
            world.step();
        }
        for (pod, cause) in &world.causes {
            let bought = world.bought_for(pod);
            if *cause == Cause::None {
                prop_assert!(bought.len() == 1 && world.is_bound(pod), "{pod} {bought:?}");
            } else {
                prop_assert!(most_in_window(&bought) <= 3, "{pod} {cause:?} {bought:?}");
            }
        }
    }
}

#[test]
fn a_pod_whose_cause_ends_gets_its_node() {
    for cause in FAILING {
        let mut world = World::new();
        world.pod("a", "replica-set", cause);
        world.run(1_000);
        *world.causes.get_mut("n/a").unwrap() = Cause::None;
        world.run(1_300);
        assert!(world.is_bound("n/a"), "{cause:?}: {:?}", world.bought_for("n/a"));
    }
}

#[test]
fn what_is_remembered_is_forgotten_with_its_pods() {
    let mut world = World::new();
    world.pod("a", "replica-set", Cause::Filled);
    world.run(60);
    assert_eq!((world.backoff.pods.len(), world.backoff.workloads.len()), (1, 1));
    world.state.delete_pod("n/a", world.now);
    world.run(60);
    assert_eq!((world.backoff.pods.len(), world.backoff.left_out.len()), (1, 0), "a StatefulSet creates it again");
    world.now += MEMORY;
    world.run(1);
    assert_eq!((world.backoff.pods.len(), world.backoff.workloads.len()), (0, 0));
    assert_eq!((world.backoff.purchases.len(), world.backoff.expected.len()), (0, 0));
}
