//! A resolved EC2 placement group.

/// The placement group that the nodes of a class are launched in.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlacementGroup {
    /// Such as `pg-0123456789abcdef0`.
    pub id: String,
    /// `cluster`, `partition` or `spread`.
    pub strategy: String,
    /// Partitions of a partition placement group, else 0.
    pub partitions: i32,
}
