//! Labels of an instance type, derived from EC2's description as in Karpenter's AWS provider.

use std::collections::BTreeMap;

use stowage_model::labels as keys;

use crate::ami_family::AmiFamily;
use crate::catalog::raw::{RawInstanceType, architecture};

/// The labels that all offerings of the type have on nodes of an AMI family. A key without a value is omitted: it does not exist on
/// the node.
pub(crate) fn labels(entry: &RawInstanceType, region: &str, family: AmiFamily) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    let mut put = |key: &str, value: String| {
        out.insert(key.to_owned(), value);
    };
    put(keys::INSTANCE_TYPE, entry.name.clone());
    put(keys::ARCH, architecture(entry).unwrap_or_default().to_owned());
    match family.windows_build() {
        None => put(keys::OS, "linux".to_owned()),
        Some(build) => {
            put(keys::OS, "windows".to_owned());
            put(keys::WINDOWS_BUILD, build.to_owned());
        }
    }
    put(keys::REGION, region.to_owned());

    let mut aws = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            put(&format!("karpenter.k8s.aws/{key}"), value);
        }
    };
    let number = |value: i64| Some(value.to_string());
    aws("instance-cpu", number(entry.vcpu));
    aws("instance-cpu-manufacturer", entry.cpu_manufacturer.as_deref().map(kebab));
    aws("instance-cpu-sustained-clock-speed-mhz", entry.clock_mhz.and_then(number));
    aws("instance-memory", number(entry.memory_mib));
    aws("instance-ebs-bandwidth", entry.ebs_mbps.and_then(number));
    aws("instance-network-bandwidth", entry.network_mbps.and_then(number));
    if let Some((family, size)) = entry.name.split_once('.') {
        if let Some((category, generation)) = category_and_generation(family) {
            aws("instance-category", Some(category.to_owned()));
            aws("instance-generation", Some(generation.to_owned()));
        }
        aws("instance-family", Some(family.to_owned()));
        aws("instance-size", Some(size.to_owned()));
        aws("instance-capability-flex", Some(family.contains("-flex").to_string()));
    }
    let nvme = entry.instance_store_nvme == Some(true);
    aws("instance-local-nvme", entry.instance_store_gb.filter(|_| nvme).and_then(number));
    if let [gpu] = entry.gpus.as_slice() {
        aws("instance-gpu-name", Some(kebab(&gpu.name)));
        aws("instance-gpu-manufacturer", Some(kebab(&gpu.manufacturer)));
        aws("instance-gpu-count", number(gpu.count));
        aws("instance-gpu-memory", number(gpu.memory_mib));
    }
    let accelerator = match (entry.neuron_devices.as_slice(), entry.inference_accelerators.as_slice()) {
        ([device], _) => Some((device.name.as_str(), "aws", device.count)),
        ([], [accelerator]) => Some((accelerator.name.as_str(), accelerator.manufacturer.as_str(), accelerator.count)),
        _ => None,
    };
    if let Some((name, manufacturer, count)) = accelerator {
        aws("instance-accelerator-name", Some(kebab(name)));
        aws("instance-accelerator-manufacturer", Some(kebab(manufacturer)));
        aws("instance-accelerator-count", number(count));
    }
    aws("instance-hypervisor", Some(entry.hypervisor.clone()));
    aws("instance-encryption-in-transit-supported", entry.encryption_in_transit.map(|yes| yes.to_string()));
    aws("nitro-sandbox", entry.nitro_enclaves.map(|yes| yes.to_string()));
    // The catalog has prices of shared tenancy; dedicated tenancy is priced separately.
    aws("instance-tenancy", Some("default".to_owned()));
    out
}

/// `RTX PRO Server 6000` as `rtx-pro-server-6000`: label values contain no spaces.
fn kebab(text: &str) -> String {
    text.to_lowercase().replace(' ', "-")
}

/// The leading letters of a family and the number after them, past the `-6tb` of the high-memory families.
fn category_and_generation(family: &str) -> Option<(&str, &str)> {
    let letters = family.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(family.len());
    let (category, mut rest) = family.split_at(letters);
    if let Some(tail) = rest.strip_prefix('-') {
        let digits = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        if digits > 0
            && let Some(after) = tail[digits..].strip_prefix("tb")
        {
            rest = after;
        }
    }
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let generation = &rest[..digits];
    (!category.is_empty() && !generation.is_empty()).then_some((category, generation))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn category_and_generation_are_parsed_from_the_family() {
        for (family, expected) in [
            ("m5", Some(("m", "5"))),
            ("u-6tb1", Some(("u", "1"))),
            ("u7i-12tb", Some(("u", "7"))),
            ("m7i-flex", Some(("m", "7"))),
            ("trn1n", Some(("trn", "1"))),
            ("p6-b200", Some(("p", "6"))),
            ("gr6", Some(("gr", "6"))),
            ("im4gn", Some(("im", "4"))),
            ("hpc7g", Some(("hpc", "7"))),
            ("mac-m4", None),
            ("m", None),
            ("7m", None),
            ("", None),
        ] {
            assert_eq!(category_and_generation(family), expected, "{family}");
        }
    }
}
