//! The registry of annotations, behavioral labels, taints and finalizers that Stowage writes or reads.
//! `docs/reference/annotations.md` is rendered from it. Labels that only select instance types are [`labels::EC2_LABELS`].

use crate::labels;

/// The part of an object that carries the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Annotation,
    Label,
    Taint,
    Finalizer,
}

/// A key that Stowage writes or reads.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub key: &'static str,
    pub form: Form,
    /// Kinds of the objects that carry it.
    pub objects: &'static str,
    /// Who writes it.
    pub writer: &'static str,
    pub meaning: &'static str,
}

const STOWAGE: &str = "Stowage";
const USER: &str = "user";

const fn entry(
    form: Form,
    key: &'static str,
    objects: &'static str,
    writer: &'static str,
    meaning: &'static str,
) -> Entry {
    Entry { key, form, objects, writer, meaning }
}

/// Every key, by form; keys of `stowage.dev` first.
pub const ENTRIES: &[Entry] = &[
    entry(
        Form::Annotation,
        labels::PLANNED_PODS,
        "NodeClaim",
        STOWAGE,
        "pods that the node was purchased for, or that a later plan added: a JSON list of `namespace/name`",
    ),
    entry(
        Form::Annotation,
        labels::PLANNED_OWNERS,
        "NodeClaim",
        STOWAGE,
        "for displaced pods: the `uid` of the controller and the time of the plan (`at_ms`), by pod, and for pods of a move the NodeClaim and the Node that they leave (`source`, `node`), until whose \
         end, and until which time at most (`until_ms`), room is kept. A successor pod takes the reserved room",
    ),
    entry(
        Form::Annotation,
        labels::HOLD_UNTIL,
        "NodeClaim",
        STOWAGE,
        "when the holds expire, RFC 3339; absent or unreadable means no hold",
    ),
    entry(
        Form::Annotation,
        labels::PLANNED_OFFERING,
        "NodeClaim",
        STOWAGE,
        "`type/zone/capacity-type` that the plan assumed; the labels say what was launched",
    ),
    entry(
        Form::Annotation,
        labels::MAX_PRICE,
        "NodeClaim",
        STOWAGE,
        "the most that the instance may cost, in USD per hour: 120 % of the planned price of a spot node, and of a replacement not more than its move allows; absent or unreadable means no limit",
    ),
    entry(
        Form::Annotation,
        labels::USD_PER_HOUR,
        "NodeClaim, Node",
        STOWAGE,
        "price of the instance in USD per hour, as known here: at the launch, and again when it has changed by a tenth. next to nothing in a capacity reservation, which is paid for anyway; absent while it is unknown",
    ),
    entry(
        Form::Annotation,
        labels::REPLACEMENT_GENERATION,
        "NodeClaim",
        STOWAGE,
        "of a new node of consolidation: 1, or one more than that of a node it replaces that is younger than an hour; absent is 0",
    ),
    entry(
        Form::Annotation,
        labels::LAUNCH_GROUP,
        "NodeClaim",
        STOWAGE,
        "`id/size` of the group of equal NodeClaims that share a CreateFleet call; absent on a NodeClaim that is alone",
    ),
    entry(
        Form::Annotation,
        labels::MOVE,
        "NodeClaim",
        STOWAGE,
        "the move that the node is a source of: `id`, when it began (`at`) and is given up (`give_up`), the NodeClaims of all its `sources`, and \
         what it saves (`usd_per_hour`)",
    ),
    entry(
        Form::Annotation,
        labels::DISRUPTING,
        "NodeClaim",
        STOWAGE,
        "`reason/RFC 3339`: why the node is being disrupted, and the deadline; an empty time means no deadline",
    ),
    entry(
        Form::Annotation,
        labels::HOLD_RELEASED,
        "Node",
        STOWAGE,
        "when a hold on the node last ended, or when its pods were last retried (extender mode); it exists only to cause a watch \
         event",
    ),
    entry(
        Form::Annotation,
        labels::NORMALIZED,
        "Pod",
        STOWAGE,
        "ids of the admission rules that changed the pod, such as `n1,n13`",
    ),
    entry(
        Form::Annotation,
        labels::CONSOLIDATION_PAYBACK,
        "NodePool",
        USER,
        "time in which the saving of a consolidation must pay for its evictions and new nodes, such as `30m`; 1h by default, at least 1m. \
         The longer, the more pods are moved for a saving",
    ),
    entry(
        Form::Annotation,
        labels::CONSOLIDATION_MIN_SAVINGS,
        "NodePool",
        USER,
        "the least saving of a consolidation as a percentage of the price of the removed nodes, such as `10%`; 5% by default where new nodes \
         are needed, otherwise 0%",
    ),
    entry(
        Form::Annotation,
        labels::MIN_EVICTION_INTERVAL,
        "NodePool",
        USER,
        "consolidation evicts no pod of a workload whose newest pod is younger than this, such as `30m`; 0s by default. A workload is what \
         controls its pods, such as a ReplicaSet",
    ),
    entry(
        Form::Annotation,
        labels::SURGE,
        "Pod",
        USER,
        "`true` on a pod of a Deployment: its successor is ready before it is evicted in a voluntary disruption",
    ),
    entry(
        Form::Annotation,
        labels::SURGED,
        "Pod",
        STOWAGE,
        "such a pod has left its ReplicaSet (`replica_set`, `uid`), of which so many pods were ready (`ready`, itself included); with the label \
         `pod-template-hash` (`hash`) it goes back",
    ),
    entry(
        Form::Annotation,
        labels::SIMULATED_EVENT,
        "Node",
        USER,
        "triggers an event on a simulated instance, such as `spot-interruption`; only with `--cloud simulated`",
    ),
    entry(
        Form::Annotation,
        labels::SIMULATED_EVENT_ERROR,
        "Node",
        "Stowage (`--cloud simulated`)",
        "why the requested event had no effect",
    ),
    entry(
        Form::Annotation,
        labels::NODE_POOL_HASH,
        "NodePool, NodeClaim",
        STOWAGE,
        "drift hash of the NodePool, copied to its NodeClaims; a difference is drift",
    ),
    entry(
        Form::Annotation,
        labels::NODE_POOL_HASH_VERSION,
        "NodePool, NodeClaim",
        STOWAGE,
        "version of the hash algorithm; hashes of different versions are not compared",
    ),
    entry(
        Form::Annotation,
        labels::EC2_NODE_CLASS_HASH,
        "EC2NodeClass, NodeClaim",
        STOWAGE,
        "drift hash of the EC2NodeClass, copied to its NodeClaims; a difference is drift",
    ),
    entry(
        Form::Annotation,
        labels::EC2_NODE_CLASS_HASH_VERSION,
        "EC2NodeClass, NodeClaim",
        STOWAGE,
        "version of the hash algorithm; hashes of different versions are not compared",
    ),
    entry(
        Form::Annotation,
        labels::TERMINATION_TIMESTAMP,
        "NodeClaim",
        "Stowage or user",
        "when the drain must be complete, RFC 3339: the deletion time plus `terminationGracePeriod`, or immediately if the \
         instance is unhealthy",
    ),
    entry(
        Form::Annotation,
        labels::MIN_VALUES_RELAXED,
        "NodeClaim",
        STOWAGE,
        "whether the node was planned with fewer distinct values than `minValues`: `true` or `false`",
    ),
    entry(
        Form::Annotation,
        labels::PRICE_OVERLAY_APPLIED,
        "NodeClaim",
        "Karpenter",
        "prices of the NodeClaim were changed by an overlay",
    ),
    entry(
        Form::Annotation,
        labels::TAGGED,
        "NodeClaim",
        STOWAGE,
        "`true` once the instance has its name and NodeClaim tags",
    ),
    entry(
        Form::Annotation,
        labels::CLUSTER_NAME_TAGGED,
        "NodeClaim",
        STOWAGE,
        "`true` once the instance has the tag of its cluster, which old versions of Karpenter did not set",
    ),
    entry(Form::Annotation, labels::INSTANCE_PROFILE_NAME, "NodeClaim", STOWAGE, "instance profile of the instance"),
    entry(
        Form::Annotation,
        labels::DO_NOT_REPAIR,
        "Node, NodeClaim",
        USER,
        "any value but `false` forbids the repair of the node when it is unhealthy",
    ),
    entry(
        Form::Annotation,
        labels::DO_NOT_DISRUPT,
        "Pod, Node, NodeClaim",
        USER,
        "any value but `false` forbids voluntary disruption; a duration, such as `30m`, does so for this time from the start of the pod, or the creation of the Node or NodeClaim",
    ),
    entry(
        Form::Annotation,
        labels::POD_DELETION_COST,
        "Pod",
        USER,
        "what the eviction of the pod costs, compared with that of other pods: consolidation adds the number / 2^27 to one",
    ),
    entry(
        Form::Annotation,
        labels::DO_NOT_EVICT,
        "Pod",
        USER,
        "dropped in Karpenter v1; the webhook copies the value `true` to `karpenter.sh/do-not-disrupt`",
    ),
    entry(
        Form::Label,
        labels::WEBHOOK,
        "Pod, Namespace",
        USER,
        "`ignore` excludes the pod, or the pods of the namespace, from the webhook",
    ),
    entry(Form::Label, labels::NODE_POOL, "NodeClaim, Node", STOWAGE, "NodePool that owns the node"),
    entry(
        Form::Label,
        labels::EC2_NODE_CLASS,
        "NodeClaim, Node",
        STOWAGE,
        "EC2NodeClass that the node was launched from",
    ),
    entry(Form::Label, labels::CAPACITY_TYPE, "NodeClaim, Node", STOWAGE, "`spot`, `on-demand` or `reserved`"),
    entry(Form::Label, labels::REGISTERED, "Node", STOWAGE, "`true` once the node is registered"),
    entry(Form::Label, labels::INITIALIZED, "Node", STOWAGE, "`true` once the node is initialized"),
    entry(
        Form::Label,
        labels::DO_NOT_SYNC_TAINTS,
        "Node",
        "bootstrap of the node",
        "`true` where the bootstrap sets the taints: they are not synced from the NodeClaim at registration",
    ),
    entry(
        Form::Label,
        labels::EXCLUDE_FROM_LOAD_BALANCERS,
        "Node",
        STOWAGE,
        "`karpenter` while the node drains, so that load balancers stop sending traffic to it",
    ),
    entry(
        Form::Taint,
        labels::PLANNED_TAINT,
        "Node",
        STOWAGE,
        "keeps all but the planned pods off a node that was just opened, or that could take pods that move; the value is the UID of its \
         NodeClaim, and the planned pods get a toleration of it",
    ),
    entry(
        Form::Taint,
        labels::UNREGISTERED_TAINT,
        "NodeClaim, Node",
        "Stowage, bootstrap of the node",
        "no pod is bound until the node is registered",
    ),
    entry(
        Form::Taint,
        labels::DISRUPTED_TAINT,
        "Node",
        STOWAGE,
        "no new pod is bound while the node is being disrupted",
    ),
    entry(
        Form::Finalizer,
        labels::TERMINATION_FINALIZER,
        "NodeClaim, Node",
        STOWAGE,
        "the object is deleted after the node was drained and the instance terminated",
    ),
    entry(
        Form::Finalizer,
        labels::EC2_TERMINATION_FINALIZER,
        "EC2NodeClass",
        STOWAGE,
        "the object is deleted after its NodeClaims, launch templates and instance profiles",
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_key_of_our_domains_in_the_labels_module_is_registered_once() {
        let keys: Vec<&str> = ENTRIES.iter().map(|entry| entry.key).collect();
        assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
        let source = include_str!("labels.rs").split("#[cfg(test)]").next().unwrap();
        let mut checked = 0;
        for line in source.lines().filter(|line| line.starts_with("pub const")) {
            let Some(key) = line.split('"').nth(1).filter(|key| key.contains('/')) else { continue };
            let ours =
                ["stowage.dev/", "karpenter.sh/", "karpenter.k8s.aws/"].iter().any(|domain| key.contains(domain));
            if ours && !labels::EC2_LABELS.contains(&key) {
                assert!(keys.contains(&key), "{key} is not in the registry");
                checked += 1;
            }
        }
        assert!(checked > 25, "{checked}");
    }
}
