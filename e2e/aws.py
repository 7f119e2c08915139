"""Talking to AWS, or to what speaks its protocols, by the standard library alone.

`Aws` is a client of one endpoint. Answers in XML become dictionaries, lists and texts, with the names that are on the wire; an empty
list is on the wire as an empty element, so ask for one with `answer.get(name) or []`.

`Moto` runs moto's server on this machine: EC2, SQS, SSM, IAM, STS and EKS without an account.
"""

import base64
import dataclasses
import datetime
import hashlib
import hmac
import http.client
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.parse
import xml.etree.ElementTree

TOOLS = pathlib.Path(__file__).resolve().parent / "tools"
REGION = "us-east-1"
READ_ATTEMPTS = 4
EC2_VERSION, IAM_VERSION = "2016-11-15", "2010-05-08"
FORM = "application/x-www-form-urlencoded; charset=utf-8"
# How SQS and SSM spell their version of the JSON protocol and the prefix of an action.
JSON_SERVICES = {"sqs": ("application/x-amz-json-1.0", "AmazonSQS"), "ssm": ("application/x-amz-json-1.1", "AmazonSSM")}
# vCPUs of standard instances, on-demand and spot, by the quotas' codes.
QUOTAS = {"L-1216C47A": 256, "L-34B43A08": 256}
BROKEN = (http.client.RemoteDisconnected, http.client.CannotSendRequest, BrokenPipeError, ConnectionResetError)


class AwsError(Exception):
    """The endpoint refused a request."""

    def __init__(self, action, status, code, message):
        super().__init__(f"{action}: {status} {code}: {message}")
        self.status, self.code, self.message = status, code, message


class Aws:
    """A client of one endpoint and region. Threads may share it: each has a connection of its own. `credentials` are key, secret and
    session token."""

    def __init__(self, endpoint, region=REGION, credentials=("testing", "testing", None), timeout=60.0):
        self.url = urllib.parse.urlsplit(endpoint)
        if self.url.scheme not in ("http", "https") or not self.url.hostname:
            raise ValueError(f"{endpoint} is no endpoint: want http://HOST:PORT or https://HOST")
        self.endpoint, self.region, self.timeout = endpoint, region, timeout
        self.key, self.secret, self.token = credentials
        self.local = threading.local()
        self.kept = []

    def close(self):
        """Closes every thread's connection."""
        for connection in self.kept:
            connection.close()

    # By service

    def ec2(self, action, **parameters):
        """An EC2 action; parameters as on the wire, such as `Filter=[{"Name": "vpc-id", "Value": ["vpc-1"]}]`."""
        return self.query("ec2", EC2_VERSION, action, parameters)

    def ec2_pages(self, action, result, **parameters):
        """All items of the list `result` over all pages."""
        token = {}
        while True:
            answer = self.ec2(action, **parameters, **token)
            yield from answer.get(result) or []
            if not answer.get("nextToken"):
                return
            token = {"NextToken": answer["nextToken"]}

    def iam(self, action, **parameters):
        """An IAM action; lists are written `{"member": […]}`. Returns what is in the action's result."""
        answer = self.query("iam", IAM_VERSION, action, parameters)
        return answer.get(f"{action}Result") or {}

    def json(self, service, action, **parameters):
        """An action of SQS or SSM."""
        content_type, prefix = JSON_SERVICES[service]
        headers = {"Content-Type": content_type, "X-Amz-Target": f"{prefix}.{action}"}
        status, data = self.send(service, "POST", "/", json.dumps(parameters).encode(), headers)
        return self.object(action, status, data)

    def sqs(self, action, **parameters):
        return self.json("sqs", action, **parameters)

    def ssm(self, action, **parameters):
        return self.json("ssm", action, **parameters)

    def eks(self, method, path, **parameters):
        """A request to EKS, whose actions are paths, such as POST /clusters."""
        content = json.dumps(parameters).encode() if parameters else b""
        status, data = self.send("eks", method, path, content, {"Content-Type": "application/json"})
        return self.object(f"{method} {path}", status, data)

    # By protocol

    def query(self, service, version, action, parameters):
        """An action of the Query protocol."""
        form = [("Action", action), ("Version", version), *flat(parameters)]
        content = urllib.parse.urlencode(form).encode()
        # moto answers 500 to a description of what another request is changing; every client of AWS asks again then.
        for _ in range(READ_ATTEMPTS if action.startswith(("Describe", "Get", "List")) else 1):
            status, data = self.send(service, "POST", "/", content, {"Content-Type": FORM})
            if status != 500:
                break
        try:
            answer = value_of(xml.etree.ElementTree.fromstring(data))
        except xml.etree.ElementTree.ParseError:
            raise AwsError(action, status, "NotXml", data[:300].decode(errors="replace")) from None
        if status >= 400:
            error = find(answer, "Error") or {}
            raise AwsError(action, status, error.get("Code", "Unknown"), error.get("Message", ""))
        return answer

    @staticmethod
    def object(action, status, data):
        try:
            answer = json.loads(data) if data else {}
        except ValueError:
            raise AwsError(action, status, "NotJson", data[:300].decode(errors="replace")) from None
        if status >= 400:
            code = str(answer.get("__type", answer.get("code", "Unknown"))).rpartition("#")[2]
            raise AwsError(action, status, code, answer.get("message", answer.get("Message", "")))
        return answer

    def send(self, service, method, path, content, headers):
        """Status and body. A kept connection that was closed at the other end meanwhile is opened anew, once."""
        headers = {**headers, **self.signature(service, method, path, content, headers)}
        while True:
            known = getattr(self.local, "connection", None)
            connection = known or self.connect()
            try:
                connection.request(method, path, content, headers)
                response = connection.getresponse()
                return response.status, response.read()
            except BROKEN:
                self.drop(connection)
                if known is None:
                    raise
            except BaseException:
                self.drop(connection)
                raise

    def connect(self):
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.url.hostname, self.url.port, timeout=self.timeout)
        self.local.connection = connection
        self.kept.append(connection)
        return connection

    def drop(self, connection):
        connection.close()
        self.kept.remove(connection)
        self.local.connection = None

    def signature(self, service, method, path, content, headers, now=None):
        """The headers of AWS Signature Version 4. Servers also read service and region from them."""
        now = now or datetime.datetime.now(datetime.UTC)
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        host = self.url.netloc.rpartition("@")[2]
        signed = {"host": host, "x-amz-date": stamp, **{name.lower(): value for name, value in headers.items()}}
        if self.token:
            signed["x-amz-security-token"] = self.token
        names = ";".join(sorted(signed))
        lines = [method, path, "", *(f"{name}:{signed[name].strip()}" for name in sorted(signed)), "", names, hashlib.sha256(content).hexdigest()]
        scope = f"{day}/{self.region}/{service}/aws4_request"
        text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256("\n".join(lines).encode()).hexdigest()])
        key = f"AWS4{self.secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        proof = hmac.digest(key, text.encode(), "sha256").hex()
        given = {"Host": host, "X-Amz-Date": stamp, **({"X-Amz-Security-Token": self.token} if self.token else {})}
        return {**given, "Authorization": f"AWS4-HMAC-SHA256 Credential={self.key}/{scope}, SignedHeaders={names}, Signature={proof}"}


def flat(value, name=""):
    """Parameters as pairs of the Query protocol: `{"A": [{"B": 1}]}` is `A.1.B=1`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value, 1):
            yield from flat(inner, f"{name}.{number}")
    elif isinstance(value, bool):
        yield name, str(value).lower()
    elif value is not None:
        yield name, str(value)


def value_of(element):
    """An element without its name: text, a list where it holds items, else a dictionary. A name that occurs several times holds a list."""
    inner = list(element)
    if not inner:
        return element.text or ""
    names = [child.tag.rpartition("}")[2] for child in inner]
    if set(names) in ({"item"}, {"member"}):
        return [value_of(child) for child in inner]
    out = {}
    for name, child in zip(names, inner):
        value = value_of(child)
        # EC2 has a few lists whose items are named after what they hold.
        out[name] = value if name not in out else [*(out[name] if isinstance(out[name], list) else [out[name]]), value]
    return out


def find(value, name):
    """The first value of this name, however deep."""
    if isinstance(value, dict):
        if name in value:
            return value[name]
        value = list(value.values())
    if isinstance(value, list):
        return next((found for inner in value if (found := find(inner, name)) is not None), None)
    return None


def tags_of(item, name="tagSet"):
    """An EC2 object's tags as a dictionary."""
    return {tag["key"]: tag.get("value", "") for tag in item.get(name) or []}


def tags(given):
    """Tags as a request wants them."""
    return [{"Key": key, "Value": value} for key, value in given.items()]


# moto

ACCOUNT = "123456789012"  # the account that moto plays
VERSION = "1.34"  # the Kubernetes version of the images
START_TIMEOUT = 60.0  # seconds until moto listens
STOP_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
AL2023 = [("x86_64", "standard"), ("x86_64", "nvidia"), ("x86_64", "neuron"), ("arm64", "standard"), ("arm64", "nvidia")]


def images(version=VERSION):
    """The images of moto's account: (name, architecture, owner, names of the SSM parameters that hold its id)."""
    for arch, variant in AL2023:
        pinned = f"amazon-eks-node-al2023-{arch}-{variant}-{version}-v20261101"
        base = f"/aws/service/eks/optimized-ami/{version}/amazon-linux-2023/{arch}/{variant}"
        yield pinned, arch, "602401143452", [f"{base}/{tag}/image_id" for tag in ("recommended", pinned)]
    for arch in ("x86_64", "arm64"):
        base = f"/aws/service/bottlerocket/aws-k8s-{version}/{arch}"
        yield f"bottlerocket-aws-k8s-{version}-{arch}-v1.50.0", arch, "651937483462", [f"{base}/{tag}/image_id" for tag in ("latest", "1.50.0")]
    for arch in ("x86_64", "arm64"):
        yield f"own-node-{arch}", arch, ACCOUNT, [f"/own/{arch}/image_id"]


@dataclasses.dataclass
class Account:
    """What a cluster finds in its account."""

    cluster: str
    vpc: str
    subnets: dict  # zone -> id
    security_groups: list
    role: str
    queue_url: str


class Moto:
    """moto's server with an empty account, as a context manager. Any number run side by side."""

    def __init__(self):
        self.dir = self.process = self.aws = None

    def __enter__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="stowage-moto-"))
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.aws:
            self.aws.close()
        self.stop()
        shutil.rmtree(self.dir, ignore_errors=True)

    @property
    def log(self):
        return self.dir / "moto.log"

    def start(self):
        """Starts the server and waits until it listens. RegisterImage loses architecture and tags, so the images are given at the start."""
        done = subprocess.run([TOOLS / "moto"], stdout=subprocess.PIPE, text=True, check=True)
        table = [
            {
                "ami_id": f"ami-{number:017x}",
                "name": name,
                "architecture": arch,
                "owner_id": owner,
                "creation_date": "2026-11-01T00:00:00.000Z",
                "virtualization_type": "hvm",
                "root_device_name": "/dev/xvda",
                "root_device_type": "ebs",
            }
            for number, (name, arch, owner, _) in enumerate(images(), 1)
        ]
        self.image_ids = {image["name"]: image["ami_id"] for image in table}
        parameters = {path: self.image_ids[name] for name, _, _, paths in images() for path in paths}
        (self.dir / "images.json").write_text(json.dumps(table))
        (self.dir / "parameters.json").write_text(json.dumps(parameters))
        self.set_quotas(QUOTAS)
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.dir),
            "PYTHONUNBUFFERED": "1",
            "MOTO_AMIS_PATH": str(self.dir / "images.json"),
            "STOWAGE_MOTO_PARAMETERS": str(self.dir / "parameters.json"),
            "STOWAGE_MOTO_QUOTAS": str(self.dir / "quotas.json"),
        }
        python = pathlib.Path(done.stdout.splitlines()[-1]).with_name("python")
        with open(self.log, "wb") as log:
            # The system picks the port, and the server says which.
            command = [python, TOOLS / "moto-with-parameters", "--port", "0"]
            self.process = subprocess.Popen(
                command, env=environment, cwd=self.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.endpoint = self.listening()
        self.aws = Aws(self.endpoint)

    def set_quotas(self, values):
        """vCPUs of EC2's quotas by code; the others are not there."""
        whole = self.dir / "quotas.new"
        whole.write_text(json.dumps(values))
        whole.replace(self.dir / "quotas.json")

    def listening(self):
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            text = self.log.read_text(errors="replace")
            if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", text):
                return found.group(1)
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"moto does not listen (status {self.process.poll()}); the end of its log:\n{text[-2000:]}")
            time.sleep(0.05)

    def stop(self):
        """SIGTERM, then SIGKILL. Doing so again is fine."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def env(self):
        """What an SDK must find in its environment to talk to this server, and to nothing else."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": self.aws.key,
            "AWS_SECRET_ACCESS_KEY": self.aws.secret,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def account(self, cluster="demo"):
        """Makes what a cluster needs: a VPC with subnets in three zones, security groups, a node role, a queue and an EKS cluster.
        Subnets, security groups and own images carry the tag karpenter.sh/discovery with the cluster's name."""
        aws, discovery = self.aws, tags({"karpenter.sh/discovery": cluster})
        vpc = aws.ec2("CreateVpc", CidrBlock="10.0.0.0/16")["vpc"]["vpcId"]
        subnets = {}
        for number, zone in enumerate(ZONES):
            tagged = [{"ResourceType": "subnet", "Tag": discovery}]
            made = aws.ec2("CreateSubnet", VpcId=vpc, CidrBlock=f"10.0.{32 * number}.0/19", AvailabilityZone=zone, TagSpecification=tagged)
            subnets[zone] = made["subnet"]["subnetId"]
        groups = []
        for name in ("nodes", "extra"):
            tagged = [{"ResourceType": "security-group", "Tag": discovery}]
            made = aws.ec2("CreateSecurityGroup", GroupName=f"{cluster}-{name}", GroupDescription=name, VpcId=vpc, TagSpecification=tagged)
            groups.append(made["groupId"])
        aws.ec2("CreateTags", ResourceId=[id for name, id in self.image_ids.items() if name.startswith("own-")], Tag=discovery)
        role = f"KarpenterNodeRole-{cluster}"
        aws.iam("CreateRole", RoleName=role, AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": []}))
        queue = aws.sqs("CreateQueue", QueueName=cluster, Attributes={"MessageRetentionPeriod": "300"})["QueueUrl"]
        network = {"subnetIds": list(subnets.values()), "securityGroupIds": groups}
        arn = f"arn:aws:iam::{ACCOUNT}:role/{cluster}"
        service = {"serviceIpv4Cidr": "10.96.0.0/16"}
        aws.eks("POST", "/clusters", name=cluster, version=VERSION, roleArn=arn, resourcesVpcConfig=network, kubernetesNetworkConfig=service)
        return Account(cluster, vpc, subnets, groups, role, queue)

    def launch(self, account, count=1, kind="m5.large", zone=ZONES[1], data="", **named):
        """Launches instances of an own image by hand; returns their descriptions. `named` are their tags; without any, they are those that
        make it a node of the cluster."""
        named = named or {f"kubernetes.io/cluster/{account.cluster}": "owned"}
        arch = "arm64" if re.match(r"[a-z]+\d+g[a-z]*\.", kind) else "x86_64"
        answer = self.aws.ec2(
            "RunInstances",
            ImageId=self.image_ids[f"own-node-{arch}"],
            InstanceType=kind,
            MinCount=count,
            MaxCount=count,
            SubnetId=account.subnets[zone],
            UserData=base64.b64encode(data.encode()).decode(),
            TagSpecification=[{"ResourceType": "instance", "Tag": tags(named)}],
        )
        return answer["instancesSet"]

    def terminate(self, *ids):
        """Terminates instances, at once."""
        self.aws.ec2("TerminateInstances", InstanceId=list(ids))
