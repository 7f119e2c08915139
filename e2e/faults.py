"""A proxy in front of an EC2 endpoint that records calls and injects faults.

`Proxy(upstream)` listens on loopback, on a port that the system picks, and forwards every request. A fault is a function of a call and of
`forward`, which calls upstream: it returns a `Reply`, `DROP` (the connection ends without a response) or None (the fault does not apply).
The newest faults are tried first; `with proxy.fault(…)` removes them at the end.

moto ignores ClientToken. The proxy honors it for CreateFleet as EC2 does: a known token gets its earlier response, and is refused with
other parameters.
"""

import collections
import contextlib
import dataclasses
import datetime
import http.client
import http.server
import json
import math
import threading
import time
import urllib.parse
import xml.etree.ElementTree
import xml.sax.saxutils

NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
EC2_VERSION = "2016-11-15"
CAPACITY = "TargetCapacitySpecification"
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}
CONNECTION_ERRORS = (ConnectionError, http.client.HTTPException, OSError)
EPSILON = 1e-9
SILENCE = 70.0  # seconds after which an unanswered call ends at this side if the client does not give up first


@dataclasses.dataclass
class Reply:
    """A response."""

    status: int
    body: bytes
    headers: list = dataclasses.field(default_factory=lambda: [("Content-Type", "text/xml;charset=UTF-8")])


DROP = Reply(0, b"")


@dataclasses.dataclass
class Call:
    """A request. `form` is empty for services that speak JSON."""

    method: str
    path: str
    headers: list
    body: bytes
    at: float
    action: str = ""
    form: dict = dataclasses.field(default_factory=dict)
    status: int = 0

    @property
    def is_ec2(self):
        return self.form.get("Version") == EC2_VERSION

    def members(self, prefix, suffix=""):
        """The values of `prefix.1`, `prefix.2`, …, each with the suffix after its number."""
        found, number = [], 1
        while (value := self.form.get(f"{prefix}.{number}{suffix}")) is not None:
            found.append(value)
            number += 1
        return found

    def overrides(self):
        """A fleet's overrides: (prefix of its members, instance type, zone, subnet, image)."""
        for key, kind in self.form.items():
            if key.startswith("LaunchTemplateConfigs.") and key.endswith(".InstanceType"):
                prefix = key.removesuffix(".InstanceType")
                yield prefix, kind, *(self.form.get(f"{prefix}.{name}", "") for name in ("AvailabilityZone", "SubnetId", "ImageId"))

    @property
    def count(self):
        return int(self.form[f"{CAPACITY}.TotalTargetCapacity"])

    @property
    def names_instances(self):
        """Whether it selects instances by their ids."""
        return bool(self.members("InstanceId")) or self.form.get("Filter.1.Name") == "instance-id"

    def tags(self):
        """The tags of the resources that it creates, by resource type."""
        found, number = {}, 1
        while kind := self.form.get(f"TagSpecification.{number}.ResourceType"):
            prefix = f"TagSpecification.{number}.Tag"
            pairs = zip(self.members(prefix, ".Key"), self.members(prefix, ".Value"))
            found[kind] = dict(pairs)
            number += 1
        return found

    def with_form(self, form):
        body = urllib.parse.urlencode(form).encode()
        return dataclasses.replace(self, form=form, body=body)


class Proxy:
    """The proxy, as a context manager."""

    def __init__(self, upstream):
        self.upstream = urllib.parse.urlsplit(upstream)
        self.local = threading.local()
        self.lock = threading.Lock()
        self.calls = []
        self.faults = []
        self.tokens = {}
        self.token_locks = collections.defaultdict(threading.Lock)
        self.launched = {}  # instance id -> time of launch, by responses of CreateFleet

    def __enter__(self):
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def serve(self):
                proxy.serve(self)

            do_GET = do_POST = do_PUT = do_DELETE = serve

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_):
                """Ignores clients that disconnect during a response."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    # For tests

    @contextlib.contextmanager
    def fault(self, *faults):
        """Injects these faults until the end of the block."""
        with self.lock:
            self.faults = [*faults, *self.faults]
        try:
            yield
        finally:
            with self.lock:
                self.faults = [fault for fault in self.faults if fault not in faults]

    def seen(self, action=None, since=0.0):
        """The calls of an action since a time of `time.time()`."""
        with self.lock:
            return [call for call in self.calls if action in (None, call.action) and call.at >= since]

    def counts(self, since=0.0):
        """The number of calls of each action."""
        return collections.Counter(call.action for call in self.seen(since=since))

    # Requests

    def serve(self, handler):
        length = int(handler.headers.get("Content-Length") or 0)
        call = Call(handler.command, handler.path, handler.headers.items(), handler.rfile.read(length), time.time())
        target = handler.headers.get("X-Amz-Target", "")
        if call.body.startswith(b"Action="):
            call.form = dict(urllib.parse.parse_qsl(call.body.decode(), keep_blank_values=True))
            call.action = call.form["Action"]
        else:
            call.action = target.rpartition(".")[2] or f"{call.method} {call.path}"
        with self.lock:
            self.calls.append(call)
            faults = list(self.faults)
        try:
            reply = next((reply for fault in faults if (reply := fault(call, self.forward)) is not None), None) or self.forward(call)
        except CONNECTION_ERRORS:
            reply = DROP
        call.status = reply.status
        if reply is DROP:
            handler.close_connection = True
            return
        handler.send_response_only(reply.status)
        for name, value in reply.headers:
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(reply.body)))
        handler.end_headers()
        handler.wfile.write(reply.body)

    def forward(self, call):
        """The response of upstream, or the earlier response to a known client token of a fleet."""
        token = call.form.get("ClientToken")
        if call.action != "CreateFleet" or not token or call.form.get("DryRun") == "true":
            return self.ask(call)
        with self.lock:
            lock = self.token_locks[token]
        with lock:
            parameters = tuple(sorted(call.form.items()))
            if token in self.tokens:
                before, reply = self.tokens[token]
                return reply if before == parameters else error(400, "IdempotentParameterMismatch", "the token was used with other parameters")
            reply = self.ask(call)
            if reply.status == 200:
                self.tokens[token] = (parameters, reply)
                with self.lock:
                    self.launched |= dict.fromkeys(launched_ids(reply), time.time())
            return reply

    def ask(self, call):
        headers = {name: value for name, value in call.headers if name.lower() != "content-length"}
        while True:
            known = getattr(self.local, "connection", None)
            connection = known or http.client.HTTPConnection(self.upstream.hostname, self.upstream.port, timeout=120)
            try:
                connection.request(call.method, call.path, call.body, headers)
                response = connection.getresponse()
                body = response.read()
            except CONNECTION_ERRORS:
                # Upstream may have closed an idle connection: retry once with a new one.
                connection.close()
                self.local.connection = None
                if known is None:
                    raise
                continue
            self.local.connection = connection
            kept = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP]
            return Reply(response.status, body, kept)


# Responses


def error(status, code, message):
    """An error response of EC2."""
    text = xml.sax.saxutils.escape(message)
    body = f"<Response><Errors><Error><Code>{code}</Code><Message>{text}</Message></Error></Errors><RequestID>fault</RequestID></Response>"
    return Reply(status, body.encode())


def fleet(call, reply, failed):
    """A CreateFleet response with an error for each of `failed`: (code, message, instance type, zone, subnet). Without a reply nothing was
    launched."""
    items = "".join(
        f"<item><errorCode>{code}</errorCode><errorMessage>{message}</errorMessage><lifecycle>on-demand</lifecycle><launchTemplateAndOverrides><overrides>"
        f"<instanceType>{kind}</instanceType><availabilityZone>{zone}</availabilityZone><subnetId>{subnet}</subnetId></overrides>"
        "</launchTemplateAndOverrides></item>"
        for code, message, kind, zone, subnet in failed
    )
    errors = f"<errorSet>{items}</errorSet>"
    if reply is None:
        body = f'<CreateFleetResponse xmlns="{NAMESPACE}"><requestId>fault</requestId><fleetId>fleet-fault</fleetId>{errors}</CreateFleetResponse>'
        return Reply(200, body.encode())
    end = b"</CreateFleetResponse>"
    return Reply(reply.status, reply.body.replace(end, errors.encode() + end), reply.headers)


def launched_ids(reply):
    """The instances that a CreateFleet response names."""
    return [item.text for item in xml.etree.ElementTree.fromstring(reply.body).iterfind(".//{*}instanceIds/{*}item")]


def without_items(reply, path, hidden):
    """A response without the items of the lists at `path` of which `hidden(item)` is true."""
    root = xml.etree.ElementTree.fromstring(reply.body)
    for items in root.iterfind(path):
        for item in list(items):
            if hidden(item):
                items.remove(item)
    return written(reply, root)


def written(reply, root):
    """A response with this content."""
    # The XML namespace varies between moto's actions; clients read local names.
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return Reply(reply.status, xml.etree.ElementTree.tostring(root), reply.headers)


# Faults


class Share:
    """Hits this share of the calls of each action, evenly: 0.8 is four calls of five. Without chance, a fault ends after a known number of calls."""

    def __init__(self, share):
        self.share, self.seen, self.lock = share, collections.Counter(), threading.Lock()

    def hits(self, action):
        with self.lock:
            self.seen[action] += 1
            number = self.seen[action]
        return math.ceil(number * self.share - EPSILON) > math.ceil((number - 1) * self.share - EPSILON)


def throttle(share):
    """This share of EC2's calls is throttled."""
    share = Share(share)

    def fault(call, _):
        return error(503, "RequestLimitExceeded", "Request limit exceeded.") if call.is_ec2 and share.hits(call.action) else None

    return fault


def broken(actions, share=1.0):
    """This share of the calls of some actions fails with an internal error, without an effect."""
    share = Share(share)

    def fault(call, _):
        return error(500, "InternalError", "An internal error has occurred.") if call.action in actions and share.hits(call.action) else None

    return fault


def times(count, action, inner):
    """The fault `inner` for the first `count` calls of an action."""
    left, lock = [count], threading.Lock()

    def fault(call, forward):
        with lock:
            hit = call.action == action and call.form.get("DryRun") != "true" and left[0] > 0
            left[0] -= hit
        return inner(call, forward) if hit else None

    return fault


def silent(_, __):
    """No response until the client gives up; the call is not forwarded."""
    time.sleep(SILENCE)
    return DROP


def without_price_list(call, _):
    """Denies the price list. moto answers 500 instead, which the SDK repeats for longer than the service waits for it at its start."""
    if call.action != "GetProducts":
        return None
    body = json.dumps({"__type": "AccessDeniedException", "message": "the tests use the embedded price list"})
    return Reply(400, body.encode(), [("Content-Type", "application/x-amz-json-1.1")])


def lost(call, forward):
    """The call is forwarded, and its response is lost."""
    forward(call)
    return DROP


def short_of(code, message, hit):
    """A fleet cannot launch the overrides of which `hit(type, zone, subnet, image)` is true."""

    def fault(call, forward):
        if call.action != "CreateFleet" or call.form.get("DryRun") == "true":
            return None
        all_of_them = list(call.overrides())
        failed = [(prefix, kind, zone, subnet) for prefix, kind, zone, subnet, image in all_of_them if hit(kind, zone, subnet, image)]
        if not failed:
            return None
        errors = [(code, message, kind, zone, subnet) for _, kind, zone, subnet in failed]
        if len(failed) == len(all_of_them):
            return fleet(call, None, errors)
        gone = tuple(f"{prefix}." for prefix, *_ in failed)
        return fleet(call, forward(renumbered(call, gone)), errors)

    return fault


def renumbered(call, gone):
    """A fleet's request without some overrides; the rest, and the configurations that have any left, are renumbered."""
    form = {key: value for key, value in call.form.items() if not key.startswith(gone)}
    configs, overrides = {}, {}
    for prefix, *_ in call.with_form(form).overrides():
        config, _, number = prefix.removeprefix("LaunchTemplateConfigs.").partition(".Overrides.")
        configs.setdefault(config, len(configs) + 1)
        mine = overrides.setdefault(config, {})
        mine.setdefault(number, len(mine) + 1)
    out = {}
    for key, value in form.items():
        if key.startswith("LaunchTemplateConfigs."):
            _, config, name = key.split(".", 2)
            if config not in configs:
                continue
            if name.startswith("Overrides."):
                _, number, member = name.split(".", 2)
                name = f"Overrides.{overrides[config][number]}.{member}"
            key = f"LaunchTemplateConfigs.{configs[config]}.{name}"
        out[key] = value
    return call.with_form(out)


def at_most(limit):
    """A fleet launches at most this many instances, for lack of capacity."""

    def fault(call, forward):
        if call.action != "CreateFleet" or call.form.get("DryRun") == "true" or call.count <= limit:
            return None
        smaller = call.with_form({**call.form, f"{CAPACITY}.TotalTargetCapacity": str(limit)})
        _, kind, zone, subnet, _ = next(call.overrides())
        return fleet(call, forward(smaller), [("InsufficientInstanceCapacity", "There is no more of it.", kind, zone, subnet)])

    return fault


def eventual(proxy, seconds):
    """Instances younger than this are missing in descriptions, and their ids are unknown."""

    def young(id, now):
        return now - proxy.launched.get(id, 0.0) < seconds

    def fault(call, forward):
        if call.action not in ("DescribeInstances", "TerminateInstances", "CreateTags", "DescribeInstanceStatus"):
            return None
        now = time.time()
        named = call.members("InstanceId") + call.members("ResourceId")
        if unknown := [id for id in named if young(id, now)]:
            return error(400, "InvalidInstanceID.NotFound", f"The instance ID '{unknown[-1]}' does not exist")
        reply = forward(call)
        if call.action != "DescribeInstances" or reply.status != 200:
            return reply
        return without_items(reply, "{*}reservationSet/{*}item/{*}instancesSet", lambda item: young(item.findtext("{*}instanceId"), now))

    return fault


def without_images(hidden):
    """The images of these ids do not exist: descriptions lack them, and no fleet can launch them."""
    refuse = short_of("InvalidAMIID.NotFound", "The image id does not exist", lambda _kind, _zone, _subnet, image: image in hidden)

    def fault(call, forward):
        if call.action != "DescribeImages":
            return refuse(call, forward)
        return without_items(forward(call), "{*}imagesSet", lambda item: item.findtext("{*}imageId") in hidden)

    return fault


def restored_security_groups(aws):
    """Instances have the security groups of their launch template, which moto forgets. `aws` are clients of upstream."""
    groups, lock = {}, threading.Lock()  # by instance id

    def fault(call, forward):
        if call.action == "CreateFleet" and call.form.get("DryRun") != "true":
            reply = forward(call)
            name = call.form["LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName"]
            versions = aws.ec2.describe_launch_template_versions(LaunchTemplateName=name, Versions=["$Latest"])
            data = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]
            given = data.get("SecurityGroupIds") or data["NetworkInterfaces"][0]["Groups"]
            with lock:
                groups.update(dict.fromkeys(launched_ids(reply), given))
            return reply
        if call.action != "DescribeInstances":
            return None
        reply = forward(call)
        if reply.status != 200:
            return reply
        root = xml.etree.ElementTree.fromstring(reply.body)
        for instance in root.iterfind("{*}reservationSet/{*}item/{*}instancesSet/{*}item"):
            with lock:
                given = groups.get(instance.findtext("{*}instanceId"), [])
            listed = instance.find("{*}groupSet")
            if given and listed is not None:
                # Spot instances have the default group of the VPC.
                listed.clear()
                for id in given:
                    item = xml.etree.ElementTree.SubElement(listed, "item")
                    xml.etree.ElementTree.SubElement(item, "groupId").text = id
        return written(reply, root)

    return fault


class CapacityBlock:
    """A capacity block of `size` instances of one type in a zone, which moto doesn't know. Fleets for capacity blocks launch into it, and its
    instances are described as such. `end` is a time of `time.time()`."""

    def __init__(self, id, kind, zone, size, end):
        self.id, self.kind, self.zone, self.size, self.end = id, kind, zone, size, end
        self.instances, self.lock = set(), threading.Lock()

    def __call__(self, call, forward):
        match call.action:
            case "DescribeCapacityReservations":
                return self.described()
            case "DescribeInstances":
                return self.with_reservation(forward(call))
            case "CreateFleet" if call.form[f"{CAPACITY}.DefaultTargetCapacityType"] == "capacity-block":
                reply = forward(call.with_form({**call.form, f"{CAPACITY}.DefaultTargetCapacityType": "on-demand"}))
                with self.lock:
                    self.instances |= set(launched_ids(reply))
                return reply

    def described(self):
        end = datetime.datetime.fromtimestamp(self.end, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        left = self.size - len(self.instances)
        members = {"capacityReservationId": self.id, "ownerId": "123456789012", "instanceType": self.kind, "availabilityZone": self.zone, "endDate": end}
        members |= {"instanceMatchCriteria": "targeted", "reservationType": "capacity-block", "state": "active"}
        members |= {"totalInstanceCount": self.size, "availableInstanceCount": left}
        item = "".join(f"<{name}>{value}</{name}>" for name, value in members.items())
        body = f"<capacityReservationSet><item>{item}</item></capacityReservationSet>"
        return Reply(200, f'<DescribeCapacityReservationsResponse xmlns="{NAMESPACE}">{body}</DescribeCapacityReservationsResponse>'.encode())

    def with_reservation(self, reply):
        if reply.status != 200:
            return reply
        root = xml.etree.ElementTree.fromstring(reply.body)
        for instance in root.iterfind("{*}reservationSet/{*}item/{*}instancesSet/{*}item"):
            if instance.findtext("{*}instanceId") in self.instances:
                for found in instance.findall("{*}instanceLifecycle") + instance.findall("{*}capacityReservationSpecification"):
                    instance.remove(found)
                xml.etree.ElementTree.SubElement(instance, "instanceLifecycle").text = "capacity-block"
                xml.etree.ElementTree.SubElement(instance, "capacityReservationId").text = self.id
                specification = xml.etree.ElementTree.SubElement(instance, "capacityReservationSpecification")
                xml.etree.ElementTree.SubElement(specification, "capacityReservationPreference").text = "capacity-reservations-only"
        return written(reply, root)


def failed_check(id, check, seconds):
    """An instance whose check, `instance` or `system`, has failed for this time: the filter that matches it, and its description."""
    since = datetime.datetime.fromtimestamp(time.time() - seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    detail = f"<item><impairedSince>{since}</impairedSince><name>reachability</name><status>failed</status></item>"
    status = f"<{check}Status><details>{detail}</details><status>impaired</status></{check}Status>"
    return f"{check}-status.status", f"<item><instanceId>{id}</instanceId>{status}</item>"


def scheduled_event(id, description):
    """An instance with a scheduled retirement: the filter that matches it, and its description."""
    event = f"<item><code>instance-retirement</code><description>{description}</description></item>"
    return "event.code", f"<item><instanceId>{id}</instanceId><eventsSet>{event}</eventsSet></item>"


def unhealthy(found):
    """Exactly the instances of `failed_check` and `scheduled_event` that `found()` returns at a call are unhealthy. As in EC2, a filter
    selects among them."""

    def fault(call, _):
        if call.action != "DescribeInstanceStatus":
            return None
        items = "".join(text for filter, text in found() if filter == call.form["Filter.1.Name"])
        body = f'<DescribeInstanceStatusResponse xmlns="{NAMESPACE}"><instanceStatusSet>{items}</instanceStatusSet></DescribeInstanceStatusResponse>'
        return Reply(200, body.encode())

    return fault


def by_action(counts):
    """Calls by action, without requests that have no action."""
    return {action: count for action, count in counts.items() if count and not action.startswith(("GET ", "POST "))}


def summary(counts, launches):
    """Calls by action and in total, per thousand launches."""
    ours = by_action(counts)
    parts = ", ".join(f"{action} {count}" for action, count in sorted(ours.items(), key=lambda item: -item[1]))
    return f"calls per 1,000 launches: {sum(ours.values()) * 1000 / launches:.0f} ({parts} for {launches} launches)"
