"""Attackers of the service's ports, from other addresses of the loopback network, and an observer of what honest clients see meanwhile."""

import contextlib
import http.client
import json
import pathlib
import socket
import ssl
import threading
import time

import requests
import urllib3
from requests.adapters import HTTPAdapter

# Attackers do not verify certificates.
urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)


class From(HTTPAdapter):
    """Requests from this local address."""

    def __init__(self, address):
        self.address = address
        super().__init__()

    def init_poolmanager(self, *args, **kwargs):
        super().init_poolmanager(*args, source_address=(self.address, 0), **kwargs)


def memory(pid, name="VmRSS"):
    """A line of /proc/PID/status in MiB: VmRSS, or VmHWM, its peak."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def address(text):
    host, _, port = text.rpartition(":")
    return host, int(port)


def connect(target, source):
    """A TCP connection; None if the service refuses or closes it."""
    try:
        return socket.create_connection(target, timeout=5, source_address=(source, 0))
    except OSError:
        return None


@contextlib.contextmanager
def silent(target, source, count):
    """Connections that send nothing. Yields the sockets; connections that the server closes are not opened again."""
    found = [sock for _ in range(count) if (sock := connect(target, source))]
    try:
        yield found
    finally:
        for sock in found:
            sock.close()


@contextlib.contextmanager
def idle_tls(target, source, count):
    """TLS sessions that send no request."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    found = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            if sock := connect(target, source):
                found.append(context.wrap_socket(sock))
    try:
        yield found
    finally:
        for sock in found:
            sock.close()


@contextlib.contextmanager
def slow_bodies(url, source, count):
    """Requests whose bodies arrive one byte a second, from one thread each."""
    stop = threading.Event()

    def send():
        host, port = address(url.removeprefix("https://"))
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPSConnection(host, port, timeout=5, context=context, source_address=(source, 0))
            connection.putrequest("POST", "/mutate")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(3 << 20))
            connection.endheaders()
            while not stop.wait(1):
                connection.send(b"[")

    threads = [threading.Thread(target=send, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


@contextlib.contextmanager
def flood(url, source, bodies, count):
    """Clients that post bodies over and over. Yields the statuses that they get."""
    stop, statuses = threading.Event(), []

    def send(offset):
        session = requests.Session()
        session.trust_env, session.verify = False, False
        session.mount("https://", From(source))
        number = offset
        while not stop.is_set():
            number += 1
            try:
                answer = session.post(f"{url}/mutate", data=bodies[number % len(bodies)], headers={"Content-Type": "application/json"}, timeout=15)
                statuses.append(answer.status_code)
            except requests.RequestException:
                statuses.append(0)

    threads = [threading.Thread(target=send, args=(at,), daemon=True) for at in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)


def review(pod):
    """The body of an admission review of this pod."""
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    resource = {"group": "", "version": "v1", "resource": "pods"}
    request = {"uid": "u", "kind": kind, "resource": resource, "operation": "CREATE", "namespace": "n", "object": pod}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})


def large_bodies():
    """The most expensive bodies that are known: large arrays of small values, deep nesting, many members, many constraints."""
    size = 3 << 20
    wide = review({"spec": {"containers": "@"}}).replace('"@"', "[" + "0," * (size // 2) + "0]")
    deep = review({"spec": {"containers": "@"}}).replace('"@"', "[" * (size // 2) + "]" * (size // 2))
    labels = {f"k{number}": "" for number in range(150_000)}
    constraints = [{"maxSkew": 1, "topologyKey": f"failure-domain.beta.kubernetes.io/zone{number}", "whenUnsatisfiable": "DoNotSchedule"} for number in range(20_000)]
    many = review({"metadata": {"labels": labels}, "spec": {"topologySpreadConstraints": constraints}})
    return [wide.encode(), deep.encode(), many.encode()]


class Observer:
    """Probes and honest requests while somebody attacks, as a context manager: how many were answered, how late, and the peak of
    memory."""

    def __init__(self, stowage, every=0.2):
        self.stowage, self.every = stowage, every
        self.answers = {"livez": [], "readyz": [], "mutate": [], "metrics": []}
        self.stop = threading.Event()

    def __enter__(self):
        pathlib.Path(f"/proc/{self.stowage.process.pid}/clear_refs").write_text("5")  # resets the peak
        self.before = memory(self.stowage.process.pid)
        self.threads = [threading.Thread(target=self.watch, args=(name,), daemon=True) for name in self.answers]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join(20)
        self.peak = memory(self.stowage.process.pid, "VmHWM")

    def watch(self, name):
        ask = {
            "livez": lambda: self.stowage.probe("/livez")[0],
            "readyz": lambda: self.stowage.probe("/readyz")[0],
            "metrics": lambda: self.stowage.probe("/metrics", "metrics")[0],
            "mutate": lambda: self.stowage.post("/mutate", review({"spec": {"containers": []}}), client=None)[0],
        }[name]
        while not self.stop.is_set():
            begin = time.monotonic()
            try:
                status = ask()
            except requests.RequestException:
                status = 0
            self.answers[name].append((status, time.monotonic() - begin))
            self.stop.wait(self.every)

    def observe(self, seconds):
        """Observes for this time, and on a busy machine until as many probes and reviews were answered, at most for ten times as long."""
        begin = time.monotonic()
        wanted = lambda: all(len(self.answers[name]) >= seconds for name in ("livez", "readyz", "mutate"))
        while (passed := time.monotonic() - begin) < seconds or (not wanted() and passed < 10 * seconds):
            time.sleep(self.every)

    def failed(self, name):
        return [status for status, _ in self.answers[name] if status != 200]

    def report(self, attack):
        """A line for people."""
        columns = []
        for name, answers in self.answers.items():
            slowest = max((seconds for _, seconds in answers), default=0)
            columns.append(f"{name} {len(answers) - len(self.failed(name))}/{len(answers)}, slowest {slowest * 1000:.0f} ms")
        print(f"\n{attack}: {'; '.join(columns)}; memory {self.before:.0f} MiB before, peak {self.peak:.0f} MiB", flush=True)
