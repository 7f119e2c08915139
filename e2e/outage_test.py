"""Outages of the API server: stopped, killed, connections that drop packets, history that is compacted under the watches. What stops, for
how long, that it resumes, and that no node is terminated or bought twice. Figures are printed; docs/operations.md states them."""

import contextlib
import datetime
import json
import os
import signal
import threading
import time
import urllib.parse

import harness
import messages
import tcp_proxy
import workloads
from kube import bound_to, is_true, key
from waiting import wait_until

SPACE = "outage"
STOPPED = 60.0  # seconds that the API server is stopped
FROZEN_LIMIT = 45.0  # a dead watch is noticed after 35 s, and is listed or resumed within seconds
OTHER_LEADER_LIMIT = 40.0  # seconds until a leader notices another one: it looks every ten seconds, and sees a renewal two seconds later
REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "u",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "object": {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}},
    },
}


class Proxied(harness.Stowage):
    """The service, with a proxy between it and the API server."""

    def __init__(self, plane, proxy, **more):
        super().__init__(plane, "extender", **more)
        self.proxy = proxy

    def install(self):
        super().install()
        file = self.dir / "kubeconfig"
        content = json.loads(file.read_text())
        content["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self.proxy.port}"
        file.write_text(json.dumps(content))

    def supervise(self):
        """Restarts the process if it ended, as its Deployment does. Returns whether it did."""
        if self.process.poll() is None:
            return False
        assert messages.LEASE_LOST in self.tail(1) or messages.OTHER_LEADER in self.tail(1), self.tail()
        self.spawn()
        return True

    def age(self, kind):
        return self.by_kind("stowage_watch_age_seconds")[f'{{kind="{kind}"}}']

    def by_kind(self, name):
        """A metric's samples, one for each watched kind."""
        return {sample.removeprefix(name): value for sample, value in self.metrics().items() if sample.startswith(name + "{")}

    def lists(self):
        """Lists up to now, by kind. The service counts them every five seconds, when it also sets the ages."""
        ages = self.by_kind("stowage_watch_age_seconds")
        wait_until(lambda: self.by_kind("stowage_watch_age_seconds") != ages, 30, "counted lists", every=0.1)
        return self.by_kind("stowage_watch_lists_total")

    def serves_webhook(self):
        with contextlib.suppress(OSError):
            return self.post("/mutate", json.dumps(REVIEW), client=None)[0] == 200
        return False


class Outage:
    """A service with a few nodes, and what it bought."""

    def __init__(self, plane, stowage, proxy):
        self.plane, self.api, self.stowage, self.proxy = plane, plane.api, stowage, proxy
        self.before = None

    def logs(self):
        """Ends of logs, by name, for the report of a failed test."""
        return {"warnings of stowage": self.stowage.warnings(), "end of stowage's log": self.stowage.tail(30)}

    def pods(self):
        return self.api.list("Pod", SPACE)

    def run_pods(self, name, replicas=3):
        """Creates pods that need a node each, and returns the seconds until they are bound."""
        count, start = len(self.pods()) + replicas, time.monotonic()
        term = workloads.required_pod_term(name, workloads.HOST)
        self.plane.apply(workloads.workload(SPACE, name, replicas, 1500, 2000, affinity={"podAntiAffinity": term}))

        def bound():
            self.stowage.supervise()
            return sum(1 for pod in self.pods() if bound_to(pod)) == count

        wait_until(bound, 90, f"{count} pods bound", lambda: [key(pod) for pod in self.pods() if not bound_to(pod)], every=0.25)
        return time.monotonic() - start

    def owned(self):
        """What must survive: NodeClaims, their instances, and the pods with their nodes."""
        claims = {item["metadata"]["uid"]: item["status"].get("providerID") for item in self.api.list("NodeClaim") if "deletionTimestamp" not in item["metadata"]}
        return claims, {pod["metadata"]["uid"]: bound_to(pod) for pod in self.pods()}

    def settled(self):
        claims = self.api.list("NodeClaim")
        return all(is_true(claim, "Initialized") for claim in claims) and len(self.stowage.instances()) == len(claims)

    def remember(self):
        wait_until(self.settled, 60, "every NodeClaim initialized")
        self.before = self.owned()

    def assert_nothing_lost_or_doubled(self, bought=0):
        wait_until(self.settled, 60, "an instance for each NodeClaim", lambda: f"{len(self.stowage.instances())} instances")
        claims, pods = self.owned()
        old_claims, old_pods = self.before
        assert old_claims.items() <= claims.items(), "a node was terminated"
        assert old_pods.items() <= pods.items(), "a pod was evicted or moved"
        assert len(claims) <= len(old_claims) + bought, "nodes were bought twice"
        assert len(set(claims.values())) == len(claims), "two claims share an instance"

    def component(self, name):
        return int((self.plane.dir / "pids" / f"{name}.pid").read_text().split()[0])


@contextlib.contextmanager
def outage(plane, **env):
    # Nodes are consolidated when nothing else happens: a node must stay because its pods stay.
    pool = workloads.node_pool(consolidate_after="30s")
    with tcp_proxy.TcpProxy(urllib.parse.urlsplit(plane.state["api"]).port) as proxy, Proxied(plane, proxy, env=env) as stowage:
        running = Outage(plane, stowage, proxy)
        # One after the other: the first request discovers the kinds.
        plane.apply(workloads.node_class())
        plane.apply(pool)
        wait_until(lambda: is_true(running.api.find("NodePool", "default") or {}, "Ready"), 30, "NodePool ready")
        plane.namespace(SPACE)
        running.run_pods("first")
        running.remember()
        yield running


def report(what, **figures):
    print(f"\n{what}: " + " ".join(f"{name}={value:.1f}s" if isinstance(value, float) else f"{name}={value}" for name, value in figures.items()), flush=True)


class TestOutage:
    """The leader renews a lease, as in production."""

    environment = staticmethod(lambda request: outage(request.getfixturevalue("service_plane")))

    def test_1_connections_that_drop_packets_are_replaced_and_the_leader_stays(self, service):
        stowage, start = service.stowage, time.monotonic()
        pid, frozen = stowage.process.pid, service.proxy.freeze_existing()
        assert frozen >= 10, "a connection for each watch"
        bound = service.run_pods("frozen")
        # What a watch received since then came over a new connection. Of quiet kinds that is a bookmark every half minute.
        elapsed = lambda: time.monotonic() - start
        renewed = lambda: elapsed() - max(stowage.age(kind) for kind in ("pods", "nodes", "nodeclaims")) > 1
        wait_until(renewed, FROZEN_LIMIT, "watches over new connections", lambda: {kind: stowage.age(kind) for kind in ("pods", "nodes", "nodeclaims")}, every=0.5)
        fresh = elapsed()
        assert stowage.process.poll() is None and stowage.process.pid == pid, "the leader led throughout"
        assert stowage.probe("/livez")[0] == 200
        service.assert_nothing_lost_or_doubled(bought=3)
        report("connections drop packets", connections=frozen, pods_bound_after=bound, watches_fresh_after=fresh)
        service.proxy.flow()

    def test_2_a_stopped_api_server_stops_the_leader_and_not_the_webhook(self, service):
        service.remember()
        stowage, api = service.stowage, service.component("kube-apiserver")
        os.kill(api, signal.SIGSTOP)
        start, ended, webhook_down, alive = time.monotonic(), [], 0, True
        try:
            while time.monotonic() - start < STOPPED:
                if stowage.supervise():
                    ended.append(time.monotonic() - start)
                webhook_down += not stowage.serves_webhook()
                alive = alive and stowage.probe("/livez")[0] in (0, 200)
                time.sleep(0.5)
        finally:
            os.kill(api, signal.SIGCONT)
        resumed = time.monotonic()
        assert alive, "an outage of the API server never fails /livez"
        # The replica that led restarts; other replicas serve meanwhile.
        assert webhook_down * 0.5 < 20, "the webhook is away only while the leader restarts"
        assert len(ended) == 1 and ended[0] < 25, f"the leader stops once, within its deadline: {ended}"
        ready = wait_until(lambda: stowage.ready() and time.monotonic() - resumed, 60, "ready", stowage.tail)
        leads = wait_until(lambda: stowage.metrics().get("stowage_leader") and time.monotonic() - resumed, 60, "leading", stowage.tail, every=0.2)
        service.run_pods("stopped")
        bound = time.monotonic() - resumed
        service.assert_nothing_lost_or_doubled(bought=3)
        report("API server stopped for 60 s", leader_stopped_after=ended[0], webhook_unavailable=webhook_down * 0.5, ready_after=ready, leads_after=leads, pods_bound_after=bound)

    def test_3_another_leader_is_given_way_to_until_its_lease_expires(self, service):
        service.remember()
        stowage, api = service.stowage, service.api
        service.plane.namespace("tenant")
        # A tenant can write leases, too. Nothing there may create NodeClaims.
        with renewed(api, "tenant"), renewed(api, "kube-system"):
            gone = wait_until(stowage.supervise, OTHER_LEADER_LIMIT, "the leader ends", stowage.tail, every=0.2)
            assert gone
            waits = lambda: stowage.metrics().get("stowage_other_leader") == 1
            wait_until(waits, 30, "a replica that waits", stowage.tail, every=0.2)
            assert messages.OTHER_LEADER_WAIT in stowage.tail(500)
            noted = lambda: [event["note"] for event in api.list("Event") if event["reason"] == "OtherLeader"]
            assert any("kube-system/karpenter-leader-election" in note for note in wait_until(noted, 10, "an event"))
            claims = len(api.list("NodeClaim"))
            service.plane.apply(workloads.workload(SPACE, "other-leader", 1, 1500, 2000, affinity={"podAntiAffinity": workloads.required_pod_term("other-leader", workloads.HOST)}))
            for _ in range(20):
                assert not stowage.supervise() and waits() and stowage.metrics()["stowage_leader"] == 0
                assert len(api.list("NodeClaim")) == claims, "two would buy"
                time.sleep(0.5)
            stopped = time.monotonic()
        with renewed(api, "tenant"):
            leads = wait_until(lambda: stowage.metrics().get("stowage_leader") and time.monotonic() - stopped, 40, "leading", stowage.tail, every=0.2)
            wait_until(lambda: all(bound_to(pod) for pod in service.pods()), 60, "the pod bound")
        service.assert_nothing_lost_or_doubled(bought=1)
        api.delete("Lease", "karpenter-leader-election", "kube-system")
        report("another leader", leads_after_its_last_renewal=leads)


@contextlib.contextmanager
def renewed(api, namespace):
    """A Lease of Karpenter's name in a namespace, renewed as Karpenter does."""
    end = threading.Event()

    def renew():
        while not end.is_set():
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            spec = {"holderIdentity": f"karpenter-{namespace}", "leaseDurationSeconds": 15, "renewTime": now}
            api.apply({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "karpenter-leader-election", "namespace": namespace}, "spec": spec})
            end.wait(1)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


class TestCompaction:
    """Without a lease: the process lives through the outage with its old state."""

    environment = staticmethod(lambda request: outage(request.getfixturevalue("service_plane"), DISABLE_LEADER_ELECTION="true"))

    def test_a_killed_api_server_and_compacted_history_cost_a_list_per_kind(self, service):
        stowage, plane, lists = service.stowage, service.plane, service.stowage.lists()
        pid = stowage.process.pid
        service.proxy.freeze()
        # What happens meanwhile is not in any watch.
        node = next(bound_to(pod) for pod in service.pods())
        for number in range(20):
            service.api.annotate("Node", node, {"example.com/n": str(number)})
        plane.script("stop-component", plane.dir, "kube-apiserver", "--kill")
        start = time.monotonic()
        compact(plane.state["etcd"])
        plane.script("start-component", plane.dir, "kube-apiserver")
        service.proxy.flow()
        resumed = time.monotonic()
        # One watch may have seen the last event before the compaction: it continues without a list.
        more = lambda counts: {kind: int(count - lists[kind]) for kind, count in counts.items()}
        known = lambda: more(stowage.by_kind("stowage_watch_lists_total"))
        wait_until(lambda: sum(1 for count in known().values() if count) >= len(lists) - 1, 60, "a list of each kind", known, every=0.5)
        fresh = time.monotonic() - resumed
        bound = service.run_pods("compacted")
        assert stowage.process.poll() is None and stowage.process.pid == pid
        service.assert_nothing_lost_or_doubled(bought=3)
        # A list during the start of the API server may be too old for its watch already.
        listed = more(stowage.lists())
        assert max(listed.values()) <= 2, f"watches that are too old are listed again, and continue from there: {listed}"
        report("API server killed, history compacted", down=resumed - start, listed_after=fresh, lists=sum(listed.values()), pods_bound_after=bound)


def compact(etcd):
    """Drops the history of etcd up to now."""
    http = harness.http()
    revision = http.post(f"{etcd}/v3/kv/range", json={"key": "AA=="}, timeout=10).json()["header"]["revision"]
    answer = http.post(f"{etcd}/v3/kv/compaction", json={"revision": revision, "physical": True}, timeout=10)
    assert answer.status_code == 200, answer.text
