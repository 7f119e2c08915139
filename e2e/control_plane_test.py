"""The properties of e2e/control-plane that the other end-to-end tests depend on, on real control planes."""

import http.server
import json
import os
import pathlib
import re
import signal
import ssl
import subprocess
import tempfile
import threading
import time

import pytest

import harness
import observe
from harness import HERE
from kube import condition, is_true, taint_keys
from waiting import wait_until

CONTROL_PLANE = HERE / "control-plane"
COMPONENTS = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok"]
UP_SECONDS = 15.0
IDLE_SECONDS = 2.0  # in which kwok would change a node that it manages


def command(*arguments, check=True):
    return harness.run(CONTROL_PLANE, *arguments, check=check)


def processes(directory):
    """Ids of the processes with `directory` in their command line."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(str(directory).encode() in word for word in words):
            found.append(int(entry.name))
    return found


def node(name):
    """A node as a kubelet registers it. Without Ready=False the node lifecycle controller removes the not-ready taint."""
    resources = {"cpu": "4", "memory": "16Gi", "pods": "58", "ephemeral-storage": "20Gi"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/arch": "arm64", "kubernetes.io/os": "linux"},
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "status": {
            "capacity": resources,
            "allocatable": {**resources, "cpu": "3920m"},
            "conditions": [{"type": "Ready", "status": "False", "reason": "KubeletNotReady"}],
            "addresses": [{"type": "InternalIP", "address": "10.0.0.7"}],
            "nodeInfo": dict.fromkeys(
                ["bootID", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "machineID", "operatingSystem", "osImage", "systemUUID"], ""
            )
            | {"architecture": "arm64", "kubeletVersion": "v1.34.4"},
        },
    }


def pod_template(app, node_name=None, **spec):
    selector = {"kubernetes.io/hostname": node_name} if node_name else {}
    containers = [{"name": "main", "image": "none", "resources": {"requests": {"cpu": "100m"}}}]
    return {"metadata": {"labels": {"app": app}}, "spec": {"containers": containers, "nodeSelector": selector, **spec}}


def workload(kind, app, template, namespace="default", **spec):
    group = "batch/v1" if kind == "Job" else "apps/v1"
    selector = {} if kind == "Job" else {"selector": {"matchLabels": {"app": app}}}
    return {"apiVersion": group, "kind": kind, "metadata": {"name": app, "namespace": namespace}, "spec": {**selector, "template": template, **spec}}


class Cluster:
    """The shared control plane with a node, and a pod whose node was deleted at the beginning."""

    def __init__(self, plane):
        self.plane, self.api = plane, plane.api
        self.create(node("worker"), node("doomed"), workload("Deployment", "orphan", pod_template("orphan", "doomed"), replicas=1))
        self.orphan = wait_until(lambda: self.ready("orphan"), 30, "the orphan ready")[0]["metadata"]["name"]
        self.api.delete("Node", "doomed")
        self.node_deleted = time.monotonic()

    def create(self, *objects):
        for item in objects:
            self.api.create(item)

    def ready(self, app):
        """The pods of an app that are Running and Ready."""
        pods = [pod for pod in self.api.list("Pod") if pod["metadata"]["labels"].get("app") == app]
        return [pod for pod in pods if pod["status"]["phase"] == "Running" and is_true(pod, "Ready")]

    def wait_ready(self, app, count=1):
        return wait_until(lambda: len(pods := self.ready(app)) == count and pods, 30, f"{count} ready pods of {app}")


@pytest.fixture(scope="module")
def cluster(shared_control_plane):
    return Cluster(shared_control_plane.emptied())


class TestRunningControlPlane:
    def test_up_takes_less_than_fifteen_seconds(self, cluster):
        assert float(re.search(r"is up after ([\d.]+) s", cluster.plane.start_output)[1]) < UP_SECONDS

    def test_node_becomes_ready_and_keeps_its_initial_status(self, cluster):
        cluster.create(node("fresh"))
        begin = time.monotonic()
        made = wait_until(lambda: (found := cluster.api.get("Node", "fresh")) and not taint_keys(found) and found, 5, "node fresh without taints")
        print(f"\nnode ready and without taints after {time.monotonic() - begin:.1f} s")
        assert is_true(made, "Ready")
        for field in ("capacity", "allocatable", "addresses"):
            assert made["status"][field] == node("fresh")["status"][field]
        lease = wait_until(lambda: cluster.api.find("Lease", "fresh", "kube-node-lease"), 20, "the lease of node fresh")
        assert lease["spec"]["renewTime"]

    def test_annotation_makes_a_node_not_ready_and_tainted(self, cluster):
        cluster.create(node("sick"))
        found = lambda: cluster.api.get("Node", "sick")
        wait_until(lambda: is_true(found(), "Ready"), 20, "node sick ready")
        cluster.api.annotate("Node", "sick", {"stowage.dev/e2e-not-ready": "yes"})
        no_execute = lambda: [taint["key"] for taint in found()["spec"].get("taints", []) if taint["effect"] == "NoExecute"]
        wait_until(no_execute, 20, "a NoExecute taint on node sick")
        cluster.api.annotate("Node", "sick", {"stowage.dev/e2e-not-ready": None})
        wait_until(lambda: not taint_keys(found()), 20, "node sick without taints", found)

    def test_node_without_the_annotation_of_kwok_does_not_change(self, cluster):
        plain = node("unmanaged")
        plain["metadata"]["annotations"] = {}
        cluster.create(plain)
        time.sleep(IDLE_SECONDS)
        found = cluster.api.get("Node", "unmanaged")
        assert condition(found, "Ready")["status"] == "False"
        assert "node.kubernetes.io/not-ready" in taint_keys(found)

    def test_workloads_run(self, cluster):
        cluster.create(
            workload("Deployment", "web", pod_template("web", "worker"), replicas=3),
            workload("StatefulSet", "db", pod_template("db", "worker"), replicas=2, serviceName="db"),
            workload("DaemonSet", "agent", pod_template("agent", "worker")),
            workload("Job", "once", pod_template("once", "worker", restartPolicy="Never")),
        )
        begin = time.monotonic()
        for app, count in (("web", 3), ("db", 2), ("agent", 1)):
            cluster.wait_ready(app, count)
        print(f"\nworkloads ready after {time.monotonic() - begin:.1f} s")
        wait_until(lambda: is_true(cluster.api.get("Job", "once", "default"), "Complete"), 20, "the Job complete")
        pod = cluster.ready("web")[0]
        assert pod["status"]["hostIP"] == "10.0.0.7"
        assert pod["status"]["podIP"].startswith("10.128."), pod["status"]["podIP"]

    def test_drain_respects_a_disruption_budget(self, cluster):
        cluster.create(
            node("drained"),
            workload("Deployment", "guarded", pod_template("guarded", "drained"), replicas=2),
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": "guarded", "namespace": "default"},
                "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "guarded"}}},
            },
        )
        cluster.wait_ready("guarded", 2)
        budget = lambda: cluster.api.get("PodDisruptionBudget", "guarded", "default").get("status", {})
        wait_until(lambda: budget().get("currentHealthy") == 2, 20, "the budget counted", budget)
        refused = cluster.plane.kubectl("drain", "drained", "--timeout=2s", "--ignore-daemonsets", check=False)
        assert refused.returncode != 0
        assert "disruption budget" in refused.stderr
        assert len(cluster.ready("guarded")) == 2
        cluster.api.delete("PodDisruptionBudget", "guarded", "default")
        cluster.plane.kubectl("drain", "drained", "--timeout=20s", "--ignore-daemonsets")
        assert cluster.ready("guarded") == []

    def test_namespace_with_workloads_can_be_deleted(self, cluster):
        cluster.plane.namespace("brief")
        cluster.create(workload("Deployment", "x", pod_template("x", "worker"), "brief", replicas=1))
        wait_until(lambda: cluster.api.list("Pod", "brief"), 20, "a pod in namespace brief")
        cluster.api.delete("Namespace", "brief")
        wait_until(lambda: not cluster.api.find("Namespace", "brief"), 60, "namespace brief deleted")

    def test_service_account_has_the_rights_of_its_roles_only(self, cluster):
        config = cluster.plane.dir / "nobody.kubeconfig"
        kubectl = lambda *arguments, check=True: cluster.plane.kubectl(*arguments, check=check)
        kubectl("create", "serviceaccount", "nobody")
        cluster.plane.service_account("default/nobody", config)
        list_pods = lambda: kubectl("get", "pods", f"--kubeconfig={config}", check=False)
        assert "Forbidden" in list_pods().stderr
        kubectl("create", "rolebinding", "nobody", "--clusterrole=view", "--serviceaccount=default:nobody")
        wait_until(lambda: list_pods().returncode == 0, 20, "the ServiceAccount lists pods")
        assert kubectl("create", "token", "nobody").stdout.count(".") == 2

    def test_scheduler_calls_an_extender_over_mutual_tls(self, cluster, request):
        where = cluster.plane.dir
        cluster.plane.certificate(where / "serving", "--name", "extender", "--ip", "127.0.0.1")
        cluster.plane.certificate(where / "client", "--name", "kube-scheduler", "--client")
        clients = []

        class Extender(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                clients.append(dict(self.connection.getpeercert()["subject"][0])["commonName"])
                call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps({"NodeNames": call["NodeNames"]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Extender)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(where / "serving/tls.crt", where / "serving/tls.key")
        tls.load_verify_locations(where / "serving/ca.crt")
        tls.verify_mode = ssl.CERT_REQUIRED
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        request.addfinalizer(server.server_close)
        request.addfinalizer(server.shutdown)
        request.addfinalizer(cluster.plane.scheduler)
        begin = time.monotonic()
        cluster.plane.scheduler(
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {"kubeconfig": "@KUBECONFIG@"},
                "extenders": [
                    {
                        "urlPrefix": f"https://127.0.0.1:{server.server_address[1]}",
                        "filterVerb": "filter",
                        "nodeCacheCapable": True,
                        "enableHTTPS": True,
                        "tlsConfig": {"caFile": "@DIR@/serving/ca.crt", "certFile": "@DIR@/client/tls.crt", "keyFile": "@DIR@/client/tls.key"},
                    }
                ],
            }
        )
        print(f"\nscheduler restarted in {time.monotonic() - begin:.1f} s")
        cluster.create(workload("Deployment", "extended", pod_template("extended", "worker"), replicas=1))
        cluster.wait_ready("extended")
        assert "kube-scheduler" in clients

    def test_an_invalid_scheduler_configuration_is_reported(self, cluster):
        bad = cluster.plane.dir / "bad.json"
        bad.write_text('{"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration", "nonsense": 1}')
        refused = cluster.plane.script("scheduler", cluster.plane.dir, "--config", bad, check=False)
        cluster.plane.scheduler()
        assert refused.returncode != 0
        assert "nonsense" in refused.stderr

    def test_components_recover_from_crashes(self, cluster, subtests):
        where = cluster.plane.dir
        for name in COMPONENTS:
            with subtests.test(name):
                command("stop-component", where, name, "--kill")
                assert re.search(rf"(?m)^{name} +stopped$", command("status", where, check=False).stdout)
                command("start-component", where, name)
                command("status", where)
        cluster.create(node("after"), workload("Deployment", "after", pod_template("after", "after"), replicas=1))
        cluster.wait_ready("after")


class TestMirror:
    """The mirror of the other tests (observe.py)."""

    def test_a_watch_that_ends_resumes_without_repeating_events(self, cluster, monkeypatch):
        monkeypatch.setattr(observe, "WATCH_SECONDS", 1)
        events = []
        with observe.NodeMirror(cluster.api) as mirror:
            update = mirror.update
            monkeypatch.setattr(mirror, "update", lambda *event: (events.append(event), update(*event)))
            for number in range(4):
                name = f"mirrored-{number}"
                cluster.create(node(name))
                mirror.wait(lambda: name in mirror.objects["Node"], 20, f"node {name} in the mirror")
                time.sleep(1.0)
        versions = [(event, item["metadata"]["uid"], item["metadata"]["resourceVersion"]) for _, event, item in events]
        assert len(versions) >= 4
        assert len(set(versions)) == len(versions), "events were repeated"

    def test_it_continues_after_a_crash_of_the_api_server(self, cluster):
        where = cluster.plane.dir
        with observe.NodeMirror(cluster.api) as mirror:
            command("stop-component", where, "kube-apiserver", "--kill")
            command("start-component", where, "kube-apiserver")
            cluster.create(node("after-the-crash"))
            mirror.wait(lambda: "after-the-crash" in mirror.objects["Node"], 30, "the new node in the mirror")


@pytest.fixture
def new_directory(request):
    """Creates directories for control planes; `control-plane down` runs on each at the end."""

    def create():
        path = pathlib.Path(tempfile.mkdtemp(prefix="life-cycle-"))
        request.addfinalizer(lambda: command("down", path))
        return path

    return create


class TestLifeCycle:
    def test_two_run_concurrently_and_stop_independently(self, new_directory):
        first, second = new_directory(), new_directory()
        with harness.ControlPlane(first) as one, harness.ControlPlane(second) as two:
            one.api.create(node("only-in-one"))
            assert two.api.find("Node", "only-in-one") is None
            command("down", first)
            assert processes(first) == []
            assert len(processes(second)) == len(COMPONENTS)
            assert two.api.list("Node") == []

    def test_down_after_a_crash_of_every_component_leaves_nothing_and_up_works_again(self, new_directory):
        where = new_directory()
        command("up", where)
        again = command("up", where, check=False)
        assert "is running in" in again.stderr
        for pid in processes(where):
            os.kill(pid, signal.SIGKILL)
        command("down", where)
        command("down", where)
        assert processes(where) == []
        command("up", where)
        assert len(processes(where)) == len(COMPONENTS)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
    def test_down_stops_an_interrupted_start(self, number, new_directory):
        # On a busy machine the start may be complete before the signal.
        for _ in range(3):
            where = new_directory()
            starting = subprocess.Popen([CONTROL_PLANE, "up", where], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            wait_until((where / "pids" / "kube-apiserver.pid").exists, 60, "the API server started")
            if number:
                starting.send_signal(number)
            if not number or starting.wait(30) != 0:
                break
            command("down", where)
        if number != signal.SIGTERM:
            command("down", where)
        assert starting.wait(30) != 0
        assert processes(where) == []

    def test_down_spares_a_process_that_only_has_the_recorded_id(self, new_directory, request):
        where = new_directory()
        bystander = subprocess.Popen(["sleep", "60"])
        request.addfinalizer(bystander.wait)
        request.addfinalizer(bystander.kill)
        (where / "pids").mkdir()
        (where / "pids" / "etcd.pid").write_text(f"{bystander.pid} 1\n")
        command("down", where)
        assert bystander.poll() is None

    def test_a_failed_start_shows_the_log_and_leaves_nothing(self, new_directory):
        where = new_directory()
        failed = command("up", where, "--component-arg", "kube-apiserver=--no-such-flag", check=False)
        assert failed.returncode != 0
        assert "no-such-flag" in failed.stderr
        assert processes(where) == []


class TestTools:
    """e2e/tools/build, which finds ready-made binaries where STOWAGE_E2E_BIN points."""

    def build(self, ready, *modules):
        return harness.run(HERE / "tools" / "build", *modules, env={**os.environ, "STOWAGE_E2E_BIN": str(ready)}, check=False)

    def test_only_the_binaries_of_the_named_modules_are_needed(self, tmp_path):
        for name in ("etcd", "cert-manager-chart", "karpenter-crds"):
            (tmp_path / name).touch(0o755)
        assert self.build(tmp_path, "etcd").stdout.splitlines() == [str(tmp_path)]
        assert self.build(tmp_path, "etcd", "prometheus").stderr.strip().endswith("lacks prometheus, promtool")
        assert "lacks kwok, helm, prometheus, promtool, karpenter, kube-apiserver" in self.build(tmp_path).stderr

    def test_an_unknown_module_is_refused_with_the_known_ones(self, tmp_path):
        refused = self.build(tmp_path, "etcd", "kube-scheduler")
        assert refused.returncode == 2 and "unknown module kube-scheduler: choose from etcd, kwok, helm" in refused.stderr


class TestKilledRun:
    """A test run that is killed leaves no processes."""

    SCRIPT = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import aws, guard, harness
with guard.guarded_directory() as directory, harness.ControlPlane() as plane, aws.Moto() as moto:
    with harness.Kubelets(plane, moto.endpoint):
        print(directory, flush=True)
        time.sleep(600)
"""

    @pytest.mark.parametrize("end", ["run", "make"])
    def test_everything_stops_when_the_run_or_its_make_is_killed(self, end, request):
        make = subprocess.Popen(["sleep", "600"])
        request.addfinalizer(make.wait)
        request.addfinalizer(make.kill)
        environment = {**os.environ, "STOWAGE_MAKE_PID": str(make.pid)}
        run = subprocess.Popen([harness.sys.executable, "-c", self.SCRIPT, HERE], env=environment, stdout=subprocess.PIPE, text=True)
        request.addfinalizer(run.wait)
        request.addfinalizer(run.kill)
        directory = run.stdout.readline().strip()
        assert directory, "the run did not start"
        # Components, moto, kubelets and the guard itself; moto has the directory in its working directory only.
        assert len(processes(directory)) >= len(COMPONENTS) + 2
        (run if end == "run" else make).kill()
        wait_until(lambda: not pathlib.Path(directory).exists() and not processes(directory), 60, "everything stopped", lambda: processes(directory))


class TestPodGarbageCollection:
    # Last in the file, because the controller waits for a minute.
    def test_pods_of_a_deleted_node_are_deleted(self, cluster):
        wait_until(lambda: cluster.api.find("Pod", cluster.orphan, "default") is None, 120, "the pod of the deleted node gone")
        print(f"\npod of a deleted node gone at most {time.monotonic() - cluster.node_deleted:.0f} s later")
