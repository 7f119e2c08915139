"""Attacks on the service by peers without credentials and by tenants: probes and reviews are answered, memory stays below the limit, and
nothing is purchased that no ordinary pod needs.

`make test` runs a short form, `make test-attacks` (STOWAGE_ATTACKS=1) the whole form against the release build.
"""

import os

import pytest

import attacks
import services
import workloads
from kube import bound_to

WHOLE = bool(os.environ.get("STOWAGE_ATTACKS"))
IDLE = 1100  # connections: more than a listener has
SECONDS = 30 if WHOLE else 4  # of each attack
CLIENTS = 16 if WHOLE else 6
ATTACKER, OTHER = "127.0.0.66", "127.0.0.67"
# What an attack may add to the memory of the process, in MiB: the limits of docs/security.md. Pods of tenants are planned, which needs
# a table of offerings for each combination of their labels.
MEMORY, PLANNING_MEMORY = 256, 512


@pytest.fixture
def observed(service, request):
    """Everybody who is honest during the test. Afterwards: probes were answered, and memory was bounded."""
    with attacks.Observer(service.stowage) as observer:
        yield observer
    observer.report(request.node.name.removeprefix("test_"))
    for name in ("livez", "readyz", "mutate"):
        assert len(observer.answers[name]) >= SECONDS, "nobody observed the attack"
        assert observer.failed(name) == [], f"{name} was not answered"
    assert observer.peak - observer.before < request.cls.memory
    service.assert_no_errors()


class TestPeers:
    """Peers without a certificate, from addresses of their own."""

    memory = MEMORY

    @staticmethod
    def environment(request):
        return services.simulated(request.getfixturevalue("service_plane"), "extender", workloads.node_pool())

    @pytest.mark.parametrize("listener", ["health", "metrics", "https"])
    def test_silent_connections(self, service, observed, listener):
        target = ("127.0.0.1", service.stowage.port) if listener == "https" else attacks.address(service.stowage.addresses[listener])
        with attacks.silent(target, ATTACKER, IDLE) as sockets:
            assert len(sockets) > IDLE // 2, "the attack did not take place"
            observed.observe(SECONDS)

    def test_idle_tls_sessions(self, service, observed):
        count = IDLE if WHOLE else 300
        with attacks.idle_tls(("127.0.0.1", service.stowage.port), ATTACKER, count) as sessions:
            assert len(sessions) > count // 2, "the attack did not take place"
            observed.observe(SECONDS)

    def test_slow_bodies(self, service, observed):
        with attacks.slow_bodies(service.stowage.url, ATTACKER, 200 if WHOLE else 40):
            observed.observe(SECONDS)

    def test_large_and_deep_bodies(self, service, observed):
        bodies = attacks.large_bodies()
        with attacks.flood(service.stowage.url, ATTACKER, bodies, CLIENTS) as one, attacks.flood(service.stowage.url, OTHER, bodies, CLIENTS) as two:
            observed.observe(SECONDS)
        assert len(one) > 0 and len(two) > 0, "the attack did not take place"
        print(f"\nstatuses: { {status: (one + two).count(status) for status in set(one + two)} }", flush=True)

    def test_scrapes(self, service, observed):
        target = attacks.address(service.stowage.addresses["metrics"])
        with attacks.silent(target, ATTACKER, 50) as sockets:
            for sock in sockets:
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 20)
            observed.observe(SECONDS)


class TestTenants:
    """A tenant with the rights of `edit` in one namespace, beside an ordinary one."""

    memory = PLANNING_MEMORY

    @staticmethod
    def environment(request):
        pool = workloads.node_pool(extra=[workloads.requirement("example.com/team", operator="Exists")])
        del pool["spec"]["template"]["spec"]["requirements"][-1]["values"]
        return services.simulated(request.getfixturevalue("service_plane"), "extender", pool)

    def hostile(self, space):
        """Objects that once stopped all purchases, or caused them without end."""
        sets = [workloads.daemon_set(space, f"overflow-{number}", 10, 1) for number in range(4)]
        for item in sets:
            item["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"] = "4611686018416650649"
        huge = workloads.daemon_set(space, "huge", 5_000_000, 64)
        names = [f"a{number:03}" for number in range(128)]
        prefers = [{"weight": 1, "preference": {"matchExpressions": [{"key": "example.com/team", "operator": "In", "values": [name]}]}} for name in names]
        starving = workloads.workload(space, "starving", 3, 100, 64, affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": prefers}})
        invalid = [{"weight": 1, "preference": {"matchExpressions": [{"key": "example.com/team", "operator": "In", "values": ["!not a label value"]}]}}]
        poison = workloads.workload(space, "poison", 3, 100, 64, affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": invalid}})
        impossible = workloads.workload(space, "impossible", 3, 1_000_000, 64)
        return [*sets, huge, starving, poison, impossible]

    def test_a_hostile_tenant_neither_stops_nor_causes_purchases(self, service, observed):
        service.plane.apply(workloads.namespace("hostile"), workloads.namespace("honest"))
        service.plane.apply(*self.hostile("hostile"))
        service.wait(lambda: sum(1 for pod in service.mirror.pods("hostile") if bound_to(pod)) >= 3, 60, "hostile pods that fit are bound", lambda: service.mirror.summary("hostile"))
        nodes = len(service.claims())
        service.plane.apply(workloads.workload("honest", "web", 20, 1000, 2048, nodeSelector={"example.com/team": "payments"}))
        service.wait(lambda: service.mirror.all_bound(20, "honest"), 90, "honest pods bound", lambda: service.mirror.summary("honest"))
        bought = len(service.claims())
        observed.observe(30 if WHOLE else 8)  # how long purchases are watched, not a wait for something
        after = service.names()
        print(f"\nNodeClaims: {nodes} for the hostile tenant, {bought - nodes} for the honest tenant, {len(after)} later", flush=True)
        assert len(after) <= bought, "purchases go on although every pod that can be placed is bound"
