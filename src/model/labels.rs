//! Label, annotation, taint and finalizer keys, and rules about label keys.

use std::collections::BTreeMap;

/// NodePool that owns a NodeClaim or Node.
pub const NODE_POOL: &str = "karpenter.sh/nodepool";
/// `spot`, `on-demand` or `reserved`.
pub const CAPACITY_TYPE: &str = "karpenter.sh/capacity-type";
/// `"true"` on a Node once it is registered.
pub const REGISTERED: &str = "karpenter.sh/registered";
/// `"true"` on a Node once it is initialized.
pub const INITIALIZED: &str = "karpenter.sh/initialized";
/// `"true"` on a Node whose bootstrap sets its taints: they are not synced from the NodeClaim at registration.
pub const DO_NOT_SYNC_TAINTS: &str = "karpenter.sh/do-not-sync-taints";
/// EC2NodeClass that a node was launched from.
pub const EC2_NODE_CLASS: &str = "karpenter.k8s.aws/ec2nodeclass";
/// Set to `karpenter` on a node that drains, so that load balancers leave it.
pub const EXCLUDE_FROM_LOAD_BALANCERS: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
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
/// Windows build of a node.
pub const WINDOWS_BUILD: &str = "node.kubernetes.io/windows-build";

/// Virtual CPUs of the instance type.
pub const INSTANCE_CPU: &str = "karpenter.k8s.aws/instance-cpu";
/// Memory of the instance type in MiB.
pub const INSTANCE_MEMORY: &str = "karpenter.k8s.aws/instance-memory";
/// Category of the instance type, such as `m`.
pub const INSTANCE_CATEGORY: &str = "karpenter.k8s.aws/instance-category";
/// Family of the instance type, such as `m7g`.
pub const INSTANCE_FAMILY: &str = "karpenter.k8s.aws/instance-family";
/// Generation of the instance type, such as `7`.
pub const INSTANCE_GENERATION: &str = "karpenter.k8s.aws/instance-generation";
/// Size of the instance type, such as `large`.
pub const INSTANCE_SIZE: &str = "karpenter.k8s.aws/instance-size";
/// `default` or `dedicated`.
pub const INSTANCE_TENANCY: &str = "karpenter.k8s.aws/instance-tenancy";
/// Capacity reservation that an instance was launched into.
pub const CAPACITY_RESERVATION_ID: &str = "karpenter.k8s.aws/capacity-reservation-id";
/// `default` or `capacity-block`.
pub const CAPACITY_RESERVATION_TYPE: &str = "karpenter.k8s.aws/capacity-reservation-type";
/// Whether the owner of the reservation can reclaim the instance.
pub const CAPACITY_RESERVATION_INTERRUPTIBLE: &str = "karpenter.k8s.aws/capacity-reservation-interruptible";
/// Placement group that an instance was launched into.
pub const PLACEMENT_GROUP_ID: &str = "karpenter.k8s.aws/placement-group-id";
/// Partition of the placement group.
pub const PLACEMENT_GROUP_PARTITION: &str = "karpenter.k8s.aws/placement-group-partition";

/// Keys of `karpenter.k8s.aws` that a NodePool's labels and requirements and a NodeClaim's requirements may name; other keys of the
/// domain are rejected at admission.
pub const EC2_LABELS: [&str; 29] = [
    EC2_NODE_CLASS,
    INSTANCE_TENANCY,
    CAPACITY_RESERVATION_TYPE,
    CAPACITY_RESERVATION_ID,
    CAPACITY_RESERVATION_INTERRUPTIBLE,
    "karpenter.k8s.aws/instance-encryption-in-transit-supported",
    "karpenter.k8s.aws/nitro-sandbox",
    INSTANCE_CATEGORY,
    "karpenter.k8s.aws/instance-hypervisor",
    INSTANCE_FAMILY,
    INSTANCE_GENERATION,
    "karpenter.k8s.aws/instance-local-nvme",
    INSTANCE_SIZE,
    INSTANCE_CPU,
    "karpenter.k8s.aws/instance-cpu-manufacturer",
    "karpenter.k8s.aws/instance-cpu-sustained-clock-speed-mhz",
    INSTANCE_MEMORY,
    "karpenter.k8s.aws/instance-ebs-bandwidth",
    "karpenter.k8s.aws/instance-network-bandwidth",
    "karpenter.k8s.aws/instance-gpu-name",
    "karpenter.k8s.aws/instance-gpu-manufacturer",
    "karpenter.k8s.aws/instance-gpu-count",
    "karpenter.k8s.aws/instance-gpu-memory",
    "karpenter.k8s.aws/instance-accelerator-name",
    "karpenter.k8s.aws/instance-accelerator-manufacturer",
    "karpenter.k8s.aws/instance-accelerator-count",
    "karpenter.k8s.aws/instance-capability-flex",
    PLACEMENT_GROUP_ID,
    PLACEMENT_GROUP_PARTITION,
];

/// Well-known keys outside `karpenter.k8s.aws`: a new node can have any value of them that an instance type offers.
const WELL_KNOWN: [&str; 9] = [NODE_POOL, ZONE, ZONE_ID, REGION, INSTANCE_TYPE, ARCH, OS, CAPACITY_TYPE, WINDOWS_BUILD];

/// Tag keys that an EC2NodeClass may not set (besides those that start with `kubernetes.io/cluster`).
pub const RESTRICTED_TAGS: [&str; 4] = ["eks:eks-cluster-name", NODE_POOL, "karpenter.sh/nodeclaim", EC2_NODE_CLASS];

/// Taint of a node that is being disrupted.
pub const DISRUPTED_TAINT: &str = "karpenter.sh/disrupted";
/// The planned taint: keeps all but the planned pods off a node that was just opened. Its value is the UID of the node's
/// NodeClaim; the planned pods get a toleration of it.
pub const PLANNED_TAINT: &str = "stowage.dev/planned";
/// Taint a node boots with until it is registered.
pub const UNREGISTERED_TAINT: &str = "karpenter.sh/unregistered";
/// Finalizer on NodeClaims and Nodes.
pub const TERMINATION_FINALIZER: &str = "karpenter.sh/termination";
/// Finalizer on EC2NodeClasses.
pub const EC2_TERMINATION_FINALIZER: &str = "karpenter.k8s.aws/termination";
/// Annotation that forbids disruption of a pod or node.
pub const DO_NOT_DISRUPT: &str = "karpenter.sh/do-not-disrupt";
/// Annotation that forbids the repair of an unhealthy node, with the values of [`DO_NOT_DISRUPT`] (Karpenter 1.15).
pub const DO_NOT_REPAIR: &str = "karpenter.sh/do-not-repair";
/// Drift hash of a NodePool, copied to its NodeClaims.
pub const NODE_POOL_HASH: &str = "karpenter.sh/nodepool-hash";
/// Version of the algorithm behind [`NODE_POOL_HASH`].
pub const NODE_POOL_HASH_VERSION: &str = "karpenter.sh/nodepool-hash-version";
/// Drift hash of an EC2NodeClass, copied to its NodeClaims.
pub const EC2_NODE_CLASS_HASH: &str = "karpenter.k8s.aws/ec2nodeclass-hash";
/// Version of the algorithm behind [`EC2_NODE_CLASS_HASH`].
pub const EC2_NODE_CLASS_HASH_VERSION: &str = "karpenter.k8s.aws/ec2nodeclass-hash-version";
/// Cost of the deletion of a pod, compared with other pods of its controller: an integer of 32 bits; absent or invalid is 0.
pub const POD_DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// `"true"` on a pod of a Deployment: its successor is ready before the pod is evicted in a voluntary disruption.
pub const SURGE: &str = "stowage.dev/surge";
/// On such a pod that left its ReplicaSet for that: what brings it back, as JSON.
pub const SURGED: &str = "stowage.dev/surged";
/// Label by which a ReplicaSet of a Deployment selects its pods.
pub const POD_TEMPLATE_HASH: &str = "pod-template-hash";
/// On a NodePool: the time in which the saving of a consolidation must pay for its evictions.
pub const CONSOLIDATION_PAYBACK: &str = "stowage.dev/consolidation-payback";
/// On a NodePool: the least saving of a consolidation, as a percentage of the price of the removed nodes.
pub const CONSOLIDATION_MIN_SAVINGS: &str = "stowage.dev/consolidation-min-savings";
/// On a NodePool: the pods of a workload of which a pod is younger than this are not evicted by consolidation.
pub const MIN_EVICTION_INTERVAL: &str = "stowage.dev/min-eviction-interval";
/// Deadline of a NodeClaim's drain, RFC 3339.
pub const TERMINATION_TIMESTAMP: &str = "karpenter.sh/nodeclaim-termination-timestamp";
/// Whether a NodeClaim was planned with fewer distinct values than `minValues`: `"true"` or `"false"`.
pub const MIN_VALUES_RELAXED: &str = "karpenter.sh/nodeclaim-min-values-relaxed";
/// `"true"` on a NodeClaim whose instance has its tags.
pub const TAGGED: &str = "karpenter.k8s.aws/tagged";
/// `"true"` on a NodeClaim whose instance has the tag of its cluster, which old versions did not set.
pub const CLUSTER_NAME_TAGGED: &str = "compatibility.karpenter.k8s.aws/cluster-name-tagged";
/// Instance profile of a NodeClaim's instance.
pub const INSTANCE_PROFILE_NAME: &str = "karpenter.k8s.aws/instance-profile-name";
/// Pods that a NodeClaim was purchased for: a JSON list of `namespace/name`.
pub const PLANNED_PODS: &str = "stowage.dev/planned-pods";
/// Owner by pod, for the planned pods that were displaced from another node: a JSON object of `{"uid", "at_ms", "until_ms", "source", "node"}`.
pub const PLANNED_OWNERS: &str = "stowage.dev/planned-owners";
/// The offering that the plan assumed: `type/zone/capacity-type`.
pub const PLANNED_OFFERING: &str = "stowage.dev/planned-offering";
/// The most that the instance of a NodeClaim may cost, in USD per hour. Absent: no limit.
pub const MAX_PRICE: &str = "stowage.dev/max-price";
/// Price of a NodeClaim's instance and of its Node, in USD per hour.
pub const USD_PER_HOUR: &str = "stowage.dev/usd-per-hour";
/// How many times in a row consolidation replaced young nodes before that of this NodeClaim, itself included: an integer. Absent: 0.
pub const REPLACEMENT_GENERATION: &str = "stowage.dev/replacement-generation";
/// Launch group of the NodeClaim, `id/size`: equal NodeClaims that share CreateFleet calls. Absent on a NodeClaim without a group.
pub const LAUNCH_GROUP: &str = "stowage.dev/launch-group";
/// Why a NodeClaim is being disrupted, and the deadline: `reason/RFC 3339`.
pub const DISRUPTING: &str = "stowage.dev/disrupting";
/// The move that a NodeClaim is a source of, a JSON object of `{"id", "at", "give_up", "sources", "usd_per_hour"}`.
pub const MOVE: &str = "stowage.dev/move";
/// On a Node: time at which a hold on it last ended. The watch event makes kube-scheduler retry pods that only holds prevented.
pub const HOLD_RELEASED: &str = "stowage.dev/hold-released";
/// Time at which the holds of [`PLANNED_PODS`] end, RFC 3339.
pub const HOLD_UNTIL: &str = "stowage.dev/hold-until";

/// IDs of the admission rules that changed a pod, such as `n1,n13`.
pub const NORMALIZED: &str = "stowage.dev/normalized";
/// Label with the value `ignore` on pods and namespaces that the webhook leaves unchanged.
pub const WEBHOOK: &str = "stowage.dev/webhook";
/// Set on a NodeClaim if an overlay changed its prices.
pub const PRICE_OVERLAY_APPLIED: &str = "karpenter.sh/price-overlay-applied";
/// On a Node of the simulated cloud: the event to trigger for its instance.
pub const SIMULATED_EVENT: &str = "simulated.stowage.dev/event";
/// On a Node of the simulated cloud: why the requested event had no effect.
pub const SIMULATED_EVENT_ERROR: &str = "simulated.stowage.dev/event-error";
/// Dropped in Karpenter v1; the webhook copies it to [`DO_NOT_DISRUPT`].
pub const DO_NOT_EVICT: &str = "karpenter.sh/do-not-evict";

/// The current key of an alias: `beta.kubernetes.io/*`, `failure-domain.beta.kubernetes.io/*` and the zone key of the EBS CSI driver
/// (Karpenter core reference 3.7, Karpenter AWS reference 2.2). Every other key is returned unchanged.
pub fn normalize_key(key: &str) -> &str {
    match key {
        "failure-domain.beta.kubernetes.io/zone" | "topology.ebs.csi.aws.com/zone" => ZONE,
        "failure-domain.beta.kubernetes.io/region" => REGION,
        "beta.kubernetes.io/arch" => ARCH,
        "beta.kubernetes.io/os" => OS,
        "beta.kubernetes.io/instance-type" => INSTANCE_TYPE,
        key => key,
    }
}

/// The value of a label of a node, also under an alias of its key; the host name is the node's name where the label is missing.
pub fn of_node<'n>(labels: &'n BTreeMap<String, String>, name: &'n str, key: &str) -> Option<&'n str> {
    let has_alias = [ZONE, REGION, ARCH, OS, INSTANCE_TYPE].contains(&key);
    let aliased =
        || labels.iter().filter(|_| has_alias).find(|(have, _)| normalize_key(have) == key).map(|(_, value)| value);
    labels.get(key).or_else(aliased).map(String::as_str).or_else(|| (key == HOSTNAME).then_some(name))
}

/// The keys of [`is_well_known`].
pub fn well_known() -> impl Iterator<Item = &'static str> {
    WELL_KNOWN.into_iter().chain(EC2_LABELS.into_iter().filter(|key| *key != EC2_NODE_CLASS))
}

/// Whether the instance type or offering decides the value of a key, so that a NodePool without a requirement on it leaves it open.
/// `karpenter.k8s.aws/ec2nodeclass` is not well-known: the NodePool fixes its value.
pub fn is_well_known(key: &str) -> bool {
    WELL_KNOWN.contains(&key) || (key != EC2_NODE_CLASS && EC2_LABELS.contains(&key))
}

/// Whether a NodePool may not name a key and a pod may not require it: keys of `karpenter.sh` and `karpenter.k8s.aws` and
/// their subdomains that are neither well-known nor allowed, and the host name.
pub fn is_restricted(key: &str) -> bool {
    if key == HOSTNAME {
        return true;
    }
    if is_well_known(key) || EC2_LABELS.contains(&key) {
        return false;
    }
    let Some((domain, _)) = key.split_once('/') else {
        return false;
    };
    ["karpenter.sh", "karpenter.k8s.aws"]
        .into_iter()
        .any(|ours| domain.strip_suffix(ours).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
}

/// Whether a value of [`DO_NOT_DISRUPT`] protects: any but none and an explicit `false`. A value that is not understood must not lead to a
/// disruption.
pub fn forbids_disruption(value: &str) -> bool {
    !value.is_empty() && value != "false"
}

/// True for the value of a label: empty, or at most 63 letters, digits, `-`, `_` and `.` with a letter or digit at both ends.
pub fn is_label_value(text: &str) -> bool {
    let bytes = text.as_bytes();
    let alphanumeric = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    bytes.len() <= 63
        && alphanumeric(bytes.first())
        && alphanumeric(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legacy_keys_are_normalized_to_current_keys() {
        for (old, new) in [
            ("failure-domain.beta.kubernetes.io/zone", ZONE),
            ("failure-domain.beta.kubernetes.io/region", REGION),
            ("beta.kubernetes.io/arch", ARCH),
            ("beta.kubernetes.io/os", OS),
            ("beta.kubernetes.io/instance-type", INSTANCE_TYPE),
            ("topology.ebs.csi.aws.com/zone", ZONE),
            ("example.com/zone", "example.com/zone"),
            (ZONE, ZONE),
        ] {
            assert_eq!(normalize_key(old), new, "{old}");
        }
    }

    #[test]
    fn keys_of_our_domains_are_restricted_unless_allowed() {
        for (key, restricted, well_known) in [
            (CAPACITY_TYPE, false, true),
            (NODE_POOL, false, true),
            (ZONE_ID, false, true),
            (INSTANCE_CPU, false, true),
            (EC2_NODE_CLASS, false, false),
            (HOSTNAME, true, false),
            (REGISTERED, true, false),
            ("karpenter.sh/custom", true, false),
            ("sub.karpenter.sh/custom", true, false),
            ("karpenter.k8s.aws/custom", true, false),
            ("mykarpenter.sh/custom", false, false),
            ("karpenter.sh", false, false),
            ("kubernetes.io/custom", false, false),
            ("team", false, false),
        ] {
            assert_eq!(is_restricted(key), restricted, "restricted: {key}");
            assert_eq!(is_well_known(key), well_known, "well-known: {key}");
        }
    }
}
