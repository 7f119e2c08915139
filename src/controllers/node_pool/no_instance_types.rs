//! Reports NodePools that nothing can be purchased from, because no instance type is left for them.

use std::sync::Arc;
use std::time::Duration;

use stowage_model::events;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::{Context, reference};
use crate::controllers::provisioning::claim_template::claim_of_template;
use crate::state::claim_offers::offers;
use crate::state::pool_types::ReadyPool;

const PERIOD: Duration = Duration::from_mins(1);

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    loop {
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
        for ready in ctx.ready_pools() {
            if let Some(note) = note(&ready) {
                ctx.emit(reference(&*ready.pool), events::NO_COMPATIBLE_INSTANCE_TYPES.note(note)).await;
            }
            heartbeat::progress();
        }
    }
}

/// Why a NodePool has no offering, if it has none.
fn note(ready: &ReadyPool) -> Option<&'static str> {
    let claim = claim_of_template(&ready.pool);
    let mut known = offers(&claim, &ready.catalog).peekable();
    if known.peek().is_none() {
        return Some("no instance type of its EC2NodeClass satisfies its requirements");
    }
    let has_capacity = known.any(|(_, offering)| offering.available);
    (!has_capacity).then_some("no offering that satisfies its requirements has capacity now")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stowage_model::labels;
    use stowage_model::offering::Catalog;
    use stowage_test_objects as objects;

    use super::*;

    fn note_of(requirements: &Value, available: bool) -> Option<&'static str> {
        let mut catalog = Catalog::clone(&objects::catalog());
        for instance_type in &mut catalog.instance_types {
            for offering in &mut Arc::make_mut(instance_type).offerings {
                offering.available = available;
            }
        }
        let spec = json!({"template": {"spec": {"requirements": requirements}}});
        let pool = Arc::new(objects::node_pool("p", &json!({"spec": spec})));
        note(&ReadyPool { pool, catalog: Arc::new(catalog) })
    }

    #[test]
    fn a_node_pool_without_any_instance_type_is_reported_with_the_reason() {
        let on = |key: &str, value: &str| json!([{"key": key, "operator": "In", "values": [value]}]);
        for (requirements, available, expected) in [
            (json!([]), true, None),
            (
                on(labels::ZONE, "nowhere"),
                true,
                Some("no instance type of its EC2NodeClass satisfies its requirements"),
            ),
            (
                on(labels::ARCH, "riscv64"),
                true,
                Some("no instance type of its EC2NodeClass satisfies its requirements"),
            ),
            (json!([]), false, Some("no offering that satisfies its requirements has capacity now")),
        ] {
            assert_eq!(note_of(&requirements, available), expected, "{requirements}");
        }
    }
}
