"""cert-manager in a control plane: its chart, installed by helm, and its three processes on this machine.

Like Stowage in harness.py, each process has the arguments that the chart gives its container and the rights of the chart's ServiceAccount
only. Its webhook runs too, called by URL: it validates every Certificate and Issuer as in a user's cluster, and the CA of its own
certificate is injected by the same cainjector.
"""

import datetime
import json
import os
import re
import subprocess

from kubernetes.dynamic.exceptions import DynamicApiError

import harness
from processes import stop, write_pid
from waiting import wait_until

NAMESPACE = "cert-manager"
CHART = "cert-manager-chart"  # beside the binaries of e2e/tools/build
START_TIMEOUT = 60.0  # seconds until the webhook answers with a certificate that the API server trusts
# Deployment of the chart -> binary.
PROCESSES = {
    "cert-manager": "cert-manager-controller",
    "cert-manager-cainjector": "cert-manager-cainjector",
    "cert-manager-webhook": "cert-manager-webhook",
}
GROUP, VERSION = "cert-manager.io", "v1"


def crds(plane, *names):
    """The manifests of these of cert-manager's CRDs."""
    text = plane.helm("template", "cert-manager", plane.bin / CHART, "--set", "installCRDs=true", "--show-only", "templates/crds.yaml").stdout
    found = [part for part in re.split(r"(?m)^---$", text) if re.search(rf"(?m)^  name: ({'|'.join(names)})\.cert-manager\.io$", part)]
    assert len(found) == len(names)
    return "---".join(found)


class CertManager:
    """A running cert-manager, as a context manager."""

    def __init__(self, plane):
        self.plane, self.api = plane, plane.api
        self.dir = plane.dir / "cert-manager"
        self.processes = {}
        self.port = harness.free_port()

    def __enter__(self):
        try:
            self.install()
            for deployment, binary in PROCESSES.items():
                self.start(deployment, binary)
            wait_until(self.serving, START_TIMEOUT, "cert-manager's webhook serving", self.tail, every=0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        stop([self.pid_file(binary) for binary in self.processes])
        for process in self.processes.values():
            process.wait()
        self.plane.helm("uninstall", "cert-manager", "--namespace", NAMESPACE, "--ignore-not-found", "--wait")

    def install(self):
        alone = {"replicaCount": 0}
        values = {
            "installCRDs": True,
            # One process each: no leader to elect.
            "global": {"leaderElection": {"namespace": NAMESPACE}},
            "extraArgs": ["--leader-elect=false", "--metrics-listen-address=127.0.0.1:0"],
            "cainjector": {**alone, "extraArgs": ["--leader-elect=false"]},
            "webhook": {
                **alone,
                "url": {"host": f"localhost:{self.port}"},
                "securePort": self.port,
                # The chart's own name of this certificate has a port, which matches no host.
                "extraArgs": ["--dynamic-serving-dns-names=localhost", f"--healthz-port={harness.free_port()}"],
            },
            # A Job that waits for pods.
            "startupapicheck": {"enabled": False},
            **alone,
        }
        self.dir.mkdir(exist_ok=True)
        file = self.dir / "values.json"
        file.write_text(json.dumps(values, indent=2))
        self.plane.helm("upgrade", "--install", "cert-manager", self.plane.bin / CHART, "--namespace", NAMESPACE, "--create-namespace", "--values", file)

    def start(self, deployment, binary):
        spec = self.api.get("Deployment", deployment, NAMESPACE)["spec"]["template"]["spec"]
        kubeconfig = self.dir / f"{binary}.kubeconfig"
        self.plane.service_account(f"{NAMESPACE}/{spec['serviceAccountName']}", kubeconfig)
        arguments = [argument.replace("$(POD_NAMESPACE)", NAMESPACE) for argument in spec["containers"][0]["args"]]
        if binary != "cert-manager-cainjector":  # it reads the variable only
            arguments.append(f"--kubeconfig={kubeconfig}")
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.dir), "KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": NAMESPACE}
        with open(self.log(binary), "ab") as log:
            self.processes[binary] = subprocess.Popen(
                [harness.tools("cert-manager") / binary, *arguments], env=environment, cwd=self.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        write_pid(self.pid_file(binary), self.processes[binary].pid)

    def log(self, binary):
        return self.plane.dir / "logs" / f"{binary}.log"

    def pid_file(self, binary):
        return self.plane.dir / "pids" / f"{binary}.pid"

    def tail(self, lines=8):
        return "\n".join(f"{name}:\n" + "\n".join(self.log(name).read_text(errors="replace").splitlines()[-lines:]) for name in self.processes)

    def alive(self):
        """True, or a Failure."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise harness.Failure(f"{name} ended with status {process.returncode}:\n{self.tail()}")
        return True

    def serving(self):
        """Whether an Issuer passes the webhook."""
        probe = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Issuer", "metadata": {"name": "probe", "namespace": NAMESPACE}, "spec": {"selfSigned": {}}}
        try:
            return self.alive() and bool(self.api.create(probe, dry_run=True))
        except DynamicApiError:
            return False

    # Certificates

    def certificate(self, namespace, name):
        return self.api.get("Certificate", name, namespace)

    def renew(self, namespace, name):
        """Requests a new certificate now, as `cmctl renew` does."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = self.certificate(namespace, name)["status"]["conditions"]
        kept = [condition for condition in conditions if condition["type"] != "Issuing"]
        issuing = {"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "renewed by a test", "lastTransitionTime": now}
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/certificates/{name}/status"
        self.api.request("patch", path, {"status": {"conditions": [*kept, issuing]}}, content_type="application/merge-patch+json")
