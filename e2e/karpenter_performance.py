#!/usr/bin/env python3
"""Karpenter's own end-to-end suite "performance" (e2e/karpenter-suites) against Stowage with simulated EC2, or against Karpenter with its kwok provider.

    karpenter_performance.py run stowage --out S.jsonl [--focus REGEX]
    karpenter_performance.py run karpenter --out K.jsonl [--focus REGEX]
    karpenter_performance.py table S.jsonl K.jsonl

Each spec runs with a new process in an empty control plane, both with the instance types and prices of the embedded catalog. The suite measures times,
nodes and utilization, this program the CPU time and the largest memory of the process, when the last node of a phase came or left, and what the nodes
cost. Without the release build in STOWAGE_BIN the comparison is unfair. Run it on an otherwise idle machine.
"""

import argparse
import concurrent.futures
import datetime
import json
import pathlib
import re
import sys
import tempfile
import threading
import time

import kubernetes
import urllib3.exceptions

import guard
import harness
import karpenter_suites
import kwok_types
from kube import INSTANCE_TYPE
from processes import usage

LIMIT = 2400  # seconds of a spec
MEMORY_PERIOD = 0.5  # seconds between two samples of the memory
NODES_PERIOD = 5  # seconds between two lists of the nodes
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
# Seconds until the garbage collector of Kubernetes has found new kinds, which it looks for every 30 s. Until then it reads the NodePool and the
# NodeClaim of each new node again and again: a load that no cluster has in which the CRDs are older.
KINDS_KNOWN = 35


class Sampler:
    """Calls a function every `period` seconds during a block. What it raises is raised at the end of the block."""

    def __init__(self, period, sample):
        self.period, self.sample, self.ends = period, sample, threading.Event()
        self.pool = concurrent.futures.ThreadPoolExecutor(1)

    def loop(self):
        while not self.ends.wait(self.period):
            self.sample()

    def __enter__(self):
        self.done = self.pool.submit(self.loop)
        return self

    def __exit__(self, *_):
        self.ends.set()
        with self.pool:
            self.done.result()


class Meter(Sampler):
    """CPU seconds and largest resident MiB of a process during a block."""

    def __init__(self, pid):
        super().__init__(MEMORY_PERIOD, self.measure)
        self.pid = pid
        self.cpu, self.peak = usage(pid)

    def measure(self):
        self.peak = max(self.peak, usage(self.pid)[1])

    def __exit__(self, *failure):
        super().__exit__(*failure)
        self.cpu = usage(self.pid)[0] - self.cpu


class Fleet(Sampler):
    """The nodes during a block: `changes`, pairs of a time (seconds since 1970) at which nodes came or left and what they then cost (USD per hour)."""

    def __init__(self, api):
        super().__init__(NODES_PERIOD, self.observe)
        self.api, self.prices, self.nodes, self.changes = api, kwok_types.prices(), set(), []

    def observe(self):
        """Where the API server does not answer, the next list shows what changed."""
        try:
            # Of an empty list the items are null.
            listed = self.api.request("get", "/api/v1/nodes", header_params={"Accept": METADATA}, resource_version="0")["items"] or []
        except (kubernetes.client.ApiException, urllib3.exceptions.HTTPError):
            return
        nodes = {node["metadata"]["uid"] for node in listed}
        if nodes != self.nodes:
            self.nodes = nodes
            usd = sum(self.prices[node["metadata"]["labels"][INSTANCE_TYPE]] for node in listed)
            self.changes.append((round(time.time(), 1), round(usd, 3)))


def run(subject, focus, out):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="karpenter-performance-"))
    suite = karpenter_suites.compiled("performance", subject, folder)
    types = kwok_types.kwok_types(karpenter_suites.CATEGORIES, karpenter_suites.BELOW_CPU)
    with harness.ControlPlane() as plane:
        for spec in (spec for spec in suite.specs() if re.search(focus, spec)):
            with karpenter_suites.running(subject, plane, folder, types) as running:
                time.sleep(KINDS_KNOWN)
                with Meter(running.process.pid) as meter, Fleet(plane.api) as fleet:
                    seconds, why = suite.run(spec, plane.dir / "kubeconfig", LIMIT)
            reports = [json.loads(file.read_text()) for file in sorted(suite.reports.glob("*_performance_report.json"))]
            measured = {"cpu": round(meter.cpu, 1), "peak": round(meter.peak), "fleet": fleet.changes}
            result = {"spec": spec, "seconds": round(seconds, 1), "why": why, **measured, "reports": reports}
            with open(out, "a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{subject}: {spec}: {why or 'passed'} after {seconds:.0f} s, {meter.cpu:.1f} CPU seconds, {meter.peak:.0f} MiB", flush=True)


def phases(result):
    """The reports of a spec by the test's name, oldest first."""
    return {report["test_name"]: report for report in sorted(result["reports"], key=lambda report: report["timestamp"])}


def settled(report, fleet):
    """Of a phase, the seconds from its begin to the last time at which a node came or left, and the USD per hour of its nodes from then on; as text."""
    end = datetime.datetime.fromisoformat(report["timestamp"]).timestamp()
    begin = end - report["total_time"] / 1e9
    within = [(at - begin, usd) for at, usd in fleet if begin < at <= end]
    return (f"{within[-1][0]:.0f} s", f"{within[-1][1]:.2f}") if within else ("–", "–")


def cells(report, fleet):
    """Time by the report, and until the nodes settled; nodes, USD per hour, reserved CPU and memory, rounds."""
    if report is None:
        return ["–"] * 6
    last, usd = settled(report, fleet)
    reserved = f"{report['total_reserved_cpu_utilization']:.0%} / {report['total_reserved_memory_utilization']:.0%}"
    return [f"{report['total_time'] / 1e9:.0f} s", last, str(report["total_nodes"]), usd, reserved, str(report["rounds"])]


def table(ours, peers):
    """Two runs as Markdown: a row for each phase of a spec, each figure as `Stowage, Karpenter`."""
    lines = ["| phase | time | nodes settled after | nodes | USD/h | reserved CPU / memory | rounds |", "|---|---|---|---|---|---|---|"]
    for spec in {**ours, **peers}:
        both = [results.get(spec) for results in (ours, peers)]
        known = [phases(result) if result else {} for result in both]
        fleets = [result["fleet"] if result else [] for result in both]
        for name in {**known[0], **known[1]}:
            columns = zip(*(cells(one.get(name), fleet) for one, fleet in zip(known, fleets)))
            lines.append(f"| {name} | " + " | ".join(", ".join(pair) for pair in columns) + " |")
        states = [f"{karpenter_suites.cell(result)}, {result['cpu']:.0f} CPU seconds, {result['peak']} MiB" if result else "not run" for result in both]
        lines.append(f"| {spec} | {'; '.join(states)} | | | | | |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="run the specs, add the results to a file")
    one.add_argument("subject", choices=["stowage", karpenter_suites.KARPENTER])
    one.add_argument("--focus", default="", help="a regular expression of the names of specs (default: all)")
    one.add_argument("--out", type=pathlib.Path, required=True)
    two = commands.add_parser("table", help="print two files side by side")
    two.add_argument("files", nargs=2, type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        print(table(*map(karpenter_suites.results, arguments.files)))
        return 0
    with guard.guarded_directory():
        run(arguments.subject, arguments.focus, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
