//! AMI aliases: the SSM parameters behind `family@version`, and the requirements of each image.

use stowage_api::node_class::AmiRequirement;
use stowage_model::labels;

/// An SSM parameter that holds an image id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    /// Requirements of the image on instance types: one status entry for each list.
    pub requirements: Vec<Vec<AmiRequirement>>,
    /// Whether AWS updates the value with each release (`@latest`).
    pub is_latest: bool,
}

/// Why an alias can't be resolved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AliasError {
    /// AWS publishes no such images for this version of Kubernetes.
    #[error("{alias} has no images for Kubernetes {version}: {hint}")]
    Unsupported { alias: String, version: String, hint: &'static str },
    /// Not an alias.
    #[error("{0} is not an alias: expected a family and a version, as al2023@latest")]
    Unknown(String),
}

/// The accelerators that an image supports.
#[derive(Clone, Copy)]
enum Variant {
    Standard,
    Nvidia,
    Neuron,
}

impl Variant {
    fn requirements(self, arch: &str) -> Vec<AmiRequirement> {
        let exists = |key: &str, operator: &str| AmiRequirement {
            key: key.to_owned(),
            operator: operator.to_owned(),
            values: vec![],
        };
        let accelerators = "karpenter.k8s.aws/instance-accelerator-count";
        let gpus = "karpenter.k8s.aws/instance-gpu-count";
        let mut out = match self {
            Self::Standard => vec![exists(accelerators, "DoesNotExist"), exists(gpus, "DoesNotExist")],
            Self::Nvidia => vec![exists(gpus, "Exists")],
            Self::Neuron => vec![exists(accelerators, "Exists")],
        };
        out.push(one_of(labels::ARCH, arch));
        sorted(out)
    }
}

/// A requirement with one value.
pub fn one_of(key: &str, value: &str) -> AmiRequirement {
    AmiRequirement { key: key.to_owned(), operator: "In".to_owned(), values: vec![value.to_owned()] }
}

/// Requirements in the order of the status: shorter keys first, then by key.
pub fn sorted(mut requirements: Vec<AmiRequirement>) -> Vec<AmiRequirement> {
    requirements.sort_by(|a, b| a.key.len().cmp(&b.key.len()).then_with(|| a.key.cmp(&b.key)));
    requirements
}

/// The parameters of an alias for a cluster of `version`, such as `1.34`.
///
/// # Errors
/// [`AliasError`].
pub fn parameters(alias: &str, version: &str) -> Result<Vec<Parameter>, AliasError> {
    use Variant::{Neuron, Nvidia, Standard};
    let Some((family, release)) = alias.split_once('@') else {
        return Err(AliasError::Unknown(alias.to_owned()));
    };
    let is_latest = release == "latest";
    let minor = version.split_once('.').and_then(|(_, minor)| minor.parse::<u32>().ok()).unwrap_or(0);
    let unsupported = |hint| AliasError::Unsupported { alias: alias.to_owned(), version: version.to_owned(), hint };
    let parameter = |name: String, arch: &str, variants: &[Variant]| Parameter {
        name,
        requirements: variants.iter().map(|variant| variant.requirements(arch)).collect(),
        is_latest,
    };
    let optimized = "/aws/service/eks/optimized-ami";
    match family {
        "al2" if minor >= 33 => Err(unsupported("AL2 ends with 1.32, use al2023")),
        "al2" => {
            let image_parameter = |folder: &str, image: &str, arch: &str, variants: &[Variant]| {
                let image = if is_latest { "recommended".into() } else { format!("{image}-{version}-{release}") };
                parameter(format!("{optimized}/{version}/{folder}/{image}/image_id"), arch, variants)
            };
            Ok(vec![
                image_parameter("amazon-linux-2", "amazon-eks-node", "amd64", &[Standard]),
                image_parameter("amazon-linux-2-arm64", "amazon-eks-arm64-node", "arm64", &[Standard]),
                image_parameter("amazon-linux-2-gpu", "amazon-eks-gpu-node", "amd64", &[Neuron, Nvidia]),
            ])
        }
        "al2023" => {
            let image_parameter = |arch: &str, name: &str, variant: Variant| {
                let node = format!("amazon-eks-node-al2023-{arch}-{name}-{version}-{release}");
                let image = if is_latest { "recommended".into() } else { node };
                let kubernetes = if arch == "x86_64" { "amd64" } else { "arm64" };
                let path = format!("{optimized}/{version}/amazon-linux-2023/{arch}/{name}/{image}/image_id");
                parameter(path, kubernetes, &[variant])
            };
            Ok(vec![
                image_parameter("x86_64", "standard", Standard),
                image_parameter("x86_64", "nvidia", Nvidia),
                image_parameter("x86_64", "neuron", Neuron),
                image_parameter("arm64", "standard", Standard),
                image_parameter("arm64", "nvidia", Nvidia),
            ])
        }
        "bottlerocket" => {
            let image = if is_latest { "latest" } else { release.strip_prefix('v').unwrap_or(release) };
            let image_parameter = |flavor: &str, arch: &str, kubernetes: &str, variants: &[Variant]| {
                let path = format!("/aws/service/bottlerocket/aws-k8s-{version}{flavor}/{arch}/{image}/image_id");
                parameter(path, kubernetes, variants)
            };
            Ok(vec![
                image_parameter("", "x86_64", "amd64", &[Standard, Neuron]),
                image_parameter("", "arm64", "arm64", &[Standard]),
                image_parameter("-nvidia", "x86_64", "amd64", &[Nvidia]),
                image_parameter("-nvidia", "arm64", "arm64", &[Nvidia]),
            ])
        }
        "windows2025" if minor < 35 => Err(unsupported("Windows Server 2025 starts with 1.35")),
        "windows2019" | "windows2022" | "windows2025" => {
            let (year, build) = match family {
                "windows2019" => ("2019", "10.0.17763"),
                "windows2022" => ("2022", "10.0.20348"),
                _ => ("2025", "10.0.26100"),
            };
            let name = format!(
                "/aws/service/ami-windows-latest/Windows_Server-{year}-English-Core-EKS_Optimized-{version}/image_id"
            );
            let requirements = sorted(vec![
                one_of(labels::OS, "windows"),
                one_of(labels::ARCH, "amd64"),
                one_of(labels::WINDOWS_BUILD, build),
            ]);
            Ok(vec![Parameter { name, requirements: vec![requirements], is_latest: true }])
        }
        _ => Err(AliasError::Unknown(alias.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(alias: &str, version: &str) -> Vec<String> {
        parameters(alias, version).unwrap().into_iter().map(|parameter| parameter.name).collect()
    }

    #[test]
    fn parameters_have_the_names_that_aws_publishes() {
        assert_eq!(
            names("al2023@latest", "1.34"),
            [
                "/aws/service/eks/optimized-ami/1.34/amazon-linux-2023/x86_64/standard/recommended/image_id",
                "/aws/service/eks/optimized-ami/1.34/amazon-linux-2023/x86_64/nvidia/recommended/image_id",
                "/aws/service/eks/optimized-ami/1.34/amazon-linux-2023/x86_64/neuron/recommended/image_id",
                "/aws/service/eks/optimized-ami/1.34/amazon-linux-2023/arm64/standard/recommended/image_id",
                "/aws/service/eks/optimized-ami/1.34/amazon-linux-2023/arm64/nvidia/recommended/image_id",
            ]
        );
        assert_eq!(
            names("al2023@v20250101", "1.30")[3],
            "/aws/service/eks/optimized-ami/1.30/amazon-linux-2023/arm64/standard/amazon-eks-node-al2023-arm64-standard-1.30-v20250101/image_id"
        );
        assert_eq!(
            names("al2@v20240101", "1.30"),
            [
                "/aws/service/eks/optimized-ami/1.30/amazon-linux-2/amazon-eks-node-1.30-v20240101/image_id",
                "/aws/service/eks/optimized-ami/1.30/amazon-linux-2-arm64/amazon-eks-arm64-node-1.30-v20240101/image_id",
                "/aws/service/eks/optimized-ami/1.30/amazon-linux-2-gpu/amazon-eks-gpu-node-1.30-v20240101/image_id",
            ]
        );
        assert_eq!(
            names("bottlerocket@v1.20.4", "1.33"),
            [
                "/aws/service/bottlerocket/aws-k8s-1.33/x86_64/1.20.4/image_id",
                "/aws/service/bottlerocket/aws-k8s-1.33/arm64/1.20.4/image_id",
                "/aws/service/bottlerocket/aws-k8s-1.33-nvidia/x86_64/1.20.4/image_id",
                "/aws/service/bottlerocket/aws-k8s-1.33-nvidia/arm64/1.20.4/image_id",
            ]
        );
        assert_eq!(
            names("windows2022@latest", "1.33"),
            ["/aws/service/ami-windows-latest/Windows_Server-2022-English-Core-EKS_Optimized-1.33/image_id"]
        );
    }

    #[test]
    fn c29_an_alias_without_images_for_the_version_is_unsupported() {
        for (alias, version, ok) in [
            ("al2@latest", "1.32", true),
            ("al2@latest", "1.33", false),
            ("windows2025@latest", "1.34", false),
            ("windows2025@latest", "1.35", true),
        ] {
            let found = parameters(alias, version);
            assert_eq!(found.is_ok(), ok, "{alias} {version}");
            if let Err(error) = found {
                assert!(matches!(&error, AliasError::Unsupported { .. }), "{error}");
                assert!(error.to_string().contains(version));
            }
        }
        assert_eq!(parameters("plan9@latest", "1.33"), Err(AliasError::Unknown("plan9@latest".into())));
        assert_eq!(parameters("al2023", "1.33"), Err(AliasError::Unknown("al2023".into())));
    }

    #[test]
    fn an_image_for_two_kinds_of_accelerators_has_two_entries_with_short_keys_first() {
        let gpu = &parameters("al2@latest", "1.30").unwrap()[2];
        let keys: Vec<Vec<&str>> =
            gpu.requirements.iter().map(|list| list.iter().map(|requirement| &*requirement.key).collect()).collect();
        assert_eq!(
            keys,
            [
                ["kubernetes.io/arch", "karpenter.k8s.aws/instance-accelerator-count"],
                ["kubernetes.io/arch", "karpenter.k8s.aws/instance-gpu-count"],
            ]
        );
    }
}
