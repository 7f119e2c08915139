"""A control plane with Stowage beside it, for the end-to-end tests and the demo.

`ControlPlane` starts and stops e2e/control-plane in a directory. `Stowage` installs the chart with the real helm and runs the service
as a process of this machine, since there is no container runtime: with the settings that the chart gives its Deployment, and with
nothing but the rights of the chart's ServiceAccount.

Environment: STOWAGE_BIN names the binary (default: target/debug/stowage of this checkout), STOWAGE_CHART the chart.
"""

import base64
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time

import observe

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
NAMESPACE = "stowage"
RELEASE = "stowage"
READY_TIMEOUT = 30.0  # seconds until the service is ready
STOP_TIMEOUT = 8.0  # seconds between SIGTERM and SIGKILL
STARVED = "the API server took no renewal"  # why a replica starts over where the machine stood still for ten seconds
RESTARTS = 2  # so often in the life of an installation


class Failure(Exception):
    """Something a person can act on; the message is all they are shown."""


def binary():
    """The service's binary."""
    path = pathlib.Path(os.environ.get("STOWAGE_BIN") or ROOT / "target" / "debug" / "stowage").resolve()
    if not os.access(path, os.X_OK):
        raise Failure(f"{path} is not there: run `cargo build`, or set STOWAGE_BIN")
    return path


def run(*command, stdin=None, env=None, check=True, timeout=180):
    """Runs a command to its end and returns it done. A failure shows what it said."""
    done = subprocess.run(
        [str(part) for part in command],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=env,
        # Ctrl-C is ours to handle: it must not end half of a clean-up.
        start_new_session=True,
    )
    if check and done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-3000:]
        raise Failure(f"{pathlib.Path(str(command[0])).name} {' '.join(str(part) for part in command[1:4])} failed ({done.returncode}): {said}")
    return done


def wait_until(predicate, timeout, what, last=lambda: "nothing", every=0.05):
    """Asks until `predicate()` is true and returns its answer. For what no watch tells; `Mirror.wait` is for the rest."""
    deadline = time.monotonic() + timeout
    while not (result := predicate()):
        if time.monotonic() > deadline:
            raise observe.Timeout(f"{what}: not within {timeout:.0f} s; last seen: {last()}")
        time.sleep(every)
    return result


def free_port():
    """A port nobody listens on, outside the range that outgoing connections take: it stays ours while the service is down."""
    low = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000, low if low > 12_000 else 30_000)
    for port in random.sample(ports, min(100, len(ports))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise Failure("no free port was found on 127.0.0.1")


class ControlPlane:
    """A running control plane, as a context manager. In a directory of its own that it removes, unless one is given."""

    def __init__(self, directory=None, keep=False):
        self.given = directory
        self.dir = pathlib.Path(directory) if directory else None
        self.keep = keep
        self.api = None

    def __enter__(self):
        self.dir = pathlib.Path(self.dir or tempfile.mkdtemp(prefix="stowage-e2e-")).resolve()
        try:
            self.script("up", self.dir, timeout=1800)
        except BaseException:
            self.__exit__()
            raise
        self.state = json.loads((self.dir / "state.json").read_text())
        self.bin = pathlib.Path(self.state["bin"])
        self.api = observe.Api(self.dir)
        return self

    def __exit__(self, *_):
        if self.api:
            self.api.close()
        if self.keep or self.dir is None:
            return
        self.script("down", self.dir)
        if not self.given:
            shutil.rmtree(self.dir, ignore_errors=True)

    def script(self, command, *arguments, timeout=180):
        return run(HERE / "control-plane", command, *arguments, timeout=timeout)

    @property
    def env(self):
        return {**os.environ, "KUBECONFIG": str(self.dir / "kubeconfig"), "HOME": str(self.dir)}

    def kubectl(self, *arguments, stdin=None, check=True):
        return run(self.bin / "kubectl", *arguments, stdin=stdin, env=self.env, check=check)

    def helm(self, *arguments):
        return run(self.bin / "helm", *arguments, env=self.env)

    def apply(self, *objects):
        """Applies objects server-side and at once, namespaces first: a burst as a busy cluster sees it."""
        first = [item for item in objects if item["kind"] == "Namespace"]
        rest = [item for item in objects if item["kind"] != "Namespace"]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for group in (first, rest):
                list(pool.map(self.api.apply, group))

    def scheduler(self, config=None):
        """Restarts kube-scheduler with this configuration, or with the plain one."""
        if config is None:
            return self.script("scheduler", self.dir)
        file = self.dir / "extender-scheduler.json"
        file.write_text(json.dumps(config, indent=2))
        return self.script("scheduler", self.dir, "--config", file)

    def events(self, about=None, reason=None, reporter="stowage"):
        """Events of `reporter` on the object of this name, newest last."""
        found = [
            event
            for event in self.api.items(observe.EVENTS)
            if (about is None or event["regarding"].get("name") == about)
            and (reason is None or event.get("reason") == reason)
            and event.get("reportingController") == reporter
        ]
        return sorted(found, key=lambda event: event["metadata"]["creationTimestamp"])


class Kubelets:
    """The kubelets of an EC2 endpoint's instances in a control plane (e2e/kubelets), as a context manager. With `cluster`, of that one's
    instances alone."""

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
        return run(HERE / "kubelets", "up", self.plane.dir, *arguments, check=check)

    def down(self):
        return run(HERE / "kubelets", "down", self.plane.dir)

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
        self.state = self.dir / "instances.jsonl"
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        simulated = {"bootDelay": boot_delay, "interruptionNotice": notice, "seed": seed, "stateFile": str(self.state)}
        self.given = {"cloud": "simulated", "placement": placement, "simulated": simulated, **settings}
        self.env = env or {}
        self.process = None
        self.restarts = 0

    def __enter__(self):
        self.install()
        try:
            self.start()
            self.scheduler()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    # Installing

    def install(self):
        """The chart by helm, the certificates, and a kubeconfig of the chart's ServiceAccount."""
        self.dir.mkdir(exist_ok=True)
        self.certificate("tls", "--name", "stowage", "--ip", "127.0.0.1", "--dns", "localhost")
        self.certificate("client", "--name", "kube-scheduler", "--client")
        bundle = base64.b64encode((self.dir / "tls" / "ca.crt").read_bytes()).decode()
        values = {
            "replicas": 0,
            "settings": self.given,
            "controller": {"env": [{"name": name, "value": value} for name, value in self.env.items()]},
            "tls": {"mode": "secret"},
            "webhook": {"url": f"{self.url}/mutate", "caBundle": bundle},
        }
        chart = os.environ.get("STOWAGE_CHART") or ROOT / "charts" / "stowage"
        file = self.dir / "values.json"
        file.write_text(json.dumps(values, indent=2))
        self.plane.helm("upgrade", "--install", RELEASE, chart, "--namespace", NAMESPACE, "--create-namespace", "--values", file)
        self.deployment = self.the_one("/apis/apps/v1", "deployments")
        account = self.deployment["spec"]["template"]["spec"]["serviceAccountName"]
        self.plane.script("kubeconfig", self.plane.dir, "--service-account", f"{NAMESPACE}/{account}", "--out", self.dir / "kubeconfig")

    def the_one(self, group, plural):
        found = self.plane.api.items(f"{group}/namespaces/{NAMESPACE}/{plural}")
        if len(found) != 1:
            raise Failure(f"the chart made {len(found)} {plural} in namespace {NAMESPACE}, expected one")
        return found[0]

    def certificate(self, folder, *arguments):
        self.plane.script("cert", self.plane.dir, *arguments, "--out", self.dir / folder)

    def scheduler(self):
        """Gives kube-scheduler the extender, where the placement uses one."""
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

    # Running

    def settings(self):
        """Flags and environment variables that the chart's Deployment gives the container, as far as they are plain values."""
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
            "--client-ca": str(self.dir / "tls" / "ca.crt"),
            "--leader-election-namespace": NAMESPACE,
            # Read by this harness; people read it as well.
            "--log-format": "json",
        }
        arguments = [name if value is None else f"{name}={value}" for name, value in flags.items()]
        base = {name: os.environ[name] for name in ("PATH", "HOME", "RUST_BACKTRACE") if name in os.environ}
        return [str(binary()), "controller", *arguments], {**base, **environment, "KUBECONFIG": str(self.dir / "kubeconfig")}

    def start(self):
        """Starts the process and waits until it is ready."""
        command, environment = self.command()
        addresses = self.dir / "addresses.json"
        addresses.unlink(missing_ok=True)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=self.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        (self.dir / "pid").write_text(f"{self.process.pid}\n")
        wait_until(lambda: self.alive() and addresses.exists(), READY_TIMEOUT, "stowage listening", self.tail)
        self.addresses = json.loads(addresses.read_text())
        wait_until(lambda: self.alive() and self.ready(), READY_TIMEOUT, "stowage ready", lambda: f"{self.probe('/readyz')}\n{self.tail()}")

    def alive(self):
        """True, or a Failure. A replica that lost its lease since the machine stood still is started again, as its Deployment would."""
        if self.process is None or self.process.poll() is not None:
            if self.process and STARVED in self.tail(1) and self.restarts < RESTARTS:
                self.restarts += 1
                print(f"\nstowage lost its lease and is started again ({self.restarts}): {STARVED}", flush=True)
                self.start()
                return True
            raise Failure(f"stowage ended with status {self.process and self.process.returncode}; the end of {self.log}:\n{self.tail()}")
        return True

    def probe(self, path, listener="health"):
        """Status and body of a GET on one of the plain listeners; status 0 when it can't be reached."""
        connection = http.client.HTTPConnection(self.addresses[listener], timeout=5)
        try:
            with contextlib.closing(connection):
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, response.read().decode()
        except OSError as error:
            return 0, str(error)

    def ready(self):
        return self.probe("/readyz")[0] == 200

    def metrics(self):
        """Samples of /metrics by name with labels."""
        lines = (line for line in self.probe("/metrics", "metrics")[1].splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def post(self, path, body, client="client"):
        """Status and body of a POST of text to the HTTPS listener, with the client certificate in this folder or with none.
        Raises OSError when the handshake fails."""
        tls = ssl.create_default_context(cafile=self.dir / "tls" / "ca.crt")
        if client:
            tls.load_cert_chain(self.dir / client / "tls.crt", self.dir / client / "tls.key")
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=tls)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()

    def kill(self):
        """As in a crash: SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self):
        """SIGTERM, then SIGKILL. Doing so again is fine."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        (self.dir / "pid").unlink(missing_ok=True)
        return self.process.returncode

    # What it says and knows

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

    def tail(self, lines=15):
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def complaints(self):
        """Log lines of warnings and errors."""
        return [line for line in self.lines() if line.get("level") in ("WARN", "ERROR")]

    def instances(self, now=None):
        """Simulated instances that neither shut down nor are gone, by id, read from the state file."""
        now = time.time() * 1000 if now is None else now
        found = {}
        for line in self.state.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # Being written.
            if entry["entry"] == "launched":
                found[entry["id"]] = entry
            elif entry["entry"] == "shutdown" and entry["id"] in found:
                found[entry["id"]]["shutdown_at_ms"] = entry["at_ms"]
            elif entry["entry"] == "forgotten":
                found.pop(entry["id"], None)
        return {id: entry for id, entry in found.items() if (entry.get("shutdown_at_ms") or now + 1) > now}

    def prices(self):
        """USD per hour by `type/zone/capacity type`, as far as the log names them."""
        out = {}
        for message in ("planned node", "launched"):
            for line in self.lines(message):
                if "usd_per_hour" in line:
                    out[f"{line['instance_type']}/{line['zone']}/{line['capacity_type']}"] = float(line["usd_per_hour"])
        return out

    def cost(self, claims):
        """USD per hour of these NodeClaims' instances."""
        prices = self.prices()
        total = 0.0
        for claim in claims:
            labels, annotations = claim["metadata"].get("labels", {}), claim["metadata"].get("annotations", {})
            if not observe.holds(claim, "Launched"):
                continue
            offering = "/".join(labels.get(name, "") for name in (observe.INSTANCE_TYPE, observe.ZONE, observe.CAPACITY_TYPE))
            planned = annotations.get(observe.PLANNED_OFFERING)
            price = prices.get(offering, prices.get(planned))
            if price is None:
                raise Failure(f"no price is known of {offering}, planned as {planned}")
            total += price
        return total


def stop_process(pid_file, name):
    """Ends the process recorded in a file, if it still is the one called `name`."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        if name in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[0]:
            handle = os.pidfd_open(pid)
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            wait_until(lambda: not pathlib.Path(f"/proc/{pid}").exists(), STOP_TIMEOUT, f"the end of {name}")
    pid_file.unlink(missing_ok=True)
