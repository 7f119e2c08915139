//! Objects of Karpenter's kinds that Stowage does not implement: what they ask for does not happen, and nothing else would say so.

use std::sync::Arc;
use std::time::Duration;

use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, Resource};
use stowage_model::events;
use stowage_runtime::sync::heartbeat;

use crate::controllers::context::{Context, is_not_found};

/// How often they are listed.
const PERIOD: Duration = Duration::from_mins(10);
/// Objects of each kind that are reported.
const MAX_REPORTED: u32 = 20;

/// Group, version, kind and plural; and what an object of the kind does not do.
const KINDS: [([&str; 4], &str); 2] = [
    (
        ["karpenter.sh", "v1alpha1", "NodeOverlay", "nodeoverlays"],
        "Stowage does not apply NodeOverlays: prices and capacities are those of the instance types",
    ),
    (
        ["autoscaling.x-k8s.io", "v1beta1", "CapacityBuffer", "capacitybuffers"],
        "Stowage keeps no capacity free for CapacityBuffers: deploy pods of a low priority instead",
    ),
];

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    loop {
        report(&ctx).await;
        heartbeat::rest(tokio::time::sleep(PERIOD)).await;
    }
}

async fn report(ctx: &Context) {
    for (names, note) in KINDS {
        let (resource, kind) = (resource(names), names[2]);
        let api: Api<DynamicObject> = Api::all_with(ctx.client.clone(), &resource);
        let found = match api.list_metadata(&ListParams::default().limit(MAX_REPORTED)).await {
            Ok(found) => found.items,
            // The kind is not installed.
            Err(error) if is_not_found(&error) => continue,
            Err(error) => {
                tracing::warn!(kind, %error, "failed to list objects of a kind that is not supported, retrying");
                continue;
            }
        };
        if !found.is_empty() {
            tracing::warn!(kind, objects = found.len(), note, "objects of a kind that is not supported");
        }
        for object in found {
            ctx.emit(object.object_ref(&resource), events::UNSUPPORTED_KIND.note(note)).await;
            // Events that the API server does not answer take long together, and nothing hangs.
            heartbeat::progress();
        }
    }
}

fn resource([group, version, kind, plural]: [&str; 4]) -> ApiResource {
    ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: format!("{group}/{version}"),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use kube::api::PostParams;
    use serde_json::json;

    use super::*;
    use crate::test_support::failures::World;
    use crate::test_support::kubernetes::object_store::Refusal;
    use crate::test_support::kubernetes::{FakeApi, Fault};

    /// A NodeOverlay and a CapacityBuffer.
    async fn world() -> World {
        let world = World::new(FakeApi::default());
        let client = world.context().client.clone();
        for (names, _) in KINDS {
            let resource = resource(names);
            let meta = json!({"name": "a", "namespace": (resource.kind == "CapacityBuffer").then_some("n")});
            let object = json!({"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta});
            let api: Api<DynamicObject> = match &meta["namespace"] {
                serde_json::Value::Null => Api::all_with(client.clone(), &resource),
                _ => Api::namespaced_with(client.clone(), "n", &resource),
            };
            api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        }
        world
    }

    #[tokio::test]
    async fn f21_objects_of_kinds_that_are_not_supported_are_reported() {
        let world = world().await;
        report(&world.context()).await;
        let events = world.api.events();
        for (about, note) in [("NodeOverlay/a", KINDS[0].1), ("CapacityBuffer/a", KINDS[1].1)] {
            let expected = format!("Warning UnsupportedKind on {about}: {note}");
            assert!(events.contains(&expected), "{expected} is not in {events:?}");
        }
        assert_eq!(events.len(), 2);
    }

    #[tokio::test]
    async fn a_kind_that_is_not_installed_and_one_that_may_not_be_read_keep_nothing_up() {
        for code in [404, 403, 422] {
            let world = world().await;
            let refusal = Fault::Refused(Refusal { code, ..Refusal::invalid("no") });
            world.api.inject(refusal, usize::MAX, |request| request.key.resource == "nodeoverlays");
            report(&world.context()).await;
            assert_eq!(world.api.events().len(), 1, "{code}");
        }
    }
}
