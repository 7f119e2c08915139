#!/usr/bin/env python3
"""Writes a scenario: {"nodePools": [NodePool], "pods": [Pod]} in Kubernetes' own JSON. The same arguments give the same scenario.

    e2e/scenario.py KIND --pods N --seed S > scenario.json

| kind | pods |
|---|---|
| uniform | unconstrained, requests drawn per pod: nothing repeats, the worst case for grouping |
| fleet | deployments of 1 to 200 replicas, requests drawn per deployment from what clusters commonly ask for |
| spread | fleet, and most deployments spread over zones or keep replicas off each other's hosts |
| diverse | the five-way mix of Karpenter's own scheduling benchmark (generic, zone spread, host spread, zone self-affinity, host anti-affinity), a fifth each |
| mixed | spread, with deployments for arm64 only, x86 only, GPUs, much memory, or one zone |
"""

import argparse
import copy
import json
import random
import sys

ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
CPU = [50, 100, 100, 200, 250, 250, 500, 500, 1000, 1000, 2000, 4000, 7500]  # millicores
RATIO = [512, 1024, 2048, 2048, 4096, 4096, 7168, 12288]  # MiB per vCPU


def pool(spot):
    capacity_types = ["on-demand"] + (["spot"] if spot else [])
    requirements = [
        {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]},
        {"key": ZONE, "operator": "In", "values": ZONES},
        {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]},
        {"key": "karpenter.sh/capacity-type", "operator": "In", "values": capacity_types},
        {"key": "karpenter.k8s.aws/instance-category", "operator": "In", "values": ["c", "m", "r", "g"]},
        {"key": "karpenter.k8s.aws/instance-generation", "operator": "Gt", "values": ["4"]},
    ]
    node_class = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}
    template = {"spec": {"nodeClassRef": node_class, "requirements": requirements}}
    spec = {"template": template, "limits": {"cpu": "10000000", "memory": "100000000Gi"}}
    return {"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": "default"}, "spec": spec}


def pod(name, labels, millicores, mebibytes, **spec):
    extra = spec.pop("resources", {})
    resources = {"requests": {"cpu": f"{millicores}m", "memory": f"{mebibytes}Mi", **extra}, **({"limits": extra} if extra else {})}
    container = {"name": "main", "image": "app", "resources": resources}
    metadata = {"name": name, "namespace": "default", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container], **spec}, "status": {"phase": "Pending"}}


def spread(key, labels, when="DoNotSchedule"):
    return {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": when, "labelSelector": {"matchLabels": labels}}


def near(kind, key, labels):
    return {"affinity": {kind: {REQUIRED: [{"topologyKey": key, "labelSelector": {"matchLabels": labels}}]}}}


def fleet(count, draw, shape):
    """Deployments; `shape` adds constraints to the pod spec of each."""
    pods, number = [], 0
    while len(pods) < count:
        replicas = min(count - len(pods), max(1, min(200, int(draw.paretovariate(0.9) * 3))))
        millicores = draw.choice(CPU)
        mebibytes = max(64, int(millicores / 1000 * draw.choice(RATIO) / 32) * 32)
        labels, spec = {"app": f"app-{number}"}, {}
        shape(draw, labels, spec, replicas)
        if spec.pop("heavy", False):
            millicores, mebibytes = 2000, 60000
        pods += [pod(f"app-{number}-{replica}", labels, millicores, mebibytes, **copy.deepcopy(spec)) for replica in range(replicas)]
        number += 1
    return pods


def shape_spread(draw, labels, spec, replicas):
    roll = draw.random()
    if roll < 0.40:
        spec["topologySpreadConstraints"] = [spread(ZONE, labels)]
    elif roll < 0.55:
        spec["topologySpreadConstraints"] = [spread(ZONE, labels), spread(HOST, labels, "ScheduleAnyway")]
    elif roll < 0.70 and replicas <= 40:
        spec |= near("podAntiAffinity", HOST, labels)
    elif roll < 0.75:
        spec |= near("podAffinity", ZONE, labels)


def shape_mixed(draw, labels, spec, replicas):
    shape_spread(draw, labels, spec, replicas)
    roll = draw.random()
    if roll < 0.15:
        spec["nodeSelector"] = {"kubernetes.io/arch": "arm64"}
    elif roll < 0.35:
        spec["nodeSelector"] = {"kubernetes.io/arch": "amd64"}
    elif roll < 0.40 and replicas <= 20:
        spec["resources"] = {"nvidia.com/gpu": "1"}
    elif roll < 0.45:
        spec["heavy"] = True
    elif roll < 0.50 and "topologySpreadConstraints" not in spec and "affinity" not in spec:
        spec["nodeSelector"] = {ZONE: draw.choice(ZONES)}


def uniform(count, draw):
    return [pod(f"pod-{at}", {"app": f"a{at % 97}"}, draw.randint(20, 8000), draw.randint(64, 32000)) for at in range(count)]


def diverse(count, draw):
    pods, letters = [], "abcdefg"
    size = lambda: (draw.choice([100, 250, 500, 1000, 1500]), draw.choice([100, 256, 512, 1024, 2048, 4096]))
    for at in range(count):
        kind, name = at * 5 // count, f"pod-{at}"
        mine, other = {"my-label": draw.choice(letters)}, {"my-label": draw.choice(letters)}
        if kind == 0:
            pods.append(pod(name, mine, *size()))
        elif kind == 1:
            pods.append(pod(name, mine, *size(), topologySpreadConstraints=[spread(ZONE, other)]))
        elif kind == 2:
            pods.append(pod(name, mine, *size(), topologySpreadConstraints=[spread(HOST, other)]))
        elif kind == 3:
            labels = {"my-affinity": draw.choice(letters)}
            pods.append(pod(name, labels, *size(), **near("podAffinity", ZONE, labels)))
        else:
            labels = {"app": "nginx"}
            pods.append(pod(name, labels, *size(), **near("podAntiAffinity", HOST, labels)))
    return pods


KINDS = {
    "uniform": uniform,
    "fleet": lambda count, draw: fleet(count, draw, lambda *_: None),
    "spread": lambda count, draw: fleet(count, draw, shape_spread),
    "diverse": diverse,
    "mixed": lambda count, draw: fleet(count, draw, shape_mixed),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spot", action="store_true", help="the NodePool may use spot, too")
    args = parser.parse_args()
    json.dump({"nodePools": [pool(args.spot)], "pods": KINDS[args.kind](args.pods, random.Random(args.seed))}, sys.stdout)


if __name__ == "__main__":
    main()
