"""The second attempt of failed tests, without a control plane."""

import os
import pathlib
import subprocess
import sys

import pytest

import second_attempt

TESTS = """
class TestOrdered:
    seen = []

    def test_first(self):
        self.seen.append(1)

    def test_second(self):
        assert self.seen, "the first test of the class did not run"


def test_alone():
    pass


def test_broken():
    assert BROKEN == "", "it is broken"
"""


@pytest.fixture
def attempts(tmp_path):
    """Runs both attempts at tests that fail as told; returns the exit status of each, and what the second one prints."""

    def run(fail, broken="", source=TESTS):
        (tmp_path / "ordered_test.py").write_text(f"BROKEN = {broken!r}\n{source}")
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p second_attempt\n")
        failures = tmp_path / "failures"
        failures.unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("STOWAGE_")}
        environment |= {"PYTHONPATH": str(pathlib.Path(second_attempt.__file__).parent), "STOWAGE_FAIL": fail}
        recording = environment | {"STOWAGE_FAILURES": str(failures)}
        first = subprocess.run([sys.executable, "-m", "pytest"], cwd=tmp_path, env=recording, capture_output=True)
        command = [sys.executable, second_attempt.__file__, str(failures), "--root", str(tmp_path)]
        second = subprocess.run(command, env=environment, capture_output=True, text=True)
        return first.returncode, second.returncode, second.stdout + second.stderr

    return run


def test_a_test_that_fails_once_is_reported_as_flaky_and_the_run_succeeds(attempts):
    first, second, output = attempts("test_second")
    assert (first, second) == (0, 0), output
    assert "flaky: ordered_test.py::TestOrdered::test_second: Failed: made to fail by STOWAGE_FAIL" in output
    assert "2 passed" in output, "its class runs again, and nothing else"


def test_a_test_that_fails_twice_fails_the_run(attempts):
    for fail, broken, name in [("test_second*2", "", "TestOrdered"), ("", "yes", "test_broken")]:
        first, second, output = attempts(fail, broken)
        assert (first, second) == (0, 1), output
        assert f"the second attempt failed: ordered_test.py::{name}" in output and "flaky:" not in output


def test_of_two_failed_tests_each_has_its_own_second_attempt(attempts):
    first, second, output = attempts("test_alone", "yes")
    assert (first, second) == (0, 1), output
    assert "flaky: ordered_test.py::test_alone: Failed: made to fail by STOWAGE_FAIL" in output
    assert "failed: ordered_test.py::test_broken: AssertionError: it is broken" in output
    assert "flaky: ordered_test.py::test_broken" not in output


def test_a_run_without_a_failure_has_no_second_attempt(attempts):
    assert attempts("") == (0, 0, "")


def test_many_failures_are_no_flakes(attempts):
    source = "".join(f"\nclass Test{index}:\n    def test(self):\n        pass\n" for index in range(second_attempt.MAX_CLASSES + 1))
    first, second, output = attempts("ordered_test", source=source)
    assert (first, second) == (0, 1) and "too many for a second attempt" in output


def test_a_module_that_cannot_be_imported_fails_at_once(attempts):
    first, _, _ = attempts("", source="import nothing_of_this_name\n")
    assert first != 0


@pytest.mark.parametrize(
    "test, expected",
    [
        ("a_test.py::TestX::test_y", "a_test.py::TestX"),
        ("a_test.py::TestX::test_y[a::b-1]", "a_test.py::TestX"),
        ("a_test.py::test_y[1]", "a_test.py::test_y[1]"),
    ],
)
def test_what_runs_again_is_the_class(test, expected):
    assert second_attempt.class_of(test) == expected
