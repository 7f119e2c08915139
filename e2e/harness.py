"""A control plane with Stowage in it, for the end-to-end tests and the demo.

`ControlPlane` starts and stops e2e/control-plane in a directory. `Stowage` installs the chart with the real helm and runs the service
as a process of this machine, because there is no container runtime: with the settings that the chart gives its Deployment, and with
the rights of the chart's ServiceAccount only.

Environment: STOWAGE_BIN is the binary (default: debug/stowage in CARGO_TARGET_DIR, or in target of this checkout), STOWAGE_CHART the chart.
"""

import base64
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import requests

import kube
import messages
from processes import running, stop, write_pid
from waiting import WaitTimeout, wait_until

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
NAMESPACE = "stowage"
RELEASE = "stowage"
IMAGE = "registry.example/stowage"  # of the chart's pods, which nothing pulls here
SCENARIO, CHECK_PLAN = HERE / "scenario.py", HERE / "check_plan.py"
READY_TIMEOUT = 60.0  # seconds until the service is ready
STOP_TIMEOUT = 8.0  # seconds between SIGTERM and SIGKILL
CRD_TIMEOUT = 20.0  # seconds until the API server deleted a CRD, unless its finalizer missed an event
RESET_TIMEOUT = 60.0  # seconds until the objects of earlier tests are gone
RESTARTS = 4  # of one installation that loses its lease because the machine stalled
KEPT_NAMESPACES = {"default", "kube-system", "kube-public", "kube-node-lease", NAMESPACE}
CUSTOM_KINDS = {
    "NodeClaim": "nodeclaims.karpenter.sh",
    "NodePool": "nodepools.karpenter.sh",
    "EC2NodeClass": "ec2nodeclasses.karpenter.k8s.aws",
}
# All servers listen on loopback: clients must not send requests for them to a proxy.
os.environ |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


class Failure(Exception):
    """An error that a person can act on; the message is all that is printed."""


def binary():
    """The service's binary."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or "target")
    path = pathlib.Path(os.environ.get("STOWAGE_BIN") or ROOT / target / "debug" / "stowage").resolve()
    if not os.access(path, os.X_OK):
        raise Failure(f"{path} does not exist: run `make build` with CARGO_TARGET_DIR exported (CONTRIBUTING.md, set-up), or set STOWAGE_BIN")
    return path


def run(*command, stdin=None, env=None, check=True, timeout=180):
    """Runs a command to its end and returns the completed process. A failure has its output."""
    done = subprocess.run(
        [str(part) for part in command],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=env,
        # Ctrl-C is for the harness to handle: it must not end half of a clean-up.
        start_new_session=True,
    )
    if check and done.returncode:
        output = (done.stderr.strip() or done.stdout.strip())[-3000:]
        raise Failure(f"{pathlib.Path(str(command[0])).name} {' '.join(str(part) for part in command[1:4])} failed ({done.returncode}): {output}")
    return done


def tools(*modules):
    """The directory of the binaries of these modules of e2e/tools; builds them if they do not exist."""
    return pathlib.Path(run(HERE / "tools" / "build", *modules, timeout=1800).stdout.splitlines()[-1])


def free_port():
    """A free port outside the range of outgoing connections: it stays free while the service is down."""
    low = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000, low if low > 12_000 else 30_000)
    for port in random.sample(ports, min(100, len(ports))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise Failure("no free port on 127.0.0.1")


class ControlPlane:
    """A running control plane, as a context manager, in a temporary directory unless one is given. `arguments` are further arguments of
    `control-plane up`."""

    def __init__(self, directory=None, keep=False, arguments=()):
        self.given = directory
        self.arguments = arguments
        self.dir = pathlib.Path(directory) if directory else None
        self.keep = keep
        self.api = None
        self.default_scheduler = True
        self.used = False

    def __enter__(self):
        self.dir = pathlib.Path(self.dir or tempfile.mkdtemp(prefix="control-plane-")).resolve()
        try:
            self.start_output = self.script("up", self.dir, *self.arguments, timeout=1800).stderr
        except BaseException:
            self.__exit__()
            raise
        self.state = json.loads((self.dir / "state.json").read_text())
        self.bin = pathlib.Path(self.state["bin"])
        self.api = kube.KubeApi(self.dir / "kubeconfig")
        return self

    def __exit__(self, *_):
        if self.api:
            self.api.close()
        if self.keep or self.dir is None:
            return
        self.script("down", self.dir)
        if not self.given:
            shutil.rmtree(self.dir, ignore_errors=True)

    def problems(self):
        """Ends of the logs of components that ended or are not healthy, by name, for the report of a failed test."""
        found, pki = {}, self.dir / "pki"
        for name in self.state["commands"]:
            if not running(self.dir / "pids" / f"{name}.pid"):
                problem = "does not run"
            elif url := self.state["health"].get(name):
                try:
                    answer = requests.get(url, timeout=5, verify=f"{pki}/ca.crt", cert=(f"{pki}/admin.crt", f"{pki}/admin.key"))
                    problem = None if answer.status_code == 200 else f"{answer.status_code} {answer.text}"
                except requests.RequestException as error:
                    problem = str(error)
            else:
                problem = None
            if problem:
                log = self.dir / "logs" / f"{name}.log"
                found[name] = "\n".join([problem, *(log.read_text(errors="replace").splitlines()[-20:] if log.exists() else ())])
        return found

    def script(self, command, *arguments, timeout=180, check=True):
        return run(HERE / "control-plane", command, *arguments, timeout=timeout, check=check)

    @property
    def env(self):
        """Environment of kubectl and helm: no repository, cache or plugin of the user."""
        helm = {f"HELM_{name}_HOME": str(self.dir / "helm" / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
        return {**os.environ, **helm, "KUBECONFIG": str(self.dir / "kubeconfig"), "HOME": str(self.dir)}

    def kubectl(self, *arguments, stdin=None, check=True):
        return run(self.bin / "kubectl", *arguments, stdin=stdin, env=self.env, check=check)

    def helm(self, *arguments, check=True):
        return run(self.bin / "helm", *arguments, env=self.env, check=check)

    def apply(self, *objects):
        """Applies objects concurrently: a burst, as in a busy cluster."""
        self.api.apply(*objects)

    def scheduler(self, config=None):
        """Restarts kube-scheduler with this configuration (an object, or a text), or with the default one."""
        self.default_scheduler = config is None
        if config is None:
            return self.script("scheduler", self.dir)
        file = self.dir / "scheduler-override.json"
        file.write_text(config if isinstance(config, str) else json.dumps(config, indent=2))
        return self.script("scheduler", self.dir, "--config", file)

    def certificate(self, folder, *arguments):
        """Writes a certificate of Stowage's own CA into a folder."""
        self.script("cert", self.dir, *arguments, "--out", folder)

    def service_account(self, account, file):
        """Writes a kubeconfig of a ServiceAccount, given as namespace/name, with its namespace as in a pod."""
        self.script("kubeconfig", self.dir, "--service-account", account, "--out", file)
        access = json.loads(pathlib.Path(file).read_text())
        for context in access["contexts"]:
            context["context"]["namespace"] = account.partition("/")[0]
        pathlib.Path(file).write_text(json.dumps(access))

    def namespace(self, name):
        """Creates a namespace and waits for its service account: pods are refused until it exists."""
        self.api.apply_one({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self.has_service_account(name)

    def has_service_account(self, name):
        wait_until(lambda: self.api.find("ServiceAccount", "default", name), 20, f"the service account of namespace {name}")

    def events(self, about=None, reason=None, reporter="stowage"):
        """Events of `reporter` on the object of this name, newest last."""
        found = [
            event
            for event in self.api.list("Event")
            if (about is None or event["regarding"].get("name") == about)
            and (reason is None or event.get("reason") == reason)
            and event.get("reportingController") == reporter
        ]
        return sorted(found, key=lambda event: event["metadata"]["creationTimestamp"])

    def emptied(self, keep_crds=False):
        """This control plane without the objects of earlier suites. With `keep_crds`, the CRDs of the chart may exist."""
        if self.used:
            self.reset(keep_crds)
        self.used = True
        return self

    def reset(self, keep_crds):
        """Deletes the objects that tests created: releases, CRDs with their objects, nodes, pods and namespaces. Nothing that acts on
        these objects may run any more. Namespaces disappear later; a namespace of the same name is created after that."""
        for release in json.loads(self.helm("list", "--all-namespaces", "--output", "json").stdout):
            self.helm("uninstall", release["name"], "--namespace", release["namespace"], "--no-hooks")
        crds = [crd["metadata"]["name"] for crd in self.api.list("CustomResourceDefinition")]
        for kind, crd in CUSTOM_KINDS.items():
            if crd in crds:
                self.delete_with_finalizers(kind)
        self.delete_with_finalizers("Node")
        if not keep_crds:
            self.delete_crds(crds)
        for kind in ("Deployment", "StatefulSet", "DaemonSet", "Job", "PodDisruptionBudget"):
            for item in self.api.list(kind, "default"):
                self.api.delete(kind, item["metadata"]["name"], "default")
        for namespace in self.api.list("Namespace"):
            if namespace["metadata"]["name"] not in KEPT_NAMESPACES:
                self.api.delete("Namespace", namespace["metadata"]["name"])
        # A lease of a killed replica would delay the next one until it expires.
        self.api.delete_all("Lease", NAMESPACE)

        def left():
            self.api.delete_all("Pod", grace_seconds=0)
            kinds = ("Pod", "Node", *(() if keep_crds else ("CustomResourceDefinition",)))
            return {kind: len(found) for kind in kinds if (found := self.api.list(kind))}

        wait_until(lambda: not left(), RESET_TIMEOUT, "an empty cluster", left, every=0.2)
        # Events about cluster-scoped objects are in this namespace.
        self.api.delete_all("Event", "default")
        if not self.default_scheduler:
            self.scheduler()

    def delete_crds(self, names):
        """Deletes CRDs with their objects and waits until they are gone. The API server's finalizer drops a CRD whose status it
        could not update for a conflict, until the CRD's next event. It can be minutes late, so an annotation is that event."""
        for name in names:
            self.api.delete("CustomResourceDefinition", name)

        def left():
            found = filter(None, (self.api.find("CustomResourceDefinition", name) for name in names))
            return {crd["metadata"]["name"]: crd["status"].get("conditions") for crd in found}

        try:
            wait_until(lambda: not left(), CRD_TIMEOUT, "CRDs deleted", left)
        except WaitTimeout:
            for name in left():
                with contextlib.suppress(kube.NotFoundError):
                    self.api.annotate("CustomResourceDefinition", name, {"e2e/deleted-again": "true"})
            wait_until(lambda: not left(), RESET_TIMEOUT, "CRDs deleted after an event", left)

    def delete_with_finalizers(self, kind):
        for item in self.api.list(kind):
            name = item["metadata"]["name"]
            with contextlib.suppress(kube.NotFoundError):
                if item["metadata"].get("finalizers"):
                    self.api.patch(kind, name, {"metadata": {"finalizers": None}})
                self.api.delete(kind, name)


class Kubelets:
    """The kubelets of an EC2 endpoint's instances in a control plane (e2e/kubelets), as a context manager. With `cluster`, of the
    instances of that cluster only."""

    def __init__(self, plane, endpoint, boot_delay="500ms-1s", cluster=None):
        self.plane, self.endpoint, self.boot_delay, self.cluster = plane, endpoint, boot_delay, cluster
        self.log = plane.dir / "logs" / "kubelets.log"
        self.record = plane.dir / "pids" / "kubelets.pid"

    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *_):
        self.down()

    def up(self, endpoint=None, check=True):
        arguments = ["--endpoint", endpoint or self.endpoint, "--boot-delay", self.boot_delay]
        if self.cluster:
            arguments += ["--cluster", self.cluster]
        return run(sys.executable, HERE / "kubelets", "up", self.plane.dir, *arguments, check=check)

    def down(self):
        return run(sys.executable, HERE / "kubelets", "down", self.plane.dir)

    @property
    def pid(self):
        return int(self.record.read_text().split()[0])


class Stowage:
    """The service: its installation in a control plane, and its process. `env` are more variables of its environment, `settings` more
    of the chart's settings, such as `cloud`."""

    def __init__(self, plane, placement, boot_delay="1s-2s", notice="2m", seed=1, env=None, **settings):
        self.plane = plane
        self.placement = placement
        self.dir = plane.dir / "stowage"
        self.log = plane.dir / "logs" / "stowage.log"
        self.pid_file = plane.dir / "pids" / "stowage.pid"
        self.state = self.dir / "instances.jsonl"
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        simulated = {"bootDelay": boot_delay, "interruptionNotice": notice, "seed": seed, "stateFile": str(self.state)}
        self.given = {"cloud": "simulated", "placement": placement, "simulated": simulated, **settings}
        self.env = env or {}
        self.process = None
        self.restarts = 0

    def __enter__(self):
        try:
            self.install()
            self.start()
            self.scheduler()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    # Installation

    def install(self):
        """The chart by helm, and a kubeconfig of its ServiceAccount. Logs and instances of an earlier installation in the same control
        plane are removed."""
        shutil.rmtree(self.dir, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        self.dir.mkdir()
        self.helm(self.values())
        deployments = self.plane.api.list("Deployment", NAMESPACE)
        self.deployment = next((item for item in deployments if item["metadata"]["name"] == RELEASE), None)
        if self.deployment is None:
            raise Failure(f"the chart created no Deployment {RELEASE} in namespace {NAMESPACE}")
        account = self.deployment["spec"]["template"]["spec"]["serviceAccountName"]
        self.plane.service_account(f"{NAMESPACE}/{account}", self.dir / "kubeconfig")

    def helm(self, values):
        """Installs or upgrades the chart with these values."""
        chart = os.environ.get("STOWAGE_CHART") or ROOT / "charts" / "stowage"
        file = self.dir / "values.json"
        file.write_text(json.dumps(values, indent=2))
        self.plane.helm("upgrade", "--install", RELEASE, chart, "--namespace", NAMESPACE, "--create-namespace", "--values", file)

    def values(self):
        """Values of the chart, with certificates of the control plane's own CA."""
        self.certificate("tls", "--name", "stowage", "--ip", "127.0.0.1", "--dns", "localhost")
        self.certificate("client", "--name", "stowage-scheduler", "--client")
        bundle = base64.b64encode((self.dir / "tls" / "ca.crt").read_bytes()).decode()
        return {
            "replicas": 0,
            "settings": self.given,
            "controller": {"image": {"repository": IMAGE}, "env": [{"name": name, "value": value} for name, value in self.env.items()]},
            "tls": {"mode": "secret"},
            "webhook": {"url": f"{self.url}/mutate", "caBundle": bundle},
            "dashboard": {"enabled": True},
        }

    def dashboard(self):
        """The file of the dashboard that the chart installed."""
        file = self.dir / "dashboard.json"
        file.write_text(self.plane.api.get("ConfigMap", f"{RELEASE}-dashboard", NAMESPACE)["data"]["stowage.json"])
        return file

    def certificate(self, folder, *arguments):
        self.plane.certificate(self.dir / folder, *arguments)

    def scheduler(self):
        """Configures the extender in kube-scheduler, if the placement uses one."""
        if self.placement != "extender":
            return
        files = {"certFile": "client/tls.crt", "keyFile": "client/tls.key", "caFile": "tls/ca.crt"}
        self.plane.scheduler(
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {"kubeconfig": "@KUBECONFIG@", "qps": 500, "burst": 1000},
                "leaderElection": {"leaderElect": False},
                "percentageOfNodesToScore": 100,
                "podMaxBackoffSeconds": 2,
                "extenders": [
                    {
                        "urlPrefix": f"{self.url}/v1",
                        "filterVerb": "filter",
                        "prioritizeVerb": "prioritize",
                        "preemptVerb": "preempt",
                        "weight": 13,
                        "enableHTTPS": True,
                        "tlsConfig": {name: str(self.dir / file) for name, file in files.items()},
                        "httpTimeout": "1s",
                        "nodeCacheCapable": True,
                        "ignorable": True,
                    }
                ],
            }
        )

    # The process

    def settings(self):
        """Flags and environment variables that the chart's Deployment gives the container, if they are literal values."""
        container = self.deployment["spec"]["template"]["spec"]["containers"][0]
        environment = {entry["name"]: entry["value"] for entry in container.get("env", []) if "value" in entry}
        flags, name = {}, None
        for argument in container.get("args", []):
            if argument.startswith("--"):
                name, given, value = argument.partition("=")
                flags[name] = value if given else None
            elif name:
                flags[name] = argument
        return flags, environment

    def command(self):
        flags, environment = self.settings()
        flags |= {
            "--bind-address": "127.0.0.1",
            "--https-port": str(self.port),
            "--metrics-port": "0",
            "--health-probe-port": "0",
            "--address-file": str(self.dir / "addresses.json"),
            "--cert-dir": str(self.dir / "tls"),
            "--leader-election-namespace": NAMESPACE,
            "--log-format": "json",
        }
        arguments = [name if value is None else f"{name}={value}" for name, value in flags.items()]
        base = {name: os.environ[name] for name in ("PATH", "HOME", "RUST_BACKTRACE") if name in os.environ}
        return [str(binary()), "controller", *arguments], {**base, **environment, "KUBECONFIG": str(self.dir / "kubeconfig")}

    def start(self):
        """Starts the process and waits until it is ready."""
        self.spawn()
        wait_until(lambda: self.alive() and self.ready(), READY_TIMEOUT, "stowage ready", lambda: f"{self.probe('/readyz')}\n{self.tail()}")

    def spawn(self):
        """Starts the process and waits until it listens."""
        command, environment = self.command()
        addresses = self.dir / "addresses.json"
        addresses.unlink(missing_ok=True)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=self.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        write_pid(self.pid_file, self.process.pid)
        wait_until(lambda: self.alive() and addresses.exists(), READY_TIMEOUT, "stowage listening", self.tail)
        self.addresses = json.loads(addresses.read_text())

    def alive(self):
        """True, or a Failure. A replica that lost its lease because the machine stalled is restarted, as by its Deployment."""
        if self.process is None or self.process.poll() is not None:
            if self.process and messages.LEASE_LOST in self.tail(1) and self.restarts < RESTARTS:
                self.restarts += 1
                print(f"\nstowage lost its lease and is restarted ({self.restarts}): {messages.LEASE_LOST}", flush=True)
                self.start()
                return True
            raise Failure(f"stowage ended with status {self.process and self.process.returncode}; the end of {self.log}:\n{self.tail()}")
        return True

    def probe(self, path, listener="health"):
        """Status and body of a GET on one of the plain listeners; status 0 if it is unreachable."""
        try:
            answer = http().get(f"http://{self.addresses[listener]}{path}", timeout=5)
        except requests.RequestException as error:
            return 0, str(error)
        return answer.status_code, answer.text

    def ready(self):
        return self.probe("/readyz")[0] == 200

    def metrics(self):
        """Samples of /metrics by name with labels."""
        lines = (line for line in self.probe("/metrics", "metrics")[1].splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def metric(self, name, *labels):
        """The sum of a metric's samples that have these labels, each as `name="value"`."""
        return sum(value for sample, value in self.metrics().items() if re.match(rf"{name}([{{]|$)", sample) and all(label in sample for label in labels))

    def post(self, path, body, client="client"):
        """Status and body of a POST to the HTTPS listener, with the client certificate of this folder or without one. Raises
        requests.ConnectionError when the handshake fails."""
        return self.request("POST", path, client, data=body, headers={"Content-Type": "application/json"})

    def request(self, method, path, client, **options):
        """Status and body of a request to the HTTPS listener: see `post`."""
        pair = (str(self.dir / client / "tls.crt"), str(self.dir / client / "tls.key")) if client else None
        answer = http().request(method, f"{self.url}{path}", timeout=10, cert=pair, verify=str(self.dir / "tls" / "ca.crt"), **options)
        return answer.status_code, answer.text

    def kill(self):
        """SIGKILL, as in a crash."""
        self.process.kill()
        self.process.wait()

    def stop(self):
        """SIGTERM, then SIGKILL. Idempotent. Returns the exit status."""
        if self.process is None:
            return None
        stop([self.pid_file], patience=STOP_TIMEOUT)
        self.process.wait()
        return self.process.returncode

    # Logs and state

    def lines(self, message=None):
        """Log lines as objects, oldest first; with `message`, those of that message."""
        if not self.log.exists():
            return []
        out = []
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and (message is None or entry.get("message") == message):
                out.append(entry)
        return out

    def launch_calls(self):
        """When each NodeClaim was launched, by the log: the time of the call, of the monotonic clock."""
        begin = time.time() - time.monotonic()
        return {line["NodeClaim"]["name"]: line["called_ms"] / 1000 - begin for line in self.lines(messages.LAUNCHED) if "called_ms" in line}

    def errors(self):
        """Log lines of level ERROR, but for the last words of a replica that `alive` restarts, and those of a write that a policy of the
        chart denied."""
        found = [(line, json.dumps(line)) for line in self.lines()]
        is_error = lambda line, text: line.get("level") == "ERROR" and messages.LEASE_LOST not in text
        return [line for line, text in found if is_error(line, text) or "ValidatingAdmissionPolicy" in text]

    def tail(self, lines=15):
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def warnings(self, most=40):
        """The warnings and errors of the log, one line per message with its count and its first occurrence."""
        found = {}
        for line in self.lines():
            if line.get("level") in ("WARN", "ERROR"):
                found.setdefault(line.get("message"), []).append(line)
        return "\n".join(f"{len(lines)} x {json.dumps(lines[0])[:600]}" for lines in list(found.values())[:most])

    def instances(self, now=None):
        """Simulated instances that are not shut down, by id, read from the state file."""
        now = time.time() * 1000 if now is None else now
        found = {}
        for line in self.state.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # incomplete: the service is writing it
            if entry["entry"] == "launched":
                found[entry["id"]] = entry
            elif entry["entry"] == "shutdown" and entry["id"] in found:
                found[entry["id"]]["shutdown_at_ms"] = entry["at_ms"]
            elif entry["entry"] == "forgotten":
                found.pop(entry["id"], None)
        return {id: entry for id, entry in found.items() if (entry.get("shutdown_at_ms") or now + 1) > now}

    def prices(self):
        """USD per hour by `type/zone/capacity type`, of the offerings that the log names."""
        out = {}
        for message in (messages.PLANNED_NODE, messages.LAUNCHED):
            for line in self.lines(message):
                if "usd_per_hour" in line:
                    out[f"{line['instance-type']}/{line['zone']}/{line['capacity-type']}"] = float(line["usd_per_hour"])
        return out

    def cost(self, claims):
        """USD per hour of the instances of these NodeClaims."""
        prices = self.prices()
        total = 0.0
        for claim in claims:
            labels = claim["metadata"].get("labels", {})
            if not kube.is_true(claim, "Launched"):
                continue
            offering = "/".join(labels.get(name, "") for name in (kube.INSTANCE_TYPE, kube.ZONE, kube.CAPACITY_TYPE))
            planned = kube.annotations_of(claim).get(kube.PLANNED_OFFERING)
            price = prices.get(offering, prices.get(planned))
            if price is None:
                raise Failure(f"the log has no price of {offering}, planned as {planned}")
            total += price
        return total


def http():
    """An HTTP session without proxies and user settings."""
    session = requests.Session()
    session.trust_env = False
    return session
