"""Every reason of disruption at once on a real control plane, with a watcher that counts what the budgets do not allow; and consolidation beside
what it may not touch.
"""

import contextlib
import threading
import time
import types

import kube
import kubelet
import services
import workloads
from kube import DO_NOT_DISRUPT, INSTANCE_TYPE, being_disrupted, is_true, key, terminating, uses_up_budget

POOL, SPACE, WAVE, TEAM = "reasons", "reasons", "wave", "team"
ALONE, PACKED = 8, 18  # replicas: one per node, three per node
BUDGET = 2
KEPT, BOOTING = "kept", "booting"
EXPENSIVE = "m5.4xlarge"
IMMOVABLE = 20
MANY, FEW, CLOSED, PER_NODE = 57, 18, 3, 3  # replicas; of the closed budget, 5 % of all pods
BOOT_EVERY = 20  # seconds
ROUNDS = 3
SURGE, SURGED, HASH = "stowage.dev/surge", "stowage.dev/surged", "pod-template-hash"
REPLICAS = 3


class Watcher:
    """Counts the NodeClaims of a NodePool that are chosen for disruption although others use up its budget. `check` is called after every event.
    Budgets do not hold back those in `forced`, but count them."""

    def __init__(self, service, pool, budget):
        self.service, self.pool, self.budget = service, pool, budget
        self.forced, self.known, self.most, self.violations = set(), {}, 0, []

    def check(self):
        claims = [claim for claim in self.service.claims(self.pool) if uses_up_budget(claim)]
        self.most = max(self.most, len(claims))
        for claim in claims:
            name = key(claim)
            if name in self.known:
                continue
            reason = kube.annotations_of(claim).get(kube.DISRUPTING, "deleted/").partition("/")[0]
            self.known[name] = reason
            if name not in self.forced and len(claims) > self.budget:
                self.violations.append({name: reason, "beside": {key(other): self.known.get(key(other)) for other in claims}})


class TestWatcher:
    """What the watcher reports, without a service."""

    def test_a_choice_beyond_the_budget_is_a_violation_and_one_in_place_of_another_is_not(self):
        claims = {name: {"metadata": {"name": name, "annotations": {}}, "status": {}} for name in "abcdef"}
        watcher = Watcher(types.SimpleNamespace(claims=lambda _: list(claims.values())), POOL, BUDGET)
        choose = lambda name, reason: claims[name]["metadata"]["annotations"].update({kube.DISRUPTING: f"{reason}/1"})

        def reported():
            watcher.check()
            return [list(violation.items())[0] for violation in watcher.violations]

        choose("a", "drifted")
        choose("b", "empty")
        assert reported() == [] and watcher.most == BUDGET
        claims["a"]["status"]["conditions"] = [{"type": "InstanceTerminating", "status": "True"}]
        choose("c", "drifted")
        assert reported() == []
        watcher.forced.add("d")
        choose("d", "unhealthy")
        assert reported() == [], "budgets do not hold it back"
        del claims["b"]
        choose("e", "underutilized")
        assert reported() == [("e", "underutilized")], "beside the forced one"
        claims["f"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        assert reported() == [("e", "underutilized"), ("f", "deleted")]
        assert reported() == [("e", "underutilized"), ("f", "deleted")], "each once"


def node_of_others(name):
    """A node that no NodeClaim stands for, with room for three packed pods."""
    resources = {"cpu": "2", "memory": "8Gi", "pods": "110"}
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", TEAM: POOL}
    metadata = {"name": name, "labels": labels, "annotations": {kubelet.FAKE_NODE: "fake"}}
    status = {"capacity": resources, "allocatable": resources, "conditions": [{"type": "Ready", "status": "False", "reason": "KubeletNotReady"}]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def on_demand(name, **settings):
    kind = workloads.requirement(INSTANCE_TYPE, services.TYPE)
    return workloads.node_pool(name, capacity_types=["on-demand"], extra=[kind], **settings)


def on(pool):
    return {"nodeSelector": {kube.NODE_POOL: pool}}


def disrupted(service, reason):
    return service.stowage.metric("stowage_nodeclaims_disrupted_total", f'reason="{reason}"')


class TestEveryReason:
    """Nodes of one type in a spot NodePool whose budget is two."""

    @staticmethod
    def environment(request):
        kind = workloads.requirement(INSTANCE_TYPE, services.TYPE)
        pool = workloads.node_pool(POOL, consolidate_after="5s", budget=str(BUDGET), capacity_types=["spot"], extra=[kind], labels={WAVE: "1"})
        alone = workloads.workload(SPACE, "alone", ALONE, 1500, 512, **workloads.host_alone("alone"))
        packed = workloads.workload(SPACE, "packed", PACKED, 600, 512)
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", workloads.namespace(SPACE), pool, alone, packed)

    def test_1_no_disruption_is_beyond_the_budget_when_every_reason_comes_at_once(self, service):
        service.wait_bound(SPACE, ALONE + PACKED, 90)
        watcher = Watcher(service, POOL, BUDGET)
        with service.mirror.sampling(watcher.check):
            service.api.scale("Deployment", "alone", SPACE, ALONE - 3)
            service.api.scale("Deployment", "packed", SPACE, PACKED // 3)
            enough = lambda: disrupted(service, "empty") and disrupted(service, "underutilized")
            service.poll(enough, 90, "an empty and an underutilized node removed", lambda: service.mirror.summary(SPACE))
            old = set(service.names(POOL))
            service.api.patch("NodePool", POOL, {"spec": {"template": {"metadata": {"labels": {WAVE: "2"}}}}})
            service.wait(lambda: any(being_disrupted(claim) for claim in service.claims(POOL)), 60, "drift begins")
            stays = [claim for claim in service.claims(POOL) if not being_disrupted(claim) and claim["status"].get("nodeName")]
            interrupted, unhealthy = stays[:2]
            watcher.forced |= {key(interrupted), key(unhealthy)}
            service.api.annotate("Node", interrupted["status"]["nodeName"], {"simulated.stowage.dev/event": "spot-interruption"})
            service.make_unhealthy(unhealthy["status"]["nodeName"])
            pods = ALONE - 3 + PACKED // 3
            done = lambda: not old & set(service.names(POOL)) and service.mirror.all_bound(pods, SPACE) and service.mirror.settled()
            service.wait(done, 240, "every old node replaced", lambda: service.mirror.summary(SPACE))
        assert watcher.violations == []
        reasons = {reason: disrupted(service, reason) for reason in ("empty", "underutilized", "drifted", "spot_interrupted", "unhealthy")}
        print(f"\n{len(watcher.known)} nodes disrupted: {reasons}; at most {watcher.most} at once", flush=True)
        assert all(reasons.values()), reasons
        service.assert_nothing_leaked()
        service.assert_no_errors()

    def test_2_the_metrics_of_karpenter_say_the_same(self, service):
        living, metric = len(service.names(POOL)), service.stowage.metric
        of_pool = lambda name, *labels: metric(f"karpenter_{name}", f'nodepool="{POOL}"', *labels)
        usage = lambda: of_pool("nodepools_usage", 'resource_type="nodes"')
        gauges = lambda: (usage(), of_pool("nodepools_nodes_consuming_budgets", 'reason="Empty"'), metric("stowage_usd_per_hour", 'used="false"'))
        service.poll(lambda: gauges() == (living, 0, 0), 30, "the gauges of the NodePool, every node with pods", gauges)
        created, terminated = of_pool("nodes_created_total"), of_pool("nodes_terminated_total", 'zone="us-east-1')
        assert terminated > 0 and created == living + terminated
        assert of_pool("nodeclaims_terminated_total", 'capacity_type="spot"', 'zone="us-east-1') == terminated
        for durations in ("nodeclaims_termination_duration_seconds", "nodeclaims_instance_termination_duration_seconds", "nodes_lifetime_duration_seconds"):
            assert of_pool(f"{durations}_count") == terminated, durations
            assert of_pool(f"{durations}_sum") > 0, durations
        # One that was unhealthy may be gone before it was drained.
        assert terminated - 1 <= of_pool("nodes_drained_total") <= terminated
        assert of_pool("nodeclaims_created_total", 'reason="drifted"') > 0 and of_pool("nodeclaims_created_total", 'reason="provisioned"') > 0
        for reason in ("Underutilized", "Drifted"):
            assert metric("karpenter_pods_drained_total", f'reason="{reason}"') > 0, reason
        assert metric("karpenter_pods_eviction_requests_total", 'code="200"') == metric("stowage_evictions_total", 'result="ok"')
        assert of_pool("nodepools_allowed_disruptions", 'reason="Drifted"') == BUDGET
        for reason, kind in (("empty", "empty"), ("drifted", "")):
            labels = (f'reason="{reason}"', f'consolidation_type="{kind}"')
            assert of_pool("voluntary_disruption_decisions_by_nodepool_total", *labels) == metric("karpenter_voluntary_disruption_decisions_total", *labels) > 0
            assert metric("karpenter_voluntary_disruption_decision_evaluation_duration_seconds_count", *labels) > 0, reason
        assert metric("karpenter_voluntary_disruption_decisions_total", 'reason="drifted"', 'decision="replace"') > 0
        cost = of_pool("nodepools_cost_total")
        assert cost > 0 and abs(cost - metric("stowage_usd_per_hour", 'capacity_type="spot"', 'used="true"')) < 1e-9
        assert metric("karpenter_cluster_utilization_percent", 'resource_type="cpu"') > 0
        samples = service.stowage.metrics()
        assert (samples["karpenter_cluster_state_synced"], samples["karpenter_cluster_state_node_count"]) == (1, len(service.mirror.nodes()))
        nodes = {key(node): node for node in service.mirror.nodes()}
        for name, node in nodes.items():
            labels = (f'node_name="{name}"', 'managed="true"', 'instance_type="m5.large"', 'resource_type="pods"', f'zone="{node["metadata"]["labels"][workloads.ZONE]}"')
            assert of_pool("nodes_allocatable", *labels) == int(node["status"]["allocatable"]["pods"])
        assert round(metric("karpenter_nodes_total_pod_requests", 'resource_type="cpu"'), 6) == round((ALONE - 3) * 1.5 + PACKED // 3 * 0.6, 6)
        assert len([sample for sample in samples if sample.startswith("karpenter_nodes_current_lifetime_seconds{")]) == len(nodes)
        assert metric("karpenter_scheduler_queue_depth", 'controller="provisioner"') == 0
        assert metric("karpenter_scheduler_scheduling_duration_seconds_count", 'controller="provisioner"') == samples["stowage_plan_seconds_count"]

    def test_3_so_do_the_series_of_pods_and_of_conditions(self, service):
        metric, samples, pods = service.stowage.metric, service.stowage.metrics(), ALONE - 3 + PACKED // 3
        bound = (f'namespace="{SPACE}"', f'nodepool="{POOL}"', 'managed="true"', 'scheduled="true"', 'phase="Running"', 'ready="true"')
        assert metric("karpenter_pods_state", *bound, 'capacity_type="spot"', 'instance_type="m5.large"', "/replicasets/") == pods
        waiting = ("unbound", "unstarted", "provisioning_unbound", "provisioning_unstarted", "provisioning_scheduling_undecided")
        of_space = lambda: [name for name in waiting if metric(f"karpenter_pods_{name}_time_seconds", f'namespace="{SPACE}"')]
        assert of_space() == []
        # Each of the pods, and the successors of those that were evicted.
        started = samples["karpenter_pods_startup_duration_seconds_count"]
        assert started >= ALONE + PACKED
        quantiles = [metric("karpenter_pods_startup_duration_seconds", f'quantile="{quantile}"') for quantile in ("0", "0.5", "0.9", "0.95", "0.99", "1")]
        assert quantiles == sorted(quantiles) and quantiles[-1] > 0, quantiles
        assert samples["karpenter_pods_bound_duration_seconds_count"] >= ALONE + PACKED
        assert samples["karpenter_pods_provisioning_startup_duration_seconds_count"] <= started
        assert samples["karpenter_pods_scheduling_decision_duration_seconds_count"] >= ALONE
        assert metric("karpenter_pods_disruption_initiated_total", 'reason="drifted"') > 0
        ended = metric("karpenter_nodes_termination_duration_seconds_count", f'nodepool="{POOL}"')
        assert ended == metric("karpenter_nodes_terminated_total", f'nodepool="{POOL}"') > 0
        nodes, claims = len(service.mirror.nodes()), len(service.claims(POOL))
        true = lambda kind, condition: metric(f"operator_{kind}_status_condition_count", f'type="{condition}"', 'status="True"')
        assert (true("node", "Ready"), true("nodeclaim", "Registered"), true("nodepool", "Ready")) == (nodes, claims, 1)
        transitions = ('type="Initialized"', 'status="True"', f'karpenter_sh_nodepool="{POOL}"')
        created = metric("karpenter_nodes_created_total", f'nodepool="{POOL}"')
        assert metric("operator_nodeclaim_status_condition_transitions_total", *transitions) == created
        assert metric("operator_nodeclaim_termination_duration_seconds_count") > 0
        assert metric("operator_nodeclaim_termination_current_time_seconds") == 0
        assert metric("controller_runtime_reconcile_total", 'controller="disruption"', 'result="success"') > 0
        assert metric("controller_runtime_reconcile_total", 'result="error"') == 0
        assert metric("leader_election_master_status", 'name="karpenter-leader-election"') == 1


class TestObstacles:
    """Beside 20 expensive nodes that stay, a node that boots every 20 seconds, pods behind a closed budget and a node of others."""

    @staticmethod
    def environment(request):
        open_pool = on_demand(POOL, consolidate_after="5s", labels={TEAM: POOL})
        large = workloads.requirement(INSTANCE_TYPE, EXPENSIVE)
        kept_pool = workloads.node_pool(KEPT, consolidate_after="5s", capacity_types=["on-demand"], extra=[large])
        booting_pool = on_demand(BOOTING, consolidate_after="5s")
        kept = workloads.workload(KEPT, "kept", IMMOVABLE, 500, 512, annotations={DO_NOT_DISRUPT: "true"}, **on(KEPT), **workloads.host_alone("kept"))
        booting = workloads.workload(BOOTING, "booting", 0, 1500, 512, **on(BOOTING), **workloads.host_alone("booting"))
        packed = workloads.workload(SPACE, "packed", MANY, 600, 512, nodeSelector={TEAM: POOL})
        closed = workloads.workload(SPACE, "closed", CLOSED, 600, 512, nodeSelector={TEAM: POOL})
        budget = workloads.disruption_budget(SPACE, "closed", max_unavailable=0)
        spaces = [workloads.namespace(name) for name in (SPACE, KEPT, BOOTING)]
        objects = [*spaces, open_pool, kept_pool, booting_pool, budget, kept, booting, packed, closed]
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", *objects)

    def test_1_consolidation_reaches_everything_that_may_go(self, service):
        service.wait_bound(SPACE, MANY + CLOSED, 120)
        service.wait_bound(KEPT, IMMOVABLE, 120)
        service.plane.apply(node_of_others("other"))
        before, kept = len(service.names(POOL)), service.uids(KEPT)
        closed = {pod["metadata"]["uid"] for pod in service.mirror.pods(SPACE) if "/closed-" in key(pod)}
        fits, took = -(-(FEW + CLOSED) // PER_NODE), []
        small = lambda: len(service.names(POOL)) <= fits and service.mirror.all_bound(FEW + CLOSED, SPACE)
        with boots(service) as started:
            for _ in range(ROUNDS):
                service.api.scale("Deployment", "packed", SPACE, MANY)
                service.wait(lambda: service.mirror.all_bound(MANY + CLOSED, SPACE), 60, "every pod bound")
                service.api.scale("Deployment", "packed", SPACE, FEW)
                begin = time.monotonic()
                service.wait(small, 120, f"{fits} nodes", lambda: f"{service.names(POOL)}; {service.mirror.summary(SPACE)}")
                took.append(time.monotonic() - begin)
        seconds = ", ".join(f"{one:.0f} s" for one in took)
        print(f"\n{before} nodes, then {fits} after {seconds}; {len(started)} nodes booted meanwhile", flush=True)
        assert len(started) >= ROUNDS
        assert service.uids(KEPT) == kept and closed <= service.uids(SPACE)
        assert service.api.find("Node", "other")
        service.assert_no_errors()


@contextlib.contextmanager
def boots(service):
    """Lets a node boot every 20 seconds until the end of the block; yields the list of the numbers of such nodes."""
    started, ends = [], threading.Event()

    def boot():
        while not ends.is_set():
            started.append(len(started) + 1)
            service.api.scale("Deployment", "booting", BOOTING, len(started))
            ends.wait(BOOT_EVERY)

    thread = threading.Thread(target=boot)
    thread.start()
    try:
        yield started
    finally:
        ends.set()
        thread.join()


def ready(service, space):
    """The ready pods of a namespace that are not terminating, by UID: what its Service sends requests to."""
    return {pod["metadata"]["uid"] for pod in service.mirror.pods(space) if is_true(pod, "Ready") and not terminating(pod)}


class TestSurge:
    """Deployments whose budgets allow no disruption, on nodes that drift."""

    @staticmethod
    def environment(request):
        pool = on_demand(POOL, labels={WAVE: "1"}, budget="1")
        web = workloads.workload(SPACE, "web", REPLICAS, 1500, 512, annotations={SURGE: "true"})
        objects = [workloads.namespace(SPACE), pool, workloads.disruption_budget(SPACE, "web", max_unavailable=0), web]
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", *objects)

    @staticmethod
    def drift(service, wave):
        service.api.patch("NodePool", POOL, {"spec": {"template": {"metadata": {"labels": {WAVE: wave}}}}})

    @staticmethod
    def quota(service, pods):
        """Lets the namespace have at most so many pods."""
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "pods", "namespace": SPACE}, "spec": {"hard": {"pods": str(pods)}}}
        service.plane.apply(quota)
        used = lambda: service.plane.kubectl("get", "resourcequota", "pods", "--namespace", SPACE, "-o", "jsonpath={.status.used.pods}").stdout
        service.poll(lambda: used().strip() == str(pods), 20, "the quota used up", used)

    @staticmethod
    def left(service):
        """Pods that left their ReplicaSet."""
        return [pod for pod in service.mirror.pods(SPACE) if SURGED in kube.annotations_of(pod)]

    def test_1_every_pod_has_a_ready_successor_before_it_is_evicted(self, service):
        service.wait_bound(SPACE, REPLICAS, 90)
        service.wait(lambda: len(ready(service, SPACE)) == REPLICAS, 30, "every pod ready")
        old, nodes, begin = ready(service, SPACE), set(service.names(POOL)), time.monotonic()
        with service.mirror.sampling(lambda: len(ready(service, SPACE))) as samples:
            self.drift(service, "2")
            done = lambda: not nodes & set(service.names(POOL)) and service.mirror.all_bound(REPLICAS, SPACE) and service.mirror.settled()
            service.wait(done, 180, "every node replaced", lambda: service.mirror.summary(SPACE))
        strays = service.stowage.metric("stowage_holds_ended_total", 'result="stray"')
        seconds = time.monotonic() - begin
        print(f"\n{REPLICAS} pods replaced within {seconds:.0f} s; {min(samples)} to {max(samples)} ready, {strays:.0f} strays", flush=True)
        assert min(samples) >= REPLICAS and not old & ready(service, SPACE)
        assert len(service.api.list("Deployment", SPACE)) == 1 and not self.left(service)
        surged = [event for event in service.api.list("Event", SPACE) if event["reason"] == "Surged"]
        assert len(surged) >= REPLICAS
        service.assert_no_errors()

    def test_2_a_pod_without_a_successor_goes_back_to_its_replica_set(self, service):
        before = service.uids(SPACE)
        self.quota(service, REPLICAS)
        self.drift(service, "3")
        pod = service.wait(lambda: self.left(service), 60, "a pod that left its ReplicaSet")[0]
        service.wait(lambda: not kube.owned_by(service.mirror.objects[kube.PODS][key(pod)], "ReplicaSet"), 20, "released")
        assert ready(service, SPACE) == before, "it still runs"
        # Something protects the node meanwhile.
        service.api.annotate("Pod", pod["metadata"]["name"], {DO_NOT_DISRUPT: "true"}, SPACE)
        service.wait(lambda: not self.left(service), 30, "no pod that left")
        back = service.api.get("Pod", pod["metadata"]["name"], SPACE)["metadata"]
        assert back["labels"][HASH] and [owner["kind"] for owner in back["ownerReferences"]] == ["ReplicaSet"]
        assert service.uids(SPACE) == before
        service.assert_no_errors()

    def test_3_a_pod_whose_deployment_is_deleted_meanwhile_does_not_stay(self, service):
        protected = next(pod for pod in service.mirror.pods(SPACE) if DO_NOT_DISRUPT in kube.annotations_of(pod))
        service.api.annotate("Pod", protected["metadata"]["name"], {DO_NOT_DISRUPT: None}, SPACE)
        pod = service.wait(lambda: self.left(service), 120, "a pod that left its ReplicaSet")[0]
        service.api.delete("Deployment", "web", SPACE)
        service.wait(lambda: service.uids(SPACE) == {pod["metadata"]["uid"]}, 60, "the other pods gone", lambda: service.mirror.summary(SPACE))
        service.api.annotate("Pod", pod["metadata"]["name"], {DO_NOT_DISRUPT: "true"}, SPACE)
        service.wait(lambda: not service.mirror.pods(SPACE), 60, "no pod", lambda: service.mirror.summary(SPACE))
        service.wait(lambda: not service.names(POOL), 60, "no node")
        service.assert_nothing_leaked()
        service.assert_no_errors()
