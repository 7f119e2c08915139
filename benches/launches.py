#!/usr/bin/env python3
"""The tables of docs/performance.md about launches on EC2, from the figures that e2e/ec2_test.py writes where STOWAGE_EC2_FIGURES says.

    benches/launches.py target/bench/launches.json
"""

import json
import pathlib
import sys

# The parts of the way from a plan to CreateFleet, by the names in the figures.
PARTS = {
    "plan to API server": "the plan becomes a NodeClaim, up to the request that writes it",
    "API server": "the API server writes it",
    "written to request": "from its answer to the moment before the SDK is called",
    "of that prepared": "of that: offerings, image, user data and template",
    "own": "**ours together**",
    "sent": "the SDK signs and sends, the proxy reads",
    "whole": "plan to CreateFleet in all",
}


GOAL_MS = 50  # of our own part, at the 99th percentile


def rows(calls, instances):
    """Table rows of calls by action, the most frequent first."""
    for action, count in sorted(calls.items(), key=lambda item: (-item[1], item[0])):
        print(f"| {action} | {count} | {count * 1000 / instances:.0f} |")


def main(file):
    """Prints the tables. Says what was wrong where our own part took too long."""
    figures = json.loads(pathlib.Path(file).read_text())
    launched, tagged = figures["launched"], figures["tagged"]
    instances = launched["instances"]
    print(f"| calls of EC2 for {instances} launches in {launched['seconds']} s | calls | per 1,000 launches |\n|---|---|---|")
    rows(launched["calls"], instances)
    print(f"| **to tag the instances**, after {tagged['seconds']} s in all | | |")
    rows({f"{action}, tagging": count for action, count in tagged["calls"].items()}, instances)
    total = sum(launched["calls"].values()) + sum(tagged["calls"].values())
    print(f"| all | {total} | {total * 1000 / instances:.0f} |")
    print(f"\n| from plan to CreateFleet, {figures['plans']} plans of one node | p50 ms | p99 ms |\n|---|---|---|")
    for part, text in PARTS.items():
        print("| {} | {p50:.1f} | {p99:.1f} |".format(text, **figures["milliseconds"][part]))
    own = figures["milliseconds"]["own"]["p99"]
    return None if own < GOAL_MS else f"from plan to CreateFleet our own part took {own:.1f} ms (p99), which has to be under {GOAL_MS} ms"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
