//! Catalogues by node class, kept until something they are drawn from changes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use kube::ResourceExt;

use super::images::image_of;
use super::unavailable::Unavailable;
use crate::api::Ec2NodeClass;
use crate::api::node_class::{AmiStatus, SubnetStatus};
use crate::cloud::catalogue::{NodeSettings, RawCatalogue, SpotPricing, embedded};
use crate::scheduling::offering::Catalogue;

/// What a catalogue is drawn from besides the region.
#[derive(Clone, Debug, PartialEq)]
struct Source {
    settings: NodeSettings,
    subnets: Vec<SubnetStatus>,
    images: Vec<AmiStatus>,
    group: Option<String>,
}

#[derive(Debug)]
struct Kept {
    source: Source,
    /// Every offering available.
    base: Arc<Catalogue>,
    changes: u64,
    masked: Arc<Catalogue>,
}

/// Catalogues by name of node class.
#[derive(Debug)]
pub struct Catalogues {
    raw: Arc<RawCatalogue>,
    spot: SpotPricing,
    region: String,
    kept: HashMap<String, Kept>,
}

impl Catalogues {
    /// The table in the binary, as the stand-in for a region. Until spot prices are known they count as the on-demand price.
    pub fn stand_in(region: &str) -> Self {
        Self {
            raw: Arc::new(embedded().clone()),
            spot: SpotPricing::ratio(1.0).unwrap_or(SpotPricing::Off),
            region: region.to_owned(),
            kept: HashMap::new(),
        }
    }

    /// What may be bought for nodes of a class, in the zones of its subnets and of the types that boot one of its images.
    pub fn of(&mut self, class: &Ec2NodeClass, group: Option<String>, marks: &mut Unavailable, now_ms: i64) -> Arc<Catalogue> {
        let status = class.status.clone().unwrap_or_default();
        let settings = NodeSettings::of(Some(class));
        let source = Source { settings, subnets: status.subnets, images: status.amis, group };
        let changes = marks.prune(now_ms);
        let name = class.name_any();
        if let Some(kept) = self.kept.get_mut(&name)
            && kept.source == source
        {
            if kept.changes != changes {
                kept.masked = Arc::new(mask(marks, &kept.base, &source, now_ms));
                kept.changes = changes;
            }
            return Arc::clone(&kept.masked);
        }
        let base = Arc::new(self.base(&source));
        let masked = Arc::new(mask(marks, &base, &source, now_ms));
        self.kept.insert(name, Kept { source, base, changes, masked: Arc::clone(&masked) });
        masked
    }

    fn base(&self, source: &Source) -> Catalogue {
        let zones: BTreeSet<&str> = source.subnets.iter().map(|subnet| subnet.zone.as_str()).collect();
        let mut catalogue = if self.raw.region == self.region {
            self.raw.with_settings(&source.settings, self.spot)
        } else {
            // Prices and types of one region stand in for another's, each type in every zone.
            let mut raw = RawCatalogue::clone(&self.raw);
            raw.region.clone_from(&self.region);
            raw.zones = zones.iter().map(|zone| (*zone).to_owned()).collect();
            for entry in &mut raw.instance_types {
                entry.zones.clone_from(&raw.zones);
            }
            raw.with_settings(&source.settings, self.spot)
        };
        catalogue.instance_types.retain(|found| image_of(&source.images, &found.labels).is_some());
        for found in &mut catalogue.instance_types {
            Arc::make_mut(found).offerings.retain(|offering| zones.contains(&*offering.zone));
        }
        catalogue
    }
}

fn mask(marks: &Unavailable, base: &Catalogue, source: &Source, now_ms: i64) -> Catalogue {
    marks.mask(base, &source.subnets, source.group.as_deref(), now_ms)
}

/// Zone ids by zone of a class's subnets.
pub fn zone_ids(class: &Ec2NodeClass) -> BTreeMap<String, String> {
    let subnets = class.status.iter().flat_map(|status| &status.subnets);
    subnets.filter_map(|subnet| Some((subnet.zone.clone(), subnet.zone_id.clone()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::aliases::one_of;
    use super::super::unavailable::Subject;
    use super::*;
    use crate::api::labels;
    use crate::cloud::Override;
    use crate::scheduling::offering::CapacityType;

    fn class(zone: &str, arch: &str) -> Ec2NodeClass {
        let mut class: Ec2NodeClass = serde_json::from_value(serde_json::json!({
            "apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": {"name": "default"},
            "spec": {"amiSelectorTerms": [], "subnetSelectorTerms": [], "securityGroupSelectorTerms": []},
            "status": {"subnets": [{"id": "subnet-1", "zone": zone, "zoneID": "az1"}]},
        }))
        .unwrap();
        let requirements = vec![one_of(labels::ARCH, arch)];
        if let Some(status) = &mut class.status {
            status.amis = vec![AmiStatus { id: "ami-1".into(), requirements, ..AmiStatus::default() }];
        }
        class
    }

    #[test]
    fn a_class_sees_its_zones_and_what_boots_its_images() {
        let (mut catalogues, mut marks) = (Catalogues::stand_in("us-east-1"), Unavailable::default());
        let seen = catalogues.of(&class("us-east-1b", "arm64"), None, &mut marks, 0);
        assert!(seen.instance_types.len() > 100);
        for found in &seen.instance_types {
            assert_eq!(found.labels[labels::ARCH], "arm64");
            assert!(found.offerings.iter().all(|offering| &*offering.zone == "us-east-1b"));
        }
    }

    #[test]
    fn a_region_that_the_binary_has_no_table_of_gets_types_in_its_own_zones() {
        let (mut catalogues, mut marks) = (Catalogues::stand_in("eu-west-9"), Unavailable::default());
        let seen = catalogues.of(&class("eu-west-9a", "amd64"), None, &mut marks, 0);
        let found = seen.instance_types.iter().find(|found| &*found.name == "m5.large").unwrap();
        assert_eq!(found.labels[labels::REGION], "eu-west-9");
        assert_eq!(found.offerings.len(), 2, "spot and on demand");
    }

    #[test]
    fn c11_the_same_catalogue_is_shared_until_a_mark_comes_or_ends() {
        let (mut catalogues, mut marks) = (Catalogues::stand_in("us-east-1"), Unavailable::default());
        let class = class("us-east-1a", "amd64");
        let mut at = |marks: &mut Unavailable, now| catalogues.of(&class, None, marks, now);
        let first = at(&mut marks, 0);
        assert!(Arc::ptr_eq(&first, &at(&mut marks, 1)));
        let offering = Override {
            instance_type: "m5.xlarge".into(),
            zone: "us-east-1a".into(),
            capacity_type: CapacityType::Spot,
        };
        marks.mark(Subject::Offering(offering, None), 1);
        let second = at(&mut marks, 2);
        assert!(!Arc::ptr_eq(&first, &second));
        assert!(Arc::ptr_eq(&first.instance_types[0], &second.instance_types[0]));
        assert_eq!(*at(&mut marks, 1_000_000), *first);
    }
}
