//! What a cloud knows about its offerings, for operators.

use stowage_model::time::UnixMillis;

/// Unavailable capacity, and where the data of offerings is from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfferingState {
    /// The first entries of what is unavailable, with their ends.
    pub unavailable: Vec<(String, UnixMillis)>,
    /// Number of entries.
    pub unavailable_count: usize,
    /// The data by kind.
    pub data: Vec<OfferingData>,
}

/// The source of one kind of data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferingData {
    /// Such as "spot prices".
    pub kind: String,
    /// Where it is from: `live`, `stale` or `embedded`.
    pub source: &'static str,
    /// When it was read last; `None` before.
    pub read_at: Option<UnixMillis>,
    /// Why the last call failed.
    pub error: Option<String>,
}
