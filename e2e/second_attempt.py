"""A second attempt for end-to-end tests that failed, after all lanes of `make test` have ended. A plugin of pytest, and a command.

With `STOWAGE_FAILURES=FILE`, a pytest run appends each test that fails to the file, and succeeds unless something else went wrong: an
interruption, a broken test module, no test. `second_attempt.py FILE` then runs the failed tests once more, one class after the other, with
nothing beside them: later tests of a class need the nodes of earlier ones. Where the second attempt passes, it prints `flaky: TEST: reason
of the first failure`. Any failure of the second attempt is one of the run.

`STOWAGE_FAIL=TEXT` makes each test whose node id contains the text fail in the first attempt, `STOWAGE_FAIL=TEXT*2` in both.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import pytest

# More failed classes than this are no flakes, and two attempts at all of them would take longer than a test run may.
MAX_CLASSES = 8
SECOND = "STOWAGE_SECOND_ATTEMPT"


def reason_of(report):
    """The first line of the error, or of the report where there is no traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (crash.message if crash else str(report.longrepr or "")).strip()
    return text.splitlines()[0][:500] if text else "no reason reported"


def class_of(test):
    """The node id of what is run again for a test: its class, if it has one, because the tests of a class run in order."""
    path, *names = test.partition("[")[0].split("::")
    return "::".join([path, *names[:-1]]) if len(names) > 1 else test


class Recorder:
    """Records the failed tests of a run."""

    def __init__(self, file):
        self.file = pathlib.Path(file)
        self.failed = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.setdefault(report.nodeid, reason_of(report))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session, exitstatus):
        # A test module that cannot be imported is INTERRUPTED, as is a run that a signal ended.
        if exitstatus == pytest.ExitCode.TESTS_FAILED and self.failed:
            lines = [json.dumps({"test": test, "reason": reason}) + "\n" for test, reason in self.failed.items()]
            with open(self.file, "a") as out:
                out.write("".join(lines))
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter):
        if self.failed:
            terminalreporter.write_line(f"{len(self.failed)} failed tests are to run again after all others")


def pytest_configure(config):
    if file := os.environ.get("STOWAGE_FAILURES"):
        config.pluginmanager.register(Recorder(file))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    text, _, attempts = os.environ.get("STOWAGE_FAIL", "").partition("*")
    if text and text in item.nodeid and (attempts == "2" or SECOND not in os.environ):
        pytest.fail("made to fail by STOWAGE_FAIL", pytrace=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path, help="the failures of the first attempt")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).parent, help="folder of the tests")
    arguments = parser.parse_args()
    lines = arguments.file.read_text().splitlines() if arguments.file.exists() else []
    reasons = {}
    for failure in map(json.loads, lines):
        reasons.setdefault(failure["test"], failure["reason"])
    classes = sorted({class_of(test) for test in reasons})
    if not classes:
        return
    for test, reason in reasons.items():
        print(f"failed: {test}: {reason}", flush=True)
    if len(classes) > MAX_CLASSES:
        sys.exit(f"{len(classes)} classes of tests failed: too many for a second attempt")
    environment = {key: value for key, value in os.environ.items() if key != "STOWAGE_FAILURES"} | {SECOND: "1"}
    # A run of its own for each: a control plane that one class left broken fails no other.
    failed = [one for one in classes if subprocess.run([sys.executable, "-m", "pytest", one], cwd=arguments.root, env=environment).returncode]
    for test, reason in reasons.items():
        if class_of(test) not in failed:
            print(f"flaky: {test}: {reason}", flush=True)
    if failed:
        sys.exit(f"the second attempt failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
