//! Selects the instance type of dry runs: a type that launches of the class may use, so that the verdict of EC2 applies to them. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use stowage_api::NodePool;
use stowage_api::node_class::AmiStatus;
use stowage_api::parse_requirements;
use stowage_model::labels;
use stowage_model::offering::{CapacityType, Catalog, InstanceType, Offering};
use stowage_model::requirement::{Requirements, ValueSet};
use stowage_model::units::MicroUsd;

use crate::ec2::boot_image::image_of;
use crate::ec2::launch::select::{TypeOffer, is_exotic};

/// Types that every account may launch.
const COMMON: [&str; 2] = ["m5.large", "m6g.large"];

/// The requirements of the NodePools of a class, including their labels. A pool with invalid requirements is skipped.
pub fn demands<'a>(pools: impl IntoIterator<Item = &'a NodePool>, class: &str) -> Vec<Requirements> {
    let of_class = pools.into_iter().filter(|pool| pool.spec.template.spec.node_class_ref.name == class);
    let read = |pool: &NodePool| {
        let template = &pool.spec.template;
        let mut out = parse_requirements(&template.spec.requirements).ok()?;
        for (key, value) in template.metadata.labels.iter().flatten() {
            out.require(key, &ValueSet::one(value));
        }
        Some(out)
    };
    of_class.filter_map(read).collect()
}

/// Selects a type that the class admits and has an image for, and that is offered on demand in its zones. Types that a NodePool
/// admits come first, then types without accelerators or bare metal, then [`COMMON`] types, then the cheapest. `None` without a type.
pub fn dry_type(catalog: &Catalog, images: &[AmiStatus], demands: &[Requirements]) -> Option<TypeOffer> {
    let booting = catalog.instance_types.iter().filter(|found| image_of(images, &found.labels).is_some());
    let offered = booting.filter_map(|found| {
        let zones: BTreeMap<String, MicroUsd> =
            on_demand(found).map(|offering| (offering.zone.to_string(), offering.price)).collect();
        let cheapest = zones.values().copied().min()?;
        Some((cheapest, TypeOffer { instance_type: Arc::clone(found), zones }))
    });
    let first = offered.min_by_key(|(cheapest, candidate)| {
        let found = &candidate.instance_type;
        let admitted = demands.iter().any(|demand| is_admitted(found, demand));
        let common = COMMON.iter().position(|name| **name == *found.name).unwrap_or(COMMON.len());
        (!admitted, is_exotic(found), common, *cheapest)
    });
    first.map(|(_, candidate)| candidate)
}

/// The available on-demand offerings of a type. Offerings without capacity are skipped.
fn on_demand(found: &InstanceType) -> impl Iterator<Item = &Offering> {
    let offered = |offering: &&Offering| offering.available && offering.capacity_type == CapacityType::OnDemand;
    found.offerings.iter().filter(offered)
}

/// Whether a pool admits nodes of the type. Its capacity type is ignored, because the permissions are the same.
fn is_admitted(found: &InstanceType, demand: &Requirements) -> bool {
    let somewhere = on_demand(found).any(|offering| {
        [labels::ZONE, labels::ZONE_ID]
            .iter()
            .all(|key| demand.get(key).is_none_or(|set| set.accepts(offering.label(key))))
    });
    somewhere && found.serves(demand)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stowage_test_objects::node_pool;

    use super::*;
    use crate::catalog::{SpotPricing, embedded};
    use crate::ec2::launch::request::tests::class;

    fn pool(requirements: serde_json::Value, own: serde_json::Value, class: &str) -> NodePool {
        let spec = json!({"nodeClassRef": {"name": class}, "requirements": requirements});
        node_pool("p", &json!({"spec": {"template": {"metadata": {"labels": own}, "spec": spec}}}))
    }

    fn tried(change: impl Fn(&mut InstanceType), images: &[AmiStatus], pools: &[NodePool]) -> Option<String> {
        let mut catalog = embedded().for_node_class(Some(&class(json!({}))), SpotPricing::ratio(0.4).unwrap());
        for found in &mut catalog.instance_types {
            change(Arc::make_mut(found));
        }
        let found = dry_type(&catalog, images, &demands(pools, "default"));
        found.map(|candidate| candidate.instance_type.name.to_string())
    }

    #[test]
    fn c33_the_dry_run_uses_a_type_that_the_pools_admit() {
        let images = class(json!({})).status.unwrap().amis;
        let one = |key: &str, value: &str| json!([{"key": key, "operator": "In", "values": [value]}]);
        let of = |requirements| vec![pool(requirements, json!({}), "default")];
        for (what, pools, expected) in [
            ("no pool", vec![], "m5.large"),
            ("a pool without requirements", of(json!([])), "m5.large"),
            ("a pool for spot", of(one(labels::CAPACITY_TYPE, "spot")), "m5.large"),
            ("a pool of arm", of(one(labels::ARCH, "arm64")), "m6g.large"),
            ("a pool of one type", of(one(labels::INSTANCE_TYPE, "c5.4xlarge")), "c5.4xlarge"),
            ("a pool of dedicated hardware", of(one(labels::INSTANCE_TENANCY, "dedicated")), "m5.large"),
            ("a pool of GPUs", of(one(labels::INSTANCE_FAMILY, "g4dn")), "g4dn.xlarge"),
            ("a pool that no type satisfies", of(one(labels::INSTANCE_TYPE, "x9.huge")), "m5.large"),
            ("a pool of a zone outside the class", of(one(labels::ZONE, "eu-west-1a")), "m5.large"),
            (
                "a label of the pool",
                vec![pool(json!([]), json!({(labels::INSTANCE_TYPE): "r5.large"}), "default")],
                "r5.large",
            ),
            ("another class's pool", vec![pool(one(labels::ARCH, "arm64"), json!({}), "other")], "m5.large"),
            (
                "one of two",
                [of(one(labels::ARCH, "arm64")), of(one(labels::INSTANCE_TYPE, "m5.large"))].concat(),
                "m5.large",
            ),
        ] {
            assert_eq!(tried(|_| {}, &images, &pools).as_deref(), Some(expected), "{what}");
        }
    }

    #[test]
    fn c33_the_dry_run_uses_an_admitted_type_with_an_image() {
        let images = class(json!({})).status.unwrap().amis;
        let (x86, arm): (Vec<_>, Vec<_>) = images.iter().cloned().partition(|image| image.id == "ami-x86");
        assert_eq!(tried(|_| {}, &arm, &[]).as_deref(), Some("m6g.large"));
        assert_eq!(tried(|_| {}, &[], &[]), None);
        let closed = |names: &'static [&'static str]| {
            move |found: &mut InstanceType| {
                for offering in found.offerings.iter_mut().filter(|_| names.contains(&&*found.name)) {
                    offering.available = false;
                }
            }
        };
        assert_eq!(tried(closed(&["m5.large"]), &images, &[]).as_deref(), Some("m6g.large"));
        let cheapest = tried(closed(&COMMON), &x86, &[]).unwrap();
        assert!(!COMMON.contains(&&*cheapest), "{cheapest}");
        assert_eq!(tried(|found| found.offerings.clear(), &images, &[]), None);
        let only_spot = |found: &mut InstanceType| {
            found.offerings.retain(|offering| offering.capacity_type == CapacityType::Spot);
        };
        assert_eq!(tried(only_spot, &images, &[]), None);
    }
}
