#!/usr/bin/env python3
"""What planning a burst as it arrives costs, compared with one plan of the whole burst, on the scenarios of bench.py.

    benches/arrivals.py --binary target/release/stowage [--seconds 6] [--deadline 1] [--tick SECONDS] [--by-workload] [--only REGEX]

The pods arrive in random order, or one workload after the other, evenly over --seconds. When the first of them has waited for --deadline seconds, all that have arrived are planned, on the
nodes of earlier plans where they have room. The new nodes are purchased that have a pod that would wait longer than --deadline if the next plan came after --tick seconds: by default a quarter
of --deadline, as in the service; with 0, all new nodes. The pods of the others are planned again. Unlike in the service, nodes that others depend on by pod affinity may come later. Prints a
table in Markdown.
"""

import argparse
import json
import math
import pathlib
import random
import re
import sys
import tempfile

import bench

TABLE = bench.ROOT / "tests" / "data" / "instance-types.txt"
RESOURCES = ["cpu", "memory", "ephemeral-storage"]
MEAN_GOAL, WORST_GOAL = 1.5, 3.0  # percent


def types():
    """The columns of each instance type in the table of the tests."""
    header, *lines = [line.split(" ") for line in TABLE.read_text().splitlines()]
    return {line[0]: {name: value for name, value in zip(header, line) if value != "-"} for line in lines}


def node(name, planned, entry, pool):
    """A planned node as a Node that has just registered."""
    allocatable = {resource: entry[f"allocatable.{resource}"] for resource in RESOURCES} | {"pods": entry["pods"]}
    devices = {resource: value for resource, value in entry.items() if "/" in resource and ".k8s.aws/" not in resource and "kubernetes.io/" not in resource}
    labels = {label: value for label, value in entry.items() if label.startswith("karpenter.k8s.aws/") or "kubernetes.io/" in label}
    labels |= pool["spec"]["template"].get("metadata", {}).get("labels", {})
    labels |= {
        "kubernetes.io/hostname": name,
        "topology.kubernetes.io/zone": planned["zone"],
        "karpenter.sh/capacity-type": planned["capacityType"],
        "karpenter.sh/nodepool": planned["nodePool"],
    }
    taints = pool["spec"]["template"]["spec"].get("taints", [])
    allocatable |= devices
    return {"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}, "status": {"allocatable": allocatable, "capacity": allocatable}}


class Replay:
    """The cluster that grows while the pods of a scenario arrive."""

    def __init__(self, binary, scenario, folder):
        self.binary, self.folder, self.types = binary, folder, types()
        self.scenario = {**scenario, "pods": [], "nodes": list(scenario.get("nodes", []))}
        self.pools = {pool["metadata"]["name"]: pool for pool in scenario["nodePools"]}
        self.waiting, self.failed, self.arrived, self.cost, self.purchased = {}, {}, {}, 0.0, 0
        self.plans, self.slowest, self.waits = 0, 0.0, []

    def arrive(self, pod, now):
        key = f"{pod['metadata'].get('namespace', 'default')}/{pod['metadata']['name']}"
        self.waiting[key], self.arrived[key] = pod, now

    def plan(self, now, since=math.inf, is_over=False):
        """Plans the pods that wait, and carries the plan out: its new nodes with a pod that arrived at `since` or before."""
        path = self.folder / "arrived.json"
        path.write_text(json.dumps(self.scenario | {"pods": self.scenario["pods"] + list(self.waiting.values())}))
        plan, _ = bench.ours(self.binary, path, 1)
        self.slowest, self.plans = max(self.slowest, plan["solveSeconds"]), self.plans + 1
        if not is_over:
            self.failed |= {left["pod"]: self.waiting.pop(left["pod"]) for left in plan["unschedulable"]}
        for found in plan["existing"]:
            self.bind(found["pods"], found["node"])
        for planned in plan["nodes"]:
            if min(self.arrived[key] for key in planned["pods"]) > since:
                continue
            self.waits += [now - self.arrived[key] for key in planned["pods"]]
            name = f"planned-{self.purchased}"
            self.purchased += 1
            self.cost += planned["priceUsdPerHour"]
            self.scenario["nodes"].append(node(name, planned, self.types[planned["instanceType"]], self.pools[planned["nodePool"]]))
            self.bind(planned["pods"], name)

    def bind(self, keys, name):
        for key in keys:
            pod = self.waiting.pop(key)
            self.scenario["pods"].append({**pod, "spec": {**pod["spec"], "nodeName": name}, "status": {"phase": "Running"}})

    def run(self, pods, seconds, deadline, tick):
        """Lets the pods arrive, and plans them."""
        for at, pod in enumerate(pods):
            now = (at + 1) * seconds / len(pods)
            self.arrive(pod, now)
            oldest = self.arrived[next(iter(self.waiting))]
            if now < seconds and now - oldest >= deadline:
                self.plan(now, oldest + tick if tick else math.inf)
        self.waiting |= self.failed
        before = None
        # Pods whose spread counts others may have to wait until those have a node.
        while self.waiting and len(self.waiting) != before:
            before = len(self.waiting)
            self.plan(seconds, is_over=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=6.0, help="over which the pods arrive")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds that the first pod of a batch waits")
    parser.add_argument("--tick", type=float, help="seconds until the next plan; 0: all new nodes are purchased (default: a quarter of --deadline)")
    parser.add_argument("--by-workload", action="store_true", help="one workload after the other, in random order")
    parser.add_argument("--only", default="", help="regular expression that the name of a scenario has to match")
    args = parser.parse_args()
    tick = args.deadline / 4 if args.tick is None else args.tick
    more, waits = [], []
    print(f"| pods that arrive over {args.seconds:g} s | one plan, USD/h | as they arrive, USD/h | more | nodes | plans | slowest, s | mean wait, s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for kind, count, seed, with_peer in bench.SCENARIOS:
            title = f"{kind} {count:,} seed {seed}"
            if not with_peer or not re.search(args.only, title):
                continue
            path = bench.scenario(folder, kind, count, seed)
            scenario = json.loads(path.read_text())
            whole, _ = bench.ours(args.binary, path, 1)
            pods = random.Random(seed).sample(scenario["pods"], len(scenario["pods"]))
            if args.by_workload:
                first = {}
                pods.sort(key=lambda pod: first.setdefault(json.dumps(pod["metadata"].get("labels")), len(first)))
            replay = Replay(args.binary, scenario, folder)
            replay.run(pods, args.seconds, args.deadline, tick)
            left = len(whole["unschedulable"])
            if len(replay.waiting) != left:
                sys.exit(f"{title}: {len(replay.waiting)} pods are left over, {left} of one plan")
            more.append(100 * (replay.cost / whole["costUsdPerHour"] - 1))
            figures = [f"{whole['costUsdPerHour']:.2f}", f"{replay.cost:.2f}", f"{more[-1]:+.1f} %", f"{len(whole['nodes'])} / {replay.purchased}"]
            waits.append(sum(replay.waits) / len(replay.waits))
            figures += [str(replay.plans), f"{replay.slowest:.2f}", f"{waits[-1]:.2f}"]
            print(f"| {title} | {' | '.join(figures)} |", flush=True)
    if more:
        print(f"\nmore on average {sum(more) / len(more):.1f} % (goal: at most {MEAN_GOAL} %), at worst {max(more):.1f} % (at most {WORST_GOAL} %); mean wait for a new node's purchase {sum(waits) / len(waits):.2f} s")


if __name__ == "__main__":
    main()
