#!/usr/bin/env python3
"""`make bench-api`: the calls of Stowage to a real API server, per minute, in a cluster of kwok's nodes and pods.

Deployments with many small pods arrive; Stowage buys their nodes from simulated EC2, and kube-scheduler binds them (`nominate` mode). Then the API
server's audit log is counted for a minute in which nothing happens, and for a minute in which pods are deleted and recreated at a steady rate.
Prints two tables in Markdown: requests by verb and resource, and the CPU seconds and resident memory of the service. The API server, etcd and kwok
need most of the machine: run it on an otherwise idle one. --nodes 50 finishes in two minutes.
"""

import argparse
import collections
import json
import os
import pathlib
import sys
import tempfile
import threading
import time

import kubernetes.client

import guard
import harness
import observe
import workloads
from kube import is_true
from processes import usage
from waiting import wait_until

SPACE = "bench"
PODS_PER_NODE = 10
DEPLOYMENTS = 20
# Ten pods of 370m fill a node.
FOUR_CORES = (workloads.requirement("karpenter.k8s.aws/instance-cpu", "4"),)
SETTLE = 30.0  # seconds without a pending pod before the first minute
POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  userGroups: ["system:serviceaccounts"]
- level: None
"""


class Calls:
    """Requests of one user in the audit log since the last call of `since`."""

    def __init__(self, log, user):
        self.log, self.user, self.offset = log, user, 0

    def since(self):
        counted = collections.Counter()
        with open(self.log, encoding="utf-8") as file:
            file.seek(self.offset)
            for line in iter(file.readline, ""):
                if not line.endswith("\n"):
                    break
                self.offset = file.tell()
                event = json.loads(line)
                name = event.get("user", {}).get("username", "")
                if name.startswith("system:serviceaccount:") and name.endswith(f":{self.user}"):
                    about = event.get("objectRef", {})
                    resource = "/".join(filter(None, [about.get("resource", event["requestURI"]), about.get("subresource")]))
                    counted[(event["verb"], resource)] += 1
        return counted


def churn(plane, rate, seconds):
    """Deletes `rate` pods a second; their ReplicaSets recreate them."""
    api = kubernetes.client.CoreV1Api(plane.api.client)
    end, begin, deleted = time.monotonic() + seconds, time.monotonic(), 0
    names = [pod["metadata"]["name"] for pod in plane.api.list("Pod", SPACE)]
    for name in names:
        if time.monotonic() >= end:
            break
        api.delete_namespaced_pod(name, SPACE, grace_period_seconds=0)
        deleted += 1
        time.sleep(max(0.0, begin + deleted / rate - time.monotonic()))
    return deleted


def minute(calls, stowage, during=None):
    calls.since()
    cpu, _ = usage(stowage.process.pid)
    begin = time.monotonic()
    worker = threading.Thread(target=during) if during else None
    if worker:
        worker.start()
    time.sleep(60)
    if worker:
        worker.join()
    counted, elapsed = calls.since(), time.monotonic() - begin
    after, resident = usage(stowage.process.pid)
    return {key: number * 60 / elapsed for key, number in counted.items()}, (after - cpu) * 60 / elapsed, resident


def report(nodes, pods, rate, idle, busy):
    print(f"\n| requests per minute, {nodes} nodes, {pods} pods | idle | {rate} pods/s deleted and recreated |\n|---|---|---|")
    for key in sorted(idle[0].keys() | busy[0].keys()):
        print(f"| {' '.join(key)} | {idle[0].get(key, 0):.0f} | {busy[0].get(key, 0):.0f} |")
    print(f"| **all** | {sum(idle[0].values()):.0f} | {sum(busy[0].values()):.0f} |")
    print(f"| CPU seconds per minute | {idle[1]:.2f} | {busy[1]:.2f} |")
    print(f"| resident MiB | {idle[2]:.0f} | {busy[2]:.0f} |", flush=True)


def run(nodes, rate, timeout):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="audit-"))
    policy, log = folder / "policy.yaml", folder / "audit.log"
    policy.write_text(POLICY)
    audit = [f"kube-apiserver=--audit-policy-file={policy}", f"kube-apiserver=--audit-log-path={log}", "kube-apiserver=--audit-log-mode=blocking"]
    arguments = [part for one in audit for part in ("--component-arg", one)]
    with harness.ControlPlane(arguments=arguments) as plane, harness.Stowage(plane, "nominate") as stowage, observe.Mirror(plane.api) as mirror:
        plane.apply(workloads.node_class(), workloads.node_pool(consolidate_after="Never", capacity_types=("on-demand",), extra=FOUR_CORES))
        wait_until(lambda: is_true(plane.api.get("NodePool", "default"), "Ready"), 60, "NodePool default ready")
        pods = nodes * PODS_PER_NODE
        plane.apply(workloads.namespace(SPACE))
        per_deployment = pods // DEPLOYMENTS
        made = [workloads.workload(SPACE, f"app-{number}", per_deployment, 370, 256) for number in range(DEPLOYMENTS)]
        plane.apply(*made)
        mirror.wait(lambda: stowage.alive() and mirror.all_bound(per_deployment * DEPLOYMENTS, SPACE), timeout, "all pods bound")
        print(f"{per_deployment * DEPLOYMENTS} pods on {len(mirror.nodes())} nodes", flush=True)
        time.sleep(SETTLE)
        calls = Calls(log, "stowage")
        idle = minute(calls, stowage)
        busy = minute(calls, stowage, lambda: churn(plane, rate, 60))
        report(len(mirror.nodes()), per_deployment * DEPLOYMENTS, rate, idle, busy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2_000, help="about this many nodes with ten pods each (default: 2000)")
    parser.add_argument("--rate", type=int, default=20, help="pods deleted per second under churn (default: 20)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds until all pods must be bound (default: 3600)")
    args = parser.parse_args()
    with guard.guarded_directory():
        run(args.nodes, args.rate, args.timeout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
