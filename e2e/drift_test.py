"""Drift and expiration on a real control plane: nodes that no longer match their NodePool (simulated EC2) or their EC2NodeClass (moto) are
replaced, within the budgets and only after their pods have another place; nodes past their maximum age are deleted.
"""

import time

import pytest

import aws
import kube
import messages
import services
import workloads
from kube import being_disrupted, bound_to, key, uses_up_budget
from services import one_per_node, small_pool

WAVE = "wave"
SPACE, NODES, EC2_NODES = "drift", 3, 2
POOL = "drift"


def up(service):
    return service.mirror.all_bound(NODES, SPACE) and service.mirror.settled()


def change(service, spec):
    service.api.patch("NodePool", POOL, {"spec": spec})


def set_wave(service, wave):
    change(service, {"template": {"metadata": {"labels": {WAVE: wave}}}})


def waves(service):
    return [claim["metadata"]["labels"].get(WAVE) for claim in service.claims(POOL)]


def disrupted(service, reason):
    """The number of NodeClaims that were disrupted for a reason."""
    return service.stowage.metric("stowage_nodeclaims_disrupted_total", f'reason="{reason}"')


def state(service):
    return f"waves {waves(service)}, drifted {service.drift_reasons(POOL)}; {service.mirror.summary(SPACE)}"


class TestDrift:
    """Three nodes with one pod each: the pods have anti-affinity."""

    @staticmethod
    def environment(request):
        pool = workloads.node_pool(POOL, consolidate_after="Never", budget="1", labels={"team": "drift", WAVE: "1"})
        server = workloads.workload(SPACE, "server", NODES, 500, 512, nodeSelector={"team": "drift"}, **workloads.host_alone("server"))
        return services.simulated(request.getfixturevalue("service_plane"), "nominate", workloads.namespace(SPACE), pool, server)

    def test_1_a_changed_template_replaces_every_node_within_the_budget(self, service):
        service.wait(lambda: up(service), 60, "pods bound, one on each node", lambda: state(service))
        before = service.names(POOL)
        assert len(before) == NODES
        nodes = {claim["status"]["nodeName"]: key(claim) for claim in service.claims(POOL)}
        ran_on = {nodes[bound_to(pod)]: [key(pod)] for pod in service.mirror.pods(SPACE)}
        with service.mirror.sampling(lambda: sum(uses_up_budget(claim) for claim in service.claims(POOL))) as samples:
            set_wave(service, "2")
            done = lambda: waves(service) == ["2"] * NODES and up(service)
            service.wait(done, 180, "every node replaced", lambda: state(service))
        assert set(before) & set(service.names(POOL)) == set()
        assert max(samples) == 1, "the budget allows one at a time"
        early = [pod for claim, pods in ran_on.items() for pod in service.mirror.record.without_successor(claim, pods)]
        assert early == [], "drained before the replacement was ready"
        assert disrupted(service, "drifted") == NODES
        service.assert_nothing_leaked()
        service.assert_no_errors()

    def test_2_a_change_that_is_reverted_before_the_budget_allows_it_replaces_nothing(self, service):
        before = service.names(POOL)
        change(service, {"disruption": {"budgets": [{"nodes": "0"}]}})
        set_wave(service, "3")
        service.wait(lambda: service.drift_reasons(POOL) == ["NodePoolDrifted"] * NODES, 60, "all drifted", lambda: state(service))
        set_wave(service, "2")
        service.wait(lambda: not service.drift_reasons(POOL), 60, "none drifted", lambda: state(service))
        change(service, {"disruption": {"budgets": [{"nodes": "1"}]}})
        assert service.names(POOL) == before

    def test_3_nodes_that_no_longer_meet_the_requirements_are_replaced(self, service):
        requirements = service.api.get("NodePool", POOL)["spec"]["template"]["spec"]["requirements"]
        arch = {claim["metadata"]["labels"][workloads.ARCH] for claim in service.claims(POOL)}.pop()
        other = {"arm64": "amd64", "amd64": "arm64"}[arch]
        changed = [{**entry, "values": [other]} if entry["key"] == workloads.ARCH else entry for entry in requirements]
        change(service, {"template": {"spec": {"requirements": changed}}})
        service.wait(lambda: "RequirementsDrifted" in service.drift_reasons(POOL), 60, "drifted by its requirements", lambda: state(service))
        archs = lambda: [claim["metadata"]["labels"].get(workloads.ARCH) for claim in service.claims(POOL)]
        service.wait(lambda: archs() == [other] * NODES and up(service), 180, "every node of the other architecture", lambda: state(service))
        service.assert_no_errors()

    def test_4_an_expired_claim_is_replaced(self, service):
        pool = workloads.node_pool("old", consolidate_after="Never", budget="0", labels={"team": "old"})
        pool["spec"]["template"]["spec"]["expireAfter"] = "40s"
        server = workloads.workload("old", "server", 1, 500, 512, nodeSelector={"team": "old"})
        service.plane.apply(workloads.namespace("old"), pool, server)
        service.wait(lambda: service.mirror.all_bound(1, "old") and len(service.names("old")) == 1, 60, "its pod bound")
        first = service.names("old")[0]
        named = lambda: service.claims("old")[0].get("status", {}).get("nodeName")
        service.wait(named, 30, "the node's name on the claim", lambda: service.claims("old"))
        node = named()
        stays = lambda name: [event["note"] for event in service.plane.events(name, "Unconsolidatable")]
        reported = lambda: all(any("consolidation is disabled" in note for note in stays(name)) for name in (first, node))
        service.wait(reported, 30, "the reason why the node stays, on Node and NodeClaim", lambda: stays(first) + stays(node))
        budget = lambda: [event["note"] for event in service.plane.events("old", "DisruptionBlocked")]
        service.wait(lambda: any("reason Underutilized" in note for note in budget()), 30, "the budget on the NodePool", budget)
        replaced = lambda: first not in service.names("old") and service.mirror.all_bound(1, "old")
        service.wait(replaced, 120, "the expired node deleted and its pod bound elsewhere", lambda: service.mirror.summary("old"))
        assert disrupted(service, "expired") >= 1
        service.api.delete("NodePool", "old")
        service.assert_no_errors()

    def test_5_a_node_whose_pod_a_disruption_budget_blocks_is_left_alone_and_nothing_is_bought(self, service):
        space, selector = "kept", {"nodeSelector": {"team": "kept"}}
        pool = workloads.node_pool(space, consolidate_after="0s", labels={"team": "kept", WAVE: "1"})
        budget = workloads.disruption_budget(space, "server", min_available=1)
        service.plane.apply(workloads.namespace(space), pool, budget, workloads.workload(space, "server", 1, 500, 512, **selector))
        service.wait(lambda: service.mirror.all_bound(1, space) and len(service.names(space)) == 1, 60, "its pod bound")
        kept, bought = service.names(space)[0], service.mirror.record.claims_created
        notes = lambda: [event["note"] for event in service.plane.events(kept, "DisruptionBlocked")]
        blocked = lambda what: any(note.startswith(what) and "pdb prevents pod evictions" in note for note in notes())
        service.wait(lambda: blocked("node stays"), 60, "consolidation blocked", notes)
        service.api.patch("NodePool", space, {"spec": {"template": {"metadata": {"labels": {WAVE: "2"}}}}})
        service.wait(lambda: blocked("drifted"), 60, "the replacement of the drifted node blocked", notes)
        assert service.names(space) == [kept] and not any(being_disrupted(claim) for claim in service.claims(space))
        # A drain that the budget blocks buys nothing either.
        node = service.claims(space)[0]["status"]["nodeName"]
        service.api.delete("NodeClaim", kept)
        drains = lambda: [event["note"] for name in (node, kept) for event in service.plane.events(name, "FailedDraining")]
        service.wait(lambda: len(drains()) >= 2, 60, "the drain reported on Node and NodeClaim", drains)
        protected = f"is protected by the PodDisruptionBudget {space}/server"
        assert all(note.startswith("1 pod keeps the node: ") and note.endswith(protected) for note in drains()), drains()
        drained = lambda: kube.condition(service.claims(space)[0], "Drained")
        service.wait(lambda: drained().get("reason") == "Draining", 20, "the condition Drained", drained)
        assert drained()["status"] == "Unknown" and protected in drained()["message"]
        leaving = lambda: service.stowage.metric("stowage_nodes_leaving", 'reason="deleted"')
        service.poll(lambda: leaving() == 1, 20, "the gauge of leaving nodes", leaving)
        began = [line for line in service.stowage.lines(messages.DRAINING) if line["NodeClaim"]["name"] == kept]
        assert len(began) == 1 and (began[0]["Node"]["name"], began[0]["NodePool"]["name"]) == (node, space)
        time.sleep(10)
        assert service.mirror.record.claims_created == bought, "a node was bought for a pod that stays"
        service.api.delete("PodDisruptionBudget", "server", space)
        replaced = lambda: kept not in service.names(space) and service.mirror.all_bound(1, space)
        service.wait(replaced, 120, "the node replaced without the budget", lambda: service.mirror.summary(space))
        service.api.delete("NodePool", space)
        service.assert_no_errors()


class TestDriftOnEc2:
    """Changes of a node class in moto: two nodes with one pod each."""

    @staticmethod
    def environment(request):
        pool = small_pool(POOL, "on-demand")
        pool["spec"]["disruption"] |= {"consolidateAfter": "Never", "budgets": [{"nodes": "1"}]}
        return services.ec2(request.getfixturevalue("service_plane"), [pool])

    @pytest.fixture
    def replacement(self, service):
        """Changes the spec of the class, and waits until every node drifted for the reason and was replaced by one that did not drift."""

        def check(spec, reason):
            before = set(service.names())
            service.api.patch("EC2NodeClass", "default", {"spec": spec})
            reasons = set()

            def done():
                reasons.update(service.drift_reasons())
                replaced = not (before & set(service.names())) and not service.drift_reasons()
                return replaced and service.mirror.all_bound(EC2_NODES, SPACE) and service.mirror.settled()

            last = lambda: f"drifted {service.drift_reasons()}; {service.mirror.summary(SPACE)}"
            service.wait(done, 240, f"every node replaced for {reason}", last)
            assert reasons == {reason}
            service.assert_nothing_leaked()
            service.assert_no_errors()

        return check

    def test_1_a_field_of_the_class(self, service, replacement):
        service.plane.apply(*one_per_node(SPACE, EC2_NODES, POOL))
        service.wait_bound(SPACE, EC2_NODES, 90)
        assert service.drift_reasons() == []
        replacement({"detailedMonitoring": True}, "NodeClassDrift")

    def test_2_an_image(self, service, replacement):
        used = {claim["status"]["imageID"] for claim in service.claims()}
        images = service.aws.all_of("describe_images", "Images", Filters=aws.filters(architecture="x86_64", root_device_type="ebs"))
        other = next(image["ImageId"] for image in images if image["ImageId"] not in used)
        replacement({"amiFamily": "AL2023", "amiSelectorTerms": [{"id": other}]}, "AMIDrift")
        assert {claim["status"]["imageID"] for claim in service.claims()} == {other}

    def test_3_a_subnet(self, service, replacement):
        zones = {claim["metadata"]["labels"][workloads.ZONE] for claim in service.claims()}
        zone = next(zone for zone in sorted(service.account.subnets) if zone not in zones)
        replacement({"subnetSelectorTerms": [{"id": service.account.subnets[zone]}]}, "SubnetDrift")
        assert {claim["metadata"]["labels"][workloads.ZONE] for claim in service.claims()} == {zone}
