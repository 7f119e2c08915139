#!/usr/bin/env python3
"""`stowage preflight` on EC2's wire protocol: the binary against moto, in an account that is fit and in one where things are missing.

What moto lacks is a warning in every run: the price list and spot placement scores. Run: python3 e2e/preflight_test.py
"""

import copy
import datetime
import http.server
import json
import pathlib
import re
import tempfile
import threading
import unittest

import aws
import faults
import harness
import workloads

CLUSTER = "demo"
SECRET = "tell-nobody-this-5d8c1e"
# moto answers neither of these.
LOST = {"on-demand prices", "spot placement scores"}
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


class Account(unittest.TestCase):
    """moto with what a cluster needs, and the binary."""

    secrets = [SECRET]  # what no output may hold

    @classmethod
    def setUpClass(cls):
        cls.moto = cls.enterClassContext(aws.Moto())
        cls.account = cls.moto.account(CLUSTER)
        cls.dir = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.set_queue(Policy=policy("sqs:SendMessage"), SqsManagedSseEnabled="true")

    @classmethod
    def set_queue(cls, **attributes):
        cls.moto.aws.sqs("SetQueueAttributes", QueueUrl=cls.account.queue_url, Attributes=attributes)

    def run_it(self, *arguments, classes=None, **environment):
        """Runs the command, with manifests of `classes`; nothing of this machine's own settings reaches it. A variable of None is not set."""
        arguments = list(arguments)
        if classes is not None:
            manifests = pathlib.Path(tempfile.mkdtemp(dir=self.dir)) / "classes.json"
            manifests.write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": classes}))
            arguments += ["--file", manifests]
        given = {"HOME": str(self.dir), "CLUSTER_NAME": CLUSTER, "INTERRUPTION_QUEUE": CLUSTER, **self.moto.env(), "AWS_SECRET_ACCESS_KEY": SECRET}
        given = {name: value for name, value in {**given, **environment}.items() if value is not None}
        done = harness.run(harness.binary(), "preflight", *arguments, env=given, check=False, timeout=300)
        for secret in self.secrets:
            self.assertNotIn(secret, done.stdout + done.stderr)
        return done

    def rows(self, *arguments, code, **more):
        """The findings by check: result, detail, fix."""
        done = self.run_it("--output", "json", *arguments, **more)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual((report["region"], report["cluster"]), (aws.REGION, CLUSTER))
        found = {row["check"]: (row["result"], row["detail"], row["fix"]) for row in report["checks"]}
        self.assertEqual(len(found), len(report["checks"]), "each check once")
        results = [result for result, _, _ in found.values()]
        counts = {name: results.count(result) for name, result in (("ok", "ok"), ("warnings", "warning"), ("failed", "failed"))}
        self.assertEqual({name: report[name] for name in counts}, counts)
        for check, (result, detail, fix) in found.items():
            self.assertTrue(detail, check)
            self.assertEqual(result == "ok", not fix, f"{check}: {fix}")
        return found

    @staticmethod
    def by(found, result):
        return {check for check, row in found.items() if row[0] == result}


class Fit(Account):
    """Nothing is missing."""

    def test_every_row_is_ok_but_what_moto_lacks(self):
        found = self.rows(classes=[node_class()], code=0)
        self.assertEqual(self.by(found, "warning"), LOST)
        self.assertEqual(self.by(found, "ok"), REGION | QUEUE | {f"default: {check}" for check in CLASS})
        detail = {check: row[1] for check, row in found.items()}
        self.assertIn(f"{aws.ACCOUNT}", detail["credentials"])
        self.assertRegex(detail["default: subnets"], r"us-east-1a: 1 subnet with 81\d\d free addresses; us-east-1b: ")
        self.assertIn(f"{CLUSTER}-nodes", detail["default: security groups"])
        self.assertRegex(detail["default: images"], r"amd64: ami-\S+ \(amazon-eks-node-al2023-x86_64-standard.*arm64: ami-")
        self.assertIn("price list of us-east-1", detail["on-demand prices"])
        self.assertIn(f"{CLUSTER}, Kubernetes {aws.VERSION}", detail["cluster"])
        self.assertEqual({detail[check] for check in QUOTAS}, {"0 of 256 vCPUs are in use, 256 left"})

    def test_the_table_has_the_same_rows(self):
        done = self.run_it(classes=[node_class()])
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        heading, *lines = done.stdout.splitlines()
        self.assertEqual(heading.split(), ["CHECK", "RESULT", "DETAIL", "FIX"])
        column = heading.index("RESULT")
        rows = {line[:column].strip(): line[column:].split()[0] for line in lines if line[:column].strip() and line[column:]}
        expected = {check: "ok" for check in REGION | QUEUE | {f"default: {check}" for check in CLASS}}
        self.assertEqual(rows, expected | dict.fromkeys(LOST, "warning"))
        self.assertEqual(lines[-1], f"{len(expected)} ok, 2 warnings, 0 failed")

    def test_nothing_is_changed(self):
        self.moto.aws.sqs("SendMessage", QueueUrl=self.account.queue_url, MessageBody="for the controller")
        before = self.state()
        self.assertEqual(self.run_it(classes=[node_class()]).returncode, 0)
        self.assertEqual(self.state(), before)
        message = self.moto.aws.sqs("ReceiveMessage", QueueUrl=self.account.queue_url)["Messages"][0]
        self.assertEqual(message["Body"], "for the controller")
        self.moto.aws.sqs("DeleteMessage", QueueUrl=self.account.queue_url, ReceiptHandle=message["ReceiptHandle"])

    def state(self):
        client = self.moto.aws
        lists = {action: client.ec2(action).get(result) for action, result in (("DescribeLaunchTemplates", "launchTemplates"), ("DescribeInstances", "reservationSet"), ("DescribeFleets", "fleetSet"))}
        return {**lists, "profiles": client.iam("ListInstanceProfiles"), "roles": client.iam("ListRoles")}

    def test_another_role_is_assumed_first(self):
        arn = f"arn:aws:iam::{aws.ACCOUNT}:role/{self.account.role}"
        found = self.rows("--role", arn, classes=[node_class()], code=0)
        self.assertIn(f"assumed-role/{self.account.role}/stowage", found["credentials"][1])

    def test_an_own_image_and_a_profile_do_as_well(self):
        client = self.moto.aws
        client.iam("CreateInstanceProfile", InstanceProfileName="own")
        client.iam("AddRoleToInstanceProfile", InstanceProfileName="own", RoleName=self.account.role)
        own = node_class(amiFamily="AL2023", amiSelectorTerms=[{"tags": {"karpenter.sh/discovery": CLUSTER}}], instanceProfile="own")
        del own["spec"]["role"]
        empty = copy.deepcopy(own)
        empty["metadata"]["name"], empty["spec"]["instanceProfile"] = "empty", "none"
        found = self.rows(classes=[own, empty], code=1)
        self.assertEqual(found["default: instance profile"], ("ok", f"own with role {self.account.role}", ""))
        self.assertIn("with instance profile own", found["default: ec2:RunInstances"][1])
        self.assertEqual(self.by(found, "failed"), {"empty: instance profile"})

    def test_without_a_queue_a_warning_says_what_is_lost(self):
        found = self.rows(classes=[node_class()], code=0, INTERRUPTION_QUEUE="")
        self.assertEqual(self.by(found, "warning"), LOST | {"interruption queue"})
        self.assertIn("spot interruptions", found["interruption queue"][1])


class Missing(Account):
    """Each thing that is missing has a row that says so, and the exit code tells."""

    def test_what_a_class_selects_in_vain_fails(self):
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
        found = self.rows(classes=classes, code=1)
        failed = {"no-subnets: subnets", "no-groups: security groups", "no-image: images", "no-alias: images", "no-role: role", "kubelet: settings"}
        self.assertEqual(self.by(found, "failed"), failed)
        untried = {f"{name}: launch rights" for name in ("no-subnets", "no-groups", "no-image", "no-alias")}
        self.assertEqual(self.by(found, "warning"), LOST | untried)
        self.assertEqual({check for check in self.by(found, "ok") if check.startswith("fit: ")}, {f"fit: {check}" for check in CLASS})
        self.assertIn("tag the subnets", found["no-subnets: subnets"][2])
        self.assertIn("nobody", found["no-role: role"][1])

    def test_a_queue_that_is_not_there_or_that_events_do_not_reach_fails(self):
        found = self.rows(classes=[node_class()], code=1, INTERRUPTION_QUEUE="another")
        self.assertEqual(self.by(found, "failed"), {"interruption queue"})
        self.assertIn("docs/aws", found["interruption queue"][2])
        self.moto.aws.sqs("CreateQueue", QueueName="closed", Attributes={"KmsMasterKeyId": "alias/aws/sqs"})
        found = self.rows(classes=[node_class()], code=1, INTERRUPTION_QUEUE="closed")
        self.assertEqual(self.by(found, "failed"), {"queue policy", "queue encryption"})

    def test_an_unknown_cluster_fails_and_the_rest_is_checked(self):
        # Without it neither the images of an alias nor the user data are known.
        done = self.run_it("--output", "json", "--cluster-name", "unknown", classes=[node_class()])
        self.assertEqual(done.returncode, 1, done.stderr)
        found = {row["check"]: row["result"] for row in json.loads(done.stdout)["checks"]}
        self.assertEqual({check for check, result in found.items() if result == "failed"}, {"cluster"})
        self.assertEqual({check for check, result in found.items() if result == "warning"}, LOST | {"default: images", "default: launch rights"})

    def test_without_a_way_to_aws_nothing_else_is_asked(self):
        found = self.rows(classes=[node_class()], code=1, AWS_ENDPOINT_URL="http://127.0.0.1:1")
        self.assertEqual(self.by(found, "failed"), {"credentials", "instance types", "zones of instance types"})
        self.assertEqual(set(found), {"credentials", "instance types", "zones of instance types", "on-demand prices", "spot prices"})
        self.assertNotIn("{", "".join(row[1] for row in found.values()), "no innards of the SDK")

    def test_what_can_not_be_used_is_usage(self):
        nothing = self.dir / "nothing.yaml"
        nothing.write_text("apiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n")
        for arguments, environment, wanted in (
            ([], {"CLUSTER_NAME": ""}, "CLUSTER_NAME"),
            (["--file", nothing], {}, "no EC2NodeClass"),
            (["--file", self.dir / "absent.yaml"], {}, "absent.yaml"),
            (["--output", "html"], {}, "table, json"),
            ([], {}, "--file"),
        ):
            with self.subTest(arguments):
                done = self.run_it(*arguments, **environment)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertIn(wanted, done.stderr)


class Quotas(Account):
    """Quotas are held against what the account's instances use."""

    def test_a_quota_counts_every_instance_and_names_the_way_to_more(self):
        on_demand, spot = "vCPU quota of Standard on-demand", "vCPU quota of Standard spot"
        ids = [made["instanceId"] for made in self.moto.launch(self.account, 3, "m5.xlarge", role="another's")]
        found = self.rows(classes=[node_class()], code=0)
        self.assertEqual(found[on_demand], ("ok", "12 of 256 vCPUs are in use, 244 left", ""))
        self.moto.set_quotas({"L-1216C47A": 12, "L-34B43A08": 8})
        found = self.rows(classes=[node_class()], code=0)
        self.assertEqual(found[on_demand][:2], ("warning", "12 of 12 vCPUs are in use, 0 left"))
        self.assertIn("--quota-code L-1216C47A", found[on_demand][2])
        self.assertEqual(found[spot][0], "ok")
        self.moto.set_quotas({"L-1216C47A": 12, "L-34B43A08": 0})
        found = self.rows(classes=[node_class()], code=1)
        self.assertEqual(self.by(found, "failed"), {on_demand, spot})
        self.moto.terminate(*ids)
        self.moto.set_quotas(aws.QUOTAS)

    def test_pools_name_other_quotas_and_an_unknown_one_is_a_warning(self):
        pool = workloads.node_pool("gpu")
        pool["spec"]["template"]["spec"]["requirements"] = [
            {"key": "karpenter.k8s.aws/instance-family", "operator": "In", "values": ["g5"]},
            {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
        ]
        found = self.rows(classes=[node_class(), pool], code=0)
        named = "vCPU quota of G and VT on-demand"
        self.assertEqual({check for check in found if "quota" in check}, {"vCPU quota of Standard on-demand", named})
        self.assertEqual(found[named][0], "warning")
        self.assertIn("L-DB2E81BA is not known", found[named][1])


class Agent(http.server.ThreadingHTTPServer):
    """EKS's Pod Identity agent, as a context manager: gives credentials to whoever shows the token, the last ones again and again."""

    def __init__(self, token, *credentials):
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.token, self.credentials, self.asked = token, list(credentials), []
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
            agent.asked.append((self.path, self.headers.get("Authorization")))
            given = agent.credentials.pop(0) if len(agent.credentials) > 1 else agent.credentials[0]
            status, answer = (200, json.dumps(given)) if agent.asked[-1][1] == agent.token else (400, "the token is not valid")
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_):
            pass


class Credentials(Account):
    """Credentials as EKS gives them to a pod: there are no keys in the environment."""

    ROLE = "controller"
    ARN = f"arn:aws:iam::{aws.ACCOUNT}:role/{ROLE}"
    TOKENS = ["eyJhbGciOiJSUzI1NiJ9.first", "eyJhbGciOiJSUzI1NiJ9.second"]
    UNREACHED = {"credentials", "instance types", "zones of instance types"}

    def setUp(self):
        self.secrets = [*self.TOKENS]
        self.proxy = self.enterContext(faults.Proxy(self.moto.endpoint))
        self.token = pathlib.Path(tempfile.mkdtemp(dir=self.dir)) / "token"
        self.token.write_text(self.TOKENS[0])

    def from_eks(self, **given):
        """The environment of a pod."""
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
        return {**keys, "AWS_ENDPOINT_URL": self.proxy.endpoint, "AWS_DEFAULT_REGION": aws.REGION, "AWS_STS_REGIONAL_ENDPOINTS": "regional", **given}

    def irsa(self):
        return self.from_eks(AWS_ROLE_ARN=self.ARN, AWS_WEB_IDENTITY_TOKEN_FILE=str(self.token))

    def pod_identity(self, url):
        return self.from_eks(AWS_CONTAINER_CREDENTIALS_FULL_URI=url, AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=str(self.token))

    def role_keys(self, lasts=3600):
        """Keys of the role, as the agent gives them."""
        answer = self.moto.aws.query("sts", "2011-06-15", "AssumeRole", {"RoleArn": self.ARN, "RoleSessionName": f"eks-{CLUSTER}-stowage"})
        keys = aws.find(answer, "Credentials")
        ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=lasts)
        self.secrets += [keys["SecretAccessKey"], keys["SessionToken"]]
        return {
            "AccessKeyId": keys["AccessKeyId"],
            "SecretAccessKey": keys["SecretAccessKey"],
            "Token": keys["SessionToken"],
            "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "AccountId": aws.ACCOUNT,
        }

    def signers(self):
        """Key and session token of each call, in order."""
        calls = [dict(call.headers) for call in self.proxy.seen() if call.action != "AssumeRoleWithWebIdentity"]
        calls = [{name.lower(): value for name, value in call.items()} for call in calls]
        return [(re.search("Credential=([^/]+)/", call["authorization"])[1], call["x-amz-security-token"]) for call in calls]

    def assert_ready(self, found):
        self.assertEqual(self.by(found, "warning"), LOST)
        self.assertIn(f"assumed-role/{self.ROLE}/", found["credentials"][1])

    def assert_refused(self, environment, detail, *fix):
        found = self.rows(classes=[node_class()], code=1, **environment)
        self.assertEqual(self.by(found, "failed"), self.UNREACHED)
        self.assertIn(detail, found["credentials"][1])
        for part in fix:
            self.assertIn(part, found["credentials"][2])

    def given(self, reply):
        """Key and session token in STS's answer."""
        key, secret, token = (re.search(f"<{name}>(.+)</{name}>", reply.body.decode())[1] for name in ("AccessKeyId", "SecretAccessKey", "SessionToken"))
        self.secrets += [secret, token]
        return key, token

    def test_irsa_assumes_the_role_and_signs_with_its_keys(self):
        given = []

        def watched(call, forward):
            if call.action == "AssumeRoleWithWebIdentity":
                reply = forward(call)
                given.append(self.given(reply))
                return reply

        with self.proxy.fault(watched):
            self.assert_ready(self.rows(classes=[node_class()], code=0, **self.irsa()))
        [assumed] = self.proxy.seen("AssumeRoleWithWebIdentity")
        self.assertEqual((assumed.form["RoleArn"], assumed.form["WebIdentityToken"]), (self.ARN, self.TOKENS[0]))
        self.assertEqual(set(self.signers()), set(given), "every call is signed with the role's keys")

    def test_irsa_reads_its_token_anew_when_the_keys_run_out(self):
        given = []

        def expired(call, forward):
            if call.action == "AssumeRoleWithWebIdentity":
                reply = forward(call)
                given.append(self.given(reply))
                if len(given) == 1:
                    self.token.write_text(self.TOKENS[1])
                    reply.body = re.sub(b"<Expiration>.+</Expiration>", b"<Expiration>2026-01-01T00:00:00Z</Expiration>", reply.body)
                return reply

        with self.proxy.fault(expired):
            self.assert_ready(self.rows(classes=[node_class()], code=0, **self.irsa()))
        tokens = [call.form["WebIdentityToken"] for call in self.proxy.seen("AssumeRoleWithWebIdentity")]
        self.assertEqual((tokens[0], set(tokens[1:])), (self.TOKENS[0], {self.TOKENS[1]}))
        self.assertLessEqual(set(self.signers()), set(given))
        self.assertNotEqual(self.signers()[-1], given[0], "the first keys are not used any more")

    def test_irsa_without_a_token_or_with_a_role_that_refuses_says_what_to_do(self):
        body = b"<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code><Message>Not authorized to perform it</Message></Error></ErrorResponse>"
        refused = lambda call, _: faults.Reply(403, body) if call.action == "AssumeRoleWithWebIdentity" else None
        with self.proxy.fault(refused):
            self.assert_refused(self.irsa(), "Not authorized to perform it", f"trust policy of {self.ARN}", "docs/aws")
        self.assertEqual(set(self.proxy.counts()), {"AssumeRoleWithWebIdentity"}, "nothing is asked without credentials")
        self.token.unlink()
        self.assert_refused(self.irsa(), "No such file", str(self.token))

    def test_pod_identity_shows_the_token_and_signs_with_the_agents_keys(self):
        keys = self.role_keys()
        with Agent(self.TOKENS[0], keys) as agent:
            self.assert_ready(self.rows(classes=[node_class()], code=0, **self.pod_identity(agent.url)))
        self.assertEqual(agent.asked, [("/v1/credentials", self.TOKENS[0])])
        self.assertEqual(set(self.signers()), {(keys["AccessKeyId"], keys["Token"])})

    def test_pod_identity_asks_again_when_the_keys_run_out(self):
        old, new = self.role_keys(lasts=-60), self.role_keys()
        with Agent(self.TOKENS[0], old, new) as agent:
            self.assert_ready(self.rows(classes=[node_class()], code=0, **self.pod_identity(agent.url)))
        self.assertGreater(len(agent.asked), 1)
        signers = [key for key, _ in self.signers()]
        self.assertLessEqual(set(signers), {old["AccessKeyId"], new["AccessKeyId"]})
        self.assertEqual(signers[-1], new["AccessKeyId"])

    def test_pod_identity_that_is_refused_or_has_no_agent_says_what_to_do(self):
        with Agent(self.TOKENS[1], self.role_keys()) as agent:
            self.assert_refused(self.pod_identity(agent.url), "StatusCode(400)", str(self.token), agent.url, "association")
        self.assert_refused(self.pod_identity(agent.url), "Connection refused", "eks-pod-identity-agent")
        self.token.unlink()
        self.assert_refused(self.pod_identity(agent.url), "No such file", str(self.token))
        self.assertEqual(self.proxy.seen(), [], "nothing is asked without credentials")


class InACluster(Account):
    """Without manifests the node classes are the cluster's."""

    def test_the_classes_of_the_cluster_are_checked(self):
        with harness.ControlPlane() as plane:
            plane.kubectl("apply", "-f", harness.ROOT / "crds")
            kubeconfig = {"KUBECONFIG": str(plane.dir / "kubeconfig")}
            found = self.rows(code=0, **kubeconfig)
            self.assertEqual(self.by(found, "warning"), LOST | {"nodeclass"})
            harness.wait_until(lambda: not plane.kubectl("wait", "--for=condition=Established", "crd", "--all", check=False).returncode, 20, "CRDs")
            plane.apply(node_class("main"), node_class("other", role="nobody"))
            found = self.rows(code=1, **kubeconfig)
        self.assertEqual(self.by(found, "failed"), {"other: role"})
        self.assertTrue({f"main: {check}" for check in CLASS} <= self.by(found, "ok"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
