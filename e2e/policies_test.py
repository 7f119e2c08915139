#!/usr/bin/env python3
"""docs/aws names exactly the actions that src/cloud/ec2 calls, whom the controller's role trusts, the queue and the events that
src/cloud/ec2/interruption/messages.rs knows, in CloudFormation and in Terraform alike. What only `stowage preflight` asks for is named in
docs/operations.md."""

import json
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Managed policies may be so long, white space not counted.
LONGEST_POLICY = 6144
# Rights that no call of ours names: EC2 asks for them when an instance with a role is launched, and IAM when a profile is made with tags.
IMPLIED = {"iam:PassRole", "iam:TagInstanceProfile"}
# What Terraform and CloudFormation call the same.
REFERENCES = {
    "data.aws_partition.current.partition": "AWS::Partition",
    "data.aws_region.current.region": "AWS::Region",
    "data.aws_caller_identity.current.account_id": "AWS::AccountId",
    "aws_sqs_queue.interruption.arn": "InterruptionQueue.Arn",
    "var.cluster_name": "ClusterName",
    "var.node_role_name": "NodeRoleName",
    "var.oidc_provider": "OidcProvider",
    "var.namespace": "Namespace",
    "var.service_account": "ServiceAccount",
}
# Operations that a right of another name allows.
ALLOWED_BY = {"delete_message_batch": "delete_message"}
# Operations as the SDK spells them, called on a client of a service: `ec2.describe_subnets()`. Kube's client and options have methods of their own.
CALL = re.compile(r"\b(?:client|arc|ec2|eks|iam|pricing|quotas|sqs|ssm|sts)\s*\.((?!as_|is_|apiserver_)[a-z]+_\w+)\(\)")


def snake(action):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", action.partition(":")[2]).lower()


def called(preflight=False):
    """Rights that the controller's calls need, or those of `stowage preflight`; tests left out."""
    found = set()
    ec2 = ROOT / "src" / "cloud" / "ec2"
    for path in ec2.rglob("*.rs"):
        parts = path.relative_to(ec2).parts
        if path.stem.endswith("tests") or "tests" in parts or (parts[0] == "preflight") != preflight:
            continue
        found |= set(CALL.findall(path.read_text().partition("#[cfg(test)]")[0]))
    return {ALLOWED_BY.get(name, name) for name in found}


def text_of(name):
    return (ROOT / "docs" / "aws" / name).read_text()


def documents():
    """The policies of CloudFormation, those that say whom a role trusts first."""
    text = text_of("cloudformation.yaml")
    return [json.loads(block) for block in re.findall(r"Fn::Sub: \|\n(.*?)\n\n", text, re.S)]


def trusts(policy):
    return any("Principal" in entry for entry in policy["Statement"])


def cloudformation():
    """What the controller may do."""
    return [policy for policy in documents() if not trusts(policy)]


def terraform_object(name, resource=""):
    """An object that Terraform's file encodes as JSON under this name, the first in or after a resource, with CloudFormation's names of
    what it refers to."""
    text = text_of("main.tf").partition(resource)[2] if resource else text_of("main.tf")
    text = re.search(rf"^  {name} = jsonencode\((.*?)^  }}\)$", text, re.M | re.S)[1] + "}"
    for own, theirs in REFERENCES.items():
        text = text.replace(f"${{{own}}}", f"${{{theirs}}}").replace(f"= {own}\n", f'= "${{{theirs}}}"\n')
    text = re.sub(r'"?([^\s"]+)"? += ', r'"\1": ', text)
    text = re.sub(r'(["}\]])\n(?=\s*")', r"\1,\n", text)
    return json.loads(re.sub(r",(?=\s*[\]}])", "", text))


def resource(name, pattern):
    """A resource of a file, from the line after its name to its end."""
    return re.search(pattern, text_of(name), re.M | re.S)[1]


def flow(text):
    """A value of CloudFormation's YAML in one line."""
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


class Policies(unittest.TestCase):
    def test_every_call_is_allowed_and_no_other(self):
        allowed = actions(cloudformation())
        self.assertEqual(sorted(called()), sorted(snake(action) for action in allowed - IMPLIED))

    def test_what_only_preflight_asks_for_is_said(self):
        said = (ROOT / "docs" / "operations.md").read_text().partition("## Preflight")[2].partition("\n## ")[0].rpartition("that the controller does not need")[2]
        named = {snake(action) for action in re.findall(r"`([a-z0-9]+:[A-Z]\w+)`", said)}
        self.assertEqual(sorted(named), sorted(called(preflight=True) - called()))

    def test_terraform_allows_the_same_on_the_same_resources_under_the_same_conditions(self):
        found = [terraform_object("policy", f'resource "aws_iam_policy" "{name}" ') for name in ("launch", "integration")]
        self.assertEqual(found, cloudformation())

    def test_the_events_that_are_sent_are_those_that_are_known(self):
        known = set(re.findall(r'\("(aws\.\w+)", "([^"]+)"\) =>', (ROOT / "src" / "cloud" / "ec2" / "interruption" / "messages.rs").read_text()))
        stack, terraform = text_of("cloudformation.yaml"), text_of("main.tf")
        rules = re.findall(r'^      EventPattern: {source: \[([\w.]+)\], detail-type: \["([^"]+)"\]}\n      Targets: \[{Id: \w+, Arn: !GetAtt InterruptionQueue\.Arn}\]$', stack, re.M)
        self.assertEqual((set(rules), len(rules)), (known, stack.count("AWS::Events::Rule")))
        self.assertEqual(len(known), len(rules), "one rule for each")
        events = re.search(r"^  events = {$(.*?)^  }$", terraform, re.M | re.S)[1]
        found = re.findall(r'^    \w+ += { source = "([^"]+)", detail_type = "([^"]+)" }$', events, re.M)
        self.assertEqual((sorted(found), len(found)), (sorted(known), len(events.strip().splitlines())))
        self.assertIn('event_pattern = jsonencode({ source = [each.value.source], "detail-type" = [each.value.detail_type] })', terraform)

    def test_only_aws_may_send_to_the_queue_and_nobody_without_tls(self):
        policy = queue_policy()
        sending, tls = policy["Statement"]
        queue = "${InterruptionQueue.Arn}"
        senders = {"Service": ["events.amazonaws.com", "sqs.amazonaws.com"]}
        allowed = {"Sid": "EventsMayBeSent", "Effect": "Allow", "Principal": senders, "Action": "sqs:SendMessage", "Resource": queue}
        self.assertEqual(sending, allowed)
        insecure = {"Bool": {"aws:SecureTransport": "false"}}
        denied = {"Sid": "OnlyOverTls", "Effect": "Deny", "Principal": "*", "Action": "sqs:*", "Resource": queue, "Condition": insecure}
        self.assertEqual(tls, denied)
        self.assertEqual(terraform_object("policy", 'resource "aws_sqs_queue_policy" "interruption" '), policy)
        stack = resource("cloudformation.yaml", r"^  InterruptionQueuePolicy:$(.*?)^$")
        self.assertIn("\n      Queues: [!Ref InterruptionQueue]\n", stack)
        terraform = resource("main.tf", r'^resource "aws_sqs_queue_policy" "interruption" {$(.*?)^}$')
        self.assertIn("\n  queue_url = aws_sqs_queue.interruption.url\n", terraform)

    def test_the_queue_is_encrypted_and_keeps_messages_as_long_as_they_are_of_use(self):
        stack = resource("cloudformation.yaml", r"^  InterruptionQueue:$(.*?)^$")
        settings = dict(re.findall(r"^      (\w+): (.+)$", stack, re.M))
        self.assertEqual(settings, {"QueueName": "!Ref ClusterName", "MessageRetentionPeriod": "300", "SqsManagedSseEnabled": "true"})
        terraform = resource("main.tf", r'^resource "aws_sqs_queue" "interruption" {$(.*?)^}$')
        settings = dict(re.findall(r"^  (\w+) += (.+)$", terraform, re.M))
        self.assertEqual(settings, {"name": "var.cluster_name", "message_retention_seconds": "300", "sqs_managed_sse_enabled": "true"})

    def test_the_role_trusts_one_service_account_by_pod_identity_or_by_irsa(self):
        pod_identity, irsa = [policy for policy in documents() if trusts(policy)]
        [statement] = pod_identity["Statement"]
        self.assertEqual((statement["Principal"], statement["Action"]), ({"Service": "pods.eks.amazonaws.com"}, ["sts:AssumeRole", "sts:TagSession"]))
        tags = {key.partition("/")[2]: value for key, value in statement["Condition"]["StringEquals"].items()}
        self.assertEqual((tags["kubernetes-namespace"], tags["kubernetes-service-account"]), ("${Namespace}", "${ServiceAccount}"))
        self.assertRegex(tags["eks-cluster-arn"], r":eks:.*:cluster/\$\{ClusterName\}$")
        [statement] = irsa["Statement"]
        self.assertEqual(statement["Action"], "sts:AssumeRoleWithWebIdentity")
        self.assertRegex(statement["Principal"]["Federated"], r":oidc-provider/\$\{OidcProvider\}$")
        who = {"${OidcProvider}:aud": "sts.amazonaws.com", "${OidcProvider}:sub": "system:serviceaccount:${Namespace}:${ServiceAccount}"}
        self.assertEqual(statement["Condition"], {"StringEquals": who})
        self.assertEqual([terraform_object("pod_identity"), terraform_object("irsa")], [pod_identity, irsa])

    def test_a_policy_is_no_longer_than_may_be(self):
        for policy in cloudformation():
            text = json.dumps(policy, separators=(",", ":"))
            for name, value in (("AWS::Partition", "aws-us-gov"), ("AWS::Region", "ap-southeast-1"), ("AWS::AccountId", "1" * 12), ("ClusterName", "c" * 100), ("NodeRoleName", "r" * 64)):
                text = text.replace(f"${{{name}}}", value)
            self.assertLess(len(text), LONGEST_POLICY)


if __name__ == "__main__":
    unittest.main(verbosity=2)
