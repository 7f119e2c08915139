//! The capacity reservation that an instance is launched into.

use std::collections::BTreeMap;

use crate::labels;

/// The kind of a reservation, in order of use at equal price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReservationKind {
    /// An on-demand capacity reservation.
    OnDemand,
    /// A capacity block; its instances end with it.
    CapacityBlock,
    /// An on-demand capacity reservation whose owner can reclaim instances with two minutes' notice.
    Interruptible,
}

impl ReservationKind {
    /// The kind, from EC2's reservation type (`default` or `capacity-block`) and whether instances are interruptible.
    pub fn of(reservation_type: &str, interruptible: bool) -> Self {
        match (reservation_type, interruptible) {
            ("capacity-block", _) => Self::CapacityBlock,
            (_, true) => Self::Interruptible,
            (_, false) => Self::OnDemand,
        }
    }

    fn reservation_type(self) -> &'static str {
        match self {
            Self::CapacityBlock => "capacity-block",
            Self::OnDemand | Self::Interruptible => "default",
        }
    }
}

/// A reservation, as in the labels of its nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedIn {
    /// Such as `cr-0123456789abcdef0`.
    pub id: String,
    pub kind: ReservationKind,
}

/// Labels of nodes that run in a reservation.
pub const RESERVATION_LABELS: [&str; 3] =
    [labels::CAPACITY_RESERVATION_ID, labels::CAPACITY_RESERVATION_TYPE, labels::CAPACITY_RESERVATION_INTERRUPTIBLE];

impl ReservedIn {
    /// Reads the labels of a node or an offering; `None` without a reservation.
    pub fn of(own: &BTreeMap<String, String>) -> Option<Self> {
        let id = own.get(labels::CAPACITY_RESERVATION_ID).filter(|id| !id.is_empty())?.clone();
        let value = |key: &str| own.get(key).map(String::as_str).unwrap_or_default();
        let interruptible = value(labels::CAPACITY_RESERVATION_INTERRUPTIBLE) == "true";
        Some(Self { id, kind: ReservationKind::of(value(labels::CAPACITY_RESERVATION_TYPE), interruptible) })
    }

    /// Its labels, by the keys of [`RESERVATION_LABELS`].
    pub fn labels(&self) -> [(String, String); 3] {
        let interruptible = self.kind == ReservationKind::Interruptible;
        let values = [self.id.clone(), self.kind.reservation_type().to_owned(), interruptible.to_string()];
        let [id, kind, interruptible_key] = RESERVATION_LABELS.map(str::to_owned);
        let [first, second, third] = values;
        [(id, first), (kind, second), (interruptible_key, third)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_contain_id_type_and_interruptibility() {
        for (kind, reservation_type, interruptible) in [
            (ReservationKind::OnDemand, "default", "false"),
            (ReservationKind::CapacityBlock, "capacity-block", "false"),
            (ReservationKind::Interruptible, "default", "true"),
        ] {
            let reserved = ReservedIn { id: "cr-1".into(), kind };
            let labels: BTreeMap<String, String> = reserved.labels().into();
            assert_eq!(labels["karpenter.k8s.aws/capacity-reservation-id"], "cr-1");
            assert_eq!(labels["karpenter.k8s.aws/capacity-reservation-type"], reservation_type);
            assert_eq!(labels["karpenter.k8s.aws/capacity-reservation-interruptible"], interruptible);
            assert_eq!(ReservedIn::of(&labels), Some(reserved));
        }
        assert_eq!(ReservedIn::of(&BTreeMap::new()), None);
    }
}
