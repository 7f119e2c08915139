"""The chart and the plain manifests, by the real helm and kubectl on a real control plane."""

import base64
import concurrent.futures
import contextlib
import http.server
import json
import os
import pathlib
import re
import shutil
import ssl
import tempfile
import threading

import pytest

import cert_manager
import harness
from harness import ROOT, run
from waiting import wait_until

CHART = ROOT / "charts" / "stowage"
SYNC_CRDS = ROOT / "charts" / "sync-crds"
GENERATE = ROOT / "webhook-config" / "generate"
CA_BUNDLE = base64.b64encode(b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n").decode()
# Values without a default.
REQUIRED = {"settings.cloud": "simulated", "controller.image.repository": harness.IMAGE}


def settings(values):
    """--set-json for each value, by its dotted path; with what the chart requires."""
    return [word for path, value in {**REQUIRED, **values}.items() for word in ("--set-json", f"{path}={json.dumps(value)}")]


GENERATED = {"tls.mode": "generated"}
# For renderings without a cluster.
OFFLINE = {**GENERATED, "tls.generated.allowTemplate": True}
SECRET = {"tls.mode": "secret", "webhook.caBundle": CA_BUNDLE}
# Together these take every branch of every template.
MODES = {
    "defaults": {},
    "cert-manager with a scheduler": {"scheduler.enabled": True, "crds.keep": False},
    "cert-manager with a custom issuer": {"tls.certManager.issuerRef": {"kind": "ClusterIssuer", "name": "internal"}, "scheduler.clientCertificate": True},
    "generated with a scheduler": {**OFFLINE, "scheduler.enabled": True},
    "a secret": SECRET,
    "a secret whose CA something else injects": {"tls.mode": "secret", "tls.secret.name": "mine", "webhook.annotations": {"cert-manager.io/inject-ca-from-secret": "ns/mine"}},
    "a service outside of the cluster": {**SECRET, "webhook.url": "https://127.0.0.1:9443/mutate", "replicas": 0},
    "ec2": {**OFFLINE, "settings.cloud": "ec2", "settings.clusterName": "prod", "settings.placement": "extender"},
    "bare": {
        **OFFLINE,
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
        **OFFLINE,
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
        "prometheusRule": {"enabled": True, "additionalLabels": {"release": "prometheus"}},
        "dashboard.enabled": True,
        "controller.metrics.offerings": False,
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more", "labels": {"team": "infra"}, "annotations": {"note": "all"}}}],
        "webhook.clientAuth": {"secretName": "api-server-ca", "names": ["kube-apiserver", "other"]},
        "adminRole": "write",
        "networkPolicy": {"enabled": True, "webhookFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "metricsFrom": [{"namespaceSelector": {}}], "egress": [{"ports": [{"port": 443}]}]},
        "scheduler.enabled": True,
        "scheduler.resources": {"requests": {"cpu": "1"}},
        "scheduler.image.tag": "v1.34.4",
        "scheduler.extender.url": "https://10.0.0.1:9443/v1",
        "scheduler.extender.clientNames": ["my-scheduler"],
    },
    "no network policy and no aggregated rights": {**OFFLINE, "networkPolicy.enabled": False, "adminRole": "none"},
}

# Values of Karpenter's chart that have the same meaning in this chart.
KARPENTERS = {
    "replicas": 2,
    "serviceAccount": {"create": True, "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/karpenter"}},
    "serviceMonitor": {"enabled": True, "additionalLabels": {"release": "prometheus"}, "endpointConfig": {"scrapeTimeout": "5s"}},
    "podDisruptionBudget": {"maxUnavailable": 1},
    "priorityClassName": "system-cluster-critical",
    "dnsPolicy": "Default",
    "controller": {"resources": {"requests": {"cpu": 1, "memory": "1Gi"}}, "metrics": {"port": 8080}, "healthProbe": {"port": 8081}},
    "logLevel": "debug",
    "logOutputPaths": ["stdout"],
    "settings": {
        "batchMaxDuration": "10s",
        "batchIdleDuration": "500ms",
        "preferencePolicy": "Respect",
        "minValuesPolicy": "BestEffort",
        "clusterName": "prod",
        "clusterEndpoint": "https://api.example.com",
        "clusterCABundle": "LS0tLS1CRUdJTi==",
        "isolatedVPC": True,
        "eksControlPlane": True,
        "vmMemoryOverheadPercent": 0.05,
        "reservedENIs": "1",
        "interruptionQueue": "prod",
        "enableZonalShift": True,
        "disableDryRun": True,
        "disableClusterStateObservability": True,
        "amiRefreshInterval": "2m",
        "subnetRefreshInterval": "3m",
        "featureGates": {"nodeRepair": False, "nodeOverlay": False, "reservedCapacity": True, "spotToSpotConsolidation": False, "staticCapacity": True, "capacityBuffer": False},
        "awsFeatureGates": {"nodeClassCEL": True},
    },
}


# Values of `controller.metrics.names`.
NAMES = ("both", "karpenter", "stowage")


def registry(names="both"):
    """Labels by name of each series of the service, with this value of `controller.metrics.names`."""
    rows = re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)?) \| (\w+) \| (.*?) \|", (ROOT / "docs" / "reference" / "metrics.md").read_text())
    found, of = {}, set()
    for metric, kind, labels in rows:
        published = re.findall(r"\w+", metric)
        chosen = [name for name in published if len(published) == 1 or names == "both" or name.startswith(f"{names}_")]
        own, _, others = labels.partition("`…`: ")
        # Other labels of the object, which the first row names, or those of the row above.
        of = set(re.findall(r"(?:^|; )`(\w+)`: ", own)) | (of if others.startswith("as above") else set(re.findall(r"`(\w+)`", others)))
        parts = {"histogram": {"_bucket": {"le"}, "_count": set(), "_sum": set()}, "summary": {"": {"quantile"}, "_count": set(), "_sum": set()}}
        for part, more in parts.get(kind, {"": set()}).items():
            found |= {name + part: of | more for name in chosen}
    return found


def grouped(expression):
    """Labels that a query groups by."""
    return {label for labels in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r", *", labels)}


def unknown_series(expression, names="both"):
    """Metrics and labels of a query that the service does not have. The scrape adds the label `pod`."""
    known, problems, labels = registry(names), [], {"pod"}
    for name, selector in re.findall(r'\b((?:stowage|karpenter|operator)_\w+)\b(?! *!?[=~]+ *")(\{[^}]*\})?', re.sub(r"\bby \([^)]*\)", "", expression)):
        if name not in known:
            problems.append(f"{name} does not exist")
            continue
        labels |= known[name]
        problems += [f"{name} has no label {label}" for label in re.findall(r"(\w+) *(?:=~|!=|!~|=)", selector) if label not in known[name]]
    return problems + [f"no metric has the label {label}" for label in sorted(grouped(expression) - labels) if not problems]


@pytest.fixture
def folder():
    return pathlib.Path(tempfile.mkdtemp(prefix="chart-"))


@pytest.fixture(scope="session")
def helm(directory):
    """Runs helm without a cluster."""
    binaries = harness.tools("helm")
    environment = {**os.environ, "HOME": str(directory), "KUBECONFIG": os.devnull, "STOWAGE_E2E_BIN": str(binaries)}
    return lambda *arguments, check=True: run(binaries / "helm", *arguments, check=check, env=environment)


@pytest.fixture(scope="session")
def script(directory):
    """Runs a script of the repository, with the tools of the control plane."""
    environment = {**os.environ, "STOWAGE_E2E_BIN": str(harness.tools("helm"))}
    return lambda *arguments, check=True: run(*arguments, check=check, env=environment)


class TestOffline:
    """Without a cluster."""

    def test_lint_accepts_every_mode(self, helm, folder, subtests):
        for mode, values in MODES.items():
            with subtests.test(mode):
                file = folder / "values.json"
                file.write_text(json.dumps(nested({**REQUIRED, **values})))
                helm("lint", "--strict", "--quiet", CHART, "--values", file)

    def test_values_of_karpenters_chart_with_the_same_meaning_are_accepted(self, helm, folder):
        file = folder / "values.json"
        file.write_text(json.dumps(KARPENTERS))
        text = helm("template", "stowage", CHART, "--values", file, *settings({"settings.cloud": "ec2"})).stdout
        assert f"eks.amazonaws.com/role-arn: {KARPENTERS['serviceAccount']['annotations']['eks.amazonaws.com/role-arn']}\n" in text
        for name, value in (
            *(("BATCH_IDLE_DURATION", "500ms"), ("BATCH_MAX_DURATION", "10s"), ("MIN_VALUES_POLICY", "BestEffort"), ("LOG_LEVEL", "debug"), ("CLUSTER_NAME", "prod"), ("AWS_FEATURE_GATES", "NodeClassCEL=true")),
            *(("CLUSTER_ENDPOINT", "https://api.example.com"), ("CLUSTER_CA_BUNDLE", "LS0tLS1CRUdJTi=="), ("INTERRUPTION_QUEUE", "prod"), ("RESERVED_ENIS", "1"), ("VM_MEMORY_OVERHEAD_PERCENT", "0.05")),
            *((name, "true") for name in ("ISOLATED_VPC", "EKS_CONTROL_PLANE", "ENABLE_ZONAL_SHIFT", "DISABLE_DRY_RUN")),
            *(("AMI_REFRESH_INTERVAL", "2m"), ("SUBNET_REFRESH_INTERVAL", "3m")),
        ):
            assert re.search(rf'name: {name}\n +value: "{value}"', text), name

    def test_disabled_admission_rules_are_named_to_the_service(self, helm):
        named = lambda rules: re.findall(r"name: STOWAGE_DISABLED_ADMISSION_RULES\n +value: (.*)", helm("template", "stowage", CHART, *settings({"webhook.disabledRules": rules}), "--show-only", "templates/deployment.yaml").stdout)
        assert (named([]), named(["n13", "n9"])) == ([], ['"n13,n9"'])

    def test_the_component_that_events_name_is_chosen(self, helm):
        named = lambda values: re.findall(r"name: STOWAGE_REPORTING_COMPONENT\n +value: (.*)", helm("template", "stowage", CHART, *settings(values), "--show-only", "templates/deployment.yaml").stdout)
        assert (named({}), named({"settings.reportingComponent": "karpenter"})) == ([], ['"karpenter"'])
        refused = helm("template", "stowage", CHART, *settings({"settings.reportingComponent": "not a name"}), check=False)
        assert refused.returncode != 0 and "reportingComponent" in refused.stderr

    def test_a_variable_of_the_user_replaces_that_of_the_chart(self, helm):
        # Two variables of one name would be merged by Helm in an order of its own.
        values = {"settings.cloud": "ec2", "settings.clusterName": "c", "settings.interruptionQueue": "theirs", "controller.env": [{"name": "INTERRUPTION_QUEUE", "value": "mine"}]}
        text = helm("template", "stowage", CHART, *settings(values), "--show-only", "templates/deployment.yaml").stdout
        assert re.findall(r"name: INTERRUPTION_QUEUE\n +value: (.*)", text) == ["mine"]

    def test_generated_certificates_need_a_cluster_or_consent(self, helm):
        # Each rendering of Argo CD would replace the CA, and with it every certificate.
        done = helm("template", "stowage", CHART, *settings(GENERATED), check=False)
        assert done.returncode != 0
        assert "Set tls.mode to cert-manager or secret, or set tls.generated.allowTemplate" in done.stderr
        assert "kind: Secret" in helm("template", "stowage", CHART, *settings(OFFLINE)).stdout

    def test_objects_of_the_prometheus_operator_are_rendered_without_a_cluster(self, helm):
        text = helm("template", "stowage", CHART, *settings({"serviceMonitor.enabled": True, "prometheusRule.enabled": True})).stdout
        assert sorted(re.findall(r"(?m)^kind: (ServiceMonitor|PrometheusRule)$", text)) == ["PrometheusRule", "ServiceMonitor"]

    @pytest.mark.parametrize("names", NAMES)
    def test_alerts_are_about_metrics_and_labels_that_exist(self, helm, names):
        values = {"prometheusRule.enabled": True, "controller.metrics.names": names}
        text = helm("template", "stowage", CHART, *settings(values), "--show-only", "templates/prometheusrule.yaml").stdout
        expressions = re.findall(r"(?m)^ +expr: >-\n((?: {12,}.*\n)+)", text)
        assert len(expressions) == len(re.findall(r"(?m)^ +- alert: ", text)) > 8
        assert [problem for expression in expressions for problem in unknown_series(expression, names)] == []
        assert text.count("severity: ") == text.count("summary: ") == text.count("description: ") == len(expressions)

    @pytest.mark.parametrize("names", NAMES)
    def test_the_dashboard_shows_metrics_and_labels_that_exist(self, helm, names):
        values = {"dashboard": {"enabled": True, "additionalLabels": {"folder": "nodes"}}, "controller.metrics.names": names}
        values |= {"settings.cloud": "ec2", "settings.clusterName": "prod"}
        text = helm("template", "stowage", CHART, *settings(values), "--show-only", "templates/dashboard.yaml").stdout
        for label in ('grafana_dashboard: "1"', "folder: nodes"):
            assert f"\n    {label}\n" in text
        dashboard = json.loads(text.split("stowage.json: |\n")[1])
        is_as_written = dashboard == json.loads((CHART / "files" / "dashboard.json").read_text())
        assert is_as_written == (names != "karpenter")
        panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) and len(panels) > 20
        for target in (target for panel in panels for target in panel["targets"]):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert unknown_series(target["expr"], names) == [] and shown <= grouped(target["expr"]), target

    def test_the_dashboard_of_simulated_ec2_has_no_panels_of_its_calls(self, helm):
        rendered = {}
        for cloud in ("ec2", "simulated"):
            values = {"dashboard.enabled": True, "settings.cloud": cloud, "settings.clusterName": "prod"}
            text = helm("template", "stowage", CHART, *settings(values), "--show-only", "templates/dashboard.yaml").stdout
            rendered[cloud] = json.loads(text.split("stowage.json: |\n")[1])
        panels = {cloud: dashboard.pop("panels") for cloud, dashboard in rendered.items()}
        assert rendered["ec2"] == rendered["simulated"]
        gone = [panel["title"] for panel in panels["ec2"] if panel not in panels["simulated"]]
        assert gone[0] == "EC2" and len(gone) == 5 and len(panels["simulated"]) + 5 == len(panels["ec2"])

    def test_unknown_metrics_and_labels_are_reported(self):
        assert unknown_series('sum by (pod, loop) (stowage_loop_turn_seconds{kind="a"})') == ["stowage_loop_turn_seconds has no label kind"]
        assert unknown_series("sum by (le, kind) (rate(stowage_plan_seconds_bucket[5m]))") == ["no metric has the label kind"]
        assert unknown_series("stowage_gone") == ["stowage_gone does not exist"]
        assert unknown_series("karpenter_build_info + karpenter_gone", "stowage") == ["karpenter_build_info does not exist", "karpenter_gone does not exist"]
        assert unknown_series("karpenter_build_info + stowage_ready + karpenter_nodepools_usage", "karpenter") == []

    def test_additional_objects_are_maps_or_text_with_templates(self, helm):
        objects = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-a"}}, "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-b"]
        text = helm("template", "stowage", CHART, *settings({"extraObjects": objects}), "--show-only", "templates/extra-objects.yaml").stdout
        assert re.findall(r"(?m)^  name: '?(.*?)'?$", text) == ["stowage-a", "stowage-b"] and text.count("\n---\n") + text.startswith("---\n") == 2

    def test_host_networking_keeps_the_dns_of_the_cluster(self, helm, subtests):
        for values, wanted in (({}, "ClusterFirst"), ({"hostNetwork": True}, "ClusterFirstWithHostNet"), ({"hostNetwork": True, "dnsPolicy": "Default"}, "Default")):
            with subtests.test(values):
                text = helm("template", "stowage", CHART, *settings(values), "--show-only", "templates/deployment.yaml").stdout
                assert f"      dnsPolicy: {wanted}\n" in text

    def test_the_scheduler_of_each_mode_has_the_name_that_the_extender_accepts(self, helm, subtests):
        accepted = lambda text: re.search(r'name: STOWAGE_EXTENDER_CLIENT_NAMES\n +value: "(.*)"', text)[1]
        for values in ({"scheduler.enabled": True}, {**OFFLINE, "scheduler.enabled": True}):
            for name in ("stowage", "a-release-with-a-long-name-that-is-cut-somewhere"):
                with subtests.test((values, name)):
                    text = helm("template", name, CHART, *settings(values)).stdout
                    if "tls.mode" in values:
                        secret = re.search(r"(?ms)^  name: \S+-scheduler-tls\n.*?^  tls.crt: (\S+)$", text)[1]
                        subject = run("openssl", "x509", "-noout", "-subject", "-nameopt", "multiline", stdin=base64.b64decode(secret).decode()).stdout
                        issued = re.search(r"commonName += (\S+)", subject)[1]
                    else:
                        issued = re.search(r"(?m)^  commonName: (\S+-scheduler)$", text)[1]
                    assert accepted(text) == issued
        assert accepted(helm("template", "stowage", CHART, *settings({"scheduler.extender.clientNames": ["a", "b"]})).stdout) == "a,b"

    def test_a_network_policy_without_egress_rules_allows_aws_and_the_pod_identity_agent(self, helm):
        # Neither is a pod of the cluster, and the agent runs on the node itself: only open egress allows both.
        text = helm("template", "stowage", CHART, *settings({"settings.cloud": "ec2", "settings.clusterName": "c"}), "--show-only", "templates/networkpolicy.yaml").stdout
        assert re.search(r"(?m)^  egress:\n    - \{\}$", text)

    def test_invalid_values_are_rejected_with_their_path_and_the_valid_values(self, helm, subtests):
        for values, wanted in (
            ({"settings.placement": "magic"}, ["/settings/placement", "extender", "nominate", "off"]),
            ({"settings.cloud": "gce"}, ["/settings/cloud", "simulated", "ec2"]),
            ({"settings.cloud": ""}, ["/settings/cloud", "simulated", "ec2"]),
            ({"settings.cloud": "ec2"}, ["/settings/clusterName"]),
            ({"settings.batchIdleDuration": "soon"}, ["/settings/batchIdleDuration", "soon"]),
            ({"settings.batchIdleDuration": 1}, ["/settings/batchIdleDuration", "string"]),
            ({"settings.preferencePolicy": "respect"}, ["/settings/preferencePolicy", "Respect", "Ignore"]),
            ({"settings.nodeVcpus": "8"}, ["/settings/nodeVcpus", "8"]),
            ({"settings.nodePenalty": "much"}, ["/settings/nodePenalty", "much"]),
            ({"settings.familyWeights.m7g": 0}, ["/settings/familyWeights/m7g", "1"]),
            ({"settings.spotPlacementScoreThreshold": 11}, ["/settings/spotPlacementScoreThreshold", "10"]),
            ({"settings.featureGates.nodeOverlay": True}, ["/settings/featureGates/nodeOverlay", "false"]),
            ({"settings.interruptionQueue": "https://sqs.us-east-1.amazonaws.com/1/queue"}, ["/settings/interruptionQueue"]),
            ({"settings.clusterEndpoint": "api.example.com"}, ["/settings/clusterEndpoint"]),
            ({"settings.vmMemoryOverheadPercent": 7.5}, ["/settings/vmMemoryOverheadPercent", "1"]),
            ({"settings.reservedENIs": "many"}, ["/settings/reservedENIs", "many"]),
            ({"settings.ignoreDRARequests": True}, ["/settings", "ignoreDRARequests", "not allowed"]),
            ({"adminRole": "all"}, ["/adminRole", "read", "write", "none"]),
            ({"scheduler.extender.clientNames": ["a,b"]}, ["/scheduler/extender/clientNames/0"]),
            ({"webhook.clientAuth.names": []}, ["/webhook/clientAuth/names"]),
            ({"podDisruptionBudget.unhealthyPodEvictionPolicy": "Never"}, ["/podDisruptionBudget/unhealthyPodEvictionPolicy", "AlwaysAllow"]),
            ({"replica": 3}, ["replica", "not allowed"]),
            ({"replicas": -1}, ["/replicas", "0"]),
            ({"logLevel": "verbose"}, ["/logLevel", "debug", "info", "warn", "error"]),
            ({"logOutputPaths": ["/var/log/karpenter"]}, ["/logOutputPaths/0", "stdout", "stderr"]),
            ({"extraObjects": {"kind": "NodePool"}}, ["/extraObjects", "array"]),
            ({"tls.mode": "none"}, ["/tls/mode", "cert-manager", "secret", "generated"]),
            ({"tls.certManager.issuerRef": {"kind": "Issuer"}}, ["/tls/certManager/issuerRef", "name"]),
            ({"webhook.disabledRules": ["n13,n1"]}, ["/webhook/disabledRules/0", "n13,n1"]),
            ({"webhook.disabledRules": ["n1", "n1"]}, ["/webhook/disabledRules", "equal"]),
            ({"webhook.timeoutSeconds": 31}, ["/webhook/timeoutSeconds", "30"]),
            ({"webhook.url": "http://10.0.0.1/mutate"}, ["/webhook/url", "https://"]),
            ({"webhook.caBundle": "-----BEGIN CERTIFICATE-----"}, ["/webhook/caBundle"]),
            ({"webhook.port": 94430}, ["/webhook/port", "65,535"]),
            ({"controller.image.repository": ""}, ["controller.image.repository", "Dockerfile", "your registry"]),
            ({"controller.image.digest": "latest"}, ["/controller/image/digest", "sha256"]),
            ({"scheduler.extender.weight": 0}, ["/scheduler/extender/weight", "1"]),
            ({"tls.mode": "secret"}, ["tls.mode is secret", "webhook.caBundle", "webhook.annotations"]),
        ):
            with subtests.test(values):
                done = helm("template", "stowage", CHART, *settings(values), check=False)
                assert done.returncode != 0, done.stdout
                for part in wanted:
                    assert part in done.stderr

    def test_every_variable_of_the_deployment_is_a_setting_with_the_default_of_the_service(self, helm, subtests):
        # A variable with a typo would be ignored by the service.
        page = (ROOT / "docs" / "reference" / "settings.md").read_text().split("## `stowage simulate`")[0]
        defaults = dict(re.findall(r"(?m)^\| `--[^|]* \| `(\w+)` \| `?([^|`]*)`? \|", page))
        for mode, chosen in ({}, {"LEADER_ELECTION_NAMESPACE": "default"}), ({"settings.cloud": "ec2", "settings.clusterName": "prod"}, {"STOWAGE_CLOUD": "ec2", "CLUSTER_NAME": "prod", "LEADER_ELECTION_NAMESPACE": "default"}):
            text = helm("template", "stowage", CHART, *settings(mode), "--show-only", "templates/deployment.yaml").stdout
            variables = re.findall(r'(?m)^ +- name: ([A-Z][A-Z_]*)\n +value: "?(.*?)"?$', text)
            assert len(variables) > 15, text
            for name, value in variables:
                with subtests.test(name):
                    assert name in defaults, f"{name} is no variable of docs/reference/settings.md"
                    assert value == chosen.get(name, defaults[name].strip()), f"the default of {name} in values.yaml differs"

    def test_a_subchart_accepts_global_values(self, helm):
        helm("template", "stowage", CHART, *settings({"global.region": "us-east-1"}))

    def test_the_chart_packages_with_its_crds(self, helm, folder):
        helm("package", CHART, "--destination", folder)
        text = helm("template", "stowage", next(folder.glob("stowage-*.tgz")), *settings({})).stdout
        assert len(re.findall(r"(?m)^kind: CustomResourceDefinition$", text)) == 3
        assert text.count("helm.sh/resource-policy: keep") == 3

    def test_the_charts_crds_are_those_of_the_project(self, script):
        script(SYNC_CRDS, "--check")

    def test_stale_crds_are_reported(self, script, folder):
        copy, changed = folder / "copy", folder / "crds"
        shutil.copytree(CHART / "files" / "crds", changed)
        script(SYNC_CRDS, "--from", changed, "--to", copy)
        script(SYNC_CRDS, "--check", "--from", changed, "--to", copy)
        file = changed / "karpenter.sh_nodepools.yaml"
        file.write_text(file.read_text() + "# changed\n")
        (copy / "gone.yaml").write_text("")
        done = script(SYNC_CRDS, "--check", "--from", changed, "--to", copy, check=False)
        assert done.returncode == 1
        assert "stale" in done.stderr
        assert "gone.yaml, karpenter.sh_nodepools.yaml; run charts/sync-crds" in done.stderr
        script(SYNC_CRDS, "--from", changed, "--to", copy)
        script(SYNC_CRDS, "--check", "--from", changed, "--to", copy)

    def test_a_crd_that_the_template_would_break_is_rejected(self, script, folder):
        folder = folder / "crds"
        folder.mkdir()
        (folder / "bad.yaml").write_text("kind: CustomResourceDefinition\nmetadata:\n  annotations:\n    a: b\n  name: bad\nspec: {}\n")
        done = script(SYNC_CRDS, "--from", folder, "--to", folder / "copy", check=False)
        assert done.returncode == 1
        assert "bad.yaml" in done.stderr
        assert "metadata.annotations" in done.stderr

    def test_the_plain_manifests_are_those_of_the_chart(self, script):
        script(GENERATE, "--check")

    def test_stale_plain_manifests_are_reported(self, script, folder):
        script(GENERATE, "--to", folder)
        script(GENERATE, "--check", "--to", folder)
        file = folder / "service.yaml"
        file.write_text(file.read_text().replace("443", "444"))
        (folder / "scheduler" / "second-scheduler.yaml").unlink()
        (folder / "more.yaml").write_text("")
        done = script(GENERATE, "--check", "--to", folder, check=False)
        assert done.returncode == 1
        assert "more.yaml, scheduler/second-scheduler.yaml, service.yaml; run webhook-config/generate" in done.stderr

    def test_simulate_accepts_the_scenario_of_helm_test(self):
        scenario = json.loads((CHART / "files" / "test-scenario.json").read_text())
        assert set(scenario) == {"nodePools", "pods"}
        assert len(scenario["pods"]) == 3
        if binary := os.environ.get("STOWAGE_BIN"):
            done = run(binary, "simulate", f"--scenario={CHART}/files/test-scenario.json", "--output=json")
            assert json.loads(done.stdout)["unschedulable"] == []


def nested(values):
    """Dotted paths as nested dictionaries."""
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
# All rights of the controller: everything else in VERBS on these and on the rest of RESOURCES must be refused.
RIGHTS = {
    ("", "pods"): READ | {"delete", "patch"},
    ("", "pods/status"): {"patch"},
    ("", "pods/eviction"): {"create"},
    ("", "nodes"): READ | {"patch", "delete"},
    ("", "namespaces"): READ,
    ("", "persistentvolumes"): READ,
    ("", "persistentvolumeclaims"): READ,
    ("", "limitranges"): READ,
    ("events.k8s.io", "events"): {"create", "patch"},
    ("authorization.k8s.io", "subjectaccessreviews"): {"create"},
    ("apps", "daemonsets"): READ,
    ("policy", "poddisruptionbudgets"): READ,
    ("storage.k8s.io", "storageclasses"): READ,
    ("storage.k8s.io", "csinodes"): READ,
    ("storage.k8s.io", "volumeattachments"): READ,
    ("karpenter.sh", "nodepools"): READ | {"patch"},
    ("karpenter.sh", "nodepools/status"): {"patch"},
    ("karpenter.sh", "nodepools/finalizers"): {"update"},
    ("karpenter.sh", "nodeclaims"): READ | {"create", "delete", "patch"},
    ("karpenter.sh", "nodeclaims/status"): {"patch"},
    ("karpenter.sh", "nodeclaims/finalizers"): {"update"},
    ("karpenter.sh", "nodeoverlays"): {"list"},
    ("autoscaling.x-k8s.io", "capacitybuffers"): {"list"},
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
]
# Kinds of other projects that the chart has objects of, with the fields that the chart uses. cert-manager's are its own.
FOREIGN = {
    ("monitoring.coreos.com", "PrometheusRule"): {
        "groups": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "rules"],
                "properties": {
                    "name": {"type": "string"},
                    "rules": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["alert", "expr"],
                            "properties": {
                                **{name: {"type": "string"} for name in ("alert", "expr", "for")},
                                **{name: {"type": "object", "additionalProperties": {"type": "string"}} for name in ("labels", "annotations")},
                            },
                        },
                    },
                },
            },
        },
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
    """The objects in the JSON output of kubectl: a sequence, or a List."""
    found, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        item, end = decoder.raw_decode(text)
        found += item["items"] if item["kind"] == "List" else [item]
        text = text[end:]
    return found


class FakeService:
    """An HTTPS server in place of Stowage: records requests and clients, changes nothing."""

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


class Cluster:
    """The control plane with two nodes. Each test installs a release of its own; `undo` runs at the end of the test, last in first out."""

    def __init__(self, plane):
        self.plane, self.api, self.dir = plane, plane.api, plane.dir
        self.undo = contextlib.ExitStack()
        self.create(node("one", "a"), node("two", "b"))

    def kubectl(self, *arguments, content=None, check=True, config=None):
        return self.plane.kubectl(*arguments, *([f"--kubeconfig={config}"] if config else []), stdin=content, check=check)

    def create(self, *objects, dry_run=False):
        """Creates objects concurrently; returns them as the API server answers, in order."""
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda item: self.api.create(item, dry_run), objects))

    def server_dry_run(self, text):
        """The objects of a manifest as the API server accepts them, without keeping them; unknown fields are refused."""
        return documents(self.kubectl("apply", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", content=text).stdout)

    def namespace(self, name):
        # The strictest pod security standard is enforced: pods that violate it are not created.
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
        self.undo.callback(self.api.delete, "Namespace", name)

    def foreign_crds(self):
        """CRDs of other projects, for this test only: other tests depend on their absence."""
        names = [self.create(foreign_crd(group, kind, spec))[0]["metadata"]["name"] for (group, kind), spec in FOREIGN.items()]
        self.undo.callback(self.plane.delete_crds, names)
        created = self.kubectl("create", "-o", "name", "-f", "-", content=cert_manager.crds(self.plane, "certificates", "issuers")).stdout.split()
        names += [name.partition("/")[2] for name in created]
        self.kubectl("wait", "--for=condition=Established", "crd", *names)

    def helm(self, *arguments, check=True):
        return self.plane.helm(*arguments, check=check)

    def install(self, namespace, values, *arguments, command="install"):
        if command == "install":
            self.undo.callback(self.uninstall, namespace)
        self.helm(command, "stowage", CHART, "--namespace", namespace, *settings(values), *arguments)

    def uninstall(self, namespace):
        self.helm("uninstall", "stowage", "--namespace", namespace, "--ignore-not-found", "--wait")

    def secret(self, namespace, name):
        return {key: base64.b64decode(value) for key, value in self.api.get("Secret", name, namespace)["data"].items()}

    def everything(self):
        """Names of all objects except those that controllers create on their own."""
        kinds = self.kubectl("api-resources", "--verbs=list", "-o", "name").stdout.split()
        kinds = [kind for kind in kinds if not re.match(r"(events|leases|apiservices)\b", kind)]
        names = self.kubectl("get", ",".join(kinds), "-A", "--no-headers", "-o", "custom-columns=K:.kind,S:.metadata.namespace,N:.metadata.name").stdout
        return {" ".join(line.split()) for line in names.splitlines()}

    def rights(self, account, resources, verbs, **where):
        """The verbs that the API server's authorizer allows a ServiceAccount, by resource."""
        namespace, _, name = account.partition("/")
        attributes = []
        for group, resource in resources:
            plural, _, subresource = resource.partition("/")
            attributes += [{"group": group, "resource": plural, "subresource": subresource, "verb": verb, **where} for verb in verbs]
        who = {"user": f"system:serviceaccount:{namespace}:{name}", "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]}
        reviews = [{"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {**who, "resourceAttributes": given}} for given in attributes]
        allowed = {}
        for given, answer in zip(attributes, self.create(*reviews), strict=True):
            key = (given["group"], "/".join(filter(None, (given["resource"], given["subresource"]))))
            if answer["status"]["allowed"]:
                allowed.setdefault(key, set()).add(given["verb"])
        return allowed

    def verify(self, secret, purpose, host):
        """By openssl: the chain is valid for this purpose and name, and the key is that of the certificate."""
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.dir))
        for name, content in secret.items():
            (folder / name).write_bytes(content)
        words = ["-verify_hostname", host] if host else []
        run("openssl", "verify", "-CAfile", folder / "ca.crt", "-purpose", purpose, *words, folder / "tls.crt")
        public = run("openssl", "x509", "-in", folder / "tls.crt", "-noout", "-pubkey").stdout
        assert public == run("openssl", "pkey", "-in", folder / "tls.key", "-pubout").stdout

    def serve(self, name):
        """A fake service, with a certificate for the Service of a release in namespace `name`."""
        folder = self.dir / f"{name}-tls"
        self.plane.certificate(folder, "--name", "stowage", "--dns", f"stowage.{name}.svc", "--ip", "127.0.0.1")
        service = FakeService(folder)
        self.undo.callback(service.close)
        return service, base64.b64encode((folder / "ca.crt").read_bytes()).decode()


@pytest.fixture(scope="class")
def two_nodes(control_plane):
    return Cluster(control_plane)


@pytest.fixture
def cluster(two_nodes):
    with two_nodes.undo:
        yield two_nodes


class TestInstalled:
    """On a control plane."""

    def test_every_mode_is_accepted_by_a_real_api_server(self, cluster, subtests):
        cluster.foreign_crds()
        cluster.namespace("modes")
        for mode, values in MODES.items():
            with subtests.test(mode):
                text = cluster.helm("template", "stowage", CHART, "-n", "modes", *settings(values)).stdout
                objects = cluster.server_dry_run(text)
                kinds = {item["kind"] for item in objects}
                assert ("ServiceMonitor" in kinds) == (mode == "all of it")
                assert ("PrometheusRule" in kinds) == (mode == "all of it")
                assert ("NetworkPolicy" in kinds) == nested(values).get("networkPolicy", {}).get("enabled", True)
                assert ("Certificate" in kinds) == ("tls.mode" not in values)
                assert ("CustomResourceDefinition" in kinds) == values.get("crds.install", True)
                if mode == "all of it":
                    for item in objects:
                        assert (item["kind"], item["metadata"]["labels"].get("team")) == (item["kind"], "infra")
                        assert (item["kind"], item["metadata"]["annotations"].get("note")) == (item["kind"], "all")

    def test_the_plain_manifests_are_accepted_by_a_real_api_server(self, cluster):
        cluster.foreign_crds()
        files = ["-f", ROOT / "webhook-config", "-f", ROOT / "webhook-config/scheduler/second-scheduler.yaml"]
        cluster.undo.callback(cluster.kubectl, "delete", "--wait=false", "--ignore-not-found", *files)
        cluster.kubectl("apply", *files)
        assert cluster.api.get("Deployment", "stowage", "stowage")["spec"]["replicas"] == 2
        instance = lambda item: item["metadata"].get("labels", {}).get("app.kubernetes.io/instance")
        applied = [item for kind in ("ClusterRole", "Deployment", "MutatingWebhookConfiguration") for item in cluster.api.list(kind) if instance(item) == "stowage"]
        assert len(applied) == 5
        # No label of Helm, or Helm would adopt the object.
        assert [item["metadata"]["name"] for item in applied if {"helm.sh/chart", "app.kubernetes.io/managed-by"} & item["metadata"]["labels"].keys()] == []

    def test_without_cert_manager_the_default_mode_names_the_fix(self, cluster):
        done = cluster.helm("install", "stowage", CHART, "--namespace", "default", *settings({}), check=False)
        assert done.returncode != 0
        assert "this cluster has no cert-manager.io/v1: install cert-manager, or set tls.mode to generated or secret" in done.stderr

    def test_a_release_installs_upgrades_and_uninstalls_leaving_only_crds(self, cluster):
        cluster.namespace("life")
        crds = ["nodepools.karpenter.sh", "nodeclaims.karpenter.sh", "ec2nodeclasses.karpenter.k8s.aws"]
        cluster.undo.callback(cluster.plane.delete_crds, crds)
        before = cluster.everything()
        # kwok simulates the kubelets: --wait ends when the pods have passed admission and the scheduler.
        cluster.install("life", GENERATED, "--wait", "--timeout", "90s")
        first, ca = cluster.secret("life", "stowage-tls"), cluster.secret("life", "stowage-ca")
        assert set(first) == {"tls.crt", "tls.key", "ca.crt"}
        assert first["ca.crt"] == ca["tls.crt"]
        cluster.verify(first, "sslserver", "stowage.life.svc")
        bundle = cluster.api.get("MutatingWebhookConfiguration", "stowage")["webhooks"][0]["clientConfig"]["caBundle"]
        assert base64.b64decode(bundle) == first["ca.crt"]
        pods = [item for item in cluster.api.list("Pod", "life") if item["metadata"]["labels"].get("app.kubernetes.io/component") == "controller"]
        assert {item["spec"]["nodeName"] for item in pods} == {"one", "two"}

        # The scheduler is enabled later: its certificate is of the same CA, and existing certificates are kept.
        cluster.install("life", {**GENERATED, "scheduler.enabled": True, "settings.placement": "extender"}, "--wait", "--timeout", "90s", command="upgrade")
        assert cluster.secret("life", "stowage-tls") == first
        assert cluster.secret("life", "stowage-ca") == ca
        client = cluster.secret("life", "stowage-scheduler-tls")
        cluster.verify(client, "sslclient", None)
        assert client["ca.crt"] == ca["tls.crt"]
        env = cluster.api.get("Deployment", "stowage", "life")["spec"]["template"]["spec"]["containers"][0]["env"]
        assert {"name": "STOWAGE_PLACEMENT", "value": "extender"} in env
        scheduler = cluster.api.get("Deployment", "stowage-scheduler", "life")["spec"]["template"]["spec"]["containers"][0]
        assert scheduler["image"] == "registry.k8s.io/kube-scheduler:v1.34.4"
        cluster.install("life", {**GENERATED, "scheduler.enabled": True}, command="upgrade")
        assert cluster.secret("life", "stowage-scheduler-tls") == client

        pool = {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodePool",
            "metadata": {"name": "kept"},
            "spec": {"template": {"spec": {"nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}, "requirements": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}}},
        }
        cluster.create(pool)
        cluster.uninstall("life")
        kept = {*(f"CustomResourceDefinition <none> {name}" for name in crds), "NodePool <none> kept"}
        # Pods and the objects that controllers created for them are deleted asynchronously.
        left = lambda: cluster.everything() - before
        wait_until(lambda: left() == kept, 30, "only CRDs and their objects left", left, every=0.5)
        # The kept CRDs do not prevent another installation.
        cluster.install("life", {**GENERATED, "replicas": 0})

    def test_the_pod_of_helm_test_is_accepted_under_the_restricted_standard(self, cluster):
        cluster.namespace("hook")
        cluster.install("hook", {**GENERATED, "replicas": 0, "crds.install": False})
        rendered = cluster.helm("get", "hooks", "stowage", "-n", "hook").stdout
        objects = cluster.server_dry_run(rendered)
        scenario, planner = objects if objects[0]["kind"] == "ConfigMap" else reversed(objects)
        assert json.loads(scenario["data"]["scenario.json"]) == json.loads((CHART / "files/test-scenario.json").read_text())
        assert planner["spec"]["containers"][0]["args"] == ["simulate", "--scenario=/etc/stowage/test/scenario.json", "--output=json"]
        assert [item["key"] for volume in planner["spec"]["volumes"] for item in volume.get("secret", {}).get("items", [])] == ["tls.crt", "ca.crt"]

    def test_the_service_account_has_exactly_the_rights_that_the_service_uses(self, cluster):
        cluster.namespace("rights")
        cluster.install("rights", {**GENERATED, "replicas": 0, "crds.install": False})
        resources = list(dict.fromkeys(RESOURCES))
        simulated = {key: RIGHTS.get(key, set()) | SIMULATED.get(key, set()) for key in RIGHTS | SIMULATED}
        assert cluster.rights("rights/stowage", resources, VERBS) == simulated
        lease = [("coordination.k8s.io", "leases")]
        assert cluster.rights("rights/stowage", lease, VERBS, namespace="rights") == {lease[0]: {"get", "create"}}
        assert cluster.rights("rights/stowage", lease, VERBS, namespace="rights", name="karpenter-leader-election") == {lease[0]: {"get", "create", "update", "list"}}
        assert cluster.rights("rights/stowage", lease, VERBS, name="karpenter-leader-election") == {lease[0]: {"list"}}
        assert cluster.rights("rights/stowage", lease, VERBS) == {}
        assert cluster.rights("rights/stowage", lease, VERBS, namespace="kube-node-lease") == {lease[0]: {"create", "patch"}}
        pause = [("", "configmaps")]
        assert cluster.rights("rights/stowage", pause, VERBS, namespace="rights", name="stowage-pause") == {pause[0]: {"list", "watch"}}
        assert cluster.rights("rights/stowage", pause, VERBS, namespace="rights", name="other") == {}

        cluster.install("rights", {**GENERATED, "replicas": 0, "crds.install": False, "settings.cloud": "ec2", "settings.clusterName": "prod"}, command="upgrade")
        ec2 = {key: RIGHTS.get(key, set()) | EC2.get(key, set()) for key in RIGHTS | EC2}
        rights = lambda: cluster.rights("rights/stowage", resources, VERBS)
        wait_until(lambda: rights() == ec2, 30, "the rights of EC2", rights)
        assert cluster.rights("rights/stowage", [("", "services")], VERBS, namespace="kube-system", name="kube-dns") == {("", "services"): {"get"}}
        assert cluster.rights("rights/stowage", [("", "services")], VERBS, namespace="kube-system", name="other") == {}

    def test_a_token_of_the_service_account_updates_its_lease_and_no_other(self, cluster):
        cluster.namespace("token")
        cluster.install("token", {**GENERATED, "replicas": 0, "crds.install": False})
        config = cluster.dir / "token.kubeconfig"
        cluster.plane.service_account("token/stowage", config)

        def lease(name):
            return json.dumps({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name, "namespace": "token"}, "spec": {"holderIdentity": "me"}})

        cluster.kubectl("create", "-f", "-", content=lease("karpenter-leader-election"), config=config)
        cluster.kubectl("replace", "-f", "-", content=lease("karpenter-leader-election"), config=config)
        cluster.kubectl("create", "-f", "-", content=lease("other"), config=config)
        for refused in (("replace", "-f", "-"), ("delete", "-f", "-")):
            done = cluster.kubectl(*refused, content=lease("other"), config=config, check=False)
            assert "Forbidden" in done.stderr, refused
        cluster.kubectl("get", "nodes", config=config)
        assert "forbidden" in cluster.kubectl("get", "secrets", "-n", "token", config=config, check=False).stderr

    def test_the_requests_of_the_service_account_do_not_wait_behind_those_of_others(self, cluster):
        cluster.namespace("flow")
        cluster.install("flow", {**GENERATED, "replicas": 0, "crds.install": False, "settings.leaderElection.namespace": "kube-public"})
        config = cluster.dir / "flow.kubeconfig"
        cluster.plane.service_account("flow/stowage", config)
        uids = {item["metadata"]["uid"]: item["metadata"]["name"] for item in json.loads(cluster.kubectl("get", "flowschemas", "-o", "json").stdout)["items"]}

        def schema(path):
            """The FlowSchema of a request, by its response."""
            done = cluster.kubectl("-v=8", "get", "--raw", path, config=config, check=False)
            return uids[re.search(r"(?i)x-kubernetes-pf-flowschema-uid: (\S+)", done.stderr)[1]]

        lease = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/karpenter-leader-election"
        schemas = lambda: [schema(path) for path in (lease.format("kube-public"), lease.format("flow"), "/api/v1/nodes", "/version")]
        wait_until(lambda: schemas() == ["stowage-lease", "stowage", "stowage", "stowage"], 30, "the FlowSchemas apply", schemas)

    def test_the_right_to_nominate_pods_is_granted_only_where_it_is_used(self, cluster):
        cluster.namespace("lean")
        resources = [("", "pods"), ("", "pods/status")]
        values = {**GENERATED, "replicas": 0, "crds.install": False}
        cluster.install("lean", {**values, "settings.placement": "extender"})
        pods = {("", "pods"): READ | {"delete", "patch"}}
        assert cluster.rights("lean/stowage", resources, VERBS) == {**pods, ("", "pods/status"): {"patch"}}
        cluster.install("lean", {**values, "settings.placement": "off"}, command="upgrade")
        rights = lambda: cluster.rights("lean/stowage", resources, VERBS)
        wait_until(lambda: rights() == pods, 30, "the rights of the mode", rights)

    def test_administrators_may_read_and_by_choice_write(self, cluster):
        cluster.namespace("aggregated")
        values = {**GENERATED, "replicas": 0, "crds.install": False}
        cluster.install("aggregated", values)
        cluster.kubectl("create", "clusterrolebinding", "aggregated-admin", "--clusterrole=admin", "--serviceaccount=default:administrator")
        cluster.undo.callback(cluster.kubectl, "delete", "clusterrolebinding/aggregated-admin")
        resources = [("karpenter.sh", "nodepools"), ("karpenter.sh", "nodeclaims"), ("karpenter.k8s.aws", "ec2nodeclasses")]
        for role, verbs in (("read", READ), ("write", READ | {"create", "delete", "patch"}), ("none", set())):
            cluster.install("aggregated", {**values, "adminRole": role}, command="upgrade")
            rights = lambda: cluster.rights("default/administrator", resources, VERBS)
            wait_until(lambda verbs=verbs: rights() == ({key: verbs for key in resources} if verbs else {}), 30, f"adminRole {role}", rights)

    def test_without_the_prometheus_operator_its_objects_name_the_fix(self, cluster, subtests):
        # Where the chart is accepted, later tests need its names.
        cluster.undo.callback(cluster.uninstall, "default")
        for kind in ("serviceMonitor", "prometheusRule"):
            with subtests.test(kind):
                done = cluster.helm("install", "stowage", CHART, "--namespace", "default", *settings({**GENERATED, f"{kind}.enabled": True}), check=False)
                assert done.returncode != 0
                assert f"{kind}.enabled is true, but this cluster has no monitoring.coreos.com/v1: install the CRDs" in done.stderr

    def test_the_webhook_is_called_for_matching_pods_only(self, cluster):
        cluster.namespace("hooked")
        service, bundle = cluster.serve("hooked")
        values = {"tls.mode": "secret", "webhook.url": f"{service.url}/mutate", "webhook.caBundle": bundle, "replicas": 0, "crds.install": False, "webhook.schedulerNames": ["default-scheduler", "ours"]}
        cluster.install("hooked", values)
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "opted-out", "labels": {"stowage.dev/webhook": "ignore"}}})
        cluster.undo.callback(cluster.api.delete, "Namespace", "opted-out")
        for namespace in ("default", "opted-out", "hooked"):
            cluster.plane.has_service_account(namespace)

        def reviewed():
            return {body["request"]["object"]["metadata"]["name"] for path, body, _ in service.calls if path == "/mutate"}

        def create(*pods):
            cluster.create(*pods, dry_run=True)

        # A new configuration takes effect after a moment.
        wait_until(lambda: create(pod("probe")) or reviewed(), 30, "the webhook called")
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
            pod("in-opted-out-namespace", namespace="opted-out"),
            pod("in-the-namespace-of-stowage", namespace="hooked", **restricted, containers=careful),
        )
        assert reviewed() - {"probe"} == {"plain", "of-a-deployment", "ours"}
        hook = cluster.api.get("MutatingWebhookConfiguration", "stowage")["webhooks"][0]
        wanted = {"failurePolicy": "Ignore", "timeoutSeconds": 2, "sideEffects": "None", "reinvocationPolicy": "IfNeeded", "matchPolicy": "Equivalent", "admissionReviewVersions": ["v1"]}
        assert {key: hook[key] for key in wanted} == wanted
        # Pods are created although the webhook does not answer.
        service.close()
        create(pod("unanswered"))

    def test_an_api_server_proves_its_identity_by_its_admission_configuration(self, cluster, folder):
        # As documented: the user of the kubeconfig has the name of the webhook's host and port.
        service, bundle = cluster.serve("identity")
        cluster.plane.certificate(folder / "client", "--name", "kube-apiserver", "--client")
        user = {"client-certificate": f"{folder}/client/tls.crt", "client-key": f"{folder}/client/tls.key"}
        (folder / "webhooks.kubeconfig").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "users": [{"name": service.url.removeprefix("https://"), "user": user}]}))
        admission = {"apiVersion": "apiserver.config.k8s.io/v1", "kind": "WebhookAdmissionConfiguration", "kubeConfigFile": f"{folder}/webhooks.kubeconfig"}
        plugins = [{"name": "MutatingAdmissionWebhook", "configuration": admission}]
        (folder / "admission.json").write_text(json.dumps({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration", "plugins": plugins}))
        names = lambda: [name for path, _, name in service.calls if path == "/mutate"]
        with harness.ControlPlane(arguments=("--component-arg", f"kube-apiserver=--admission-control-config-file={folder}/admission.json")) as plane:
            plane.namespace("identity")
            values = {"tls.mode": "secret", "webhook.url": f"{service.url}/mutate", "webhook.caBundle": bundle, "replicas": 0, "crds.install": False}
            plane.helm("install", "stowage", CHART, "--namespace", "identity", *settings(values))
            wait_until(lambda: plane.api.create(pod("probe"), True) and names(), 30, "the webhook called")
        assert set(names()) == {"kube-apiserver"}

    def test_a_real_kube_scheduler_accepts_the_configuration_and_calls_the_extender_with_its_certificate(self, cluster):
        cluster.namespace("sched")
        service, bundle = cluster.serve("sched")
        values = {"tls.mode": "secret", "webhook.caBundle": bundle, "webhook.enabled": False, "replicas": 0, "crds.install": False, "scheduler.enabled": True, "scheduler.replicas": 0, "scheduler.extender.url": f"{service.url}/v1", "scheduler.extender.httpTimeout": "10s"}
        cluster.install("sched", values)
        account = "sched/stowage-scheduler"
        lease = [("coordination.k8s.io", "leases")]
        assert cluster.rights(account, lease, VERBS, namespace="sched", name="stowage-scheduler") == {lease[0]: {"get", "list", "watch", "create", "update"}}
        reader = cluster.rights(account, [("", "configmaps")], ["get"], namespace="kube-system", name="extension-apiserver-authentication")
        assert reader == {("", "configmaps"): {"get"}}

        cluster.plane.certificate(cluster.dir / "client", "--name", "the-scheduler", "--client")
        cluster.plane.service_account(account, cluster.dir / "scheduler-account.kubeconfig")
        text = cluster.api.get("ConfigMap", "stowage-scheduler", "sched")["data"]["config.yaml"]
        text = text.replace("/etc/stowage/scheduler-tls/", f"{cluster.dir}/client/")
        text = text.replace("clientConnection:\n", f"clientConnection:\n  kubeconfig: {cluster.dir}/scheduler-account.kubeconfig\n")
        cluster.undo.callback(cluster.plane.scheduler)
        cluster.plane.scheduler(text)
        cluster.create(pod("scheduled", schedulerName="stowage-scheduler"))
        cluster.undo.callback(cluster.api.delete, "Pod", "scheduled", "default", grace_seconds=0)
        node_of = lambda name: cluster.api.get("Pod", name, "default")["spec"].get("nodeName")
        assert wait_until(lambda: node_of("scheduled"), 30, "the pod scheduled") in ("one", "two")
        path, body, name = next(call for call in service.calls if call[0] == "/v1/filter")
        assert name == "the-scheduler"
        assert body["Nodes"] is None
        assert set(body["NodeNames"]) == {"one", "two"}
        assert "/v1/prioritize" in {path for path, _, _ in service.calls}
        # Scheduling continues without the extender.
        service.close()
        cluster.create(pod("on-its-own", schedulerName="stowage-scheduler"))
        cluster.undo.callback(cluster.api.delete, "Pod", "on-its-own", "default", grace_seconds=0)
        wait_until(lambda: node_of("on-its-own"), 60, "a pod scheduled without the extender")

