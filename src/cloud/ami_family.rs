//! AMI families: the bootstrap format of an image, and its consequences for user data, volumes and node resources.

use std::fmt;

use stowage_api::Ec2NodeClassSpec;
use stowage_api::node_class::{BlockDevice, BlockDeviceMapping};

/// The bootstrap format of an image, from `spec.amiFamily` or an alias ([`AmiFamily::of`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AmiFamily {
    /// Amazon Linux 2; its user data also works with EKS images of Ubuntu.
    Al2,
    /// Amazon Linux 2023, configured by nodeadm.
    Al2023,
    /// Bottlerocket, configured by TOML settings.
    Bottlerocket,
    /// Windows Server 2019.
    Windows2019,
    /// Windows Server 2022.
    Windows2022,
    /// Windows Server 2025.
    Windows2025,
    /// An unknown image: its user data is the class's, unchanged.
    #[default]
    Custom,
}

/// Device names of default volumes.
const XVDA: &str = "/dev/xvda";
const XVDB: &str = "/dev/xvdb";
const SDA1: &str = "/dev/sda1";

impl AmiFamily {
    pub const ALL: [Self; 7] = [
        Self::Al2,
        Self::Al2023,
        Self::Bottlerocket,
        Self::Windows2019,
        Self::Windows2022,
        Self::Windows2025,
        Self::Custom,
    ];

    /// The family of a class's images: `amiFamily`, else that of the alias, else [`AmiFamily::Custom`]. A name that is not in the
    /// schema, such as `Ubuntu`, is AL2.
    pub fn of(spec: &Ec2NodeClassSpec) -> Self {
        let name = spec.effective_ami_family();
        Self::ALL.into_iter().find(|family| family.as_str() == name).unwrap_or(Self::Al2)
    }

    /// The name in `spec.amiFamily`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Al2 => "AL2",
            Self::Al2023 => "AL2023",
            Self::Bottlerocket => "Bottlerocket",
            Self::Windows2019 => "Windows2019",
            Self::Windows2022 => "Windows2022",
            Self::Windows2025 => "Windows2025",
            Self::Custom => "Custom",
        }
    }

    /// Whether the nodes run Windows.
    pub const fn is_windows(self) -> bool {
        self.windows_build().is_some()
    }

    /// The value of the label `node.kubernetes.io/windows-build` on its nodes.
    pub const fn windows_build(self) -> Option<&'static str> {
        match self {
            Self::Windows2019 => Some("10.0.17763"),
            Self::Windows2022 => Some("10.0.20348"),
            Self::Windows2025 => Some("10.0.26100"),
            Self::Al2 | Self::Al2023 | Self::Bottlerocket | Self::Custom => None,
        }
    }

    /// Whether kube-reserved memory follows the number of pods that the network interfaces allow, regardless of `maxPods`.
    pub const fn reserves_memory_by_interfaces(self) -> bool {
        matches!(self, Self::Al2 | Self::Al2023 | Self::Custom)
    }

    /// Whether the image can configure `podsPerCore`.
    pub const fn honors_pods_per_core(self) -> bool {
        !matches!(self, Self::Bottlerocket)
    }

    /// Whether pods use addresses of the network interfaces, which limit their number.
    pub const fn limits_pods_by_interfaces(self) -> bool {
        !self.is_windows()
    }

    /// Whether the node gets every field of the class's kubelet configuration, instead of a fixed set of mapped fields.
    pub const fn passes_all_kubelet_fields(self) -> bool {
        matches!(self, Self::Al2023)
    }

    /// Whether an image can boot on an instance family (as `m7g`) and Kubernetes architecture: AL2023 does not support the
    /// processors of a1, and Windows does not support Arm. [`AmiFamily::Custom`] is assumed to boot.
    pub fn boots_on(self, instance_family: &str, architecture: &str) -> bool {
        match self {
            Self::Al2023 => instance_family != "a1",
            Self::Windows2019 | Self::Windows2022 | Self::Windows2025 => architecture == "amd64",
            Self::Al2 | Self::Bottlerocket | Self::Custom => true,
        }
    }

    /// Device of the volume with the pods' ephemeral storage; unknown for [`AmiFamily::Custom`].
    pub const fn ephemeral_device(self) -> Option<&'static str> {
        match self {
            Self::Al2 | Self::Al2023 => Some(XVDA),
            Self::Bottlerocket => Some(XVDB),
            Self::Windows2019 | Self::Windows2022 | Self::Windows2025 => Some(SDA1),
            Self::Custom => None,
        }
    }

    /// Volumes of a class without block device mappings. Empty for [`AmiFamily::Custom`]: the image defines them.
    pub fn default_block_devices(self) -> Vec<BlockDeviceMapping> {
        let volumes: &[(&str, &str)] = match self {
            Self::Al2 | Self::Al2023 => &[(XVDA, "20Gi")],
            Self::Bottlerocket => &[(XVDA, "4Gi"), (XVDB, "20Gi")],
            Self::Windows2019 | Self::Windows2022 | Self::Windows2025 => &[(SDA1, "50Gi")],
            Self::Custom => &[],
        };
        let mapping = |(device, size): &(&str, &str)| BlockDeviceMapping {
            device_name: Some((*device).to_owned()),
            ebs: Some(BlockDevice {
                encrypted: Some(true),
                volume_size: Some((*size).to_owned()),
                volume_type: Some("gp3".to_owned()),
                ..BlockDevice::default()
            }),
            root_volume: false,
        };
        volumes.iter().map(mapping).collect()
    }
}

impl fmt::Display for AmiFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use stowage_api::node_class::AmiSelectorTerm;

    use super::*;

    #[test]
    fn the_family_is_named_or_that_of_the_alias_or_custom() {
        for (named, alias, expected) in [
            (None, Some("al2@v20240807"), AmiFamily::Al2),
            (None, Some("al2023@latest"), AmiFamily::Al2023),
            (None, Some("bottlerocket@v1.20.4"), AmiFamily::Bottlerocket),
            (None, Some("windows2019@latest"), AmiFamily::Windows2019),
            (None, Some("windows2022@latest"), AmiFamily::Windows2022),
            (None, Some("windows2025@latest"), AmiFamily::Windows2025),
            (Some("Custom"), Some("al2023@latest"), AmiFamily::Custom),
            (Some("Bottlerocket"), None, AmiFamily::Bottlerocket),
            (Some("Windows2025"), None, AmiFamily::Windows2025),
            (Some("Ubuntu"), None, AmiFamily::Al2),
            (None, Some("arch@latest"), AmiFamily::Custom),
            (None, None, AmiFamily::Custom),
        ] {
            let spec = Ec2NodeClassSpec {
                ami_family: named.map(str::to_owned),
                ami_selector_terms: vec![AmiSelectorTerm {
                    alias: alias.map(str::to_owned),
                    ..AmiSelectorTerm::default()
                }],
                ..Ec2NodeClassSpec::default()
            };
            assert_eq!(AmiFamily::of(&spec), expected, "{named:?} {alias:?}");
        }
    }

    #[test]
    fn features_match_the_reference() {
        // Memory by interfaces, podsPerCore, pods by interfaces, all kubelet fields.
        for (family, features) in [
            (AmiFamily::Al2, [true, true, true, false]),
            (AmiFamily::Al2023, [true, true, true, true]),
            (AmiFamily::Bottlerocket, [false, false, true, false]),
            (AmiFamily::Windows2019, [false, true, false, false]),
            (AmiFamily::Windows2022, [false, true, false, false]),
            (AmiFamily::Windows2025, [false, true, false, false]),
            (AmiFamily::Custom, [true, true, true, false]),
        ] {
            let have = [
                family.reserves_memory_by_interfaces(),
                family.honors_pods_per_core(),
                family.limits_pods_by_interfaces(),
                family.passes_all_kubelet_fields(),
            ];
            assert_eq!(have, features, "{family}");
        }
    }

    #[test]
    fn the_ephemeral_device_is_the_last_default_volume() {
        for (family, expected) in [
            (AmiFamily::Al2, "/dev/xvda 20Gi"),
            (AmiFamily::Al2023, "/dev/xvda 20Gi"),
            (AmiFamily::Bottlerocket, "/dev/xvda 4Gi, /dev/xvdb 20Gi"),
            (AmiFamily::Windows2022, "/dev/sda1 50Gi"),
            (AmiFamily::Custom, ""),
        ] {
            let volumes = family.default_block_devices();
            let text = |mapping: &BlockDeviceMapping| {
                let ebs = mapping.ebs.as_ref().unwrap();
                assert_eq!((ebs.encrypted, ebs.volume_type.as_deref()), (Some(true), Some("gp3")));
                format!("{} {}", mapping.device_name.as_ref().unwrap(), ebs.volume_size.as_ref().unwrap())
            };
            assert_eq!(volumes.iter().map(text).collect::<Vec<_>>().join(", "), expected, "{family}");
            let last = volumes.last().and_then(|mapping| mapping.device_name.as_deref());
            assert_eq!(family.ephemeral_device(), last, "{family}");
        }
    }

    #[test]
    fn al2023_does_not_boot_on_a1_nor_windows_on_arm() {
        for (family, instance_family, architecture, expected) in [
            (AmiFamily::Al2023, "a1", "arm64", false),
            (AmiFamily::Al2023, "m7g", "arm64", true),
            (AmiFamily::Al2, "a1", "arm64", true),
            (AmiFamily::Custom, "a1", "arm64", true),
            (AmiFamily::Windows2022, "m7g", "arm64", false),
            (AmiFamily::Windows2022, "m7i", "amd64", true),
        ] {
            assert_eq!(family.boots_on(instance_family, architecture), expected, "{family} {instance_family}");
        }
    }
}
