"""AWS in the end-to-end tests: boto3 clients of one endpoint, and `Moto`, a server of EC2, SQS, SSM, IAM, STS and EKS on loopback."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import boto3
import botocore.config
import botocore.parsers

from processes import stop, write_pid
from waiting import wait_until

MOTO_ATTEMPTS = 5
# Configuration files and profiles of the user must not affect the tests.
os.environ |= {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
os.environ.pop("AWS_PROFILE", None)

# In the environment, which is of one version of moto.
ANSWERS = pathlib.Path(sys.prefix) / "moto-answers"
TOOLS = pathlib.Path(__file__).resolve().parent / "tools"
REGION = "us-east-1"
CREDENTIALS = ("testing", "testing", None)
# vCPUs of standard instances, on-demand and spot, by quota code.
QUOTAS = {"L-1216C47A": 256, "L-34B43A08": 256}
ACCOUNT = "123456789012"  # moto's account
VERSION = "1.34"  # the Kubernetes version of the images
START_TIMEOUT = 60.0  # seconds until moto listens
ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]
AL2023 = [("x86_64", "standard"), ("x86_64", "nvidia"), ("x86_64", "neuron"), ("arm64", "standard"), ("arm64", "nvidia")]


class Clients:
    """boto3 clients of one endpoint and region, created on first use. `credentials` are key, secret and session token. Clients are
    thread-safe; create one before threads share it."""

    def __init__(self, endpoint, region=REGION, credentials=CREDENTIALS, timeout=60.0):
        self.endpoint, self.region, self.credentials = endpoint, region, credentials
        # moto answers some descriptions with 500 while another request changes what they describe: retried as by every SDK.
        retries = {"mode": "standard", "max_attempts": 4}
        self.config = botocore.config.Config(connect_timeout=timeout, read_timeout=timeout, retries=retries, max_pool_connections=16)

    def client(self, service):
        key, secret, token = self.credentials
        session = boto3.Session(aws_access_key_id=key, aws_secret_access_key=secret, aws_session_token=token, region_name=self.region)
        return session.client(service, endpoint_url=self.endpoint, config=self.config)

    @functools.cached_property
    def ec2(self):
        return self.client("ec2")

    @functools.cached_property
    def iam(self):
        return self.client("iam")

    @functools.cached_property
    def sqs(self):
        return self.client("sqs")

    @functools.cached_property
    def ssm(self):
        return self.client("ssm")

    @functools.cached_property
    def eks(self):
        return self.client("eks")

    @functools.cached_property
    def sts(self):
        return self.client("sts")

    def all_of(self, operation, result, **parameters):
        """All items of the list `result` of an EC2 operation, over all pages."""
        for page in self.ec2.get_paginator(operation).paginate(**parameters):
            yield from page[result]

    def instances(self, **parameters):
        """Descriptions of instances. Threads of moto share its tables: it answers with an HTML page while another one changes them."""
        for attempt in range(MOTO_ATTEMPTS):
            try:
                return [instance for reservation in self.all_of("describe_instances", "Reservations", **parameters) for instance in reservation["Instances"]]
            except botocore.parsers.ResponseParserError:
                if attempt == MOTO_ATTEMPTS - 1:
                    raise


def code(error):
    """The error code of a botocore ClientError."""
    return error.response["Error"]["Code"]


def status(error):
    """The HTTP status of a botocore ClientError."""
    return error.response["ResponseMetadata"]["HTTPStatusCode"]


def tags_of(item):
    """An EC2 object's tags as a dictionary."""
    return {tag["Key"]: tag.get("Value", "") for tag in item.get("Tags") or []}


def tags(given):
    """Tags as a list of keys and values."""
    return [{"Key": key, "Value": value} for key, value in given.items()]


def filters(**values):
    """EC2 filters by name, with dashes for underscores."""
    return [{"Name": name.replace("_", "-"), "Values": [value] if isinstance(value, str) else value} for name, value in values.items()]


def tagged(**values):
    """EC2 filters by tag."""
    return [{"Name": f"tag:{name}", "Values": [value]} for name, value in values.items()]


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
    """The resources of a cluster in its account."""

    cluster: str
    vpc: str
    subnets: dict  # zone -> id
    security_groups: list
    role: str
    queue_url: str


class Moto:
    """moto's server with an empty account, as a context manager. Any number run concurrently."""

    def __init__(self):
        self.dir = self.process = self.aws = None

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="moto-", ignore_cleanup_errors=True)
        self.dir = pathlib.Path(self.folder.name)
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.stop()
        self.folder.cleanup()

    @property
    def log(self):
        return self.dir / "moto.log"

    @property
    def pid_file(self):
        return self.dir / "pids" / "moto.pid"

    def start(self):
        """Starts the server and waits until it listens. RegisterImage drops architecture and tags, so the images are given at start."""
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
        ANSWERS.mkdir(exist_ok=True)
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.dir),
            "PYTHONUNBUFFERED": "1",
            "MOTO_AMIS_PATH": str(self.dir / "images.json"),
            "STOWAGE_MOTO_PARAMETERS": str(self.dir / "parameters.json"),
            "STOWAGE_MOTO_QUOTAS": str(self.dir / "quotas.json"),
            "STOWAGE_MOTO_ANSWERS": str(ANSWERS),
        }
        with open(self.log, "wb") as log:
            # The system picks the port; the server logs it.
            command = [sys.executable, TOOLS / "moto-server", "--port", "0"]
            self.process = subprocess.Popen(
                command, env=environment, cwd=self.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.pid_file.parent.mkdir(exist_ok=True)
        write_pid(self.pid_file, self.process.pid)
        self.endpoint = wait_until(self.listening, START_TIMEOUT, "moto listening", lambda: self.log.read_text(errors="replace")[-2000:])
        self.aws = Clients(self.endpoint)

    def set_quotas(self, values):
        """Sets vCPUs of EC2's quotas by code; other quotas do not exist."""
        aside = self.dir / "quotas.new"
        aside.write_text(json.dumps(values))
        aside.replace(self.dir / "quotas.json")

    def listening(self):
        """The endpoint, or None."""
        text = self.log.read_text(errors="replace")
        if self.process.poll() is not None:
            raise RuntimeError(f"moto ended with status {self.process.returncode}; the end of its log:\n{text[-2000:]}")
        found = re.search(r"Running on (http://127\.0\.0\.1:\d+)", text)
        return found and found.group(1)

    def stop(self):
        """SIGTERM, then SIGKILL. Idempotent."""
        if self.process is not None:
            stop([self.pid_file])
            self.process.wait()

    def env(self):
        """Environment variables that point an SDK to this server and to nothing else."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": CREDENTIALS[0],
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS[1],
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def account(self, cluster="demo"):
        """Creates the resources of a cluster: a VPC with subnets in three zones, security groups, a node role, a queue and an EKS cluster.
        Subnets, security groups and own images carry the tag karpenter.sh/discovery with the cluster's name."""
        ec2, discovery = self.aws.ec2, tags({"karpenter.sh/discovery": cluster})
        tagged_as = lambda kind: [{"ResourceType": kind, "Tags": discovery}]
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnets = {}
        for number, zone in enumerate(ZONES):
            block = f"10.0.{32 * number}.0/19"
            made = ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone=zone, TagSpecifications=tagged_as("subnet"))
            subnets[zone] = made["Subnet"]["SubnetId"]
        groups = []
        for name in ("nodes", "extra"):
            given = {"GroupName": f"{cluster}-{name}", "Description": name, "VpcId": vpc}
            groups.append(ec2.create_security_group(**given, TagSpecifications=tagged_as("security-group"))["GroupId"])
        ec2.create_tags(Resources=[id for name, id in self.image_ids.items() if name.startswith("own-")], Tags=discovery)
        role = f"KarpenterNodeRole-{cluster}"
        self.aws.iam.create_role(RoleName=role, AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": []}))
        queue = self.aws.sqs.create_queue(QueueName=cluster, Attributes={"MessageRetentionPeriod": "300"})["QueueUrl"]
        self.aws.eks.create_cluster(
            name=cluster,
            version=VERSION,
            roleArn=f"arn:aws:iam::{ACCOUNT}:role/{cluster}",
            resourcesVpcConfig={"subnetIds": list(subnets.values()), "securityGroupIds": groups},
            kubernetesNetworkConfig={"serviceIpv4Cidr": "10.96.0.0/16"},
        )
        return Account(cluster, vpc, subnets, groups, role, queue)

    def launch(self, account, count=1, kind="m5.large", zone=ZONES[1], data="", **named):
        """Launches instances of an own image; returns their descriptions. `named` are their tags; without any, they are those that make
        an instance a node of the cluster."""
        named = named or {f"kubernetes.io/cluster/{account.cluster}": "owned"}
        arch = "arm64" if re.match(r"[a-z]+\d+g[a-z]*\.", kind) else "x86_64"
        return self.aws.ec2.run_instances(
            ImageId=self.image_ids[f"own-node-{arch}"],
            InstanceType=kind,
            MinCount=count,
            MaxCount=count,
            SubnetId=account.subnets[zone],
            UserData=data,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags(named)}],
        )["Instances"]

    def stop_instances(self, *ids):
        """Stops instances, at once."""
        self.aws.ec2.stop_instances(InstanceIds=list(ids))

    def terminate(self, *ids):
        """Terminates instances, at once."""
        self.aws.ec2.terminate_instances(InstanceIds=list(ids))
