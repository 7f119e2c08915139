"""`stowage simulate` on every kind of scenario; its plans are judged by a checker that shares no code with the solver."""

import json
import sys

import pytest

from harness import CHECK_PLAN, SCENARIO, binary, run

# Kinds, and the largest accepted gap of a plan of 1,000 pods to its own lower bound, in percent (docs/performance.md has measured gaps).
KINDS = {"uniform": 2, "fleet": 2, "spread": 5, "diverse": 5, "mixed": 5}


def judge(folder, kind, pods, seed, *more):
    """Plans a scenario twice, and has the plan checked. Returns the plan."""
    scenario, plan = folder / "scenario.json", folder / "plan.json"
    scenario.write_text(run(sys.executable, SCENARIO, kind, "--pods", pods, "--seed", seed, *(["--spot"] if more else [])).stdout)
    simulate = lambda: run(binary(), "simulate", "--scenario", scenario, "--output", "json", *more).stdout
    plan.write_text(simulate())
    checked = run(sys.executable, CHECK_PLAN, "--scenario", scenario, "--plan", plan, *more, check=False)
    assert checked.returncode == 0, checked.stdout
    first, second = json.loads(plan.read_text()), json.loads(simulate())
    for answer in (first, second):
        del answer["solveSeconds"], answer["proveSeconds"]
    assert first == second, "two plans of the same input differ"
    print(f"\n{kind} {pods} seed {seed}: {checked.stdout.strip()}", flush=True)
    return first


def crowd(plan):
    plan["nodes"][0]["pods"] += plan["nodes"][1].pop("pods")
    plan["nodes"][1]["pods"] = []


def merge_zones(plan):
    for node in plan["nodes"]:
        node["zone"] = node["zone"].replace("us-east-1b", "us-east-1a")


BROKEN = {
    "pods over capacity": (crowd, "over"),
    "a lost pod": (lambda plan: plan["nodes"][0]["pods"].pop(), "lost"),
    "a pod twice": (lambda plan: plan["nodes"][0]["pods"].append(plan["nodes"][1]["pods"][0]), "placed twice"),
    "a wrong price": (lambda plan: plan["nodes"][0].update(priceUsdPerHour=0.01), "price"),
    "a zone that is not offered": (lambda plan: plan["nodes"][0].update(zone="us-west-2a"), "not offered"),
    "pods of two zones in one": (merge_zones, "skew"),
}


def test_the_checker_rejects_broken_plans(tmp_path, subtests):
    scenario, plan = tmp_path / "scenario.json", tmp_path / "plan.json"
    scenario.write_text(run(sys.executable, SCENARIO, "spread", "--pods", 300, "--seed", 7).stdout)
    made = run(binary(), "simulate", "--scenario", scenario, "--output", "json").stdout
    for name, (change, violation) in BROKEN.items():
        with subtests.test(name):
            broken = json.loads(made)
            change(broken)
            plan.write_text(json.dumps(broken))
            checked = run(sys.executable, CHECK_PLAN, "--scenario", scenario, "--plan", plan, check=False)
            assert checked.returncode == 1 and violation in checked.stdout, checked.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_of_a_scenario_of_1000_pods_is_planned_and_accepted(kind, tmp_path):
    plan = judge(tmp_path, kind, 1000, 7)
    gap = 100 * (plan["costUsdPerHour"] / plan["lowerBoundUsdPerHour"] - 1)
    assert gap <= KINDS[kind], f"the plan of {kind} costs {gap:.1f} % more than its lower bound"


def test_spot_at_a_ratio_is_planned_and_accepted(tmp_path):
    judge(tmp_path, "mixed", 500, 3, "--spot-ratio", "0.4")
