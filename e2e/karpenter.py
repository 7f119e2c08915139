"""Karpenter's controller as a process of this machine, in a control plane: its AWS provider, against a substitute for EC2's API, or another one.

STOWAGE_KARPENTER names another binary of its AWS provider, such as one of another release; its CRDs remain those of e2e/tools/karpenter.
"""

import os
import pathlib
import re
import subprocess

import requests
import yaml

import harness
from processes import stop, write_pid
from waiting import wait_until

READY_TIMEOUT = 60.0  # seconds until the controller is ready
STOP_TIMEOUT = 15.0  # seconds between SIGTERM and SIGKILL; it releases its lease
DRIFT_CONTROLLER = "nodeclaim.disruption"


def crds(plane):
    """Its CRDs."""
    return [yaml.safe_load(file.read_text()) for file in sorted((plane.bin / "karpenter-crds").glob("*.yaml"))]


class Controller:
    """A controller of Karpenter, as a context manager. `env` are its settings, without those that each controller needs here."""

    def __init__(self, plane, binary, env):
        self.plane, self.binary = plane, binary
        self.log = plane.dir / "logs" / "karpenter.log"
        self.pid_file = plane.dir / "pids" / "karpenter.pid"
        self.metrics_port, self.health_port = harness.free_port(), harness.free_port()
        self.process = None
        self.env = env | {
            "KUBECONFIG": str(plane.dir / "kubeconfig"),
            "SYSTEM_NAMESPACE": harness.NAMESPACE,
            "LEADER_ELECTION_NAMESPACE": harness.NAMESPACE,
            "METRICS_PORT": str(self.metrics_port),
            "HEALTH_PROBE_PORT": str(self.health_port),
        }

    def __enter__(self):
        base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [self.binary], env=base | self.env, cwd=self.plane.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        write_pid(self.pid_file, self.process.pid)
        try:
            wait_until(lambda: self.alive() and self.ready(), READY_TIMEOUT, "Karpenter ready", self.tail)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        stop([self.pid_file], patience=STOP_TIMEOUT)
        self.process.wait()

    def alive(self):
        """True, or a Failure."""
        if self.process is None or self.process.poll() is not None:
            raise harness.Failure(f"Karpenter ended with status {self.process and self.process.returncode}; the end of its log:\n{self.tail()}")
        return True

    def ready(self):
        try:
            return harness.http().get(f"http://127.0.0.1:{self.health_port}/readyz", timeout=5).ok
        except requests.RequestException:
            return False

    def drift_evaluations(self):
        """The number of times that it has evaluated the drift of a NodeClaim since its start, without failures."""
        text = harness.http().get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5).text
        samples = re.findall(rf'^controller_runtime_reconcile_total{{controller="{re.escape(DRIFT_CONTROLLER)}",result="(.+)"}} (\S+)$', text, re.M)
        return sum(float(value) for result, value in samples if result != "error")

    def tail(self, lines=15):
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(line[:1000] for line in text.splitlines()[-lines:])

    def warnings(self, most=40):
        """The last warnings and errors of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        found = [line[:600] for line in text.splitlines() if '"level":"WARN"' in line or '"level":"ERROR"' in line]
        return "\n".join(found[-most:])


class Karpenter(Controller):
    """The controller of the AWS provider. Its settings are those of its chart; it leads by the same lease as Stowage. `env` are the SDK's
    variables."""

    def __init__(self, plane, cluster, env):
        # Without the Pricing API, which moto does not have.
        own = {"CLUSTER_NAME": cluster, "CLUSTER_ENDPOINT": plane.state["api"], "DISABLE_DRY_RUN": "true", "ISOLATED_VPC": "true"}
        super().__init__(plane, pathlib.Path(os.environ.get("STOWAGE_KARPENTER") or harness.tools("karpenter") / "karpenter"), env | own)
