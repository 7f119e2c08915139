"""Karpenter's own end-to-end suite "regression" against Stowage with simulated EC2, each spec by itself; after a failed one everything starts
from the beginning, so that one failure causes no other.

`STOWAGE_SUITE=all` runs every spec instead of a selection. `STOWAGE_SUITE_SUBJECT=karpenter` runs Karpenter itself with its kwok provider.
`STOWAGE_SUITE_RESULTS=FILE` adds the results to a file of JSON Lines: `karpenter_suites.py` prints those of two runs side by side. Specs with "Chaos" in
their names listen on port 8080: no two of them run at the same time on a machine.
"""

import contextlib
import functools
import json
import os
import pathlib
import tempfile
import threading
import time
import types

import kubernetes
import pytest
import urllib3.exceptions

import harness
import karpenter_performance
import karpenter_suites
import kwok_types

SUITE = "regression"
ALL = os.environ.get("STOWAGE_SUITE") == "all"
SUBJECT = os.environ.get("STOWAGE_SUITE_SUBJECT", "stowage")
RESULTS = os.environ.get("STOWAGE_SUITE_RESULTS")
# Seconds that a spec may take. Those of the suite wait up to 15 minutes where they state nothing else, as long as a node may take to register.
LIMIT = 1500 if ALL else 120
# Specs with these words in their names are left out.
LEFT_OUT = {"CapacityBuffer": "a kind of Karpenter's alpha API that Stowage reports as unsupported"}
SELECTION = [
    "StaticCapacity Deprovisioning should terminate empty nodes first, then nodes with least cost, then respect do-not-disrupt",
    "Integration Validation Repair Policy Conditions Node Ready Unknown",
    "NodeClaim StandaloneNodeClaim should delete a NodeClaim if it references a NodeClass that isn't Ready",
    "NodeClaim StandaloneNodeClaim should succeed to garbage collect an Instance that was launched by a NodeClaim but has no Instance mapping",
    "Drift Budgets should respect budgets for non-empty replace drift",
    "Termination Emptiness should terminate an empty node",
    "Termination TerminationGracePeriod should delete pod with do-not-disrupt when it reaches its terminationGracePeriodSeconds",
]


# Removed when the process ends.
FOLDER = tempfile.TemporaryDirectory(prefix="karpenter-suite-")


@functools.cache
def suite():
    """The compiled suite."""
    return karpenter_suites.compiled(SUITE, SUBJECT, pathlib.Path(FOLDER.name))


def specs():
    if not ALL:
        return SELECTION
    # Sorted: ginkgo shuffles them.
    return sorted(spec for spec in suite().specs() if not any(words in spec for words in LEFT_OUT))


class Subject:
    """What manages the nodes of a control plane: started with the first spec, and once more after each spec that failed."""

    def __init__(self, plane):
        self.plane = plane
        self.stack = contextlib.ExitStack()
        self.process = None

    def start(self):
        if self.process is None:
            self.process = self.stack.enter_context(karpenter_suites.running(SUBJECT, self.plane, suite().folder))

    def stop(self):
        self.stack.close()
        self.process = None


@pytest.fixture(scope="module")
def subject(shared_control_plane):
    running = Subject(shared_control_plane)
    yield running
    running.stop()


def record(spec, seconds, why):
    if RESULTS:
        with open(RESULTS, "a") as out:
            out.write(json.dumps({"spec": spec, "seconds": round(seconds, 1), "why": why}) + "\n")


@pytest.mark.parametrize("spec", specs(), ids=str)
def test_regression(subject, spec):
    begin = time.monotonic()
    try:
        subject.start()
        seconds, why = suite().run(spec, subject.plane.dir / "kubeconfig", LIMIT)
        subject.process.alive()
    except BaseException as error:
        record(spec, time.monotonic() - begin, str(error))
        subject.stop()
        raise
    record(spec, seconds, why)
    if why:
        tail = subject.process.tail(30)
        subject.stop()
        pytest.fail(f"{why}\n{tail}", pytrace=False)


def at(second):
    """A second since 1970 as a report has it."""
    return f"1970-01-01T01:0{second // 60}:{second % 60:02}.123456789+01:00"


def request_of(answers):
    """A request that gives the next of these answers, each the items of a list or an error."""
    left = iter(answers)

    def request(*_, **__):
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return {"items": answer}

    return request


class TestTables:
    def test_results_are_printed_side_by_side_and_the_last_one_counts(self, tmp_path):
        passed, failed = {"seconds": 14.2, "why": None}, {"seconds": 120, "why": "failed at drift_test.go:1: late"}
        file = tmp_path / "results.jsonl"
        file.write_text("".join(json.dumps({"spec": "a", **result}) + "\n" for result in (failed, passed)))
        ours, peers = karpenter_suites.results(file), {"a": failed, "b": passed}
        rows = ["| a | passes, 14 s | fails, 120 s |", "| b | not run | passes, 14 s |"]
        assert karpenter_suites.table(ours, peers).splitlines()[2:] == rows

    def test_phases_of_performance_are_printed_side_by_side(self):
        utilization = {"total_reserved_cpu_utilization": 0.876, "total_reserved_memory_utilization": 0.5}
        out = {"test_name": "Out", "timestamp": at(35), "total_time": 35_000_000_000, "total_nodes": 187, "rounds": 0, **utilization}
        back = {**out, "test_name": "Back", "timestamp": at(75), "rounds": 2}
        # The phases are from second 0 to 35 and from 40 to 75; what leaves after them belongs to none.
        result = {"spec": "Wide", "seconds": 500, "why": None, "cpu": 12.4, "peak": 90, "reports": [back, out]}
        result["fleet"] = [[10, 1.5], [30, 7.125], [52.4, 3], [80, 0]]
        lines = karpenter_performance.table({"Wide": result}, {"Wide": {**result, "fleet": [], "reports": [out]}}).splitlines()
        assert lines[2] == "| Out | 35 s, 35 s | 30 s, – | 187, 187 | 7.12, – | 88% / 50%, 88% / 50% | 0, 0 |"
        assert lines[3] == "| Back | 35 s, – | 12 s, – | 187, – | 3.00, – | 88% / 50%, – | 2, – |"
        assert lines[4].startswith("| Wide | passes, 500 s, 12 CPU seconds, 90 MiB; passes, 500 s, ")

    def test_a_fleet_is_recorded_when_its_nodes_change_and_an_overloaded_api_server_loses_nothing(self):
        def node(uid, kind):
            return {"metadata": {"uid": uid, "labels": {"node.kubernetes.io/instance-type": kind}}}

        both = [node("a", "m5.large"), node("b", "m5-large")]
        answers = [None, both[:1], kubernetes.client.ApiException(504), urllib3.exceptions.ReadTimeoutError(None, "/", "late"), both, both, None]
        fleet = karpenter_performance.Fleet(types.SimpleNamespace(request=request_of(answers)))
        for _ in answers:
            fleet.observe()
        assert [usd for _, usd in fleet.changes] == [0.096, 0.192, 0]

    def test_what_a_sample_raises_is_not_lost(self):
        sampled = threading.Event()

        def fail():
            sampled.set()
            raise harness.Failure("gone")

        with pytest.raises(harness.Failure, match="gone"), karpenter_performance.Sampler(0.001, fail):
            assert sampled.wait(10)

    def test_the_kwok_provider_gets_the_types_of_the_catalog(self):
        known = {entry["name"]: entry for entry in kwok_types.kwok_types(("c", "m", "r"), 32)}
        # With what the provider takes off again.
        assert known["m5-large"]["resources"] == {"cpu": "2", "memory": f"{6903 + 10}Mi", "pods": "29", "ephemeral-storage": "20Gi"}
        assert known["c6g-large"]["architecture"] == "arm64"
        assert not {"t3-large", "m5-8xlarge", "g5-xlarge"} & set(known)
        assert kwok_types.prices()["m5-large"] == kwok_types.prices()["m5.large"] == known["m5-large"]["offerings"][0]["Price"] == 0.096
