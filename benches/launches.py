#!/usr/bin/env python3
"""The tables of docs/performance.md about launches on EC2, from the figures that e2e/ec2_test.py writes into STOWAGE_EC2_FIGURES.

    benches/launches.py target/bench/launches.json
"""

import json
import pathlib
import sys

GOAL_MS = 50  # of Stowage's own part, at the 99th percentile
# The steps from a plan to CreateFleet, by their names in the figures.
PARTS = {
    "plan to API server": "plan to NodeClaim, up to the request that writes it",
    "API server": "the API server writes it",
    "written to request": "from its response until the SDK is called",
    "of that prepared": "of that: offerings, image, user data and template",
    "own": f"**Stowage in total** (goal: p99 under {GOAL_MS} ms)",
    "sent": "the SDK signs and sends, the proxy reads",
    "whole": "plan to CreateFleet in total",
}


def rows(calls, instances):
    """Table rows of calls by action, the most frequent first."""
    for action, count in sorted(calls.items(), key=lambda item: (-item[1], item[0])):
        print(f"| {action} | {count} | {count * 1000 / instances:.0f} |")


def main(file):
    """Prints the tables. Returns an error message if Stowage's own part took too long, otherwise None."""
    figures = json.loads(pathlib.Path(file).read_text())
    launched, tagged = figures["launched"], figures["tagged"]
    instances = launched["instances"]
    print(f"| calls of EC2 for {instances} launches in {launched['seconds']} s | calls | per 1,000 launches |\n|---|---|---|")
    rows(launched["calls"], instances)
    print(f"| **tagging of the instances**, after {tagged['seconds']} s in total | | |")
    rows({f"{action}, tagging": count for action, count in tagged["calls"].items()}, instances)
    total = sum(launched["calls"].values()) + sum(tagged["calls"].values())
    print(f"| total | {total} | {total * 1000 / instances:.0f} |")
    print(f"\n| from plan to CreateFleet, {figures['plans']} plans of one node | p50 ms | p99 ms |\n|---|---|---|")
    for part, text in PARTS.items():
        print("| {} | {p50:.1f} | {p99:.1f} |".format(text, **figures["milliseconds"][part]))
    own = figures["milliseconds"]["own"]["p99"]
    return None if own < GOAL_MS else f"from plan to CreateFleet, Stowage's own part took {own:.1f} ms (p99); the goal is under {GOAL_MS} ms"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
