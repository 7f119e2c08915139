#!/usr/bin/env python3
"""`make demo`: Stowage on a real control plane with simulated EC2, printed as it happens. Runs in the environment of e2e/tools/environment.

A mixed workload is applied, the real scheduler rejects it, Stowage plans and buys nodes, the scheduler follows the plan. A spot node is
interrupted, the workload shrinks, nodes are deleted. Ends with a table and one line of figures; exits with status 1 on any deviation.
Everything that it started is stopped at the end, unless --keep (or KEEP=1) is given.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
import time

import kubernetes.client
import urllib3.exceptions

import guard
import harness
import kube
import messages
import observe
import prometheus
import workloads
from kube import being_disrupted, bound_to, is_true, key, terminating
from processes import stop
from waiting import WaitTimeout, wait_until

SPACE = "shop"
PHASE_TIMEOUT = 120.0  # seconds
# Of the cost, that a third of the pods may need at most when consolidation is over: spot nodes are not replaced by cheaper spot nodes (as in Karpenter).
SHARE_AFTER_SHRINKING = 0.7
ERRORS = (harness.Failure, WaitTimeout, kubernetes.client.ApiException, urllib3.exceptions.HTTPError)


class Output:
    """Prints one line per event, with the time since the start."""

    def __init__(self):
        self.begin = time.monotonic()
        self.colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self.last_progress = (0.0, None)

    def paint(self, text, code):
        return f"\033[{code}m{text}\033[0m" if self.colors else text

    def print(self, topic, text, code="36"):
        clock = f"{time.monotonic() - self.begin:6.1f} s"
        print(f"{self.paint(clock, '2')}  {self.paint(f'{topic:<14}', code)} {text}", flush=True)

    def more(self, text):
        print(f"{'':26}{text}", flush=True)

    def progress(self, topic, text):
        """Prints a changed text, at most once a second."""
        now = time.monotonic()
        if now - self.last_progress[0] >= 1.0 and self.last_progress[1] != text:
            self.last_progress = (now, text)
            self.print(topic, text, "2")


class Demo:
    def __init__(self, plane, stowage, mirror, server, output, pods):
        self.plane, self.stowage, self.mirror, self.prometheus, self.output = plane, stowage, mirror, server, output
        self.objects = workloads.mixed(pods, SPACE)
        self.table = []
        self.plans_printed = self.nodes_printed = 0

    def wait(self, predicate, what, timeout=PHASE_TIMEOUT, progress=None):
        def check():
            self.stowage.alive()
            if progress:
                self.output.progress(*progress())
            return predicate()

        return self.mirror.wait(check, timeout, what)

    def row(self, phase):
        cost = self.stowage.cost(self.mirror.claims())
        pods, pending = self.mirror.pods(SPACE), self.mirror.pending(SPACE)
        self.table.append((phase, len(pods), len(pods) - len(pending), len(self.mirror.own_nodes()), cost))
        return cost

    # Phases

    def prepare(self):
        for number in (1, 2):
            self.plane.api.create(workloads.system_node(f"system-{number}"))
        self.output.print("cluster", "2 nodes of a managed node group for the system's own pods")
        self.plane.apply(workloads.node_class(), workloads.node_pool(consolidate_after="5s", budget="100%"))
        ready = lambda: is_true(self.plane.api.get("NodePool", "default"), "Ready")
        wait_until(ready, 30, "NodePool default ready")
        self.output.print("node pool", "NodePool default and EC2NodeClass default applied, as written for Karpenter; ready")

    def arrive(self):
        count = workloads.count(self.objects)
        kinds = collections.Counter(item["kind"] for item in self.objects if item["kind"] != "Namespace")
        self.plane.apply(*self.objects)
        self.output.print("workload", f"{count} pods applied: " + ", ".join(f"{number} {kind}{'s' * (number > 1)}" for kind, number in kinds.items()))
        self.output.more("zone and host spread, host anti-affinity, zone affinity, arm64 (new and legacy key), GPU, memory-heavy, spot-preferring")
        record, planned = self.mirror.record, 0

        def state():
            launched, nodes = len(record.launched), sum(is_true(node, "Ready") for node in self.mirror.own_nodes())
            bound = len(self.mirror.pods(SPACE)) - len(self.mirror.pending(SPACE))
            return "progress", f"{len(record.rejected)} rejected  {record.claims_created} NodeClaims  {launched} launched  {nodes} nodes ready  {bound} bound"

        def done():
            nonlocal planned
            if not planned and record.claims_created:
                self.output.print("rejected", f"kube-scheduler found no node for {len(record.rejected)} pods so far")
            if planned < record.claims_created:
                planned = record.claims_created
                self.plans()
            return self.mirror.all_bound(count, SPACE) and self.mirror.settled()

        self.wait(done, "all pods bound and all nodes initialized", progress=state)
        self.plans()
        self.first = {pod["metadata"]["uid"] for pod in self.mirror.pods(SPACE)}
        self.output.print("bound", f"all {count} pods, on {len(self.mirror.own_nodes())} nodes", "32")
        self.row("after arrival")

    def plans(self):
        """Prints the plans since the last call, from the log, and the types of the nodes that they buy."""
        wait_until(lambda: self.stowage.lines(messages.PLANNED), 10, "a plan in the log")
        made = self.stowage.lines(messages.PLANNED)
        for plan in made[self.plans_printed :]:
            gap = "" if plan["gap"] == "unknown" else f", {plan['gap']} above the lower bound"
            where = f"{plan['nodes']} new nodes" + (f" and {plan['on_existing']} pods on existing nodes" if plan["on_existing"] else "")
            later = f"; {plan['later']} pods are planned again" if plan["later"] else ""
            self.output.print("plan", f"{plan['pods']} pods on {where}: {float(plan['usd_per_hour']):.3f} USD/h{gap}, solved in {plan['solve_ms']} ms{later}")
        if len(made) == self.plans_printed:
            return
        self.plans_printed = len(made)
        nodes = self.stowage.lines(messages.PLANNED_NODE)
        kinds = collections.Counter((node["instance-type"], node["capacity-type"]) for node in nodes[self.nodes_printed :])
        self.nodes_printed = len(nodes)
        for (instance_type, capacity_type), number in sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:12]:
            self.output.more(f"{number:>3} × {instance_type} {capacity_type}")
        if len(kinds) > 12:
            self.output.more(f"    and {len(kinds) - 12} more kinds")

    def interrupt(self):
        """A spot interruption."""
        spot = [claim for claim in self.mirror.claims() if claim["metadata"]["labels"].get(kube.CAPACITY_TYPE) == "spot"]
        if not spot:
            raise harness.Failure("no spot node was bought, so none can be interrupted")
        on = collections.Counter(bound_to(pod) for pod in self.mirror.pods(SPACE))
        claim = max(spot, key=lambda claim: (on[claim["status"].get("nodeName")], key(claim)))
        name, node = key(claim), claim["status"]["nodeName"]
        moving = [key(pod) for pod in self.mirror.pods(SPACE) if bound_to(pod) == node]
        before, known = workloads.count(self.objects), {key(other) for other in self.mirror.claims()}
        self.plane.api.annotate("Node", node, {"simulated.stowage.dev/event": "spot-interruption"})
        kind = claim["metadata"]["labels"][kube.INSTANCE_TYPE]
        self.output.print("interruption", f"EC2 reclaims spot node {node} ({kind}, {len(moving)} pods) in two minutes", "33")
        self.wait(lambda: name in self.mirror.record.deleted, f"the end of NodeClaim {name}")
        bought = [other for other in self.mirror.claims() if key(other) not in known]
        unplaced = self.mirror.record.without_successor(name, moving)
        if unplaced:
            raise harness.Failure(f"{node} was drained before replacement nodes were ready for {len(unplaced)} of its pods, such as {unplaced[0]}")
        places = ", ".join(f"{other['metadata']['labels'].get(kube.INSTANCE_TYPE, 'a node')}" for other in bought)
        self.output.print("replacement", f"{places or 'room on other nodes'} ready for its pods; the node is drained only now")

        def over():
            gone = name not in {key(other) for other in self.mirror.claims()}
            return gone and self.mirror.all_bound(before, SPACE) and self.mirror.settled()

        self.wait(over, "all pods bound again and the interrupted node gone")
        self.output.print("survived", f"all {before} pods bound again, {node} terminated", "32")
        self.row("after interruption")

    def shrink(self):
        small = workloads.scaled(self.objects, 1 / 3)
        count, nodes = workloads.count(small), len(self.mirror.own_nodes())
        cost = self.table[-1][-1]
        self.plane.apply(*small)
        self.output.print("scale-down", f"{workloads.count(self.objects)} -> {count} pods")
        last_change = [0.0, None]

        def state():
            leaving = sum(terminating(claim) for claim in self.mirror.claims())
            return "consolidation", f"{len(self.mirror.pods(SPACE))} pods  {len(self.mirror.own_nodes())} nodes, {leaving} of them leaving"

        def over():
            # Consolidation is over when nothing has changed for some time.
            disrupting = any(being_disrupted(claim) for claim in self.mirror.claims())
            now = (sorted(key(claim) for claim in self.mirror.claims()), disrupting)
            settled = self.mirror.all_bound(count, SPACE) and self.mirror.settled()
            if now != last_change[1] or disrupting or not settled:
                last_change[:] = [time.monotonic(), now]
            quiet = time.monotonic() - last_change[0] > (10.0 if time.monotonic() < end else 0.0)
            # On a busy machine the decision itself takes as long.
            return settled and quiet and (time.monotonic() > last or self.stowage.cost(self.mirror.claims()) <= SHARE_AFTER_SHRINKING * cost)

        end, last = time.monotonic() + 45.0, time.monotonic() + PHASE_TIMEOUT - 10.0
        self.wait(over, "nodes gone after the scale-down", progress=state)
        after = self.row("after scale-down")
        self.output.print("consolidated", f"{nodes} -> {len(self.mirror.own_nodes())} nodes, {cost:.3f} -> {after:.3f} USD/h", "32")
        if after > SHARE_AFTER_SHRINKING * cost:
            raise harness.Failure(f"the cost fell too little: {cost:.3f} USD/h before, {after:.3f} after")

    def figures(self):
        """Money and fidelity, as the service's metrics have them."""
        metric = self.stowage.metric
        ended = {result: metric("stowage_holds_ended_total", f'result="{result}"') for result in ("planned", "elsewhere", "stray")}
        rows = [
            ("bill", f"{metric('stowage_usd_per_hour'):.3f} USD/h", "stowage_usd_per_hour"),
            ("  its lower bound", f"{metric('stowage_lower_bound_usd_per_hour'):.3f} USD/h", "stowage_lower_bound_usd_per_hour"),
            *((f"  {kind}", f"{metric('stowage_usd_per_hour', f'capacity_type={json.dumps(kind)}'):.3f} USD/h", "") for kind in ("spot", "on-demand")),
            ("  nodes without pods", f"{metric('stowage_usd_per_hour', 'used=' + json.dumps('false')):.3f} USD/h", ""),
            ("saved", f"{metric('stowage_saved_usd_per_hour_total'):.3f} USD/h", "stowage_saved_usd_per_hour_total"),
            ("bound as planned", f"{100 * ended['planned'] / max(1, sum(ended.values())):.1f} %", "stowage_holds_ended_total"),
            *((f"  {result}", f"{count:.0f} pods", "") for result, count in ended.items()),
        ]
        print("\n  " + self.output.paint(f"{'money and fidelity':<24}{'':>14}  metric", "1"))
        for name, value, source in rows:
            print(f"  {name:<24}{value:>14}  {source}".rstrip())

    def panels(self):
        """Every panel of the dashboard that the chart installed has data."""
        found = collections.defaultdict(int)
        expressions = prometheus.expressions(self.stowage.dashboard())
        for title, _, count, _ in prometheus.rows_of(self.prometheus, [row for row in expressions if not row[0].startswith("$")]):  # those are variables
            found[title] += count
        empty = [title for title, count in found.items() if not count]
        if empty or not found:
            raise harness.Failure(f"panels of the dashboard have no data: {', '.join(empty)}")
        print(f"\n  each of the {len(found)} panels of the dashboard has data")

    def close(self):
        errors = self.stowage.errors()
        if errors:
            raise harness.Failure(f"stowage logged {len(errors)} errors, such as: {errors[0]}")
        if self.mirror.record.doubly_planned:
            raise harness.Failure("two NodeClaims at a time were planned for pod {}: {} and {}".format(*self.mirror.record.doubly_planned[0]))
        print()
        heads = ("phase", "pods", "bound", "nodes", "USD/h")
        print("  " + self.output.paint(f"{heads[0]:<20}{heads[1]:>6}{heads[2]:>7}{heads[3]:>7}{heads[4]:>10}", "1"))
        for phase, pods, bound, nodes, cost in self.table:
            print(f"  {phase:<20}{pods:>6}{bound:>7}{nodes:>7}{cost:>10.3f}")
        self.figures()
        self.panels()
        print()
        _, pods, bound, nodes, cost = self.table[0]
        _, followed, strays = self.mirror.record.followed(self.first)
        share = 100.0 * followed / max(1, followed + len(strays))
        record = self.mirror.record
        to_call = [record.until_launch(since, self.stowage.launch_calls(), self.first) for since in (record.created, record.rejected)]
        waits = [observe.percentile(times, 99) for times in (record.detect_to_launch(self.first), *to_call)]
        if None in waits:
            raise harness.Failure("no pod was seen from its rejection to the launch of its node")
        delay, created, rejected = (round(wait * 1000) for wait in waits)
        bound_after = round(record.ready_to_bound(self.first) * 1000)
        if share < 99.0:
            raise harness.Failure(f"only {share:.1f} % of the pods went to their planned nodes; strays (pod, node, planned): {strays[:5]}")
        print(
            f"demo: ok pods={pods} bound={bound} planned_on_node={share:.1f}% nodes={nodes} cost_usd_per_hour={cost:.3f} detect_to_launch_p99_ms={delay}"
            f" created_to_call_p99_ms={created} rejected_to_call_p99_ms={rejected} ready_to_bound_ms={bound_after}"
        )


def run(output, directory, pods, keep):
    harness.binary()
    output.print("control plane", "starting etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kwok")
    with harness.ControlPlane(directory, keep) as plane:
        version = plane.api.version()
        output.print("control plane", f"Kubernetes {version} at {plane.state['api']}, RBAC on", "32")
        stowage = harness.Stowage(plane, "extender", boot_delay="2s-4s")
        try:
            stowage.install()
            # For half a minute after the CRDs are installed, its garbage collector asks for the owner of each NodeClaim, a third of all requests in a burst.
            plane.script("stop-component", plane.dir, "kube-controller-manager")
            plane.script("start-component", plane.dir, "kube-controller-manager")
            output.print("install", f"helm chart installed: CRDs, RBAC, webhook at {stowage.url}/mutate")
            stowage.start()
            stowage.scheduler()
            output.print("stowage", "ready, under the chart's ServiceAccount; kube-scheduler calls its extender over mutual TLS", "32")
            scraping = prometheus.Prometheus(stowage.addresses["metrics"], {"groups": []}, "5s")
            with observe.Mirror(plane.api) as mirror, scraping as server:
                demo = Demo(plane, stowage, mirror, server, output, pods)
                demo.prepare()
                demo.arrive()
                demo.interrupt()
                demo.shrink()
                demo.close()
        except ERRORS:
            print(f"\nthe end of stowage's log:\n{stowage.tail()}", file=sys.stderr)
            if keep:
                print_access(plane, stowage)
            raise
        finally:
            if not keep:
                stowage.stop()
    if keep:
        print_access(plane, stowage)


def print_access(plane, stowage):
    print(
        f"""
It is still running. To look around:
  export KUBECONFIG={plane.dir}/kubeconfig PATH={plane.bin}:$PATH
  kubectl get nodepools,nodeclaims,nodes
  kubectl get pods -n {SPACE} -o wide
  kubectl get events -A --field-selector reportingComponent=stowage
  kubectl annotate node NODE simulated.stowage.dev/event=spot-interruption
  less {stowage.log}
To stop it:
  {sys.executable} {pathlib.Path(__file__).resolve()} --stop {plane.dir}"""
    )


def stop_kept(directory):
    """Stops what --keep left running."""
    stop([directory / "pids" / "stowage.pid"], patience=harness.STOP_TIMEOUT)
    harness.run(harness.HERE / "control-plane", "down", directory)
    shutil.rmtree(directory, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=350, help="pods of the workload (default: 350)")
    parser.add_argument("--keep", action="store_true", default=os.environ.get("KEEP", "") not in ("", "0"), help="leave it running at the end")
    parser.add_argument("--dir", type=pathlib.Path, help="directory of the control plane (default: one of its own)")
    parser.add_argument("--stop", type=pathlib.Path, metavar="DIR", help="stop the control plane that --keep left running in DIR, and remove DIR")
    args = parser.parse_args()
    if args.stop:
        stop_kept(args.stop.resolve())
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        # A killed demo leaves nothing, unless its control plane is to be kept.
        with contextlib.nullcontext() if args.keep or args.dir else guard.guarded_directory():
            run(Output(), args.dir, args.pods, args.keep)
    except KeyboardInterrupt:
        print("demo: stopped", file=sys.stderr)
        return 130
    except ERRORS as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
