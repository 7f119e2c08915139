//! VolumeAttachments of PersistentVolumes, by node.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;

/// The attachments. Those of inline volumes are left out: they have no PersistentVolume.
#[derive(Debug, Default)]
pub struct Attachments {
    /// PersistentVolumes by attachment, by node.
    by_node: HashMap<String, BTreeMap<String, String>>,
    /// Nodes by attachment.
    node_of: BTreeMap<String, String>,
}

impl Attachments {
    /// Applies an attachment. Its node and volume never change.
    pub fn apply(&mut self, attachment: &VolumeAttachment) {
        let (name, spec) = (attachment.name_any(), &attachment.spec);
        self.delete(&name);
        let Some(volume) = spec.source.persistent_volume_name.clone() else { return };
        self.node_of.insert(name.clone(), spec.node_name.clone());
        self.by_node.entry(spec.node_name.clone()).or_default().insert(name, volume);
    }

    /// Removes an attachment.
    pub fn delete(&mut self, name: &str) {
        let Some(node) = self.node_of.remove(name) else { return };
        if let Some(on_node) = self.by_node.get_mut(&node) {
            on_node.remove(name);
            if on_node.is_empty() {
                self.by_node.remove(&node);
            }
        }
    }

    /// Names of the attachments.
    pub fn keys(&self) -> BTreeSet<String> {
        self.node_of.keys().cloned().collect()
    }

    /// The PersistentVolumes that are attached to a node.
    pub fn on(&self, node: &str) -> impl Iterator<Item = &str> {
        self.by_node.get(node).into_iter().flat_map(BTreeMap::values).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn attachment(name: &str, node: &str, source: &Value) -> VolumeAttachment {
        let spec = json!({"attacher": "ebs.csi.aws.com", "nodeName": node, "source": source});
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
    }

    #[test]
    fn attachments_are_known_by_node_until_they_are_deleted() {
        let mut attachments = Attachments::default();
        let volume = |name: &str| json!({ "persistentVolumeName": name });
        attachments.apply(&attachment("a", "x", &volume("pv-1")));
        attachments.apply(&attachment("b", "x", &volume("pv-2")));
        attachments.apply(&attachment("b", "x", &volume("pv-2")));
        attachments.apply(&attachment("c", "y", &volume("pv-3")));
        attachments.apply(&attachment("inline", "x", &json!({"inlineVolumeSpec": {}})));
        let on = |attachments: &Attachments, node: &str| attachments.on(node).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!((on(&attachments, "x"), on(&attachments, "z")), (vec!["pv-1".into(), "pv-2".into()], vec![]));
        assert_eq!(attachments.keys(), ["a", "b", "c"].map(str::to_owned).into());
        attachments.delete("a");
        attachments.delete("b");
        attachments.delete("unknown");
        assert_eq!((on(&attachments, "x"), attachments.by_node.len()), (vec![], 1));
    }
}
