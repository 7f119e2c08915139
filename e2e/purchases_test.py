"""Purchases in vain, on a real control plane: nodes are not bought again and again for pods that they do not take, whatever the cause. And
purchases while others create pods all the time.

What takes the room of a new node before its pods here is a LimitRange, which enlarges the pods of a DaemonSet, and an intruder: something
that binds a pod of its own to each new node at once, without a scheduler.
"""

import concurrent.futures
import contextlib
import os
import threading
import time

import observe
import services
import workloads
from kube import ZONE, bound_to, key, planned_pods

# Three pods that need a node each.
PODS, CPU, MEMORY = 3, 1500, 2048
TEAM = "team"
USD_PER_HOUR = "stowage.dev/usd-per-hour"
PRICES = 'resource_type="stowage.dev/usd_per_hour"'
VAIN, KEPT = "vain", "kept"
BURST, KINDS = "burst", 20
REPLICAS = int(os.environ.get("STOWAGE_BURST_REPLICAS", "4"))
FLOW, RATE, KEEP_SECONDS = "flow", 20, 5  # pods a second, each deleted after five seconds
LONE = int(os.environ.get("STOWAGE_LONE_PODS", "5"))
# Requests a second that kube-scheduler may make.
QPS = int(os.environ.get("STOWAGE_SCHEDULER_QPS", "2"))
SLOW_SCHEDULER = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "clientConnection": {"kubeconfig": "@KUBECONFIG@", "qps": QPS, "burst": 2 * QPS},
    "leaderElection": {"leaderElect": False},
}


def three_pods(space, name):
    return workloads.workload(space, name, PODS, CPU, MEMORY, nodeSelector={TEAM: name}, **workloads.host_alone(name))


def in_vain(service):
    """The number of nodes that were purchased in vain."""
    return service.stowage.metric("stowage_purchases_in_vain_total", f'nodepool="{VAIN}"')


@contextlib.contextmanager
def intruder(service, space, cpu=None):
    """Binds a pod to each new node of the NodePool `vain`, as soon as it exists: of this CPU, else of all that the node has."""
    done, seen = threading.Event(), set()
    service.plane.apply(workloads.namespace(space))

    def intrude():
        while not done.wait(0.02):
            nodes = [service.mirror.node_of(claim) for claim in service.claims(VAIN)]
            for node in nodes:
                if node is None or (name := key(node)) in seen:
                    continue
                seen.add(name)
                resources = {"requests": {"cpu": cpu or node["status"]["allocatable"]["cpu"]}}
                spec = {"nodeName": name, "containers": [{"name": "main", "image": "registry.example/app:1", "resources": resources}], "tolerations": [{"operator": "Exists"}]}
                service.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"on-{name}", "namespace": space}, "spec": spec})

    thread = threading.Thread(target=intrude)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def flow(service, node):
    """Creates pods all the time, which kube-scheduler binds to a node that has room for all."""
    done = threading.Event()
    service.plane.apply(workloads.namespace(FLOW))

    def create():
        begin, number = time.monotonic(), 0
        while not done.wait(max(0, begin + number / RATE - time.monotonic())):
            service.api.create(workloads.pod(FLOW, f"short-{number}", 1, 1, nodeSelector={workloads.HOST: node}))
            if number >= RATE * KEEP_SECONDS:
                service.api.delete("Pod", f"short-{number - RATE * KEEP_SECONDS}", FLOW)
            number += 1

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        created = thread.submit(create)
        try:
            yield
        finally:
            done.set()
            created.result()


class TestSteadyFlow:
    """Pods that need a node each, while other things create twenty pods a second that are bound at once. `STOWAGE_LONE_PODS` sets their number."""

    @staticmethod
    def environment(request):
        pool = workloads.node_pool(KEPT, consolidate_after="Never", capacity_types=["on-demand"], labels={TEAM: KEPT})
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", pool)

    def test_a_rejected_pod_does_not_wait_for_the_pods_of_others(self, service):
        space, mirror = "lone", service.mirror
        resources = {"cpu": "8", "memory": "32Gi", "pods": "1000"}
        meta = {"name": "busy", "labels": {workloads.HOST: "busy"}, "annotations": {"kwok.x-k8s.io/node": "fake"}}
        service.api.create({"apiVersion": "v1", "kind": "Node", "metadata": meta, "status": {"capacity": resources, "allocatable": resources}})
        service.plane.apply(workloads.namespace(space))
        flowing = lambda: len([pod for pod in mirror.pods(FLOW) if bound_to(pod)]) >= RATE
        since = {}  # before the request: the watch may show the creation and the rejection later than the call
        with flow(service, "busy"):
            service.wait(flowing, 30, "pods bound all the time", lambda: mirror.summary(FLOW))
            for number in range(LONE):
                name = f"lone-{number}"
                pod = workloads.pod(space, name, 500, 512, nodeSelector={TEAM: KEPT}, **workloads.host_alone(space))
                begin = time.monotonic()
                created = service.api.create(pod | {"metadata": pod["metadata"] | {"labels": {"app": space}}})
                since[created["metadata"]["uid"]] = begin
                launched = lambda name=name: any(claim in mirror.record.launched for claim in mirror.record.plans[f"{space}/{name}"])
                service.wait(launched, 30, f"a node launched for {name}", lambda: mirror.summary(space))
        waits = mirror.record.until_launch(since, service.stowage.launch_calls())
        assert len(waits) == LONE
        shown = ", ".join(f"p{share} {1000 * observe.percentile(waits, share):.0f} ms" for share in (50, 99))
        print(f"\n{LONE} pods among {RATE} others a second, from creation to launch call: {shown}", flush=True)
        # When every created pod prolonged the batch, it was 1.4 s.
        assert observe.percentile(waits, 50) < 0.8
        service.assert_no_errors()


class TestPriceLimit:
    """A NodePool whose nodes may not cost more than 0.5 USD per hour."""

    @staticmethod
    def environment(request):
        pool = workloads.node_pool(KEPT, consolidate_after="Never", labels={TEAM: KEPT})
        pool["spec"]["limits"] = {USD_PER_HOUR: "0.5"}
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", pool)

    def test_nodes_are_purchased_up_to_the_limit(self, service):
        space, mirror, pods = "costly", service.mirror, 60
        bill = lambda: sum(float(claim["metadata"].get("annotations", {}).get(USD_PER_HOUR, "inf")) for claim in service.claims(KEPT))
        service.plane.apply(workloads.namespace(space), workloads.workload(space, "web", pods, CPU, MEMORY, nodeSelector={TEAM: KEPT}))
        refused = lambda: {event["regarding"]["name"] for event in service.plane.events(reason="FailedScheduling") if f"limit on {USD_PER_HOUR} reached" in event["note"]}
        bound = lambda: {pod["metadata"]["name"] for pod in mirror.pods(space) if bound_to(pod)}
        service.poll(lambda: refused() and mirror.settled(), 60, "pods refused because of the limit", lambda: mirror.summary(space))
        service.poll(lambda: bound() | refused() == {pod["metadata"]["name"] for pod in mirror.pods(space)}, 60, "each pod bound or refused", lambda: mirror.summary(space))
        usage = lambda: service.stowage.metric("karpenter_nodepools_usage", PRICES)
        service.poll(lambda: abs(usage() - bill()) < 1e-6, 30, "usage shown", lambda: (usage(), bill()))
        assert 0.25 < bill() <= 0.5 == service.stowage.metric("karpenter_nodepools_limit", PRICES)
        print(f"\nlimit of 0.5 USD per hour: {len(bound())} of {pods} pods bound on {len(service.claims(KEPT))} nodes for {bill():.4f}", flush=True)
        service.api.patch("NodePool", KEPT, {"spec": {"limits": {USD_PER_HOUR: "20"}}})
        service.wait_bound(space, pods, 120)
        assert 0.5 < bill() <= 20
        # Above the limit, nothing is removed and nothing is purchased.
        service.api.patch("NodePool", KEPT, {"spec": {"limits": {USD_PER_HOUR: "0.5"}}})
        before = service.names(KEPT)
        service.plane.apply(workloads.workload(space, "more", 40, CPU, MEMORY, nodeSelector={TEAM: KEPT}))
        service.poll(lambda: any(name.startswith("more-") for name in refused()), 60, "pods of the second workload refused", lambda: mirror.summary(space))
        assert service.names(KEPT) == before
        service.assert_no_errors()


class TestPurchases:
    @staticmethod
    def environment(request):
        pools = [workloads.node_pool(name, consolidate_after="10s", capacity_types=["on-demand"], labels={TEAM: name}) for name in (VAIN, KEPT)]
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", *pools)

    def test_1_pods_of_a_daemon_set_are_expected_with_the_requests_that_a_limit_range_gives_them(self, service):
        space, agents, mirror = "limited", "agents", service.mirror
        limits = [{"type": "Container", "defaultRequest": {"cpu": "1", "memory": "1Gi"}}]
        limit_range = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "defaults", "namespace": agents}, "spec": {"limits": limits}}
        pod = {"containers": [{"name": "main", "image": "registry.example/agent:1"}], "tolerations": [{"operator": "Exists"}]}
        template = {"metadata": {"labels": {"app": "agent"}}, "spec": pod}
        daemon_set = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "agent", "namespace": agents}, "spec": {"selector": {"matchLabels": {"app": "agent"}}, "template": template}}
        service.plane.apply(workloads.namespace(agents), workloads.namespace(space), limit_range)
        service.plane.apply(daemon_set)
        created = mirror.record.claims_created
        service.plane.apply(three_pods(space, KEPT))
        service.wait_bound(space, PODS, 60)
        assert mirror.record.claims_created - created == PODS
        assert service.stowage.metric("stowage_purchases_in_vain_total") == 0
        service.api.delete("DaemonSet", "agent", agents)
        service.assert_no_errors()

    def test_2_the_second_node_has_room_for_what_took_the_room_of_the_first(self, service):
        space, mirror = "learned", service.mirror
        before, failed = mirror.record.claims_created, in_vain(service)
        service.plane.apply(workloads.namespace(space))
        with intruder(service, "small-intruders", f"{CPU}m"):
            service.plane.apply(three_pods(space, VAIN))
            service.wait(lambda: mirror.all_bound(PODS, space), 60, "all pods bound", lambda: mirror.summary(space))
        assert in_vain(service) - failed <= PODS
        assert mirror.record.claims_created - before <= 2 * PODS
        service.assert_no_errors()

    def test_3_pods_that_no_new_node_takes_are_tried_one_at_a_time_and_others_are_served(self, service):
        space, others, mirror = "refused", "others", service.mirror
        service.plane.apply(*[workloads.namespace(name) for name in (space, others)])
        created = lambda: mirror.record.claims_created
        left_out = lambda: service.stowage.metric("stowage_pods_quarantined", 'cause="purchased_in_vain"')
        before, failed = created(), in_vain(service)
        with intruder(service, "large-intruders"):
            service.plane.apply(three_pods(space, VAIN))
            # Each pod once, and then one of them.
            service.poll(lambda: in_vain(service) - failed == PODS + 1, 60, "the first and the second attempt in vain", service.stowage.metrics)
            assert created() - before == PODS + 1
            service.poll(lambda: left_out() == PODS, 10, "the pods are left out of plans", service.stowage.metrics)
            service.plane.apply(three_pods(others, KEPT))
            service.wait(lambda: mirror.all_bound(PODS, others), 30, "the other pods bound", lambda: mirror.summary(others))
            notes = lambda: [event["note"] for pod in mirror.pods(space) for event in service.plane.events(pod["metadata"]["name"], "PurchasedInVain")]
            second = service.poll(lambda: [note for note in notes() if note.startswith("2 nodes purchased for it in vain")], 20, "an event of the second attempt", notes)
            print(f"\npurchases in vain: {second[0]}", flush=True)
            assert "it lacks cpu, pods that were not planned there are large-intruders/on-" in second[0]
            assert service.plane.events(VAIN, "PurchasedInVain")
        # A minute after the second attempt, the third succeeds, and then all others do.
        service.wait(lambda: mirror.all_bound(PODS, space), 120, "all pods bound once nothing takes the room", lambda: mirror.summary(space))
        assert in_vain(service) - failed == PODS + 1
        service.poll(lambda: left_out() == 0, 10, "no pod left out of plans", service.stowage.metrics)
        service.assert_no_errors()


class TestLateScheduler:
    """Twenty Deployments that are spread over zones, and a kube-scheduler that is slow. `STOWAGE_SCHEDULER_QPS` sets how slow, and
    `STOWAGE_BURST_REPLICAS` the size of the Deployments."""

    @staticmethod
    def environment(request):
        plane = request.getfixturevalue("service_plane")
        plane.scheduler(SLOW_SCHEDULER)
        pool = workloads.node_pool(BURST, consolidate_after="Never", capacity_types=["on-demand"])
        return services.simulated(plane, "nominate", workloads.namespace(BURST), pool)

    def test_1_a_burst_is_planned_as_it_is_created_and_no_node_is_bought_twice(self, service):
        spread = lambda name: {"topologySpreadConstraints": [workloads.spread(name, ZONE)]}
        kinds = [(f"kind-{number}", 500 + 100 * number) for number in range(KINDS)]
        service.plane.apply(*(workloads.workload(BURST, name, REPLICAS, cpu, 1024, **spread(name)) for name, cpu in kinds))
        pods, mirror = KINDS * REPLICAS, service.mirror
        planned = lambda: sum(len(planned_pods(claim)) for claim in service.claims(BURST))
        service.poll(lambda: planned() == pods, 40, "every pod planned", planned)
        attempted = sum(1 for pod in mirror.pods(BURST) if pod["status"].get("conditions") or pod["spec"].get("nodeName"))
        service.wait_bound(BURST, pods, 300)
        created, plans = mirror.record.claims_created, service.stowage.metrics()["stowage_plan_seconds_count"]
        waits = mirror.record.until_launch(mirror.record.created, service.stowage.launch_calls())
        # Those on nodes that were launched before are left out.
        shown = ", ".join(f"p{share} {observe.percentile(waits, share):.2f} s" for share in (50, 99))
        cost = service.stowage.cost(service.claims(BURST))
        print(f"\n{pods} pods on {created} nodes at {cost:.3f} USD/h, {plans:.0f} plans, {attempted} pods attempted when all were planned", flush=True)
        print(f"from creation to launch call: {shown}", flush=True)
        assert QPS > 2 or attempted < 3 / 4 * pods
        early = lambda: service.stowage.metric("stowage_pods_planned_unattempted_total", 'result="planned"')
        service.poll(lambda: early() >= pods - attempted, 10, "the pods that were planned before their first attempt", early)
        assert service.stowage.metric("stowage_pods_planned_unattempted_total", 'result="elsewhere"') == 0
        assert created == len(service.names(BURST))
        assert service.stowage.metric("stowage_purchases_in_vain_total") == 0
        assert service.stowage.metric("stowage_holds_ended_total", 'result="released"') == 0
        service.assert_no_errors()
