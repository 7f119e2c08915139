//! Selects the offerings of one fleet request from those that a claim admits: exotic and too expensive types are dropped, one capacity
//! type remains, and at most sixty instance types. Reserved capacity takes precedence and is selected in
//! [`choose_reserved`](crate::ec2::launch::select_reserved).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stowage_api::Requirement;
use stowage_model::labels;
use stowage_model::labels::normalize_key;
use stowage_model::offering::{CapacityType, Catalog, InstanceType, Offering};
use stowage_model::units::MicroUsd;

use crate::{Override, ReservedIn};

/// Maximum number of instance types per request.
pub const MOST_TYPES: usize = 60;

/// Resources that exclude a type from generic claims: such nodes are expensive and scarce.
const EXOTIC: [&str; 5] =
    ["aws.amazon.com/neuron", "aws.amazon.com/neuroncore", "amd.com/gpu", "nvidia.com/gpu", "habana.ai/gaudi"];

/// An instance type and its offerings by zone.
#[derive(Clone, Debug, PartialEq)]
pub struct TypeOffer {
    pub instance_type: Arc<InstanceType>,
    /// Price by zone.
    pub zones: BTreeMap<String, MicroUsd>,
}

impl TypeOffer {
    fn cheapest(&self) -> MicroUsd {
        self.zones.values().copied().min().unwrap_or_default()
    }
}

/// The offerings of one fleet request.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The capacity type of all offerings.
    pub capacity_type: CapacityType,
    /// The capacity reservation to launch into.
    pub reservation: Option<ReservedIn>,
    /// Cheapest first, never empty.
    pub candidates: Vec<TypeOffer>,
}

impl Choice {
    /// Pod capacity of the smallest type, by zone: the number of IP addresses that a launch may use there.
    pub fn fewest_pods(&self) -> BTreeMap<String, i64> {
        let mut out: BTreeMap<String, i64> = BTreeMap::new();
        for candidate in &self.candidates {
            for zone in candidate.zones.keys() {
                let pods = candidate.instance_type.capacity.pods;
                out.entry(zone.clone()).and_modify(|fewest| *fewest = pods.min(*fewest)).or_insert(pods);
            }
        }
        out
    }
}

/// An offering with its type and price.
struct Priced<'a> {
    instance_type: &'a Arc<InstanceType>,
    offering: &'a Offering,
    zone: &'a str,
    capacity_type: CapacityType,
    price: MicroUsd,
}

/// Selects from `overrides` by the prices of `catalog`; `None` if nothing is left. `free_choice` is false for a claim with
/// `minValues`: nothing is dropped from it by price or kind.
pub fn choose(overrides: &[Override], catalog: &Catalog, free_choice: bool) -> Option<Choice> {
    let mut offers = offers(overrides, catalog);
    if free_choice {
        if offers.iter().any(|offer| !is_exotic(offer.instance_type)) {
            offers.retain(|offer| !is_exotic(offer.instance_type));
        }
        let on_demand = offers.iter().filter(|offer| offer.capacity_type == CapacityType::OnDemand);
        if let Some(cheapest) = on_demand.map(|offer| offer.price).min() {
            offers.retain(|offer| offer.capacity_type != CapacityType::Spot || offer.price <= cheapest);
        }
    }
    let spot = offers.iter().any(|offer| offer.capacity_type == CapacityType::Spot);
    let capacity_type = if spot { CapacityType::Spot } else { CapacityType::OnDemand };
    let mut by_name: BTreeMap<&str, TypeOffer> = BTreeMap::new();
    for offer in offers.iter().filter(|offer| offer.capacity_type == capacity_type) {
        let candidate = by_name
            .entry(&offer.instance_type.name)
            .or_insert_with(|| TypeOffer { instance_type: Arc::clone(offer.instance_type), zones: BTreeMap::new() });
        candidate.zones.insert(offer.zone.to_owned(), offer.price);
    }
    let mut candidates: Vec<TypeOffer> = by_name.into_values().collect();
    candidates.sort_by_key(TypeOffer::cheapest);
    candidates.truncate(MOST_TYPES);
    (!candidates.is_empty()).then_some(Choice { capacity_type, reservation: None, candidates })
}

/// The overrides that the catalog still offers, with types and prices; without reservations.
fn offers<'a>(overrides: &'a [Override], catalog: &'a Catalog) -> Vec<Priced<'a>> {
    let types: BTreeMap<&str, &Arc<InstanceType>> =
        catalog.instance_types.iter().map(|found| (&*found.name, found)).collect();
    let unreserved = overrides.iter().filter(|offering| offering.capacity_type != CapacityType::Reserved);
    let priced = unreserved.filter_map(|offering| {
        let instance_type = *types.get(&*offering.instance_type)?;
        let known = instance_type.offerings.iter().find(|known| {
            *known.zone == offering.zone && known.capacity_type == offering.capacity_type && known.available
        })?;
        let (zone, capacity_type) = (offering.zone.as_str(), offering.capacity_type);
        Some(Priced { instance_type, offering: known, zone, capacity_type, price: known.price })
    });
    priced.collect()
}

/// Whether the sixty cheapest types of `overrides` have as many distinct values of each key as `requirements` demand (`minValues`).
pub fn min_values_hold(overrides: &[Override], catalog: &Catalog, requirements: &[Requirement]) -> bool {
    if requirements.iter().all(|requirement| requirement.min_values.is_none()) {
        return true;
    }
    let mut offers = offers(overrides, catalog);
    offers.sort_by_key(|offer| offer.price);
    let mut named: Vec<&str> = Vec::new();
    for offer in &offers {
        let name = &*offer.instance_type.name;
        if named.len() < MOST_TYPES && !named.contains(&name) {
            named.push(name);
        }
    }
    offers.retain(|offer| named.contains(&&*offer.instance_type.name));
    requirements.iter().all(|requirement| {
        let key = normalize_key(&requirement.key);
        let value = |offer: &Priced<'_>| {
            let of_type = || offer.instance_type.labels.get(key).map(String::as_str);
            offer.offering.label(key).or_else(of_type).map(str::to_owned)
        };
        let values: BTreeSet<String> = offers.iter().filter_map(value).collect();
        // A key without values in any offering is a label of the template: its value does not depend on the launched type.
        (values.is_empty() && !offers.is_empty())
            || usize::try_from(requirement.min_values.unwrap_or(0)).is_ok_and(|least| values.len() >= least)
    })
}

/// Whether a generic claim should not get this type: bare metal, or with accelerators.
pub(crate) fn is_exotic(found: &InstanceType) -> bool {
    found.labels.get(labels::INSTANCE_SIZE).is_some_and(|size| size.contains("metal"))
        || EXOTIC.iter().any(|resource| found.capacity.get(resource) > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{SpotPricing, embedded};

    fn catalog(spot_ratio: f64) -> Catalog {
        embedded().for_node_class(None, SpotPricing::ratio(spot_ratio).unwrap())
    }

    fn all(catalog: &Catalog, names: &[&str]) -> Vec<Override> {
        let named = catalog.instance_types.iter().filter(|found| names.is_empty() || names.contains(&&*found.name));
        named
            .flat_map(|found| {
                found.offerings.iter().map(|offering| Override {
                    instance_type: found.name.to_string(),
                    zone: offering.zone.to_string(),
                    capacity_type: offering.capacity_type,
                })
            })
            .collect()
    }

    fn names(choice: &Choice) -> Vec<&str> {
        choice.candidates.iter().map(|candidate| &*candidate.instance_type.name).collect()
    }

    #[test]
    fn c08_metal_and_accelerators_are_used_only_if_nothing_else_is_left() {
        let catalog = catalog(0.0);
        let mixed = all(&catalog, &["m5.large", "m5.metal", "g4dn.xlarge", "inf2.xlarge"]);
        assert_eq!(names(&choose(&mixed, &catalog, true).unwrap()), ["m5.large"]);
        assert_eq!(choose(&mixed, &catalog, false).unwrap().candidates.len(), 4, "minValues keeps them");
        let exotic = all(&catalog, &["m5.metal", "g4dn.xlarge"]);
        assert_eq!(names(&choose(&exotic, &catalog, true).unwrap()), ["g4dn.xlarge", "m5.metal"]);
    }

    #[test]
    fn c09_spot_above_the_cheapest_on_demand_price_is_removed() {
        let catalog = catalog(0.4);
        let offers = all(&catalog, &["m5.large", "m5.4xlarge"]);
        let choice = choose(&offers, &catalog, true).unwrap();
        assert_eq!(choice.capacity_type, CapacityType::Spot);
        assert_eq!(names(&choice), ["m5.large"], "0.307 is over 0.096");
        assert_eq!(choose(&offers, &catalog, false).unwrap().candidates.len(), 2, "minValues keeps it");
    }

    #[test]
    fn c10_spot_is_preferred_to_on_demand() {
        let cheap = catalog(0.4);
        let offers = all(&cheap, &["m5.large"]);
        assert_eq!(choose(&offers, &cheap, true).unwrap().capacity_type, CapacityType::Spot);
        let only: Vec<Override> =
            offers.iter().filter(|offer| offer.capacity_type == CapacityType::OnDemand).cloned().collect();
        assert_eq!(choose(&only, &cheap, true).unwrap().capacity_type, CapacityType::OnDemand);
        let expensive = catalog(1.5);
        let choice = choose(&all(&expensive, &["m5.large"]), &expensive, true).unwrap();
        assert_eq!(choice.capacity_type, CapacityType::OnDemand, "spot is more expensive");
        assert_eq!(choose(&[], &cheap, true), None);
    }

    #[test]
    fn the_sixty_cheapest_types_are_kept_cheapest_first() {
        let catalog = catalog(0.0);
        let choice = choose(&all(&catalog, &[]), &catalog, true).unwrap();
        assert_eq!(choice.candidates.len(), MOST_TYPES);
        let prices: Vec<MicroUsd> = choice.candidates.iter().map(TypeOffer::cheapest).collect();
        assert!(prices.is_sorted());
        let cheapest = catalog.instance_types.iter().filter(|found| !is_exotic(found));
        let cheapest = cheapest.flat_map(|found| &found.offerings).map(|offering| offering.price).min().unwrap();
        assert_eq!(prices[0], cheapest);
    }

    #[test]
    fn min_values_hold_among_the_types_of_the_request() {
        let catalog = catalog(0.4);
        let asked = |key: &str, least: Option<i64>| {
            vec![Requirement { key: key.into(), operator: "Exists".into(), values: vec![], min_values: least }]
        };
        let two = all(&catalog, &["m5.large", "c5.large"]);
        let many = all(&catalog, &[]);
        for (overrides, key, least, expected) in [
            (&two, labels::INSTANCE_TYPE, None, true),
            (&two, labels::INSTANCE_TYPE, Some(2), true),
            (&two, labels::INSTANCE_TYPE, Some(3), false),
            (&many, labels::INSTANCE_TYPE, Some(60), true),
            (&many, labels::INSTANCE_TYPE, Some(61), false),
            (&two, labels::INSTANCE_FAMILY, Some(2), true),
            (&two, labels::INSTANCE_SIZE, Some(2), false),
            (&two, labels::CAPACITY_TYPE, Some(2), true),
            (&two, labels::ZONE, Some(100), false),
            (&two, "example.com/team", Some(1), true),
        ] {
            assert_eq!(min_values_hold(overrides, &catalog, &asked(key, least)), expected, "{key} {least:?}");
        }
        assert!(!min_values_hold(&[], &catalog, &asked(labels::ZONE, Some(1))));
    }

    #[test]
    fn a_launch_reserves_the_addresses_of_the_smallest_type_of_each_zone() {
        let catalog = catalog(0.0);
        let offers = all(&catalog, &["m5.large", "m5.4xlarge"]);
        let fewest = choose(&offers, &catalog, true).unwrap().fewest_pods();
        assert_eq!(fewest["us-east-1a"], 29);
    }
}
