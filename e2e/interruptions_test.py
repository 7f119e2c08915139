"""Many spot nodes are interrupted at once, on a real control plane: new nodes are bought for all of them first, and each pod leaves when its place is
ready, or at once if its grace period is as long as the notice. `STOWAGE_INTERRUPTED_NODES` sets their number.
"""

import concurrent.futures
import os
import time

import services
import workloads
from kube import INSTANCE_TYPE, bound_to, key

NODES = int(os.environ.get("STOWAGE_INTERRUPTED_NODES", "30"))
SPACE, POOL = "spot", "spot"
NOTICE = 120  # seconds between the warning and the end of the instance
TIMEOUT = 60 + NODES


class TestMassInterruption:
    """Nodes of one type, each with a pod of `web` and one of `slow`, which needs the whole notice to terminate."""

    @staticmethod
    def environment(request):
        kind = workloads.requirement(INSTANCE_TYPE, services.TYPE)
        pool = workloads.node_pool(POOL, consolidate_after="Never", capacity_types=["spot"], extra=[kind])
        web = workloads.workload(SPACE, "web", NODES, 500, 512, **workloads.host_alone("web"))
        slow = workloads.workload(SPACE, "slow", NODES, 500, 512, **workloads.host_alone("slow"), terminationGracePeriodSeconds=NOTICE)
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", workloads.namespace(SPACE), pool, web, slow)

    def test_1_every_pod_leaves_when_its_place_is_ready(self, service):
        mirror, record = service.mirror, service.mirror.record
        service.wait_bound(SPACE, 2 * NODES, TIMEOUT)
        interrupted = {key(claim): claim["status"]["nodeName"] for claim in service.claims(POOL)}
        pods = {pod["metadata"]["uid"]: key(pod) for pod in mirror.pods(SPACE) if bound_to(pod) in interrupted.values()}
        assert len(pods) == 2 * NODES
        created, begin = record.claims_created, time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            event = {"simulated.stowage.dev/event": "spot-interruption"}
            list(threads.map(lambda node: service.api.annotate("Node", node, event), interrupted.values()))
        warned = time.monotonic() - begin
        gone = lambda: not set(interrupted) & set(service.names(POOL)) and mirror.all_bound(2 * NODES, SPACE)
        service.wait(gone, NOTICE + warned, "every interrupted node gone and its pods bound elsewhere before its instance ends")
        took = time.monotonic() - begin
        after = lambda times: sorted(at - begin for at in times if at > begin)
        slow, web = ({uid: pod for uid, pod in pods.items() if f"/{name}-" in pod} for name in ("slow", "web"))
        launched, slow_left, web_left = after(record.launched.values()), after(record.left[uid] for uid in slow), after(record.left[uid] for uid in web)
        figures = {"launched": launched, "slow pods left": slow_left, "web pods left": web_left}
        shown = ", ".join(f"{what} after {times[0]:.1f} to {times[-1]:.1f} s" for what, times in figures.items())
        print(f"\n{NODES} nodes warned within {warned:.1f} s: {record.claims_created - created} nodes {shown}, all over after {took:.1f} s", flush=True)
        # By the times in the objects: on a busy machine, a watch of pods may be seconds ahead of one of NodeClaims.
        ready = lambda pod: [at for claim, at in record.initialized_at.items() if claim not in interrupted and claim in record.plans[pod]]
        early = lambda moved: [pod for uid, pod in moved.items() if min(ready(pod), default=float("inf")) > record.evicted[uid]]
        assert early(web) == [], "evicted before the replacement was ready"
        assert len(early(slow)) > 0.8 * NODES, "pods that need the whole notice waited"
        assert launched[-1] < web_left[-1], "purchases are first"
        service.assert_nothing_leaked()
        service.assert_no_errors()
