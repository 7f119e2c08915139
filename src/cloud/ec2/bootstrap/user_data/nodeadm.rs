//! AL2023: a NodeConfig for nodeadm after the user's parts. nodeadm merges NodeConfigs in order, and the last one wins.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use serde_saphyr::DuplicateKeyPolicy;

use crate::ec2::bootstrap::user_data::flags::node_labels;
use crate::ec2::bootstrap::user_data::input::{BootParameters, UserDataError};
use crate::ec2::bootstrap::user_data::mime;
use crate::ec2::bootstrap::user_data::mime::Part;
use crate::kubelet_config::KubeletMap;

const NODE_CONFIG: &str = "application/node.eks.aws";
/// Headers of a user's part that are kept.
const KEPT_HEADERS: [&str; 2] = ["Content-Type", "Content-Transfer-Encoding"];

pub(crate) fn user_data(boot: &BootParameters<'_>) -> Result<String, UserDataError> {
    let mut parts = match boot.custom() {
        None => Vec::new(),
        Some(text) if mime::is_mime(text) => {
            let mut parts = mime::parts(text)?;
            for part in &mut parts {
                part.keep_headers(&KEPT_HEADERS);
            }
            parts
        }
        Some(text) if is_node_config(text) => vec![Part::new(NODE_CONFIG, text)],
        Some(text) => vec![Part::script(text)],
    };
    parts.push(Part::new(NODE_CONFIG, &node_config(boot)?));
    Ok(mime::write(&parts))
}

/// Whether a text is a YAML mapping and not a script. Many script lines parse as a YAML mapping (`echo "a: b"`), so a first line that
/// names an interpreter decides.
fn is_node_config(text: &str) -> bool {
    if text.trim_start().starts_with("#!") {
        return false;
    }
    let options = serde_saphyr::options! { duplicate_keys: DuplicateKeyPolicy::LastWins };
    let documents: Result<Vec<Value>, _> = serde_saphyr::from_multiple_with_options(text, options);
    documents.is_ok_and(|documents| documents.first().is_some_and(Value::is_object))
}

/// The NodeConfig as YAML, with a comment about its origin.
fn node_config(boot: &BootParameters<'_>) -> Result<String, UserDataError> {
    let input = boot.input;
    let mut cluster = Map::new();
    cluster.insert("name".to_owned(), input.cluster_name.into());
    cluster.insert("apiServerEndpoint".to_owned(), input.endpoint.into());
    if let Some(bundle) = input.ca_bundle.filter(|bundle| !bundle.is_empty()) {
        STANDARD.decode(bundle).map_err(|error| UserDataError::CaBundle(error.to_string()))?;
        cluster.insert("certificateAuthority".to_owned(), bundle.into());
    }
    let cidr = input.service_cidr.filter(|cidr| !cidr.is_empty()).ok_or(UserDataError::NoServiceCidr)?;
    cluster.insert("cidr".to_owned(), cidr.into());
    let local_storage = if input.local_disks { json!({"strategy": "RAID0"}) } else { json!({}) };
    let flags: Vec<String> = node_labels(&boot.labels).into_iter().collect();
    let config = json!({
        "apiVersion": "node.eks.aws/v1alpha1",
        "kind": "NodeConfig",
        "metadata": {},
        "spec": {
            "cluster": cluster,
            "containerd": {},
            "instance": {"localStorage": local_storage},
            "kubelet": {"config": kubelet_config(boot), "flags": flags},
        },
    });
    // Values on one line are easier to find and to copy.
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    let yaml = serde_saphyr::to_string_with_options(&config, options)
        .map_err(|error| UserDataError::Write(error.to_string()))?;
    Ok(format!("# NodeConfig made by Stowage\n{yaml}"))
}

/// The kubelet configuration of the class, with defaults and with the members that the controller sets.
fn kubelet_config(boot: &BootParameters<'_>) -> KubeletMap {
    let mut config = boot.input.kubelet.cloned().unwrap_or_default();
    if !boot.cluster_dns.is_empty() {
        config.insert("clusterDNS".to_owned(), json!(boot.cluster_dns));
    }
    config.insert("maxPods".to_owned(), boot.max_pods.into());
    // Without expressions, which the kubelet can't parse.
    for (name, amounts) in
        [("kubeReserved", &boot.kubelet.kube_reserved), ("systemReserved", &boot.kubelet.system_reserved)]
    {
        if let Some(amounts) = amounts {
            config.insert(name.to_owned(), json!(amounts));
        }
    }
    let taints = boot.taints.iter().map(|taint| {
        let mut entry = json!({"effect": taint.effect, "key": taint.key});
        if let Some(value) = taint.value.as_deref().filter(|value| !value.is_empty()) {
            entry["value"] = value.into();
        }
        entry
    });
    config.insert("registerWithTaints".to_owned(), taints.collect());
    config
}
