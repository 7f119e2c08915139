//! Builds the next conditions of an object's status, and writes those of a NodeClaim.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;
use stowage_api::conditions::{Conditions, EC2_NODE_CLASS_DEPENDENTS, NODE_CLAIM_DEPENDENTS, NODE_POOL_DEPENDENTS};
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;

use crate::controllers::context::Context;

/// The conditions of one object while they are evaluated.
#[derive(Debug)]
pub struct ConditionWriter {
    before: Vec<Condition>,
    list: Vec<Condition>,
    dependents: &'static [&'static str],
    generation: Option<i64>,
    created: Option<Time>,
    now: Time,
}

impl ConditionWriter {
    pub fn for_claim(claim: &NodeClaim, now: UnixMillis) -> Self {
        let list = claim.status.as_ref().map(|status| status.conditions.clone());
        Self::new(claim, list.unwrap_or_default(), NODE_CLAIM_DEPENDENTS, now)
    }

    pub fn for_pool(pool: &NodePool, now: UnixMillis) -> Self {
        let list = pool.status.as_ref().map(|status| status.conditions.clone());
        Self::new(pool, list.unwrap_or_default(), NODE_POOL_DEPENDENTS, now)
    }

    pub fn for_class(class: &Ec2NodeClass, now: UnixMillis) -> Self {
        let list = class.status.as_ref().map(|status| status.conditions.clone());
        Self::new(class, list.unwrap_or_default(), EC2_NODE_CLASS_DEPENDENTS, now)
    }

    fn new(
        object: &impl ResourceExt,
        before: Vec<Condition>,
        dependents: &'static [&'static str],
        now: UnixMillis,
    ) -> Self {
        let meta = object.meta();
        let mut writer = Self {
            list: before.clone(),
            before,
            dependents,
            generation: meta.generation,
            created: meta.creation_timestamp.clone(),
            now: Time(Timestamp::from_millisecond(now.0).unwrap_or_default()),
        };
        // Adds the conditions that the object lacks.
        writer.edit();
        writer
    }

    /// The conditions, to set or clear some of them.
    pub fn edit(&mut self) -> Conditions<'_> {
        Conditions::open(&mut self.list, self.dependents, self.generation, self.created.as_ref(), &self.now)
    }

    /// The conditions, if they differ from those of the object.
    pub fn changed(self) -> Option<Vec<Condition>> {
        (self.list != self.before).then_some(self.list)
    }

    /// The conditions.
    pub fn finish(self) -> Vec<Condition> {
        self.list
    }
}

/// Writes the conditions of a claim with one change, if it is a change.
pub async fn write_condition(
    ctx: &Context,
    claim: &NodeClaim,
    edit: impl Fn(&mut Conditions<'_>) -> bool,
) -> Result<(), kube::Error> {
    let status = |claim: &NodeClaim| {
        let mut writer = ConditionWriter::for_claim(claim, clock::now());
        edit(&mut writer.edit());
        writer.changed().map(|list| json!({ "conditions": list }))
    };
    ctx.update_claim_status(claim, status).await
}
