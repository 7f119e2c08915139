//! EC2NodeClasses: what each comes to in the cloud, as status and conditions; its drift hash; its end.
//!
//! A cloud that has nothing to discover, as simulated EC2, finds every class ready as soon as it is seen.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::context::{Context, gone_is_fine, is_conflict, reference};
use crate::api::conditions::{self, Conditions, DRIFTED, EC2_NODE_CLASS_DEPENDENTS};
use crate::api::{Ec2NodeClass, Ec2NodeClassStatus, NodeClaim, hash, labels};
use crate::cloud::{CloudError, Resolution, Verdict};
use crate::cluster::{State, now_ms};

/// The state is looked at at least this often.
const TICK: Duration = Duration::from_secs(5);
/// Classes that are looked up at the same time.
const CONCURRENCY: usize = 10;
/// Most claims that an event names.
const NAMED: usize = 5;

/// Why a class could not be dealt with.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("writing the class: {0}")]
    Api(#[from] kube::Error),
    #[error("deleting what was made for the class: {0}")]
    Cloud(#[from] CloudError),
}

/// When a class is looked up again, milliseconds since the epoch, unless it changes from what it was.
struct Looked {
    what: (Option<i64>, Value),
    again_ms: i64,
}

/// Runs until the process ends.
pub async fn run(ctx: Arc<Context>) {
    let mut changes = ctx.cluster.changes();
    let mut looked: HashMap<String, Looked> = HashMap::new();
    loop {
        let classes: Vec<Arc<Ec2NodeClass>> = ctx.cluster.read().classes.values().cloned().collect();
        looked.retain(|name, _| classes.iter().any(|class| class.name_any() == *name));
        let now = now_ms();
        let due = |class: &&Arc<Ec2NodeClass>| {
            let before = looked.get(&class.name_any());
            class.metadata.deletion_timestamp.is_some()
                || before.is_none_or(|before| before.what != what(class) || before.again_ms <= now)
        };
        let due: Vec<Arc<Ec2NodeClass>> = classes.iter().filter(due).cloned().collect();
        for some in due.chunks(CONCURRENCY) {
            let results = join_all(some.iter().map(|class| reconcile(&ctx, class))).await;
            for (class, result) in some.iter().zip(results) {
                let again = match result {
                    Ok(again) => again,
                    Err(Failure::Api(error)) if gone_is_fine(Err(clone(&error))).is_ok() || is_conflict(&error) => {
                        Duration::ZERO
                    }
                    Err(error) => {
                        tracing::warn!(class = class.name_any(), %error, "trying again");
                        TICK
                    }
                };
                let again_ms = now_ms() + i64::try_from(again.as_millis()).unwrap_or(i64::MAX);
                looked.insert(class.name_any(), Looked { what: what(class), again_ms });
            }
        }
        let _ = tokio::time::timeout(TICK, changes.changed()).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        changes.mark_unchanged();
    }
}
