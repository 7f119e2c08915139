"""SIGKILL at random moments of launches, drains and interruptions on EC2's wire protocol, and of consolidations with simulated EC2. After each, a new
process must bring the cluster to the same end: every pod bound, an instance and a Node for each NodeClaim, and no instance launched that no pod needed.

A moment is a call to AWS or to the API server, before or after it takes effect, or a time. STOWAGE_KILLS is the number of kills,
STOWAGE_KILLS_SEED the seed of all draws; the same seed draws the same moments. `make test-kills` draws a
new seed each time.
"""

import contextlib
import dataclasses
import os
import random
import threading
import time

import pytest

import faults
import harness
import kube
import services
import workloads
from ec2_leaving_test import send
from kube import key, terminating
from kube_proxy import KubeProxy
from services import CLUSTER, NO_DRIFT, TYPE, one_per_node, small_pool
from waiting import wait_until

KILLS = int(os.environ.get("STOWAGE_KILLS") or 4)
SEED = int(os.environ.get("STOWAGE_KILLS_SEED") or 14)
SPACE, POOL, LEASE = "kills", "kills", "karpenter-leader-election"
SIZES = range(2, 8)  # pods, and nodes
# A leaked instance is garbage when it is 30 s old; the first passes after a start are 10 s apart.
RECOVERY = 180
# Seconds in which the drawn call must come; then the process is killed anyway.
PATIENCE = 8.0
# The same for a consolidation: pods end, and their nodes are quiet for a while before.
CONSOLIDATION = 20.0
# Seconds after which a third of the kills finds new instances in descriptions.
LAG = 30
# The writes of each kind of change, as AWS and Kubernetes name them.
LAUNCH = ["create nodeclaims", "patch nodeclaims", "patch nodeclaims/status", "CreateFleet", "patch nodes", "patch pods/status"]
REMOVAL = ["patch nodes", "create pods/eviction", "TerminateInstances", "delete nodes", "patch nodeclaims", "patch nodeclaims/status"]
CALLS = {
    "launch": LAUNCH,
    "drain": REMOVAL + ["create nodeclaims", "CreateFleet"],
    "interruption": ["ReceiveMessage", "DeleteMessageBatch", "delete nodeclaims", "create nodeclaims", "CreateFleet", *REMOVAL],
    "scale-down": ["delete nodeclaims", "patch nodes", "TerminateInstances", "delete nodes", "patch nodeclaims"],
    "consolidation": ["create nodeclaims", *["patch nodeclaims", "patch nodes", "delete nodeclaims"] * 2, "create pods/eviction", "delete nodes"],
}


@dataclasses.dataclass
class Moment:
    """When the process is killed: at the `nth` call of this name, before or after it takes effect; or, without a name, after a time."""

    call: str | None
    nth: int
    after: bool
    seconds: float

    @classmethod
    def draw(cls, draw, change, patience=PATIENCE):
        call = draw.choice(CALLS[change]) if draw.random() < 0.75 else None
        return cls(call, draw.choice([1, 1, 1, 1, 2, 3]), draw.random() < 0.5, draw.uniform(0.0, patience))

    def __str__(self):
        return f"{'after' if self.after else 'before'} {self.call} {self.nth}" if self.call else f"at {self.seconds:.1f} s"


class Killer:
    """Kills the process at a moment. Both proxies report calls to `at`."""

    def __init__(self, service):
        self.service = service
        self.lock = threading.Lock()
        self.moment, self.seen, self.killed_at = None, 0, None
        self.lag = None

    def arm(self, moment, lag):
        """From now on the process is killed at this moment, and EC2 describes instances `lag` seconds late."""
        with self.lock:
            self.moment, self.seen, self.killed_at = moment, 0, None
            self.lag = faults.eventual(self.service.proxy, lag) if lag else None

    def at(self, call, effective):
        """Whether the process was killed at this call."""
        with self.lock:
            moment = self.moment
            if moment is None or moment.call != call or moment.after != effective:
                return False
            self.seen += 1
            if self.seen < moment.nth:
                return False
            self.kill(str(moment))
            return True

    def kill(self, why):
        self.moment, self.killed_at = None, why
        self.service.stowage.kill()

    def wait(self, moment, patience=PATIENCE):
        """Waits for the moment, or until it will not come; returns what happened."""
        begin = time.monotonic()
        limit = patience if moment.call else moment.seconds
        while time.monotonic() - begin < limit:
            with self.lock:
                if self.killed_at:
                    break
            time.sleep(0.01)
        with self.lock:
            if not self.killed_at:
                self.kill(f"at {limit:.1f} s" + (f", {moment} did not come" if moment.call else ""))
        return self.killed_at

    def fault(self, call, forward):
        """Of faults.Proxy."""
        if call.form.get("DryRun") == "true":
            return None
        if self.at(call.action, False):
            return faults.DROP
        reply = (self.lag and self.lag(call, forward)) or forward(call)
        return faults.DROP if self.at(call.action, True) else reply


class Changes:
    """The changes during which the process is killed. Each returns the number of instances that it makes necessary, and the names of the
    NodeClaims that it ends."""

    def __init__(self, service, draw):
        self.service, self.draw = service, draw
        self.pods = 0

    def possible(self):
        found = ["drain", "interruption"]
        return found + ["launch"] * (self.pods < SIZES[-1]) + ["scale-down"] * (self.pods > SIZES[0])

    def apply(self, change):
        return getattr(self, change.replace("-", "_"))()

    def some(self):
        claims = sorted((claim for claim in self.service.claims(POOL) if not terminating(claim)), key=key)
        return self.draw.sample(claims, self.draw.randint(1, min(2, len(claims))))

    def scale(self, pods):
        self.pods = pods
        self.service.api.scale("Deployment", "server", SPACE, pods)

    def launch(self):
        more = self.draw.randint(1, SIZES[-1] - self.pods)
        self.scale(self.pods + more)
        return more, []

    def scale_down(self):
        self.scale(self.draw.randint(SIZES[0], self.pods - 1))
        return 0, []

    def drain(self):
        claims = self.some()
        for claim in claims:
            self.service.api.delete("NodeClaim", key(claim))
        return len(claims), [key(claim) for claim in claims]

    def interruption(self):
        claims = self.some()
        for claim in claims:
            detail = {"instance-id": self.service.instance_of(claim), "instance-action": "terminate"}
            send(self.service, "aws.ec2", "EC2 Capacity Reservation Instance Interruption Warning", **detail)
        return len(claims), [key(claim) for claim in claims]


@pytest.fixture(scope="class")
def killer(service):
    """Lets the service send all its requests through both proxies. Simulated EC2 has none."""
    killer = Killer(service)
    calls_of_ec2 = service.proxy.fault(killer.fault) if isinstance(service, services.Ec2) else contextlib.nullcontext()
    with KubeProxy(service.stowage.dir / "kubeconfig") as proxy, calls_of_ec2:
        proxy.at = killer.at
        service.stowage.stop()
        proxy.kubeconfig(service.stowage.dir / "kubeconfig")
        service.api.delete("Lease", LEASE, harness.NAMESPACE)
        service.stowage.start()
        yield killer


class TestKills:
    """The process is killed while it launches, drains, or responds to interruptions."""

    @staticmethod
    def environment(request):
        pool = small_pool(POOL, "on-demand")
        pool["spec"]["disruption"] |= {"consolidateAfter": "0s", "budgets": [{"nodes": "100%", "reasons": ["Empty"]}, {"nodes": "0", "reasons": ["Underutilized"]}, NO_DRIFT]}
        return services.ec2(request.getfixturevalue("service_plane"), [pool])

    def test_every_kill_ends_with_the_same_cluster(self, service, killer):
        draw = random.Random(SEED)
        changes = Changes(service, draw)
        changes.pods = SIZES[0]
        service.plane.apply(*one_per_node(SPACE, changes.pods, POOL))
        service.wait_bound(SPACE, changes.pods, 90)
        print(f"\nSTOWAGE_KILLS={KILLS} STOWAGE_KILLS_SEED={SEED}", flush=True)
        for number in range(1, KILLS + 1):
            change = draw.choice(changes.possible())
            moment = Moment.draw(draw, change)
            # A standby takes over after the lease expired; a restarted process may find it released.
            released = draw.random() < 0.8
            lag = draw.choice([0, 0, LAG])
            print(f"kill {number}: {change}, {moment}{', EC2 lags' if lag else ''}", end="", flush=True)
            self.kill(service, killer, changes, change, moment, lag, released)

    def kill(self, service, killer, changes, change, moment, lag, released):
        begin, at = time.monotonic(), time.time()
        killer.arm(moment, lag)
        needed, ended = changes.apply(change)
        print(f": {killer.wait(moment)}", end="", flush=True)
        if released:
            service.api.delete("Lease", LEASE, harness.NAMESPACE)
        service.stowage.start()
        # A message that the killed process received is visible again after a time.
        queue = lambda: service.aws.sqs.get_queue_attributes(QueueUrl=service.account.queue_url, AttributeNames=["All"])["Attributes"]
        waiting = lambda: sum(int(queue()[f"ApproximateNumberOfMessages{kind}"]) for kind in ("", "NotVisible"))
        service.poll(lambda: waiting() == 0, RECOVERY, "the queue empty", queue)
        service.wait(lambda: not set(ended) & set(service.names(POOL)), RECOVERY, f"{', '.join(ended)} gone")
        service.wait_bound(SPACE, changes.pods, RECOVERY)
        corresponding = lambda: len(service.claims(POOL)) == changes.pods and service.mirror.settled()
        service.wait(corresponding, RECOVERY, f"{changes.pods} NodeClaims")
        service.assert_nothing_leaked()
        launched = [id for id, when in service.proxy.launched.items() if when >= at]
        print(f"; {needed} needed, {len(launched)} launched, recovered after {time.monotonic() - begin:.0f} s", flush=True)
        assert len(launched) == needed, "the number of launched instances is not that of the pods without a node"
        service.assert_not_doubly_planned()
        service.assert_no_errors()


class TestKillsOfMoves:
    """The process is killed while it consolidates: deployments are scaled down, and their nodes are replaced with fewer and cheaper ones."""

    MANY, FEW = 12, 2  # replicas of each workload

    @classmethod
    def environment(cls, request):
        kinds = workloads.requirement(kube.INSTANCE_TYPE, TYPE, "m5.xlarge", "m5.2xlarge")
        pool = workloads.node_pool(POOL, consolidate_after="2s", capacity_types=["on-demand"], extra=[kinds])
        work = [workloads.workload(SPACE, name, cls.FEW, cpu, cpu) for name, cpu in (("large", 700), ("small", 200))]
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", workloads.namespace(SPACE), pool, *work)

    def test_every_kill_ends_with_a_cheaper_cluster_and_nothing_left_behind(self, service, killer):
        draw = random.Random(SEED)
        print(f"\nSTOWAGE_KILLS={KILLS} STOWAGE_KILLS_SEED={SEED}", flush=True)
        for number in range(1, KILLS + 1):
            # On new nodes for all of them, none is as small as what is needed in the end.
            service.api.scale_all(SPACE, 0)
            service.wait(lambda: not service.names(POOL), RECOVERY, "no node", service.mirror.summary)
            service.api.scale_all(SPACE, self.MANY)
            service.wait_bound(SPACE, 2 * self.MANY, RECOVERY)
            service.wait(lambda: not self.left_behind(service), RECOVERY, "no node disrupted")
            moment = Moment.draw(draw, "consolidation", CONSOLIDATION)
            released = draw.random() < 0.8
            print(f"kill {number}: {moment}", end="", flush=True)
            self.kill(service, killer, moment, released)

    @staticmethod
    def left_behind(service):
        """NodeClaims and Nodes that are being disrupted or closed."""
        claims = [key(claim) for claim in service.claims() if kube.being_disrupted(claim)]
        tainted = [key(node) for node in service.mirror.nodes() if kube.taint_keys(node) & {kube.DISRUPTED_TAINT, kube.PLANNED_TAINT}]
        return claims + tainted

    def kill(self, service, killer, moment, released):
        begin, before, cost = time.monotonic(), set(service.mirror.record.launched), service.stowage.cost(service.claims(POOL))
        killer.arm(moment, 0)
        service.api.scale_all(SPACE, self.FEW)
        print(f": {killer.wait(moment, CONSOLIDATION)}", end="", flush=True)
        if released:
            service.api.delete("Lease", LEASE, harness.NAMESPACE)
        service.stowage.start()

        def consolidated():
            is_cheaper = service.stowage.cost(service.claims(POOL)) < 0.6 * cost
            return is_cheaper and service.mirror.all_bound(2 * self.FEW, SPACE) and service.mirror.settled() and not self.left_behind(service)

        service.wait(consolidated, RECOVERY, "consolidated", lambda: f"{self.left_behind(service)}; {service.mirror.summary(SPACE)}")
        service.assert_nothing_leaked()
        service.assert_not_doubly_planned()
        record = service.mirror.record
        new = set(record.launched) - before
        print(f"; USD/h {cost:.3f}, then {service.stowage.cost(service.claims(POOL)):.3f}; {len(new)} launched, after {time.monotonic() - begin:.0f} s", flush=True)
        used = {node for _, node, _ in record.bound.values()}
        assert not [claim for claim in new if record.node_of(claim) not in used], "a node was launched that no pod was bound to"
        service.assert_no_errors()
