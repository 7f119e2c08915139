#!/usr/bin/env python3
"""Cost, time and memory of Stowage's plans compared with Karpenter's, on the same scenario files in the same run.

    benches/bench.py --binary target/release/stowage [--out target/bench] [--ours-only] [--only REGEX]

Writes `bench.md`, `choices.md` and `small.md` (the tables of docs/performance.md) and `bench.svg` to --out. Karpenter's own scheduler (a Go program)
is in a separate folder, which STOWAGE_PEERS names; without it, Karpenter is left out. e2e/check_plan.py judges every plan of Stowage of up to 10,000 pods; a
plan that it rejects ends the run with exit code 1.
"""

import argparse
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCENARIO, CHECK_PLAN = ROOT / "e2e" / "scenario.py", ROOT / "e2e" / "check_plan.py"
PEERS = pathlib.Path(os.environ.get("STOWAGE_PEERS") or ROOT.parent / "shared" / "peers")
KINDS = ["uniform", "fleet", "spread", "diverse", "mixed"]
# Kind, pods, seed, whether Karpenter runs too. The first ten are the issue's; then another size and seed of each kind.
SCENARIOS = (
    [(kind, 1_000, 7, True) for kind in KINDS]
    + [(kind, 10_000, 11, True) for kind in KINDS]
    + [(kind, 2_500, 3, True) for kind in KINDS]
    + [("fleet", 100_000, 13, False), ("mixed", 100_000, 13, False)]
)
EXISTING = 5_000
# NodePools that allow more than the scenarios' own: requirements on the instance types, options of `stowage simulate`, options of the generator.
CATEGORY, GENERATION = "karpenter.k8s.aws/instance-category", "karpenter.k8s.aws/instance-generation"
CHOICES = {
    "every type": ([], [], []),
    "c, m, r, t from generation 3 on": ([{"key": CATEGORY, "operator": "In", "values": ["c", "m", "r", "t"]}, {"key": GENERATION, "operator": "Gt", "values": ["2"]}], [], []),
    "spot": (None, ["--spot-ratio", "0.4"], ["--spot"]),
}
# Pods and seed of each kind in these rows, and of small batches.
CHOICES_PODS, CHOICES_SEED = 1_000, 7
SMALL, SMALL_SEED = [20, 100, 300], 7


# A process counts what its parent had in memory before `exec`: a small one starts the command, and prints its exit code and its peak resident set in KB.
SMALL_PARENT = """
import os, sys
quiet = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet), 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss, file=sys.stderr)
"""


def measured(command):
    """Runs a command; returns its exit code, output and peak resident set in MB."""
    parts = [sys.executable, "-S", "-E", "-c", SMALL_PARENT, *(str(part) for part in command)]
    ended = subprocess.run(parts, capture_output=True, text=True, check=True)
    code, peak = ended.stderr.split()
    return int(code), ended.stdout, int(peak) / 1024


def scenario(folder, kind, pods, seed, options=()):
    path = folder / f"{kind}-{pods}-{seed}.json"
    with path.open("w") as file:
        subprocess.run(
            [sys.executable, SCENARIO, kind, "--pods", str(pods), "--seed", str(seed), *options], stdout=file, check=True
        )
    return path


def with_types(path, requirements):
    """The scenario with other requirements on the instance types of its NodePools."""
    content = json.loads(path.read_text())
    for pool in content["nodePools"]:
        spec = pool["spec"]["template"]["spec"]
        spec["requirements"] = [one for one in spec["requirements"] if one["key"] not in (CATEGORY, GENERATION)] + requirements
    path.write_text(json.dumps(content))
    return path


def with_nodes(path, count):
    """The scenario with nodes that run two pods each and have room for a few more."""
    content = json.loads(path.read_text())
    size = {"cpu": "7910m", "memory": "29318Mi", "pods": "58", "ephemeral-storage": "17Gi"}
    content["nodes"] = []
    for at in range(count):
        name, zone = f"node-{at}", f"us-east-1{'abc'[at % 3]}"
        node_labels = {
            "kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone, "kubernetes.io/arch": "arm64",
            "kubernetes.io/os": "linux", "karpenter.sh/nodepool": "default", "karpenter.sh/capacity-type": "on-demand",
            "node.kubernetes.io/instance-type": "m7g.2xlarge",
        }
        content["nodes"].append({
            "metadata": {"name": name, "labels": node_labels}, "spec": {},
            "status": {"allocatable": size, "capacity": size},
        })
        for index in range(2):
            requests = {"cpu": f"{1000 + at % 7 * 250}m", "memory": f"{2048 + at % 5 * 1024}Mi"}
            content["pods"].append({
                "metadata": {"name": f"running-{at}-{index}", "namespace": "default", "labels": {"app": f"old-{at % 50}"}},
                "spec": {"nodeName": name, "containers": [{"name": "main", "resources": {"requests": requests}}]},
                "status": {"phase": "Running"},
            })
    out = path.with_name(f"existing-{path.name}")
    out.write_text(json.dumps(content))
    return out


def ours(binary, path, runs, options=()):
    """The plan, with the median times of so many runs, and the memory in MB at most."""
    command = [binary, "simulate", "--scenario", path, "--output", "json", *options]
    plans, memory = [], 0.0
    for _ in range(runs):
        code, text, peak = measured(command)
        # Three: some pods are left out, which the table says.
        if code not in (0, 3):
            sys.exit(f"{path.name}: stowage simulate ended with {code}")
        plans.append(json.loads(text))
        memory = max(memory, peak)
    for time in ("solveSeconds", "proveSeconds"):
        plans[-1][time] = statistics.median(plan[time] for plan in plans)
    return plans[-1], memory


def judge(path, plan, folder, options=()):
    written = folder / "plan.json"
    written.write_text(json.dumps(plan))
    checked = subprocess.run(
        [sys.executable, CHECK_PLAN, "--scenario", path, "--plan", written, *options], capture_output=True, text=True, check=False
    )
    if checked.returncode != 0:
        sys.exit(f"{path.name}: {checked.stdout}")


def build_peer(out):
    binary = out / "karpenter-peer"
    subprocess.run(["go", "build", "-o", binary, "."], cwd=PEERS / "karpenter", check=True)
    return binary


def peer(binary, path, options=()):
    catalog = PEERS.parent / "data" / "ec2-us-east-1.json"
    code, text, peak = measured([binary, "-scenario", path, "-catalog", catalog, *options])
    if code != 0:
        sys.exit(f"{path.name}: the peer ended with {code}")
    answer = json.loads(text.strip().splitlines()[-1])
    return answer, peak


def row_of(row):
    def number(value, form):
        return "–" if value is None else form.format(value)

    cost, bound, theirs = row["cost"], row["bound"], row.get("peer")
    return "| " + " | ".join([
        row["name"],
        number(cost, "{:,.2f}"),
        number(bound, "{:,.2f}"),
        number((cost / bound - 1) * 100 if bound else None, "{:.1f} %"),
        number(theirs and theirs["costUsdPerHour"], "{:,.2f}"),
        number(theirs and (cost / theirs["costUsdPerHour"] - 1) * 100, "{:+.0f} %"),
        number(row["seconds"], "{:.3f}"),
        number(row["proof"], "{:.3f}"),
        number(theirs and theirs["seconds"], "{:.2f}"),
        number(theirs and theirs["seconds"] / row["seconds"], "{:,.0f}×"),
        number(row["memory"], "{:.0f}"),
        number(row.get("peerMemory"), "{:.0f}"),
        f"{row['unscheduled']} / {theirs['unscheduled'] if theirs else '–'}",
    ]) + " |"


HEAD = """| scenario, pods, seed | USD/h | bound | gap | Karpenter USD/h | ours is | s | then proof, s | Karpenter s | faster | MB | Karpenter MB | left out, ours / theirs |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


SMALL_HEAD = """| scenario, pods | USD/h | gap | s | then proof, s | USD/h with --prove | gap | s | Karpenter USD/h | ours is | Karpenter s |
|---|---|---|---|---|---|---|---|---|---|---|"""


def small_row(name, plan, proved, theirs):
    def gap(plan):
        return "proven" if plan["optimal"] else f"{(plan['costUsdPerHour'] / plan['lowerBoundUsdPerHour'] - 1) * 100:.1f} %"

    cost, peers = plan["costUsdPerHour"], ["–", "–", "–"]
    if theirs:
        peers = [f"{theirs['costUsdPerHour']:,.2f}", f"{(cost / theirs['costUsdPerHour'] - 1) * 100:+.0f} %", f"{theirs['seconds']:.2f}"]
    ours = [f"{cost:,.2f}", gap(plan), f"{plan['solveSeconds']:.3f}", f"{plan['proveSeconds']:.3f}"]
    ours += [f"{proved['costUsdPerHour']:,.2f}", gap(proved), f"{proved['solveSeconds'] + proved['proveSeconds']:.1f}"]
    return f"| {' | '.join([name, *ours, *peers])} |"


def plot(rows):
    """Two panels of bars: cost over the bound, and seconds on a logarithmic scale."""
    wide, high, left, gap = 30, 180, 70, 16
    names = [row["name"] for row in rows]
    panel = len(rows) * (2 * wide // 2 + gap) + left
    out = []

    def bars(top, title, values, scale, ticks):
        out.append(f'<text x="{left}" y="{top - 12}" font-weight="bold">{title}</text>')
        for value, label in ticks:
            y = top + high - scale(value)
            out.append(f'<line x1="{left}" x2="{panel}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        for at, pair in enumerate(values):
            for side, (value, color) in enumerate(zip(pair, ["#1b7f5c", "#b9bec4"])):
                if value is not None:
                    x = left + at * (wide + gap) + side * wide / 2
                    tall = max(1.0, scale(value))
                    out.append(f'<rect x="{x:.1f}" y="{top + high - tall:.1f}" width="{wide / 2 - 1}" height="{tall:.1f}" fill="{color}"/>')

    over = [(row["cost"] / row["bound"] - 1, row["peer"]["costUsdPerHour"] / row["bound"] - 1) if row.get("peer") and row["bound"]
            else (row["cost"] / row["bound"] - 1 if row["bound"] else None, None) for row in rows]
    most = max([value for pair in over for value in pair if value is not None] + [0.1])
    bars(40, "Cost over the lower bound (green: Stowage, grey: Karpenter)", over, lambda v: v / most * high,
         [(share / 100, f"{share} %") for share in range(0, int(most * 100) + 1, 25)])
    seconds = [(row["seconds"], row["peer"]["seconds"] if row.get("peer") else None) for row in rows]
    low = -3
    bars(40 + high + 60, "Seconds to plan, logarithmic", seconds, lambda v: (math.log10(max(v, 1e-3)) - low) / 5 * high,
         [(10.0 ** e, f"{10.0 ** e:g} s") for e in range(low, 3)])
    bottom = 40 + 2 * high + 60
    for at, name in enumerate(names):
        x = left + at * (wide + gap) + wide / 2
        out.append(f'<text transform="translate({x:.0f},{bottom + 12}) rotate(-50)" text-anchor="end">{name}</text>')
    body = "\n".join(out)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{panel + 20}" height="{bottom + 130}" '
            f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target" / "release" / "stowage")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target" / "bench")
    parser.add_argument("--ours-only", action="store_true", help="leave Karpenter out: seconds instead of minutes")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="scenarios whose name matches")
    parser.add_argument("--runs", type=int, default=5, help="runs of ours, of which the median time counts (Karpenter runs once)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    theirs = None if args.ours_only or not (PEERS / "karpenter").exists() else build_peer(args.out)
    rows = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)

        def run(name, path, with_peer, checked, rows=rows, options=()):
            plan, memory = ours(args.binary, path, args.runs, options)
            if checked:
                judge(path, plan, folder, options)
            row = {"name": name, "cost": plan["costUsdPerHour"], "bound": plan["lowerBoundUsdPerHour"], "seconds": plan["solveSeconds"],
                   "proof": plan["proveSeconds"], "memory": memory, "unscheduled": len(plan["unschedulable"])}
            if theirs and with_peer:
                row["peer"], row["peerMemory"] = peer(theirs, path, [option.replace("--", "-") for option in options])
            rows.append(row)
            print(row_of(row), flush=True)
            path.unlink()

        for kind, pods, seed, with_peer in SCENARIOS:
            name = f"{kind} {pods:,} seed {seed}"
            if args.only.search(name):
                # Beyond 10,000 pods the checker would take hours.
                run(name, scenario(folder, kind, pods, seed), with_peer, checked=pods <= 10_000)
        choices = []
        for choice, (requirements, options, generated) in CHOICES.items():
            for kind in KINDS:
                name = f"{kind}, {choice}"
                if not args.only.search(name):
                    continue
                path = scenario(folder, kind, CHOICES_PODS, CHOICES_SEED, generated)
                path = path if requirements is None else with_types(path, requirements)
                run(name, path, with_peer=True, checked=True, rows=choices, options=options)
        print(SMALL_HEAD, flush=True)
        small = []
        for kind in KINDS:
            for pods in SMALL:
                name = f"{kind} {pods}"
                if not args.only.search(name):
                    continue
                path = scenario(folder, kind, pods, SMALL_SEED)
                plan, _ = ours(args.binary, path, args.runs)
                judge(path, plan, folder)
                proved, _ = ours(args.binary, path, 1, ["--prove"])
                judge(path, proved, folder)
                small.append(small_row(name, plan, proved, peer(theirs, path)[0] if theirs else None))
                print(small[-1], flush=True)
        name = f"fleet 10,000 seed 11 onto {EXISTING:,} nodes"
        if args.only.search(name):
            # The checker and the peer know no running nodes. The last row: the size of this process, which its children begin with, grows.
            run(name, with_nodes(scenario(folder, "fleet", 10_000, 11), EXISTING), False, checked=False)
    (args.out / "choices.md").write_text("\n".join([HEAD, *map(row_of, choices)]) + "\n")
    (args.out / "small.md").write_text("\n".join([SMALL_HEAD, *small]) + "\n")
    (args.out / "bench.md").write_text("\n".join([HEAD, *map(row_of, rows)]) + "\n")
    (args.out / "bench.svg").write_text(plot(rows))
    print(f"\nwritten: {args.out / 'bench.md'} and {args.out / 'bench.svg'}")


if __name__ == "__main__":
    main()
