//! The watched kinds.

/// Kinds that must be listed before the first decision.
pub const KINDS: [&str; 14] = [
    "pods",
    "nodes",
    "nodeclaims",
    "nodepools",
    "ec2nodeclasses",
    "daemonsets",
    "poddisruptionbudgets",
    "namespaces",
    "limitranges",
    "persistentvolumeclaims",
    "persistentvolumes",
    "storageclasses",
    "csinodes",
    "volumeattachments",
];

/// Listed in addition to [`KINDS`] when pods get default topology spread constraints.
pub const SERVICES: &str = "services";
