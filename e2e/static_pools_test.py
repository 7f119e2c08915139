"""Static NodePools on a real control plane: `spec.replicas` nodes whatever pods there are, scaled as users scale them, replaced when they drift or
expire, also when the process is killed meanwhile.
"""

import collections
import time

import kube
import services
import workloads
from kube import INSTANCE_TYPE, is_true, key

POOL, SPACE = "static", "static"
LIMIT, REPLICAS = 5, 3
WAVE = "wave"
AGING = "aging"
LIFETIME = "240s"

Counts = collections.namedtuple("Counts", "up leaving existing")


def static_pool():
    pool = workloads.node_pool(POOL, capacity_types=["on-demand"], extra=[workloads.requirement(INSTANCE_TYPE, services.TYPE)], labels={WAVE: "1"})
    return pool | {"spec": pool["spec"] | {"replicas": REPLICAS, "limits": {"nodes": str(LIMIT)}}}


def ready(service, pool=POOL):
    """NodeClaims whose node is initialized and not about to leave."""
    return [claim for claim in service.claims(pool) if is_true(claim, "Initialized") and not kube.being_disrupted(claim)]


def counts(service, pool):
    """NodeClaims of a NodePool: whose pods run, that count against its budget, and all of them."""
    claims = service.claims(pool)
    waits = [claim for claim in claims if kube.being_disrupted(claim) and not kube.terminating(claim)]
    return Counts(len(ready(service, pool)) + len(waits), sum(kube.uses_up_budget(claim) for claim in claims), len(claims))


def settled(service, replicas):
    return len(service.claims(POOL)) == len(ready(service)) == replicas and service.mirror.settled()


def wait_settled(service, replicas, timeout=60):
    service.wait(lambda: settled(service, replicas), timeout, f"{replicas} nodes", lambda: str([(key(claim), claim["metadata"]["labels"].get(WAVE)) for claim in service.claims(POOL)]))


def scale(service, replicas):
    """As `kubectl scale nodepool` does: through the subresource, as a client without rights on the rest of the object may."""
    service.plane.kubectl("scale", "nodepool", POOL, f"--replicas={replicas}")


def set_wave(service, wave):
    service.api.patch("NodePool", POOL, {"spec": {"template": {"metadata": {"labels": {WAVE: wave}}}}})


def replaced(service, wave):
    return settled(service, REPLICAS) and {claim["metadata"]["labels"][WAVE] for claim in service.claims(POOL)} == {wave}


class TestStaticPools:
    @staticmethod
    def environment(request):
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", workloads.namespace(SPACE), static_pool())

    def test_1_a_static_pool_has_the_nodes_that_its_owner_asks_for(self, service):
        wait_settled(service, REPLICAS)
        scale(service, LIMIT)
        wait_settled(service, LIMIT)
        counted = lambda: service.plane.kubectl("get", "nodepool", POOL, "-o", "jsonpath={.status.nodes}").stdout.strip()
        service.poll(lambda: counted() == str(LIMIT), 20, "the number of nodes in the status", counted)
        scale(service, LIMIT + 1)
        reason = "NodeLimitReached"
        service.poll(lambda: service.plane.events(POOL, reason), 20, f"event {reason}", service.stowage.tail)
        assert len(service.claims(POOL)) == LIMIT

    def test_2_empty_nodes_are_removed_first_and_the_pods_of_others_follow(self, service):
        server = workloads.workload(SPACE, "server", 2, 500, 512, nodeSelector={"karpenter.sh/nodepool": POOL}, **workloads.host_alone("server"))
        service.plane.apply(server)
        service.wait_bound(SPACE, 2, 30)
        used = {kube.bound_to(pod) for pod in service.mirror.pods(SPACE)}
        uids = service.uids(SPACE)
        scale(service, 2)
        wait_settled(service, 2)
        assert {claim["status"]["nodeName"] for claim in service.claims(POOL)} == used and service.uids(SPACE) == uids
        scale(service, 1)
        wait_settled(service, 1)
        service.wait(lambda: sum(1 for pod in service.mirror.pods(SPACE) if kube.bound_to(pod)) == 1, 30, "one pod bound")
        scale(service, REPLICAS)
        wait_settled(service, REPLICAS)
        service.wait_bound(SPACE, 2, 30)

    def test_3_drifted_nodes_are_replaced_one_for_one_within_the_limit(self, service):
        before = set(service.names(POOL))
        with service.mirror.sampling(lambda: counts(service, POOL)) as samples:
            set_wave(service, "2")
            service.wait(lambda: replaced(service, "2"), 120, "every node replaced", lambda: str(service.drift_reasons(POOL)))
        assert not before & set(service.names(POOL))
        assert min(sample.up for sample in samples) >= REPLICAS, "a node left before its replacement was ready"
        assert max(sample.existing for sample in samples) <= LIMIT
        service.wait_bound(SPACE, 2, 30)
        service.assert_nothing_leaked()

    def test_4_a_killed_process_continues(self, service):
        set_wave(service, "3")
        service.wait(lambda: any(kube.being_disrupted(claim) for claim in service.claims(POOL)), 60, "a replacement")
        for wave in ("3", "4"):
            service.stowage.kill()
            service.stowage.start()
            set_wave(service, wave)
            time.sleep(1.5)
        service.stowage.kill()
        scale(service, REPLICAS + 1)
        service.stowage.start()
        service.wait(lambda: settled(service, REPLICAS + 1), 120, "one node more")
        scale(service, REPLICAS)
        service.wait(lambda: replaced(service, "4"), 120, "every node replaced", lambda: str(service.drift_reasons(POOL)))
        service.wait_bound(SPACE, 2, 30)
        service.assert_nothing_leaked()

    def test_5_nodes_that_expire_together_are_replaced_before_within_budget_and_limit(self, service):
        """Also those of a dynamic NodePool: in the last tenth of the lifetime."""
        before = set(service.names(POOL))
        aging = workloads.node_pool(AGING, consolidate_after="Never", budget="1", extra=[workloads.requirement(INSTANCE_TYPE, services.TYPE)])
        aging["spec"]["template"]["spec"]["expireAfter"] = LIFETIME
        pinned = {"nodeSelector": {"karpenter.sh/nodepool": AGING}, **workloads.host_alone("aging")}
        service.plane.apply(workloads.namespace(AGING), aging, workloads.workload(AGING, "aging", 2, 500, 512, **pinned))
        service.api.patch("NodePool", POOL, {"spec": {"template": {"spec": {"expireAfter": LIFETIME}}}})
        service.wait(lambda: replaced(service, "4") and not before & set(service.names(POOL)), 60, "every static node with the new lifetime")
        service.wait_bound(AGING, 2, 60)
        first = {pool: set(service.names(pool)) for pool in (POOL, AGING)}
        with service.mirror.sampling(lambda: {pool: counts(service, pool) for pool in first}) as samples:
            service.wait(lambda: not any(names & set(service.names(pool)) for pool, names in first.items()), 300, "every node replaced", lambda: str(first))
        for pool, least, most in ((POOL, REPLICAS, LIMIT), (AGING, 2, 4)):
            assert min(sample[pool].up for sample in samples) >= least, f"a node of {pool} left before its replacement was ready"
            assert max(sample[pool].existing for sample in samples) <= most, pool
            reasons = [event["note"] for name in first[pool] for event in service.plane.events(name, "DisruptionTerminating")]
            assert sum("Expired" in note for note in reasons) >= len(first[pool]), reasons
        assert max(sample[AGING].leaving for sample in samples) == 1, "beyond the budget"
        service.wait_bound(AGING, 2, 30)
        service.assert_nothing_leaked()
        for pool in first:
            service.api.delete("NodePool", pool)
        service.wait(lambda: not any(service.claims(pool) for pool in first), 90, "no node of a deleted NodePool")
        service.assert_nothing_leaked()
        service.assert_no_errors()
