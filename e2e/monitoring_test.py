"""A real Prometheus scrapes the service on EC2's wire protocol while nodes come, go, drift and are interrupted: what Karpenter's users watch has data.

`STOWAGE_DASHBOARDS` names a folder with Grafana dashboards (JSON) and alerting rules (YAML) that are evaluated as well, such as Karpenter's own: then
a table of their expressions is printed.
"""

import collections
import contextlib
import json
import os
import pathlib
import re

import yaml

import aws
import faults
import prometheus
import services
import workloads
from alerts_test import rendered
from chart_test import helm  # noqa: F401 (a fixture)
from ec2_leaving_test import send
from kube import key
from services import small_pool

SPACE, POOL = "watched", "watched"
COMPONENT = "karpenter"  # reports the events
LEGACY = "beta.kubernetes.io/arch"  # a key that an admission rule replaces
REPLICAS = 4
ENOUGH = 0.95  # of the expressions with metrics of Karpenter have data
# promtool on names that are Karpenter's.
COUNT = 'non-histogram and non-summary metrics should not have "_count" suffix'
COMPLAINTS = {
    'karpenter_nodepools_cost_total non-counter metrics should not have "_total" suffix',
    *(f"karpenter_{name}_count {COUNT}" for name in ("cluster_state_node", "scheduler_ignored_pods", "scheduler_unschedulable_pods")),
    *(f"operator_{kind}_status_condition_count {COUNT}" for kind in ("ec2nodeclass", "node", "nodeclaim", "nodepool")),
}
WHILE_PODS_WAIT = f"karpenter_scheduler_pending_pods_by_effective_zone_count {COUNT}"

# What Karpenter's users put on dashboards and into alerts, in our own words.
EXPRESSIONS = {
    "nodes by NodePool": 'count by (nodepool) (count by (node_name, nodepool) (karpenter_nodes_allocatable{managed="true"}))',
    "nodes by zone and type": "count by (zone, instance_type, capacity_type) (karpenter_nodes_allocatable{resource_type='cpu'})",
    "CPU utilization of each node": "sum by (node_name) (karpenter_nodes_total_pod_requests{resource_type='cpu'}) / sum by (node_name) (karpenter_nodes_allocatable{resource_type='cpu'})",
    "memory limits of pods": "sum(karpenter_nodes_total_pod_limits{resource_type='memory'}) + sum(karpenter_nodes_total_daemon_limits{resource_type='memory'})",
    "reserved for the system": "max by (resource_type) (karpenter_nodes_system_overhead)",
    "oldest node": "max(karpenter_nodes_current_lifetime_seconds)",
    "utilization of the cluster": "karpenter_cluster_utilization_percent{resource_type='memory'}",
    "share of a limit": "max by (nodepool, resource_type) (karpenter_nodepools_usage / karpenter_nodepools_limit)",
    "budgets": "min by (nodepool, reason) (karpenter_nodepools_allowed_disruptions - karpenter_nodepools_nodes_consuming_budgets)",
    "bill of an hour": "sum by (nodepool) (karpenter_nodepools_cost_total)",
    "bill of nodes without pods": "sum by (capacity_type, used) (stowage_usd_per_hour)",
    "nodes created": "sum by (nodepool) (increase(karpenter_nodes_created_total[10m]))",
    "nodes terminated": "sum by (nodepool, zone) (karpenter_nodes_terminated_total)",
    "NodeClaims created by reason": "sum by (reason) (increase(karpenter_nodeclaims_created_total[10m]))",
    "NodeClaims disrupted by reason": "sum by (reason, capacity_type) (karpenter_nodeclaims_disrupted_total)",
    "NodeClaims that failed to become nodes": "sum(karpenter_nodeclaims_created_total) - sum(karpenter_nodes_created_total)",
    "drains": "sum by (nodepool) (karpenter_nodes_drained_total)",
    "evictions by answer": "sum by (code) (karpenter_pods_eviction_requests_total)",
    "pods that had to move": "sum by (reason) (karpenter_pods_disruption_initiated_total)",
    "termination of a NodeClaim, p95": "histogram_quantile(0.95, sum by (le) (rate(karpenter_nodeclaims_termination_duration_seconds_bucket[10m])))",
    "termination of a node, p99": "karpenter_nodes_termination_duration_seconds{quantile='0.99'}",
    "termination of an instance, mean": "karpenter_nodeclaims_instance_termination_duration_seconds_sum / karpenter_nodeclaims_instance_termination_duration_seconds_count",
    "lifetime of nodes, median": "histogram_quantile(0.5, sum by (le) (rate(karpenter_nodes_lifetime_duration_seconds_bucket[10m])))",
    "pods by phase": "sum by (phase) (karpenter_pods_state)",
    "pods of a NodePool that are not ready": "count by (nodepool) (karpenter_pods_state{managed='true'}) - count by (nodepool) (karpenter_pods_state{managed='true', ready='true'})",
    "start of pods, p90": "karpenter_pods_startup_duration_seconds{quantile='0.9'}",
    "binding of pods, p99": "histogram_quantile(0.99, sum by (le) (rate(karpenter_pods_bound_duration_seconds_bucket[10m])))",
    "from plan to start, p50": "histogram_quantile(0.5, sum by (le) (rate(karpenter_pods_provisioning_startup_duration_seconds_bucket[10m])))",
    "decision on pods, p99": "histogram_quantile(0.99, sum by (le) (rate(karpenter_pods_scheduling_decision_duration_seconds_bucket[10m])))",
    "pods that waited longest for a node": "max_over_time(max(karpenter_pods_unbound_time_seconds)[10m:1s])",
    "planning, p99": "histogram_quantile(0.99, sum by (le) (rate(karpenter_scheduler_scheduling_duration_seconds_bucket[10m])))",
    "queue": "sum(karpenter_scheduler_queue_depth)",
    "pods without a plan": "sum(karpenter_scheduler_unschedulable_pods_count)",
    "pods by zone while they waited": "max by (zone) (max_over_time(karpenter_scheduler_pending_pods_by_effective_zone_count[10m]))",
    "decisions of disruption": "sum by (decision, reason) (karpenter_voluntary_disruption_decisions_total)",
    "eligible nodes": "sum by (reason) (karpenter_voluntary_disruption_eligible_nodes)",
    "evaluation of disruption, p95": "histogram_quantile(0.95, sum by (le) (rate(karpenter_voluntary_disruption_decision_evaluation_duration_seconds_bucket[10m])))",
    "state is synced": "min(karpenter_cluster_state_synced)",
    "nodes in the state": "max(karpenter_cluster_state_node_count)",
    "AWS calls by method, p99": "histogram_quantile(0.99, sum by (le, method) (rate(karpenter_cloudprovider_duration_seconds_bucket[10m])))",
    "price of an offering": "min by (instance_type, zone) (karpenter_cloudprovider_instance_type_offering_price_estimate)",
    "savings of spot": "avg by (instance_type) (karpenter_cloudprovider_instance_type_offering_price_estimate{capacity_type='on-demand'}) - avg by (instance_type) (karpenter_cloudprovider_instance_type_offering_price_estimate{capacity_type='spot'})",
    "interruptions by type": "sum by (message_type) (karpenter_interruption_received_messages_total)",
    "handling of a message, p95": "histogram_quantile(0.95, sum by (le) (rate(karpenter_interruption_message_queue_duration_seconds_bucket[10m])))",
    "NodePools that are not ready": "sum(operator_nodepool_status_condition_count{type='Ready', status='True'})",
    "node classes that are not ready": "sum by (name, reason) (operator_ec2nodeclass_status_condition_count{type='Ready'})",
    "time to registration, p90": "histogram_quantile(0.9, sum by (le) (rate(operator_nodeclaim_status_condition_transition_seconds_bucket{type='Registered'}[10m])))",
    "nodes by readiness": "count by (status) (operator_node_status_condition_count{type='Ready'})",
    "turns of the disruption loop, p99": "histogram_quantile(0.99, rate(controller_runtime_reconcile_time_seconds_bucket{controller='disruption'}[10m]))",
    "turns by loop": "sum by (controller) (rate(controller_runtime_reconcile_total[10m]))",
    "leader": "max(leader_election_master_status)",
}

OF_OTHERS = ("of kube-state-metrics", "of node-exporter")


# What happens in this run, by reason of Karpenter: kinds of the objects.
REASONS = {
    "Nominated": ["Pod"],
    "FailedScheduling": ["Pod"],
    "Evicted": ["Pod"],
    **{reason: ["NodeClaim"] for reason in ("Launched", "Registered", "Initialized", "Drifted", "Drained", "DisruptionLaunching", "DisruptionWaitingReadiness")},
    **{reason: ["NodeClaim", "Node"] for reason in ("DisruptionTerminating", "Finalized", "SpotInterrupted")},
    "Ready": ["NodePool", "NodeClaim"],
}

# Series of alerts that only trouble creates. It is repeated while it lasts, so that the alert sees the next one.
ONLY_IN_TROUBLE = {
    'stowage_apiserver_requests_total{code="403"}',
    'stowage_nodeclaims_disrupted_total{reason=~"launch_timeout|registration_timeout|initialization_timeout"}',
}


def selectors(expression):
    """The series that an expression reads, whatever a label must not be."""
    found = []
    for name, _, labels in re.findall(r"\b((?:stowage|karpenter|operator)_\w+)(\{([^}]*)\})?", re.sub(r"by \([^)]*\)", "", expression)):
        matchers = [matcher for matcher in re.findall(r'\w+(?:=~|=|!=|!~)"[^"]*"', labels) if "!" not in matcher.split('"')[0]]
        found.append(f"{name}{{{','.join(matchers)}}}" if matchers else name)
    return found


def first_samples(text):
    """The text with at most fifty samples of each name: promtool compares each series of a metric with each other one, and there are thousands of offerings."""
    counts, lines = collections.Counter(), []
    for line in text.splitlines(keepends=True):
        counts[name := line.split("{")[0].split(" ")[0]] += 1
        if name == "#" or counts[name] <= 50:
            lines.append(line)
    return "".join(lines)


class TestPrometheus:
    """A spot NodePool and an on-demand NodePool on moto, and their life."""

    @staticmethod
    @contextlib.contextmanager
    def environment(request):
        plane = request.getfixturevalue("service_plane")
        limits = {"cpu": "100", "memory": "400Gi", "nodes": "50", "pods": "1000", "ephemeral-storage": "2Ti", "stowage.dev/usd-per-hour": "50"}
        pools = [small_pool(POOL, "spot"), small_pool("steady", "on-demand")]
        for pool in pools:
            pool["spec"]["limits"] = limits
            pool["spec"]["disruption"] |= {"consolidateAfter": "2s", "budgets": [{"nodes": "100%"}]}
        with services.ec2(plane, pools, settings={"STOWAGE_REPORTING_COMPONENT": COMPONENT}, placement="extender") as service, prometheus.Prometheus(service.stowage.addresses["metrics"], rendered(request.getfixturevalue("helm"))) as server:
            service.prometheus = server
            yield service

    def test_1_nodes_come_are_interrupted_drift_and_go(self, service):
        def two_of(pool, space):
            return workloads.namespace(space), workloads.workload(space, "server", REPLICAS, 1200, 512, nodeSelector={"team": pool, LEGACY: "amd64"})

        # One zone has no instances, so that launches fail there.
        none = faults.short_of("InsufficientInstanceCapacity", "We have none.", lambda _, zone, *__: zone == aws.ZONES[0])
        with service.proxy.fault(none):
            service.plane.apply(*two_of(POOL, SPACE), *two_of("steady", "steady"))
            for space in (SPACE, "steady"):
                service.wait_bound(space, REPLICAS, 120)
        service.first_pods = {key(pod) for space in (SPACE, "steady") for pod in service.mirror.pods(space)}
        interrupted = sorted(service.claims(POOL), key=key)[0]
        send(service, "aws.ec2", "EC2 Spot Instance Interruption Warning", **{"instance-id": service.instance_of(interrupted), "instance-action": "terminate"})
        service.wait(lambda: key(interrupted) not in service.names(POOL) and service.mirror.all_bound(REPLICAS, SPACE), 150, "the interrupted node replaced")
        service.api.scale("Deployment", "server", "steady", REPLICAS - 2)
        service.wait(lambda: len(service.names("steady")) == REPLICAS - 2, 120, "empty nodes removed")
        old = set(service.names("steady"))
        service.api.patch("NodePool", "steady", {"spec": {"template": {"metadata": {"labels": {"wave": "2"}}}}})
        drifted = lambda: not old & set(service.names("steady")) and service.mirror.all_bound(REPLICAS - 2, "steady") and service.mirror.settled()
        service.wait(drifted, 240, "drifted nodes replaced")
        # No node is large enough: they wait, and are seen to wait.
        impossible = workloads.workload("waits", "impossible", 2, 900_000, 512, nodeSelector={workloads.ZONE: aws.ZONES[0]})
        service.plane.apply(workloads.namespace("waits"), impossible)
        waiting = lambda: service.stowage.metric("karpenter_scheduler_pending_pods_by_effective_zone_count", f'zone="{aws.ZONES[0]}"')
        service.poll(lambda: waiting() == 2, 30, "waiting pods counted", waiting)
        service.poll(lambda: service.prometheus.query("karpenter_scheduler_pending_pods_by_effective_zone_count > 1"), 30, "and scraped", waiting)
        service.api.delete("Deployment", "impossible", "waits")
        service.assert_nothing_leaked()

    def test_2_what_users_of_karpenter_watch_has_data(self, service):
        rows = prometheus.rows_of(service.prometheus, EXPRESSIONS.items())
        print(f"\n{prometheus.table(rows)}", flush=True)
        assert [title for title, _, count, _ in rows if not count] == []

    def test_2b_no_panel_of_the_dashboard_is_empty(self, service):
        rows = prometheus.rows_of(service.prometheus, prometheus.expressions(service.stowage.dashboard()))
        print(f"\n{prometheus.table(rows)}", flush=True)
        assert len(rows) > 50
        assert [title for title, _, count, _ in rows if not count] == []

    def test_3_so_have_the_dashboards_of_others(self, service, tmp_path):
        own = tmp_path / "own.json"
        own.write_text(json.dumps({"panels": [{"title": "Nodes", "targets": [{"expr": 'count(karpenter_nodes_allocatable{nodepool=~"$nodepool"})'}]}]}))
        folder = os.environ.get("STOWAGE_DASHBOARDS")
        ours = []
        for file in [own, *(sorted(pathlib.Path(folder).iterdir()) if folder else [])]:
            rows = prometheus.rows_of(service.prometheus, prometheus.expressions(file))
            print(f"\n{file.name}: {sum(1 for row in rows if row[2])} of {len(rows)} expressions have data\n{prometheus.table(rows)}", flush=True)
            assert rows, file
            ours += [row for row in rows if row[3] not in OF_OTHERS]
        found = sum(1 for row in ours if row[2])
        print(f"\n{found} of {len(ours)} expressions with metrics of Karpenter have data", flush=True)
        assert found >= ENOUGH * len(ours)

    def test_4_the_text_is_as_prometheus_wants_it(self, service):
        text = service.stowage.probe("/metrics", "metrics")[1]
        status, output = service.prometheus.promtool("check", "metrics", text=first_samples(text))
        assert (set(output.splitlines()) - {"", WHILE_PODS_WAIT}) ^ COMPLAINTS == set() and status == 3

    def test_5_every_metric_of_the_reference_is_scraped_with_its_type(self, service):
        """Of those of Karpenter's name that a run like this one has."""
        page = (pathlib.Path(__file__).parent.parent / "docs" / "reference" / "metrics.md").read_text()
        assert "karpenter_nodes_allocatable" in page
        kinds = dict(line.split(" ")[2:4] for line in service.stowage.probe("/metrics", "metrics")[1].splitlines() if line.startswith("# TYPE "))
        wrong = []
        for line in page.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) >= 2 and cells[0].startswith("`"):
                for name in cells[0].replace("`", "").split(", "):
                    if name in kinds and kinds[name] != cells[1]:
                        wrong.append((name, kinds[name], cells[1]))
        assert wrong == [] and len(kinds) > 100, (wrong, len(kinds))

    def test_6_events_have_the_reasons_of_karpenter_on_its_objects(self, service):
        events = service.plane.events(reporter=COMPONENT)
        seen = {(event["regarding"]["kind"], event["reason"]) for event in events}
        print("\n" + "\n".join(sorted(f"{kind} {reason}" for kind, reason in seen)), flush=True)
        assert {(kind, reason) for reason, kinds in REASONS.items() for kind in kinds} - seen == set()
        assert not service.plane.events(), "all name the chosen component"
        nominated = {f"{event['regarding']['namespace']}/{event['regarding']['name']}": event["note"] for event in events if event["reason"] == "Nominated"}
        claims = {event["regarding"]["name"] for event in events if event["regarding"]["kind"] == "NodeClaim"}
        named = {pod: re.match(r"planned on nodeclaim/([a-z0-9-]+)(, node/[a-z0-9.-]+)?: \S+ in \S+, (spot|on-demand)$", note) for pod, note in nominated.items()}
        assert service.first_pods <= set(named) and all(found and found[1] in claims for found in named.values()), nominated

    def test_7_no_alert_fires_and_each_has_the_series_that_it_is_about(self, service):
        """Those of a counter are there before it counts anything, since an alert on an increase would miss the first one."""
        rules = service.prometheus.alerts()
        assert [rule["name"] for rule in rules if rule["health"] != "ok"] == [] and len(rules) > 30
        print("\n" + "\n".join(f"{rule['state']:>9}  {rule['name']}" for rule in rules), flush=True)
        assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
        # On a busy machine a scrape may take longer than its second.
        has_data = lambda selector: service.prometheus.query(f"last_over_time({selector}[1m])")
        without = [(rule["name"], selector) for rule in rules for selector in selectors(rule["query"]) if not has_data(selector)]
        assert {selector for _, selector in without} - ONLY_IN_TROUBLE == set()

    def test_8_prices_are_on_the_objects_and_savings_are_counted(self, service):
        annotated = lambda item: float(item["metadata"].get("annotations", {}).get("stowage.dev/usd-per-hour", "nan"))
        def prices():
            claims = {claim.get("status", {}).get("nodeName"): annotated(claim) for pool in (POOL, "steady") for claim in service.claims(pool)}
            nodes = {key(node): annotated(node) for node in service.mirror.nodes()}
            return claims, nodes, service.stowage.metric("stowage_usd_per_hour")

        def agree():
            claims, nodes, bill = prices()
            return claims == nodes and len(nodes) > 1 and all(usd > 0 for usd in nodes.values()) and abs(bill - sum(nodes.values())) < 1e-6

        service.poll(agree, 60, "prices on NodeClaims, on Nodes and in the bill agree", prices)
        claims, nodes, _ = prices()
        assert service.stowage.metric("stowage_saved_usd_per_hour_total", 'nodepool="steady"') > 0
        # What another launched has no price.
        name = sorted(nodes)[0]
        service.api.annotate("Node", name, {"stowage.dev/usd-per-hour": None})
        price = lambda: annotated(service.api.get("Node", name))
        service.poll(lambda: price() == claims[name], 30, "the price of a node written again", price)
