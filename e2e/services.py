"""Running services for the end-to-end tests: Stowage in a control plane, with a mirror of its cluster and the checks that suites share.

`simulated` runs it with simulated EC2. `ec2` runs it with `--cloud ec2` against moto, with kubelets that boot moto's instances. The
service's requests pass the proxy of faults.py, which records them and honors client tokens, as moto does not; those of the tests and of
the kubelets go to moto directly.
"""

import base64
import contextlib
import datetime
import json
import os
import pathlib
import time

import pytest

import aws
import faults
import harness
import kube
import kubelet
import messages
import observe
import workloads
from kube import is_true, key, pool_of
from waiting import wait_until

CLUSTER = "demo"
NODE_CLASS, CLAIM = "karpenter.k8s.aws/ec2nodeclass", "karpenter.sh/nodeclaim"
CLUSTER_NAME = "eks:eks-cluster-name"
# moto gives spot instances the VPC's default security group, so that they always drift from their class.
NO_DRIFT = {"nodes": "0", "reasons": ["Drifted"]}
TYPE = "m5.large"  # moto has equal spot prices for all types, so pools for small pods name a small type
FIGURES = os.environ.get("STOWAGE_EC2_FIGURES")  # a JSON file of figures, for the tables of the benchmark


class Service:
    """Stowage in a control plane, and a mirror of the cluster."""

    def __init__(self, plane, stowage, mirror):
        self.plane, self.api, self.stowage, self.mirror = plane, plane.api, stowage, mirror

    def logs(self):
        """Ends of logs, by name, for the report of a failed test."""
        ends = {f"end of the log of {name}, which ended or is not healthy": text for name, text in self.plane.problems().items()}
        return {"warnings of stowage": self.stowage.warnings(), "end of stowage's log": self.stowage.tail(30), **ends}

    def wait(self, predicate, timeout, what, last=None):
        """Waits for a condition of the mirror, while the service runs."""
        return self.mirror.wait(lambda: self.stowage.alive() and predicate(), timeout, what, last)

    def poll(self, predicate, timeout, what, last=None, every=0.5):
        """Waits for a condition that the mirror does not have, while the service runs."""
        return wait_until(lambda: self.stowage.alive() and predicate(), timeout, what, last, every)

    def wait_pool(self, name, timeout=30):
        """Waits until a NodePool is ready."""
        pool = lambda: self.api.find("NodePool", name) or {}
        self.poll(lambda: is_true(pool(), "Ready"), timeout, f"NodePool {name} ready", pool, every=0.1)

    def wait_bound(self, namespace, replicas, timeout):
        """Waits until the pods of a namespace are bound and all nodes are initialized."""
        done = lambda: self.mirror.all_bound(replicas, namespace) and self.mirror.settled()
        self.wait(done, timeout, f"{replicas} pods of {namespace} bound, all nodes initialized", lambda: self.mirror.summary(namespace))

    def make_not_ready(self, node):
        """Makes the kubelet of a node report that it is not ready."""
        self.api.annotate("Node", node, {kubelet.REPORTS_NOT_READY: "true"})
        ready = lambda: kube.condition(next(item for item in self.mirror.nodes() if key(item) == node), "Ready")
        self.wait(lambda: ready().get("status") != "True", 30, "a node that is not ready", ready)

    def make_unhealthy(self, node):
        """Makes a node look as if it had not been ready for longer than the repair tolerates."""
        self.make_not_ready(node)
        since = (datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(minutes=31)).strftime("%Y-%m-%dT%H:%M:%SZ")
        stuck = {"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "", "lastTransitionTime": since, "lastHeartbeatTime": since}
        self.plane.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "-p", json.dumps({"status": {"conditions": [stuck]}}))

    def claims(self, pool=None):
        """NodeClaims (of a NodePool)."""
        return [claim for claim in self.mirror.claims() if pool in (None, pool_of(claim))]

    def names(self, pool=None):
        return sorted(key(claim) for claim in self.claims(pool))

    def current(self, claim):
        """The current state of a NodeClaim, or None."""
        return next((other for other in self.claims() if key(other) == key(claim)), None)

    def uids(self, namespace):
        return {pod["metadata"]["uid"] for pod in self.mirror.pods(namespace)}

    def drift_reasons(self, pool=None):
        """Reasons of the condition Drifted, one for each drifted NodeClaim."""
        return [kube.condition(claim, "Drifted").get("reason") for claim in self.claims(pool) if is_true(claim, "Drifted")]

    def assert_no_errors(self):
        assert [json.dumps(line) for line in self.stowage.errors()] == []

    def assert_not_doubly_planned(self):
        assert self.mirror.record.doubly_planned == [], "capacity was reserved twice for a pod"


class Simulated(Service):
    """Stowage with simulated EC2."""

    def assert_nothing_leaked(self):
        """Waits until instances, NodeClaims and Nodes correspond one to one."""

        def same():
            instances = {entry["client_token"] for entry in self.stowage.instances().values()}
            claims = {claim["metadata"]["uid"] for claim in self.mirror.claims()}
            return instances == claims and self.mirror.settled()

        counts = lambda: f"{len(self.stowage.instances())} instances; {self.mirror.summary()}"
        self.wait(same, 45, "an instance and a Node for each NodeClaim", counts)


@contextlib.contextmanager
def simulated(plane, placement, *objects):
    """Stowage with simulated EC2, a node class and these objects, in an empty control plane."""
    with harness.Stowage(plane, placement) as stowage, observe.Mirror(plane.api) as mirror:
        service = Simulated(plane, stowage, mirror)
        plane.apply(workloads.node_class(), *objects)
        for item in objects:
            if item["kind"] == "NodePool":
                service.wait_pool(item["metadata"]["name"])
        yield service


class Ec2(Service):
    """Stowage on EC2's wire protocol."""

    def __init__(self, plane, stowage, mirror, moto, account, proxy, kubelets):
        super().__init__(plane, stowage, mirror)
        self.moto, self.aws, self.account, self.proxy, self.kubelets = moto, moto.aws, account, proxy, kubelets

    def logs(self):
        return super().logs() | {"end of the kubelets' log": self.kubelets.log.read_text()[-1500:]}

    def wait_class(self, name, timeout=60):
        """Waits until an EC2NodeClass is ready."""
        found = lambda: self.api.find("EC2NodeClass", name) or {}
        self.poll(lambda: is_true(found(), "Ready"), timeout, f"EC2NodeClass {name} ready", found)

    def instances(self, cluster=CLUSTER):
        """The cluster's pending and running instances, by id."""
        filters = aws.filters(instance_state_name=["pending", "running"]) + aws.tagged(**{CLUSTER_NAME: cluster})
        return {instance["InstanceId"]: instance for instance in self.aws.instances(Filters=filters)}

    @staticmethod
    def instance_of(item):
        """The instance id of a NodeClaim or Node."""
        return (item.get("status", {}).get("providerID") or item["spec"].get("providerID", "")).rpartition("/")[2]

    def fleets(self, since):
        """The CreateFleet calls since a time that launch instances, with their delay after the plan: (call, seconds)."""
        plans = [seconds(line) for line in self.stowage.lines(messages.PLANNED) if line["nodes"]]
        calls = [call for call in self.proxy.seen("CreateFleet", since) if call.form.get("DryRun") != "true"]
        return [(call, call.at - max(plan for plan in plans if plan <= call.at)) for call in calls]

    def steps(self, since):
        """How the time from each plan of one node to its CreateFleet call was spent since a time, in milliseconds: a dictionary per plan.
        `own` is everything but the API server's response to the NodeClaim, up to the SDK call; `sent` is from there to the proxy."""
        lines = [line for line in self.stowage.lines() if seconds(line) >= since]
        fleets = {call.form["ClientToken"]: call.at * 1000 for call, _ in self.fleets(since)}
        found, plan, written = [], None, None
        for line in lines:
            match line.get("message"):
                case messages.PLANNED if line["nodes"]:
                    plan, written = (line if line["nodes"] == 1 else None), None
                case messages.CLAIMS_WRITTEN if plan:
                    written = line
                case messages.FLEET_REQUESTED if plan and written:
                    api, begun, wrote, asked = written["api_us"] / 1000, seconds(plan) * 1000, seconds(written) * 1000, seconds(line) * 1000
                    step = {"plan to API server": wrote - begun - api, "API server": api, "written to request": asked - wrote}
                    sent = fleets[line["token"]] - asked
                    found.append({**step, "of that prepared": line["prepared_us"] / 1000, "sent": sent, "own": asked - begun - api, "whole": asked + sent - begun})
                    plan = None
        return found

    def templates(self, tag, value):
        """The cluster's launch templates with this tag. (Those of dry runs have no NodePool.)"""
        filters = aws.tagged(**{CLUSTER_NAME: CLUSTER, tag: value})
        return list(self.aws.all_of("describe_launch_templates", "LaunchTemplates", Filters=filters))

    def template_data(self, template):
        """The newest data of a launch template."""
        versions = self.aws.ec2.describe_launch_template_versions(LaunchTemplateId=template["LaunchTemplateId"], Versions=["$Latest"])
        return versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]

    def user_data(self, id):
        """An instance's user data, in base64."""
        return self.aws.ec2.describe_instance_attribute(InstanceId=id, Attribute="userData")["UserData"]["Value"]

    def is_cluster_ca(self, text):
        """Whether a text in base64 is the cluster's CA certificate."""
        return base64.b64decode(text).strip() == (self.plane.dir / "pki" / "ca.crt").read_bytes().strip()

    def assert_nothing_leaked(self):
        """Waits until instances, NodeClaims and Nodes correspond one to one."""

        def same():
            claims, nodes = ({self.instance_of(item) for item in items} for items in (self.claims(), self.mirror.nodes()))
            return self.mirror.settled() and set(self.instances()) == claims == nodes

        self.poll(same, 45, "an instance and a Node for each NodeClaim", lambda: f"{len(self.instances())} instances; {self.mirror.summary()}")

    def planned_allocatable(self, node):
        """The allocatable resources that the NodeClaim of a node was planned with."""
        claim = next(claim for claim in self.claims() if self.instance_of(claim) == self.instance_of(node))
        return {name: kubelet.quantity(claim["status"]["allocatable"][name]) for name in ("cpu", "memory", "pods", "ephemeral-storage")}

    def assert_allocatable_as_planned(self, node):
        """A node reports the allocatable resources of its NodeClaim."""
        registered = {name: kubelet.quantity(text) for name, text in node["status"]["allocatable"].items()}
        for name, amount in self.planned_allocatable(node).items():
            assert registered[name] == pytest.approx(amount, abs=0.0005, rel=0), f"{name} of {node['metadata']['labels'][kube.INSTANCE_TYPE]}"


@contextlib.contextmanager
def ec2(plane, pools, classes=None, settings=None, broken_price_list=False, placement="nominate"):
    """Stowage on EC2's wire protocol with these NodePools and node classes, in an empty control plane. `settings` are more variables of
    its environment. `broken_price_list`: moto fails the calls of Pricing."""
    classes = classes or [node_class()]
    with contextlib.ExitStack() as stack:
        moto = stack.enter_context(aws.Moto())
        account = moto.account(CLUSTER)
        proxy = stack.enter_context(faults.Proxy(moto.endpoint))
        if not broken_price_list:
            stack.enter_context(proxy.fault(faults.without_price_list))
        kubelets = stack.enter_context(harness.Kubelets(plane, moto.endpoint, cluster=CLUSTER))
        own = {"AWS_ENDPOINT_URL": proxy.endpoint, "CLUSTER_ENDPOINT": plane.state["api"], "INTERRUPTION_QUEUE": CLUSTER}
        environment = {**moto.env(), **own, **(settings or {})}
        stowage = stack.enter_context(harness.Stowage(plane, placement, env=environment, cloud="ec2", clusterName=CLUSTER))
        mirror = stack.enter_context(observe.Mirror(plane.api))
        service = Ec2(plane, stowage, mirror, moto, account, proxy, kubelets)
        begin = time.monotonic()
        plane.apply(*classes, *pools)
        try:
            for pool in pools:
                service.wait_pool(pool["metadata"]["name"], 240)
        except AssertionError:
            conditions = {key(item): item.get("status", {}).get("conditions") for kind in ("NodePool", "EC2NodeClass") for item in plane.api.list(kind)}
            print(f"{json.dumps(conditions, indent=1)}\nthe end of stowage's log:\n{stowage.tail(30)}", flush=True)
            raise
        service.ready_seconds = time.monotonic() - begin
        yield service


def seconds(line):
    """The time of a log line, in seconds since the epoch."""
    return datetime.datetime.fromisoformat(line["time"]).timestamp()


def record_figures(**figures):
    """Adds figures to the benchmark's file, if there is one."""
    if FIGURES:
        file = pathlib.Path(FIGURES)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | figures, indent=2) + "\n")


def node_class(name="default"):
    """As written by a user: the newest image by alias, a role, discovery by tags."""
    made = workloads.node_class(name)
    made["spec"] |= {"role": f"KarpenterNodeRole-{CLUSTER}", "tags": {"team": "stowage"}}
    return made


def small_pool(name, capacity_type, class_name="default"):
    """A NodePool of one small type, for pods that select it."""
    kind = workloads.requirement(kube.INSTANCE_TYPE, TYPE)
    return workloads.node_pool(name, labels={"team": name}, capacity_types=[capacity_type], extra=[kind], class_name=class_name)


def one_per_node(namespace, replicas, pool):
    """A namespace and a workload of which one pod fits on a node of a small pool."""
    return workloads.namespace(namespace), workloads.workload(namespace, "server", replicas, 1200, 512, nodeSelector={"team": pool})
