"""docs/aws grants exactly the actions that src/cloud/ec2 calls, and names the trusted principals of the controller's role, the queue and
the events that the interruption controller knows, in CloudFormation and in Terraform alike. Actions of `stowage preflight` alone are
listed in docs/operations.md."""

import functools
import json
import pathlib
import re
import subprocess


ROOT = pathlib.Path(__file__).resolve().parent.parent
# The limit of managed policies in characters, without white space.
LONGEST_POLICY = 6144
# Rights without a call: EC2 requires the first for launches of instances with a role, IAM the second for tagged instance profiles, and EC2
# those of KMS for encrypted volumes.
IMPLIED = {"iam:PassRole", "iam:TagInstanceProfile", *(f"kms:{name}" for name in ("CreateGrant", "Decrypt", "DescribeKey", "GenerateDataKeyWithoutPlaintext", "ReEncryptFrom", "ReEncryptTo"))}
# Names in Terraform, and their counterparts in CloudFormation.
REFERENCES = {
    "data.aws_partition.current.partition": "AWS::Partition",
    "data.aws_region.current.region": "AWS::Region",
    "data.aws_caller_identity.current.account_id": "AWS::AccountId",
    "aws_sqs_queue.interruption.arn": "InterruptionQueue.Arn",
    "local.rule_arns": "RULE_ARNS",
    "var.cluster_name": "ClusterName",
    "var.node_role_name": "NodeRoleName",
    "var.kms_key_arn": "KmsKeyArn",
    "var.oidc_provider": "OidcProvider",
    "var.namespace": "Namespace",
    "var.service_account": "ServiceAccount",
}
# Operations that an action of another name allows.
ALLOWED_BY = {"delete_message_batch": "delete_message"}
# Calls of methods without arguments, among them the operations of SDK clients, such as `ec2.describe_subnets()`.
CALL = re.compile(r"\.(\w+)\(\)")


def snake(action):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", action.partition(":")[2]).lower()


def sources(preflight=False):
    """The texts of the EC2 provider's modules, without tests: those of preflight, or the others."""
    ec2 = ROOT / "src" / "cloud" / "ec2"
    for path in ec2.rglob("*.rs"):
        parts = path.relative_to(ec2).parts
        if not path.stem.endswith("tests") and "tests" not in parts and ("preflight" in parts) == preflight:
            yield path.read_text().partition("#[cfg(test)]")[0]


@functools.cache
def operations():
    """The operations of the SDK's clients: each has a module in its crate."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    packages = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)["packages"]
    crates = [pathlib.Path(package["manifest_path"]).parent for package in packages if package["name"].startswith("aws-sdk-")]
    return {module.stem for crate in crates for module in (crate / "src" / "operation").glob("*.rs")}


def called(preflight=False):
    """Operations that the controller calls, or `stowage preflight`, without those of tests."""
    found = {name for text in sources(preflight) for name in CALL.findall(text)} & operations()
    return {ALLOWED_BY.get(name, name) for name in found}


def text_of(name):
    return (ROOT / "docs" / "aws" / name).read_text()


def documents():
    """The policies of CloudFormation, trust policies first."""
    text = text_of("cloudformation.yaml")
    return [json.loads(block) for block in re.findall(r"Fn::Sub: \|\n(.*?)\n\n", text, re.S)]


def trusts(policy):
    return any("Principal" in entry for entry in policy["Statement"])


def cloudformation():
    """The policies of the controller's rights."""
    return [policy for policy in documents() if not trusts(policy)]


def terraform_object(name, resource=""):
    """The object under this name that Terraform's file encodes as JSON, the first in or after a resource, with the names of
    CloudFormation in its references."""
    text = text_of("main.tf").partition(resource)[2] if resource else text_of("main.tf")
    text = re.search(rf"^  {name} = jsonencode\((.*?)^  }}\)$", text, re.M | re.S)[1] + "}"
    for own, theirs in REFERENCES.items():
        text = text.replace(f"${{{own}}}", f"${{{theirs}}}")
        text = re.sub(rf"= {re.escape(own)}(?=[\n ])", f'= "${{{theirs}}}"', text)
    text = re.sub(r'"?([^\s"]+)"? += ', r'"\1": ', text)
    text = re.sub(r'(["}\]])\n(?=\s*")', r"\1,\n", text)
    return json.loads(re.sub(r",(?=\s*[\]}])", "", text))


def resource(name, pattern):
    """The body of a resource in a file."""
    return re.search(pattern, text_of(name), re.M | re.S)[1]


def flow(text):
    """A value of CloudFormation's YAML in flow style."""
    text = re.sub(r"!GetAtt ([\w.]+)", r'"${\1}"', text)
    quoted = lambda found: found[0] if found[0].startswith('"') else json.dumps(found[0])
    return json.loads(re.sub(r'"[^"]*"|[^\s{}\[\],":][^\s{}\[\],"]*?(?=:\s|[\s,}\]]|$)', quoted, text))


def queue_policy():
    """The queue's own policy in CloudFormation."""
    text = resource("cloudformation.yaml", r"^  InterruptionQueuePolicy:$(.*?)^$")
    version, _, statements = text.partition("        Version: ")[2].partition("\n        Statement:\n")
    entries = re.split(r"^          - ", statements, flags=re.M)[1:]
    pairs = [[line.strip().partition(": ") for line in entry.strip().splitlines()] for entry in entries]
    return {"Version": flow(version), "Statement": [{key: flow(value) for key, _, value in entry} for entry in pairs]}


def actions(policies):
    return {action for policy in policies for entry in policy["Statement"] for action in (lambda a: [a] if isinstance(a, str) else a)(entry["Action"])}


class TestPolicies:
    def test_every_call_is_allowed_and_nothing_else(self):
        allowed = actions(cloudformation())
        assert sorted(called()) == sorted(snake(action) for action in allowed - IMPLIED)

    def test_actions_of_preflight_alone_are_documented(self):
        section = (ROOT / "docs" / "operations.md").read_text().partition("## Preflight")[2].partition("\n## ")[0].rpartition("that the controller does not need")[2]
        named = {snake(action) for action in re.findall(r"`([a-z0-9]+:[A-Z]\w+)`", section)}
        assert sorted(named) == sorted(called(preflight=True) - called())

    def test_terraform_grants_the_same_rights(self):
        found = [terraform_object("policy", f'resource "aws_iam_policy" "{name}" ') for name in ("launch", "integration", "key")]
        assert found == cloudformation()

    def test_the_sent_events_are_the_known_ones(self):
        known = {event for text in sources() for event in re.findall(r'\("(aws\.\w+)", "([^"]+)"\) =>', text)}
        stack, terraform = text_of("cloudformation.yaml"), text_of("main.tf")
        rules = re.findall(r'^      EventPattern: {source: \[([\w.]+)\], detail-type: \["([^"]+)"\]}\n      Targets: \[{Id: \w+, Arn: !GetAtt InterruptionQueue\.Arn}\]$', stack, re.M)
        assert (set(rules), len(rules)) == (known, stack.count("AWS::Events::Rule"))
        assert len(known) == len(rules), "one rule per event"
        events = re.search(r"^  events = {$(.*?)^  }$", terraform, re.M | re.S)[1]
        found = re.findall(r'^    \w+ += { source = "([^"]+)", detail_type = "([^"]+)" }$', events, re.M)
        assert (sorted(found), len(found)) == (sorted(known), len(events.strip().splitlines()))
        assert 'event_pattern = jsonencode({ source = [each.value.source], "detail-type" = [each.value.detail_type] })' in terraform

    def test_only_the_rules_may_send_to_the_queue_and_only_over_tls(self):
        policy = queue_policy()
        sending, tls = policy["Statement"]
        queue = "${InterruptionQueue.Arn}"
        rules = re.findall(r"^  (\w+):\n    Type: AWS::Events::Rule$", text_of("cloudformation.yaml"), re.M)
        senders = {"ArnEquals": {"aws:SourceArn": [f"${{{rule}.Arn}}" for rule in rules]}}
        allowed = {"Sid": "EventsMayBeSent", "Effect": "Allow", "Principal": {"Service": "events.amazonaws.com"}, "Action": "sqs:SendMessage",
                   "Resource": queue, "Condition": senders}
        assert len(rules) == 5 and sending == allowed
        insecure = {"Bool": {"aws:SecureTransport": "false"}}
        denied = {"Sid": "OnlyOverTls", "Effect": "Deny", "Principal": "*", "Action": "sqs:*", "Resource": queue, "Condition": insecure}
        assert tls == denied
        # Terraform has one resource for all rules.
        assert "  rule_arns = [for name in sort(keys(local.events)) : aws_cloudwatch_event_rule.interruption[name].arn]\n" in text_of("main.tf")
        sending["Condition"] = {"ArnEquals": {"aws:SourceArn": "${RULE_ARNS}"}}
        assert terraform_object("policy", 'resource "aws_sqs_queue_policy" "interruption" ') == policy
        stack = resource("cloudformation.yaml", r"^  InterruptionQueuePolicy:$(.*?)^$")
        assert "\n      Queues: [!Ref InterruptionQueue]\n" in stack
        terraform = resource("main.tf", r'^resource "aws_sqs_queue_policy" "interruption" {$(.*?)^}$')
        assert "\n  queue_url = aws_sqs_queue.interruption.url\n" in terraform

    def test_the_queue_is_encrypted_and_keeps_messages_for_five_minutes(self):
        stack = resource("cloudformation.yaml", r"^  InterruptionQueue:$(.*?)^$")
        settings = dict(re.findall(r"^      (\w+): (.+)$", stack, re.M))
        assert settings == {"QueueName": "!If [QueueOfCluster, !Ref ClusterName, !Ref QueueName]", "MessageRetentionPeriod": "300", "SqsManagedSseEnabled": "true"}
        terraform = resource("main.tf", r'^resource "aws_sqs_queue" "interruption" {$(.*?)^}$')
        settings = dict(re.findall(r"^  (\w+) += (.+)$", terraform, re.M))
        assert settings == {"name": 'var.queue_name == "" ? var.cluster_name : var.queue_name', "message_retention_seconds": "300", "sqs_managed_sse_enabled": "true", "tags": "var.tags"}

    def test_names_of_roles_and_policies_are_unique_in_the_account(self):
        # They are global, and names of clusters are regional: a fixed name would collide in the second region.
        stack, terraform = text_of("cloudformation.yaml"), text_of("main.tf")
        assert not re.search(r"(?m)^      (ManagedPolicyName|RoleName|PolicyName):", stack)
        for kind in ("aws_iam_policy", "aws_iam_role"):
            for body in re.findall(rf'(?ms)^resource "{kind}" "\w+" {{$(.*?)^}}$', terraform):
                assert re.search(r"(?m)^  name_prefix +=", body) and not re.search(r"(?m)^  name +=", body)

    def test_path_boundary_and_tags_can_be_given(self):
        stack, terraform = text_of("cloudformation.yaml"), text_of("main.tf")
        managed = len(re.findall(r"(?m)^    Type: AWS::IAM::(?:ManagedPolicy|Role)$", stack))
        assert managed == len(re.findall(r"(?m)^      Path: !Ref IamPath$", stack)) == 4
        assert "      PermissionsBoundary: !If [WithBoundary, " in stack
        assert len(re.findall(r"(?m)^  path += var\.iam_path$", terraform)) == 4
        assert re.search(r"(?m)^  permissions_boundary += var\.permissions_boundary$", terraform)
        # Every resource that can have tags: four of IAM, the queue, the rules.
        assert len(re.findall(r"(?m)^  tags += var\.tags$", terraform)) == 6

    def test_the_role_trusts_one_service_account_by_pod_identity_or_by_irsa(self):
        pod_identity, irsa = [policy for policy in documents() if trusts(policy)]
        [statement] = pod_identity["Statement"]
        assert (statement["Principal"], statement["Action"]) == ({"Service": "pods.eks.amazonaws.com"}, ["sts:AssumeRole", "sts:TagSession"])
        tags = {key.partition("/")[2]: value for key, value in statement["Condition"]["StringEquals"].items()}
        assert (tags["kubernetes-namespace"], tags["kubernetes-service-account"]) == ("${Namespace}", "${ServiceAccount}")
        assert re.search(r":eks:.*:cluster/\$\{ClusterName\}$", tags["eks-cluster-arn"])
        [statement] = irsa["Statement"]
        assert statement["Action"] == "sts:AssumeRoleWithWebIdentity"
        assert re.search(r":oidc-provider/\$\{OidcProvider\}$", statement["Principal"]["Federated"])
        who = {"${OidcProvider}:aud": "sts.amazonaws.com", "${OidcProvider}:sub": "system:serviceaccount:${Namespace}:${ServiceAccount}"}
        assert statement["Condition"] == {"StringEquals": who}
        assert [terraform_object("pod_identity"), terraform_object("irsa")] == [pod_identity, irsa]

    def test_policies_are_within_the_length_limit(self):
        for policy in cloudformation():
            text = json.dumps(policy, separators=(",", ":"))
            for name, value in (("AWS::Partition", "aws-us-gov"), ("AWS::Region", "ap-southeast-1"), ("AWS::AccountId", "1" * 12), ("ClusterName", "c" * 100), ("NodeRoleName", "p" * 100 + "/" + "r" * 64), ("KmsKeyArn", "k" * 200)):
                text = text.replace(f"${{{name}}}", value)
            assert len(text) < LONGEST_POLICY

