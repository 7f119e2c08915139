"""Moves on a real control plane, without an extender: the successors of the pods that consolidation evicts are bound where room is kept for
them, because every open node that could take them is closed meanwhile.
"""

import datetime
import json
import time

import harness
import kube
import services
import workloads
from kube import DISRUPTED_TAINT, PLANNED_TAINT, condition, key, taint_keys
from services import TYPE

SPACE, POOL = "moves", "moves"
MANY, FEW = 16, 6  # replicas of each workload
MAX_CLOSED, MAX_PENDING = 10, 5  # seconds


def at(text):
    return datetime.datetime.fromisoformat(text)


def closed(mirror):
    """Nodes that are closed while pods move. A new node gets the taint before it is initialized."""
    initialized = {claim["status"].get("nodeName"): condition(claim, "Initialized") for claim in mirror.claims() if "status" in claim}
    names = set()
    for node in mirror.nodes():
        since = initialized.get(key(node), {}).get("lastTransitionTime")
        added = [taint["timeAdded"] for taint in node["spec"].get("taints", []) if taint["key"] == PLANNED_TAINT and taint["effect"] == "NoSchedule"]
        if since and added and at(added[0]) > at(since):
            names.add(key(node))
    return names


def longest(samples):
    """The longest time for which a name was in consecutive samples, each of which is a time and a set of names."""
    since, most = {}, 0.0
    for now, names in samples:
        since = {name: since.get(name, now) for name in names}
        most = max([most, *(now - begin for begin in since.values())])
    return most


def ended(service, *results):
    """How many holds ended with these results."""
    return sum(service.stowage.metric("stowage_holds_ended_total", f'result="{result}"') for result in results)


def converged(service):
    """Whether every pod runs and no node is about to be removed."""
    leaving = any(kube.being_disrupted(claim) for claim in service.claims(POOL))
    return service.mirror.all_bound(2 * FEW, SPACE) and service.mirror.settled() and not leaving


class TestMoves:
    """Nodes of one type, each with pods of two workloads. When most pods end, those of several nodes move to the others."""

    @staticmethod
    def environment(request):
        kind = workloads.requirement(kube.INSTANCE_TYPE, TYPE)
        pool = workloads.node_pool(POOL, consolidate_after="5s", capacity_types=["on-demand"], extra=[kind])
        large = workloads.workload(SPACE, "large", MANY, 500, 512)
        small = workloads.workload(SPACE, "small", MANY, 100, 128)
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", workloads.namespace(SPACE), pool, large, small)

    def test_1_every_successor_is_bound_where_it_is_planned(self, service):
        service.wait_bound(SPACE, 2 * MANY, 90)
        before, planned = len(service.names(POOL)), ended(service, "planned")
        mirror = service.mirror
        sample = lambda: (time.monotonic(), closed(mirror), {pod["metadata"]["uid"] for pod in mirror.pending(SPACE)})
        with mirror.sampling(sample) as samples:
            service.api.scale_all(SPACE, FEW)
            service.wait(lambda: len(service.names(POOL)) <= before // 2 and converged(service), 120, "half of the nodes removed")
        moved = ended(service, "planned") - planned
        strays = ended(service, "stray", "elsewhere")
        names = set().union(*(names for _, names, _ in samples))
        seconds = longest([(now, names) for now, names, _ in samples])
        pending = longest([(now, pods) for now, _, pods in samples])
        print(f"\n{before} nodes, then {len(service.names(POOL))}: {moved:.0f} pods moved, {strays:.0f} strays; {len(names)} nodes closed for", end="")
        print(f" {seconds:.1f} s at most; no pod pending for more than {pending:.1f} s", flush=True)
        assert moved > 0 and strays == 0
        assert names and seconds < MAX_CLOSED
        assert pending < MAX_PENDING
        assert not any(PLANNED_TAINT in taint_keys(node) for node in mirror.nodes())
        service.assert_no_errors()

    def test_2_a_killed_process_leaves_no_node_closed(self, service):
        service.api.scale_all(SPACE, MANY)
        service.wait_bound(SPACE, 2 * MANY, 90)
        service.wait(lambda: not any(PLANNED_TAINT in taint_keys(node) for node in service.mirror.nodes()), 90, "every node open")
        service.api.scale_all(SPACE, FEW)
        service.wait(lambda: closed(service.mirror), 90, "a node closed")
        service.stowage.kill()
        service.stowage.start()
        service.wait(lambda: converged(service), 120, "every pod bound")
        tainted = lambda: [key(node) for node in service.mirror.nodes() if PLANNED_TAINT in taint_keys(node)]
        service.wait(lambda: not tainted(), 30, "every node open", lambda: str(tainted()))
        service.assert_nothing_leaked()

    def test_3_disruption_that_is_only_reported_changes_nothing_and_lists_what_it_would_do(self, service):
        service.api.scale_all(SPACE, MANY)
        service.wait_bound(SPACE, 2 * MANY, 90)
        name, api, stowage = "stowage-pause", service.api, service.stowage
        api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": harness.NAMESPACE}, "data": {"disruption": "report"}})
        service.poll(lambda: stowage.metrics().get('stowage_paused{scope="report"}') == 1, 10, "report only", stowage.tail, every=0.1)
        api.scale_all(SPACE, FEW)
        service.wait(lambda: service.mirror.all_bound(2 * FEW, SPACE), 60, "pods ended")
        before, pods = service.names(POOL), service.uids(SPACE)
        stowage.certificate("operator", "--name", "stowage-debug", "--client")
        listed = lambda: json.loads(stowage.request("GET", "/debug/state", "operator")[1])["leader"]["would_disrupt"]["items"]
        found = service.poll(listed, 60, "nodes that would be disrupted", stowage.tail)
        assert {item["nodeclaim"] for item in found} <= set(before) and {item["reason"] for item in found} <= {"Underutilized", "Empty"}
        reported = lambda: {event["regarding"]["name"] for event in api.list("Event") if event["reason"] == "DisruptionReported"}
        service.poll(lambda: {item["nodeclaim"] for item in found} <= reported(), 20, "an event for each", lambda: str((found, reported())))
        # Several decisions later.
        time.sleep(10)
        assert service.names(POOL) == before and service.uids(SPACE) == pods
        assert not any(kube.being_disrupted(claim) for claim in service.claims(POOL))
        assert not any(taint_keys(node) & {PLANNED_TAINT, DISRUPTED_TAINT} for node in service.mirror.nodes())
        print(f"\nreported only: {len(found)} of {len(before)} nodes", flush=True)
        api.delete("ConfigMap", name, harness.NAMESPACE)
        service.wait(lambda: len(service.names(POOL)) < len(before) and converged(service), 120, "nodes removed")
        assert not listed()
        service.assert_no_errors()

    def test_4_a_taint_that_nothing_stands_behind_is_removed_after_thirty_seconds(self, service):
        # Nodes may be removed since the test before; not this one.
        leaving = {claim.get("status", {}).get("nodeName") for claim in service.claims(POOL) if kube.being_disrupted(claim)}
        node = key(next(node for node in service.mirror.nodes() if not taint_keys(node) and key(node) not in leaving))
        meta = {"annotations": {kube.DO_NOT_DISRUPT: "true"}}
        service.api.patch("Node", node, {"metadata": meta, "spec": {"taints": [{"key": DISRUPTED_TAINT, "effect": "NoSchedule"}]}})
        taints = lambda: taint_keys(next(item for item in service.mirror.nodes() if key(item) == node))
        service.wait(lambda: DISRUPTED_TAINT in taints(), 10, "the taint")
        begin = time.monotonic()
        service.wait(lambda: not taints(), 45, "no taint", taints)
        assert time.monotonic() - begin > 25
        service.assert_no_errors()
