//! The offerings that a NodeClaim may be launched as: those that its requirements and its maximum price admit.

use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_api::parse_requirements;
use stowage_model::labels;
use stowage_model::offering::{Catalog, InstanceType, OFFERING_LABELS, Offering};
use stowage_model::requirement::Requirements;
use stowage_model::units::MicroUsd;

/// Offerings that satisfy a claim, those without capacity included.
pub fn offers<'c>(
    claim: &'c NodeClaim,
    catalog: &'c Catalog,
) -> impl Iterator<Item = (&'c InstanceType, &'c Offering)> {
    let type_ok = in_list(claim, labels::INSTANCE_TYPE);
    let requirements = Arc::new(parse_requirements(&claim.spec.requirements).unwrap_or_default());
    let of_types = Arc::clone(&requirements);
    let types = catalog.instance_types.iter().map(|instance_type| &**instance_type);
    let types = types.filter(move |instance_type| type_ok(&instance_type.name) && instance_type.serves(&of_types));
    let all =
        types.flat_map(|instance_type| instance_type.offerings.iter().map(move |offering| (instance_type, offering)));
    let admits = admits(claim, requirements);
    all.filter(move |(_, offering)| admits(offering))
}

/// The highest price that a claim of these instance types may be launched for; `None` if it admits no offering of theirs.
pub fn highest_price<'c>(
    claim: &NodeClaim,
    instance_types: impl Iterator<Item = &'c Arc<InstanceType>>,
) -> Option<MicroUsd> {
    let admits = admits(claim, Arc::new(parse_requirements(&claim.spec.requirements).unwrap_or_default()));
    let offerings = instance_types.flat_map(|found| &found.offerings).filter(|offering| admits(offering));
    offerings.map(|offering| offering.price).max()
}

/// The most that the instance of a claim may cost per hour.
fn max_price(claim: &NodeClaim) -> Option<MicroUsd> {
    MicroUsd::from_usd(claim.annotations().get(labels::MAX_PRICE)?.parse().ok()?)
}

/// Whether a claim may be launched as an offering of an instance type that it admits.
fn admits(claim: &NodeClaim, requirements: Arc<Requirements>) -> impl Fn(&Offering) -> bool {
    let (zone_ok, capacity_ok) = (in_list(claim, labels::ZONE), in_list(claim, labels::CAPACITY_TYPE));
    let max_price = max_price(claim);
    move |offering| {
        max_price.is_none_or(|most| offering.price <= most)
            && zone_ok(&offering.zone)
            && capacity_ok(offering.capacity_type.as_str())
            && OFFERING_LABELS
                .iter()
                .all(|key| requirements.get(key).is_none_or(|set| set.accepts(offering.label(key))))
    }
}

/// Whether a value is among those of the claim's first requirement `In` on a label; all are without one.
fn in_list<'c>(claim: &'c NodeClaim, key: &str) -> impl Fn(&str) -> bool + use<'c> {
    let found = claim.spec.requirements.iter().find(|r| r.key == key && r.operator == "In");
    move |value: &str| found.is_none_or(|r| r.values.iter().any(|other| other == value))
}
