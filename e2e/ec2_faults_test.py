#!/usr/bin/env python3
"""What goes wrong in EC2, and what becomes of pods that wait meanwhile: each test breaks moto's answers by the proxy of faults.py, and
tells how long the pods had to wait. In the end each has its place, and there is an instance for each node and none besides.
"""

import contextlib
import json
import time
import unittest

import aws
import faults
import harness
import observe
import workloads
from ec2_service import CLAIM, CLUSTER, Service, node_class, one_a_node
from observe import condition, holds, key

TEAMS = {
    "plain": ["m5.large"],
    "scarce": ["m5a.large", "m6a.large", "m7a.large"],
    "partial": ["m6i.large", "m7i.large"],
    "crowded": ["c5.large", "c6i.large"],
    "pinned": ["m5.large"],
}
SPARE = "m5n.large"  # what is left when everything cheaper is out of capacity
ZONE = aws.ZONES[0]


def pool(name, types, class_name="default", team=None, weight=None):
    """A NodePool of a few types for pods that ask for its team; whose nodes stay."""
    kinds = workloads.requirement(observe.INSTANCE_TYPE, *types)
    made = workloads.node_pool(name, labels={"team": team or name}, capacity_types=["on-demand"], extra=[kinds], class_name=class_name)
    made["spec"]["disruption"]["budgets"] = [{"nodes": "0"}]
    if weight:
        made["spec"]["weight"] = weight
    return made


class Faults(Service):
    """Each test: a Deployment is applied while something is broken."""

    @classmethod
    def classes(cls):
        own = node_class("own")
        own["spec"] |= {"amiFamily": "AL2023", "amiSelectorTerms": [{"tags": {"karpenter.sh/discovery": CLUSTER}}]}
        return [node_class(), own]

    @classmethod
    def pools(cls):
        pools = [pool(name, types, "own" if name == "pinned" else "default") for name, types in TEAMS.items()]
        return [*pools, pool("spare", [SPARE], team="scarce")]

    @contextlib.contextmanager
    def recovery(self, space, team, replicas, *broken, timeout=120, lasts=None):
        """Applies a workload of one pod a node while these faults are there, for `lasts` seconds or until the end of the block; the pods
        must then find their places in time."""
        at, begin = time.time(), time.monotonic()
        already = set(self.instances())
        with self.proxy.fault(*broken):
            self.plane.apply(*one_a_node(space, replicas, team))
            if lasts:
                time.sleep(lasts)
            yield already
            if not lasts:
                self.bound(space, replicas, timeout)
        self.bound(space, replicas, timeout)
        took = time.monotonic() - begin
        after = f", {took - lasts:.1f} s after the fault was over" if lasts else ""
        fleets = [(call.count, call.status) for call, _ in self.fleets(at)]
        print(f"\n{self._testMethodName}: {replicas} pods bound after {took:.1f} s{after}; fleets (instances, status): {fleets}", flush=True)
        self.nothing_is_leaked()
        self.assertEqual(len(set(self.instances()) - already), replicas, "an instance for each pod")
        launched = [id for id, when in self.proxy.launched.items() if when >= at]
        self.assertEqual(len(launched), replicas, "launched more than was needed, though it is gone by now")
        self.assertEqual(self.mirror.record.twice, [], "room was bought twice for a pod")

    def test_throttling_of_four_calls_in_five(self):
        with self.recovery("throttled", "plain", 8, faults.throttle(0.8), timeout=300):
            pass

    def test_errors_of_the_service(self):
        writes = ["CreateFleet", "CreateLaunchTemplate", "DescribeLaunchTemplates", "DescribeInstances", "CreateTags"]
        with self.recovery("errors", "plain", 5, faults.broken(writes, 0.7), timeout=180):
            pass

    def test_a_call_without_an_answer(self):
        with self.recovery("silent", "plain", 3, faults.times(1, "CreateFleet", faults.silent), timeout=150):
            pass

    def test_an_answer_that_is_lost_launches_nothing_twice(self):
        with self.recovery("lost", "plain", 5, faults.times(3, "CreateFleet", faults.lost), timeout=120):
            pass

    def test_a_crash_between_the_launch_and_its_answer_launches_nothing_twice(self):
        def crash(call, forward):
            forward(call)
            self.stowage.kill()
            return faults.DROP

        with self.recovery("crashed", "plain", 5, faults.times(1, "CreateFleet", crash), timeout=150):
            harness.wait_until(lambda: self.stowage.process.poll() is not None, 60, "the crash")
            self.stowage.start()

    def test_every_offering_of_the_plan_out_of_capacity(self):
        kinds = TEAMS["scarce"]
        none = faults.short_of("InsufficientInstanceCapacity", "We have none.", lambda kind, *_: kind in kinds)
        with self.recovery("scarce", "scarce", 4, none):
            pass
        found = {instance["instanceType"] for instance in self.instances().values()}
        self.assertIn(SPARE, found)

    def test_a_fleet_that_is_launched_in_part(self):
        with self.recovery("partial", "partial", 6, faults.at_most(2)):
            pass

    def test_a_subnet_out_of_addresses(self):
        full = self.account.subnets[ZONE]
        none = faults.short_of("InsufficientFreeAddressesInSubnet", "Not enough free addresses.", lambda _kind, _zone, subnet, _image: subnet == full)
        with self.recovery("crowded", "crowded", 4, none) as already:
            pass
        new = [instance for id, instance in self.instances().items() if id not in already]
        self.assertNotIn(full, {instance["subnetId"] for instance in new})

    def test_a_launch_template_deleted_behind_our_back(self):
        with self.recovery("before", "plain", 1):
            pass
        filters = [{"Name": "tag:eks:eks-cluster-name", "Value": [CLUSTER]}]
        found = self.moto.aws.ec2("DescribeLaunchTemplates", Filter=filters, MaxResults=200)["launchTemplates"]
        for template in found:
            self.moto.aws.ec2("DeleteLaunchTemplate", LaunchTemplateId=template["launchTemplateId"])
        with self.recovery("after", "plain", 2):
            pass

    def test_an_image_that_is_gone_is_told_and_its_return_heals(self):
        hidden = {id for name, id in self.moto.image_ids.items() if name.startswith("own-")}
        ready = lambda: holds(self.plane.api.find(f"{observe.CLASSES}/own") or {}, "Ready")
        with self.proxy.fault(faults.without_images(hidden)):
            begin = time.monotonic()
            self.plane.apply(*one_a_node("imageless", 2, "pinned"))
            harness.wait_until(lambda: self.stowage.alive() and not ready(), 120, "the class told not to be ready", every=0.5)
            told = condition(self.plane.api.get(f"{observe.CLASSES}/own"), "AMIsReady")
            print(f"\nthe class says so after {time.monotonic() - begin:.1f} s: {told['reason']}: {told['message']}", flush=True)
            self.assertEqual((told["status"], told["reason"]), ("False", "AMINotFound"))
        begin = time.monotonic()
        self.bound("imageless", 2, 150)
        print(f"{self._testMethodName}: 2 pods bound {time.monotonic() - begin:.1f} s after the image was back", flush=True)
        self.nothing_is_leaked()

    def test_descriptions_that_lag_for_thirty_seconds(self):
        with self.proxy.fault(faults.eventual(self.proxy, 30)):
            with self.recovery("lagging", "plain", 5) as already:
                pass
            # One that goes before it shows must not be let go of.
            victim = next(claim for claim in self.claims("plain") if self.instance_of(claim) not in already)
            self.plane.api.delete(f"{observe.CLAIMS}/{key(victim)}")
            self.wait(lambda: key(victim) not in {key(claim) for claim in self.mirror.claims()}, 90, f"{key(victim)} gone")
            self.assertNotIn(self.instance_of(victim), self.instances())
            self.bound("lagging", 5, 60)
            self.nothing_is_leaked()
            mine = [claim for claim in self.claims("plain") if self.instance_of(claim) not in already]
            wanted = {self.instance_of(claim): key(claim) for claim in mine}
            told = lambda: {id: aws.tags_of(item).get(CLAIM) for id, item in self.instances().items() if id in wanted}
            harness.wait_until(lambda: told() == wanted, 90, "instances tagged with their claims", told, every=0.5)

    def tearDown(self):
        self.assertEqual([json.dumps(line) for line in self.stowage.lines() if line.get("level") == "ERROR"], [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
