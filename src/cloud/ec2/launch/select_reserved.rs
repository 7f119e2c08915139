//! Selects the capacity reservation of a fleet request. Pure.
//!
//! Karpenter names several reservations in one request, and EC2 selects one. Stowage names the reservation that EC2 would select, so
//! that the launch counts against it while in flight, and a capacity block is the only reservation of its request. When
//! the reservation turns out to be full, the launch selects again immediately.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use stowage_model::offering::{CapacityType, Catalog, InstanceType, OFFERING_LABELS, Offering};
use stowage_model::requirement::Requirements;
use stowage_model::units::MicroUsd;

use crate::ec2::launch::select::{Choice, TypeOffer, is_exotic};
use crate::{Override, ReservedIn};

/// The requirements of a claim on a reservation.
#[derive(Clone, Copy)]
pub struct ReservationQuery<'a> {
    /// The requirements of the claim.
    pub requirements: &'a Requirements,
    /// False for a claim with `minValues`, which also considers exotic instance types.
    pub free_choice: bool,
    /// The available instances of a reservation, by its id.
    pub left: &'a dyn Fn(&str) -> i64,
}

/// Selects a reservation with available instances among `overrides`: lowest on-demand price of the instance type first, then the least
/// restrictive kind, then most available instances. `None` when there is none.
pub fn choose_reserved(overrides: &[Override], catalog: &Catalog, query: &ReservationQuery<'_>) -> Option<Choice> {
    let types: BTreeMap<&str, &Arc<InstanceType>> =
        catalog.instance_types.iter().map(|found| (&*found.name, found)).collect();
    let offers = overrides.iter().filter(|offer| offer.capacity_type == CapacityType::Reserved).filter_map(|offer| {
        let found = *types.get(&*offer.instance_type)?;
        let in_zone = found.offerings.iter().filter(move |offering| *offering.zone == offer.zone);
        Some(in_zone.filter(|offering| offering.capacity_type == CapacityType::Reserved).map(move |one| (found, one)))
    });
    let usable = offers.flatten().filter_map(|(found, offering)| {
        let reservation = ReservedIn::of(&offering.labels)?;
        let left = (query.left)(&reservation.id);
        (left > 0 && is_open(offering) && admits(query.requirements, offering)).then_some((
            found,
            offering,
            reservation,
            left,
        ))
    });
    let (found, offering, reservation, _) = usable.min_by_key(|(found, offering, reservation, left)| {
        let exotic = query.free_choice && is_exotic(found);
        (exotic, on_demand_price(found, offering), reservation.kind, Reverse(*left), reservation.id.clone())
    })?;
    let zones = BTreeMap::from([(offering.zone.to_string(), offering.price)]);
    let candidates = vec![TypeOffer { instance_type: Arc::clone(found), zones }];
    Some(Choice { capacity_type: CapacityType::Reserved, reservation: Some(reservation), candidates })
}

/// Whether an offering is available, or unavailable only by its count, which may have changed since the catalog was built.
fn is_open(offering: &Offering) -> bool {
    offering.available || offering.left == Some(0)
}

fn admits(requirements: &Requirements, offering: &Offering) -> bool {
    OFFERING_LABELS.iter().all(|key| requirements.get(key).is_none_or(|set| set.accepts(offering.label(key))))
}

/// The on-demand price of the instance type in the zone. The price of the reserved offering itself is near zero.
fn on_demand_price(found: &InstanceType, offering: &Offering) -> MicroUsd {
    let on_demand = found
        .offerings
        .iter()
        .find(|other| other.zone == offering.zone && other.capacity_type == CapacityType::OnDemand);
    on_demand.unwrap_or(offering).price
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_api::Requirement;
    use stowage_api::parse_requirements;
    use stowage_model::labels;
    use stowage_model::reservation::ReservationKind;

    use super::*;
    use crate::catalog::{SpotPricing, embedded};

    /// A reservation: its id, instance type, zone and kind.
    type Line<'a> = (&'a str, &'a str, &'a str, ReservationKind);

    fn catalog(lines: &[Line<'_>]) -> Catalog {
        let mut catalog = embedded().for_node_class(None, SpotPricing::ratio(0.4).unwrap());
        for (id, name, zone, kind) in lines {
            let at = catalog.instance_types.iter().position(|found| *found.name == **name).unwrap();
            let mut found = InstanceType::clone(&catalog.instance_types[at]);
            let reservation = ReservedIn { id: (*id).to_owned(), kind: *kind };
            found.offerings.push(Offering {
                zone: (*zone).into(),
                capacity_type: CapacityType::Reserved,
                price: MicroUsd(0),
                available: true,
                left: Some(1),
                labels: Arc::new(reservation.labels().into()),
                risk_permille: 0,
            });
            catalog.instance_types[at] = Arc::new(found);
        }
        catalog
    }

    fn chosen(
        lines: &[Line<'_>],
        requirements: serde_json::Value,
        free_choice: bool,
        left: &dyn Fn(&str) -> i64,
    ) -> Option<(String, ReservationKind)> {
        let catalog = catalog(lines);
        let requirements: Vec<Requirement> = serde_json::from_value(requirements).unwrap();
        let requirements = parse_requirements(&requirements).unwrap();
        let overrides: Vec<Override> = lines
            .iter()
            .map(|(_, name, zone, _)| Override {
                instance_type: (*name).into(),
                zone: (*zone).into(),
                capacity_type: CapacityType::Reserved,
            })
            .collect();
        let choice = choose_reserved(
            &overrides,
            &catalog,
            &ReservationQuery { requirements: &requirements, free_choice, left },
        )?;
        assert_eq!((choice.capacity_type, choice.candidates.len()), (CapacityType::Reserved, 1));
        choice.reservation.map(|reservation| (reservation.id, reservation.kind))
    }

    fn id(lines: &[Line<'_>], left: &dyn Fn(&str) -> i64) -> Option<String> {
        chosen(lines, json!([]), true, left).map(|(id, _)| id)
    }

    const A: &str = "us-east-1a";
    const PLAIN: ReservationKind = ReservationKind::OnDemand;

    #[test]
    fn c10_a_reservation_with_capacity_is_chosen() {
        let lines = [("cr-1", "m5.large", A, PLAIN)];
        assert_eq!(id(&lines, &|_| 1).as_deref(), Some("cr-1"));
        assert_eq!(id(&lines, &|_| 0), None);
        assert_eq!(id(&[], &|_| 1), None);
    }

    #[test]
    fn the_cheapest_type_is_chosen_then_the_reservation_with_most_capacity() {
        let lines = [("cr-1", "m5.4xlarge", A, PLAIN), ("cr-2", "m5.large", A, PLAIN), ("cr-3", "m5.large", A, PLAIN)];
        assert_eq!(id(&lines, &|_| 1).as_deref(), Some("cr-2"));
        assert_eq!(id(&lines, &|id| if id == "cr-3" { 2 } else { 1 }).as_deref(), Some("cr-3"));
        assert_eq!(id(&lines, &|id| i64::from(id == "cr-1")).as_deref(), Some("cr-1"));
    }

    #[test]
    fn at_equal_price_on_demand_comes_before_blocks_before_interruptible() {
        let lines = [
            ("cr-1", "m5.large", A, ReservationKind::Interruptible),
            ("cr-2", "m5.large", A, ReservationKind::CapacityBlock),
            ("cr-3", "m5.large", A, PLAIN),
        ];
        assert_eq!(id(&lines, &|_| 1).as_deref(), Some("cr-3"));
        assert_eq!(id(&lines[..2], &|_| 1).as_deref(), Some("cr-2"));
        assert_eq!(id(&lines[..1], &|_| 1).as_deref(), Some("cr-1"));
    }

    #[test]
    fn c40_a_request_is_for_one_capacity_block() {
        let block = ReservationKind::CapacityBlock;
        let lines = [("cr-1", "m5.xlarge", A, block), ("cr-2", "m5.large", "us-east-1b", block)];
        assert_eq!(chosen(&lines, json!([]), true, &|_| 4), Some(("cr-2".into(), block)));
    }

    #[test]
    fn requirements_of_the_claim_select_reservations() {
        let lines = [
            ("cr-1", "m5.large", A, PLAIN),
            ("cr-2", "m5.large", A, PLAIN),
            ("cr-3", "m5.large", A, ReservationKind::CapacityBlock),
        ];
        let by = |key: &str, value: &str| json!([{"key": key, "operator": "In", "values": [value]}]);
        let ask = |requirements| chosen(&lines, requirements, true, &|_| 1).map(|(id, _)| id);
        assert_eq!(ask(by(labels::CAPACITY_RESERVATION_ID, "cr-2")).as_deref(), Some("cr-2"));
        assert_eq!(ask(by(labels::CAPACITY_RESERVATION_TYPE, "capacity-block")).as_deref(), Some("cr-3"));
        assert_eq!(ask(by(labels::CAPACITY_RESERVATION_INTERRUPTIBLE, "true")), None);
    }

    #[test]
    fn a_generic_claim_uses_accelerators_only_if_nothing_else_is_reserved() {
        let lines = [("cr-1", "g4dn.xlarge", A, PLAIN), ("cr-2", "m5.24xlarge", A, PLAIN)];
        assert_eq!(chosen(&lines, json!([]), true, &|_| 1).unwrap().0, "cr-2");
        assert_eq!(chosen(&lines, json!([]), false, &|_| 1).unwrap().0, "cr-1", "minValues");
        assert_eq!(chosen(&lines[..1], json!([]), true, &|_| 1).unwrap().0, "cr-1");
    }
}
