//! The contents of a launch template. [`Template`] contains everything that makes two templates differ; the name is the SHA-256 of
//! its canonical JSON.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::{
    CapacityReservationPreference, CapacityReservationTarget, ConnectionTrackingSpecificationRequest,
    InstanceMetadataOptionsRequest, LaunchTemplateBlockDeviceMappingRequest,
    LaunchTemplateCapacityReservationSpecificationRequest, LaunchTemplateCpuOptionsRequest,
    LaunchTemplateEbsBlockDeviceRequest, LaunchTemplateEnclaveOptionsRequest,
    LaunchTemplateIamInstanceProfileSpecificationRequest, LaunchTemplateInstanceMarketOptionsRequest,
    LaunchTemplateInstanceMetadataOptionsRequest, LaunchTemplateInstanceMetadataTagsState,
    LaunchTemplateInstanceNetworkInterfaceSpecificationRequest, LaunchTemplatePlacementRequest,
    LaunchTemplateTagSpecificationRequest, LaunchTemplatesMonitoringRequest, MarketType, RequestLaunchTemplateData,
    ResourceType, TagSpecification,
};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use sha2::{Digest, Sha256};
use stowage_api::node_class::{BlockDeviceMapping, ConnectionTracking, MetadataOptions, NetworkInterface};
use stowage_model::offering::CapacityType;
use stowage_model::quantity::parse_bytes;
use stowage_model::reservation::ReservationKind;

use crate::ReservedIn;
use crate::ec2::tags::{tag_specification, tags};

/// Version of the translation of a [`Template`] into [`Template::data`], part of the name: it is incremented with every change of the
/// translation, so that no template of another version of this program is used.
const FORMAT: u32 = 2;

/// The inputs of a launch template.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    pub cluster: String,
    /// Some regions do not support every option.
    pub region: String,
    /// Name of the node class: classes never share a template.
    pub class: String,
    pub image_id: String,
    /// User data, base64; empty for none.
    pub user_data: String,
    pub instance_profile: String,
    /// Security groups of every interface.
    pub security_groups: Vec<String>,
    pub block_devices: Vec<BlockDeviceMapping>,
    pub metadata: Option<MetadataOptions>,
    /// Whether CloudWatch gets metrics every minute.
    pub detailed_monitoring: bool,
    /// `enabled` or `disabled`.
    pub nested_virtualization: Option<String>,
    /// Whether Nitro Enclaves are enabled.
    pub enclave: bool,
    /// `default` or `dedicated`.
    pub tenancy: String,
    /// Id of the placement group.
    pub placement_group: Option<String>,
    /// The requested partition of the placement group.
    pub partition: Option<i32>,
    /// Interfaces of the class.
    pub network_interfaces: Vec<NetworkInterface>,
    /// Number of EFA interfaces, for a claim that requests them; else 0.
    pub efa: i32,
    /// Whether the first interface gets a public address.
    pub public_ip: Option<bool>,
    /// IP prefixes of each interface.
    pub ip_prefixes: Option<i32>,
    /// Idle timeouts of tracked connections.
    pub connection_tracking: Option<ConnectionTracking>,
    /// Whether the cluster uses IPv6 addresses.
    pub ipv6: bool,
    /// Tags of the template and of the resources that it creates.
    pub tags: BTreeMap<String, String>,
    pub capacity_type: CapacityType,
    /// Capacity reservation that instances are launched into.
    pub reservation: Option<ReservedIn>,
    /// Whether the controller chooses capacity reservations; otherwise EC2 uses open reservations.
    pub manages_reservations: bool,
}

/// Regions that reject HttpProtocolIpv6.
const NO_METADATA_IPV6: [&str; 6] =
    ["us-iso-east-1", "us-iso-west-1", "us-isob-east-1", "us-isob-west-1", "us-isof-south-1", "us-isof-east-1"];

impl Template {
    /// Length of the user data before base64, as EC2 limits it.
    pub fn user_data_bytes(&self) -> usize {
        STANDARD.decode(&self.user_data).map_or(0, |text| text.len())
    }

    /// Name of the template: equal contents have equal names, and nobody can construct other contents with the same name.
    pub fn name(&self) -> String {
        let digest = Sha256::digest(self.canonical().to_string());
        let hex: Vec<String> = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("karpenter.k8s.aws/{}", hex.concat())
    }

    /// Everything that [`Template::data`] depends on, and the format. Keys are sorted.
    fn canonical(&self) -> serde_json::Value {
        // Exhaustive, so that no field is forgotten.
        let Self {
            cluster,
            region,
            class,
            image_id,
            user_data,
            instance_profile,
            security_groups,
            block_devices,
            metadata,
            detailed_monitoring,
            nested_virtualization,
            enclave,
            tenancy,
            placement_group,
            partition,
            network_interfaces,
            efa,
            public_ip,
            ip_prefixes,
            connection_tracking,
            ipv6,
            tags,
            capacity_type,
            reservation,
            manages_reservations,
        } = self;
        let kind = |kind: ReservationKind| match kind {
            ReservationKind::OnDemand => "on-demand",
            ReservationKind::CapacityBlock => "capacity-block",
            ReservationKind::Interruptible => "interruptible",
        };
        let reservation = reservation.as_ref().map(|reservation| json!([reservation.id, kind(reservation.kind)]));
        json!({
            "format": FORMAT,
            "cluster": cluster,
            "region": region,
            "class": class,
            "imageID": image_id,
            "userData": user_data,
            "instanceProfile": instance_profile,
            "securityGroups": security_groups,
            "blockDevices": block_devices,
            "metadata": metadata,
            "detailedMonitoring": detailed_monitoring,
            "nestedVirtualization": nested_virtualization,
            "enclave": enclave,
            "tenancy": tenancy,
            "placementGroup": placement_group,
            "partition": partition,
            "networkInterfaces": network_interfaces,
            "efa": efa,
            "publicIP": public_ip,
            "ipPrefixes": ip_prefixes,
            "connectionTracking": connection_tracking,
            "ipv6": ipv6,
            "tags": tags,
            "capacityType": capacity_type.as_str(),
            "reservation": reservation,
            "managesReservations": manages_reservations,
        })
    }

    /// The template in the form of the API.
    pub fn data(&self) -> RequestLaunchTemplateData {
        let mut data = RequestLaunchTemplateData::builder()
            .image_id(&self.image_id)
            .iam_instance_profile(
                LaunchTemplateIamInstanceProfileSpecificationRequest::builder().name(&self.instance_profile).build(),
            )
            .monitoring(LaunchTemplatesMonitoringRequest::builder().enabled(self.detailed_monitoring).build())
            .enclave_options(LaunchTemplateEnclaveOptionsRequest::builder().enabled(self.enclave).build())
            .placement(self.placement())
            .set_capacity_reservation_specification(self.reservations())
            .set_instance_market_options(self.market())
            .tag_specifications(self.tag_specification(ResourceType::NetworkInterface))
            .set_network_interfaces(Some(self.interfaces()))
            .set_metadata_options(self.metadata.as_ref().map(|metadata| self.metadata(metadata)));
        if !self.user_data.is_empty() {
            data = data.user_data(&self.user_data);
        }
        if !self.block_devices.is_empty() {
            data = data.set_block_device_mappings(Some(self.block_devices.iter().map(block_device).collect()));
        }
        if let Some(nested) = &self.nested_virtualization {
            let options = LaunchTemplateCpuOptionsRequest::builder().nested_virtualization(nested.as_str().into());
            data = data.cpu_options(options.build());
        }
        if self.capacity_type == CapacityType::Spot {
            data = data.tag_specifications(self.tag_specification(ResourceType::SpotInstancesRequest));
        }
        data.build()
    }

    /// Tags of the template itself.
    pub fn tags(&self) -> TagSpecification {
        tag_specification(ResourceType::LaunchTemplate, &self.tags)
    }

    fn tag_specification(&self, kind: ResourceType) -> LaunchTemplateTagSpecificationRequest {
        LaunchTemplateTagSpecificationRequest::builder().resource_type(kind).set_tags(Some(tags(&self.tags))).build()
    }

    fn placement(&self) -> LaunchTemplatePlacementRequest {
        LaunchTemplatePlacementRequest::builder()
            .tenancy(self.tenancy.as_str().into())
            .set_group_id(self.placement_group.clone())
            .set_partition_number(self.partition)
            .build()
    }

    /// Restricts instances to the chosen reservation, or to none, so that EC2 does not use other open reservations.
    fn reservations(&self) -> Option<LaunchTemplateCapacityReservationSpecificationRequest> {
        let request = LaunchTemplateCapacityReservationSpecificationRequest::builder();
        let request = match &self.reservation {
            Some(reservation) => request
                .capacity_reservation_preference(CapacityReservationPreference::CapacityReservationsOnly)
                .capacity_reservation_target(
                    CapacityReservationTarget::builder().capacity_reservation_id(&reservation.id).build(),
                ),
            None => request.capacity_reservation_preference(CapacityReservationPreference::None),
        };
        self.manages_reservations.then(|| request.build())
    }

    /// The market type of capacity blocks and interruptible reservations.
    fn market(&self) -> Option<LaunchTemplateInstanceMarketOptionsRequest> {
        let market = match self.reservation.as_ref()?.kind {
            ReservationKind::OnDemand => return None,
            ReservationKind::CapacityBlock => MarketType::CapacityBlock,
            ReservationKind::Interruptible => MarketType::InterruptibleCapacityReservation,
        };
        Some(LaunchTemplateInstanceMarketOptionsRequest::builder().market_type(market).build())
    }

    fn metadata(&self, options: &MetadataOptions) -> LaunchTemplateInstanceMetadataOptionsRequest {
        let mut out = LaunchTemplateInstanceMetadataOptionsRequest::builder()
            .set_http_endpoint(options.http_endpoint.as_deref().map(Into::into))
            .set_http_put_response_hop_limit(options.http_put_response_hop_limit.and_then(|hops| hops.try_into().ok()))
            .set_http_tokens(options.http_tokens.as_deref().map(Into::into))
            .instance_metadata_tags(LaunchTemplateInstanceMetadataTagsState::Disabled);
        if !NO_METADATA_IPV6.contains(&self.region.as_str()) {
            out = out.set_http_protocol_ipv6(options.http_protocol_ipv6.as_deref().map(Into::into));
        }
        out.build()
    }

    /// The metadata options in the form of RunInstances.
    pub fn metadata_of_request(&self) -> Option<InstanceMetadataOptionsRequest> {
        let of_template = self.metadata(self.metadata.as_ref()?);
        let of_request = InstanceMetadataOptionsRequest::builder()
            .set_http_endpoint(of_template.http_endpoint().map(|value| value.as_str().into()))
            .set_http_put_response_hop_limit(of_template.http_put_response_hop_limit())
            .set_http_tokens(of_template.http_tokens().map(|value| value.as_str().into()))
            .set_http_protocol_ipv6(of_template.http_protocol_ipv6().map(|value| value.as_str().into()))
            .set_instance_metadata_tags(of_template.instance_metadata_tags().map(|value| value.as_str().into()));
        Some(of_request.build())
    }

    /// The interfaces of the class, else one EFA interface per card, else a single interface.
    fn interfaces(&self) -> Vec<LaunchTemplateInstanceNetworkInterfaceSpecificationRequest> {
        if !self.network_interfaces.is_empty() {
            return self.network_interfaces.iter().map(|interface| self.listed(interface)).collect();
        }
        if self.efa > 0 {
            let one = |card: i32| {
                let device = i32::from(card != 0);
                self.addressed(self.interface(device).network_card_index(card).interface_type("efa")).build()
            };
            return (0..self.efa).map(one).collect();
        }
        vec![self.addressed(self.interface(0)).build()]
    }

    fn listed(&self, interface: &NetworkInterface) -> LaunchTemplateInstanceNetworkInterfaceSpecificationRequest {
        let out = self
            .interface(interface.device_index)
            .network_card_index(interface.network_card_index)
            .interface_type(&interface.interface_type);
        if interface.interface_type == "efa-only" { out.build() } else { self.addressed(out).build() }
    }

    fn interface(&self, device: i32) -> Interface {
        LaunchTemplateInstanceNetworkInterfaceSpecificationRequest::builder()
            .device_index(device)
            .set_groups(Some(self.security_groups.clone()))
    }

    /// An interface with IP addresses.
    fn addressed(&self, interface: Interface) -> Interface {
        let tracking = self.connection_tracking.as_ref().map(|tracking| {
            ConnectionTrackingSpecificationRequest::builder()
                .set_tcp_established_timeout(tracking.tcp_established_timeout)
                .set_udp_stream_timeout(tracking.udp_stream_timeout)
                .set_udp_timeout(tracking.udp_timeout)
                .build()
        });
        let out =
            interface.set_associate_public_ip_address(self.public_ip).set_connection_tracking_specification(tracking);
        if self.ipv6 {
            out.primary_ipv6(true).ipv6_address_count(1).set_ipv6_prefix_count(self.ip_prefixes)
        } else {
            out.set_ipv4_prefix_count(self.ip_prefixes)
        }
    }
}

type Interface = aws_sdk_ec2::types::builders::LaunchTemplateInstanceNetworkInterfaceSpecificationRequestBuilder;

fn block_device(mapping: &BlockDeviceMapping) -> LaunchTemplateBlockDeviceMappingRequest {
    let some = |value: Option<i64>| value.filter(|value| *value != 0).and_then(|value| i32::try_from(value).ok());
    let ebs = mapping.ebs.as_ref().map(|ebs| {
        LaunchTemplateEbsBlockDeviceRequest::builder()
            .set_delete_on_termination(ebs.delete_on_termination)
            .set_encrypted(ebs.encrypted)
            .set_volume_type(ebs.volume_type.as_deref().map(Into::into))
            .set_iops(some(ebs.iops))
            .set_throughput(some(ebs.throughput))
            .set_kms_key_id(ebs.kms_key_id.clone())
            .set_snapshot_id(ebs.snapshot_id.clone())
            .set_volume_initialization_rate(ebs.volume_initialization_rate)
            .set_volume_size(ebs.volume_size.as_deref().and_then(gibibytes))
            .build()
    });
    LaunchTemplateBlockDeviceMappingRequest::builder().set_device_name(mapping.device_name.clone()).set_ebs(ebs).build()
}

/// A size in whole GiB, rounded up; `None` for a text that the schema rejects.
fn gibibytes(size: &str) -> Option<i32> {
    let bytes = parse_bytes(size).ok()?;
    i32::try_from(bytes.0.checked_add((1 << 30) - 1)? >> 30).ok()
}

#[cfg(test)]
pub(crate) mod tests;
