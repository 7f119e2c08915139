"""Objects of the end-to-end tests and the demo: a NodePool with its EC2NodeClass as written for Karpenter, and workloads with various
requests and constraints. Images do not exist, because kwok runs no containers. The same arguments return the same objects.
"""

import random

from kube import NODE_GROUP

ZONE, HOST, ARCH = "topology.kubernetes.io/zone", "kubernetes.io/hostname", "kubernetes.io/arch"
CAPACITY_TYPE = "karpenter.sh/capacity-type"
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
CPU = [50, 100, 100, 200, 250, 250, 500, 500, 1000]  # millicores that a replica requests
RATIO = [512, 1024, 2048, 2048, 4096]  # MiB per core


def node_class(name="default"):
    return {
        "apiVersion": "karpenter.k8s.aws/v1",
        "kind": "EC2NodeClass",
        "metadata": {"name": name},
        "spec": {
            "role": "KarpenterNodeRole-demo",
            "amiSelectorTerms": [{"alias": "al2023@latest"}],
            "subnetSelectorTerms": [{"tags": {"karpenter.sh/discovery": "demo"}}],
            "securityGroupSelectorTerms": [{"tags": {"karpenter.sh/discovery": "demo"}}],
        },
    }


def requirement(key, *values, operator="In"):
    return {"key": key, "operator": operator, "values": list(values)}


def system_node(name):
    """A node of a managed node group for the system's own pods."""
    resources = {"cpu": "2", "memory": "8Gi", "pods": "29"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {HOST: name, NODE_GROUP: "system"}, "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "spec": {"taints": [{"key": "CriticalAddonsOnly", "effect": "NoSchedule"}]},
        "status": {"capacity": resources, "allocatable": resources},
    }


def node_pool(name="default", consolidate_after="5s", budget="100%", capacity_types=("on-demand", "spot"), extra=(), class_name="default", labels=None):
    """A NodePool of general-purpose instances. `extra` are more requirements."""
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {
            "template": {
                "metadata": {"labels": labels or {}},
                "spec": {
                    "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": class_name},
                    "requirements": [
                        requirement("kubernetes.io/os", "linux"),
                        requirement(ZONE, *ZONES),
                        requirement(ARCH, "amd64", "arm64"),
                        requirement(CAPACITY_TYPE, *capacity_types),
                        requirement("karpenter.k8s.aws/instance-category", "c", "m", "r", "g"),
                        requirement("karpenter.k8s.aws/instance-generation", "4", operator="Gt"),
                        *extra,
                    ],
                },
            },
            "disruption": {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": consolidate_after, "budgets": [{"nodes": budget}]},
            "limits": {"cpu": "10000", "memory": "100000Gi"},
        },
    }


def namespace(name):
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def workload(space, name, replicas, cpu, memory, kind="Deployment", limits=None, annotations=None, **pod):
    """A Deployment or StatefulSet whose replicas request `cpu` millicores and `memory` MiB. `limits` are resources with a limit but
    without a request; `pod` are more fields of the pod's spec."""
    labels = {"app": name}
    resources = {"requests": {"cpu": f"{cpu}m", "memory": f"{memory}Mi"}, **({"limits": limits} if limits else {})}
    container = {"name": "main", "image": "registry.example/app:1", "resources": resources}
    spec = {"terminationGracePeriodSeconds": 5, "containers": [container], **pod}
    body = {
        "replicas": replicas,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels, "annotations": annotations or {}}, "spec": spec},
    }
    if kind == "StatefulSet":
        body |= {"serviceName": name, "podManagementPolicy": "Parallel"}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": space}, "spec": body}


def daemon_set(space, name, cpu, memory, tolerations=({"operator": "Exists"},)):
    made = workload(space, name, 1, cpu, memory, tolerations=list(tolerations))
    made["kind"] = "DaemonSet"
    del made["spec"]["replicas"]
    return made


def disruption_budget(space, name, max_unavailable=None, min_available=None):
    bound = {"maxUnavailable": max_unavailable} if min_available is None else {"minAvailable": min_available}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": space},
        "spec": {**bound, "selector": {"matchLabels": {"app": name}}},
    }


def pod(space, name, cpu, memory, annotations=None, limits=None, **spec):
    """A pod without a controller."""
    resources = {"requests": {"cpu": f"{cpu}m", "memory": f"{memory}Mi"}, **({"limits": limits} if limits else {})}
    container = {"name": "main", "image": "registry.example/app:1", "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": space, "annotations": annotations or {}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], **spec},
    }


def spread(name, key, when="DoNotSchedule"):
    return {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": when, "labelSelector": {"matchLabels": {"app": name}}}


def required_pod_term(name, key):
    return {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": key, "labelSelector": {"matchLabels": {"app": name}}}]}


def preferred_node_term(key, value):
    term = {"matchExpressions": [requirement(key, value)]}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 50, "preference": term}]}}


def plain(name):
    return {}


def zone_spread(name):
    return {"topologySpreadConstraints": [spread(name, ZONE)]}


def both_spread(name):
    return {"topologySpreadConstraints": [spread(name, ZONE), spread(name, HOST, "ScheduleAnyway")]}


def host_alone(name):
    return {"affinity": {"podAntiAffinity": required_pod_term(name, HOST)}}


def zone_together(name):
    return {"affinity": {"podAffinity": required_pod_term(name, ZONE)}}


def arm(name):
    return {"nodeSelector": {ARCH: "arm64"}}


def arm_legacy(name):
    return {"nodeSelector": {"beta.kubernetes.io/arch": "arm64"}}


def on_demand(name):
    return {"nodeSelector": {CAPACITY_TYPE: "on-demand"}}


def prefers_spot(name):
    return {"affinity": preferred_node_term(CAPACITY_TYPE, "spot")}


# Name, percentage of all pods, maximum replicas of one workload, constraints.
MIX = [
    ("spread", 18, 24, zone_spread),
    ("even", 6, 12, both_spread),
    ("alone", 5, 6, host_alone),
    ("near", 6, 10, zone_together),
    ("arm", 8, 14, arm),
    ("armold", 4, 10, arm_legacy),
    ("steady", 8, 12, on_demand),
    ("spotty", 12, 20, prefers_spot),
]


def mixed(pods, space="shop", seed=1):
    """Workloads of `pods` pods in total, and a DaemonSet: plain web servers, zone spread, host anti-affinity, zone affinity, arm64, GPU,
    memory-heavy, on-demand only, spot preferred, stateful."""
    r = random.Random(seed)
    objects = [namespace(space), daemon_set(space, "node-agent", 50, 64)]
    left = pods

    def add(name, replicas, cpu=None, memory=None, **more):
        nonlocal left
        replicas = min(replicas, left)
        if replicas > 0:
            left -= replicas
            cpu = cpu or r.choice(CPU)
            memory = memory or max(64, cpu * r.choice(RATIO) // 1000 // 32 * 32)
            objects.append(workload(space, name, replicas, cpu, memory, **more))

    add("train", max(2, pods // 120), 2000, 8192, limits={"nvidia.com/gpu": "1"})
    add("cache", max(2, pods // 40), 1000, 14336)
    add("store", max(3, pods // 25), 500, 2048, kind="StatefulSet", **zone_spread("store"))
    for prefix, share, most, shape in MIX:
        wanted, number = pods * share // 100, 0
        while wanted > 0:
            name, replicas = f"{prefix}-{number}", min(wanted, r.randint(2, most))
            add(name, replicas, **shape(name))
            wanted, number = wanted - replicas, number + 1
    number = 0
    while left > 0:
        add(f"web-{number}", r.randint(3, 30), **plain("web"))
        number += 1
    return objects


def count(objects):
    """The number of pods of these objects, without those of DaemonSets."""
    return sum(item["spec"]["replicas"] for item in objects if item["kind"] in ("Deployment", "StatefulSet")) + sum(item["kind"] == "Pod" for item in objects)


def scaled(objects, share):
    """The workloads of these objects with this fraction of their replicas, at least one each."""
    out = []
    for item in objects:
        if item["kind"] in ("Deployment", "StatefulSet"):
            out.append({**item, "spec": {**item["spec"], "replicas": max(1, int(item["spec"]["replicas"] * share))}})
    return out
