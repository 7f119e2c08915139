#!/usr/bin/env python3
"""Stowage on EC2's wire protocol: the service with `--cloud ec2` against moto, on a real control plane whose kubelets boot moto's
instances. Each class starts one of everything and runs its tests in the order of their names. The service's calls pass the proxy of
faults.py, which counts them and honours client tokens, as moto does not; the tests' own and the kubelets' go to moto.

They are skipped only while the binary itself says that `--cloud ec2` is not part of it.
"""

import base64
import datetime
import email
import json
import os
import pathlib
import subprocess
import sys
import time
import unittest

import aws
import faults
import harness
import kubelet
import observe
import workloads
from observe import bound_to, holds, key, leaving, tainted

CLUSTER = "demo"
POOL, NODE_CLASS, CLAIM = "karpenter.sh/nodepool", "karpenter.k8s.aws/ec2nodeclass", "karpenter.sh/nodeclaim"
UNREGISTERED = {"key": "karpenter.sh/unregistered", "effect": "NoExecute"}
MANY = 200
# moto gives spot instances the VPC's default security group, so that they do drift from their class.
UNDRIFTED = {"nodes": "0", "reasons": ["Drifted"]}
SINGLES = 30  # plans of one node
TYPE = "m5.large"  # moto's spot prices are all alike, so what is to be small is said
TAINT_SECONDS = 1.0  # from a message in the queue to a closed node
READY_SECONDS = 30  # from the first object to NodePools that are ready, though moto answers some of the optional APIs with errors
# A young instance may belong to a claim that is not written yet; garbage is looked for now and then.
GARBAGE_SECONDS = 150


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
        paths = (f"{observe.POOLS}/{name}", f"{observe.CLASSES}/default")
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
        filters = [{"Name": "instance-state-name", "Value": ["pending", "running"]}, {"Name": "tag:eks:eks-cluster-name", "Value": [cluster]}]
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
    """Adds figures to the JSON file that STOWAGE_EC2_FIGURES names, for the benchmark's table."""
    if file := os.environ.get("STOWAGE_EC2_FIGURES"):
        file = pathlib.Path(file)
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | figures, indent=2) + "\n")


def node_class(name="default"):
    """As a user writes it: the newest image by alias, a role, discovery by tags."""
    made = workloads.node_class(name)
    made["spec"] |= {"role": f"KarpenterNodeRole-{CLUSTER}", "tags": {"team": "stowage"}}
    return made


def small(name, capacity_type):
    """A NodePool of one small type, for pods that ask for it."""
    kind = workloads.requirement("node.kubernetes.io/instance-type", TYPE)
    return workloads.node_pool(name, labels={"team": name}, capacity_types=[capacity_type], extra=[kind])


def one_a_node(space, replicas, pool):
    """A namespace and a workload of which one pod fits on a node of a small pool."""
    return workloads.namespace(space), workloads.workload(space, "server", replicas, 1200, 512, nodeSelector={"team": pool})


class Launches(Service):
    """Nodes come, are what they should be, and go."""

    @classmethod
    def pools(cls):
        pools = [workloads.node_pool(capacity_types=["on-demand"]), small("spot", "spot"), small("many", "on-demand")]
        for pool in pools:
            # Nobody moves pods to the spot pool, which moto gives away, until the last test.
            pool["spec"]["disruption"]["budgets"] = [{"nodes": "0"}]
        return pools

    def test_0_optional_apis_that_fail_do_not_hold_up_the_start(self):
        print(f"\nNodePools ready after {self.ready_seconds:.1f} s", flush=True)
        self.assertLess(self.ready_seconds, READY_SECONDS)

    def test_1_pods_get_nodes_that_are_instances(self):
        # Not of the spot pool, which moto gives away.
        web = workloads.workload("shop", "web", 30, 500, 1024, nodeSelector={POOL: "default"}, **workloads.zone_spread("web"))
        begin = time.monotonic()
        self.plane.apply(workloads.namespace("shop"), web)
        self.bound("shop", 30, 90)
        instances = self.instances()
        print(f"\n30 pods on {len(instances)} instances after {time.monotonic() - begin:.1f} s: ", end="")
        print(", ".join(sorted(f"{item['instanceType']}/{item['placement']['availabilityZone']}" for item in instances.values())), flush=True)
        self.nothing_is_leaked()
        zones = {node["metadata"]["labels"][workloads.ZONE] for node in self.mirror.nodes()}
        self.assertEqual(zones, set(aws.ZONES))
        for claim in self.claims():
            labels, instance = claim["metadata"]["labels"], instances[self.instance_of(claim)]
            self.assertEqual(labels[observe.INSTANCE_TYPE], instance["instanceType"])
            self.assertEqual(labels[observe.ZONE], instance["placement"]["availabilityZone"])
            self.assertEqual(claim["status"]["imageID"], instance["imageId"])
            self.assertIn(instance["subnetId"], self.account.subnets.values())
        self.no_errors()

    def test_2_tags_are_those_that_the_iam_policy_demands(self):
        wanted = {"kubernetes.io/cluster/demo": "owned", POOL: "default", "eks:eks-cluster-name": CLUSTER, NODE_CLASS: "default", "team": "stowage"}
        for thing in [*self.instances().values(), *self.templates()]:
            found = aws.tags_of(thing)
            self.assertEqual({name: found.get(name) for name in wanted}, wanted, thing)
        # Told once the node is registered.
        names = {self.instance_of(claim): (claim["status"]["nodeName"], key(claim)) for claim in self.claims()}
        told = lambda: {id: (tags.get("Name"), tags.get(CLAIM)) for id, item in self.instances().items() for tags in [aws.tags_of(item)]}
        harness.wait_until(lambda: told() == names, 60, "instances named after their nodes", told, every=0.5)

    def templates(self):
        """The launch templates of the default pool. (Those that validation made for its dry runs belong to no pool.)"""
        filters = [{"Name": f"tag:{name}", "Value": [value]} for name, value in (("eks:eks-cluster-name", CLUSTER), (POOL, "default"))]
        found = self.moto.aws.ec2("DescribeLaunchTemplates", Filter=filters, MaxResults=200)["launchTemplates"] or []
        self.assertTrue(found, "there is no launch template")
        return found

    def test_3_templates_and_user_data_are_read_back(self):
        profile = self.plane.api.get(f"{observe.CLASSES}/default")["status"]["instanceProfile"]
        roles = self.moto.aws.iam("GetInstanceProfile", InstanceProfileName=profile)["InstanceProfile"]["Roles"]
        self.assertEqual([role["RoleName"] for role in roles], [self.account.role])
        images = {id: name for name, id in self.moto.image_ids.items()}
        written = set()
        for template in self.templates():
            which = {"LaunchTemplateId": template["launchTemplateId"], "LaunchTemplateVersion": ["$Latest"]}
            versions = self.moto.aws.ec2("DescribeLaunchTemplateVersions", **which)["launchTemplateVersionSet"]
            data = versions[0]["launchTemplateData"]
            with self.subTest(template["launchTemplateName"]):
                self.assertRegex(images[data["imageId"]], r"^amazon-eks-node-al2023-(x86_64|arm64)-")
                self.assertEqual(data["iamInstanceProfile"]["name"], profile)
                self.assertEqual(data["metadataOptions"]["httpTokens"], "required")
                groups = data["networkInterfaceSet"][0]["groupSet"]["groupId"]
                self.assertEqual(sorted(groups), sorted(self.account.security_groups))
                disk = data["blockDeviceMappingSet"][0]
                self.assertEqual((disk["deviceName"], disk["ebs"]["volumeSize"], disk["ebs"]["encrypted"]), ("/dev/xvda", "20", "true"))
                self.assertNotIn("instanceType", data, "the type is the fleet's to choose")
                written.add((data["imageId"], data["userData"]))
        parse = kubelet.yaml_by(self.plane.bin / "kubectl", self.plane.dir)
        for id, instance in self.instances().items():
            data = self.moto.aws.ec2("DescribeInstanceAttribute", InstanceId=id, Attribute="userData")["userData"]["value"]
            self.assertIn((instance["imageId"], data), written)
            node = next(node for node in self.mirror.nodes() if self.instance_of(node) == id)
            arch = {"amd64": "x86_64", "arm64": "arm64"}[node["metadata"]["labels"][workloads.ARCH]]
            self.assertRegex(images[instance["imageId"]], f"-{arch}-standard-")
            settings = kubelet.settings_of(data, parse)
            self.assertEqual((settings.labels[POOL], settings.labels[observe.CAPACITY_TYPE]), ("default", "on-demand"))
            self.assertIn(UNREGISTERED, [{name: taint[name] for name in ("key", "effect")} for taint in settings.taints])
            self.assertEqual(settings.max_pods, self.planned(node)["pods"])
            cluster = self.cluster_of(data, parse)
            self.assertEqual((cluster["name"], cluster["apiServerEndpoint"], cluster["cidr"]), (CLUSTER, self.plane.state["api"], "10.96.0.0/16"))
            authority = (self.plane.dir / "pki" / "ca.crt").read_bytes()
            self.assertEqual(base64.b64decode(cluster["certificateAuthority"]).strip(), authority.strip())

    def test_4_nodes_are_as_large_as_they_were_planned(self):
        for node in self.mirror.nodes():
            self.as_planned(node)

    @staticmethod
    def cluster_of(data, parse):
        """What the user data of Amazon Linux 2023 say of the cluster."""
        message = email.message_from_string(base64.b64decode(data).decode())
        parts = [part for part in message.walk() if part.get_content_type() == kubelet.NODE_CONFIG]
        return parse(parts[-1].get_payload())["spec"]["cluster"]

    def test_5_spot_pools_get_spot_instances(self):
        self.plane.apply(*one_a_node("spots", 3, "spot"))
        self.bound("spots", 3, 60)
        claims, instances = self.claims("spot"), self.instances()
        self.assertEqual(len(claims), 3)
        for claim in claims:
            self.assertEqual(claim["metadata"]["labels"][observe.CAPACITY_TYPE], "spot")
            self.assertEqual(instances[self.instance_of(claim)].get("instanceLifecycle"), "spot")
        for claim in self.claims("default"):
            self.assertIsNone(instances[self.instance_of(claim)].get("instanceLifecycle"))
        self.nothing_is_leaked()
        self.no_errors()

    def test_6_two_hundred_instances_come_at_once(self):
        begin, at = time.monotonic(), time.time()
        self.plane.apply(*one_a_node("crowd", MANY, "many"))
        launched = lambda: sum(holds(claim, "Launched") for claim in self.claims("many"))
        self.wait(lambda: launched() == MANY, 120, f"{MANY} instances launched", self.mirror.summary)
        took = time.monotonic() - begin
        self.bound("crowd", MANY, 180)
        print(f"\n{MANY} instances launched after {took:.1f} s, their pods bound after {time.monotonic() - begin:.1f} s", flush=True)
        fleets, calls = self.fleets(at), faults.by_action(self.proxy.counts(at))
        note(launched={"instances": MANY, "seconds": round(took, 1), "fleets": len(fleets), "calls": calls})
        print(f"{len(fleets)} fleets for {[call.count for call, _ in fleets]}, the last {max(delay for _, delay in fleets) * 1000:.0f} ms after its plan")
        print(faults.summary(self.proxy.counts(at), MANY), flush=True)
        # Two on a quiet machine; where NodeClaims are written slowly, a call is not put off until the last of them is there (29 were seen).
        self.assertLessEqual(len(fleets), MANY // 5, "equal launches share calls")
        self.assertEqual(len(self.claims("many")), MANY)
        self.assertEqual(self.mirror.record.twice, [], "room was bought twice for a pod")
        self.nothing_is_leaked()
        self.no_errors()

    def test_6b_a_plan_is_soon_a_call(self):
        self.plane.apply(*one_a_node("trickle", 1, "many"))
        self.bound("trickle", 1, 60)
        at = time.time()
        for replicas in range(2, SINGLES + 2):
            self.plane.kubectl("scale", "deployment", "server", f"--replicas={replicas}", "-n", "trickle")
            self.wait(lambda: len(self.claims("many")) == MANY + replicas, 20, "a NodeClaim for it")
        self.bound("trickle", SINGLES + 1, 60)
        delays = sorted(delay * 1000 for _, delay in self.fleets(at))
        print(f"\nfrom plan to CreateFleet, {len(delays)} plans: p50 {observe.percentile(delays, 50):.0f} ms, p99 {observe.percentile(delays, 99):.0f} ms", flush=True)
        # On a busy machine a plan may be made before the call of the one before it: those are left out.
        steps = self.steps(at)
        self.assertGreaterEqual(len(steps), SINGLES // 2)
        parts = {part: sorted(step[part] for step in steps) for part in steps[0]}
        shares = {part: {share: round(observe.percentile(values, share), 1) for share in (50, 99)} for part, values in parts.items()}
        print("; ".join(f"{part} {p[50]:.1f}, {p[99]:.1f}" for part, p in shares.items()), "(p50, p99 in ms)", flush=True)
        note(plans=len(steps), milliseconds={part: {f"p{share}": value for share, value in p.items()} for part, p in shares.items()})
        self.assertGreaterEqual(len(delays), SINGLES)
        self.assertLess(observe.percentile(delays, 50), 250)
        self.no_errors()

    def test_7_all_go_when_no_pod_is_left(self):
        begin = time.monotonic()
        for name in ("default", "spot", "many"):
            self.plane.api.patch(f"{observe.POOLS}/{name}", {"spec": {"disruption": {"budgets": [{"nodes": "100%"}, UNDRIFTED]}}})
        for space in ("shop", "spots", "crowd", "trickle"):
            self.plane.kubectl("scale", "deployments", "--all", "--replicas=0", "-n", space)
        self.wait(lambda: not self.mirror.claims() and not self.mirror.nodes(), 180, "every node gone")
        harness.wait_until(lambda: not self.instances(), 20, "every instance terminated", lambda: sorted(self.instances()), every=0.5)
        print(f"\n{MANY} nodes and the others gone after {time.monotonic() - begin:.1f} s", flush=True)
        self.no_errors()

    def test_8_templates_follow_their_class_ahead_of_launches(self):
        at = time.time()
        # Those of dry launches belong to no pool.
        new = lambda: [call for call in self.proxy.seen("CreateLaunchTemplate", at) if {"team-2", "many"} <= set(call.form.values())]
        self.plane.api.patch(f"{observe.CLASSES}/default", {"spec": {"tags": {"team": "team-2"}}})
        self.wait(new, 60, "a launch template by what the class says now")
        print(f"\nlaunch template made {time.time() - at:.1f} s after its class was changed", flush=True)
        self.assertEqual(self.fleets(at), [], "nothing was launched")
        at = time.time()
        self.plane.kubectl("scale", "deployment", "server", "--replicas=1", "-n", "crowd")
        self.bound("crowd", 1, 60)
        self.assertEqual(new(), [], "the launch found its template")
        self.no_errors()


class Expressions(Service):
    """Expressions in a kubelet configuration come to the same in the plan, in the user data and on the node."""

    settings = {"AWS_FEATURE_GATES": "NodeClassCEL=true"}

    @classmethod
    def classes(cls):
        made = node_class()
        reserved = {"cpu": "60 + vcpus * 5", "memory": "11 * max_pods + 255", "ephemeral-storage": "vcpus / 0"}
        made["spec"]["kubelet"] = {"maxPods": "vcpus * 10", "kubeReserved": reserved, "systemReserved": {"memory": "memory_mib / 64"}}
        return [made]

    @classmethod
    def pools(cls):
        return [small("sized", "on-demand")]

    def test_1_nodes_are_as_their_expressions_say(self):
        self.plane.apply(*one_a_node("sized", 2, "sized"))
        self.bound("sized", 2, 90)
        parse = kubelet.yaml_by(self.plane.bin / "kubectl", self.plane.dir)
        for id in self.instances():
            data = self.moto.aws.ec2("DescribeInstanceAttribute", InstanceId=id, Attribute="userData")["userData"]["value"]
            told = kubelet.settings_of(data, parse)
            # Of 2 vCPUs and 8 GiB; 475 MiB are rounded up to 480. What fails is left out, and told.
            self.assertEqual((told.max_pods, told.kube_reserved, told.system_reserved), (20, {"cpu": "70m", "memory": "480Mi"}, {"memory": "128Mi"}))
        for node in self.mirror.nodes():
            self.assertEqual(node["status"]["allocatable"]["pods"], "20")
            self.as_planned(node)
        self.assertIn("KubeletExpressionDropped", [event["reason"] for event in self.plane.events("default")])
        self.no_errors()

    def test_2_a_class_whose_max_pods_fails_is_not_ready(self):
        broken = node_class()
        broken["spec"]["kubelet"] = {"maxPods": "vcpus *"}
        self.plane.apply(broken)

        def condition():
            status = (self.plane.api.find(f"{observe.CLASSES}/default") or {}).get("status", {})
            return next((item for item in status.get("conditions", []) if item["type"] == "ValidationSucceeded"), {})

        harness.wait_until(lambda: self.stowage.alive() and condition().get("reason") == "KubeletExpressionInvalid", 60, "the class refused", condition)
        self.assertIn("spec.kubelet.maxPods", condition()["message"])


class Interruptions(Service):
    """Messages of the queue, to their effect; and what nobody knows. Stowage takes nodes to have more memory than the kubelets report."""

    settings = {"VM_MEMORY_OVERHEAD_PERCENT": "0.05"}

    @classmethod
    def pools(cls):
        pool = small("guard", "spot")
        pool["spec"]["disruption"]["budgets"] = [UNDRIFTED]
        return [pool]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.plane.apply(*one_a_node("guard", 4, "guard"))
        cls.mirror.wait(lambda: cls.mirror.all_bound(4, "guard") and cls.mirror.settled(), 90, "guarded pods bound")
        cls.estimated = max(kubelet.quantity(claim["status"]["capacity"]["memory"]) for claim in cls.mirror.claims())

    def send(self, source, kind, **detail):
        """Puts an event into the queue as EventBridge would."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {"version": "0", "id": f"{time.time_ns():x}", "detail-type": kind, "source": source, "account": aws.ACCOUNT, "time": now}
        self.send_text(json.dumps({**event, "region": aws.REGION, "resources": [], "detail": detail}))

    def send_text(self, text):
        self.moto.aws.sqs("SendMessage", QueueUrl=self.account.queue_url, MessageBody=text)

    def queue_empty(self):
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.moto.aws.sqs("GetQueueAttributes", QueueUrl=self.account.queue_url, AttributeNames=names)["Attributes"]
        return all(int(found[name]) == 0 for name in names)

    def handled(self):
        """Waits until every message was taken out of the queue."""
        harness.wait_until(lambda: self.stowage.alive() and self.queue_empty(), 15, "the queue empty", every=0.1)

    def victim(self):
        """A NodeClaim that stays as far as anyone knows."""
        self.bound("guard", 4, 60)
        return sorted(self.claims(), key=key)[0]

    def closed(self, claim):
        node = self.mirror.node_of(claim)
        return node is None or leaving(node) or tainted(node, observe.DISRUPTED_TAINT)

    def replaced(self, claim):
        """Waits until the NodeClaim and its instance are gone, and its pods run elsewhere."""
        name = key(claim)
        self.wait(lambda: name not in {key(other) for other in self.mirror.claims()}, 90, f"{name} gone")
        self.bound("guard", 4, 60)
        self.assertNotIn(self.instance_of(claim), self.instances())
        self.nothing_is_leaked()

    def test_1_a_spot_interruption_closes_the_node_within_a_second_and_replaces_it(self):
        claim = self.victim()
        begin = time.monotonic()
        detail = {"instance-id": self.instance_of(claim), "instance-action": "terminate"}
        self.send("aws.ec2", "EC2 Spot Instance Interruption Warning", **detail)
        self.wait(lambda: self.closed(claim), 20, "the node closed")
        took = time.monotonic() - begin
        print(f"\nspot interruption: node closed {took:.2f} s after the message", flush=True)
        self.assertLess(took, TAINT_SECONDS)
        self.replaced(claim)
        self.handled()

    def test_2_a_scheduled_change_replaces_every_node_that_it_names(self):
        claim = self.victim()
        entities = [{"entityValue": self.instance_of(claim)}, {"entityValue": "i-0123456789abcdef0"}]
        change = {"service": "EC2", "eventTypeCategory": "scheduledChange", "eventTypeCode": "AWS_EC2_INSTANCE_STOP_SCHEDULED"}
        self.send("aws.health", "AWS Health Event", **change, affectedEntities=entities)
        self.wait(lambda: self.closed(claim), 20, "the node closed")
        self.replaced(claim)
        self.handled()

    def test_3_an_instance_that_somebody_ended_is_replaced(self):
        for state in ("stopping", "terminated"):
            with self.subTest(state):
                claim = self.victim()
                id = self.instance_of(claim)
                if state == "terminated":
                    self.moto.terminate(id)
                self.send("aws.ec2", "EC2 Instance State-change Notification", **{"instance-id": id, "state": state})
                self.replaced(claim)
        self.handled()

    def test_3b_later_nodes_are_as_large_as_the_first_ones_showed(self):
        latest = max(self.claims(), key=lambda claim: claim["metadata"]["creationTimestamp"])
        node = self.mirror.node_of(latest)
        self.assertGreater(self.estimated, kubelet.quantity(node["status"]["capacity"]["memory"]))
        self.as_planned(node)

    def test_4_a_rebalance_recommendation_is_told_and_no_more(self):
        claim = self.victim()
        self.send("aws.ec2", "EC2 Instance Rebalance Recommendation", **{"instance-id": self.instance_of(claim)})
        self.handled()
        told = lambda: [event for event in self.plane.events(key(claim)) if "rebalance" in json.dumps(event).lower()]
        harness.wait_until(told, 15, "an event of the recommendation", lambda: self.plane.events(key(claim)))
        self.unharmed(claim)

    def test_5_messages_that_say_nothing_are_counted_and_dropped(self):
        claim = self.victim()
        id, before = self.instance_of(claim), self.counted()
        self.send_text("not json")
        self.send_text("[]")
        self.send_text(json.dumps({"version": "0"}))
        self.send("aws.ec2", "EC2 Instance State-change Notification", **{"instance-id": id, "state": "running"})
        self.send("aws.ec2", "EC2 Instance State-change Notification", **{"instance-id": 7})
        self.send("aws.s3", "Object Created", **{"instance-id": id})
        self.send("aws.health", "AWS Health Event", service="RDS", eventTypeCategory="scheduledChange", affectedEntities=[{"entityValue": id}])
        self.send("aws.ec2", "EC2 Spot Instance Interruption Warning", **{"instance-id": "i-0123456789abcdef0", "instance-action": "terminate"})
        self.handled()
        self.assertGreaterEqual(self.counted() - before, 8)
        self.unharmed(claim)
        self.no_errors()

    def counted(self):
        """Messages received, by the service's own count."""
        metrics = self.stowage.metrics()
        return sum(value for name, value in metrics.items() if name.startswith("stowage_interruption_messages_total"))

    def unharmed(self, claim):
        now = next((other for other in self.claims() if key(other) == key(claim)), None)
        self.assertIsNotNone(now, "the NodeClaim went")
        self.assertFalse(leaving(now) or self.closed(now))
        self.assertTrue(self.stowage.ready())

    def test_6_an_instance_of_no_node_claim_goes_and_those_of_others_stay(self):
        owned = {"kubernetes.io/cluster/demo": "owned", "eks:eks-cluster-name": CLUSTER, POOL: "guard", NODE_CLASS: "default"}
        orphan = self.moto.launch(self.account, **owned)[0]["instanceId"]
        others = {"kubernetes.io/cluster/other": "owned", "eks:eks-cluster-name": "other", POOL: "guard", NODE_CLASS: "default"}
        neighbour = self.moto.launch(self.account, **others)[0]["instanceId"]
        bystander = self.moto.launch(self.account, **{"eks:eks-cluster-name": CLUSTER, "Name": "bastion"})[0]["instanceId"]
        begin = time.monotonic()
        gone = lambda: orphan not in self.instances()
        harness.wait_until(lambda: self.stowage.alive() and gone(), GARBAGE_SECONDS, "the orphan terminated", every=0.5)
        print(f"\norphan terminated after {time.monotonic() - begin:.0f} s", flush=True)
        node = lambda id: next((node for node in self.mirror.nodes() if self.instance_of(node) == id), None)
        self.wait(lambda: not node(orphan), 20, "the orphan's Node gone")
        self.assertIn(neighbour, self.instances("other"))
        self.assertIn(bystander, self.instances())
        self.assertTrue(all(bound_to(pod) for pod in self.mirror.pods("guard")))


class Shells(unittest.TestCase):
    """Rust's tests of the calls alone, which want an endpoint that somebody else wrote."""

    def test_the_calls_are_understood(self):
        with aws.Moto() as moto:
            command = ["cargo", "test", "--locked", "--quiet", "--lib", "ec2::live_tests", "--", "--ignored"]
            done = subprocess.run(command, cwd=harness.ROOT, env={**os.environ, **moto.env()}, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"test result: ok\. [1-9]\d* passed")


if __name__ == "__main__":
    unittest.main(verbosity=2)
