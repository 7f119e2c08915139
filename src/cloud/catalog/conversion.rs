//! Conversion of raw instance types to the planner's catalog.

use std::collections::BTreeSet;
use std::sync::Arc;

use stowage_api::Ec2NodeClass;
use stowage_model::offering::{CapacityType, Catalog, InstanceType, Offering};

use crate::catalog::node_settings::NodeSettings;
use crate::catalog::price::SpotPricing;
use crate::catalog::raw::{RawCatalog, RawInstanceType, architecture};
use crate::catalog::{overhead, type_labels};

/// Name of the EBS CSI driver.
pub const EBS_DRIVER: &str = "ebs.csi.aws.com";
/// Attachments of a node that its root volume and its initial network interfaces use.
const ROOT_AND_INTERFACES: i64 = 3;
/// The size of the smallest instance store disk of types with several disks, in GB, and the maximum number of disks of a type.
const DISK_GB: i64 = 900;
const MAX_DISKS: i64 = 8;

impl RawCatalog {
    /// The offerings for nodes of `class` (`None` for a class with Karpenter's defaults); an offering is available where the class's
    /// images boot on the type. Instance types are sorted by name, offerings by zone, then capacity type.
    pub fn for_node_class(&self, class: Option<&Ec2NodeClass>, spot: SpotPricing) -> Catalog {
        self.with_settings(&NodeSettings::of(class), spot)
    }

    /// As [`RawCatalog::for_node_class`], with the settings of a class. Empty where an expression for `maxPods` fails on any instance
    /// type.
    pub fn with_settings(&self, settings: &NodeSettings, spot: SpotPricing) -> Catalog {
        let each = settings.on_each(&self.instance_types);
        let both = self.instance_types.iter().zip(&each);
        let instance_types = both.map(|(entry, own)| Arc::new(entry.as_node(&self.region, own, spot))).collect();
        Catalog { region: self.region.clone(), instance_types }
    }
}

impl RawInstanceType {
    /// This type as a node of a class with `settings`. Expressions among them count as not set; [`NodeSettings::on`] evaluates them.
    pub fn as_node(&self, region: &str, settings: &NodeSettings, spot: SpotPricing) -> InstanceType {
        let capacity = overhead::capacity(self, settings);
        let allocatable = overhead::allocatable(self, settings, &capacity);
        InstanceType {
            name: self.name.as_str().into(),
            labels: type_labels::labels(self, region, settings.family),
            capacity,
            allocatable,
            volume_limits: [(Arc::from(EBS_DRIVER), self.ebs_volumes())].into(),
            offerings: self.offerings(settings, spot),
        }
    }

    /// Number of volumes that the EBS CSI driver can attach to a node: the type's attachments (28 on Nitro, 39 volumes elsewhere, by
    /// "EBS volume limits" of the EC2 User Guide) minus the root volume, initial network interfaces, instance store disks and
    /// accelerators. Some newer sizes allow more: a lower number is safe.
    fn ebs_volumes(&self) -> i64 {
        if self.hypervisor == "xen" {
            return 39;
        }
        if matches!(self.name.as_str(), "d3.8xlarge" | "d3en.12xlarge") {
            return 3;
        }
        let disks = (self.instance_store_gb.unwrap_or(0) + DISK_GB - 1) / DISK_GB;
        let local = if self.instance_store_nvme == Some(true) { disks.min(MAX_DISKS) } else { 0 };
        let accelerators: i64 = self.gpus.iter().map(|gpu| gpu.count).sum::<i64>()
            + self.inference_accelerators.iter().map(|have| have.count).sum::<i64>()
            + self.neuron_devices.iter().map(|have| have.count).sum::<i64>();
        (28 - ROOT_AND_INTERFACES - local - accelerators).max(1)
    }

    /// The offerings of the type. None is available where the class's images do not boot on the type.
    fn offerings(&self, settings: &NodeSettings, spot: SpotPricing) -> Vec<Offering> {
        let instance_family = self.name.split('.').next().unwrap_or_default();
        let available = settings.family.boots_on(instance_family, architecture(self).unwrap_or_default());
        let mut offerings = Vec::new();
        let none = Arc::default();
        for zone in self.zones.iter().collect::<BTreeSet<_>>() {
            for capacity_type in [CapacityType::Spot, CapacityType::OnDemand] {
                if let Some(price) = self.price(zone, capacity_type, spot) {
                    offerings.push(Offering {
                        zone: zone.as_str().into(),
                        capacity_type,
                        price,
                        available,
                        left: None,
                        labels: Arc::clone(&none),
                        risk_permille: 0,
                    });
                }
            }
        }
        offerings
    }
}
