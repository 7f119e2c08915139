"""Faults of EC2 and their effect on pending pods: each test breaks moto's answers by the proxy of faults.py, and prints how long the pods
waited. In the end every pod is bound, and instances and nodes correspond one to one.
"""

import contextlib
import time

import pytest

import aws
import faults
import kube
import services
import workloads
from kube import condition, is_true, key
from services import CLAIM, CLUSTER, CLUSTER_NAME, NO_DRIFT, node_class, one_per_node
from waiting import wait_until

TEAMS = {
    "plain": ["m5.large"],
    "scarce": ["m5a.large", "m6a.large", "m7a.large"],
    "partial": ["m6i.large", "m7i.large"],
    "crowded": ["c5.large", "c6i.large"],
    "pinned": ["m5.large"],
}
SPARE = "m5n.large"  # the type that is left when every cheaper one is out of capacity
ZONE = aws.ZONES[0]


def pool(name, types, class_name="default", team=None):
    """A NodePool of a few types for pods that select its team, without disruption."""
    kinds = workloads.requirement(kube.INSTANCE_TYPE, *types)
    made = workloads.node_pool(name, labels={"team": team or name}, capacity_types=["on-demand"], extra=[kinds], class_name=class_name)
    made["spec"]["disruption"]["budgets"] = [{"nodes": "0"}]
    return made


@contextlib.contextmanager
def recovery(service, namespace, team, replicas, *broken, timeout=120):
    """Applies a workload of one pod per node, with these faults until the end of the block; the pods must be bound in time. Yields the
    instances that existed before."""
    at, begin = time.time(), time.monotonic()
    existing = set(service.instances())
    with service.proxy.fault(*broken):
        service.plane.apply(*one_per_node(namespace, replicas, team))
        yield existing
        service.wait_bound(namespace, replicas, timeout)
    service.wait_bound(namespace, replicas, timeout)
    fleets = [(call.count, call.status) for call, _ in service.fleets(at)]
    print(f"\n{namespace}: {replicas} pods bound after {time.monotonic() - begin:.1f} s; fleets (instances, status): {fleets}", flush=True)
    service.assert_nothing_leaked()
    assert len(set(service.instances()) - existing) == replicas, "expected one instance per pod"
    launched = [id for id, when in service.proxy.launched.items() if when >= at]
    assert len(launched) == replicas, "more instances were launched than needed, though they are gone by now"
    service.assert_not_doubly_planned()


@pytest.fixture(autouse=True)
def no_errors(service):
    yield
    service.assert_no_errors()


class TestFaults:
    """A Deployment is applied while something is broken."""

    @staticmethod
    def environment(request):
        own = node_class("own")
        own["spec"] |= {"amiFamily": "AL2023", "amiSelectorTerms": [{"tags": {"karpenter.sh/discovery": CLUSTER}}]}
        pools = [pool(name, types, "own" if name == "pinned" else "default") for name, types in TEAMS.items()]
        pools.append(pool("spare", [SPARE], team="scarce"))
        return services.ec2(request.getfixturevalue("service_plane"), pools, [node_class(), own])

    def test_throttling_of_four_calls_in_five(self, service):
        with recovery(service, "throttled", "plain", 8, faults.throttle(0.8), timeout=300):
            pass

    def test_internal_errors_of_ec2(self, service):
        actions = ["CreateFleet", "CreateLaunchTemplate", "DescribeLaunchTemplates", "DescribeInstances", "CreateTags"]
        with recovery(service, "errors", "plain", 5, faults.broken(actions, 0.7), timeout=180):
            pass

    def test_a_call_without_a_response(self, service):
        with recovery(service, "silent", "plain", 3, faults.times(1, "CreateFleet", faults.silent), timeout=150):
            pass

    def test_a_lost_response_launches_nothing_twice(self, service):
        with recovery(service, "lost", "plain", 5, faults.times(3, "CreateFleet", faults.lost), timeout=120):
            pass

    def test_a_crash_between_the_launch_and_its_response_launches_nothing_twice(self, service):
        def crash(call, forward):
            forward(call)
            service.stowage.kill()
            return faults.DROP

        with recovery(service, "crashed", "plain", 5, faults.times(1, "CreateFleet", crash), timeout=150):
            wait_until(lambda: service.stowage.process.poll() is not None, 60, "the crash")
            service.stowage.start()

    def test_no_capacity_for_any_offering_of_the_plan(self, service):
        kinds = TEAMS["scarce"]
        none = faults.short_of("InsufficientInstanceCapacity", "We have none.", lambda kind, *_: kind in kinds)
        with recovery(service, "scarce", "scarce", 4, none):
            pass
        assert SPARE in {instance["InstanceType"] for instance in service.instances().values()}

    def test_a_fleet_that_launches_in_part(self, service):
        with recovery(service, "partial", "partial", 6, faults.at_most(2)):
            pass

    def test_a_subnet_without_free_addresses(self, service):
        full = service.account.subnets[ZONE]
        none = faults.short_of("InsufficientFreeAddressesInSubnet", "Not enough free addresses.", lambda _kind, _zone, subnet, _image: subnet == full)
        with recovery(service, "crowded", "crowded", 4, none) as existing:
            pass
        new = [instance for id, instance in service.instances().items() if id not in existing]
        assert full not in {instance["SubnetId"] for instance in new}

    def test_an_externally_deleted_launch_template(self, service):
        with recovery(service, "before", "plain", 1):
            pass
        templates = list(service.aws.all_of("describe_launch_templates", "LaunchTemplates", Filters=aws.tagged(**{CLUSTER_NAME: CLUSTER})))
        assert templates
        for template in templates:
            service.aws.ec2.delete_launch_template(LaunchTemplateId=template["LaunchTemplateId"])
        with recovery(service, "after", "plain", 2):
            pass

    def test_a_missing_image_is_reported_and_pods_are_bound_after_its_return(self, service):
        hidden = {id for name, id in service.moto.image_ids.items() if name.startswith("own-")}
        own = lambda: service.api.get("EC2NodeClass", "own")
        with service.proxy.fault(faults.without_images(hidden)):
            begin = time.monotonic()
            service.plane.apply(*one_per_node("imageless", 2, "pinned"))
            service.poll(lambda: not is_true(own(), "Ready"), 120, "the class not ready")
            found = condition(own(), "AMIsReady")
            print(f"\nthe class is not ready after {time.monotonic() - begin:.1f} s: {found['reason']}: {found['message']}", flush=True)
            assert (found["status"], found["reason"]) == ("False", "AMINotFound")
        begin = time.monotonic()
        service.wait_bound("imageless", 2, 150)
        print(f"\nimageless: 2 pods bound {time.monotonic() - begin:.1f} s after the return of the image", flush=True)
        service.assert_nothing_leaked()

    def test_descriptions_that_lag_for_thirty_seconds(self, service):
        with service.proxy.fault(faults.eventual(service.proxy, 30)):
            with recovery(service, "lagging", "plain", 5) as existing:
                pass
            # An instance that is terminated before it is visible must not be forgotten.
            victim = next(claim for claim in service.claims("plain") if service.instance_of(claim) not in existing)
            service.api.delete("NodeClaim", key(victim))
            service.wait(lambda: not service.current(victim), 90, f"{key(victim)} deleted")
            assert service.instance_of(victim) not in service.instances()
            service.wait_bound("lagging", 5, 60)
            service.assert_nothing_leaked()
            new = [claim for claim in service.claims("plain") if service.instance_of(claim) not in existing]
            wanted = {service.instance_of(claim): key(claim) for claim in new}
            tagged = lambda: {id: aws.tags_of(item).get(CLAIM) for id, item in service.instances().items() if id in wanted}
            service.poll(lambda: tagged() == wanted, 90, "instances tagged with their claims", tagged)


class TestPriceOfMoves:
    """Consolidation finds a cheaper node, which EC2 can't deliver."""

    CHEAP, DEAR = "m5.large", "m5.xlarge"

    @classmethod
    def environment(cls, request):
        made = pool("moves", [cls.CHEAP, cls.DEAR])
        made["spec"]["disruption"] |= {"consolidateAfter": "2s", "budgets": [{"nodes": "100%"}, NO_DRIFT]}
        return services.ec2(request.getfixturevalue("service_plane"), [made])

    def test_without_the_cheaper_node_nobody_is_evicted_and_no_other_is_asked_for(self, service):
        space = "moved"
        service.plane.apply(workloads.namespace(space), workloads.workload(space, "server", 3, 1000, 512, nodeSelector={"team": "moves"}))
        service.wait_bound(space, 3, 90)
        assert [instance["InstanceType"] for instance in service.instances().values()] == [self.DEAR]
        none = faults.short_of("InsufficientInstanceCapacity", "We have none.", lambda kind, *_: kind == self.CHEAP)
        at = time.time()
        with service.proxy.fault(none):
            service.api.scale("Deployment", "server", space, 1)
            service.wait(lambda: service.mirror.all_bound(1, space), 60, "two pods ended")
            [claim], pods = service.claims(), service.uids(space)
            canceled = lambda: service.plane.events(key(claim), "DisruptionCanceled")
            events = service.poll(canceled, 90, "the move taken back", service.stowage.tail)
            print(f"\n{events[0]['note']}", flush=True)
        kinds = {kind for call in service.proxy.seen("CreateFleet", at) if call.form.get("DryRun") != "true" for _, kind, *_ in call.overrides()}
        assert kinds == {self.CHEAP}
        assert not [id for id, when in service.proxy.launched.items() if when >= at]
        kept = lambda: service.names() == [key(claim)] and not kube.being_disrupted(service.claims()[0])
        service.wait(lambda: kept() and not any(map(kube.taint_keys, service.mirror.nodes())), 20, "the node as before")
        assert service.uids(space) == pods
