#!/usr/bin/env python3
"""Karpenter's own end-to-end suite "performance" (e2e/karpenter-suites) against Stowage with simulated EC2, or against Karpenter with its kwok provider.

    karpenter_performance.py run stowage --out S.jsonl [--focus REGEX]
    karpenter_performance.py run karpenter --out K.jsonl [--focus REGEX]
    karpenter_performance.py table S.jsonl K.jsonl

Each spec runs with a new process in an empty control plane; the suite measures times, nodes and utilization, this program the CPU time and the largest
memory of the process. Without the release build in STOWAGE_BIN the comparison is unfair. Run it on an otherwise idle machine.
"""

import argparse
import json
import pathlib
import re
import sys
import tempfile
import threading
import time

import guard
import harness
import karpenter_suites
from processes import usage

LIMIT = 2400  # seconds of a spec
PERIOD = 0.5  # seconds between two samples of the memory
# Seconds until the garbage collector of Kubernetes has found new kinds, which it looks for every 30 s. Until then it reads the NodePool and the
# NodeClaim of each new node again and again: a load that no cluster has in which the CRDs are older.
KINDS_KNOWN = 35


class Meter:
    """CPU seconds and largest resident MiB of a process during a block."""

    def __init__(self, pid):
        self.pid, self.ends = pid, threading.Event()
        self.cpu, self.peak = 0.0, 0.0
        self.thread = threading.Thread(target=self.sample)

    def sample(self):
        while not self.ends.wait(PERIOD):
            self.peak = max(self.peak, usage(self.pid)[1])

    def __enter__(self):
        self.cpu, self.peak = usage(self.pid)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()
        self.cpu = usage(self.pid)[0] - self.cpu


def run(subject, focus, out):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="karpenter-performance-"))
    suite = karpenter_suites.compiled("performance", subject, folder)
    with harness.ControlPlane() as plane:
        for spec in (spec for spec in suite.specs() if re.search(focus, spec)):
            with karpenter_suites.running(subject, plane, folder) as running:
                time.sleep(KINDS_KNOWN)
                with Meter(running.process.pid) as meter:
                    seconds, why = suite.run(spec, plane.dir / "kubeconfig", LIMIT)
            reports = [json.loads(file.read_text()) for file in sorted(suite.reports.glob("*_performance_report.json"))]
            result = {"spec": spec, "seconds": round(seconds, 1), "why": why, "cpu": round(meter.cpu, 1), "peak": round(meter.peak), "reports": reports}
            with open(out, "a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{subject}: {spec}: {why or 'passed'} after {seconds:.0f} s, {meter.cpu:.1f} CPU seconds, {meter.peak:.0f} MiB", flush=True)


def phases(result):
    """The reports of a spec by the test's name, oldest first."""
    return {report["test_name"]: report for report in sorted(result["reports"], key=lambda report: report["timestamp"])}


def cells(report):
    """Time, nodes, reserved CPU and memory, rounds."""
    if report is None:
        return ["–"] * 4
    reserved = f"{report['total_reserved_cpu_utilization']:.0%} / {report['total_reserved_memory_utilization']:.0%}"
    return [f"{report['total_time'] / 1e9:.0f} s", str(report["total_nodes"]), reserved, str(report["rounds"])]


def table(ours, peers):
    """Two runs as Markdown: a row for each phase of a spec, each figure as `Stowage, Karpenter`."""
    lines = ["| phase | time | nodes | reserved CPU / memory | rounds |", "|---|---|---|---|---|"]
    for spec in {**ours, **peers}:
        both = [results.get(spec) for results in (ours, peers)]
        known = [phases(result) if result else {} for result in both]
        for name in {**known[0], **known[1]}:
            columns = zip(*(cells(one.get(name)) for one in known))
            lines.append(f"| {name} | " + " | ".join(", ".join(pair) for pair in columns) + " |")
        states = [f"{karpenter_suites.cell(result)}, {result['cpu']:.0f} CPU seconds, {result['peak']} MiB" if result else "not run" for result in both]
        lines.append(f"| {spec} | {'; '.join(states)} | | | |")
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
