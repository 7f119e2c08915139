"""Karpenter's own end-to-end suite "regression" against Stowage with simulated EC2, each spec by itself; after a failed one everything starts
from the beginning, so that one failure causes no other.

`STOWAGE_SUITE=all` runs every spec instead of a selection, `STOWAGE_SUITE=all:1/3` the first of three parts. `STOWAGE_SUITE_SUBJECT=karpenter` runs
Karpenter itself with its kwok provider. `STOWAGE_SUITE_RESULTS=FILE` adds the results to a file of JSON Lines: `karpenter_suites.py` prints those
of two runs side by side.
"""

import contextlib
import functools
import json
import os
import pathlib
import tempfile
import time

import pytest

import karpenter_suites

SUITE = "regression"
WHICH, _, PART = os.environ.get("STOWAGE_SUITE", "").partition(":")
ALL = WHICH == "all"
SUBJECT = os.environ.get("STOWAGE_SUITE_SUBJECT", "stowage")
RESULTS = os.environ.get("STOWAGE_SUITE_RESULTS")
# Seconds that a spec may take. Those of the suite wait up to 15 minutes where they state nothing else, as long as a node may take to register.
LIMIT = 1500 if ALL else 120
# Specs with these words in their names are left out.
LEFT_OUT = {"CapacityBuffer": "a kind of Karpenter's alpha API that Stowage reports as unsupported"}
SELECTION = [
    "StaticCapacity Deprovisioning should terminate empty nodes first, then nodes with least cost, then respect do-not-disrupt",
    "StaticCapacity Drift should handle drift with node limits when budget restricts",
    "Integration Validation Repair Policy Conditions Node Ready Unknown",
    "NodeClaim StandaloneNodeClaim should delete a NodeClaim if it references a NodeClass that isn't Ready",
    "NodeClaim StandaloneNodeClaim should succeed to garbage collect an Instance that was launched by a NodeClaim but has no Instance mapping",
    "Drift Budgets should respect budgets for non-empty replace drift",
    "Termination Emptiness should terminate an empty node",
    "Termination TerminationGracePeriod should delete pod with do-not-disrupt when it reaches its terminationGracePeriodSeconds",
]


@functools.cache
def suite():
    """The compiled suite, in a directory of this process."""
    return karpenter_suites.compiled(SUITE, SUBJECT, pathlib.Path(tempfile.mkdtemp(prefix="karpenter-suite-")))


def specs():
    if not ALL:
        return SELECTION
    part, _, parts = (PART or "1/1").partition("/")
    # Sorted: ginkgo shuffles them.
    found = sorted(spec for spec in suite().specs() if not any(words in spec for words in LEFT_OUT))
    return found[int(part) - 1 :: int(parts)]


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
