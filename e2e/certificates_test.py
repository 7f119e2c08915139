"""The chart in its default certificate mode, with the real cert-manager: certificates, the webhook's CA, admission through the Service, the
extender's client certificate, and renewals under load.

The API server calls the webhook through the Service of the chart, by its name and verified for it, as in a user's cluster. Only the way
there differs: the Service is of type ExternalName, because no kube-proxy leads to the process.
"""

import base64
import collections
import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import socket
import ssl
import tempfile
import threading
import time

import pytest

import chart_test
import harness
import observe
import services
import workloads
from cert_manager import CertManager
from harness import NAMESPACE, RELEASE, run
from kube import is_true
from secret_volume import SecretVolume
from waiting import wait_until

SERVER = f"{RELEASE}.{NAMESPACE}.svc"
SCHEDULER = f"{RELEASE}-scheduler"
SECRETS = {"ca": f"{RELEASE}-ca", "server": f"{RELEASE}-tls", "client": f"{SCHEDULER}-tls"}
PODS = 30
# Certificates of an hour that are renewed ten seconds after they were issued.
SHORT = {"duration": "1h", "renewBefore": "59m50s"}
RENEWALS = 3  # certificates that the service presents during the load
REQUESTS = 100  # of each kind at least, during the load
LOAD_SECONDS = 150  # in which these renewals and requests must happen


class CertifiedStowage(harness.Stowage):
    """The service with the chart's default certificates, mounted as by a kubelet, and the chart's scheduler."""

    def __init__(self, plane, **settings):
        super().__init__(plane, "extender", **settings)
        self.volumes = contextlib.ExitStack()
        self.certificates = {}  # values of tls.certManager

    def values(self):
        return {
            "replicas": 0,
            "settings": self.given,
            "controller": {"image": {"repository": harness.IMAGE}},
            "scheduler": {"enabled": True, "replicas": 0, "extender": {"url": f"{self.url}/v1"}},
            "tls": {"certManager": self.certificates},
        }

    def helm(self, values):
        super().helm(values)
        # The way from the API server to the process, in place of kube-proxy's.
        api = self.plane.api
        api.patch("Service", RELEASE, {"spec": {"type": "ExternalName", "externalName": "localhost"}}, NAMESPACE)
        port = json.dumps([{"op": "replace", "path": "/webhooks/0/clientConfig/service/port", "value": self.port}])
        self.plane.kubectl("patch", "mutatingwebhookconfiguration", RELEASE, "--type=json", "-p", port)

    def install(self):
        super().install()
        mounted = lambda name, folder: self.volumes.enter_context(SecretVolume(self.plane.api, NAMESPACE, SECRETS[name], self.dir / folder))
        self.server, self.client = mounted("server", "tls"), mounted("client", "client")

    def scheduler(self):
        """Runs kube-scheduler with the chart's configuration and its ServiceAccount."""
        self.plane.service_account(f"{NAMESPACE}/{SCHEDULER}", self.dir / "scheduler.kubeconfig")
        text = self.plane.api.get("ConfigMap", SCHEDULER, NAMESPACE)["data"]["config.yaml"]
        text = text.replace("/etc/stowage/scheduler-tls/", f"{self.client.folder}/")
        text = text.replace("clientConnection:\n", f"clientConnection:\n  kubeconfig: {self.dir}/scheduler.kubeconfig\n")
        self.plane.scheduler(text)

    def __exit__(self, *_):
        super().__exit__()
        self.volumes.close()
        # While cert-manager's CRDs exist: helm deletes no object of an unknown kind.
        self.plane.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--wait")


class Certified(services.Simulated):
    """The service, and the cert-manager that issues its certificates."""

    def __init__(self, plane, stowage, mirror, cert_manager):
        super().__init__(plane, stowage, mirror)
        self.cert_manager = cert_manager

    def logs(self):
        return super().logs() | {"ends of cert-manager's logs": self.cert_manager.tail()}

    def secret(self, name):
        return {key: base64.b64decode(text) for key, text in self.api.get("Secret", SECRETS[name], NAMESPACE)["data"].items()}

    def bundle(self):
        """The CA by which the API server verifies the webhook."""
        hook = self.api.get("MutatingWebhookConfiguration", RELEASE)["webhooks"][0]
        return base64.b64decode(hook["clientConfig"].get("caBundle", ""))

    def connect(self, client=False):
        """A new connection, verified for the Service's name by the CA that the API server uses; with the mounted client certificate or
        without one."""
        context = ssl.create_default_context(cadata=self.authority)
        if client:
            with tempfile.NamedTemporaryFile() as pair:
                pair.write(b"\n".join(self.stowage.client.read("tls.crt", "tls.key")))
                pair.flush()
                context.load_cert_chain(pair.name)
        plain = socket.create_connection(("127.0.0.1", self.stowage.port), timeout=10)
        connection = http.client.HTTPSConnection("127.0.0.1", self.stowage.port, timeout=10)
        connection.sock = context.wrap_socket(plain, server_hostname=SERVER)
        return connection

    def presented(self):
        """The certificate that a new connection gets."""
        with contextlib.closing(self.connect()) as connection:
            return connection.sock.getpeercert(binary_form=True)

    def admitted(self):
        """The labels that a pod's node selector has after admission through the API server."""
        made = workloads.pod("default", "p", 100, 64, nodeSelector={"beta.kubernetes.io/arch": "amd64"})
        return set(self.api.create(made, dry_run=True)["spec"]["nodeSelector"])

    def extender_refusals(self):
        """Extender requests by HTTP status, without 200."""
        total = self.stowage.metric("stowage_extender_requests_total")
        return total - self.stowage.metric("stowage_extender_requests_total", 'code="200"')


def exchange(connection, path, body):
    """Status and body of a POST."""
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


FILTER = json.dumps({"Pod": {"metadata": {"name": "p", "namespace": "d"}, "spec": {"containers": []}}, "Nodes": None, "NodeNames": ["n"]})
REVIEW = json.dumps(
    {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "1",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "operation": "CREATE",
            "namespace": "default",
            "object": workloads.pod("default", "p", 100, 64),
        },
    }
)


class Load:
    """Requests of four kinds until the end of the block; the first failure of each is kept.

    `admission` creates pods through the API server, `extender` sends requests on one connection, and the other two open a connection for
    each request."""

    def __init__(self, service):
        self.service = service
        self.stopped = threading.Event()
        self.counts, self.failures = collections.Counter(), {}

    def __enter__(self):
        self.kept = self.service.connect(client=True)
        kinds = {"admission": self.admission, "extender": self.extender, "new extender connections": self.new_extender, "new webhook connections": self.new_webhook}
        self.counts.update(dict.fromkeys(kinds, 0))
        self.pool = concurrent.futures.ThreadPoolExecutor(2 * len(kinds))
        # One thread for the connection that is kept.
        self.running = [self.pool.submit(self.repeat, name, once) for name, once in kinds.items() for _ in range(1 if name == "extender" else 2)]
        return self

    def __exit__(self, *_):
        self.stopped.set()
        concurrent.futures.wait(self.running)
        self.pool.shutdown()
        self.kept.close()

    def repeat(self, name, once):
        while not self.stopped.is_set():
            try:
                once()
            except Exception as error:
                self.failures.setdefault(name, f"{type(error).__name__}: {error}")
            self.counts[name] += 1
            time.sleep(0.01)  # two cores are also for the service

    def admission(self):
        labels = self.service.admitted()
        assert labels == {workloads.ARCH}, f"the webhook did not answer: {labels}"

    def extender(self):
        status, body = exchange(self.kept, "/v1/filter", FILTER)
        assert status == 200, body

    def new_extender(self):
        with contextlib.closing(self.service.connect(client=True)) as connection:
            status, body = exchange(connection, "/v1/filter", FILTER)
        assert status == 200, body

    def new_webhook(self):
        with contextlib.closing(self.service.connect()) as connection:
            status, body = exchange(connection, "/mutate", REVIEW)
        assert status == 200, body


def verify(secret, purpose, host=None):
    """By openssl: the chain is valid for this purpose and name."""
    folder = pathlib.Path(tempfile.mkdtemp())
    for name, content in secret.items():
        (folder / name).write_bytes(content)
    words = ["-verify_hostname", host] if host else []
    run("openssl", "verify", "-CAfile", folder / "ca.crt", "-purpose", purpose, *words, folder / "tls.crt")


@contextlib.contextmanager
def certified(plane):
    with CertManager(plane) as cert_manager, CertifiedStowage(plane) as stowage, observe.Mirror(plane.api) as mirror:
        service = Certified(plane, stowage, mirror, cert_manager)
        pool = workloads.node_pool()
        plane.apply(workloads.node_class(), pool)
        service.wait_pool(pool["metadata"]["name"])
        yield service


class TestCertManager:
    """The chart's default mode."""

    @staticmethod
    def environment(request):
        return certified(request.getfixturevalue("service_plane"))

    def test_1_certificates_are_issued_and_their_ca_is_injected_into_the_webhook(self, service):
        ready = lambda: all(is_true(service.cert_manager.certificate(NAMESPACE, name), "Ready") for name in SECRETS.values())
        service.poll(ready, 30, "all certificates ready")
        server, client, ca = (service.secret(name) for name in ("server", "client", "ca"))
        assert server["ca.crt"] == client["ca.crt"] == ca["tls.crt"]
        for host in (SERVER, f"{RELEASE}.{NAMESPACE}", f"{SERVER}.cluster.local"):
            verify(server, "sslserver", host)
        verify(client, "sslclient")
        service.poll(lambda: service.bundle() == server["ca.crt"], 30, "the CA injected", service.bundle)
        # A bundle that something else overwrote is repaired.
        other = base64.b64encode(server["tls.crt"]).decode()
        change = json.dumps([{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": other}])
        service.plane.kubectl("patch", "mutatingwebhookconfiguration", RELEASE, "--type=json", "-p", change)
        service.poll(lambda: service.bundle() == server["ca.crt"], 30, "the CA injected again", service.bundle)

    def test_2_pods_are_mutated_over_the_service(self, service):
        service.plane.has_service_account("default")
        service.poll(lambda: service.admitted() == {workloads.ARCH}, 30, "a pod mutated", service.admitted)

    def test_3_the_scheduler_calls_the_extender_with_its_certificate(self, service):
        service.plane.apply(workloads.namespace("shop"), workloads.workload("shop", "web", PODS, 500, 1024, schedulerName=SCHEDULER))
        service.wait_bound("shop", PODS, 120)
        assert service.stowage.metric("stowage_extender_requests_total", 'verb="filter"', 'code="200"') >= PODS
        assert service.extender_refusals() == 0
        unplanned, followed, strays = service.mirror.record.followed(service.uids("shop"))
        assert (unplanned + followed, strays) == (PODS, [])
        service.assert_no_errors()

    def test_4_renewals_under_load_fail_no_request(self, service):
        service.authority = service.bundle().decode()
        before = service.stowage.metric("stowage_cert_reloads_total", 'result="ok"')
        service.stowage.certificates = SHORT
        service.stowage.helm(service.stowage.values())
        served, pods = [service.presented()], PODS
        client_versions = service.stowage.client.versions
        begin = time.monotonic()
        with Load(service) as load:
            while len(served) <= RENEWALS or min(load.counts.values()) < REQUESTS:
                assert service.stowage.alive() and service.cert_manager.alive()
                assert time.monotonic() - begin < LOAD_SECONDS, f"only {len(served) - 1} renewals, {dict(load.counts)}"
                # The real scheduler asks too, with the certificate of its files.
                pods += 2
                service.api.scale("Deployment", "web", "shop", pods)
                service.wait_bound("shop", pods, 60)
                if (now := service.presented()) != served[-1]:
                    served.append(now)
        took = time.monotonic() - begin
        print(f"\n{len(served) - 1} certificates of the server and {service.stowage.client.versions - client_versions} of the client in {took:.0f} s;", dict(load.counts), flush=True)
        assert load.failures == {}
        assert len(set(served)) == len(served)
        assert service.stowage.client.versions > client_versions
        assert service.stowage.metric("stowage_cert_reloads_total", 'result="ok"') - before >= RENEWALS
        assert service.stowage.metric("stowage_cert_reloads_total", 'result="error"') == 0
        assert service.extender_refusals() == 0
        service.assert_no_errors()

    def test_5_a_renewed_ca_keeps_its_key_so_that_certificates_of_before_and_after_it_work_together(self, service):
        # The scheduler reads its CA once, and the certificates of server and client are not renewed at the same moment.
        old = service.secret("ca")
        service.cert_manager.renew(NAMESPACE, SECRETS["ca"])
        service.poll(lambda: service.secret("ca")["tls.crt"] != old["tls.crt"], 60, "the CA renewed")
        assert service.secret("ca")["tls.key"] == old["tls.key"]
        renewed = lambda name: service.secret(name)["ca.crt"] == service.secret("ca")["tls.crt"]
        with Load(service) as load:
            service.poll(lambda: renewed("server") and renewed("client"), 90, "both certificates of the renewed CA", every=1)
            presented = service.presented()
            service.poll(lambda: service.presented() != presented, 60, "a certificate of the renewed CA presented", every=1)
            pods = len(service.mirror.pods("shop")) + 2
            service.api.scale("Deployment", "web", "shop", pods)
            service.wait_bound("shop", pods, 60)
        assert load.failures == {}
        assert service.extender_refusals() == 0

    def test_6_cert_manager_accepts_the_certificates_of_every_mode(self, service, subtests):
        for mode, values in chart_test.MODES.items():
            if "tls.mode" not in values:
                with subtests.test(mode):
                    text = service.plane.helm("template", "other", chart_test.CHART, "-n", NAMESPACE, "--show-only", "templates/tls.yaml", *chart_test.settings(values)).stdout
                    service.plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
        refused = text.replace("renewBefore: 720h", "renewBefore: 2161h")
        assert refused != text
        done = service.plane.kubectl("apply", "--dry-run=server", "-f", "-", stdin=refused, check=False)
        assert "webhook.cert-manager.io" in done.stderr, "cert-manager's webhook was not asked"
