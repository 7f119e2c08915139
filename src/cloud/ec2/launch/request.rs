//! The launch templates and the fleet request of a claim: the image and the user data of each instance type. Types with equal
//! templates share one. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kube::ResourceExt;
use stowage_api::node_class::AmiStatus;
use stowage_api::parse_requirements;
use stowage_api::{Ec2NodeClass, NodeClaim};
use stowage_model::events;
use stowage_model::labels;
use stowage_model::offering::{CapacityType, InstanceType};
use stowage_model::resources::EFA;

use crate::ami_family::AmiFamily;
use crate::catalog::{NodeSettings, RawInstanceType};
use crate::ec2::boot_image::image_of;
use crate::ec2::bootstrap::user_data::{UserDataError, UserDataInput, image_version, user_data};
use crate::ec2::launch::create_fleet::{FleetOverride, FleetRequest};
use crate::ec2::launch::select::{Choice, TypeOffer};
use crate::ec2::launch::templates::spec::Template;
use crate::ec2::node_class::cluster_facts::ClusterFacts;
use crate::ec2::placement_group::PlacementGroup;
use crate::ec2::tags::{CLAIM_TAG, launch_tags};
use crate::kubelet_config::expressions::Evaluated;
use crate::{LaunchError, LaunchRequest};

/// Resource that requests Nitro Enclaves.
const NITRO_SANDBOX: &str = "eks.amazonaws.com/nitro-sandbox";

/// Maximum launch templates of a CreateFleet request.
const MAX_TEMPLATES: usize = 50;

/// The inputs of launch templates that may change between two launches.
#[derive(Clone, Debug)]
pub struct TemplateInputs {
    pub class: Arc<Ec2NodeClass>,
    pub cluster: Arc<ClusterFacts>,
    /// The placement group of the class.
    pub placement_group: Option<PlacementGroup>,
}

impl TemplateInputs {
    /// Whether both give the same templates. A class object that was read again counts as changed.
    pub fn same_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.class, &other.class)
            && self.cluster == other.cluster
            && self.placement_group == other.placement_group
    }
}

/// The inputs of a launch except the selected offerings.
#[derive(Clone, Copy, Debug)]
pub struct LaunchInputs<'a> {
    pub request: &'a LaunchRequest,
    pub claim: &'a NodeClaim,
    pub template_inputs: &'a TemplateInputs,
    /// Such as `us-east-1`.
    pub region: &'a str,
    /// Whether the controller chooses capacity reservations; otherwise EC2 uses open reservations.
    pub manages_reservations: bool,
    /// What the CEL expressions of the class are evaluated on; `None` without expressions, or with the feature gate disabled.
    pub shapes: Option<Shapes<'a>>,
}

/// The node settings of a class, and the instance types they are evaluated on.
#[derive(Clone, Copy, Debug)]
pub struct Shapes<'a> {
    pub settings: &'a NodeSettings,
    /// Instance types by name.
    pub types: &'a BTreeMap<String, RawInstanceType>,
}

impl<'a> Shapes<'a> {
    /// `None` for a class without expressions, whose settings do not depend on the instance type.
    pub fn of(settings: &'a NodeSettings, types: &'a BTreeMap<String, RawInstanceType>) -> Option<Self> {
        settings.expressions.is_some().then_some(Self { settings, types })
    }
}

/// A launch template and the candidates that use it, cheapest first.
#[derive(Clone, Debug)]
pub struct TemplateGroup<'a> {
    pub template: Template,
    pub candidates: Vec<&'a TypeOffer>,
}

impl LaunchInputs<'_> {
    fn class(&self) -> &Ec2NodeClass {
        &self.template_inputs.class
    }

    fn requests(&self, resource: &str) -> bool {
        let amount = self.claim.spec.resources.requests.get(resource);
        amount.is_some_and(|amount| amount.0.chars().any(|c| ('1'..='9').contains(&c)))
    }

    /// Tags of everything that is launched.
    ///
    /// # Errors
    /// [`LaunchError::NodeClassNotReady`] when the class sets a restricted tag.
    pub fn tags(&self) -> Result<BTreeMap<String, String>, LaunchError> {
        let name = self.class().name_any();
        let own = self.class().spec.tags.clone().unwrap_or_default();
        launch_tags(&own, &self.template_inputs.cluster.name, &name, &self.request.node_pool)
            .map_err(|reason| LaunchError::NodeClassNotReady { name, reason })
    }

    /// The templates of the selected offerings, at most fifty. Instance types that boot no image of the class are omitted, and the
    /// most expensive types with templates of their own beyond the fifty.
    ///
    /// # Errors
    /// No instance type is left, or the user data is invalid.
    pub fn template_groups<'a>(
        &self,
        choice: &'a Choice,
        tags: &BTreeMap<String, String>,
    ) -> Result<Vec<TemplateGroup<'a>>, LaunchError> {
        let none = vec![];
        let images = self.class().status.as_ref().map_or(&none, |status| &status.amis);
        let mut texts: BTreeMap<(&str, i64, Option<Evaluated>), String> = BTreeMap::new();
        let mut groups: Vec<TemplateGroup<'a>> = Vec::new();
        for candidate in &choice.candidates {
            let found = &candidate.instance_type;
            let Some(image) = image_of(images, &found.labels) else { continue };
            let evaluated = match self.shapes {
                None => None,
                Some(shapes) => {
                    // EC2 no longer describes this type, so it can neither be sized nor launched.
                    let Some(entry) = shapes.types.get(&*found.name) else { continue };
                    shapes.settings.evaluated_on(entry).map_err(|unusable| self.refused(&unusable))?
                }
            };
            let key = (image.id.as_str(), found.capacity.pods, evaluated.clone());
            let text = if let Some(text) = texts.get(&key) {
                text.clone()
            } else {
                let text = self.user_data(found, image, evaluated.as_ref(), choice.capacity_type);
                let text = text.map_err(|error| self.refused(&error))?;
                texts.entry(key).or_insert(STANDARD.encode(text)).clone()
            };
            let efa = if self.requests(EFA) { i32::try_from(found.capacity.get(EFA)).unwrap_or(0) } else { 0 };
            let shares = |group: &TemplateGroup| {
                let template = &group.template;
                template.image_id == image.id && template.efa == efa && template.user_data == text
            };
            match groups.iter().position(shares) {
                Some(index) => groups[index].candidates.push(candidate),
                None if groups.len() >= MAX_TEMPLATES => {}
                None => groups.push(TemplateGroup {
                    template: self.template(image, text, efa, choice, tags),
                    candidates: vec![candidate],
                }),
            }
        }
        if groups.is_empty() {
            let message =
                format!("EC2NodeClass {} has no image for any of the instance types", self.class().name_any());
            return Err(LaunchError::Rejected { event: events::LAUNCH_FAILED, message });
        }
        Ok(groups)
    }

    fn refused(&self, error: &dyn std::fmt::Display) -> LaunchError {
        LaunchError::NodeClassNotReady { name: self.class().name_any(), reason: error.to_string() }
    }

    fn user_data(
        &self,
        found: &InstanceType,
        image: &AmiStatus,
        evaluated: Option<&Evaluated>,
        capacity_type: CapacityType,
    ) -> Result<String, UserDataError> {
        let spec = &self.class().spec;
        let family = AmiFamily::of(spec);
        let kubelet = evaluated.zip(spec.kubelet.as_ref()).map(|(evaluated, map)| evaluated.apply_to(map));
        let mut own = self.claim.labels().clone();
        // Labels that the requirements of the claim determine. Labels of the instance type are synced at registration.
        let fixed = self.request.labels.iter().filter(|(key, _)| !labels::is_well_known(key));
        own.extend(fixed.map(|(key, value)| (key.clone(), value.clone())));
        let version = image_version(&spec.ami_selector_terms, std::slice::from_ref(image));
        user_data(
            family,
            &UserDataInput {
                cluster_name: &self.template_inputs.cluster.name,
                endpoint: &self.template_inputs.cluster.endpoint,
                ca_bundle: Some(&self.template_inputs.cluster.ca_bundle)
                    .filter(|ca| !ca.is_empty())
                    .map(String::as_str),
                service_cidr: self.template_inputs.cluster.service_cidr.as_deref(),
                cluster_dns: self.template_inputs.cluster.dns_ip.as_deref().and_then(|ip| ip.parse::<IpAddr>().ok()),
                kubelet: kubelet.as_ref().or(spec.kubelet.as_ref()),
                max_pods: found.capacity.pods,
                labels: &own,
                taints: &self.request.taints,
                capacity_type,
                local_disks: spec.instance_store_policy.as_deref() == Some("RAID0"),
                custom: spec.user_data.as_deref(),
                image_version: version,
            },
        )
    }

    fn template(
        &self,
        image: &AmiStatus,
        user_data: String,
        efa: i32,
        choice: &Choice,
        tags: &BTreeMap<String, String>,
    ) -> Template {
        let spec = &self.class().spec;
        let status = self.class().status.clone().unwrap_or_default();
        let requirements = parse_requirements(&self.claim.spec.requirements).unwrap_or_default();
        let shared = requirements.get(labels::INSTANCE_TENANCY).is_none_or(|tenancy| tenancy.contains("default"));
        let partition = requirements.get(labels::PLACEMENT_GROUP_PARTITION).and_then(|partitions| {
            let mut wanted: Vec<String> = partitions.finite()?.map(ToString::to_string).collect();
            // The lowest in text order, as in Karpenter.
            wanted.sort();
            wanted.first()?.parse().ok()
        });
        let block_devices = spec.block_device_mappings.clone().filter(|mappings| !mappings.is_empty());
        let block_devices = block_devices.unwrap_or_else(|| AmiFamily::of(spec).default_block_devices());
        Template {
            cluster: self.template_inputs.cluster.name.clone(),
            region: self.region.to_owned(),
            class: self.class().name_any(),
            image_id: image.id.clone(),
            user_data,
            instance_profile: status.instance_profile.unwrap_or_default(),
            security_groups: status.security_groups.into_iter().map(|group| group.id).collect(),
            block_devices,
            metadata: spec.metadata_options.clone(),
            detailed_monitoring: spec.detailed_monitoring.unwrap_or(false),
            nested_virtualization: spec.cpu_options.as_ref().and_then(|options| options.nested_virtualization.clone()),
            enclave: spec.has_enclaves() || self.requests(NITRO_SANDBOX),
            tenancy: if shared { "default" } else { "dedicated" }.to_owned(),
            placement_group: self.template_inputs.placement_group.as_ref().map(|group| group.id.clone()),
            partition: partition.filter(|_| self.template_inputs.placement_group.is_some()),
            network_interfaces: spec.network_interfaces.clone().unwrap_or_default(),
            efa,
            public_ip: spec.associate_public_ip_address,
            ip_prefixes: spec.ip_prefix_count,
            connection_tracking: spec.connection_tracking.clone(),
            ipv6: self.template_inputs.cluster.is_ipv6(),
            tags: tags.clone(),
            capacity_type: choice.capacity_type,
            reservation: choice.reservation.clone(),
            manages_reservations: self.manages_reservations,
        }
    }

    /// The fleet request for the selected offerings: `templates` by name, in the `subnets` by zone; `None` when no zone has a subnet.
    pub fn fleet(
        &self,
        token: String,
        choice: &Choice,
        templates: &[(String, &TemplateGroup<'_>)],
        subnets: &BTreeMap<String, String>,
        tags: BTreeMap<String, String>,
    ) -> Option<FleetRequest> {
        let overrides = |group: &TemplateGroup<'_>| {
            let overrides_of = |candidate: &&TypeOffer| {
                let instance_type = candidate.instance_type.name.to_string();
                let fleet_override = |(zone, price): (&String, _)| FleetOverride {
                    instance_type: instance_type.clone(),
                    subnet: subnets[zone].clone(),
                    zone: zone.clone(),
                    image: group.template.image_id.clone(),
                    price,
                };
                let zones = candidate.zones.iter().filter(|(zone, _)| subnets.contains_key(*zone));
                zones.map(|(zone, price)| fleet_override((zone, *price))).collect::<Vec<_>>()
            };
            let mut sorted: Vec<FleetOverride> = group.candidates.iter().flat_map(overrides_of).collect();
            sorted.sort_by_key(|one| one.price);
            sorted
        };
        let templates: Vec<(String, Vec<FleetOverride>)> = templates
            .iter()
            .map(|(name, group)| (name.clone(), overrides(group)))
            .filter(|(_, overrides)| !overrides.is_empty())
            .collect();
        if templates.is_empty() {
            return None;
        }
        let annotation = |key: &str| self.claim.annotations().get(key);
        let relaxed = annotation(labels::MIN_VALUES_RELAXED).is_some_and(|value| value == "true");
        Some(FleetRequest {
            token,
            count: 1,
            context: self.class().spec.context.clone().filter(|_| !relaxed),
            capacity_type: choice.capacity_type,
            reservation: choice.reservation.clone(),
            prioritized: annotation(labels::PRICE_OVERLAY_APPLIED).is_some(),
            templates,
            tags,
            instance_tags: BTreeMap::from([(CLAIM_TAG.to_owned(), self.request.node_claim.clone())]),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
