#!/usr/bin/env python3
"""The chart, tried by the real helm on a real control plane. Run: python3 e2e/chart_test.py"""

import base64
import http.server
import json
import os
import pathlib
import re
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
CHART = ROOT / "charts" / "stowage"
SYNC_CRDS = ROOT / "charts" / "sync-crds"
GENERATE = ROOT / "webhook-config" / "generate"
CONTROL_PLANE = HERE / "control-plane"
CA_BUNDLE = base64.b64encode(b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n").decode()
BIN = None


def setUpModule():
    global BIN
    done = subprocess.run([HERE / "tools" / "build"], stdout=subprocess.PIPE, text=True, check=True)
    BIN = pathlib.Path(done.stdout.splitlines()[-1])
    os.environ["STOWAGE_E2E_BIN"] = str(BIN)


def run(*command, check=True, content=None, env=None):
    done = subprocess.run([str(word) for word in command], input=content, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})
    if check and done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done


def helm(*arguments, check=True, env=None):
    return run(BIN / "helm", *arguments, check=check, env=env)


def settings(values):
    """--set-json for each value, by its dotted path."""
    return [word for path, value in values.items() for word in ("--set-json", f"{path}={json.dumps(value)}")]


def eventually(check, seconds=30.0):
    """The first true value of `check()`; fails if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {seconds} s; last value: {value!r}")
        time.sleep(0.1)
    return value


GENERATED = {"tls.mode": "generated"}
SECRET = {"tls.mode": "secret", "webhook.caBundle": CA_BUNDLE}
# Every branch of every template is taken by one of these.
MODES = {
    "defaults": {},
    "cert-manager with a scheduler": {"scheduler.enabled": True, "crds.keep": False},
    "cert-manager with an issuer of one's own": {"tls.certManager.issuerRef": {"kind": "ClusterIssuer", "name": "internal"}, "scheduler.clientCertificate": True},
    "generated with a scheduler": {**GENERATED, "scheduler.enabled": True},
    "a secret": SECRET,
    "a secret whose CA something else injects": {"tls.mode": "secret", "tls.secret.name": "mine", "webhook.annotations": {"cert-manager.io/inject-ca-from-secret": "ns/mine"}},
    "a service outside of the cluster": {**SECRET, "webhook.url": "https://127.0.0.1:9443/mutate", "replicas": 0},
    "ec2": {**GENERATED, "settings.cloud": "ec2", "settings.clusterName": "prod", "settings.placement": "extender"},
    "bare": {
        **GENERATED,
        "webhook.enabled": False,
        "serviceAccount.create": False,
        "crds.install": False,
        "affinity": {},
        "topologySpreadConstraints": [],
        "tolerations": [],
        "nodeSelector": {},
        "podSecurityContext": {},
        "strategy": {},
        "priorityClassName": "",
        "webhook.excludedNamespaces": [],
    },
    "all of it": {
        **GENERATED,
        "nameOverride": "other",
        "additionalLabels": {"team": "infra"},
        "additionalAnnotations": {"note": "all"},
        "imagePullSecrets": [{"name": "regcred"}],
        "service.annotations": {"a": "b"},
        "serviceAccount.annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/stowage"},
        "serviceAccount.name": "other-account",
        "additionalClusterRoleRules": [{"apiGroups": [""], "resources": ["services"], "verbs": ["get"]}],
        "serviceMonitor": {"enabled": True, "additionalLabels": {"x": "y"}, "sampleLimit": 10000, "endpointConfig": {"interval": "10s"}, "relabelings": [{"action": "labeldrop", "regex": "pod"}], "metricRelabelings": [{"action": "keep", "regex": ".*"}]},
        "podLabels": {"p": "l"},
        "podAnnotations": {"p": "a"},
        "podDisruptionBudget": {"name": "budget", "maxUnavailable": "50%"},
        "hostNetwork": True,
        "dnsPolicy": "Default",
        "dnsConfig": {"nameservers": ["10.0.0.2"]},
        "initContainers": [{"name": "wait", "image": "busybox"}],
        "extraVolumes": [{"name": "state", "emptyDir": {}}],
        "controller.image.digest": "sha256:" + "0" * 64,
        "controller.env": [{"name": "AWS_REGION", "value": "us-east-1"}],
        "controller.envFrom": [{"configMapRef": {"name": "more"}}],
        "controller.securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}, "seLinuxOptions": {"level": "s0"}, "seccompProfile": {"type": "RuntimeDefault"}},
        "controller.resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "controller.extraVolumeMounts": [{"name": "state", "mountPath": "/var/lib/stowage"}],
        "controller.sidecarContainer": [{"name": "side", "image": "busybox"}],
        "settings.simulated.stateFile": "/var/lib/stowage/state.json",
        "settings.leaderElection.namespace": "kube-system",
        "affinity.podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": {"topologyKey": "topology.kubernetes.io/zone"}}]},
        "networkPolicy": {"enabled": True, "webhookFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "metricsFrom": [{"namespaceSelector": {}}], "egress": [{"ports": [{"port": 443}]}]},
        "scheduler.enabled": True,
        "scheduler.resources": {"requests": {"cpu": "1"}},
        "scheduler.image.tag": "v1.34.4",
        "scheduler.extender.url": "https://10.0.0.1:9443/v1",
    },
    "a network policy of its own": {**GENERATED, "networkPolicy.enabled": True},
}

# A values file of somebody who runs Karpenter: what means the same must be taken as it is.
KARPENTERS = {
    "replicas": 2,
    "serviceAccount": {"create": True, "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/karpenter"}},
    "serviceMonitor": {"enabled": True, "additionalLabels": {"release": "prometheus"}, "endpointConfig": {"scrapeTimeout": "5s"}},
    "podDisruptionBudget": {"maxUnavailable": 1},
    "priorityClassName": "system-cluster-critical",
    "dnsPolicy": "Default",
    "controller": {"resources": {"requests": {"cpu": 1, "memory": "1Gi"}}, "metrics": {"port": 8080}, "healthProbe": {"port": 8081}},
    "logLevel": "debug",
    "settings": {
        "batchMaxDuration": "10s",
        "batchIdleDuration": "500ms",
        "preferencePolicy": "Respect",
        "minValuesPolicy": "BestEffort",
        "clusterName": "prod",
        "featureGates": {"nodeRepair": False, "nodeOverlay": False, "reservedCapacity": True, "spotToSpotConsolidation": False, "staticCapacity": False, "capacityBuffer": False},
        "awsFeatureGates": {"nodeClassCEL": True},
    },
}


class Offline(unittest.TestCase):
    """What needs no cluster."""

    def setUp(self):
        self.tmp = pathlib.Path(tempfile.mkdtemp(prefix="stowage-chart-"))
        self.addCleanup(shutil.rmtree, self.tmp)

    def test_lint_has_no_complaint_about_any_mode(self):
        for mode, values in MODES.items():
            with self.subTest(mode):
                file = self.tmp / "values.json"
                file.write_text(json.dumps(nested(values)))
                helm("lint", "--strict", "--quiet", CHART, "--values", file)

    def test_values_of_karpenters_chart_that_mean_the_same_are_taken_as_they_are(self):
        file = self.tmp / "values.json"
        file.write_text(json.dumps(KARPENTERS))
        text = helm("template", "stowage", CHART, "--values", file).stdout
        self.assertIn(f"eks.amazonaws.com/role-arn: {KARPENTERS['serviceAccount']['annotations']['eks.amazonaws.com/role-arn']}\n", text)
        for name, value in (("BATCH_IDLE_DURATION", "500ms"), ("MIN_VALUES_POLICY", "BestEffort"), ("LOG_LEVEL", "debug"), ("CLUSTER_NAME", "prod"), ("AWS_FEATURE_GATES", "NodeClassCEL=true")):
            self.assertRegex(text, rf'name: {name}\n +value: "{value}"')

    def test_a_network_policy_without_egress_rules_leaves_the_way_to_aws_and_to_pod_identitys_agent(self):
        # Both are outside of the cluster's pods, the agent on the node itself: only an open egress lets them through.
        text = helm("template", "stowage", CHART, "--set", "networkPolicy.enabled=true", "--show-only", "templates/networkpolicy.yaml").stdout
        self.assertRegex(text, r"(?m)^  egress:\n    - \{\}$")

    def test_wrong_values_are_refused_with_their_path_and_what_would_be_right(self):
        for values, wanted in (
            ({"settings.placement": "magic"}, ["/settings/placement", "extender", "nominate", "off"]),
            ({"settings.cloud": "gce"}, ["/settings/cloud", "simulated", "ec2"]),
            ({"settings.cloud": "ec2"}, ["/settings/clusterName"]),
            ({"settings.batchIdleDuration": "soon"}, ["/settings/batchIdleDuration", "soon"]),
            ({"settings.batchIdleDuration": 1}, ["/settings/batchIdleDuration", "string"]),
            ({"settings.preferencePolicy": "respect"}, ["/settings/preferencePolicy", "Respect", "Ignore"]),
            ({"settings.nodeVcpus": "8"}, ["/settings/nodeVcpus", "8"]),
            ({"settings.nodePenalty": "much"}, ["/settings/nodePenalty", "much"]),
            ({"settings.familyWeights.m7g": 0}, ["/settings/familyWeights/m7g", "1"]),
            ({"settings.spotPlacementScoreThreshold": 11}, ["/settings/spotPlacementScoreThreshold", "10"]),
            ({"settings.featureGates.nodeRepair": True}, ["/settings/featureGates/nodeRepair", "false"]),
            ({"settings.interruptionQueue": "queue"}, ["/settings", "interruptionQueue", "not allowed"]),
            ({"replica": 3}, ["replica", "not allowed"]),
            ({"replicas": -1}, ["/replicas", "0"]),
            ({"logLevel": "warn"}, ["/logLevel", "debug", "info", "error"]),
            ({"tls.mode": "none"}, ["/tls/mode", "cert-manager", "secret", "generated"]),
            ({"tls.certManager.issuerRef": {"kind": "Issuer"}}, ["/tls/certManager/issuerRef", "name"]),
            ({"webhook.timeoutSeconds": 31}, ["/webhook/timeoutSeconds", "30"]),
            ({"webhook.url": "http://10.0.0.1/mutate"}, ["/webhook/url", "https://"]),
            ({"webhook.caBundle": "-----BEGIN CERTIFICATE-----"}, ["/webhook/caBundle"]),
            ({"webhook.port": 94430}, ["/webhook/port", "65,535"]),
            ({"controller.image.digest": "latest"}, ["/controller/image/digest", "sha256"]),
            ({"scheduler.extender.weight": 0}, ["/scheduler/extender/weight", "1"]),
            ({"tls.mode": "secret"}, ["tls.mode is secret", "webhook.caBundle", "webhook.annotations"]),
        ):
            with self.subTest(values):
                done = helm("template", "stowage", CHART, *settings(values), check=False)
                self.assertNotEqual(done.returncode, 0, done.stdout)
                for part in wanted:
                    self.assertIn(part, done.stderr)

    def test_a_chart_that_is_part_of_another_takes_global_values(self):
        helm("template", "stowage", CHART, "--set", "global.region=us-east-1")

    def test_the_chart_packages_with_its_crds(self):
        helm("package", CHART, "--destination", self.tmp)
        text = helm("template", "stowage", next(self.tmp.glob("stowage-*.tgz"))).stdout
        self.assertEqual(len(re.findall(r"(?m)^kind: CustomResourceDefinition$", text)), 3)
        self.assertEqual(text.count("helm.sh/resource-policy: keep"), 3)

    def test_the_charts_crds_are_those_of_the_project(self):
        run(SYNC_CRDS, "--check")

    def test_stale_crds_are_found_and_named(self):
        copy, changed = self.tmp / "copy", self.tmp / "crds"
        shutil.copytree(CHART / "files" / "crds", changed)
        run(SYNC_CRDS, "--from", changed, "--to", copy)
        run(SYNC_CRDS, "--check", "--from", changed, "--to", copy)
        file = changed / "karpenter.sh_nodepools.yaml"
        file.write_text(file.read_text() + "# changed\n")
        (copy / "gone.yaml").write_text("")
        done = run(SYNC_CRDS, "--check", "--from", changed, "--to", copy, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("stale", done.stderr)
        self.assertIn("gone.yaml, karpenter.sh_nodepools.yaml; run charts/sync-crds", done.stderr)
        run(SYNC_CRDS, "--from", changed, "--to", copy)
        run(SYNC_CRDS, "--check", "--from", changed, "--to", copy)

    def test_a_crd_that_the_template_would_break_is_refused(self):
        folder = self.tmp / "crds"
        folder.mkdir()
        (folder / "bad.yaml").write_text("kind: CustomResourceDefinition\nmetadata:\n  annotations:\n    a: b\n  name: bad\nspec: {}\n")
        done = run(SYNC_CRDS, "--from", folder, "--to", self.tmp / "copy", check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("bad.yaml", done.stderr)
        self.assertIn("metadata.annotations", done.stderr)

    def test_the_plain_manifests_are_those_of_the_chart(self):
        run(GENERATE, "--check")

    def test_stale_plain_manifests_are_found_and_named(self):
        run(GENERATE, "--to", self.tmp)
        run(GENERATE, "--check", "--to", self.tmp)
        file = self.tmp / "service.yaml"
        file.write_text(file.read_text().replace("443", "444"))
        (self.tmp / "scheduler" / "second-scheduler.yaml").unlink()
        (self.tmp / "more.yaml").write_text("")
        done = run(GENERATE, "--check", "--to", self.tmp, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("more.yaml, scheduler/second-scheduler.yaml, service.yaml; run webhook-config/generate", done.stderr)

    def test_the_scenario_of_helm_test_is_one_that_simulate_takes(self):
        scenario = json.loads((CHART / "files" / "test-scenario.json").read_text())
        self.assertEqual(set(scenario), {"nodePools", "pods"})
        self.assertEqual(len(scenario["pods"]), 3)
        if binary := os.environ.get("STOWAGE_BIN"):
            done = run(binary, "simulate", f"--scenario={CHART}/files/test-scenario.json", "--output=json")
            self.assertEqual(json.loads(done.stdout)["unschedulable"], [])


def nested(values):
    """Dotted paths as a tree."""
    tree = {}
    for path, value in values.items():
        *folders, last = path.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = {**place[last], **value} if isinstance(place.get(last), dict) and isinstance(value, dict) else value
    return tree


VERBS = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"]
READ = {"get", "list", "watch"}
# What the controller may do, in whole: everything else in VERBS on these and on the rest of RESOURCES must be refused.
RIGHTS = {
    ("", "pods"): READ | {"delete", "patch"},
    ("", "pods/status"): {"patch"},
    ("", "pods/eviction"): {"create"},
    ("", "nodes"): READ | {"patch", "delete"},
    ("", "namespaces"): READ,
    ("", "persistentvolumes"): READ,
    ("", "persistentvolumeclaims"): READ,
    ("events.k8s.io", "events"): {"create", "patch"},
    ("apps", "daemonsets"): READ,
    ("storage.k8s.io", "storageclasses"): READ,
    ("storage.k8s.io", "csinodes"): READ,
    ("karpenter.sh", "nodepools"): READ | {"patch"},
    ("karpenter.sh", "nodepools/status"): {"patch"},
    ("karpenter.sh", "nodepools/finalizers"): {"update"},
    ("karpenter.sh", "nodeclaims"): READ | {"create", "delete", "patch"},
    ("karpenter.sh", "nodeclaims/status"): {"patch"},
    ("karpenter.sh", "nodeclaims/finalizers"): {"update"},
    ("karpenter.k8s.aws", "ec2nodeclasses"): READ,
    ("karpenter.k8s.aws", "ec2nodeclasses/status"): {"patch"},
}
EC2 = {("karpenter.k8s.aws", "ec2nodeclasses"): {"patch"}, ("networking.k8s.io", "servicecidrs"): {"get"}}
SIMULATED = {("", "nodes"): {"create"}, ("", "nodes/status"): {"patch"}}
RESOURCES = [
    *RIGHTS,
    *[("", name) for name in ("nodes/status", "nodes/proxy", "pods/exec", "pods/log", "pods/binding", "bindings", "secrets", "configmaps", "services", "serviceaccounts", "serviceaccounts/token", "persistentvolumes/status", "persistentvolumeclaims/status")],
    *[("apps", name) for name in ("deployments", "replicasets", "daemonsets/status")],
    ("karpenter.k8s.aws", "ec2nodeclasses/finalizers"),
    ("coordination.k8s.io", "leases"),
    ("storage.k8s.io", "volumeattachments"),
    ("networking.k8s.io", "servicecidrs"),
    ("rbac.authorization.k8s.io", "clusterroles"),
    ("rbac.authorization.k8s.io", "clusterrolebindings"),
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
    ("policy", "poddisruptionbudgets"),
]
# Kinds of other projects that the chart makes objects of, with their fields as far as the chart uses them.
FOREIGN = {
    ("cert-manager.io", "Issuer"): {"selfSigned": {"type": "object"}, "ca": {"type": "object", "required": ["secretName"], "properties": {"secretName": {"type": "string"}}}},
    ("cert-manager.io", "Certificate"): {
        **{name: {"type": "string"} for name in ("secretName", "commonName", "duration", "renewBefore")},
        "isCA": {"type": "boolean"},
        "dnsNames": {"type": "array", "items": {"type": "string"}},
        "usages": {"type": "array", "items": {"type": "string", "enum": ["digital signature", "server auth", "client auth"]}},
        "privateKey": {"type": "object", "properties": {"algorithm": {"type": "string", "enum": ["RSA", "ECDSA", "Ed25519"]}, "size": {"type": "integer"}, "rotationPolicy": {"type": "string", "enum": ["Never", "Always"]}}},
        "issuerRef": {"type": "object", "required": ["name"], "properties": {name: {"type": "string"} for name in ("kind", "name", "group")}},
    },
    ("monitoring.coreos.com", "ServiceMonitor"): {
        "namespaceSelector": {"type": "object", "properties": {"matchNames": {"type": "array", "items": {"type": "string"}}}},
        "selector": {"type": "object", "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}}},
        "sampleLimit": {"type": "integer"},
        "endpoints": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    **{name: {"type": "string"} for name in ("port", "path", "interval")},
                    **{name: {"type": "array", "items": {"type": "object", "properties": {part: {"type": "string"} for part in ("action", "regex")}}} for name in ("relabelings", "metricRelabelings")},
                },
            },
        },
    },
}


def foreign_crd(group, kind, spec):
    plural = kind.lower() + "s"
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": spec}}}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": {"kind": kind, "plural": plural}, "versions": [version]},
    }


def node(name, zone):
    resources = {"cpu": "8", "memory": "32Gi", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "topology.kubernetes.io/zone": zone}, "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {"capacity": resources, "allocatable": resources, "conditions": [{"type": "Ready", "status": "False", "reason": "KubeletNotReady"}]},
    }


def pod(name, namespace="default", labels=None, owners=None, **spec):
    metadata = {"name": name, "namespace": namespace, "labels": labels or {}}
    if owners:
        metadata["ownerReferences"] = [{"apiVersion": "apps/v1", "kind": kind, "name": "owner", "uid": f"00000000-0000-0000-0000-{number:012}"} for number, kind in enumerate(owners)]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [{"name": "main", "image": "none"}], **spec}}


def documents(text):
    """The objects that kubectl printed as JSON: one after the other, or as a List."""
    found, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        item, end = decoder.raw_decode(text)
        found += item["items"] if item["kind"] == "List" else [item]
        text = text[end:]
    return found


class Service:
    """Stands in for Stowage: HTTPS, remembers who asked for what, changes nothing."""

    def __init__(self, folder):
        self.calls = []
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                subject = dict(item for part in (self.connection.getpeercert() or {}).get("subject", ()) for item in part)
                path = self.path.partition("?")[0]
                service.calls.append((path, body, subject.get("commonName")))
                answer = {
                    "/mutate": lambda: {"apiVersion": body["apiVersion"], "kind": body["kind"], "response": {"uid": body["request"]["uid"], "allowed": True}},
                    "/v1/filter": lambda: {"NodeNames": body["NodeNames"]},
                    "/v1/prioritize": lambda: [],
                }[path]()
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        tls.load_verify_locations(folder / "ca.crt")
        tls.verify_mode = ssl.CERT_OPTIONAL
        self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Installed(unittest.TestCase):
    """One control plane for all tests; each installs its own release and takes it away."""

    @classmethod
    def setUpClass(cls):
        cls.dir = pathlib.Path(tempfile.mkdtemp(prefix="stowage-chart-"))
        cls.addClassCleanup(shutil.rmtree, cls.dir)
        cls.addClassCleanup(run, CONTROL_PLANE, "down", cls.dir)
        run(CONTROL_PLANE, "up", cls.dir)
        cls.config = cls.dir / "kubeconfig"
        # No repository, cache or plugin of whoever runs the tests.
        cls.env = {"KUBECONFIG": str(cls.config), **{f"HELM_{name}_HOME": str(cls.dir / "helm" / name) for name in ("CACHE", "CONFIG", "DATA")}}
        cls.apply(node("one", "a"), node("two", "b"))

    @classmethod
    def kubectl(cls, *arguments, content=None, check=True, config=None):
        return run(BIN / "kubectl", f"--kubeconfig={config or cls.config}", f"--cache-dir={cls.dir}/cache", *arguments, content=content, check=check)

    @classmethod
    def apply(cls, *objects, arguments=("create",)):
        """Sends objects in one go; returns them as the API server answers."""
        content = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        return documents(cls.kubectl(*arguments, "-f", "-", "-o", "json", content=content).stdout)

    def get(self, *arguments):
        done = self.kubectl("get", "-o", "json", "--ignore-not-found", *arguments)
        return json.loads(done.stdout) if done.stdout else None

    def namespace(self, name):
        # The strictest pod security standard is enforced: pods that break it are not made.
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
        self.addCleanup(self.kubectl, "delete", "namespace", name, "--wait=false")

    def helm(self, *arguments, check=True):
        return helm(*arguments, check=check, env=self.env)

    def install(self, namespace, values, *arguments, command="install"):
        if command == "install":
            self.addCleanup(self.uninstall, namespace)
        self.helm(command, "stowage", CHART, "--namespace", namespace, *settings(values), *arguments)

    def uninstall(self, namespace):
        self.helm("uninstall", "stowage", "--namespace", namespace, "--ignore-not-found", "--wait")

    def secret(self, namespace, name):
        return {key: base64.b64decode(value) for key, value in self.get("secret", name, "-n", namespace)["data"].items()}

    def everything(self):
        """Names of all objects but those that come and go by themselves."""
        kinds = self.kubectl("api-resources", "--verbs=list", "-o", "name").stdout.split()
        kinds = [kind for kind in kinds if not re.match(r"(events|leases|apiservices)\b", kind)]
        names = self.kubectl("get", ",".join(kinds), "-A", "--no-headers", "-o", "custom-columns=K:.kind,S:.metadata.namespace,N:.metadata.name").stdout
        return {" ".join(line.split()) for line in names.splitlines()}

    # The tests

    def test_every_mode_is_accepted_by_a_real_api_server(self):
        # Certificate and ServiceMonitor are there only for this test: others depend on their absence.
        foreign = self.apply(*[foreign_crd(group, kind, spec) for (group, kind), spec in FOREIGN.items()])
        self.addCleanup(self.kubectl, "delete", "crd", *[crd["metadata"]["name"] for crd in foreign])
        self.kubectl("wait", "--for=condition=Established", "crd", *[crd["metadata"]["name"] for crd in foreign])
        self.namespace("modes")
        for mode, values in MODES.items():
            with self.subTest(mode):
                # All that is rendered is applied at the server without being kept, unknown fields refused.
                text = self.helm("template", "stowage", CHART, "-n", "modes", "--api-versions", "monitoring.coreos.com/v1", *settings(values)).stdout
                done = self.kubectl("apply", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", content=text)
                objects = documents(done.stdout)
                kinds = {item["kind"] for item in objects}
                self.assertEqual("ServiceMonitor" in kinds, mode == "all of it")
                self.assertEqual("NetworkPolicy" in kinds, bool(nested(values).get("networkPolicy")))
                self.assertEqual("Certificate" in kinds, "tls.mode" not in values)
                self.assertEqual("CustomResourceDefinition" in kinds, values.get("crds.install", True))
                if mode == "all of it":
                    for item in objects:
                        self.assertEqual((item["kind"], item["metadata"]["labels"].get("team")), (item["kind"], "infra"))
                        self.assertEqual((item["kind"], item["metadata"]["annotations"].get("note")), (item["kind"], "all"))

    def test_the_plain_manifests_are_accepted_by_a_real_api_server(self):
        foreign = self.apply(*[foreign_crd(group, kind, spec) for (group, kind), spec in FOREIGN.items()])
        self.addCleanup(self.kubectl, "delete", "crd", *[crd["metadata"]["name"] for crd in foreign])
        self.kubectl("wait", "--for=condition=Established", "crd", *[crd["metadata"]["name"] for crd in foreign])
        self.addCleanup(self.kubectl, "delete", "--wait=false", "--ignore-not-found", "-f", ROOT / "webhook-config", "-f", ROOT / "webhook-config/scheduler/second-scheduler.yaml")
        self.kubectl("apply", "-f", ROOT / "webhook-config", "-f", ROOT / "webhook-config/scheduler/second-scheduler.yaml")
        self.assertEqual(self.get("deployment", "stowage", "-n", "stowage")["spec"]["replicas"], 2)
        applied = self.get("-A", "clusterroles,deployments,mutatingwebhookconfigurations", "-l", "app.kubernetes.io/instance=stowage")["items"]
        self.assertEqual(len(applied), 6)
        # Nothing claims to be Helm's, or Helm would take it for its own.
        self.assertEqual([item["metadata"]["name"] for item in applied if {"helm.sh/chart", "app.kubernetes.io/managed-by"} & item["metadata"]["labels"].keys()], [])

    def test_without_cert_manager_the_default_mode_says_what_to_do(self):
        done = self.helm("install", "stowage", CHART, "--namespace", "default", check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("this cluster has no cert-manager.io/v1: install cert-manager, or set tls.mode to generated or secret", done.stderr)

    def test_a_release_comes_up_changes_and_goes_without_a_trace_but_crds(self):
        self.namespace("life")
        self.addCleanup(self.kubectl, "delete", "crd", "--ignore-not-found", "nodepools.karpenter.sh", "nodeclaims.karpenter.sh", "ec2nodeclasses.karpenter.k8s.aws")
        before = self.everything()
        # kwok plays the kubelets, so --wait holds once the pods passed admission, the scheduler and their probes' stand-in.
        self.install("life", GENERATED, "--wait", "--timeout", "90s")
        first, ca = self.secret("life", "stowage-tls"), self.secret("life", "stowage-ca")
        self.assertEqual(set(first), {"tls.crt", "tls.key", "ca.crt"})
        self.assertEqual(first["ca.crt"], ca["tls.crt"])
        self.verify(first, "sslserver", "stowage.life.svc")
        bundle = self.get("mutatingwebhookconfiguration", "stowage")["webhooks"][0]["clientConfig"]["caBundle"]
        self.assertEqual(base64.b64decode(bundle), first["ca.crt"])
        pods = self.get("pods", "-n", "life", "-l", "app.kubernetes.io/component=controller")["items"]
        self.assertEqual({item["spec"]["nodeName"] for item in pods}, {"one", "two"})

        # The scheduler comes later: its certificate is of the same CA, and nothing that was there is made anew.
        self.install("life", {**GENERATED, "scheduler.enabled": True, "settings.placement": "extender"}, "--wait", "--timeout", "90s", command="upgrade")
        self.assertEqual(self.secret("life", "stowage-tls"), first)
        self.assertEqual(self.secret("life", "stowage-ca"), ca)
        client = self.secret("life", "stowage-scheduler-tls")
        self.verify(client, "sslclient", None)
        self.assertEqual(client["ca.crt"], ca["tls.crt"])
        env = self.get("deployment", "stowage", "-n", "life")["spec"]["template"]["spec"]["containers"][0]["env"]
        self.assertIn({"name": "STOWAGE_PLACEMENT", "value": "extender"}, env)
        scheduler = self.get("deployment", "stowage-scheduler", "-n", "life")["spec"]["template"]["spec"]["containers"][0]
        self.assertEqual(scheduler["image"], "registry.k8s.io/kube-scheduler:v1.34.4")
        self.install("life", {**GENERATED, "scheduler.enabled": True}, command="upgrade")
        self.assertEqual(self.secret("life", "stowage-scheduler-tls"), client)

        pool = {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodePool",
            "metadata": {"name": "kept"},
            "spec": {"template": {"spec": {"nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}, "requirements": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}}},
        }
        self.apply(pool)
        self.uninstall("life")
        kept = {
            "CustomResourceDefinition <none> nodepools.karpenter.sh",
            "CustomResourceDefinition <none> nodeclaims.karpenter.sh",
            "CustomResourceDefinition <none> ec2nodeclasses.karpenter.k8s.aws",
            "NodePool <none> kept",
        }
        # Pods and what controllers made of them go a moment later.
        deadline = time.monotonic() + 30
        while (left := self.everything() - before) != kept and time.monotonic() < deadline:
            time.sleep(0.2)
        self.assertEqual(left, kept)
        # And what was kept does not stand in the way.
        self.install("life", {**GENERATED, "replicas": 0})

    def verify(self, secret, purpose, host):
        """By openssl: the chain holds for this purpose and name, and the key is the certificate's."""
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.dir))
        for name, content in secret.items():
            (folder / name).write_bytes(content)
        words = ["-verify_hostname", host] if host else []
        run("openssl", "verify", "-CAfile", folder / "ca.crt", "-purpose", purpose, *words, folder / "tls.crt")
        public = run("openssl", "x509", "-in", folder / "tls.crt", "-noout", "-pubkey").stdout
        self.assertEqual(public, run("openssl", "pkey", "-in", folder / "tls.key", "-pubout").stdout)

    def test_the_pod_of_helm_test_is_accepted_under_the_restricted_standard(self):
        self.namespace("hook")
        self.install("hook", {**GENERATED, "replicas": 0, "crds.install": False})
        rendered = self.helm("get", "hooks", "stowage", "-n", "hook").stdout
        objects = documents(self.kubectl("apply", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", content=rendered).stdout)
        scenario, planner = objects if objects[0]["kind"] == "ConfigMap" else reversed(objects)
        self.assertEqual(json.loads(scenario["data"]["scenario.json"]), json.loads((CHART / "files/test-scenario.json").read_text()))
        self.assertEqual(planner["spec"]["containers"][0]["args"], ["simulate", "--scenario=/etc/stowage/test/scenario.json", "--output=json"])
        self.assertEqual([item["key"] for volume in planner["spec"]["volumes"] for item in volume.get("secret", {}).get("items", [])], ["tls.crt", "ca.crt"])

    def rights(self, account, resources, verbs, **where):
        """Which of the verbs the API server's authorizer allows to a ServiceAccount, by resource."""
        namespace, _, name = account.partition("/")
        asked = []
        for group, resource in resources:
            plural, _, subresource = resource.partition("/")
            asked += [{"group": group, "resource": plural, "subresource": subresource, "verb": verb, **where} for verb in verbs]
        who = {"user": f"system:serviceaccount:{namespace}:{name}", "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]}
        answers = self.apply(*[{"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {**who, "resourceAttributes": attributes}} for attributes in asked])
        allowed = {}
        for attributes, answer in zip(asked, answers, strict=True):
            key = (attributes["group"], "/".join(filter(None, (attributes["resource"], attributes["subresource"]))))
            if answer["status"]["allowed"]:
                allowed.setdefault(key, set()).add(attributes["verb"])
        return allowed

    def test_the_service_account_may_do_what_the_service_does_and_nothing_else(self):
        self.namespace("rights")
        self.install("rights", {**GENERATED, "replicas": 0, "crds.install": False})
        resources = list(dict.fromkeys(RESOURCES))
        simulated = {key: RIGHTS.get(key, set()) | SIMULATED.get(key, set()) for key in RIGHTS | SIMULATED}
        self.assertEqual(self.rights("rights/stowage", resources, VERBS), simulated)
        lease = [("coordination.k8s.io", "leases")]
        self.assertEqual(self.rights("rights/stowage", lease, VERBS, namespace="rights"), {lease[0]: {"get", "create"}})
        self.assertEqual(self.rights("rights/stowage", lease, VERBS, namespace="rights", name="karpenter-leader-election"), {lease[0]: {"get", "create", "update"}})
        self.assertEqual(self.rights("rights/stowage", lease, VERBS, namespace="kube-system", name="karpenter-leader-election"), {})
        self.assertEqual(self.rights("rights/stowage", lease, VERBS, namespace="kube-node-lease"), {lease[0]: {"create", "patch"}})

        self.install("rights", {**GENERATED, "replicas": 0, "crds.install": False, "settings.cloud": "ec2", "settings.clusterName": "prod"}, command="upgrade")
        ec2 = {key: RIGHTS.get(key, set()) | EC2.get(key, set()) for key in RIGHTS | EC2}
        eventually(lambda: self.rights("rights/stowage", resources, VERBS) == ec2)
        self.assertEqual(self.rights("rights/stowage", [("", "services")], VERBS, namespace="kube-system", name="kube-dns"), {("", "services"): {"get"}})
        self.assertEqual(self.rights("rights/stowage", [("", "services")], VERBS, namespace="kube-system", name="other"), {})

    def test_a_token_of_the_service_account_takes_the_lease_and_is_refused_another(self):
        self.namespace("token")
        self.install("token", {**GENERATED, "replicas": 0, "crds.install": False})
        config = self.dir / "token.kubeconfig"
        run(CONTROL_PLANE, "kubeconfig", self.dir, "--service-account", "token/stowage", "--out", config)

        def lease(name):
            return json.dumps({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name, "namespace": "token"}, "spec": {"holderIdentity": "me"}})

        self.kubectl("create", "-f", "-", content=lease("karpenter-leader-election"), config=config)
        self.kubectl("replace", "-f", "-", content=lease("karpenter-leader-election"), config=config)
        self.kubectl("create", "-f", "-", content=lease("other"), config=config)
        for refused in (("replace", "-f", "-"), ("delete", "-f", "-")):
            done = self.kubectl(*refused, content=lease("other"), config=config, check=False)
            self.assertIn("Forbidden", done.stderr, refused)
        self.kubectl("get", "nodes", config=config)
        self.assertIn("forbidden", self.kubectl("get", "secrets", "-n", "token", config=config, check=False).stderr)

    def test_a_pods_tolerations_are_all_that_may_be_changed_of_it(self):
        self.namespace("confined")
        self.install("confined", {**GENERATED, "replicas": 0, "crds.install": False})
        config = self.dir / "confined.kubeconfig"
        run(CONTROL_PLANE, "kubeconfig", self.dir, "--service-account", "confined/stowage", "--out", config)
        eventually(lambda: self.get("serviceaccount", "default", "-n", "default"))
        self.addCleanup(self.kubectl, "delete", "pod", "p", "-n", "default", "--now")
        self.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "default", "labels": {"app": "p"}}, "spec": {"nodeSelector": {"no": "node"}, "containers": [{"name": "c", "image": "i"}]}})

        def patched(*operations):
            return self.kubectl("patch", "pod", "p", "-n", "default", "--type=json", "--dry-run=server", "-p", json.dumps(operations), config=config, check=False)

        def toleration(key):
            return {"op": "add", "path": "/spec/tolerations/-", "value": {"key": key, "operator": "Equal", "value": "x", "effect": "NoSchedule"}}

        refused = lambda: patched({"op": "replace", "path": "/spec/containers/0/image", "value": "other"}).stderr
        # The API server takes a moment to learn of a new policy.
        eventually(lambda: "may not change images" in refused())
        for operation, why in (
            (toleration("dedicated"), "tolerations of stowage.dev/planned only"),
            ({"op": "add", "path": "/spec/activeDeadlineSeconds", "value": 1}, "nothing of a pod but its tolerations"),
            ({"op": "add", "path": "/metadata/labels/app", "value": "q"}, "metadata"),
            ({"op": "add", "path": "/metadata/annotations", "value": {"a": "b"}}, "metadata"),
            ({"op": "add", "path": "/metadata/finalizers", "value": ["a.example/b"]}, "metadata"),
        ):
            with self.subTest(operation["path"]):
                self.assertIn(why, patched(operation).stderr)
        every = {"op": "add", "path": "/spec/tolerations/-", "value": {"key": "stowage.dev/planned", "operator": "Exists"}}
        self.assertIn("tolerations of stowage.dev/planned only", patched(every).stderr)
        # kubectl would read the status first, which is not allowed.
        access = json.loads(config.read_text())
        cluster, token = access["clusters"][0]["cluster"], access["users"][0]["user"]["token"]
        tls = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())

        def status_patched(body):
            url = f"{cluster['server']}/api/v1/namespaces/default/pods/p/status"
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
            request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="PATCH")
            try:
                with urllib.request.urlopen(request, context=tls, timeout=10) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        code, said = status_patched({"metadata": {"labels": {"app": "q"}}})
        self.assertEqual(code, 422, said)
        self.assertIn("may not change the metadata", said)
        self.assertEqual(status_patched({"status": {"nominatedNodeName": "n"}})[0], 200)
        done = patched({"op": "test", "path": "/metadata/labels/app", "value": "p"}, toleration("stowage.dev/planned"))
        self.assertEqual(done.returncode, 0, done.stderr)
        # Everybody else may do what RBAC lets them.
        self.kubectl("label", "pod", "p", "-n", "default", "app=q", "--overwrite")

    def test_the_right_to_patch_pods_is_given_only_where_it_is_used(self):
        self.namespace("lean")
        self.install("lean", {**GENERATED, "replicas": 0, "crds.install": False, "settings.placement": "extender"})
        self.assertEqual(self.rights("lean/stowage", [("", "pods")], VERBS), {("", "pods"): READ | {"delete"}})
        self.assertFalse(self.get("validatingadmissionpolicy", "stowage-tolerations-only"))

    def serve(self, name):
        """A stand-in for the service, with a certificate for the Service of a release in namespace `name`."""
        folder = self.dir / f"{name}-tls"
        run(CONTROL_PLANE, "cert", self.dir, "--name", "stowage", "--dns", f"stowage.{name}.svc", "--ip", "127.0.0.1", "--out", folder)
        service = Service(folder)
        self.addCleanup(service.close)
        return service, base64.b64encode((folder / "ca.crt").read_bytes()).decode()

    def test_the_webhook_is_called_for_the_right_pods_only(self):
        self.namespace("hooked")
        service, bundle = self.serve("hooked")
        values = {"tls.mode": "secret", "webhook.url": f"{service.url}/mutate", "webhook.caBundle": bundle, "replicas": 0, "crds.install": False, "webhook.schedulerNames": ["default-scheduler", "ours"]}
        self.install("hooked", values)
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "left-alone", "labels": {"stowage.dev/webhook": "ignore"}}})
        self.addCleanup(self.kubectl, "delete", "namespace", "left-alone")
        for namespace in ("default", "left-alone", "hooked"):
            eventually(lambda namespace=namespace: self.get("serviceaccount", "default", "-n", namespace))

        def asked():
            return {body["request"]["object"]["metadata"]["name"] for path, body, _ in service.calls if path == "/mutate"}

        def create(*pods):
            self.apply(*pods, arguments=("create", "--dry-run=server"))

        # The API server takes up a new configuration within a moment.
        eventually(lambda: create(pod("probe")) or asked())
        restricted = {"securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}}
        careful = [{"name": "main", "image": "none", "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}]
        create(
            pod("plain"),
            pod("of-a-deployment", owners=["ReplicaSet"]),
            pod("ours", schedulerName="ours"),
            pod("of-another-scheduler", schedulerName="other"),
            pod("assigned", nodeName="one"),
            pod("of-a-daemonset", owners=["DaemonSet"]),
            pod("opted-out", labels={"stowage.dev/webhook": "ignore"}),
            pod("system", namespace="kube-system"),
            pod("in-opted-out-namespace", namespace="left-alone"),
            pod("beside-stowage", namespace="hooked", **restricted, containers=careful),
        )
        self.assertEqual(asked() - {"probe"}, {"plain", "of-a-deployment", "ours"})
        hook = self.get("mutatingwebhookconfiguration", "stowage")["webhooks"][0]
        wanted = {"failurePolicy": "Ignore", "timeoutSeconds": 2, "sideEffects": "None", "reinvocationPolicy": "IfNeeded", "matchPolicy": "Equivalent", "admissionReviewVersions": ["v1"]}
        self.assertEqual({key: hook[key] for key in wanted}, wanted)
        # Pods are made also when nobody answers.
        service.close()
        create(pod("unanswered"))

    def test_a_real_kube_scheduler_takes_the_configuration_and_asks_the_extender_with_its_certificate(self):
        self.namespace("sched")
        service, bundle = self.serve("sched")
        values = {"tls.mode": "secret", "webhook.caBundle": bundle, "webhook.enabled": False, "replicas": 0, "crds.install": False, "scheduler.enabled": True, "scheduler.replicas": 0, "scheduler.extender.url": f"{service.url}/v1", "scheduler.extender.httpTimeout": "10s"}
        self.install("sched", values)
        account = "sched/stowage-scheduler"
        lease = [("coordination.k8s.io", "leases")]
        self.assertEqual(self.rights(account, lease, VERBS, namespace="sched", name="stowage-scheduler"), {lease[0]: {"get", "list", "watch", "create", "update"}})
        reader = self.rights(account, [("", "configmaps")], ["get"], namespace="kube-system", name="extension-apiserver-authentication")
        self.assertEqual(reader, {("", "configmaps"): {"get"}})

        run(CONTROL_PLANE, "cert", self.dir, "--name", "the-scheduler", "--client", "--out", self.dir / "client")
        run(CONTROL_PLANE, "kubeconfig", self.dir, "--service-account", account, "--out", self.dir / "scheduler-account.kubeconfig")
        text = self.get("configmap", "stowage-scheduler", "-n", "sched")["data"]["config.yaml"]
        text = text.replace("/etc/stowage/scheduler-tls/", f"{self.dir}/client/")
        text = text.replace("clientConnection:\n", f"clientConnection:\n  kubeconfig: {self.dir}/scheduler-account.kubeconfig\n")
        # A pod of the default scheduler is left to it, so it gets its configuration back.
        self.addCleanup(run, CONTROL_PLANE, "scheduler", self.dir)
        file = self.dir / "scheduler-under-test.yaml"
        file.write_text(text)
        run(CONTROL_PLANE, "scheduler", self.dir, "--config", file)
        self.apply(pod("scheduled", schedulerName="stowage-scheduler"))
        self.addCleanup(self.kubectl, "delete", "pod", "scheduled", "--force")
        placed = eventually(lambda: self.get("pod", "scheduled")["spec"].get("nodeName"))
        self.assertIn(placed, ("one", "two"))
        path, body, name = next(call for call in service.calls if call[0] == "/v1/filter")
        self.assertEqual(name, "the-scheduler")
        self.assertIsNone(body["Nodes"])
        self.assertEqual(set(body["NodeNames"]), {"one", "two"})
        self.assertIn("/v1/prioritize", {path for path, _, _ in service.calls})
        # Scheduling goes on without the extender.
        service.close()
        self.apply(pod("on-its-own", schedulerName="stowage-scheduler"))
        self.addCleanup(self.kubectl, "delete", "pod", "on-its-own", "--force")
        self.assertTrue(eventually(lambda: self.get("pod", "on-its-own")["spec"].get("nodeName"), 60))


if __name__ == "__main__":
    unittest.main()
