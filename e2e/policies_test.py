#!/usr/bin/env python3
"""docs/aws names exactly the actions that src/cloud/ec2 calls, in CloudFormation and in Terraform alike. What only `stowage preflight`
asks for is named in docs/operations.md."""

import json
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Managed policies may be so long, white space not counted.
LONGEST_POLICY = 6144
# Rights that no call of ours names: EC2 asks for them when an instance with a role is launched, and IAM when a profile is made with tags.
IMPLIED = {"iam:PassRole", "iam:TagInstanceProfile"}
# Operations as the SDK spells them, called on a client of a service: `ec2.describe_subnets()`. Kube's client and options have methods of their own.
CALL = re.compile(r"\b(?:client|arc|ec2|eks|iam|pricing|quotas|sqs|ssm|sts)\s*\.((?!as_|is_|apiserver_)[a-z]+_\w+)\(\)")


def snake(action):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", action.partition(":")[2]).lower()


def called(preflight=False):
    """Operations that the controller sends, or those of `stowage preflight`; tests left out."""
    found = set()
    ec2 = ROOT / "src" / "cloud" / "ec2"
    for path in ec2.rglob("*.rs"):
        parts = path.relative_to(ec2).parts
        if path.stem.endswith("tests") or "tests" in parts or (parts[0] == "preflight") != preflight:
            continue
        found |= set(CALL.findall(path.read_text().partition("#[cfg(test)]")[0]))
    return found


def cloudformation():
    text = (ROOT / "docs" / "aws" / "cloudformation.yaml").read_text()
    return [json.loads(block) for block in re.findall(r"Fn::Sub: \|\n(.*?)\n\n", text, re.S)]


def actions(policies):
    return {action for policy in policies for entry in policy["Statement"] for action in (lambda a: [a] if isinstance(a, str) else a)(entry["Action"])}


class Policies(unittest.TestCase):
    def test_every_call_is_allowed_and_no_other(self):
        allowed = actions(cloudformation())
        self.assertEqual(sorted(called()), sorted(snake(action) for action in allowed - IMPLIED))

    def test_what_only_preflight_asks_for_is_said(self):
        said = (ROOT / "docs" / "operations.md").read_text().partition("## Preflight")[2].partition("\n## ")[0].rpartition("that the controller does without")[2]
        named = {snake(action) for action in re.findall(r"`([a-z0-9]+:[A-Z]\w+)`", said)}
        self.assertEqual(sorted(named), sorted(called(preflight=True) - called()))

    def test_terraform_allows_the_same(self):
        text = (ROOT / "docs" / "aws" / "main.tf").read_text().partition('resource "aws_sqs_queue" ')[0]
        found = {action for given in re.findall(r"^ +Action += (\[.*?\]|\".*?\")$", text, re.M | re.S) for action in re.findall(r'"([\w-]+:\w+)"', given)}
        self.assertEqual(sorted(found), sorted(actions(cloudformation())))

    def test_a_policy_is_no_longer_than_may_be(self):
        for policy in cloudformation():
            text = json.dumps(policy, separators=(",", ":"))
            for name, value in (("AWS::Partition", "aws-us-gov"), ("AWS::Region", "ap-southeast-1"), ("AWS::AccountId", "1" * 12), ("ClusterName", "c" * 100), ("NodeRoleName", "r" * 64)):
                text = text.replace(f"${{{name}}}", value)
            self.assertLess(len(text), LONGEST_POLICY)


if __name__ == "__main__":
    unittest.main(verbosity=2)
