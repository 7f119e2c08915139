//! Label, annotation, taint and finalizer keys.

/// NodePool that owns a NodeClaim or Node.
pub const NODE_POOL: &str = "karpenter.sh/nodepool";
/// `spot`, `on-demand` or `reserved`.
pub const CAPACITY_TYPE: &str = "karpenter.sh/capacity-type";
/// `"true"` on a Node once it is registered.
pub const REGISTERED: &str = "karpenter.sh/registered";
/// `"true"` on a Node once it is initialized.
pub const INITIALIZED: &str = "karpenter.sh/initialized";
/// Name of the EC2NodeClass a node was made from.
pub const EC2_NODE_CLASS: &str = "karpenter.k8s.aws/ec2nodeclass";
/// Zone of a node.
pub const ZONE: &str = "topology.kubernetes.io/zone";
/// Region of a node.
pub const REGION: &str = "topology.kubernetes.io/region";
/// EC2 zone id of a node.
pub const ZONE_ID: &str = "topology.k8s.aws/zone-id";
/// Instance type of a node.
pub const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";
/// CPU architecture of a node.
pub const ARCH: &str = "kubernetes.io/arch";
/// Operating system of a node.
pub const OS: &str = "kubernetes.io/os";
/// Host name of a node.
pub const HOSTNAME: &str = "kubernetes.io/hostname";
/// Taint put on a node about to be disrupted.
pub const DISRUPTED_TAINT: &str = "karpenter.sh/disrupted";
/// Taint a node boots with until it is registered.
pub const UNREGISTERED_TAINT: &str = "karpenter.sh/unregistered";
/// Finalizer on NodeClaims and Nodes.
pub const TERMINATION_FINALIZER: &str = "karpenter.sh/termination";
/// Annotation that forbids disruption of a pod or node.
pub const DO_NOT_DISRUPT: &str = "karpenter.sh/do-not-disrupt";
/// Drift hash of a NodePool, copied to its NodeClaims.
pub const NODE_POOL_HASH: &str = "karpenter.sh/nodepool-hash";
/// Version of the algorithm behind [`NODE_POOL_HASH`].
pub const NODE_POOL_HASH_VERSION: &str = "karpenter.sh/nodepool-hash-version";
/// Pods a NodeClaim was bought for: a JSON list of `namespace/name`.
pub const PLANNED_PODS: &str = "stowage.dev/planned-pods";
/// When the holds of [`PLANNED_PODS`] end: RFC 3339.
pub const HOLD_UNTIL: &str = "stowage.dev/hold-until";
