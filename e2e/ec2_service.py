"""Stowage on EC2's wire protocol: what the tests of it share. The service runs with `--cloud ec2` against moto, on a real control plane
whose kubelets boot moto's instances. Each class starts one of everything and runs its tests in the order of their names. The service's
calls pass the proxy of faults.py, which counts them and honours client tokens, as moto does not; the tests' own and the kubelets' go to
moto.
"""

import base64
import datetime
import json
import os
import pathlib
import sys
import time
import unittest

import aws
import faults
import harness
import kubelet
import observe
import workloads
from observe import holds

CLUSTER = "demo"
POOL, NODE_CLASS, CLAIM = "karpenter.sh/nodepool", "karpenter.k8s.aws/ec2nodeclass", "karpenter.sh/nodeclaim"
CLUSTER_NAME = "eks:eks-cluster-name"
# moto gives spot instances the VPC's default security group, so that they do drift from their class.
UNDRIFTED = {"nodes": "0", "reasons": ["Drifted"]}
TYPE = "m5.large"  # moto's spot prices are all alike, so what is to be small is said
FIGURES = os.environ.get("STOWAGE_EC2_FIGURES")  # a JSON file of figures, for the benchmark's table


class Service(unittest.TestCase):
    """A control plane, moto, kubelets, and Stowage in between."""

    settings = {}  # of Stowage, besides those that every test needs

    @classmethod
    def setUpClass(cls):
        cls.plane = cls.enterClassContext(harness.ControlPlane())
        cls.moto = cls.enterClassContext(aws.Moto())
        cls.account = cls.moto.account(CLUSTER)
        cls.proxy = cls.enterClassContext(faults.Proxy(cls.moto.endpoint))
        cls.kubelets = cls.enterClassContext(harness.Kubelets(cls.plane, cls.moto.endpoint, cluster=CLUSTER))
        environment = {**cls.moto.env(), "AWS_ENDPOINT_URL": cls.proxy.endpoint, "CLUSTER_ENDPOINT": cls.plane.state["api"], "INTERRUPTION_QUEUE": CLUSTER, **cls.settings}
        stowage = harness.Stowage(cls.plane, "nominate", env=environment, cloud="ec2", clusterName=CLUSTER)
        cls.stowage = cls.enterClassContext(stowage)
        cls.mirror = cls.enterClassContext(observe.Mirror(cls.plane.api))
        cls.plane.apply(*cls.classes(), *cls.pools())
        begin = time.monotonic()
        for pool in cls.pools():
            name = pool["metadata"]["name"]
            ready = lambda name=name: cls.stowage.alive() and holds(cls.plane.api.find(f"{observe.POOLS}/{name}") or {}, "Ready")
            harness.wait_until(ready, 240, f"NodePool {name} ready", lambda name=name: cls.why(name))
        cls.ready_seconds = time.monotonic() - begin

    @classmethod
    def classes(cls):
        """The node classes of the tests."""
        return [node_class()]

    @classmethod
    def pools(cls):
        """The NodePools of the tests."""
        raise NotImplementedError

    @classmethod
    def why(cls, name):
        """What keeps a pool from being ready."""
        paths = (f"{observe.POOLS}/{name}", *(f"{observe.CLASSES}/{made['metadata']['name']}" for made in cls.classes()))
        conditions = {path: (cls.plane.api.find(path) or {}).get("status", {}).get("conditions") for path in paths}
        return f"{json.dumps(conditions)}\nthe end of stowage's log:\n{cls.stowage.tail(30)}"

    def run(self, result=None):
        before = len(result.failures) + len(result.errors)
        super().run(result)
        if len(result.failures) + len(result.errors) > before and hasattr(self, "stowage"):
            print(f"\nthe end of stowage's log in {self.id()}:\n{self.stowage.tail(30)}", file=sys.stderr)
            print(f"\nthe end of the kubelets' log:\n{self.kubelets.log.read_text()[-1500:]}", file=sys.stderr)
        return result

    def wait(self, predicate, timeout, what, last=None):
        return self.mirror.wait(lambda: self.stowage.alive() and predicate(), timeout, what, last)

    def instances(self, cluster=CLUSTER):
        """The cluster's instances that run, by id."""
        filters = [{"Name": "instance-state-name", "Value": ["pending", "running"]}, {"Name": f"tag:{CLUSTER_NAME}", "Value": [cluster]}]
        pages = self.moto.aws.ec2_pages("DescribeInstances", "reservationSet", Filter=filters, MaxResults=1000)
        return {instance["instanceId"]: instance for reservation in pages for instance in reservation["instancesSet"]}

    def claims(self, pool=None):
        return [claim for claim in self.mirror.claims() if pool in (None, claim["metadata"]["labels"].get(POOL))]

    @staticmethod
    def instance_of(item):
        """The instance id of a NodeClaim or Node."""
        return (item.get("status", {}).get("providerID") or item["spec"].get("providerID", "")).rpartition("/")[2]

    def fleets(self, since):
        """The calls of CreateFleet since a time that asked for instances, with their delay after the plan that wanted them: (call, seconds)."""
        stamp = lambda line: datetime.datetime.fromisoformat(line["timestamp"]).timestamp()
        plans = [stamp(line) for line in self.stowage.lines("planned") if line["nodes"]]
        calls = [call for call in self.proxy.seen("CreateFleet", since) if call.form.get("DryRun") != "true"]
        return [(call, call.at - max(plan for plan in plans if plan <= call.at)) for call in calls]

    def steps(self, since):
        """Where the time of each plan of one node went since a time, in milliseconds: a dictionary for each. `own` is all but the API server's
        answer to the NodeClaim, up to the moment before the SDK is called; `sent` from there to the proxy."""
        stamp = lambda line: datetime.datetime.fromisoformat(line["timestamp"]).timestamp() * 1000
        lines = [line for line in self.stowage.lines() if stamp(line) >= since * 1000]
        fleets = {call.form["ClientToken"]: call.at * 1000 for call, _ in self.fleets(since)}
        found, plan, written = [], None, None
        for line in lines:
            match line.get("message"):
                case "planned" if line["nodes"]:
                    plan, written = (line if line["nodes"] == 1 else None), None
                case "node claims written" if plan:
                    written = line
                case "asking EC2 for a fleet" if plan and written:
                    api, begun, wrote, asked = written["api_us"] / 1000, stamp(plan), stamp(written), stamp(line)
                    step = {"plan to API server": wrote - begun - api, "API server": api, "written to request": asked - wrote}
                    own = asked - begun - api
                    sent = fleets[line["token"]] - asked
                    found.append({**step, "of that prepared": line["prepared_us"] / 1000, "sent": sent, "own": own, "whole": asked + sent - begun})
                    plan = None
        return found

    def templates(self, tag, value):
        """The cluster's launch templates with this tag. (Those that validation made for its dry runs belong to no pool.)"""
        filters = [{"Name": f"tag:{name}", "Value": [text]} for name, text in ((CLUSTER_NAME, CLUSTER), (tag, value))]
        return self.moto.aws.ec2("DescribeLaunchTemplates", Filter=filters, MaxResults=200)["launchTemplates"] or []

    def data_of(self, template):
        """What a launch template says."""
        which = {"LaunchTemplateId": template["launchTemplateId"], "LaunchTemplateVersion": ["$Latest"]}
        return self.moto.aws.ec2("DescribeLaunchTemplateVersions", **which)["launchTemplateVersionSet"][0]["launchTemplateData"]

    def user_data(self, id):
        """An instance's user data, in base64."""
        return self.moto.aws.ec2("DescribeInstanceAttribute", InstanceId=id, Attribute="userData")["userData"]["value"]

    def parser(self):
        """A parser of Kubernetes-like objects in YAML."""
        return kubelet.yaml_by(self.plane.bin / "kubectl", self.plane.dir)

    def is_authority(self, text):
        """Whether a text in base64 is the cluster's CA."""
        return base64.b64decode(text).strip() == (self.plane.dir / "pki" / "ca.crt").read_bytes().strip()

    def nothing_is_leaked(self):
        """Instances, NodeClaims and Nodes are as many, and belong together."""

        def same():
            claims, nodes = ({self.instance_of(item) for item in items} for items in (self.claims(), self.mirror.nodes()))
            return self.mirror.settled() and set(self.instances()) == claims == nodes

        counts = lambda: f"{len(self.instances())} instances; {self.mirror.summary()}"
        harness.wait_until(lambda: self.stowage.alive() and same(), 45, "as many instances as NodeClaims and Nodes", counts, every=0.5)

    def bound(self, space, replicas, timeout):
        """Waits until a workload's pods are bound and all nodes are initialized."""
        done = lambda: self.mirror.all_bound(replicas, space) and self.mirror.settled()
        self.wait(done, timeout, f"{replicas} pods of {space} bound, all nodes initialized", lambda: self.mirror.summary(space))

    def planned(self, node):
        """What the NodeClaim of a node says it can give to pods."""
        claim = next(claim for claim in self.claims() if self.instance_of(claim) == self.instance_of(node))
        return {name: kubelet.quantity(claim["status"]["allocatable"][name]) for name in ("cpu", "memory", "pods", "ephemeral-storage")}

    def as_planned(self, node):
        """A node reports what its NodeClaim says."""
        registered = {name: kubelet.quantity(text) for name, text in node["status"]["allocatable"].items()}
        for name, amount in self.planned(node).items():
            self.assertAlmostEqual(registered[name], amount, places=3, msg=f"{name} of {node['metadata']['labels'][observe.INSTANCE_TYPE]}")

    def no_errors(self):
        self.assertEqual([line for line in self.stowage.lines() if line.get("level") == "ERROR"], [])


def note(**figures):
    """Adds figures to the benchmark's file, if there is to be one."""
    if FIGURES:
        file = pathlib.Path(FIGURES)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | figures, indent=2) + "\n")


def node_class(name="default"):
    """As a user writes it: the newest image by alias, a role, discovery by tags."""
    made = workloads.node_class(name)
    made["spec"] |= {"role": f"KarpenterNodeRole-{CLUSTER}", "tags": {"team": "stowage"}}
    return made


def small(name, capacity_type, class_name="default"):
    """A NodePool of one small type, for pods that ask for it."""
    kind = workloads.requirement(observe.INSTANCE_TYPE, TYPE)
    return workloads.node_pool(name, labels={"team": name}, capacity_types=[capacity_type], extra=[kind], class_name=class_name)


def one_a_node(space, replicas, pool):
    """A namespace and a workload of which one pod fits on a node of a small pool."""
    return workloads.namespace(space), workloads.workload(space, "server", replicas, 1200, 512, nodeSelector={"team": pool})
