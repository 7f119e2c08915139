"""From Karpenter to Stowage and back, with Karpenter's real controller, on EC2's wire protocol: each controller keeps the nodes of the
other. Drift budgets are open, so that a NodeClaim that a controller finds drifted would be replaced.

The NodePool `canary` changes while no controller runs, with a closed budget: its NodeClaim must drift. This shows that a controller has
evaluated drift.
"""

import contextlib

import aws
import faults
import harness
import karpenter
import kube
import observe
import services
import workloads
from kube import NODE_POOL, annotations_of, bound_to, is_true, key, pool_of
from services import CLUSTER, TYPE
from waiting import wait_until

CANARY, KEPT = "canary", ("ordinary", "sparse")
# Kinds that Stowage does not support.
OVERLAY, BUFFER = "overlay", "buffer"
CLASS_HASH, POOL_HASH = "karpenter.k8s.aws/ec2nodeclass-hash", "karpenter.sh/nodepool-hash"
PROFILE = "karpenter.k8s.aws/instance-profile-name"
UNREGISTERED, PLANNED = "karpenter.sh/unregistered", "stowage.dev/planned"
TEAM, TOUCHED, WAVE = "example.com/team", "example.com/touched", "example.com/wave"
EVALUATED = 90  # seconds until a controller has started and evaluated drift


def ordinary_class():
    made = services.node_class("ordinary")
    eviction = {"evictionSoft": {"memory.available": "5%"}, "evictionSoftGracePeriod": {"memory.available": "1m30s"}}
    made["spec"] |= {
        "kubelet": {"maxPods": 30, "kubeReserved": {"cpu": "100m"}, **eviction},
        "blockDeviceMappings": [{"deviceName": "/dev/xvda", "ebs": {"volumeSize": "1024Gi", "volumeType": "gp3", "encrypted": True}}],
        "detailedMonitoring": True,
    }
    return made


def sparse_class():
    """As templates render it: lists and maps that are present and empty."""
    made = workloads.node_class("sparse")
    made["spec"] |= {"tags": {}, "blockDeviceMappings": [], "networkInterfaces": [], "kubelet": {}}
    return made


def pool(name, class_name, metadata, **spec):
    # One pod fits on a node. Nothing is consolidated, and drift has no limit.
    made = workloads.node_pool(name, "Never", "100%", ["on-demand"], [workloads.requirement(kube.INSTANCE_TYPE, TYPE)], class_name)
    made["spec"]["template"]["metadata"] = metadata
    made["spec"]["template"]["spec"] |= spec
    return made


def pools():
    taint = {"key": TEAM, "value": "ordinary", "effect": "NoSchedule"}
    metadata = {"labels": {"team": "a"}, "annotations": {"example.com/note": "b"}}
    yield pool("ordinary", "ordinary", metadata, taints=[taint], expireAfter="Never", terminationGracePeriod="1h")
    yield pool("sparse", "sparse", {"labels": {}, "annotations": {}}, taints=[], startupTaints=[])
    canary = pool(CANARY, "sparse", {"labels": {WAVE: "0"}})
    canary["spec"]["disruption"]["budgets"] = [{"nodes": "0"}]
    yield canary


def workload(name, replicas):
    selector = {NODE_POOL: name}
    return workloads.workload("swap", name, replicas, 1200, 512, nodeSelector=selector, tolerations=[{"key": TEAM, "operator": "Exists"}])


def unsupported():
    """Objects that Karpenter ignores, too, while its feature gates are off."""
    requirement = workloads.requirement(workloads.ARCH, "amd64")
    yield {"apiVersion": "karpenter.sh/v1alpha1", "kind": "NodeOverlay", "metadata": {"name": OVERLAY}, "spec": {"requirements": [requirement], "priceAdjustment": "+10%"}}
    template = {"podTemplateRef": {"name": "absent"}, "replicas": 1}
    yield {"apiVersion": "autoscaling.x-k8s.io/v1beta1", "kind": "CapacityBuffer", "metadata": {"name": BUFFER, "namespace": "swap"}, "spec": template}


def signs(samples):
    """The distinct signs of disruption in these samples."""
    return sorted({sign for sample in samples for sign in sample})


class Installation(harness.Stowage):
    """Stowage in a cluster whose CRDs belong to Karpenter's chart."""

    def values(self):
        return super().values() | {"crds": {"install": False}}


class Swap(services.Ec2):
    """A cluster whose controller changes. `stowage` is the one that runs."""

    replicas = 0

    def environment(self):
        """The SDK's variables."""
        return self.moto.env() | {"AWS_ENDPOINT_URL": self.proxy.endpoint}

    def karpenter(self):
        return karpenter.Karpenter(self.plane, CLUSTER, self.environment())

    def installation(self):
        own = {"CLUSTER_ENDPOINT": self.plane.state["api"], "INTERRUPTION_QUEUE": CLUSTER}
        return Installation(self.plane, "nominate", env=self.environment() | own, cloud="ec2", clusterName=CLUSTER)

    @contextlib.contextmanager
    def run(self, controller):
        self.stowage = controller
        with controller:
            yield controller

    def kept(self):
        """NodeClaims that must be kept."""
        return [claim for claim in self.claims() if pool_of(claim) in KEPT]

    def launch(self):
        """One more node in each pool, the canary only once."""
        self.replicas += 1
        for name in KEPT:
            self.plane.apply(workload(name, self.replicas))
        count = len(KEPT) * self.replicas + 1
        self.wait_bound("swap", count, 90)
        opened = lambda: not any({UNREGISTERED, PLANNED} & kube.taint_keys(node) for node in self.mirror.nodes())
        self.wait(lambda: len(self.claims()) == count and opened(), 60, "all nodes open to all pods", lambda: [sorted(kube.taint_keys(node)) for node in self.mirror.nodes()])
        # Both tag an instance after its node is registered.
        named = lambda: all("Name" in aws.tags_of(instance) for instance in self.instances().values())
        self.poll(named, 60, "all instances tagged", every=1)

    def set_wave(self, wave):
        """Changes the template of the canary."""
        self.api.patch("NodePool", CANARY, {"spec": {"template": {"metadata": {"labels": {WAVE: wave}}}}})

    def wait_canary(self, drifted):
        done = lambda: [is_true(claim, "Drifted") for claim in self.claims(CANARY)] == [drifted]
        self.wait(done, EVALUATED, f"the canary {'' if drifted else 'no longer '}drifted", self.state)

    def state(self):
        conditions = lambda claim: {entry["type"]: entry.get("reason") for entry in claim.get("status", {}).get("conditions", []) if entry["type"] == "Drifted"}
        return {key(claim): (conditions(claim), kube.terminating(claim)) for claim in self.claims()}

    def picture(self):
        """What a change of the controller must not change."""
        claims = {claim["metadata"]["uid"]: claim for claim in self.kept()}
        nodes = {claim["metadata"]["uid"]: self.mirror.node_of(claim) for claim in claims.values()}
        instances = self.instances()
        return {
            "nodes": {uid: node["metadata"]["uid"] for uid, node in nodes.items()},
            "taints": {uid: sorted(kube.taint_keys(node)) for uid, node in nodes.items()},
            "labels": {uid: node["metadata"]["labels"] for uid, node in nodes.items()},
            "instances": {uid: self.instance_of(claim) for uid, claim in claims.items()},
            "tags": {id: aws.tags_of(instances[id]) for id in map(self.instance_of, claims.values())},
            "pods": {pod["metadata"]["uid"]: bound_to(pod) for pod in self.mirror.pods("swap")},
            "claim hashes": {uid: self.hashes(claim) for uid, claim in claims.items()},
            "class hashes": {name: self.hashes(self.api.get("EC2NodeClass", name)) for name in KEPT},
            "profiles": {name: self.api.get("EC2NodeClass", name)["status"]["instanceProfile"] for name in KEPT},
            "pool hashes": {name: self.hashes(self.api.get("NodePool", name)) for name in KEPT},
        }

    @staticmethod
    def hashes(item):
        return {name: value for name, value in annotations_of(item).items() if name.startswith((CLASS_HASH, POOL_HASH))}

    def disturbed(self):
        """Signs of disruption."""
        drifted = [f"{key(claim)}: {found['reason']}" for claim in self.kept() if (found := kube.condition(claim, "Drifted"))]
        leaving = [f"{key(claim)}: leaving" for claim in self.claims() if kube.being_disrupted(claim)]
        tainted = [f"{key(node)}: tainted" for node in self.mirror.nodes() if kube.DISRUPTED_TAINT in kube.taint_keys(node)]
        return drifted + leaving + tainted

    def assert_kept(self, before, samples):
        """Nothing was disturbed, and the picture before is part of the present one."""
        assert signs(samples) == []
        after = self.picture()
        for name, items in before.items():
            # Labels and tags may be added.
            contained = lambda old, new: old.items() <= new.items() if name in ("labels", "tags") else old == new
            changed = {item: (old, after[name].get(item)) for item, old in items.items() if item not in after[name] or not contained(old, after[name][item])}
            assert changed == {}, name
        for claim in self.kept():
            owners = (after["class hashes"][pool_of(claim)], after["pool hashes"][pool_of(claim)])
            assert self.hashes(claim) == owners[0] | owners[1], "comparable and equal"
        assert self.proxy.seen("TerminateInstances") == []
        # One of the controllers created it, and the other may collect garbage.
        for claim in self.claims():
            self.aws.iam.get_instance_profile(InstanceProfileName=annotations_of(claim)[PROFILE])

    def wait_evaluated(self, controller):
        """Waits until Karpenter has evaluated the drift of every NodeClaim from now on: it does so after an event on each."""
        known, claims = controller.drift_evaluations(), self.claims()
        for claim in claims:
            self.api.annotate("NodeClaim", key(claim), {TOUCHED: str(known)})
        self.poll(lambda: controller.drift_evaluations() >= known + len(claims), EVALUATED, "all NodeClaims evaluated", controller.drift_evaluations)


@contextlib.contextmanager
def cluster(plane):
    """A cluster with Karpenter's CRDs, NodePools and node classes, and no controller."""
    with contextlib.ExitStack() as stack:
        # Later suites may keep the CRDs of the chart, and these are not.
        stack.callback(plane.emptied)
        moto = stack.enter_context(aws.Moto())
        account = moto.account(CLUSTER)
        proxy = stack.enter_context(faults.Proxy(moto.endpoint))
        stack.enter_context(proxy.fault(faults.restored_security_groups(moto.aws)))
        kubelets = stack.enter_context(harness.Kubelets(plane, moto.endpoint, cluster=CLUSTER))
        plane.apply(workloads.namespace(harness.NAMESPACE), workloads.namespace("swap"), *karpenter.crds(plane))
        for crd in harness.CUSTOM_KINDS.values():
            wait_until(lambda: is_true(plane.api.get("CustomResourceDefinition", crd), "Established"), 20, f"{crd} established")
        mirror = stack.enter_context(observe.Mirror(plane.api))
        plane.apply(ordinary_class(), sparse_class(), *pools(), workload(CANARY, 1), *unsupported())
        yield Swap(plane, None, mirror, moto, account, proxy, kubelets)


class TestSwap:
    """Karpenter launches nodes; Stowage takes over and launches nodes; Karpenter takes over again."""

    @staticmethod
    def environment(request):
        return cluster(request.getfixturevalue("control_plane"))

    def test_1_karpenter_launches(self, service):
        with service.mirror.sampling(service.disturbed) as samples, service.run(service.karpenter()) as controller:
            for name in (*KEPT, CANARY):
                service.wait_pool(name, 60)
            service.launch()
            service.wait_evaluated(controller)
            assert signs(samples) == [], "Karpenter itself keeps its nodes"

    def test_2_stowage_keeps_the_nodes_of_karpenter(self, service):
        before = service.picture()
        service.set_wave("1")
        with service.mirror.sampling(service.disturbed) as samples, service.run(service.installation()):
            service.wait_canary(True)
            # One pass evaluates all NodeClaims: when the canary no longer drifts, a later pass is complete.
            service.set_wave("0")
            service.wait_canary(False)
            service.assert_kept(before, samples)
            for name in (OVERLAY, BUFFER):
                service.poll(lambda: service.plane.events(name, "UnsupportedKind"), 20, f"a report that {name} has no effect")
            service.launch()
            service.assert_kept(before, samples)
            service.assert_no_errors()

    def test_3_karpenter_keeps_the_nodes_of_both(self, service):
        service.plane.helm("uninstall", harness.RELEASE, "--namespace", harness.NAMESPACE)
        before = service.picture()
        service.set_wave("1")
        with service.mirror.sampling(service.disturbed) as samples, service.run(service.karpenter()) as controller:
            service.wait_canary(True)
            service.wait_evaluated(controller)
            service.assert_kept(before, samples)
            service.launch()
            service.assert_kept(before, samples)
