"""`stowage simulate` on every kind of scenario; its plans are judged by a checker that shares no code with the solver.

The scenario generator and the checker are those of STOWAGE_PEERS (see harness.py).
"""

import json
import sys

import pytest

from harness import NO_PEERS, PEERS, binary, run

# Kinds, and the largest accepted gap of a plan of 1,000 pods to its own lower bound, in percent (docs/performance.md has measured gaps).
KINDS = {"uniform": 2, "fleet": 2, "spread": 5, "diverse": 5, "mixed": 5}
pytestmark = pytest.mark.skipif(not (PEERS / "check_plan.py").exists(), reason=NO_PEERS)


def judge(folder, kind, pods, seed, *more):
    """Plans a scenario twice, and has the plan checked. Returns the plan."""
    scenario, plan = folder / "scenario.json", folder / "plan.json"
    scenario.write_text(run(sys.executable, PEERS / "scenario.py", kind, "--pods", pods, "--seed", seed, *(["--spot"] if more else [])).stdout)
    simulate = lambda: run(binary(), "simulate", "--scenario", scenario, "--output", "json", *more).stdout
    plan.write_text(simulate())
    checked = run(sys.executable, PEERS / "check_plan.py", "--scenario", scenario, "--plan", plan, *more, check=False)
    assert checked.returncode == 0, checked.stdout
    first, second = json.loads(plan.read_text()), json.loads(simulate())
    for answer in (first, second):
        del answer["solveSeconds"], answer["proveSeconds"]
    assert first == second, "two plans of the same input differ"
    print(f"\n{kind} {pods} seed {seed}: {checked.stdout.strip()}", flush=True)
    return first


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_of_a_scenario_of_1000_pods_is_planned_and_accepted(kind, tmp_path):
    plan = judge(tmp_path, kind, 1000, 7)
    gap = 100 * (plan["costUsdPerHour"] / plan["lowerBoundUsdPerHour"] - 1)
    assert gap <= KINDS[kind], f"the plan of {kind} costs {gap:.1f} % more than its lower bound"


def test_spot_at_a_ratio_is_planned_and_accepted(tmp_path):
    judge(tmp_path, "mixed", 500, 3, "--spot-ratio", "0.4")
