//! How much memory nodes really have. EC2 describes the machine; what hypervisor, firmware and kernel keep of it is an estimate
//! until a node of the same instance type and image has shown the rest. Nothing is stored: registered nodes tell it again after a
//! restart. Time is an argument.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;

use crate::api::NodeClaim;
use crate::model::labels;
use crate::model::quantity::parse_bytes;
use crate::model::units::Bytes;

/// How long a reading holds after a node last showed as much or less, milliseconds.
const TTL_MS: i64 = 60 * 24 * 3_600_000;

#[derive(Clone, Copy, Debug)]
struct Reading {
    bytes: Bytes,
    until_ms: i64,
}

/// The least memory that a node showed, by image and instance type.
#[derive(Debug, Default)]
pub struct DiscoveredMemory {
    by_image: BTreeMap<String, BTreeMap<String, Reading>>,
    /// Counts readings that differ from what was known, and those that lapsed.
    changes: u64,
}

impl DiscoveredMemory {
    /// Notes the capacity of a registered node of ours. Safe to repeat; a node that doesn't show all of it is passed over.
    pub fn note(&mut self, claim: &NodeClaim, node: &Node, now_ms: i64) {
        let Some((image, instance_type, bytes)) = shown(claim, node) else { return };
        let readings = self.by_image.entry(image.to_owned()).or_default();
        let known = readings.get(instance_type).filter(|known| known.until_ms > now_ms);
        if known.is_some_and(|known| known.bytes < bytes) {
            return;
        }
        if known.is_none_or(|known| known.bytes != bytes) {
            self.changes += 1;
            tracing::debug!(image, instance_type, bytes = bytes.0, "a node showed how much memory its type has");
        }
        readings.insert(instance_type.to_owned(), Reading { bytes, until_ms: now_ms + TTL_MS });
    }

    /// Forgets what has lapsed. Returns a number that is another one whenever the readings are.
    pub fn prune(&mut self, now_ms: i64) -> u64 {
        let mut lapsed = 0;
        self.by_image.retain(|_, readings| {
            let before = readings.len();
            readings.retain(|_, reading| reading.until_ms > now_ms);
            lapsed += before - readings.len();
            !readings.is_empty()
        });
        self.changes += u64::from(lapsed > 0);
        self.changes
    }

    /// Bytes of memory that a node of an instance type has with an image, as of the last [`DiscoveredMemory::prune`]; `None`
    /// where no node has shown it.
    pub fn of(&self, image: &str, instance_type: &str) -> Option<Bytes> {
        self.by_image.get(image)?.get(instance_type).map(|reading| reading.bytes)
    }
}

/// Image, instance type and bytes of memory of a claim's node. The type is what was launched: a node may say what it likes of itself.
fn shown<'a>(claim: &'a NodeClaim, node: &'a Node) -> Option<(&'a str, &'a str, Bytes)> {
    let image = claim.status.as_ref()?.image_id.as_deref().filter(|image| !image.is_empty())?;
    let instance_type = claim.labels().get(labels::INSTANCE_TYPE)?;
    let memory = node.status.as_ref()?.capacity.as_ref()?.get("memory")?;
    let bytes = parse_bytes(&memory.0).ok().filter(|bytes| bytes.0 > 0)?;
    Some((image, instance_type, bytes))
}

#[cfg(test)]
pub mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::objects;

    /// Notes a node of an instance type that runs an image and shows so much memory.
    pub fn note(table: &mut DiscoveredMemory, image: &str, instance_type: &str, memory: &str, now_ms: i64) {
        let (claim, node) = node(json!(image), instance_type, json!({"memory": memory}));
        table.note(&claim, &node, now_ms);
    }

    /// A node and its claim.
    pub fn node(image: Value, instance_type: &str, capacity: Value) -> (NodeClaim, Node) {
        let own = json!({(labels::INSTANCE_TYPE): instance_type});
        let claim = objects::claim("c", &json!({"metadata": {"labels": own}, "status": {"imageID": image}}));
        (claim, objects::node("n", &json!({"status": {"capacity": capacity}})))
    }

    #[test]
    fn the_least_that_a_node_showed_counts_for_its_image_and_type() {
        let mut table = DiscoveredMemory::default();
        let mut changes = Vec::new();
        for (image, instance_type, memory) in [
            ("ami-1", "m5.large", "8000Ki"),
            ("ami-1", "m5.large", "7900Ki"),
            ("ami-1", "m5.large", "8000Ki"),
            ("ami-1", "m5.large", "7900Ki"),
            ("ami-2", "m5.large", "7000Ki"),
            ("ami-1", "c5.large", "3900Ki"),
        ] {
            note(&mut table, image, instance_type, memory, 0);
            changes.push(table.prune(0));
        }
        assert_eq!(changes, [1, 2, 2, 2, 3, 4], "a reading that changes nothing is no change");
        let of = |image: &str, instance_type: &str| table.of(image, instance_type).map(|bytes| bytes.0 / 1024);
        assert_eq!((of("ami-1", "m5.large"), of("ami-2", "m5.large")), (Some(7900), Some(7000)));
        assert_eq!(
            (of("ami-1", "c5.large"), of("ami-2", "c5.large"), of("ami-3", "m5.large")),
            (Some(3900), None, None)
        );
    }

    #[test]
    fn a_reading_lapses_sixty_days_after_a_node_last_showed_as_much_or_less() {
        const DAY_MS: i64 = 86_400_000;
        let at = |later: &[(&str, i64)], day: i64| {
            let mut table = DiscoveredMemory::default();
            note(&mut table, "ami-1", "m5.large", "7900Ki", 0);
            for (memory, day) in later {
                note(&mut table, "ami-1", "m5.large", memory, day * DAY_MS);
            }
            let before = table.changes;
            let lapsed = table.prune(day * DAY_MS) != before;
            (table.of("ami-1", "m5.large").map(|bytes| bytes.0 / 1024), lapsed)
        };
        assert_eq!(at(&[], 59), (Some(7900), false));
        assert_eq!(at(&[], 60), (None, true));
        assert_eq!(at(&[("7900Ki", 50)], 109), (Some(7900), false), "an equal one renews it");
        assert_eq!(at(&[("7800Ki", 50)], 109), (Some(7800), false), "a lower one replaces it");
        assert_eq!(at(&[("8000Ki", 50)], 60), (None, true), "a higher one does neither");
        assert_eq!(at(&[("8000Ki", 60)], 61), (Some(8000), false), "once it has lapsed, a higher one counts");
    }

    #[test]
    fn a_node_that_does_not_show_image_or_memory_is_passed_over() {
        let memory = || json!({"memory": "8000Ki"});
        for (image, capacity, known) in [
            (json!("ami-1"), memory(), true),
            (json!(null), memory(), false),
            (json!(""), memory(), false),
            (json!("ami-1"), json!({"cpu": "2"}), false),
            (json!("ami-1"), json!({"memory": "0"}), false),
            (json!("ami-1"), json!({"memory": "much"}), false),
            (json!("ami-1"), json!(null), false),
        ] {
            let mut table = DiscoveredMemory::default();
            let (claim, node) = node(image.clone(), "m5.large", capacity.clone());
            table.note(&claim, &node, 0);
            assert_eq!(table.prune(0) > 0, known, "{image} {capacity}");
        }
    }
}
