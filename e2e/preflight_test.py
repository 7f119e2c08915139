"""`stowage preflight` on EC2's wire protocol: the binary against moto, in accounts that are complete and in accounts that lack something.

moto has neither a price list nor spot placement scores: both are warnings in every run.
"""

import copy
import datetime
import http.server
import json
import pathlib
import re
import tempfile
import threading

import pytest

import aws
import faults
import harness
import workloads

CLUSTER = "demo"
SECRET = "tell-nobody-this-5d8c1e"
# APIs that moto does not have.
ABSENT = {"on-demand prices", "spot placement scores"}
REGION = {"credentials", "instance types", "zones of instance types", "spot prices", "instances", "launch templates", "instance status", "cluster"}
QUOTAS = {"vCPU quota of Standard on-demand", "vCPU quota of Standard spot"}
REGION |= QUOTAS
QUEUE = {"interruption queue", "queue policy", "queue encryption"}
CLASS = {"subnets", "security groups", "images", "role", "settings", "ec2:CreateLaunchTemplate", "ec2:CreateFleet", "ec2:RunInstances"}


def policy(*actions, service="events.amazonaws.com"):
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": list(actions), "Resource": "*"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def node_class(name="default", **spec):
    made = workloads.node_class(name)
    made["spec"] |= spec
    return made


class Preflight:
    """moto with the resources of a cluster, and the binary."""

    def __init__(self, moto):
        self.moto, self.aws, self.secrets = moto, moto.aws, [SECRET]
        self.account = moto.account(CLUSTER)
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="preflight-"))
        attributes = {"Policy": policy("sqs:SendMessage"), "SqsManagedSseEnabled": "true"}
        self.aws.sqs.set_queue_attributes(QueueUrl=self.account.queue_url, Attributes=attributes)

    def run(self, *arguments, classes=None, **environment):
        """Runs the command, with manifests of `classes`, without settings of the user. A variable of None is not set. No output has one
        of the secrets."""
        arguments = list(arguments)
        if classes is not None:
            manifests = pathlib.Path(tempfile.mkdtemp(dir=self.dir)) / "classes.json"
            manifests.write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": classes}))
            arguments += ["--file", manifests]
        given = {"HOME": str(self.dir), "CLUSTER_NAME": CLUSTER, "INTERRUPTION_QUEUE": CLUSTER, **self.moto.env(), "AWS_SECRET_ACCESS_KEY": SECRET}
        given = {name: value for name, value in {**given, **environment}.items() if value is not None}
        done = harness.run(harness.binary(), "preflight", *arguments, env=given, check=False, timeout=300)
        for secret in self.secrets:
            assert secret not in done.stdout + done.stderr
        return done

    def checks(self, *arguments, status, **more):
        """The findings by check: result, detail, fix."""
        done = self.run("--output", "json", *arguments, **more)
        assert done.returncode == status, done.stdout + done.stderr
        report = json.loads(done.stdout)
        assert (report["region"], report["cluster"]) == (aws.REGION, CLUSTER)
        found = {row["check"]: (row["result"], row["detail"], row["fix"]) for row in report["checks"]}
        assert len(found) == len(report["checks"]), "each check once"
        results = [result for result, _, _ in found.values()]
        counts = {name: results.count(result) for name, result in (("ok", "ok"), ("warnings", "warning"), ("failed", "failed"))}
        assert {name: report[name] for name in counts} == counts
        for check, (result, detail, fix) in found.items():
            assert detail, check
            assert (result == "ok") == (not fix), f"{check}: {fix}"
        return found


@pytest.fixture(scope="class")
def preflight(moto):
    return Preflight(moto)


def by(found, result):
    """The checks with this result."""
    return {check for check, row in found.items() if row[0] == result}


class TestComplete:
    """An account that has everything."""

    def test_every_check_passes_except_those_of_absent_apis(self, preflight):
        found = preflight.checks(classes=[node_class()], status=0)
        assert by(found, "warning") == ABSENT
        assert by(found, "ok") == REGION | QUEUE | {f"default: {check}" for check in CLASS}
        detail = {check: row[1] for check, row in found.items()}
        assert f"{aws.ACCOUNT}" in detail["credentials"]
        assert re.search(r"us-east-1a: 1 subnet with 81\d\d free addresses; us-east-1b: ", detail["default: subnets"])
        assert f"{CLUSTER}-nodes" in detail["default: security groups"]
        assert re.search(r"amd64: ami-\S+ \(amazon-eks-node-al2023-x86_64-standard.*arm64: ami-", detail["default: images"])
        assert "price list of us-east-1" in detail["on-demand prices"]
        assert f"{CLUSTER}, Kubernetes {aws.VERSION}" in detail["cluster"]
        assert {detail[check] for check in QUOTAS} == {"0 of 256 vCPUs are in use, 256 left"}

    def test_the_table_has_the_same_rows(self, preflight):
        done = preflight.run(classes=[node_class()])
        assert (done.returncode, done.stderr) == (0, "")
        heading, *lines = done.stdout.splitlines()
        assert heading.split() == ["CHECK", "RESULT", "DETAIL", "FIX"]
        column = heading.index("RESULT")
        rows = {line[:column].strip(): line[column:].split()[0] for line in lines if line[:column].strip() and line[column:]}
        expected = {check: "ok" for check in REGION | QUEUE | {f"default: {check}" for check in CLASS}}
        assert rows == expected | dict.fromkeys(ABSENT, "warning")
        assert lines[-1] == f"{len(expected)} ok, 2 warnings, 0 failed"

    def test_nothing_is_modified(self, preflight):
        sqs, url = preflight.aws.sqs, preflight.account.queue_url
        sqs.send_message(QueueUrl=url, MessageBody="for the controller")
        before = self.state(preflight)
        assert preflight.run(classes=[node_class()]).returncode == 0
        assert self.state(preflight) == before
        message = sqs.receive_message(QueueUrl=url)["Messages"][0]
        assert message["Body"] == "for the controller"
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])

    def state(self, preflight):
        """Everything that a launch or its validation creates."""
        ec2, iam = preflight.aws.ec2, preflight.aws.iam
        return (
            ec2.describe_launch_templates()["LaunchTemplates"],
            ec2.describe_instances()["Reservations"],
            ec2.describe_fleets()["Fleets"],
            iam.list_instance_profiles()["InstanceProfiles"],
            iam.list_roles()["Roles"],
        )

    def test_the_given_role_is_assumed(self, preflight):
        arn = f"arn:aws:iam::{aws.ACCOUNT}:role/{preflight.account.role}"
        found = preflight.checks("--role", arn, classes=[node_class()], status=0)
        assert f"assumed-role/{preflight.account.role}/stowage" in found["credentials"][1]

    def test_a_custom_image_and_an_instance_profile_pass(self, preflight):
        preflight.aws.iam.create_instance_profile(InstanceProfileName="own")
        preflight.aws.iam.add_role_to_instance_profile(InstanceProfileName="own", RoleName=preflight.account.role)
        own = node_class(amiFamily="AL2023", amiSelectorTerms=[{"tags": {"karpenter.sh/discovery": CLUSTER}}], instanceProfile="own")
        del own["spec"]["role"]
        empty = copy.deepcopy(own)
        empty["metadata"]["name"], empty["spec"]["instanceProfile"] = "empty", "none"
        found = preflight.checks(classes=[own, empty], status=1)
        assert found["default: instance profile"] == ("ok", f"own with role {preflight.account.role}", "")
        assert "with instance profile own" in found["default: ec2:RunInstances"][1]
        assert by(found, "failed") == {"empty: instance profile"}

    def test_without_a_queue_a_warning_names_the_consequence(self, preflight):
        found = preflight.checks(classes=[node_class()], status=0, INTERRUPTION_QUEUE="")
        assert by(found, "warning") == ABSENT | {"interruption queue"}
        assert "spot interruptions" in found["interruption queue"][1]


class TestMissing:
    """Everything that is missing fails its own check, and the exit status is 1."""

    def test_selectors_without_a_match_fail(self, preflight):
        elsewhere = [{"tags": {"karpenter.sh/discovery": "elsewhere"}}]
        classes = [
            node_class("no-subnets", subnetSelectorTerms=elsewhere),
            node_class("no-groups", securityGroupSelectorTerms=elsewhere),
            node_class("no-image", amiFamily="AL2023", amiSelectorTerms=elsewhere),
            node_class("no-alias", amiSelectorTerms=[{"alias": "al2023@v20000101"}]),
            node_class("no-role", role="nobody"),
            node_class("kubelet", kubelet={"nonsense": 1}),
            node_class("fit"),
        ]
        found = preflight.checks(classes=classes, status=1)
        failed = {"no-subnets: subnets", "no-groups: security groups", "no-image: images", "no-alias: images", "no-role: role", "kubelet: settings"}
        assert by(found, "failed") == failed
        skipped = {f"{name}: launch rights" for name in ("no-subnets", "no-groups", "no-image", "no-alias")}
        assert by(found, "warning") == ABSENT | skipped
        assert {check for check in by(found, "ok") if check.startswith("fit: ")} == {f"fit: {check}" for check in CLASS}
        assert "tag the subnets" in found["no-subnets: subnets"][2]
        assert "nobody" in found["no-role: role"][1]

    def test_a_missing_queue_and_a_queue_that_events_do_not_reach_fail(self, preflight):
        found = preflight.checks(classes=[node_class()], status=1, INTERRUPTION_QUEUE="another")
        assert by(found, "failed") == {"interruption queue"}
        assert "docs/aws" in found["interruption queue"][2]
        preflight.aws.sqs.create_queue(QueueName="closed", Attributes={"KmsMasterKeyId": "alias/aws/sqs"})
        found = preflight.checks(classes=[node_class()], status=1, INTERRUPTION_QUEUE="closed")
        assert by(found, "failed") == {"queue policy", "queue encryption"}

    def test_an_unknown_cluster_fails_and_everything_else_is_checked(self, preflight):
        # Neither the images of an alias nor the user data are known without the cluster.
        done = preflight.run("--output", "json", "--cluster-name", "unknown", classes=[node_class()])
        assert done.returncode == 1, done.stderr
        found = {row["check"]: row["result"] for row in json.loads(done.stdout)["checks"]}
        assert {check for check, result in found.items() if result == "failed"} == {"cluster"}
        assert {check for check, result in found.items() if result == "warning"} == ABSENT | {"default: images", "default: launch rights"}

    def test_an_unreachable_endpoint_ends_the_checks(self, preflight):
        found = preflight.checks(classes=[node_class()], status=1, AWS_ENDPOINT_URL="http://127.0.0.1:1")
        assert by(found, "failed") == {"credentials", "instance types", "zones of instance types"}
        assert set(found) == {"credentials", "instance types", "zones of instance types", "on-demand prices", "spot prices"}
        assert "{" not in "".join(row[1] for row in found.values()), "no debug output of the SDK"

    def test_invalid_arguments_exit_with_status_2(self, preflight, subtests):
        nothing = preflight.dir / "nothing.yaml"
        nothing.write_text("apiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n")
        for arguments, environment, wanted in (
            ([], {"CLUSTER_NAME": ""}, "CLUSTER_NAME"),
            (["--file", nothing], {}, "no EC2NodeClass"),
            (["--file", preflight.dir / "absent.yaml"], {}, "absent.yaml"),
            (["--output", "html"], {}, "table, json"),
            ([], {}, "--file"),
        ):
            with subtests.test(str(arguments)):
                done = preflight.run(*arguments, **environment)
                assert (done.returncode, done.stdout) == (2, ""), done.stderr
                assert wanted in done.stderr


class TestQuotas:
    """Quotas are compared with the vCPUs of the account's instances."""

    def test_a_quota_counts_every_instance_and_names_the_request_for_more(self, preflight):
        on_demand, spot = "vCPU quota of Standard on-demand", "vCPU quota of Standard spot"
        ids = [made["InstanceId"] for made in preflight.moto.launch(preflight.account, 3, "m5.xlarge", role="another's")]
        found = preflight.checks(classes=[node_class()], status=0)
        assert found[on_demand] == ("ok", "12 of 256 vCPUs are in use, 244 left", "")
        preflight.moto.set_quotas({"L-1216C47A": 12, "L-34B43A08": 8})
        found = preflight.checks(classes=[node_class()], status=0)
        assert found[on_demand][:2] == ("warning", "12 of 12 vCPUs are in use, 0 left")
        assert "--quota-code L-1216C47A" in found[on_demand][2]
        assert found[spot][0] == "ok"
        preflight.moto.set_quotas({"L-1216C47A": 12, "L-34B43A08": 0})
        found = preflight.checks(classes=[node_class()], status=1)
        assert by(found, "failed") == {on_demand, spot}
        preflight.moto.terminate(*ids)
        preflight.moto.set_quotas(aws.QUOTAS)

    def test_node_pools_select_the_quotas_and_an_unknown_quota_is_a_warning(self, preflight):
        pool = workloads.node_pool("gpu")
        pool["spec"]["template"]["spec"]["requirements"] = [
            {"key": "karpenter.k8s.aws/instance-family", "operator": "In", "values": ["g5"]},
            {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
        ]
        found = preflight.checks(classes=[node_class(), pool], status=0)
        named = "vCPU quota of G and VT on-demand"
        assert {check for check in found if "quota" in check} == {"vCPU quota of Standard on-demand", named}
        assert found[named][0] == "warning"
        assert "L-DB2E81BA is not known" in found[named][1]


class Agent(http.server.ThreadingHTTPServer):
    """EKS's Pod Identity agent, as a context manager: answers requests with the token by the next of the credentials, the last of which repeat."""

    def __init__(self, token, *credentials):
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.token, self.credentials, self.requests = token, list(credentials), []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1/credentials"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            agent = self.server
            agent.requests.append((self.path, self.headers.get("Authorization")))
            credentials = agent.credentials.pop(0) if len(agent.credentials) > 1 else agent.credentials[0]
            status, answer = (200, json.dumps(credentials)) if agent.requests[-1][1] == agent.token else (400, "the token is not valid")
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_):
            pass


ROLE = "controller"
ARN = f"arn:aws:iam::{aws.ACCOUNT}:role/{ROLE}"
TOKENS = ["eyJhbGciOiJSUzI1NiJ9.first", "eyJhbGciOiJSUzI1NiJ9.second"]
UNREACHED = {"credentials", "instance types", "zones of instance types"}


class Pod:
    """A pod of EKS: there are no keys in its environment, and its requests pass a proxy."""

    def __init__(self, preflight, proxy):
        self.preflight, self.proxy = preflight, proxy
        self.token = pathlib.Path(tempfile.mkdtemp(dir=preflight.dir)) / "token"
        self.token.write_text(TOKENS[0])

    def environment(self, **given):
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
        return {**keys, "AWS_ENDPOINT_URL": self.proxy.endpoint, "AWS_DEFAULT_REGION": aws.REGION, "AWS_STS_REGIONAL_ENDPOINTS": "regional", **given}

    def irsa(self):
        return self.environment(AWS_ROLE_ARN=ARN, AWS_WEB_IDENTITY_TOKEN_FILE=str(self.token))

    def pod_identity(self, url):
        return self.environment(AWS_CONTAINER_CREDENTIALS_FULL_URI=url, AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=str(self.token))

    def role_keys(self, lifetime=3600):
        """Keys of the role, as the agent returns them."""
        keys = self.preflight.aws.sts.assume_role(RoleArn=ARN, RoleSessionName=f"eks-{CLUSTER}-stowage")["Credentials"]
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=lifetime)
        self.preflight.secrets += [keys["SecretAccessKey"], keys["SessionToken"]]
        return {
            "AccessKeyId": keys["AccessKeyId"],
            "SecretAccessKey": keys["SecretAccessKey"],
            "Token": keys["SessionToken"],
            "Expiration": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "AccountId": aws.ACCOUNT,
        }

    def signers(self):
        """Key and session token of each call, in order."""
        calls = [dict(call.headers) for call in self.proxy.seen() if call.action != "AssumeRoleWithWebIdentity"]
        calls = [{name.lower(): value for name, value in call.items()} for call in calls]
        return [(re.search("Credential=([^/]+)/", call["authorization"])[1], call["x-amz-security-token"]) for call in calls]

    def issued(self, reply):
        """Key and session token in a response of STS."""
        key, secret, token = (re.search(f"<{name}>(.+)</{name}>", reply.body.decode())[1] for name in ("AccessKeyId", "SecretAccessKey", "SessionToken"))
        self.preflight.secrets += [secret, token]
        return key, token

    def assert_ready(self, environment):
        found = self.preflight.checks(classes=[node_class()], status=0, **environment)
        assert by(found, "warning") == ABSENT
        assert f"assumed-role/{ROLE}/" in found["credentials"][1]

    def assert_refused(self, environment, detail, *fix):
        found = self.preflight.checks(classes=[node_class()], status=1, **environment)
        assert by(found, "failed") == UNREACHED
        assert detail in found["credentials"][1]
        for part in fix:
            assert part in found["credentials"][2]


@pytest.fixture
def pod(preflight):
    preflight.secrets = [*TOKENS]
    with faults.Proxy(preflight.moto.endpoint) as proxy:
        yield Pod(preflight, proxy)


class TestCredentials:
    """Credentials as EKS provides them to a pod."""

    def test_irsa_assumes_the_role_and_signs_with_its_keys(self, pod):
        issued = []

        def recorded(call, forward):
            if call.action == "AssumeRoleWithWebIdentity":
                reply = forward(call)
                issued.append(pod.issued(reply))
                return reply

        with pod.proxy.fault(recorded):
            pod.assert_ready(pod.irsa())
        [assumed] = pod.proxy.seen("AssumeRoleWithWebIdentity")
        assert (assumed.form["RoleArn"], assumed.form["WebIdentityToken"]) == (ARN, TOKENS[0])
        assert set(pod.signers()) == set(issued), "a call is not signed with the keys of the role"

    def test_irsa_reads_its_token_again_when_the_keys_expire(self, pod):
        issued = []

        def expired(call, forward):
            if call.action == "AssumeRoleWithWebIdentity":
                reply = forward(call)
                issued.append(pod.issued(reply))
                if len(issued) == 1:
                    pod.token.write_text(TOKENS[1])
                    reply.body = re.sub(b"<Expiration>.+</Expiration>", b"<Expiration>2026-01-01T00:00:00Z</Expiration>", reply.body)
                return reply

        with pod.proxy.fault(expired):
            pod.assert_ready(pod.irsa())
        tokens = [call.form["WebIdentityToken"] for call in pod.proxy.seen("AssumeRoleWithWebIdentity")]
        assert (tokens[0], set(tokens[1:])) == (TOKENS[0], {TOKENS[1]})
        assert set(pod.signers()) <= set(issued)
        assert pod.signers()[-1] != issued[0], "the expired keys are still in use"

    def test_irsa_without_a_token_or_with_a_role_that_refuses_names_the_fix(self, pod):
        body = b"<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code><Message>Not authorized to perform it</Message></Error></ErrorResponse>"
        refused = lambda call, _: faults.Reply(403, body) if call.action == "AssumeRoleWithWebIdentity" else None
        with pod.proxy.fault(refused):
            pod.assert_refused(pod.irsa(), "Not authorized to perform it", f"trust policy of {ARN}", "docs/aws")
        assert set(pod.proxy.counts()) == {"AssumeRoleWithWebIdentity"}, "requests without credentials"
        pod.token.unlink()
        pod.assert_refused(pod.irsa(), "No such file", str(pod.token))

    def test_pod_identity_sends_the_token_and_signs_with_the_keys_of_the_agent(self, pod):
        keys = pod.role_keys()
        with Agent(TOKENS[0], keys) as agent:
            pod.assert_ready(pod.pod_identity(agent.url))
        assert agent.requests == [("/v1/credentials", TOKENS[0])]
        assert set(pod.signers()) == {(keys["AccessKeyId"], keys["Token"])}

    def test_pod_identity_requests_new_keys_when_the_keys_expire(self, pod):
        old, new = pod.role_keys(lifetime=-60), pod.role_keys()
        with Agent(TOKENS[0], old, new) as agent:
            pod.assert_ready(pod.pod_identity(agent.url))
        assert len(agent.requests) > 1
        signers = [key for key, _ in pod.signers()]
        assert set(signers) <= {old["AccessKeyId"], new["AccessKeyId"]}
        assert signers[-1] == new["AccessKeyId"]

    def test_pod_identity_that_is_refused_or_has_no_agent_names_the_fix(self, pod):
        with Agent(TOKENS[1], pod.role_keys()) as agent:
            pod.assert_refused(pod.pod_identity(agent.url), "StatusCode(400)", str(pod.token), agent.url, "association")
        pod.assert_refused(pod.pod_identity(agent.url), "Connection refused", "eks-pod-identity-agent")
        pod.token.unlink()
        pod.assert_refused(pod.pod_identity(agent.url), "No such file", str(pod.token))
        assert pod.proxy.seen() == [], "requests without credentials"


class TestInACluster:
    """Without manifests the node classes are those of the cluster."""

    def test_the_classes_of_the_cluster_are_checked(self, preflight, control_plane):
        control_plane.kubectl("apply", "-f", harness.ROOT / "crds")
        kubeconfig = {"KUBECONFIG": str(control_plane.dir / "kubeconfig")}
        found = preflight.checks(status=0, **kubeconfig)
        assert by(found, "warning") == ABSENT | {"nodeclass"}
        assert found["leader election"][0] == "ok"
        control_plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=20s")
        control_plane.apply(node_class("main"), node_class("other", role="nobody"))
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = {"metadata": {"name": "karpenter-leader-election", "namespace": "kube-system"}, "spec": {"holderIdentity": "karpenter-1", "renewTime": now}}
        control_plane.apply({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **lease})
        found = preflight.checks(status=1, **kubeconfig)
        assert by(found, "failed") == {"other: role"}
        result, detail, fix = found["leader election"]
        assert result == "warning" and "kube-system/karpenter-leader-election" in detail and "LEADER_ELECTION_NAMESPACE" in fix
        assert {f"main: {check}" for check in CLASS} <= by(found, "ok")
