# What Stowage needs of an AWS account: the controller's role and rights, the interruption queue and the rules that feed it.
# Give Stowage's ServiceAccount the role controller_role_arn, by EKS Pod Identity or by IRSA (see docs/operations.md), or another role the
# policies policy_arns. Give the chart settings.clusterName and settings.interruptionQueue. The role that nodes run as is not made here.
# Names of roles and policies are generated, so that clusters of one name in several regions do not collide. The same as cloudformation.yaml.

terraform {
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 6.0"
    }
  }
}

variable "cluster_name" {
  description = "Name of the cluster, as in settings.clusterName of the chart."
  type        = string
}

variable "node_role_name" {
  description = "Name of the role that nodes run as (spec.role of an EC2NodeClass, or the role of its instance profile), with its path if it has one, such as team/nodes."
  type        = string
}

variable "oidc_provider" {
  description = "For IRSA, the issuer of the cluster's tokens without https://; the account must have an identity provider for it. Empty is EKS Pod Identity."
  type        = string
  default     = ""
}

variable "namespace" {
  description = "Namespace of Stowage."
  type        = string
  default     = "stowage"
}

variable "service_account" {
  description = "Stowage's ServiceAccount."
  type        = string
  default     = "stowage"
}

variable "queue_name" {
  description = "Name of the interruption queue. Empty is the name of the cluster, which must not be longer than 80 characters then."
  type        = string
  default     = ""
}

variable "iam_path" {
  description = "Path of the role and the policies."
  type        = string
  default     = "/"
}

variable "permissions_boundary" {
  description = "ARN of the permissions boundary of the role, where an organization requires one."
  type        = string
  default     = null
}

variable "kms_key_arn" {
  description = "ARN of a customer-managed key of the volumes or images of nodes. Empty where they use the key of AWS (aws/ebs), or none."
  type        = string
  default     = ""
}

variable "tags" {
  description = "Tags of the role, the policies, the queue and the rules."
  type        = map(string)
  default     = {}
}

data "aws_partition" "current" {}
data "aws_region" "current" {}
data "aws_caller_identity" "current" {}

resource "aws_iam_policy" "launch" {
  name_prefix = "stowage-launch-"
  path        = var.iam_path
  tags        = var.tags
  description = "What the Stowage controller of cluster ${var.cluster_name} launches, tags and deletes"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid = "LaunchWithWhatIsThere"
        Effect = "Allow"
        Action = ["ec2:RunInstances", "ec2:CreateFleet"]
        Resource = [
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}::image/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}::snapshot/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:security-group/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:subnet/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:capacity-reservation/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:placement-group/*",
        ]
      },
      {
        Sid = "LaunchFromOwnTemplates"
        Effect = "Allow"
        Action = ["ec2:RunInstances", "ec2:CreateFleet"]
        Resource = "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:launch-template/*"
        Condition = {
          StringEquals = {
            "aws:ResourceTag/kubernetes.io/cluster/${var.cluster_name}" = "owned"
          }
          StringLike = {
            "aws:ResourceTag/karpenter.sh/nodepool" = "*"
          }
        }
      },
      {
        Sid = "LaunchTagged"
        Effect = "Allow"
        Action = ["ec2:RunInstances", "ec2:CreateFleet", "ec2:CreateLaunchTemplate"]
        Resource = [
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:fleet/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:instance/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:volume/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:network-interface/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:launch-template/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:spot-instances-request/*",
        ]
        Condition = {
          StringEquals = {
            "aws:RequestTag/kubernetes.io/cluster/${var.cluster_name}" = "owned"
            "aws:RequestTag/eks:eks-cluster-name" = "${var.cluster_name}"
          }
          StringLike = {
            "aws:RequestTag/karpenter.sh/nodepool" = "*"
          }
        }
      },
      {
        Sid = "TagWhatIsLaunched"
        Effect = "Allow"
        Action = "ec2:CreateTags"
        Resource = [
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:fleet/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:instance/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:volume/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:network-interface/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:launch-template/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:spot-instances-request/*",
        ]
        Condition = {
          StringEquals = {
            "aws:RequestTag/kubernetes.io/cluster/${var.cluster_name}" = "owned"
            "aws:RequestTag/eks:eks-cluster-name" = "${var.cluster_name}"
            "ec2:CreateAction" = ["RunInstances", "CreateFleet", "CreateLaunchTemplate"]
          }
          StringLike = {
            "aws:RequestTag/karpenter.sh/nodepool" = "*"
          }
        }
      },
      {
        Sid = "NameInstances"
        Effect = "Allow"
        Action = "ec2:CreateTags"
        Resource = "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:instance/*"
        Condition = {
          StringEquals = {
            "aws:ResourceTag/kubernetes.io/cluster/${var.cluster_name}" = "owned"
          }
          StringLike = {
            "aws:ResourceTag/karpenter.sh/nodepool" = "*"
          }
          StringEqualsIfExists = {
            "aws:RequestTag/eks:eks-cluster-name" = "${var.cluster_name}"
          }
          "ForAllValues:StringEquals" = {
            "aws:TagKeys" = ["eks:eks-cluster-name", "karpenter.sh/nodeclaim", "Name"]
          }
        }
      },
      {
        Sid = "DeleteOwn"
        Effect = "Allow"
        Action = ["ec2:TerminateInstances", "ec2:DeleteLaunchTemplate"]
        Resource = [
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:instance/*",
          "arn:${data.aws_partition.current.partition}:ec2:${data.aws_region.current.region}:*:launch-template/*",
        ]
        Condition = {
          StringEquals = {
            "aws:ResourceTag/kubernetes.io/cluster/${var.cluster_name}" = "owned"
          }
          StringLike = {
            "aws:ResourceTag/karpenter.sh/nodepool" = "*"
          }
        }
      },
    ]
  })
}

# A policy of its own: one alone would be near the largest size of a managed policy.
resource "aws_iam_policy" "integration" {
  name_prefix = "stowage-integration-"
  path        = var.iam_path
  tags        = var.tags
  description = "What the Stowage controller of cluster ${var.cluster_name} reads, its queue and instance profiles"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid = "ReadRegion"
        Effect = "Allow"
        Action = [
          "ec2:DescribeCapacityReservations",
          "ec2:DescribeImages",
          "ec2:DescribeInstances",
          "ec2:DescribeInstanceStatus",
          "ec2:DescribeInstanceTypeOfferings",
          "ec2:DescribeInstanceTypes",
          "ec2:DescribeLaunchTemplates",
          "ec2:DescribePlacementGroups",
          "ec2:DescribeSecurityGroups",
          "ec2:DescribeSpotInstanceRequests",
          "ec2:DescribeSpotPriceHistory",
          "ec2:DescribeSubnets",
          "ec2:GetSpotPlacementScores",
        ]
        Resource = "*"
        Condition = {
          StringEquals = {
            "aws:RequestedRegion" = "${data.aws_region.current.region}"
          }
        }
      },
      {
        Sid = "ReadImageParameters"
        Effect = "Allow"
        Action = "ssm:GetParameter"
        Resource = "arn:${data.aws_partition.current.partition}:ssm:${data.aws_region.current.region}::parameter/aws/service/*"
      },
      {
        Sid = "ReadPrices"
        Effect = "Allow"
        Action = "pricing:GetProducts"
        Resource = "*"
      },
      {
        Sid = "PassNodeRole"
        Effect = "Allow"
        Action = "iam:PassRole"
        Resource = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:role/${var.node_role_name}"
        Condition = {
          StringEquals = {
            "iam:PassedToService" = ["ec2.amazonaws.com", "ec2.amazonaws.com.cn"]
          }
        }
      },
      {
        Sid = "CreateProfiles"
        Effect = "Allow"
        Action = "iam:CreateInstanceProfile"
        Resource = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:instance-profile/*"
        Condition = {
          StringEquals = {
            "aws:RequestTag/kubernetes.io/cluster/${var.cluster_name}" = "owned"
            "aws:RequestTag/eks:eks-cluster-name" = "${var.cluster_name}"
            "aws:RequestTag/topology.kubernetes.io/region" = "${data.aws_region.current.region}"
          }
          StringLike = {
            "aws:RequestTag/karpenter.k8s.aws/ec2nodeclass" = "*"
          }
        }
      },
      {
        Sid = "TagProfiles"
        Effect = "Allow"
        Action = "iam:TagInstanceProfile"
        Resource = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:instance-profile/*"
        Condition = {
          StringEquals = {
            "aws:ResourceTag/kubernetes.io/cluster/${var.cluster_name}" = "owned"
            "aws:ResourceTag/topology.kubernetes.io/region" = "${data.aws_region.current.region}"
            "aws:RequestTag/kubernetes.io/cluster/${var.cluster_name}" = "owned"
            "aws:RequestTag/eks:eks-cluster-name" = "${var.cluster_name}"
            "aws:RequestTag/topology.kubernetes.io/region" = "${data.aws_region.current.region}"
          }
          StringLike = {
            "aws:ResourceTag/karpenter.k8s.aws/ec2nodeclass" = "*"
            "aws:RequestTag/karpenter.k8s.aws/ec2nodeclass" = "*"
          }
        }
      },
      {
        Sid = "ChangeOwnProfiles"
        Effect = "Allow"
        Action = [
          "iam:AddRoleToInstanceProfile",
          "iam:RemoveRoleFromInstanceProfile",
          "iam:DeleteInstanceProfile",
        ]
        Resource = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:instance-profile/*"
        Condition = {
          StringEquals = {
            "aws:ResourceTag/kubernetes.io/cluster/${var.cluster_name}" = "owned"
            "aws:ResourceTag/topology.kubernetes.io/region" = "${data.aws_region.current.region}"
          }
          StringLike = {
            "aws:ResourceTag/karpenter.k8s.aws/ec2nodeclass" = "*"
          }
        }
      },
      {
        Sid = "ReadProfiles"
        Effect = "Allow"
        Action = "iam:GetInstanceProfile"
        Resource = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:instance-profile/*"
      },
      {
        Sid = "ListProfiles"
        Effect = "Allow"
        Action = "iam:ListInstanceProfiles"
        Resource = "*"
      },
      {
        Sid = "ReadCluster"
        Effect = "Allow"
        Action = "eks:DescribeCluster"
        Resource = "arn:${data.aws_partition.current.partition}:eks:${data.aws_region.current.region}:${data.aws_caller_identity.current.account_id}:cluster/${var.cluster_name}"
      },
      {
        Sid = "ReadZonalShifts"
        Effect = "Allow"
        Action = "arc-zonal-shift:GetManagedResource"
        Resource = "*"
        Condition = {
          StringEquals = {
            "arc-zonal-shift:ResourceIdentifier" = "arn:${data.aws_partition.current.partition}:eks:${data.aws_region.current.region}:${data.aws_caller_identity.current.account_id}:cluster/${var.cluster_name}"
          }
        }
      },
      {
        Sid = "ReceiveInterruptions"
        Effect = "Allow"
        Action = ["sqs:DeleteMessage", "sqs:GetQueueUrl", "sqs:ReceiveMessage"]
        Resource = aws_sqs_queue.interruption.arn
      },
    ]
  })
}

# EC2 uses the key in the name of who launches. The policy of the key must allow this account.
resource "aws_iam_policy" "key" {
  count       = var.kms_key_arn == "" ? 0 : 1
  name_prefix = "stowage-key-"
  path        = var.iam_path
  tags        = var.tags
  description = "The key of the volumes of cluster ${var.cluster_name}"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid = "UseKeyOfVolumes"
        Effect = "Allow"
        Action = [
          "kms:Decrypt",
          "kms:DescribeKey",
          "kms:GenerateDataKeyWithoutPlaintext",
          "kms:ReEncryptFrom",
          "kms:ReEncryptTo",
        ]
        Resource = var.kms_key_arn
        Condition = {
          StringEquals = {
            "kms:ViaService" = "ec2.${data.aws_region.current.region}.amazonaws.com"
          }
        }
      },
      {
        Sid = "GrantKeyToVolumes"
        Effect = "Allow"
        Action = "kms:CreateGrant"
        Resource = var.kms_key_arn
        Condition = {
          StringEquals = {
            "kms:ViaService" = "ec2.${data.aws_region.current.region}.amazonaws.com"
          }
          Bool = {
            "kms:GrantIsForAWSResource" = "true"
          }
        }
      },
    ]
  })
}

resource "aws_sqs_queue" "interruption" {
  name = var.queue_name == "" ? var.cluster_name : var.queue_name
  # A notice older than this is of no use any more.
  message_retention_seconds = 300
  sqs_managed_sse_enabled   = true
  tags                      = var.tags
}

resource "aws_sqs_queue_policy" "interruption" {
  queue_url = aws_sqs_queue.interruption.url
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "EventsMayBeSent"
        Effect    = "Allow"
        Principal = { Service = "events.amazonaws.com" }
        Action    = "sqs:SendMessage"
        Resource  = aws_sqs_queue.interruption.arn
        Condition = { ArnEquals = { "aws:SourceArn" = local.rule_arns } }
      },
      {
        Sid       = "OnlyOverTls"
        Effect    = "Deny"
        Principal = "*"
        Action    = "sqs:*"
        Resource  = aws_sqs_queue.interruption.arn
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
    ]
  })
}

locals {
  events = {
    SpotInterruption = { source = "aws.ec2", detail_type = "EC2 Spot Instance Interruption Warning" }
    Rebalance = { source = "aws.ec2", detail_type = "EC2 Instance Rebalance Recommendation" }
    StateChange = { source = "aws.ec2", detail_type = "EC2 Instance State-change Notification" }
    ScheduledChange = { source = "aws.health", detail_type = "AWS Health Event" }
    ReservationInterruption = { source = "aws.ec2", detail_type = "EC2 Capacity Reservation Instance Interruption Warning" }
  }
}

resource "aws_cloudwatch_event_rule" "interruption" {
  for_each      = local.events
  name_prefix   = "stowage-${each.key}-"
  tags          = var.tags
  event_pattern = jsonencode({ source = [each.value.source], "detail-type" = [each.value.detail_type] })
}

locals {
  # The only senders to the queue: a rule of another account, or one with a transformer of its own, could forge messages.
  rule_arns = [for name in sort(keys(local.events)) : aws_cloudwatch_event_rule.interruption[name].arn]
}

resource "aws_cloudwatch_event_target" "interruption" {
  for_each  = local.events
  rule      = aws_cloudwatch_event_rule.interruption[each.key].name
  target_id = "StowageQueue"
  arn       = aws_sqs_queue.interruption.arn
}

resource "aws_iam_role" "controller" {
  name_prefix          = "stowage-controller-"
  path                 = var.iam_path
  permissions_boundary = var.permissions_boundary
  tags                 = var.tags
  description          = "The Stowage controller of cluster ${var.cluster_name}"
  assume_role_policy   = var.oidc_provider == "" ? local.pod_identity : local.irsa
}

resource "aws_iam_role_policy_attachment" "controller" {
  for_each   = { launch = aws_iam_policy.launch.arn, integration = aws_iam_policy.integration.arn }
  role       = aws_iam_role.controller.name
  policy_arn = each.value
}

resource "aws_iam_role_policy_attachment" "key" {
  count      = length(aws_iam_policy.key)
  role       = aws_iam_role.controller.name
  policy_arn = aws_iam_policy.key[0].arn
}

locals {
  pod_identity = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "PodIdentity"
        Effect    = "Allow"
        Principal = { Service = "pods.eks.amazonaws.com" }
        Action    = ["sts:AssumeRole", "sts:TagSession"]
        Condition = {
          StringEquals = {
            "aws:RequestTag/eks-cluster-arn"            = "arn:${data.aws_partition.current.partition}:eks:${data.aws_region.current.region}:${data.aws_caller_identity.current.account_id}:cluster/${var.cluster_name}"
            "aws:RequestTag/kubernetes-namespace"       = var.namespace
            "aws:RequestTag/kubernetes-service-account" = var.service_account
          }
        }
      },
    ]
  })
  irsa = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "Irsa"
        Effect    = "Allow"
        Principal = { Federated = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:oidc-provider/${var.oidc_provider}" }
        Action    = "sts:AssumeRoleWithWebIdentity"
        Condition = {
          StringEquals = {
            "${var.oidc_provider}:aud" = "sts.amazonaws.com"
            "${var.oidc_provider}:sub" = "system:serviceaccount:${var.namespace}:${var.service_account}"
          }
        }
      },
    ]
  })
}

output "controller_role_arn" {
  description = "The role for Stowage's ServiceAccount."
  value       = aws_iam_role.controller.arn
}

output "policy_arns" {
  description = "The role has them. Attach them to another one where that is used."
  value       = concat([aws_iam_policy.launch.arn, aws_iam_policy.integration.arn], aws_iam_policy.key[*].arn)
}

output "interruption_queue_name" {
  description = "For settings.interruptionQueue of the chart."
  value       = aws_sqs_queue.interruption.name
}
