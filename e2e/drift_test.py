#!/usr/bin/env python3
"""Drift and expiration on a real control plane: nodes that are not what their NodePool says any more (with simulated EC2), or what their
EC2NodeClass comes to (with moto), are replaced, within the budgets and only once their pods have another place; nodes that are too old go.
"""

import unittest

import e2e_test
import ec2_service
import observe
import workloads
from observe import bound_to, condition, holds, key, leaving

POOL, WAVE = "karpenter.sh/nodepool", "wave"
SPACE, NODES = "drift", 3


class Drift(e2e_test.Service):
    """Three nodes with a pod each, since the pods avoid each other."""

    placement = "nominate"

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        pool = workloads.node_pool("drift", consolidate_after="Never", budget="1", labels={"team": "drift", WAVE: "1"})
        server = workloads.workload(SPACE, "server", NODES, 500, 512, nodeSelector={"team": "drift"}, **workloads.host_alone("server"))
        cls.plane.apply(workloads.namespace(SPACE), pool, server)
        cls.pool_ready("drift")

    def claims(self, pool="drift"):
        return [claim for claim in self.mirror.claims() if claim["metadata"]["labels"].get(POOL) == pool]

    def names(self, pool="drift"):
        return sorted(key(claim) for claim in self.claims(pool))

    def up(self):
        return self.mirror.all_bound(NODES, SPACE) and self.mirror.settled()

    def change(self, spec, name="drift"):
        self.plane.api.patch(f"{observe.POOLS}/{name}", {"spec": spec})

    def label(self, wave):
        self.change({"template": {"metadata": {"labels": {WAVE: wave}}}})

    def waves(self):
        return [claim["metadata"]["labels"].get(WAVE) for claim in self.claims()]

    def drifted(self):
        return [condition(claim, "Drifted").get("reason") for claim in self.claims() if holds(claim, "Drifted")]

    def disrupted(self, reason):
        """How many claims were taken away for a reason."""
        counted = self.stowage.metrics().items()
        return sum(value for name, value in counted if name.startswith("stowage_nodeclaims_disrupted_total{") and f'reason="{reason}"' in name)

    def tell(self):
        return f"waves {self.waves()}, drifted {self.drifted()}; {self.mirror.summary(SPACE)}"

    def test_1_a_changed_template_replaces_every_node_within_the_budget(self):
        self.wait(self.up, 60, "pods bound, one on each node", self.tell)
        before = self.names()
        self.assertEqual(len(before), NODES)
        homes = {claim["status"]["nodeName"]: key(claim) for claim in self.claims()}
        lived = {homes[bound_to(pod)]: [key(pod)] for pod in self.mirror.pods(SPACE)}
        going = lambda claim: leaving(claim) or "stowage.dev/disrupting" in claim["metadata"].get("annotations", {})
        with self.mirror.watching(lambda: sum(going(claim) for claim in self.claims())) as seen:
            self.label("2")
            done = lambda: self.waves() == ["2"] * NODES and self.up()
            self.wait(done, 180, "every node replaced", self.tell)
        self.assertEqual(set(before) & set(self.names()), set())
        self.assertEqual(max(seen), 1, "the budget allows one at a time")
        homeless = [pod for claim, pods in lived.items() for pod in self.mirror.record.homeless_at_departure(claim, pods)]
        self.assertEqual(homeless, [], "drained before the replacement was ready")
        self.assertEqual(self.disrupted("drifted"), NODES)
        self.nothing_is_leaked()
        self.no_errors()

    def test_2_what_is_undone_before_the_budget_allows_it_replaces_nothing(self):
        before = self.names()
        self.change({"disruption": {"budgets": [{"nodes": "0"}]}})
        self.label("3")
        self.wait(lambda: self.drifted() == ["NodePoolDrifted"] * NODES, 60, "all drifted", self.tell)
        self.label("2")
        self.wait(lambda: not self.drifted(), 60, "none drifted", self.tell)
        self.change({"disruption": {"budgets": [{"nodes": "1"}]}})
        self.assertEqual(self.names(), before)

    def test_3_nodes_that_the_requirements_admit_no_more_are_replaced(self):
        api = self.plane.api
        requirements = api.get(f"{observe.POOLS}/drift")["spec"]["template"]["spec"]["requirements"]
        arch = {claim["metadata"]["labels"][workloads.ARCH] for claim in self.claims()}.pop()
        other = {"arm64": "amd64", "amd64": "arm64"}[arch]
        changed = [{**entry, "values": [other]} if entry["key"] == workloads.ARCH else entry for entry in requirements]
        self.change({"template": {"spec": {"requirements": changed}}})
        self.wait(lambda: "RequirementsDrifted" in self.drifted(), 60, "drifted by its requirements", self.tell)
        archs = lambda: [claim["metadata"]["labels"].get(workloads.ARCH) for claim in self.claims()]
        self.wait(lambda: archs() == [other] * NODES and self.up(), 180, "every node of the other architecture", self.tell)
        self.no_errors()

    def test_4_a_claim_goes_at_its_age(self):
        space = "old"
        pool = workloads.node_pool("old", consolidate_after="Never", budget="0", labels={"team": "old"})
        pool["spec"]["template"]["spec"]["expireAfter"] = "40s"
        server = workloads.workload(space, "server", 1, 500, 512, nodeSelector={"team": "old"})
        self.plane.apply(workloads.namespace(space), pool, server)
        self.wait(lambda: self.mirror.all_bound(1, space) and len(self.names("old")) == 1, 60, "its pod bound")
        first = self.names("old")[0]
        gone = lambda: first not in self.names("old") and self.mirror.all_bound(1, space)
        self.wait(gone, 120, "the old node gone and its pod bound elsewhere", lambda: self.mirror.summary(space))
        self.assertGreaterEqual(self.disrupted("expired"), 1)
        self.plane.kubectl("delete", "nodepool", "old", "--wait=false")
        self.no_errors()


class OnEc2(ec2_service.Service):
    """What a node class comes to, in moto: two nodes with a pod each."""

    NODES = 2

    @classmethod
    def pools(cls):
        pool = ec2_service.small("drift", "on-demand")
        pool["spec"]["disruption"] |= {"consolidateAfter": "Never", "budgets": [{"nodes": "1"}]}
        return [pool]

    def change(self, spec):
        self.plane.api.patch(f"{observe.CLASSES}/default", {"spec": spec})

    def drifted(self):
        return [condition(claim, "Drifted").get("reason") for claim in self.claims() if holds(claim, "Drifted")]

    def replaced(self, reason, before):
        """Waits until all of the nodes drifted for this reason and others, which did not, are there."""
        seen = set()
        tell = lambda: f"drifted {self.drifted()}; {self.mirror.summary(SPACE)}"
        names = lambda: {key(claim) for claim in self.claims()}

        def done():
            seen.update(self.drifted())
            new = not (set(before) & names()) and not self.drifted()
            return new and self.mirror.all_bound(self.NODES, SPACE) and self.mirror.settled()

        self.wait(done, 240, f"every node replaced for {reason}", tell)
        self.assertEqual(seen, {reason})
        self.nothing_is_leaked()
        self.no_errors()

    def test_1_a_field_of_the_class(self):
        self.plane.apply(*ec2_service.one_a_node(SPACE, self.NODES, "drift"))
        self.bound(SPACE, self.NODES, 90)
        self.assertEqual(self.drifted(), [])
        before = [key(claim) for claim in self.claims()]
        self.change({"detailedMonitoring": True})
        self.replaced("NodeClassDrift", before)

    def test_2_an_image(self):
        used = {claim["status"]["imageID"] for claim in self.claims()}
        filters = [{"Name": "architecture", "Value": ["x86_64"]}, {"Name": "root-device-type", "Value": ["ebs"]}]
        images = self.moto.aws.ec2_pages("DescribeImages", "imagesSet", Filter=filters)
        other = next(image["imageId"] for image in images if image["imageId"] not in used)
        before = [key(claim) for claim in self.claims()]
        self.change({"amiFamily": "AL2023", "amiSelectorTerms": [{"id": other}]})
        self.replaced("AMIDrift", before)
        self.assertEqual({claim["status"]["imageID"] for claim in self.claims()}, {other})

    def test_3_a_subnet(self):
        zones = {claim["metadata"]["labels"][workloads.ZONE] for claim in self.claims()}
        zone = next(zone for zone in sorted(self.account.subnets) if zone not in zones)
        before = [key(claim) for claim in self.claims()]
        self.change({"subnetSelectorTerms": [{"id": self.account.subnets[zone]}]})
        self.replaced("SubnetDrift", before)
        self.assertEqual({claim["metadata"]["labels"][workloads.ZONE] for claim in self.claims()}, {zone})


if __name__ == "__main__":
    unittest.main(verbosity=2, failfast=True)
