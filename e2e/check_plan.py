#!/usr/bin/env python3
"""Checks a plan against its scenario, with nothing shared with the solver that made it.

    e2e/check_plan.py --scenario S.json --plan P.json [--spot-ratio 0]

P is what `stowage simulate --output json` prints. Exit 0 and one line of figures if every pod is placed once, or listed as unschedulable, and every
placement is one that kube-scheduler would make; else exit 1 and the first twenty violations.

Checked: capacity after overhead, number of pods, requirements of the NodePool, node selectors and required node affinity, zones that are offered, prices,
required pod affinity and anti-affinity, and the final skew of required spread wherever every pod that a constraint counts carries it, too (elsewhere the
order of binding decides, and only a real kube-scheduler can tell).
"""

import argparse
import json
import math
import pathlib
import re
import sys
from collections import Counter

CATALOG = pathlib.Path(__file__).resolve().parent.parent / "src" / "cloud" / "data" / "ec2-us-east-1.json"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
LABEL = "karpenter.k8s.aws/instance-"
UNITS = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Shares of CPU that the kubelet reserves: of the millicores from the first number to the second.
RESERVED = ((0, 1000, 0.06), (1000, 2000, 0.01), (2000, 4000, 0.005), (4000, 1 << 31, 0.0025))


def instance_types(catalog=CATALOG):
    """The instance types of the embedded catalog by name, without absent facts."""
    content = json.loads(catalog.read_text())
    shared = content["shared"]
    rows = [dict(zip(content["columns"], row)) for row in content["rows"]]
    value = lambda name, cell: shared[name][cell] if name in shared else cell
    return {row["name"]: {name: value(name, cell) for name, cell in row.items() if cell is not None} for row in rows}


def quantity(text):
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text)).groups()
    return float(number) * UNITS[unit]


def requests(pod):
    total = Counter({"pods": 1})
    for container in pod["spec"]["containers"]:
        for name, amount in container.get("resources", {}).get("requests", {}).items():
            total[name] += quantity(amount)
    return total


def allocatable(of):
    """What the kubelet of an instance type offers to pods, with AL2023's reservations."""
    pods = of["enis"] * (of["ipv4PerEni"] - 1) + 2
    millicores = of["vcpu"] * 1000
    reserved = sum((min(millicores, most) - least) * share for least, most, share in RESERVED if millicores > least)
    memory = math.ceil(of["memoryMib"] * 0.925) - (11 * pods + 255) - 100
    out = {"cpu": (millicores - int(reserved)) / 1000, "memory": memory * 2**20, "pods": pods, "ephemeral-storage": 17 * 2**30}
    for gpu in of.get("gpus", []):
        out[gpu["manufacturer"].lower() + ".com/gpu"] = gpu["count"]
    if of.get("neuronDevices"):
        out["aws.amazon.com/neuron"] = sum(device["count"] for device in of["neuronDevices"])
    return out


def node_labels(node, of, host, pool):
    family, size = of["name"].split(".", 1)
    category, generation = re.match(r"([a-z]+)(\d*)", family).groups()
    own = {
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "arm64" if of["arch"][0] == "arm64" else "amd64",
        "kubernetes.io/hostname": host,
        "node.kubernetes.io/instance-type": of["name"],
        "topology.kubernetes.io/zone": node["zone"],
        "karpenter.sh/capacity-type": node["capacityType"],
        "karpenter.sh/nodepool": node["nodePool"],
        LABEL + "category": category,
        LABEL + "generation": generation,
        LABEL + "family": family,
        LABEL + "size": size,
        LABEL + "cpu": str(of["vcpu"]),
        LABEL + "memory": str(of["memoryMib"]),
        LABEL + "hypervisor": of["hypervisor"],
    }
    return own | pool["spec"]["template"].get("metadata", {}).get("labels", {})


def holds(expression, labels):
    value, operator, wanted = labels.get(expression["key"]), expression["operator"], expression.get("values", [])
    if operator in ("In", "NotIn"):
        return (value in wanted) == (operator == "In")
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    if value is None or not value.isdigit():
        return False
    value, bound = int(value), int(wanted[0])
    return {"Gt": value > bound, "Lt": value < bound, "Gte": value >= bound, "Lte": value <= bound}[operator]


def admits(pod, labels):
    """Whether the node selector and the required node affinity of a pod admit a node."""
    spec = pod["spec"]
    if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
        return False
    terms = spec.get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED, {}).get("nodeSelectorTerms")
    return terms is None or any(all(holds(one, labels) for one in term.get("matchExpressions", [])) for term in terms)


def selects(selector, pod):
    if selector is None:
        return False
    labels = pod["metadata"].get("labels", {})
    equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return equal and all(holds(one, labels) for one in selector.get("matchExpressions", []))


class Check:
    """One plan: where its pods are, and what is wrong."""

    def __init__(self, scenario, plan, spot_ratio):
        self.plan, self.spot_ratio = plan, spot_ratio
        self.types = instance_types()
        self.pools = {pool["metadata"]["name"]: pool for pool in scenario["nodePools"]}
        name = lambda pod: f"{pod['metadata'].get('namespace', 'default')}/{pod['metadata']['name']}"
        self.pods = {name(pod): pod for pod in scenario["pods"]}
        self.placed = {}  # the index into nodes of each pod
        self.nodes = []  # labels
        self.selected = {}  # pods by selector and namespaces
        self.given_up = {one["pod"] for one in plan.get("unschedulable", [])}
        self.bad = []

    def run(self):
        cost = sum(self.node(at, node) for at, node in enumerate(self.plan["nodes"]))
        self.bad += [f"{name}: lost" for name in self.pods if name not in self.placed and name not in self.given_up]
        if abs(cost - self.plan["costUsdPerHour"]) > 1e-3 * max(1, cost):
            self.bad.append(f"costUsdPerHour {self.plan['costUsdPerHour']}, sum of nodes {cost}")
        seen = set()
        for name, pod in self.pods.items():
            if name in self.placed:
                self.spread(name, pod, seen)
                self.affinity(name, pod)
        return self.bad

    def node(self, at, node):
        """Checks a node and places its pods. Returns its price."""
        of, pool, host = self.types.get(node["instanceType"]), self.pools.get(node["nodePool"]), f"node-{at}"
        if of is None or pool is None:
            self.bad.append(f"{host}: unknown type or pool {node['instanceType']} {node['nodePool']}")
            return 0
        labels = node_labels(node, of, host, pool)
        self.nodes.append(labels)
        for requirement in pool["spec"]["template"]["spec"].get("requirements", []):
            if not holds(requirement, labels):
                self.bad.append(f"{host} {of['name']}: breaks its NodePool's {requirement}")
        if node["zone"] not in of["zones"] or node["capacityType"] not in of["usageClasses"]:
            self.bad.append(f"{host}: {of['name']} is not offered as {node['capacityType']} in {node['zone']}")
        price = of.get("onDemandUsdPerHour", 0) * (self.spot_ratio if node["capacityType"] == "spot" else 1)
        if abs(price - node["priceUsdPerHour"]) > 1e-6 * max(1, price):
            self.bad.append(f"{host}: price {node['priceUsdPerHour']}, catalog {price}")
        used, room = Counter(), allocatable(of)
        for name in node["pods"]:
            if name not in self.pods:
                self.bad.append(f"{host}: unknown pod {name}")
                continue
            if name in self.placed:
                self.bad.append(f"{name}: placed twice")
            self.placed[name] = len(self.nodes) - 1
            used.update(requests(self.pods[name]))
            if not admits(self.pods[name], labels):
                self.bad.append(f"{name}: its node selector or affinity refuses {host} ({of['name']}, {node['zone']})")
        for resource, amount in used.items():
            if amount > room.get(resource, 0) * (1 + 1e-9):
                self.bad.append(f"{host} {of['name']}: {resource} {amount} over {room.get(resource, 0)}")
        if not node["pods"]:
            self.bad.append(f"{host}: empty node")
        return price

    def who(self, selector, namespaces):
        """The placed pods that a selector selects in these namespaces."""
        key = json.dumps([selector, namespaces], sort_keys=True)
        if key not in self.selected:
            here = lambda name, pod: name in self.placed and name.split("/")[0] in namespaces and selects(selector, pod)
            self.selected[key] = [name for name, pod in self.pods.items() if here(name, pod)]
        return self.selected[key]

    def spread(self, name, pod, seen):
        namespaces = [name.split("/")[0]]
        for rule in pod["spec"].get("topologySpreadConstraints", []):
            selector, key = rule.get("labelSelector"), rule["topologyKey"]
            if rule["whenUnsatisfiable"] != "DoNotSchedule" or not selects(selector, pod):
                continue
            same = json.dumps([rule, pod["spec"].get("nodeSelector"), pod["spec"].get("affinity")], sort_keys=True)
            counted = self.who(selector, namespaces)
            if same in seen or any(rule not in self.pods[other]["spec"].get("topologySpreadConstraints", []) for other in counted):
                continue
            seen.add(same)
            count = Counter({node[key]: 0 for node in self.nodes if key in node and admits(pod, node)})
            for other in counted:
                domain = self.nodes[self.placed[other]].get(key)
                if domain in count:
                    count[domain] += 1
            least = 0 if len(count) < rule.get("minDomains", 0) else min(count.values())
            skew = max(count.values()) - least
            if skew > rule["maxSkew"]:
                self.bad.append(f"{name}: {key} skew {skew} over {rule['maxSkew']}: {dict(count.most_common(4))}")

    def affinity(self, name, pod):
        own = self.nodes[self.placed[name]]
        for kind in ("podAffinity", "podAntiAffinity"):
            for term in pod["spec"].get("affinity", {}).get(kind, {}).get(REQUIRED, []):
                key, selector = term["topologyKey"], term.get("labelSelector")
                others = self.who(selector, term.get("namespaces", [name.split("/")[0]]))
                beside = [other for other in others if other != name and self.nodes[self.placed[other]].get(key) == own.get(key)]
                if kind == "podAntiAffinity" and beside:
                    self.bad.append(f"{name}: anti-affinity broken by {beside[0]} on {key}")
                # The first of a group that selects itself may be alone.
                if kind == "podAffinity" and not beside and (not selects(selector, pod) or len(others) > 1):
                    self.bad.append(f"{name}: affinity not met on {key}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", type=pathlib.Path, required=True)
    parser.add_argument("--plan", type=pathlib.Path, required=True)
    parser.add_argument("--spot-ratio", type=float, default=0)
    args = parser.parse_args()
    plan = json.loads(args.plan.read_text())
    check = Check(json.loads(args.scenario.read_text()), plan, args.spot_ratio)
    if bad := check.run():
        print(f"{len(bad)} violations", *bad[:20], sep="\n")
        sys.exit(1)
    figures = {"pods": len(check.pods), "nodes": len(plan["nodes"]), "unscheduled": len(check.given_up)}
    print(json.dumps(figures | {"costUsdPerHour": round(plan["costUsdPerHour"], 4), "solveSeconds": plan.get("solveSeconds")}))


if __name__ == "__main__":
    main()
