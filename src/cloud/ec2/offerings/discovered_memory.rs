//! Memory that nodes report. EC2 describes the machine; the share that hypervisor, firmware and kernel reserve is an estimate
//! until a node of the same instance type and image reports its capacity. Nothing is stored: registered nodes report it again
//! after a restart. Time is an argument.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::quantity::parse_bytes;
use stowage_model::time::UnixMillis;
use stowage_model::units::Bytes;

/// How long a reading is valid after a node last reported that much or less.
const TTL: Duration = Duration::from_hours(60 * 24);

#[derive(Clone, Copy, Debug)]
struct Reading {
    bytes: Bytes,
    expires_at: UnixMillis,
}

/// The least memory that a node reported, by image and instance type.
#[derive(Debug, Default)]
pub struct DiscoveredMemory {
    by_image: BTreeMap<String, BTreeMap<String, Reading>>,
    /// Incremented when a reading changes or expires.
    version: u64,
}

impl DiscoveredMemory {
    /// Records the capacity of a registered node. Idempotent; a node without image id, instance type or memory is ignored.
    pub fn record(&mut self, claim: &NodeClaim, node: &Node, now: UnixMillis) {
        let Some((image, instance_type, bytes)) = reported_memory(claim, node) else { return };
        let readings = self.by_image.entry(image.to_owned()).or_default();
        let valid = readings.get(instance_type).filter(|reading| reading.expires_at > now);
        if valid.is_some_and(|reading| reading.bytes < bytes) {
            return;
        }
        if valid.is_none_or(|reading| reading.bytes != bytes) {
            self.version += 1;
            tracing::debug!(image, instance_type, bytes = bytes.0, "discovered memory of instance type");
        }
        readings.insert(instance_type.to_owned(), Reading { bytes, expires_at: now + TTL });
    }

    /// Drops expired readings. Returns a version that changes whenever the readings do.
    pub fn prune(&mut self, now: UnixMillis) -> u64 {
        let mut expired = 0;
        self.by_image.retain(|_, readings| {
            let before = readings.len();
            readings.retain(|_, reading| reading.expires_at > now);
            expired += before - readings.len();
            !readings.is_empty()
        });
        self.version += u64::from(expired > 0);
        self.version
    }

    /// Memory of a node of an instance type with an image, as of the last [`DiscoveredMemory::prune`]; `None` where no
    /// node reported it.
    pub fn memory(&self, image: &str, instance_type: &str) -> Option<Bytes> {
        self.by_image.get(image)?.get(instance_type).map(|reading| reading.bytes)
    }
}

/// Image, instance type and memory of a claim's node. The type is the launched one: a node's own labels are not trusted.
fn reported_memory<'a>(claim: &'a NodeClaim, node: &'a Node) -> Option<(&'a str, &'a str, Bytes)> {
    let image = claim.status.as_ref()?.image_id.as_deref().filter(|image| !image.is_empty())?;
    let instance_type = claim.labels().get(labels::INSTANCE_TYPE)?;
    let memory = node.status.as_ref()?.capacity.as_ref()?.get("memory")?;
    let bytes = parse_bytes(&memory.0).ok().filter(|bytes| bytes.0 > 0)?;
    Some((image, instance_type, bytes))
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};
    use stowage_test_objects as objects;

    use super::*;

    /// Records a node of an instance type that runs an image and reports this memory.
    pub fn record(table: &mut DiscoveredMemory, image: &str, instance_type: &str, memory: &str, now: UnixMillis) {
        let (claim, node) = node(json!(image), instance_type, json!({"memory": memory}));
        table.record(&claim, &node, now);
    }

    /// A node and its claim.
    pub fn node(image: Value, instance_type: &str, capacity: Value) -> (NodeClaim, Node) {
        let own = json!({(labels::INSTANCE_TYPE): instance_type});
        let claim = objects::claim("c", &json!({"metadata": {"labels": own}, "status": {"imageID": image}}));
        (claim, objects::node("n", &json!({"status": {"capacity": capacity}})))
    }

    #[test]
    fn the_least_reported_memory_counts_for_its_image_and_type() {
        let mut table = DiscoveredMemory::default();
        let mut versions = Vec::new();
        for (image, instance_type, memory) in [
            ("ami-1", "m5.large", "8000Ki"),
            ("ami-1", "m5.large", "7900Ki"),
            ("ami-1", "m5.large", "8000Ki"),
            ("ami-1", "m5.large", "7900Ki"),
            ("ami-2", "m5.large", "7000Ki"),
            ("ami-1", "c5.large", "3900Ki"),
        ] {
            record(&mut table, image, instance_type, memory, UnixMillis(0));
            versions.push(table.prune(UnixMillis(0)));
        }
        assert_eq!(versions, [1, 2, 2, 2, 3, 4], "an equal reading is no change");
        let of = |image: &str, instance_type: &str| table.memory(image, instance_type).map(|bytes| bytes.0 / 1024);
        assert_eq!((of("ami-1", "m5.large"), of("ami-2", "m5.large")), (Some(7900), Some(7000)));
        assert_eq!(
            (of("ami-1", "c5.large"), of("ami-2", "c5.large"), of("ami-3", "m5.large")),
            (Some(3900), None, None)
        );
    }

    #[test]
    fn a_reading_expires_sixty_days_after_a_node_last_reported_that_much_or_less() {
        let day = |day: u64| UnixMillis(0) + Duration::from_hours(24 * day);
        let at = |later: &[(&str, u64)], last: u64| {
            let mut table = DiscoveredMemory::default();
            record(&mut table, "ami-1", "m5.large", "7900Ki", day(0));
            for (memory, reported) in later {
                record(&mut table, "ami-1", "m5.large", memory, day(*reported));
            }
            let before = table.version;
            let expired = table.prune(day(last)) != before;
            (table.memory("ami-1", "m5.large").map(|bytes| bytes.0 / 1024), expired)
        };
        assert_eq!(at(&[], 59), (Some(7900), false));
        assert_eq!(at(&[], 60), (None, true));
        assert_eq!(at(&[("7900Ki", 50)], 109), (Some(7900), false), "an equal reading renews it");
        assert_eq!(at(&[("7800Ki", 50)], 109), (Some(7800), false), "a lower reading replaces it");
        assert_eq!(at(&[("8000Ki", 50)], 60), (None, true), "a higher reading does neither");
        assert_eq!(at(&[("8000Ki", 60)], 61), (Some(8000), false), "after the expiry a higher reading applies");
    }

    #[test]
    fn a_node_that_does_not_report_image_or_memory_is_ignored() {
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
            table.record(&claim, &node, UnixMillis(0));
            assert_eq!(table.prune(UnixMillis(0)) > 0, known, "{image} {capacity}");
        }
    }
}
