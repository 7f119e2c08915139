"""Fixtures of the end-to-end tests.

The suites of one run share a control plane: each class that uses it finds it empty. Classes that need Stowage in it use `service`, which
installs and starts it once per class. Tests of such a class run in the order of the file: later tests continue with the nodes of earlier
ones.
"""

import signal

import pytest

pytest.register_assert_rewrite("services")

import aws
import guard
import harness

pytest_plugins = ["second_attempt"]


def pytest_configure(config):
    # `make` passes SIGTERM on: end as on Ctrl-C, with the teardown of all fixtures.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))


@pytest.fixture(scope="session", autouse=True)
def directory():
    """The directory of everything that the run starts and writes."""
    with guard.guarded_directory() as path:
        yield path


@pytest.fixture(scope="session")
def shared_control_plane(directory):
    with harness.ControlPlane() as plane:
        yield plane


@pytest.fixture(scope="class")
def control_plane(shared_control_plane):
    """The control plane of the run, empty."""
    return shared_control_plane.emptied()


@pytest.fixture(scope="class")
def service_plane(shared_control_plane):
    """The control plane of the run, empty but for the CRDs of the chart."""
    return shared_control_plane.emptied(keep_crds=True)


@pytest.fixture(scope="class")
def moto(directory):
    """moto's server with an empty account."""
    with aws.Moto() as server:
        yield server


@pytest.fixture(scope="class")
def service(request):
    """A running service, set up by the class of the test: `Class.environment(request)` is a context manager of it."""
    with request.cls.environment(request) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the logs of the service to the report of a failed test."""
    report = yield
    service = getattr(item, "funcargs", {}).get("service")
    if report.failed and service is not None:
        for name, text in service.logs().items():
            report.sections.append((name, text))
    return report
