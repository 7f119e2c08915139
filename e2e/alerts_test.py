"""The chart's alerts in Prometheus' own rule test engine: each fires when it should, alone, and is silent in a healthy cluster and just below its threshold."""

import json
import pathlib
import re
import subprocess
import tempfile
import xml.etree.ElementTree

import pytest
import yaml

import harness
from chart_test import CHART, helm, settings  # noqa: F401 (a fixture)

OPERATIONS = pathlib.Path(__file__).parent.parent / "docs" / "operations.md"
LENGTH = 400  # minutes of each series
SHARED = "SHARED"  # in names: `karpenter` or `stowage`, as the chart's value has it


def constant(value):
    return f"{value}x{LENGTH}"


def growing(step, start=0):
    """By `step` each minute."""
    return f"{start}{step:+}x{LENGTH}"


def jump(minute, value):
    """From 0 to a value, which stays."""
    return f"0x{minute - 1} {value}x{LENGTH}"


def spell(begin, minutes, value, usual=0):
    """A value for some minutes."""
    return f"{usual}x{begin - 1} {value}x{minutes - 1} {usual}x{LENGTH}"


def buckets(name, labels, steps):
    """The buckets of a histogram that grow by these steps each minute, with their upper bounds."""
    inner = ", ".join([*labels, ""]) if labels else ""
    return {f'{name}_bucket{{{inner}le="{bound}"}}': growing(step) for bound, step in steps.items()}


def extender(slow):
    """A thousand requests a minute, so many of which take up to a second."""
    return buckets("stowage_extender_seconds", ['verb="filter"'], {"0.05": 1000 - slow, "0.5": 1000 - slow, "1.0": 1000, "+Inf": 1000})


def webhook(slow):
    return buckets("stowage_webhook_seconds", [], {"0.05": 1000 - slow, "0.5": 1000 - slow, "1.0": 1000, "+Inf": 1000})


def messages(late):
    """Ten messages a minute, so many of which come between one and two minutes after their event."""
    return buckets("SHARED_interruption_message_queue_duration_seconds", [], {"1.0": 10 - late, "60.0": 10 - late, "120.0": 10, "+Inf": 10})


CREATED = 'SHARED_nodeclaims_created_total{reason="provisioned", nodepool="a", min_values_relaxed="false"}'
NODES = 'SHARED_nodes_created_total{nodepool="a", zone="z"}'
DISRUPTED = 'SHARED_nodeclaims_disrupted_total{reason="%s", nodepool="a", capacity_type="spot", consolidation_policy="", termination_mode="graceful"}'
ERRORS = 'SHARED_cloudprovider_errors_total{controller="nodeclaim.lifecycle", method="%s", provider="aws", error="%s"}'
ENDED = 'stowage_holds_ended_total{result="%s"}'
READY_POOL = 'operator_nodepool_status_condition_count{name="a", type="Ready", status="%s", reason="%s"}'
READY_CLASS = 'operator_ec2nodeclass_status_condition_count{name="c", type="Ready", status="%s", reason="%s"}'
READY_NODE = 'operator_node_status_condition_current_status_seconds{name="n", type="Ready", status="%s", karpenter_sh_nodepool="%s"}'
FOREIGN_NODE = READY_NODE.replace(', karpenter_sh_nodepool="%s"', "")

# A busy and healthy cluster: every metric that an alert is about is there.
HEALTHY = {
    'stowage_ready{pod="s-0"}': constant(1),
    'stowage_ready{pod="s-1"}': constant(1),
    'stowage_leader{pod="s-0"}': constant(1),
    'stowage_leader{pod="s-1"}': constant(0),
    'stowage_loop_turn_seconds{pod="s-0", loop="disruption"}': constant(20),
    'stowage_loop_panics_total{loop="disruption"}': constant(0),
    "stowage_lifecycle_step_panics_total": constant(0),
    "stowage_plans_failed_total": constant(0),
    "stowage_handler_panics_total": constant(0),
    'stowage_webhook_requests_total{result="patched"}': growing(60),
    'stowage_webhook_requests_total{result="doubtful"}': constant(0),
    "stowage_cloud_starts_failed_total": constant(0),
    'stowage_apiserver_requests_total{verb="patch", resource="nodes", code="200"}': growing(30),
    'stowage_apiserver_requests_total{verb="create", resource="events", code="403"}': f"0x50 1x50 2x{LENGTH}",
    'stowage_watch_age_seconds{pod="s-0", kind="pods"}': constant(15),
    'stowage_extender_stale_total{pod="s-0"}': constant(0),
    'stowage_extender_requests_total{verb="filter", code="200"}': growing(1000),
    'stowage_extender_requests_total{verb="filter", code="403"}': constant(0),
    **extender(5),
    **webhook(5),
    'stowage_cert_expiry_seconds{certificate="serving"}': growing(-60, 7_000_000),
    'stowage_cert_reloads_total{pod="s-0", result="ok"}': growing(1),
    'stowage_cert_reloads_total{pod="s-0", result="error"}': constant(0),
    **{f'stowage_paused{{scope="{scope}"}}': constant(0) for scope in ("provisioning", "disruption", "report")},
    "stowage_pods_pending_oldest_seconds": constant(120),
    'stowage_pods_quarantined{cause="planner_panic"}': constant(0),
    'stowage_supply_quarantined{kind="node"}': constant(0),
    'stowage_nodeclaims_rejected_total{nodepool="a"}': constant(0),
    'stowage_purchases_in_vain_total{nodepool="a"}': jump(100, 1),
    ERRORS % ("Create", ""): jump(100, 3),
    ERRORS % ("Create", "InsufficientCapacityError"): f"0x60 10x60 20x{LENGTH}",
    ERRORS % ("Delete", ""): jump(90, 3),
    ERRORS % ("Get", "NodeClaimNotFoundError"): growing(2),
    CREATED: growing(1),
    NODES: growing(1),
    DISRUPTED % "underutilized": f"0x30 10x60 40x60 60x{LENGTH}",
    DISRUPTED % "registration_timeout": jump(120, 2),
    'karpenter_nodepools_usage{nodepool="a", resource_type="cpu"}': constant(600),
    'karpenter_nodepools_limit{nodepool="a", resource_type="cpu"}': constant(1000),
    'karpenter_nodepools_usage{nodepool="off", resource_type="cpu"}': constant(4),
    'karpenter_nodepools_limit{nodepool="off", resource_type="cpu"}': constant(0),
    READY_POOL % ("True", "Ready"): constant(1),
    READY_CLASS % ("True", "Ready"): constant(1),
    'stowage_rate_capped_total{action="purchase"}': constant(0),
    ENDED % "planned": growing(10),
    ENDED % "elsewhere": growing(1),
    ENDED % "stray": constant(0),
    ENDED % "released": growing(10),
    READY_NODE % ("True", "a"): growing(60),
    FOREIGN_NODE % "Unknown": growing(60),
    "stowage_nodes_leaving_oldest_seconds": constant(600),
    "stowage_drains_resumed_total": jump(200, 2),
    'stowage_interruption_reads_total{result="ok"}': growing(3),
    'stowage_interruption_reads_total{result="error"}': jump(50, 2),
    **messages(0),
    'stowage_interruption_refused_messages_total{message_type="spot_interrupted", reason="running"}': constant(0),
}
GONE = None  # instead of a series: it is not there

# By alert: what changes, after how many minutes it fires, its labels, and other alerts that fire with it.
FIRES = [
    ("NotReady", {'stowage_ready{pod="s-0"}': constant(0), 'stowage_ready{pod="s-1"}': constant(0)}, 6, {}),
    ("NotReady", {'stowage_ready{pod="s-0"}': GONE, 'stowage_ready{pod="s-1"}': GONE}, 6, {}),
    ("NoLeader", {'stowage_leader{pod="s-0"}': constant(0)}, 6, {}),
    ("LoopStuck", {'stowage_loop_turn_seconds{pod="s-0", loop="disruption"}': jump(10, 150)}, 12, {"pod": "s-0", "loop": "disruption"}),
    ("LoopPanics", {'stowage_loop_panics_total{loop="disruption"}': jump(10, 1)}, 12, {"loop": "disruption"}),
    ("LoopPanics", {"stowage_lifecycle_step_panics_total": jump(10, 1)}, 12, {}),
    ("PlansFail", {"stowage_plans_failed_total": jump(10, 1)}, 12, {}),
    ("RequestsFail", {"stowage_handler_panics_total": jump(10, 1)}, 12, {}),
    ("RequestsFail", {'stowage_webhook_requests_total{result="doubtful"}': jump(10, 1)}, 12, {}),
    ("CloudStartsFail", {"stowage_cloud_starts_failed_total": growing(1)}, 10, {}),
    ("RequestsForbidden", {'stowage_apiserver_requests_total{verb="patch", resource="nodes", code="403"}': growing(1)}, 30, {"verb": "patch", "resource": "nodes"}),
    ("WatchStale", {'stowage_watch_age_seconds{pod="s-0", kind="pods"}': growing(60)}, 10, {"pod": "s-0", "kind": "pods"}),
    ("ViewStale", {'stowage_extender_stale_total{pod="s-0"}': growing(2)}, 10, {"pod": "s-0"}),
    ("ExtenderRefusesScheduler", {'stowage_extender_requests_total{verb="filter", code="403"}': jump(10, 1)}, 12, {}),
    ("ExtenderSlow", extender(20), 20, {"verb": "filter"}),
    ("WebhookSlow", webhook(20), 20, {}),
    ("CertificateExpires", {'stowage_cert_expiry_seconds{certificate="serving"}': growing(-60, 604_000)}, 20, {"certificate": "serving"}),
    ("CertificateExpired", {'stowage_cert_expiry_seconds{certificate="client_ca"}': growing(-60, 1_200)}, 21, {"certificate": "client_ca"}, [("CertificateExpires", {"certificate": "client_ca"})]),
    ("CertificateReloadFails", {'stowage_cert_reloads_total{pod="s-0", result="error"}': jump(10, 1)}, 12, {"pod": "s-0"}),
    ("Paused", {'stowage_paused{scope="provisioning"}': constant(1)}, 245, {"scope": "provisioning"}),
    ("PodsPending", {"stowage_pods_pending_oldest_seconds": growing(60)}, 17, {}),
    ("PodsQuarantined", {'stowage_pods_quarantined{cause="planner_panic"}': f"0x9 2x4 0x4 2x{LENGTH}"}, 25, {"cause": "planner_panic"}),
    ("SupplyQuarantined", {'stowage_supply_quarantined{kind="node"}': jump(10, 1)}, 10, {"kind": "node"}),
    ("NodeClaimsRejected", {'stowage_nodeclaims_rejected_total{nodepool="a"}': jump(10, 1)}, 12, {"nodepool": "a"}),
    ("PurchasesInVain", {'stowage_purchases_in_vain_total{nodepool="a"}': jump(10, 7)}, 20, {"nodepool": "a"}),
    ("LaunchesFail", {ERRORS % ("Create", ""): growing(1)}, 30, {"error": ""}),
    ("InsufficientCapacity", {ERRORS % ("Create", "InsufficientCapacityError"): growing(1)}, 60, {}),
    ("CloudCallsFail", {ERRORS % ("Delete", ""): growing(1)}, 30, {"method": "Delete"}),
    ("NodesDoNotRegister", {DISRUPTED % "registration_timeout": growing(1)}, 10, {}),
    ("NodePoolNearLimit", {'karpenter_nodepools_usage{nodepool="a", resource_type="cpu"}': constant(910)}, 16, {"nodepool": "a", "resource_type": "cpu"}),
    ("NodePoolNotReady", {READY_POOL % ("True", "Ready"): GONE, READY_POOL % ("False", "ValidationFailed"): constant(1)}, 11, {"name": "a", "reason": "ValidationFailed"}),
    ("NodeClassNotReady", {READY_CLASS % ("True", "Ready"): GONE, READY_CLASS % ("Unknown", "Awaiting"): constant(1)}, 11, {"name": "c", "reason": "Awaiting"}),
    ("TooManyNodesPurchased", {CREATED: growing(4), NODES: growing(4)}, 120, {}),
    ("PurchasesWithoutNodes", {NODES: f"0x{LENGTH}"}, 120, {}),
    ("PurchasesDiscarded", {DISRUPTED % "empty": growing(1)}, 120, {}),
    ("RateCapped", {'stowage_rate_capped_total{action="purchase"}': jump(10, 40)}, 12, {"action": "purchase"}),
    ("PlanNotFollowed", {ENDED % "stray": growing(2)}, 120, {}),
    ("NodesNotReady", {READY_NODE % ("True", "a"): GONE, READY_NODE % ("Unknown", "a"): growing(60)}, 17, {"karpenter_sh_nodepool": "a"}),
    ("DrainHangs", {"stowage_nodes_leaving_oldest_seconds": growing(60)}, 62, {}),
    ("DrainsResumed", {"stowage_drains_resumed_total": jump(10, 7)}, 20, {}),
    ("InterruptionQueueUnreadable", {'stowage_interruption_reads_total{result="ok"}': constant(5), 'stowage_interruption_reads_total{result="error"}': growing(6)}, 20, {}),
    ("InterruptionQueueUnreadable", {'stowage_interruption_reads_total{result="ok"}': constant(0)}, 20, {}),
    ("InterruptionsLate", messages(2), 30, {}),
    ("InterruptionMessagesRefused", {'stowage_interruption_refused_messages_total{message_type="spot_interrupted", reason="running"}': jump(10, 1)}, 12, {"message_type": "spot_interrupted", "reason": "running"}),
]

# By alert: what changes, and a minute at which it does not fire.
SILENT = [
    ("NotReady", {'stowage_ready{pod="s-0"}': constant(0)}, 30),
    ("NotReady", {'stowage_ready{pod="s-0"}': constant(0), 'stowage_ready{pod="s-1"}': spell(10, 4, 0, 1)}, 13),
    ("NoLeader", {'stowage_leader{pod="s-0"}': spell(10, 4, 0, 1)}, 13),
    ("LoopStuck", {'stowage_loop_turn_seconds{pod="s-0", loop="disruption"}': constant(119)}, 20),
    ("LoopStuck", {'stowage_loop_turn_seconds{pod="s-0", loop="disruption"}': jump(10, 121)}, 10),
    ("LoopPanics", {'stowage_loop_panics_total{loop="disruption"}': constant(4)}, 20),
    ("PlansFail", {"stowage_plans_failed_total": jump(10, 1)}, 30),
    ("RequestsFail", {'stowage_webhook_requests_total{result="doubtful"}': constant(2)}, 20),
    ("CloudStartsFail", {"stowage_cloud_starts_failed_total": jump(10, 2)}, 12),
    ("RequestsForbidden", {'stowage_apiserver_requests_total{verb="patch", resource="nodes", code="403"}': jump(10, 5)}, 22),
    ("RequestsForbidden", {'stowage_apiserver_requests_total{verb="patch", resource="nodes", code="403"}': jump(10, 9)}, 18),
    ("WatchStale", {'stowage_watch_age_seconds{pod="s-0", kind="pods"}': constant(60)}, 20),
    ("WatchStale", {'stowage_watch_age_seconds{pod="s-0", kind="pods"}': spell(10, 4, 90, 10)}, 13),
    ("ViewStale", {'stowage_extender_stale_total{pod="s-0"}': jump(10, 3)}, 12),
    ("ExtenderRefusesScheduler", {'stowage_extender_requests_total{verb="filter", code="401"}': growing(5)}, 20),
    ("ExtenderSlow", extender(9), 30),
    ("ExtenderSlow", extender(20), 9),
    ("WebhookSlow", webhook(9), 30),
    ("WebhookSlow", webhook(20), 9),
    ("CertificateExpires", {'stowage_cert_expiry_seconds{certificate="serving"}': constant(604_801)}, 60),
    ("CertificateExpires", {'stowage_cert_expiry_seconds{certificate="serving"}': constant(604_000)}, 14),
    ("CertificateExpired", {'stowage_cert_expiry_seconds{certificate="serving"}': constant(1)}, 60),
    ("CertificateReloadFails", {'stowage_cert_reloads_total{pod="s-0", result="error"}': constant(1)}, 20),
    ("Paused", {'stowage_paused{scope="provisioning"}': constant(1)}, 239),
    ("PodsPending", {"stowage_pods_pending_oldest_seconds": constant(900)}, 60),
    ("PodsQuarantined", {'stowage_pods_quarantined{cause="planner_panic"}': jump(10, 2)}, 19),
    ("SupplyQuarantined", {'stowage_supply_quarantined{kind="node"}': spell(10, 5, 1)}, 15),
    ("NodeClaimsRejected", {'stowage_nodeclaims_rejected_total{nodepool="a"}': jump(10, 3)}, 30),
    ("PurchasesInVain", {'stowage_purchases_in_vain_total{nodepool="a"}': jump(10, 4)}, 20),
    ("LaunchesFail", {ERRORS % ("Create", "InsufficientCapacityError"): growing(1)}, 30),
    ("LaunchesFail", {ERRORS % ("Create", ""): jump(10, 9)}, 18),
    ("InsufficientCapacity", {ERRORS % ("Create", "InsufficientCapacityError"): jump(10, 18)}, 35),
    ("InsufficientCapacity", {ERRORS % ("Create", "InsufficientCapacityError"): jump(10, 30)}, 24),
    ("CloudCallsFail", {ERRORS % ("Delete", ""): jump(10, 4)}, 22),
    ("CloudCallsFail", {ERRORS % ("Delete", ""): jump(10, 9)}, 14),
    ("NodesDoNotRegister", {DISRUPTED % "registration_timeout": jump(10, 2)}, 20),
    ("NodePoolNearLimit", {'karpenter_nodepools_usage{nodepool="a", resource_type="cpu"}': constant(900)}, 30),
    ("NodePoolNearLimit", {'karpenter_nodepools_usage{nodepool="a", resource_type="cpu"}': spell(10, 14, 990, 500)}, 23),
    ("NodePoolNotReady", {READY_POOL % ("False", "ValidationFailed"): f"_x9 1x8 _x{LENGTH}"}, 17),
    ("NodeClassNotReady", {READY_CLASS % ("False", "Unready"): f"_x9 1x8 _x{LENGTH}"}, 17),
    ("TooManyNodesPurchased", {CREATED: growing(3), NODES: growing(3)}, 120),
    ("PurchasesWithoutNodes", {NODES: f"0x40 10x20 20x20 30x20 40x{LENGTH}"}, 100),
    ("PurchasesWithoutNodes", {NODES: f"0x{LENGTH}"}, 35),
    ("PurchasesDiscarded", {DISRUPTED % "empty": f"0x30 10x60 20x60 30x{LENGTH}"}, 120),
    ("PurchasesDiscarded", {DISRUPTED % "empty": growing(1)}, 49),
    ("RateCapped", {'stowage_rate_capped_total{action="purchase"}': constant(40)}, 30),
    ("PlanNotFollowed", {ENDED % "elsewhere": growing(2)}, 120),
    ("PlanNotFollowed", {ENDED % "elsewhere": growing(10)}, 30),
    ("PlanNotFollowed", {ENDED % "planned": constant(0), ENDED % "elsewhere": f"0x30 9x60 18x{LENGTH}"}, 120),
    ("NodesNotReady", {READY_NODE % ("False", "a"): constant(899)}, 60),
    ("DrainHangs", {"stowage_nodes_leaving_oldest_seconds": constant(3600)}, 60),
    ("DrainsResumed", {"stowage_drains_resumed_total": jump(10, 4)}, 20),
    ("InterruptionQueueUnreadable", {'stowage_interruption_reads_total{result="ok"}': GONE, 'stowage_interruption_reads_total{result="error"}': GONE}, 60),
    ("InterruptionQueueUnreadable", {'stowage_interruption_reads_total{result="ok"}': f"0x9 3x9 6x{LENGTH}"}, 20),
    ("InterruptionQueueUnreadable", {'stowage_interruption_reads_total{result="ok"}': f"0+3x20 60x{LENGTH}"}, 33),
    ("InterruptionsLate", messages(0), 30),
    ("InterruptionsLate", messages(2), 5),
    ("InterruptionMessagesRefused", {'stowage_interruption_refused_messages_total{message_type="spot_interrupted", reason="running"}': constant(3)}, 30),
]


def alerts_of(rules):
    return [rule for group in rules["groups"] for rule in group["rules"]]


def firing(alert, severity, labels):
    named = {"alertname": f"Stowage{alert}", "alertstate": "firing", "severity": severity, **{name: value for name, value in labels.items() if value}}
    return {"labels": f"ALERTS{{{', '.join(f'{name}={json.dumps(value)}' for name, value in named.items())}}}", "value": 1}


def cases(rules):
    """The tests of promtool: the healthy cluster at several times, what fires, what is silent."""
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in alerts_of(rules)}

    def case(name, changes, minute, expression, samples):
        series = {**HEALTHY, **changes}
        written = [{"series": key, "values": values} for key, values in series.items() if values is not GONE]
        return {"name": name, "interval": "1m", "input_series": written, "promql_expr_test": [{"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples}]}

    anything = 'ALERTS{alertstate="firing"}'
    tests = [case(f"healthy at {minute}", {}, minute, anything, []) for minute in (0, 1, 7, 31, 62, 101, 125, 210, 305, LENGTH - 1)]
    for number, (alert, changes, minute, labels, *others) in enumerate(FIRES):
        both = [(alert, labels), *(others[0] if others else [])]
        samples = [firing(name, severity[f"Stowage{name}"], labels) for name, labels in both]
        tests.append(case(f"fires {alert} {number}", changes, minute, anything, samples))
    for number, (alert, changes, minute) in enumerate(SILENT):
        tests.append(case(f"silent {alert} {number}", changes, minute, f'ALERTS{{alertstate="firing", alertname="Stowage{alert}"}}', []))
    return tests


def failures(rules, shared, kind=""):
    """The names of the tests that fail with these rules, with what promtool says of them; of tests of one kind, if one is named."""
    tested = [case for case in cases(rules) if case["name"].startswith(kind)]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        written = yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tested})
        (folder / "tests.yaml").write_text(written.replace(f"{SHARED}_", f"{shared}_"))
        command = [harness.tools("prometheus") / "promtool", "test", "rules", f"--junit={folder / 'result.xml'}", folder / "tests.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode in (0, 1), done.stderr
        tests = list(xml.etree.ElementTree.parse(folder / "result.xml").iter("testcase"))
        assert len(tests) == len(tested) > 0, done.stdout + done.stderr
        failed = {test.get("name"): [problem.text or problem.get("message") for problem in test if problem.tag in ("failure", "error")] for test in tests}
        failed = {name: problems for name, problems in failed.items() if problems}
        assert bool(failed) == bool(done.returncode), done.stdout + done.stderr
        return failed


def alerts_in(names, kind):
    return {name.split(" ")[1] for name in names if name.startswith(f"{kind} ")}


def rendered(helm, names="both"):  # noqa: F811
    """The rules of the chart."""
    values = {"prometheusRule.enabled": True, "controller.metrics.names": names}
    return yaml.safe_load(helm("template", "stowage", CHART, *settings(values), "--show-only", "templates/prometheusrule.yaml").stdout)["spec"]


@pytest.fixture
def rules(request, helm):  # noqa: F811
    return rendered(helm, getattr(request, "param", "both"))


class TestAlerts:
    @pytest.mark.parametrize("rules", ("stowage", "karpenter"), indirect=True)
    def test_alerts_fire_when_they_should_and_only_then(self, rules, request):
        assert failures(rules, request.node.callspec.params["rules"]) == {}

    def test_alerts_are_about_the_names_of_this_project_where_metrics_have_both(self, helm):  # noqa: F811
        assert rendered(helm, "both") == rendered(helm, "stowage") != rendered(helm, "karpenter")

    def test_each_alert_has_tests_with_its_metrics(self, rules):
        names = {rule["alert"].removeprefix("Stowage") for rule in alerts_of(rules)}
        assert {case[0] for case in FIRES} == {case[0] for case in SILENT} == names
        metrics = {re.match(r"\w+", series)[0] for series in HEALTHY}
        used = {name for rule in alerts_of(rules) for name in re.findall(r"\b(?:stowage|karpenter|operator)_\w+", rule["expr"])}
        assert used - {label for label in used if label == "karpenter_sh_nodepool"} - {name.replace("SHARED", "stowage") for name in metrics} == set()

    def test_an_alert_that_never_or_always_fires_fails_its_tests(self, rules):
        names = {rule["alert"].removeprefix("Stowage") for rule in alerts_of(rules)}
        never, always, hasty = (json.loads(json.dumps(rules)) for _ in range(3))
        for rule in alerts_of(never):
            rule["expr"] = "vector(0) > 1"
        for rule in alerts_of(always):
            rule["expr"] = "vector(1)"
            rule.pop("for", None)
        waits = {rule["alert"].removeprefix("Stowage") for rule in alerts_of(hasty) if rule.pop("for", None)}
        assert alerts_in(failures(never, "stowage", "fires"), "fires") == names
        assert alerts_in(failures(always, "stowage", "silent"), "silent") == names
        assert alerts_in(failures(hasty, "stowage", "silent"), "silent") == waits

    def test_each_alert_has_a_runbook(self, rules):
        page = OPERATIONS.read_text()
        named = re.findall(r"(?m)^### (Stowage\w+)$", page)
        assert sorted(named) == sorted(rule["alert"] for rule in alerts_of(rules)) and len(named) > 30
        for rule in alerts_of(rules):
            assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
            assert set(rule["annotations"]) == {"summary", "description", "runbook_url"} and rule["labels"]["severity"] in ("critical", "warning")

    def test_promtool_accepts_the_rules(self, rules):
        done = subprocess.run([harness.tools("prometheus") / "promtool", "check", "rules", "--lint=all", "--lint-fatal"], input=yaml.safe_dump(rules), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_the_page_of_runbooks_is_chosen(self, helm):  # noqa: F811
        values = {"prometheusRule.enabled": True, "prometheusRule.runbookUrl": "https://example.com/wiki"}
        text = helm("template", "stowage", CHART, *settings(values), "--show-only", "templates/prometheusrule.yaml").stdout
        assert "runbook_url: https://example.com/wiki#stowagepaused\n" in text
