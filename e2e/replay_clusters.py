"""Random small clusters with every kind of scheduling constraint, and what their plans mean to kube-scheduler."""

import json
import math
import random
import re

ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
ARCH, CAPACITY = "kubernetes.io/arch", "karpenter.sh/capacity-type"
TYPE, POOL, TEAM = "node.kubernetes.io/instance-type", "karpenter.sh/nodepool", "example.com/team"
AWS = "karpenter.k8s.aws/instance-"
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
TYPES = ["m5.large", "m5.xlarge", "m5.2xlarge", "c6g.large", "c6g.2xlarge", "r6i.xlarge", "r6g.large", "t3.medium", "g4dn.xlarge"]
DRIVER = "ebs.csi.aws.com"


# DaemonSets and their rules: one on every node, one on a part of those without taints.
DAEMONS = {"agent": {"tolerations": [{"operator": "Exists"}]}, "collector": {"nodeSelector": {ARCH: "amd64"}}}


def allocatable(one):
    """What kubelet offers to pods on an instance type, in Kubernetes' quantities (the rules of check_plan.py)."""
    pods = one["enis"] * (one["ipv4PerEni"] - 1) + 2
    milli, reserved = one["vcpu"] * 1000, 0
    for least, most, share in ((0, 1000, 0.06), (1000, 2000, 0.01), (2000, 4000, 0.005), (4000, 1 << 31, 0.0025)):
        reserved += max(0, min(milli, most) - least) * share
    memory = math.ceil(one["memoryMib"] * 0.925) - (11 * pods + 255) - 100
    out = {"cpu": f"{milli - int(reserved)}m", "memory": f"{memory}Mi", "pods": str(pods), "ephemeral-storage": "17Gi"}
    for gpu in one.get("gpus", []):
        out[gpu["manufacturer"].lower() + ".com/gpu"] = str(gpu["count"])
    return out


def node(name, one, zone, capacity, pool=None):
    """A Node as it registers."""
    family, size = one["name"].split(".", 1)
    category, generation = re.match(r"([a-z]+)(\d*)", family).groups()
    labels = {
        "kubernetes.io/os": "linux", ARCH: "arm64" if one["arch"][0] == "arm64" else "amd64", HOST: name, TYPE: one["name"], ZONE: zone, CAPACITY: capacity,
        AWS + "category": category, AWS + "generation": generation, AWS + "family": family, AWS + "size": size,
        AWS + "cpu": str(one["vcpu"]), AWS + "memory": str(one["memoryMib"]),
    }  # fmt: skip
    taints = []
    if pool:
        template = pool["spec"]["template"]
        labels |= template.get("metadata", {}).get("labels", {}) | {POOL: pool["metadata"]["name"]}
        taints = template["spec"].get("taints", [])
    offered = allocatable(one)
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": offered, "capacity": offered, "conditions": conditions}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}, "status": status}


def created(pod):
    """A pod as the API server stores it: the labels that `matchLabelKeys` of affinity names are part of the selector."""
    pod = json.loads(json.dumps(pod))
    for rules in pod["spec"].get("affinity", {}).values():
        preferred = [one["podAffinityTerm"] for one in rules.get("preferredDuringSchedulingIgnoredDuringExecution", []) if "podAffinityTerm" in one]
        required = rules.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        for term in preferred + (required if isinstance(required, list) else []):
            for key in term.get("matchLabelKeys", []):
                same = {"key": key, "operator": "In", "values": [pod["metadata"]["labels"][key]]}
                term["labelSelector"].setdefault("matchExpressions", []).append(same)
    return pod


class Cluster:
    """A random cluster: pods that wait, nodes with running pods that have rules, ports and volumes of their own, NodePools, DaemonSets, volumes, namespaces."""

    def __init__(self, seed, types):
        self.seed, self.draw, self.types = seed, random.Random(seed), types
        draw = self.draw
        self.apps = [f"app-{at}" for at in range(draw.randint(1, 5))]
        self.namespaces = [self.object("Namespace", "kube-system"), self.object("Namespace", "default", labels={"env": "prod"}), self.object("Namespace", "other", labels={"env": draw.choice(["prod", "test"])})]
        self.volumes, self.claims, self.csi_nodes = [], [], []
        waiting = {"apiVersion": "storage.k8s.io/v1", "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer"}
        topology = [{"matchLabelExpressions": [{"key": ZONE, "values": draw.sample(ZONES, 2)}]}]
        self.classes = [
            self.object("StorageClass", "anywhere") | waiting,
            self.object("StorageClass", "some-zones") | waiting | {"allowedTopologies": topology},
        ]
        self.pools = [self.pool(at) for at in range(draw.choice([1, 1, 2, 3]))]
        self.daemon = draw.random() < 0.4
        self.nodes, self.running = [], []
        for at in range(draw.choice([0, 0, 1, 2, 4, 8])):
            self.running_node(at)
        self.pods = []
        for at in range(draw.randint(1, 6)):
            self.deployment(at)

    @staticmethod
    def object(kind, name, namespace=None, labels=None):
        metadata = {"name": name, "labels": labels or {}} | ({"namespace": namespace} if namespace else {})
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata}

    def pool(self, at):
        draw = self.draw
        requirements = [
            {"key": TYPE, "operator": "In", "values": sorted(draw.sample(TYPES, draw.randint(3, len(TYPES))))},
            {"key": ZONE, "operator": "In", "values": sorted(draw.sample(ZONES, draw.choice([1, 2, 3, 3, 3])))},
            {"key": CAPACITY, "operator": "In", "values": draw.choice([["on-demand"], ["on-demand", "spot"]])},
            {"key": ARCH, "operator": "In", "values": ["amd64", "arm64"]},
        ]
        spec = {"nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}, "requirements": requirements}
        if draw.random() < 0.2:
            spec["taints"] = [{"key": "dedicated", "value": "x", "effect": draw.choice(["NoSchedule", "NoExecute", "PreferNoSchedule"])}]
        if draw.random() < 0.1:
            spec["startupTaints"] = [{"key": "example.com/agent", "effect": "NoSchedule"}]
        labels = {TEAM: draw.choice(["red", "blue"])} if draw.random() < 0.4 else {}
        out = self.object("NodePool", f"pool-{at}") | {"apiVersion": "karpenter.sh/v1"}
        out["spec"] = {"template": {"metadata": {"labels": labels}, "spec": spec}, "weight": draw.choice([1, 1, 10])}
        if draw.random() < 0.2:
            out["spec"]["limits"] = {"cpu": str(draw.choice([4, 8, 16]))}
        return out

    def selector(self):
        draw = self.draw
        if draw.random() < 0.8:
            return {"matchLabels": {"app": draw.choice(self.apps)}}
        return {"matchExpressions": [{"key": "app", "operator": draw.choice(["In", "NotIn"]), "values": draw.sample(self.apps, 1)}]}

    def term(self):
        draw = self.draw
        out = {"topologyKey": draw.choice([ZONE, ZONE, HOST, HOST, ARCH, CAPACITY]), "labelSelector": self.selector()}
        if draw.random() < 0.2:
            out["namespaceSelector"] = draw.choice([{}, {"matchLabels": {"env": "prod"}}])
        elif draw.random() < 0.1:
            out["namespaces"] = ["other"]
        if draw.random() < 0.1:
            out["matchLabelKeys"] = ["version"]
        return out

    def spread(self, labels):
        draw = self.draw
        out = {"maxSkew": draw.choice([1, 1, 2]), "topologyKey": draw.choice([ZONE, ZONE, HOST, ARCH, CAPACITY, TEAM]),
               "whenUnsatisfiable": draw.choice(["DoNotSchedule", "DoNotSchedule", "ScheduleAnyway"])}  # fmt: skip
        own = {"matchLabels": {"app": labels["app"]}}
        out["labelSelector"] = own if draw.random() < 0.8 else self.selector()
        if out["whenUnsatisfiable"] == "DoNotSchedule" and draw.random() < 0.15:
            out["minDomains"] = draw.choice([1, 2, 3])
        if draw.random() < 0.15:
            out["nodeAffinityPolicy"] = draw.choice(["Honor", "Ignore"])
        if draw.random() < 0.15:
            out["nodeTaintsPolicy"] = draw.choice(["Honor", "Ignore"])
        if draw.random() < 0.1:
            out["matchLabelKeys"] = ["version"]
        return out

    def expression(self):
        draw = self.draw
        return draw.choice([
            {"key": ZONE, "operator": "In", "values": draw.sample(ZONES, 2)},
            {"key": ZONE, "operator": "NotIn", "values": draw.sample(ZONES, 1)},
            {"key": ARCH, "operator": "In", "values": [draw.choice(["amd64", "arm64"])]},
            {"key": TYPE, "operator": "NotIn", "values": draw.sample(TYPES, 2)},
            {"key": AWS + "cpu", "operator": draw.choice(["Gt", "Lt"]), "values": ["4"]},
            {"key": AWS + "generation", "operator": "Gt", "values": ["4"]},
            {"key": TEAM, "operator": draw.choice(["Exists", "DoesNotExist"])},
        ])  # fmt: skip

    def constraints(self, labels):
        """Fields of a pod's spec."""
        draw, spec, affinity = self.draw, {}, {}
        chance = lambda share: draw.random() < share
        if chance(0.15):
            spec["nodeSelector"] = draw.choice([{ARCH: "amd64"}, {ARCH: "arm64"}, {ZONE: draw.choice(ZONES)}, {TEAM: "red"}])
        if chance(0.2):
            terms = [{"matchExpressions": [self.expression() for _ in range(draw.choice([1, 1, 2]))]} for _ in range(draw.choice([1, 1, 2]))]
            affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        if chance(0.1):
            preferred = [{"weight": draw.randint(1, 100), "preference": {"matchExpressions": [self.expression()]}}]
            affinity.setdefault("nodeAffinity", {})["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
        for kind, share in (("podAffinity", 0.15), ("podAntiAffinity", 0.2)):
            if chance(share):
                affinity[kind] = {"requiredDuringSchedulingIgnoredDuringExecution": [self.term() for _ in range(draw.choice([1, 1, 2]))]}
            elif chance(0.1):
                affinity[kind] = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 10, "podAffinityTerm": self.term()}]}
        if chance(0.3):
            spreads = [self.spread(labels) for _ in range(draw.choice([1, 1, 2]))]
            spec["topologySpreadConstraints"] = list({(one["topologyKey"], one["whenUnsatisfiable"]): one for one in spreads}.values())
        if chance(0.3):
            spec["tolerations"] = [draw.choice([{"operator": "Exists"}, {"key": "dedicated", "operator": "Equal", "value": "x"}])]
        if chance(0.1):
            spec["priority"] = draw.choice([10, 1000])
        return spec | ({"affinity": affinity} if affinity else {})

    def pod(self, name, namespace, labels, spec, size):
        cpu, memory, extra = size
        container = {"name": "main", "image": "app", "resources": {"requests": {"cpu": f"{cpu}m", "memory": f"{memory}Mi"} | extra, "limits": extra}}
        spec = json.loads(json.dumps(spec))
        if ports := spec.pop("ports", None):
            container["ports"] = ports
        out = self.object("Pod", name, namespace, dict(labels))
        return out | {"spec": {"containers": [container], **spec}, "status": {"phase": "Pending"}}

    def size(self):
        draw = self.draw
        extra = {"nvidia.com/gpu": "1"} if draw.random() < 0.05 else {}
        return draw.choice([100, 250, 500, 900, 1500, 3000]), draw.choice([128, 512, 1024, 3000, 6000]), extra

    def deployment(self, at):
        draw = self.draw
        labels = {"app": draw.choice(self.apps), "version": draw.choice(["v1", "v2"])}
        namespace = "other" if draw.random() < 0.15 else "default"
        spec, size = self.constraints(labels), self.size()
        if draw.random() < 0.1:
            spec["ports"] = [{"containerPort": 80, "hostPort": draw.choice([8080, 9090]), "protocol": draw.choice(["TCP", "UDP"])}]
        has_claim = draw.random() < 0.12
        for number in range(draw.choice([1, 1, 2, 3, 5, 9])):
            name = f"d{at}-{number}"
            pod = self.pod(name, namespace, labels, spec, size)
            if has_claim:
                self.claim(pod, namespace)
            self.pods.append(pod)

    def claim(self, pod, namespace, zone=None):
        """Gives a pod a claim of its own, bound to a volume of a zone (any or this one) or waiting for the pod."""
        draw, name = self.draw, pod["metadata"]["name"]
        storage = draw.choice(["anywhere", "some-zones"])
        size = {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteOnce"], "storageClassName": storage}
        claim = self.object("PersistentVolumeClaim", name, namespace) | {"spec": size, "status": {"phase": "Pending"}}
        if zone or draw.random() < 0.5:
            where = [{"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone or draw.choice(ZONES)]}]}]
            volume = self.object("PersistentVolume", f"pv-{name}")
            volume["spec"] = {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": storage,
                "csi": {"driver": DRIVER, "volumeHandle": f"vol-{name}"}, "claimRef": {"namespace": namespace, "name": name},
                "nodeAffinity": {"required": {"nodeSelectorTerms": where}},
            }  # fmt: skip
            volume["status"] = {"phase": "Bound"}
            self.volumes.append(volume)
            claim["spec"]["volumeName"] = f"pv-{name}"
            claim["metadata"]["annotations"] = {"pv.kubernetes.io/bind-completed": "yes"}
            claim["status"]["phase"] = "Bound"
        self.claims.append(claim)
        pod["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]

    def running_node(self, at):
        draw = self.draw
        one = self.types[draw.choice(TYPES[:8])]
        zone = draw.choice(ZONES)
        found = node(f"node-{at}", one, zone, "on-demand", draw.choice([None, self.pools[0]]))
        found["spec"]["providerID"] = f"aws:///{zone}/i-{at:017x}"
        self.nodes.append(found)
        csi = self.object("CSINode", found["metadata"]["name"]) | {"apiVersion": "storage.k8s.io/v1"}
        csi["spec"] = {"drivers": [{"name": DRIVER, "nodeID": "n", "topologyKeys": [ZONE], "allocatable": {"count": draw.choice([1, 2, 25])}}]}
        self.csi_nodes.append(csi)
        cpu = one["vcpu"] * 1000 - 300
        for number in range(draw.choice([0, 1, 2])):
            labels = {"app": draw.choice(self.apps), "version": "v1"}
            spec = {"nodeName": found["metadata"]["name"]}
            if draw.random() < 0.1:
                spec["ports"] = [{"containerPort": 80, "hostPort": 8080, "protocol": "TCP"}]
            if draw.random() < 0.2:
                spec["topologySpreadConstraints"] = [self.spread(labels)]
            if draw.random() < 0.3:
                terms = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": draw.choice([ZONE, HOST]), "labelSelector": self.selector()}]}
                spec["affinity"] = {"podAntiAffinity": terms}
            size = (draw.choice([100, cpu // 4, cpu // 2 - 100]), 256, {})
            namespace = draw.choice(["default", "default", "other"])
            pod = self.pod(f"r{at}-{number}", namespace, labels, spec, size)
            pod["status"]["phase"] = "Running"
            if draw.random() < 0.2:
                self.claim(pod, namespace, zone)
            self.running.append(pod)

    def daemon_set(self, name):
        labels, own = {"daemon": name}, DAEMONS[name]
        spec = {"containers": [{"name": "main", "image": name, "resources": {"requests": {"cpu": "100m", "memory": "100Mi"}}}], **own}
        out = self.object("DaemonSet", name, "kube-system") | {"apiVersion": "apps/v1"}
        return out | {"spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}}}

    def daemon_pods(self, nodes):
        """The pods of the DaemonSets on these nodes."""
        out = []
        for name, own in DAEMONS.items() if self.daemon else ():
            for on in nodes:
                labels, host = on["metadata"]["labels"], on["metadata"]["name"]
                taints = [taint for taint in on["spec"].get("taints") or [] if taint["effect"] != "PreferNoSchedule"]
                if any(labels.get(key) != value for key, value in own.get("nodeSelector", {}).items()) or taints and not own.get("tolerations"):
                    continue
                pod = self.pod(f"{name}-{host}", "kube-system", {"daemon": name}, {"nodeName": host, **own}, (100, 100, {}))
                pod["metadata"]["ownerReferences"] = [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": name, "uid": name, "controller": True}]
                out.append(pod)
        return out

    def manifests(self):
        """The input of `stowage simulate --filename`."""
        daemons = [self.daemon_set(name) for name in DAEMONS] + self.daemon_pods(self.nodes) if self.daemon else []
        items = [*self.namespaces, *self.classes, *self.pools, *self.volumes, *self.claims, *self.csi_nodes, *self.nodes, *self.running, *daemons, *self.pods]
        return {"apiVersion": "v1", "kind": "List", "items": items}

    def replayed(self, plan):
        """The input of the replay: the cluster with the nodes of a plan."""
        pods = {f"{pod['metadata']['namespace']}/{pod['metadata']['name']}": created(pod) for pod in self.pods}
        pools = {pool["metadata"]["name"]: pool for pool in self.pools}
        nodes, csi_nodes, planned = list(self.nodes), list(self.csi_nodes), []
        for on in plan["existing"]:
            planned += [{"pod": pods[pod], "node": on["node"]} for pod in on["pods"]]
        for at, new in enumerate(plan["nodes"]):
            name = f"new-{at}"
            nodes.append(node(name, self.types[new["instanceType"]], new["zone"], new["capacityType"], pools[new["nodePool"]]))
            csi = self.object("CSINode", name) | {"apiVersion": "storage.k8s.io/v1"}
            csi_nodes.append(csi | {"spec": {"drivers": [{"name": DRIVER, "nodeID": "n", "topologyKeys": [ZONE]}]}})
            planned += [{"pod": pods[pod], "node": name} for pod in new["pods"]]
        return {
            "name": str(self.seed), "seed": self.seed, "pods": self.running + self.daemon_pods(nodes), "nodes": nodes, "namespaces": self.namespaces, "volumes": self.volumes,
            "claims": self.claims, "storageClasses": self.classes, "csiNodes": csi_nodes, "planned": planned,
        }  # fmt: skip
