#!/usr/bin/env python3
"""Time, memory and cost of plans for hostile inputs, as a Markdown table.

    worst_cases.py --binary target/release/stowage [--before OTHER] [--only NAME,…] [--keep FOLDER]

Each input is planned by `stowage simulate`, once. Seconds are those of the plan, without reading the input; MB is the largest resident set.
With --before the same for another binary. A plan that takes more than --limit seconds is ended.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import tempfile
import time

ZONE, HOST, RACK = "topology.kubernetes.io/zone", "kubernetes.io/hostname", "example.com/rack"
TYPE, FAMILY = "node.kubernetes.io/instance-type", "karpenter.k8s.aws/instance-family"
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
CATALOG = pathlib.Path(__file__).resolve().parent.parent / "src" / "cloud" / "data" / "ec2-us-east-1.json"


def pool(name="default", *requirements, **spec):
    """A NodePool of every on-demand type in three zones."""
    requirements = [
        {"key": ZONE, "operator": "In", "values": ZONES},
        {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
        {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]},
        *requirements,
    ]
    template = {"nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}, "requirements": requirements}
    return {"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": name}, "spec": {"template": {"spec": template}, **spec}}


def pod(name, cpu, memory, labels=None, **spec):
    """A pod that requests CPU in millicores and memory in MiB."""
    containers = [{"name": "main", "image": "app", "resources": {"requests": {"cpu": f"{cpu}m", "memory": f"{memory}Mi"}}}]
    metadata = {"name": name, "namespace": "default", "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers, **spec}, "status": {"phase": "Pending"}}


def node_affinity(*expressions):
    terms = [{"matchExpressions": list(expressions)}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def among(key, values):
    return {"key": key, "operator": "In", "values": values}


def pod_term(kind, key, labels):
    return {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": key, "labelSelector": {"matchLabels": labels}}]}}


def spread(key, labels):
    return {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": labels}}


def size(draw):
    return draw.choice([100, 250, 500, 1000, 2000, 4000]), draw.choice([256, 512, 1024, 2048, 4096, 8192])


def type_lists(draw, types):
    """200 pods, each with 400 instance types of its own choice."""
    pods = [pod(f"p{at}", *size(draw), affinity=node_affinity(among(TYPE, sorted(draw.sample(types, 400))))) for at in range(200)]
    return [pool()], pods


def affinities(draw, types):
    """3,000 pods, each with a node affinity of its own."""
    excluded = lambda: {"key": TYPE, "operator": "NotIn", "values": sorted(draw.sample(types, 3))}
    return [pool()], [pod(f"p{at}", *size(draw), affinity=node_affinity(excluded())) for at in range(3000)]


def racks(draw, types):
    """2,000 pods spread over 3,000 racks."""
    labels = {"app": "wide"}
    pods = [pod(f"p{at}", 500, 1024, labels, topologySpreadConstraints=[spread(RACK, labels)]) for at in range(2000)]
    return [pool("default", among(RACK, [f"rack-{at}" for at in range(3000)]))], pods


def host_pairs(draw, types):
    """1,000 pairs of pods that share a node."""
    pods = []
    for at in range(1000):
        labels, (cpu, memory) = {"pair": str(at)}, size(draw)
        pods.append(pod(f"leader{at}", cpu, memory, labels))
        pods.append(pod(f"follower{at}", 100, 128, affinity=pod_term("podAffinity", HOST, labels)))
    return [pool()], pods


def node_pools(draw, types):
    """1,000 NodePools with labels of their own, 200 pods."""
    pools = [pool(f"pool-{at}") for at in range(1000)]
    for at, one in enumerate(pools):
        one["spec"]["template"]["metadata"] = {"labels": {"team": f"team-{at}"}}
    return pools, [pod(f"p{at}", *size(draw)) for at in range(200)]


def tenants(draw, types):
    """200 pods of 200 tenants, on a NodePool that lets pods choose the value of a label."""
    pods = [pod(f"p{at}", *size(draw), nodeSelector={"tenant": f"t{at}"}) for at in range(200)]
    return [pool("default", {"key": "tenant", "operator": "Exists"})], pods


def sizes(draw, types):
    """10,000 pods of 10,000 sizes and 1,000 node affinities."""
    lists = [sorted(draw.sample(types, 300)) for _ in range(1000)]
    request = lambda: (draw.randint(50, 8000), draw.randint(64, 32000))
    return [pool()], [pod(f"p{at}", *request(), affinity=node_affinity(among(TYPE, lists[at % 1000]))) for at in range(10000)]


def everything(draw, types):
    """10,000 pods, 1,000 node constraints, 200 NodePools, 100 spread selectors."""
    families = sorted({name.split(".")[0] for name in types})
    pools = [pool(f"pool-{at}", among(FAMILY, sorted(draw.sample(families, 60))), weight=draw.randint(1, 3)) for at in range(200)]
    constraints = [node_affinity(among(FAMILY, sorted(draw.sample(families, 40)))) for _ in range(1000)]
    pods = []
    for at in range(10000):
        labels = {"app": f"app-{at % 100}"}
        pods.append(pod(f"p{at}", *size(draw), labels, affinity=constraints[at % 1000], topologySpreadConstraints=[spread(ZONE, labels)]))
    return pools, pods


CASES = [type_lists, affinities, racks, host_pairs, node_pools, tenants, sizes, everything]


def measure(binary, scenario, limit):
    """Seconds of the plan, MB, cost, nodes and pods left out; or why there are none."""
    command = [binary, "simulate", "--scenario", scenario, "--output", "json"]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + limit
        while True:
            found, status, usage = os.wait4(process.pid, os.WNOHANG)
            if found:
                break
            if time.monotonic() > deadline:
                process.kill()
                os.wait4(process.pid, 0)
                return [f"> {limit}", "", "", "", ""]
            time.sleep(0.01)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 3):
            return [f"exit {process.returncode}", "", "", "", ""]
        out.seek(0)
        plan = json.load(out)
    figures = plan["solveSeconds"], usage.ru_maxrss / 1024, plan["costUsdPerHour"]
    bound = plan.get("lowerBoundUsdPerHour") or 0
    gap = f"{100 * (plan['costUsdPerHour'] / bound - 1):.1f} %" if bound else "–"
    return [f"{figures[0]:.2f}", f"{figures[1]:.0f}", f"{figures[2]:.2f}", gap, str(len(plan["unschedulable"]))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--before")
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("--limit", type=int, default=120)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    # The name is the first column.
    types = sorted(row[0] for row in json.loads(CATALOG.read_text())["rows"])
    binaries = [binary for binary in (args.before, args.binary) if binary]
    head = ["s", "MB", "USD/h", "gap", "left out"]
    print("| input |", " | ".join(f"{name} {when}".strip() for when in (["before", "after"] if args.before else [""]) for name in head), "|")
    print("|---|" + "---|" * len(head) * len(binaries))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in CASES:
            if args.only and case.__name__ not in args.only.split(","):
                continue
            pools, pods = case(random.Random(args.seed), types)
            scenario = folder / f"{case.__name__}.json"
            scenario.write_text(json.dumps({"nodePools": pools, "pods": pods}))
            figures = [figure for binary in binaries for figure in measure(binary, scenario, args.limit)]
            print(f"| {case.__doc__.rstrip('.')} |", " | ".join(figures), "|", flush=True)


if __name__ == "__main__":
    main()
