//! EC2NodeClass status. Simulated EC2 has nothing to discover: a class is ready as soon as it is seen.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::context::{Context, gone_is_fine};
use crate::api::Ec2NodeClass;
use crate::api::conditions::{Conditions, EC2_NODE_CLASS_DEPENDENTS};

/// The state is looked at at least this often.
const TICK: Duration = Duration::from_secs(5);

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    loop {
        let classes: Vec<Arc<Ec2NodeClass>> = ctx.cluster.read().classes.values().cloned().collect();
        for class in classes {
            if let Err(error) = gone_is_fine(reconcile(&ctx, &class).await) {
                tracing::warn!(class = class.name_any(), %error, "status could not be written, trying again");
            }
        }
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        changes.mark_unchanged();
    }
}

async fn reconcile(ctx: &Context, class: &Ec2NodeClass) -> Result<(), kube::Error> {
    let before = class.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let mut list = before.clone();
    let generation = class.metadata.generation;
    let (created, now) = (class.metadata.creation_timestamp.as_ref(), Time(Timestamp::now()));
    let mut judged = Conditions::open(&mut list, EC2_NODE_CLASS_DEPENDENTS, generation, created, &now);
    for kind in EC2_NODE_CLASS_DEPENDENTS {
        judged.set_true(kind);
    }
    if list == before {
        return Ok(());
    }
    let api: Api<Ec2NodeClass> = Api::all(ctx.client.clone());
    let patch = json!({"status": {"conditions": list}});
    let class = api.patch_status(&class.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
    ctx.cluster.update(|state| state.classes.insert(class.name_any(), Arc::new(class)));
    Ok(())
}
