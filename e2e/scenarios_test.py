#!/usr/bin/env python3
"""`stowage simulate` on every kind of scenario, its plans judged by a checker that shares nothing with the solver.

The scenario generator and the checker lie in `shared/peers` beside the checkout (STOWAGE_PEERS names another place). Without them
there is nothing to judge by, and the tests say that they were skipped.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = pathlib.Path(os.environ.get("STOWAGE_PEERS") or ROOT.parent / "shared" / "peers")
BINARY = pathlib.Path(os.environ.get("STOWAGE_BIN") or ROOT / "target" / "debug" / "stowage")
# Kinds, and how far above its own lower bound a plan of 1,000 pods may cost, percent (docs/performance.md has what is measured).
KINDS = {"uniform": 2, "fleet": 2, "spread": 5, "diverse": 5, "mixed": 5}


def run(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


@unittest.skipUnless((PEERS / "check_plan.py").exists(), f"the peers are not at {PEERS}")
class Scenarios(unittest.TestCase):
    def judge(self, kind, pods, seed, *more):
        with tempfile.TemporaryDirectory() as folder:
            scenario, plan = pathlib.Path(folder) / "scenario.json", pathlib.Path(folder) / "plan.json"
            made = run(sys.executable, PEERS / "scenario.py", kind, "--pods", pods, "--seed", seed, *(["--spot"] if more else []))
            self.assertEqual(made.returncode, 0, made.stderr)
            scenario.write_text(made.stdout)
            planned = run(BINARY, "simulate", "--scenario", scenario, "--output", "json", *more)
            self.assertEqual(planned.returncode, 0, planned.stderr + planned.stdout[-2000:])
            plan.write_text(planned.stdout)
            checked = run(sys.executable, PEERS / "check_plan.py", "--scenario", scenario, "--plan", plan, *more)
            self.assertEqual(checked.returncode, 0, checked.stdout)
            again = json.loads(run(BINARY, "simulate", "--scenario", scenario, "--output", "json", *more).stdout)
            first = json.loads(planned.stdout)
            for answer in (first, again):
                answer.pop("solveSeconds")
            self.assertEqual(first, again, "the same input must give the same plan")
            print(f"{kind} {pods} seed {seed}: {checked.stdout.strip()}", flush=True)
            return first

    def test_every_kind_at_1000_pods_is_planned_whole_and_accepted(self):
        for kind, most in KINDS.items():
            with self.subTest(kind):
                plan = self.judge(kind, 1000, 7)
                gap = 100 * (plan["costUsdPerHour"] / plan["lowerBoundUsdPerHour"] - 1)
                self.assertLessEqual(gap, most, f"a plan of {kind} costs {gap:.1f} % more than its bound")

    def test_spot_at_a_ratio_is_planned_whole_and_accepted(self):
        self.judge("mixed", 500, 3, "--spot-ratio", "0.4")


if __name__ == "__main__":
    unittest.main(verbosity=2)
