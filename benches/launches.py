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


def main(file):
    figures = json.loads(pathlib.Path(file).read_text())
    launched, calls = figures["launched"], figures["launched"]["calls"]
    instances = launched["instances"]
    print(f"| calls of EC2 for {instances} launches in {launched['seconds']} s | calls | per 1,000 launches |\n|---|---|---|")
    for action, count in sorted(calls.items(), key=lambda item: (-item[1], item[0])):
        print(f"| {action} | {count} | {count * 1000 / instances:.0f} |")
    total = sum(calls.values())
    print(f"| all | {total} | {total * 1000 / instances:.0f} |")
    print(f"\n| from plan to CreateFleet, {figures['plans']} plans of one node | p50 ms | p99 ms |\n|---|---|---|")
    for part, text in PARTS.items():
        print("| {} | {p50:.1f} | {p99:.1f} |".format(text, **figures["milliseconds"][part]))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
