#!/usr/bin/env python3
"""Records the requests that one run of the service sends to AWS and to the API server, and compares two recordings. Runs in the
environment of e2e/tools/environment.

    $(e2e/tools/environment) e2e/wire_record.py record FILE [--raw RAW]
    $(e2e/tools/environment) e2e/wire_record.py renormalize RAW FILE
    $(e2e/tools/environment) e2e/wire_record.py compare A B [--ignore-messages]

`record` runs the service (STOWAGE_BIN names the binary) with `--cloud ec2` against a seeded moto, on a real control plane whose kubelets
boot moto's instances. The sequence is fixed: a node class and NodePools, a Deployment, a spot interruption, scale-down, consolidation,
drift, deletion of the class, the end of the process. The proxy in front of moto records the AWS requests, the API server's audit log the
Kubernetes requests. A run takes about three minutes. FILE holds the normalized requests (recording.py); `--raw` also keeps the originals,
which `renormalize` normalizes again.

`compare` exits with 1 if the recordings differ. Order does not count. Of every write, content and number must be equal; of reads, of
status patches, of Events, and of renewals of a Lease, the set of distinct contents. Not compared, because they depend on timing:
  - conflicts (409) and the object that a GET of a single object names
  - what a NodePool counts within a step; the value at the end of a step is compared
  - nominations in steps that replace a node, where kube-scheduler may bind the pod first
  - the taint node.kubernetes.io/not-ready in patches of a Node's taints, which another controller removes
With `--ignore-messages`, the notes of Events and the messages of conditions are not compared either; their reasons are.
"""

import argparse
import base64
import collections
import contextlib
import datetime
import json
import pathlib
import re
import signal
import sys
import tempfile
import time
import urllib.parse

import requests

import aws
import faults
import guard
import harness
import kube
import observe
import recording
import services
import workloads
from kube import CLAIMS, NODES, PODS, is_true, key
from services import CLUSTER
from waiting import WaitTimeout

FORMAT = 1
SEED = 42  # of moto's ids
STEP_SECONDS = 180  # that a step may take on a busy machine
# Least length of a recording: every poll happens at least once.
LEAST_SECONDS = 150
REPLICAS = 6
GENERAL, SPARE = "general", "spare"
# User data contain the URL and the CA of the API server. The kubelets of the tests read neither, so both can be constant.
ENDPOINT, AUTHORITY = "https://cluster.example", base64.b64encode(b"the CA of the cluster").decode()
UNREADABLE = {"OnDemandPricesUnreadable", "PlacementScoresUnreadable"}
SETTINGS = {
    "CLUSTER_ENDPOINT": ENDPOINT,
    "CLUSTER_CA_BUNDLE": AUTHORITY,
    "INTERRUPTION_QUEUE": CLUSTER,
    # On a busy machine, the pods of one Deployment may appear seconds apart. They must be in one plan.
    "BATCH_IDLE_DURATION": "4s",
    "BATCH_MAX_DURATION": "60s",
}
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Request", "userGroups": [f"system:serviceaccounts:{harness.NAMESPACE}"]},
        {"level": "None"},
    ],
}
READS = ("get", "list", "watch")
REPEATED = ("leases", "events")
CONFLICT = 409
# Steps that replace a node: its pods appear when it is open, and kube-scheduler may bind a pod before the service nominates it.
REPLACING = ("interruption", "consolidation", "drift")
COUNTERS = ("status.nodes", "status.resources")
EVENT_SUFFIX = re.compile(r"\.[0-9a-f]{16}\b")  # the time in an Event's name
ROLE = re.compile(r"<(claim|node) [^>]*>")
# Prefixes of actions without an effect. A dry run has no effect either.
AWS_READS = ("Describe", "Get", "List", "Receive", "Search")
TAGGED = ("karpenter.k8s.aws/tagged", "compatibility.karpenter.k8s.aws/cluster-name-tagged")


class History(observe.Mirror):
    """A mirror that keeps the last state of every object of a run, and the step in which the object appeared."""

    KINDS = (*observe.Mirror.KINDS, "NodePool", "EC2NodeClass")

    def __init__(self, api):
        super().__init__(api)
        self.step = "start"
        self.found = {}  # uid -> (kind, object, step)

    def update(self, kind, event, item):
        uid = item["metadata"]["uid"]
        step = self.found[uid][2] if uid in self.found else self.step
        self.found[uid] = (kind, item, step)
        super().update(kind, event, item)


# Recording


class Run(services.Ec2):
    """One run of the service."""

    @classmethod
    @contextlib.contextmanager
    def started(cls, directory):
        """Starts the control plane, moto, the kubelets and the service. Its requests are recorded from the first."""
        policy, audit = directory / "audit-policy.json", directory / "audit.jsonl"
        policy.write_text(json.dumps(POLICY))
        flags = [f"--audit-policy-file={policy}", f"--audit-log-path={audit}", "--audit-log-maxsize=10000"]
        arguments = [part for flag in flags for part in ("--component-arg", f"kube-apiserver={flag}")]
        with contextlib.ExitStack() as stack:
            plane = stack.enter_context(harness.ControlPlane(arguments=arguments))
            moto = stack.enter_context(aws.Moto())
            requests.post(f"{moto.endpoint}/moto-api/seed", params={"a": SEED}, timeout=60).raise_for_status()
            account = moto.account(CLUSTER)
            proxy = stack.enter_context(faults.Proxy(moto.endpoint))
            replies = []
            stack.enter_context(proxy.fault(keep_in(replies)))
            kubelets = stack.enter_context(harness.Kubelets(plane, moto.endpoint, cluster=CLUSTER))
            environment = {**moto.env(), "AWS_ENDPOINT_URL": proxy.endpoint, **SETTINGS}
            stowage = stack.enter_context(harness.Stowage(plane, "nominate", env=environment, cloud="ec2", clusterName=CLUSTER))
            begun = time.monotonic()
            # The chart installs the CRDs.
            history = stack.enter_context(History(plane.api))
            run = cls(plane, stowage, history, moto, account, proxy, kubelets)
            run.audit, run.replies, run.steps, run.begun = audit, replies, [], begun
            yield run

    def record(self):
        """Performs the run; returns the raw recording and the aliases of its names."""
        try:
            self.sequence()
            return self.raw(), self.names()
        except BaseException:
            for name, text in self.logs().items():
                print(f"{name}:\n{text}", file=sys.stderr)
            raise

    # The sequence

    def step(self, name):
        self.mirror.step = name
        self.steps.append([time.time(), name])
        print(f"{time.monotonic() - self.begun:6.1f} s  {name}", flush=True)

    def sequence(self):
        self.step("class")
        self.plane.apply(services.node_class())
        self.wait_class("default", STEP_SECONDS)
        self.step("pools")
        for pool in pools():
            self.plane.apply(pool)
            self.wait_pool(pool["metadata"]["name"], STEP_SECONDS)
        self.step("workload")
        web = workloads.workload("shop", "web", REPLICAS, 1200, 1024, nodeSelector={kube.NODE_POOL: GENERAL}, **workloads.zone_spread("web"))
        self.plane.apply(workloads.namespace("shop"), web)
        self.quiet("shop", REPLICAS)
        self.step("spot")
        self.plane.apply(*services.one_per_node("guard", 1, SPARE))
        self.quiet("guard", 1)
        self.step("interruption")
        (claim,) = self.claims(SPARE)
        self.interrupt(claim)
        self.replaced(claim, "guard", 1)
        self.step("scale-down")
        self.api.scale("Deployment", "web", "shop", 0)
        self.wait(lambda: not self.claims(GENERAL), STEP_SECONDS, "nodes of the Deployment gone")
        self.quiet("guard", 1)
        self.step("lone")
        alone = {kube.NODE_POOL: GENERAL, kube.ZONE: aws.ZONES[0]}
        self.plane.apply(workloads.namespace("lone"), workloads.workload("lone", "lone", 2, 1200, 1024, nodeSelector=alone))
        self.quiet("lone", 2)
        self.step("consolidation")
        (claim,) = self.claims(GENERAL)
        self.api.scale("Deployment", "lone", "lone", 1)
        self.replaced(claim, "lone", 1)
        self.step("drift")
        (claim,) = self.claims(GENERAL)
        changed = {"spec": {"template": {"metadata": {"annotations": {"stowage.dev/e2e": "drift"}}}}}
        self.api.patch("NodePool", GENERAL, changed)
        self.replaced(claim, "lone", 1)
        self.step("polls")
        # The SDK retries APIs that moto lacks for up to 100 s.
        reported = lambda: {event["reason"] for event in self.plane.events("default")}
        done = lambda: time.monotonic() - self.begun > LEAST_SECONDS and reported() >= UNREADABLE
        self.poll(done, LEAST_SECONDS + STEP_SECONDS, "every poll and every report of a failed API", reported, every=1)
        self.step("deletion")
        for namespace in ("guard", "lone"):
            self.api.scale_all(namespace, 0)
        self.wait(lambda: not self.claims(), STEP_SECONDS, "every NodeClaim gone")
        for pool in pools():
            self.api.delete("NodePool", pool["metadata"]["name"])
        self.api.delete("EC2NodeClass", "default")
        find = lambda: self.api.find("EC2NodeClass", "default")
        self.poll(lambda: not find(), STEP_SECONDS, "the class gone", find)
        self.assert_nothing_leaked()
        if self.stowage.restarts:
            raise harness.Failure("stowage lost its lease and was restarted: the machine is too busy for a recording")
        self.step("end")
        status = self.stowage.stop()
        if status != 0:
            raise harness.Failure(f"stowage ended with status {status}")

    def quiet(self, namespace, replicas):
        """Waits until a workload is bound and the service has nothing left to write about its nodes."""
        self.wait_bound(namespace, replicas, STEP_SECONDS)
        self.wait(lambda: all(self.is_done(claim) for claim in self.claims()), STEP_SECONDS, "NodeClaims done")
        counts = lambda pool: (self.api.get("NodePool", pool)["status"].get("nodes"), len(self.claims(pool)))
        for pool in (GENERAL, SPARE):
            same = lambda pool=pool: len({*counts(pool)}) == 1
            self.poll(same, STEP_SECONDS, f"NodePool {pool} with its number of nodes", lambda pool=pool: counts(pool), every=0.2)

    def is_done(self, claim):
        annotations, node = kube.annotations_of(claim), self.mirror.node_of(claim)
        tagged = all(annotations.get(name) == "true" for name in TAGGED)
        # moto gives spot instances the security group of the VPC, which is not the one of their class.
        drifted = is_true(claim, "Drifted") == (kube.pool_of(claim) == SPARE)
        return tagged and drifted and node and not kube.taint_keys(node)

    def replaced(self, claim, namespace, replicas):
        """Waits until a NodeClaim is gone and its pods run elsewhere."""
        self.wait(lambda: not self.current(claim), STEP_SECONDS, f"{key(claim)} gone")
        self.quiet(namespace, replicas)

    def interrupt(self, claim):
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "version": "0",
            "id": "1",
            "detail-type": "EC2 Spot Instance Interruption Warning",
            "source": "aws.ec2",
            "account": aws.ACCOUNT,
            "time": now,
            "region": aws.REGION,
            "resources": [],
            "detail": {"instance-id": self.instance_of(claim), "instance-action": "terminate"},
        }
        self.aws.sqs.send_message(QueueUrl=self.account.queue_url, MessageBody=json.dumps(event))

    # What was recorded

    def raw(self):
        """The requests without normalization."""
        calls = []
        for call, reply in self.replies:
            headers = {name.lower(): value for name, value in call.headers}
            found = re.search(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/", headers.get("authorization", ""))
            answer = reply.body.decode(errors="replace") if call.action in ("CreateFleet", "CreateLaunchTemplate") else None
            body = call.body.decode(errors="replace")
            request = {"service": found[1] if found else "", "method": call.method, "path": call.path, "action": call.action, "form": call.form, "body": body}
            calls.append({**request, "target": headers.get("x-amz-target"), "status": reply.status, "answer": answer})
        with self.audit.open() as lines:
            events = [json.loads(line) for line in lines]
        return {"aws": calls, "kubernetes": events, "steps": self.steps}

    def names(self):
        """The aliases of this run's names."""
        names = recording.Names()
        for url, alias in ((self.proxy.endpoint, "<aws>"), (self.moto.endpoint, "<aws>"), (self.plane.state["api"], "<api server>")):
            names.add(url, alias)
        names.add(self.account.vpc, "<vpc>")
        for zone, id in self.account.subnets.items():
            names.add(id, f"<subnet {zone}>")
        for number, id in enumerate(self.account.security_groups):
            names.add(id, f"<security group {number}>")
        found = self.mirror.found
        nodes = {item["spec"].get("providerID"): item for kind, item, _ in found.values() if kind == NODES}
        for uid, (kind, item, step) in found.items():
            metadata, name = item["metadata"], item["metadata"]["name"]
            if kind == CLAIMS:
                zone = metadata["labels"].get(kube.ZONE) or kube.annotations_of(item).get(kube.PLANNED_OFFERING, "//").split("/")[1]
                role = f"{kube.pool_of(item)}/{step}/{zone}"
                names.add(name, f"<claim {role}>")
                names.add(uid, f"<uid of claim {role}>")
                provider = item.get("status", {}).get("providerID")
                names.add(self.instance_of(item), f"<instance {role}>")
                if node := nodes.get(provider):
                    names.add(node["metadata"]["name"], f"<node {role}>")
                    names.add(node["metadata"]["uid"], f"<uid of node {role}>")
            elif kind == PODS:
                alias = f"{metadata.get('generateName', name)}<pod>" if "generateName" in metadata else name
                names.add(name, alias)
                names.add(uid, f"<uid of pod {metadata['namespace']}/{alias}>")
            elif kind != NODES:
                names.add(uid, f"<uid of {item['kind']} {name}>")
            if profile := item.get("status", {}).get("instanceProfile"):
                names.add(profile, f"<instance profile of {name}>")
        return names


def keep_in(replies):
    """A fault that breaks nothing: keeps each call with its response."""

    def fault(call, forward):
        reply = forward(call)
        replies.append((call, reply))
        return reply

    return fault


def pools():
    general = workloads.node_pool(GENERAL, capacity_types=["on-demand"])
    spare = services.small_pool(SPARE, "spot")
    spare["spec"]["disruption"]["budgets"] = [{"nodes": "100%"}, services.NO_DRIFT]
    return [general, spare]


# Normalizing


def add_templates(raw, names):
    """Gives launch templates aliases by content: their names are hashes of it, and the content has the random name of an instance profile."""
    made = []
    for call in raw["aws"]:
        if call["action"] == "CreateLaunchTemplate" and call["status"] == 200:
            form = call["form"]
            content = {name: value for name, value in form.items() if name not in ("LaunchTemplateName", "ClientToken")}
            id = re.search(r"<launchTemplateId>(lt-[0-9a-f]+)<", call["answer"])
            made.append((recording.canonical(names.value(recording.tree(content))), form["LaunchTemplateName"], id and id[1]))
    order = {content: number for number, content in enumerate(sorted({content for content, _, _ in made}), 1)}
    for content, name, id in made:
        names.add(name, f"<launch template {order[content]}>")
        names.add(id, f"<id of launch template {order[content]}>")


def aws_entries(raw, names):
    for call in raw["aws"]:
        if call["form"]:
            form = {name: value for name, value in call["form"].items() if name not in ("Action", "Version")}
            parameters, operation = recording.tree(form), call["action"]
        elif call["target"]:
            parameters, operation = json.loads(call["body"] or "{}"), call["action"]
        else:
            path, _, query = call["path"].partition("?")
            parameters = {"query": urllib.parse.parse_qsl(query), "body": json.loads(call["body"] or "{}")}
            operation = f"{call['method']} {names.text(path)}"
        reads = operation.startswith((*AWS_READS, "GET ")) or parameters.get("DryRun") == "true"
        for each in recording.split_by_id(parameters):
            content = recording.without_order(names.value(each))
            yield {
                "to": "aws",
                "kind": "repeated" if reads else "write",
                "what": f"{call['service']} {operation}",
                "content": content,
                **({} if reads else {"status": call["status"]}),
            }


def without_foreign_taints(body):
    """Removes a taint of another controller: a patch of a Node writes the whole list of taints."""
    spec = body.get("spec") if isinstance(body, dict) else None
    if spec and spec.get("taints"):
        spec["taints"] = [taint for taint in spec["taints"] if taint["key"] != "node.kubernetes.io/not-ready"]


def kubernetes_entries(raw, names):
    # Within a step, a NodePool's counts depend on timing; at the end of a step, they do not.
    counts = {}
    for event in raw["kubernetes"]:
        about, verb = event.get("objectRef", {}), event["verb"]
        path, _, query = event["requestURI"].partition("?")
        path = EVENT_SUFFIX.sub(".<time>", names.text(path))
        resource = "/".join(filter(None, (about.get("resource", path), about.get("subresource"))))
        parameters = {name: recording.OPAQUE.get(name, names.text(value)) for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True)}
        made = {"to": "kubernetes", "kind": "repeated", "what": f"{verb} {resource}"}
        if verb in READS:
            # A conflict makes the service read the object again.
            yield {**made, "content": {"path": ROLE.sub(r"<\1>", path), "query": parameters}}
            continue
        status = event.get("responseStatus", {}).get("code")
        # The service repeats a write that conflicts.
        if event["stage"] != "ResponseComplete" or status == CONFLICT:
            continue
        body = names.value(event.get("requestObject"))
        made["status"] = status
        if resource == "events":
            body["metadata"]["name"] = EVENT_SUFFIX.sub(".<time>", body["metadata"]["name"])
        if about.get("subresource") == "status" and verb == "patch":
            yield {**made, "what": f"shape of {verb} {resource}", "content": {"query": parameters, **recording.shape_of_status(body)}}
            for field, value in recording.parts_of_status(body):
                entry = {**made, "content": {"path": path, "field": field, "value": value}}
                if field == "status.nominatedNodeName" and any(f"/{step}/" in str(value) for step in REPLACING):
                    continue
                if resource == "nodepools/status" and field.startswith(COUNTERS):
                    counts[path, field, step_of(event, raw["steps"])] = entry
                else:
                    yield entry
            continue
        if resource == "nodes":
            without_foreign_taints(body)
        yield {**made, "kind": "repeated" if resource in REPEATED else "write", "content": {"path": path, "query": parameters, "body": body}}
    yield from counts.values()


def step_of(event, steps):
    """The step of the run in which a request was made."""
    at = datetime.datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
    return max((name for begun, name in steps if begun <= at), key=[name for _, name in steps].index, default="start")


def normalized(raw, names):
    add_templates(raw, names)
    return recording.counted([*aws_entries(raw, names), *kubernetes_entries(raw, names)])


# Commands


def record(args):
    with guard.guarded_directory(), tempfile.TemporaryDirectory(prefix="audit-") as directory, Run.started(pathlib.Path(directory)) as run:
        raw, names = run.record()
    if args.raw:
        args.raw.write_text(json.dumps({**raw, "names": names.aliases}))
    entries = normalized(raw, names)
    write(args.file, entries)


def write(file, entries):
    lines = ",\n".join(json.dumps(entry, sort_keys=True, ensure_ascii=False) for entry in entries)
    file.write_text(f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n')
    kinds = collections.Counter((entry["to"], entry["kind"]) for entry in entries)
    print(f"{file}: {', '.join(f'{count} distinct {kind} requests of {to}' for (to, kind), count in sorted(kinds.items()))}")


def renormalize(args):
    """Normalizes a raw recording again, for changes of the normalization itself."""
    raw = json.loads(args.raw.read_text())
    names = recording.Names()
    for name, alias in raw.pop("names").items():
        names.add(name, alias)
    write(args.file, normalized(raw, names))


def read(file):
    content = json.loads(file.read_text())
    if content.get("format") != FORMAT:
        sys.exit(f"{file} is no recording of format {FORMAT}")
    return content["entries"]


def compare(args):
    a, b = read(args.a), read(args.b)
    if args.ignore_messages:
        a, b = recording.without_messages(a), recording.without_messages(b)
    found = recording.compare(a, b)
    for text in found:
        print(text)
    print(f"{len(found)} differences" if found else f"equal: {len(a)} distinct requests")
    return 1 if found else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record", help="run the service and record its requests")
    command.add_argument("file", type=pathlib.Path)
    command.add_argument("--raw", type=pathlib.Path, help="also keep the requests without normalization")
    command.set_defaults(does=record)
    command = commands.add_parser("renormalize", help="normalize a raw recording again")
    command.add_argument("raw", type=pathlib.Path)
    command.add_argument("file", type=pathlib.Path)
    command.set_defaults(does=renormalize)
    command = commands.add_parser("compare", help="compare two recordings")
    command.add_argument("a", type=pathlib.Path)
    command.add_argument("b", type=pathlib.Path)
    command.add_argument("--ignore-messages", action="store_true", help="do not compare notes of Events and messages of conditions")
    command.set_defaults(does=compare)
    args = parser.parse_args()
    # End as on Ctrl-C, with all clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return args.does(args) or 0
    except KeyboardInterrupt:
        print("wire_record: stopped", file=sys.stderr)
        return 130
    except (harness.Failure, WaitTimeout) as error:
        print(f"wire_record: failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
