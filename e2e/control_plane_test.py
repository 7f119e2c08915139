#!/usr/bin/env python3
"""What the end-to-end tests lean on in e2e/control-plane, tried on real control planes. Run: python3 e2e/control_plane_test.py"""

import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
CONTROL_PLANE = HERE / "control-plane"
COMPONENTS = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok"]
UP_SECONDS = 15.0


def control_plane(*arguments, check=True):
    return subprocess.run([CONTROL_PLANE, *arguments], check=check, capture_output=True, text=True)


def ours(directory):
    """Ids of the processes that run with `directory` in their command line."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(str(directory).encode() in word for word in words):
            found.append(int(entry.name))
    return found


def eventually(check, seconds=20.0):
    """The first true value of `check()`; fails if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {seconds} s; last value: {value!r}")
        time.sleep(0.1)
    return value


class Plane:
    """A control plane in a directory of its own."""

    def __init__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="stowage-e2e-"))

    def up(self, *arguments):
        done = control_plane("up", str(self.dir), *arguments)
        env = dict(re.findall(r"^export (\w+)=(.*)$", (self.dir / "env").read_text(), re.M))
        self.bin, self.config = pathlib.Path(env["STOWAGE_E2E_BIN"]), env["KUBECONFIG"]
        return done

    def remove(self):
        control_plane("down", str(self.dir))
        shutil.rmtree(self.dir)

    def kubectl(self, *arguments, check=True, config=None, content=None):
        return subprocess.run(
            [self.bin / "kubectl", f"--kubeconfig={config or self.config}", f"--cache-dir={self.dir}/cache", *arguments],
            input=content,
            check=check,
            capture_output=True,
            text=True,
        )

    def get(self, *arguments):
        """An object, or None if there is none."""
        done = self.kubectl("get", "-o", "json", "--ignore-not-found", *arguments)
        return json.loads(done.stdout) if done.stdout else None

    def items(self, *arguments):
        """The objects of a list."""
        return json.loads(self.kubectl("get", "-o", "json", *arguments).stdout)["items"]

    def apply(self, *objects):
        self.kubectl("create", "-f", "-", content=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def ready(self, selector):
        """The pods of a selector that are Running and Ready."""
        return [pod for pod in self.items("pods", "-l", selector) if pod["status"]["phase"] == "Running" and condition(pod, "Ready") == "True"]


def condition(thing, kind):
    return next((item["status"] for item in thing["status"].get("conditions", []) if item["type"] == kind), None)


def node(name):
    """A node as a kubelet registers it. Without its Ready=False the node lifecycle controller would lift the not-ready taint."""
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


def pods(app, node_name=None, **spec):
    selector = {"kubernetes.io/hostname": node_name} if node_name else {}
    containers = [{"name": "main", "image": "none", "resources": {"requests": {"cpu": "100m"}}}]
    return {"metadata": {"labels": {"app": app}}, "spec": {"containers": containers, "nodeSelector": selector, **spec}}


def workload(kind, app, template, **spec):
    group = "batch/v1" if kind == "Job" else "apps/v1"
    selector = {} if kind == "Job" else {"selector": {"matchLabels": {"app": app}}}
    return {"apiVersion": group, "kind": kind, "metadata": {"name": app}, "spec": {**selector, "template": template, **spec}}


class RunningControlPlane(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        subprocess.run([HERE / "tools" / "build"], check=True, stdout=subprocess.DEVNULL)
        cls.plane = Plane()
        cls.addClassCleanup(cls.plane.remove)
        cls.said = cls.plane.up().stderr
        cls.plane.apply(node("worker"), node("doomed"), workload("Deployment", "orphan", pods("orphan", "doomed"), replicas=1))
        cls.orphan = eventually(lambda: cls.plane.ready("app=orphan"))[0]["metadata"]["name"]
        cls.plane.kubectl("delete", "node", "doomed")
        cls.node_deleted = time.monotonic()

    def test_up_takes_less_than_fifteen_seconds(self):
        self.assertLess(float(re.search(r"is up after ([\d.]+) s", self.said)[1]), UP_SECONDS)

    def test_node_becomes_ready_and_keeps_the_status_it_was_made_with(self):
        self.plane.apply(node("fresh"))
        begin = time.monotonic()
        made = eventually(lambda: (found := self.plane.get("node", "fresh")) and not found["spec"].get("taints") and found, 5.0)
        print(f"\nnode ready and without taints after {time.monotonic() - begin:.1f} s")
        self.assertEqual(condition(made, "Ready"), "True")
        for field in ("capacity", "allocatable", "addresses"):
            self.assertEqual(made["status"][field], node("fresh")["status"][field])
        lease = self.plane.get("lease", "-n", "kube-node-lease", "fresh")
        self.assertTrue(lease["spec"]["renewTime"])

    def test_node_steered_by_annotation_is_not_ready_and_gets_the_taint(self):
        self.plane.apply(node("sick"))
        eventually(lambda: condition(self.plane.get("node", "sick"), "Ready") == "True")
        self.plane.kubectl("annotate", "node", "sick", "stowage.dev/e2e-not-ready=yes")
        eventually(lambda: [taint["key"] for taint in self.plane.get("node", "sick")["spec"].get("taints", []) if taint["effect"] == "NoExecute"])
        self.plane.kubectl("annotate", "node", "sick", "stowage.dev/e2e-not-ready-")
        eventually(lambda: not self.plane.get("node", "sick")["spec"].get("taints"))

    def test_node_without_the_annotation_is_left_alone(self):
        plain = node("unmanaged")
        plain["metadata"]["annotations"] = {}
        self.plane.apply(plain)
        time.sleep(2)
        found = self.plane.get("node", "unmanaged")
        self.assertEqual(condition(found, "Ready"), "False")
        self.assertIn("node.kubernetes.io/not-ready", [taint["key"] for taint in found["spec"]["taints"]])

    def test_workloads_run(self):
        self.plane.apply(
            workload("Deployment", "web", pods("web", "worker"), replicas=3),
            workload("StatefulSet", "db", pods("db", "worker"), replicas=2, serviceName="db"),
            workload("DaemonSet", "agent", pods("agent", "worker")),
            workload("Job", "once", pods("once", "worker", restartPolicy="Never")),
        )
        begin = time.monotonic()
        for app, count in (("web", 3), ("db", 2), ("agent", 1)):
            eventually(lambda app=app, count=count: len(self.plane.ready(f"app={app}")) == count)
        print(f"\nworkloads ready after {time.monotonic() - begin:.1f} s")
        eventually(lambda: condition(self.plane.get("job", "once"), "Complete") == "True")
        pod = self.plane.ready("app=web")[0]
        self.assertEqual(pod["status"]["hostIP"], "10.0.0.7")
        self.assertTrue(pod["status"]["podIP"].startswith("10.128."), pod["status"]["podIP"])

    def test_drain_heeds_a_disruption_budget(self):
        self.plane.apply(
            node("drained"),
            workload("Deployment", "guarded", pods("guarded", "drained"), replicas=2),
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": "guarded"},
                "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "guarded"}}},
            },
        )
        eventually(lambda: len(self.plane.ready("app=guarded")) == 2)
        eventually(lambda: self.plane.get("pdb", "guarded")["status"].get("currentHealthy") == 2)
        refused = self.plane.kubectl("drain", "drained", "--timeout=2s", "--ignore-daemonsets", check=False)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("disruption budget", refused.stderr)
        self.assertEqual(len(self.plane.ready("app=guarded")), 2)
        self.plane.kubectl("delete", "pdb", "guarded")
        self.plane.kubectl("drain", "drained", "--timeout=20s", "--ignore-daemonsets")
        self.assertEqual(self.plane.ready("app=guarded"), [])

    def test_pods_of_a_deleted_node_go(self):
        eventually(lambda: self.plane.get("pod", self.orphan) is None, 120.0)
        print(f"\npod of a deleted node gone at most {time.monotonic() - self.node_deleted:.0f} s later")

    def test_namespace_with_workloads_can_be_deleted(self):
        self.plane.kubectl("create", "namespace", "brief")
        self.plane.kubectl("-n", "brief", "create", "-f", "-", content=json.dumps(workload("Deployment", "x", pods("x", "worker"), replicas=1)))
        eventually(lambda: self.plane.items("pods", "-n", "brief"))
        self.plane.kubectl("delete", "namespace", "brief", "--timeout=60s")

    def test_service_account_may_do_only_what_its_roles_say(self):
        config = self.plane.dir / "nobody.kubeconfig"
        self.plane.kubectl("create", "serviceaccount", "nobody")
        control_plane("kubeconfig", str(self.plane.dir), "--service-account", "default/nobody", "--out", str(config))
        denied = self.plane.kubectl("get", "pods", config=config, check=False)
        self.assertIn("Forbidden", denied.stderr)
        self.plane.kubectl("create", "rolebinding", "nobody", "--clusterrole=view", "--serviceaccount=default:nobody")
        eventually(lambda: self.plane.kubectl("get", "pods", config=config, check=False).returncode == 0)
        self.assertEqual(self.plane.kubectl("create", "token", "nobody").stdout.count("."), 2)

    def test_scheduler_asks_an_extender_over_mutual_tls(self):
        where = self.plane.dir
        control_plane("cert", str(where), "--name", "extender", "--ip", "127.0.0.1", "--out", str(where / "serving"))
        control_plane("cert", str(where), "--name", "kube-scheduler", "--client", "--out", str(where / "client"))
        asked = []

        class Extender(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                asked.append(dict(self.connection.getpeercert()["subject"][0])["commonName"])
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
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.addCleanup(control_plane, "scheduler", str(where))
        config = where / "with-extender.json"
        config.write_text(
            json.dumps(
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
        )
        begin = time.monotonic()
        control_plane("scheduler", str(where), "--config", str(config))
        print(f"\nscheduler restarted in {time.monotonic() - begin:.1f} s")
        self.plane.apply(workload("Deployment", "extended", pods("extended", "worker"), replicas=1))
        eventually(lambda: self.plane.ready("app=extended"))
        self.assertIn("kube-scheduler", asked)

    def test_a_configuration_that_the_scheduler_refuses_is_reported(self):
        bad = self.plane.dir / "bad.json"
        bad.write_text('{"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration", "nonsense": 1}')
        refused = control_plane("scheduler", str(self.plane.dir), "--config", str(bad), check=False)
        control_plane("scheduler", str(self.plane.dir))
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("nonsense", refused.stderr)

    def test_components_can_crash_and_come_back(self):
        for name in COMPONENTS:
            with self.subTest(name):
                control_plane("stop-component", str(self.plane.dir), name, "--kill")
                self.assertRegex(control_plane("status", str(self.plane.dir), check=False).stdout, rf"(?m)^{name} +stopped$")
                control_plane("start-component", str(self.plane.dir), name)
                control_plane("status", str(self.plane.dir))
        self.plane.apply(node("after"), workload("Deployment", "after", pods("after", "after"), replicas=1))
        eventually(lambda: self.plane.ready("app=after"))


class LifeCycle(unittest.TestCase):
    def plane(self):
        plane = Plane()
        self.addCleanup(plane.remove)
        return plane

    def test_two_run_side_by_side_and_stop_alone(self):
        one, two = self.plane(), self.plane()
        one.up()
        two.up()
        one.apply(node("only-in-one"))
        self.assertIsNone(two.get("node", "only-in-one"))
        control_plane("down", str(one.dir))
        self.assertEqual(ours(one.dir), [])
        self.assertEqual(len(ours(two.dir)), len(COMPONENTS))
        self.assertEqual(two.items("nodes"), [])

    def test_down_leaves_nothing_after_every_component_was_killed_and_up_works_again(self):
        plane = self.plane()
        plane.up()
        again = control_plane("up", str(plane.dir), check=False)
        self.assertIn("is running in", again.stderr)
        for pid in ours(plane.dir):
            os.kill(pid, signal.SIGKILL)
        control_plane("down", str(plane.dir))
        control_plane("down", str(plane.dir))
        self.assertEqual(ours(plane.dir), [])
        plane.up()
        self.assertEqual(len(ours(plane.dir)), len(COMPONENTS))

    def test_down_stops_a_start_that_was_killed_halfway(self):
        for number in (signal.SIGKILL, signal.SIGTERM, None):
            with self.subTest(number):
                plane = self.plane()
                starting = subprocess.Popen([CONTROL_PLANE, "up", str(plane.dir)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
                eventually(lambda plane=plane: (plane.dir / "pids" / "kube-apiserver.pid").exists())
                if number:
                    starting.send_signal(number)
                    self.assertNotEqual(starting.wait(30), 0)
                if number != signal.SIGTERM:
                    control_plane("down", str(plane.dir))
                self.assertNotEqual(starting.wait(30), 0)
                self.assertEqual(ours(plane.dir), [])

    def test_down_spares_a_process_that_only_has_the_recorded_id(self):
        plane = self.plane()
        bystander = subprocess.Popen(["sleep", "60"])
        self.addCleanup(bystander.wait)
        self.addCleanup(bystander.kill)
        (plane.dir / "pids").mkdir()
        (plane.dir / "pids" / "etcd.pid").write_text(f"{bystander.pid} 1\n")
        control_plane("down", str(plane.dir))
        self.assertIsNone(bystander.poll())

    def test_a_failed_start_shows_the_log_and_leaves_nothing(self):
        plane = self.plane()
        failed = control_plane("up", str(plane.dir), "--component-arg", "kube-apiserver=--no-such-flag", check=False)
        self.assertNotEqual(failed.returncode, 0)
        self.assertIn("no-such-flag", failed.stderr)
        self.assertEqual(ours(plane.dir), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
