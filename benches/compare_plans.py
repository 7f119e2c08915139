#!/usr/bin/env python3
"""Compares the plans of two binaries on generated scenarios: a refactor must change no plan.

    benches/compare_plans.py OLD NEW [--kinds KIND...] [--pods N...] [--seeds S...] [--save FOLDER]

Each scenario runs through `stowage simulate --output json` of both binaries. Everything in the two plans must be equal, in the same
order, except the elapsed time. The exit code is 1 if any plan differs, 2 if a plan could not be made. OLD may also be a folder that an
earlier run wrote with `--save`: then the old binary is no longer needed.

Kinds are those of the scenario generator, and three variants: `mixed-spot` adds spot offerings at 40 % of the on-demand price,
`mixed-limit` limits the NodePool so that pods are left out, with their reasons, and `fleet-nodes` adds running nodes, twice as many as
pods and at most 5,000.
"""

import argparse
import gzip
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import bench



def limited(path, pods):
    """The scenario with a NodePool that may hold a tenth of a core per pod."""
    content = json.loads(path.read_text())
    for pool in content["nodePools"]:
        pool["spec"]["limits"] = {"cpu": str(pods // 10)}
    path.write_text(json.dumps(content))
    return path


# Kind -> (kind of the generator, options of the generator, options of `stowage simulate`, change of the scenario).
KINDS = {kind: (kind, [], [], None) for kind in bench.KINDS} | {
    "mixed-spot": ("mixed", ["--spot"], ["--spot-ratio", "0.4"], None),
    "mixed-limit": ("mixed", [], [], limited),
    "fleet-nodes": ("fleet", [], [], lambda path, pods: bench.with_nodes(path, min(2 * pods, bench.EXISTING))),
}
PLANNED = (0, 3)  # exit codes of `stowage simulate` that come with a plan: all pods fit, some do not
ELAPSED = "solveSeconds", "proveSeconds"


class Failure(Exception):
    """A plan that could not be made. The message says which command failed and how."""


def make_scenario(folder, kind, pods, seed):
    """Writes a scenario; returns its path and the further options of `stowage simulate`."""
    generated, options, simulate, change = KINDS[kind]
    path = folder / f"{kind}.json"
    with path.open("w") as file:
        command = [sys.executable, bench.SCENARIO, generated, "--pods", str(pods), "--seed", str(seed), *options]
        subprocess.run(command, stdout=file, check=True)
    return (change(path, pods) if change else path), simulate


def plan_of(binary, path, options):
    """The plan of a binary and the seconds its process took. The exit code is part of the plan."""
    begin = time.monotonic()
    command = [binary, "simulate", "--scenario", path, "--output", "json", *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    seconds = time.monotonic() - begin
    if done.returncode not in PLANNED:
        raise Failure(f"{binary}: `stowage simulate` ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    plan = json.loads(done.stdout)
    if ELAPSED[0] not in plan:
        raise Failure(f"{binary}: the plan has no {ELAPSED[0]}: is this the output of `stowage simulate --output json`?")
    for time_of in ELAPSED:
        plan.pop(time_of, None)
    return {"exitCode": done.returncode, **plan}, seconds


def old_plan(old, name, path, options):
    """The plan of the old binary, or the plan saved under this name."""
    if not old.is_dir():
        return plan_of(old, path, options)
    file = old / f"{name}.json.gz"
    if not file.exists():
        raise Failure(f"{old} has no plan {file.name}: save it with --save by the old binary")
    with gzip.open(file, "rt") as content:
        return json.load(content), None


def first_difference(old, new, at=""):
    """Path of the first difference and both values, or None. Numbers are compared exactly."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            where = f"{at}.{key}" if at else key
            if key not in new:
                return where, old[key], "absent"
            if key not in old:
                return where, "absent", new[key]
            if found := first_difference(old[key], new[key], where):
                return found
        return None
    if isinstance(old, list) and isinstance(new, list):
        for index, (one, other) in enumerate(zip(old, new)):
            if found := first_difference(one, other, f"{at}[{index}]"):
                return found
        return None if len(old) == len(new) else (f"length of {at}", len(old), len(new))
    # 1 == 1.0 == True in Python, but not in a plan.
    return None if old == new and type(old) is type(new) else (at, old, new)


def short(value):
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


HEAD = "| scenario, pods, seed | new nodes | pods placed | left out | USD/h | bound | old s | new s | plans |\n|---|---|---|---|---|---|---|---|---|"


def row_of(name, plan, seconds, equal):
    """A row of the table; figures are those of the new plan."""
    times = ["–" if value is None else f"{value:.2f}" for value in seconds]
    placed = sum(len(node["pods"]) for node in [*plan["nodes"], *plan["existing"]])
    bound = plan["lowerBoundUsdPerHour"]
    figures = [
        f"{len(plan['nodes']):,}",
        f"{placed:,}",
        f"{len(plan['unschedulable']):,}",
        f"{plan['costUsdPerHour']:,.4f}",
        "–" if bound is None else f"{bound:,.4f}",
    ]
    return "| " + " | ".join([name, *figures, *times, "equal" if equal else "DIFFERENT"]) + " |"


def compare(args, folder):
    """Compares all scenarios; returns the names of those that differ."""
    different = []
    print(HEAD, flush=True)
    for pods in args.pods:
        for kind in args.kinds:
            for seed in args.seeds:
                name = f"{kind}-{pods}-{seed}"
                path, options = make_scenario(folder, kind, pods, seed)
                old, old_seconds = old_plan(args.old, name, path, options)
                if args.save:
                    with gzip.open(args.save / f"{name}.json.gz", "wt") as file:
                        json.dump(old, file)
                new, new_seconds = plan_of(args.new, path, options)
                found = first_difference(old, new)
                print(row_of(f"{kind} {pods:,} seed {seed}", new, (old_seconds, new_seconds), found is None), flush=True)
                if found:
                    where, before, after = found
                    different.append(name)
                    print(f"\n{name}: first difference at {where}\n  old: {short(before)}\n  new: {short(after)}\n", flush=True)
    return different


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path, help="the old binary, or a folder of saved plans")
    parser.add_argument("new", type=pathlib.Path, help="the new binary")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=f"kinds of scenarios (default: all of {', '.join(KINDS)})")
    parser.add_argument("--pods", nargs="+", type=int, default=[1_000, 10_000], metavar="N", help="sizes of scenarios (default: 1000 10000)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[7, 11], metavar="S", help="seeds of the generator (default: 7 11)")
    parser.add_argument("--save", type=pathlib.Path, metavar="FOLDER", help="write the plans of OLD here, to be used as OLD later")
    args = parser.parse_args()
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            different = compare(args, pathlib.Path(folder))
    except (Failure, OSError) as failure:
        print(f"compare_plans: {failure}", file=sys.stderr)
        return 2
    print(f"\n{len(different)} plans differ: {', '.join(different)}" if different else "\nall plans are equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
