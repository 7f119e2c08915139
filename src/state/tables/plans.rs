//! The plans of NodeClaims: those that they carry, and those that are assumed while they are written.

use kube::ResourceExt;
use stowage_api::NodeClaim;

use crate::state::plan_record::{Owner, PlanRecord};
use crate::state::tables::ClusterState;

impl ClusterState {
    /// Assumes that a NodeClaim carries this plan, until it is settled: nothing that is decided meanwhile takes the same room, or plans the same pods.
    pub fn assume_plan(&mut self, claim: &str, plan: PlanRecord) {
        if self.claims.contains_key(claim) {
            self.assumed.insert(claim.to_owned(), plan.clone());
            self.replace_plan(claim, plan);
        }
    }

    /// The assumed plan of a NodeClaim.
    pub fn assumed_plan(&self, claim: &str) -> Option<&PlanRecord> {
        self.assumed.get(claim)
    }

    /// Ends the assumption of a plan whose write ended, with or without success: from now on the plan is what the NodeClaim carries. A plan that was
    /// assumed since then stays.
    pub fn settle_plan(&mut self, claim: &str, plan: &PlanRecord) {
        if self.assumed.get(claim) != Some(plan) {
            return;
        }
        self.assumed.remove(claim);
        if let Some(carried) = self.claims.get(claim).map(|claim| PlanRecord::of(claim)) {
            self.replace_plan(claim, carried);
        }
    }

    fn replace_plan(&mut self, claim: &str, plan: PlanRecord) {
        if self.planned.get(claim) == Some(&plan) {
            return;
        }
        self.revision += 1;
        self.record_holds_of(claim);
        self.remove_plan(claim);
        self.add_plan(claim, plan);
        self.relink(claim);
    }

    /// The plan of a NodeClaim that is applied: the assumed one if there is one.
    pub(super) fn plan_of(&self, claim: &NodeClaim) -> PlanRecord {
        self.assumed.get(&claim.name_any()).cloned().unwrap_or_else(|| PlanRecord::of(claim))
    }

    pub(super) fn add_plan(&mut self, claim: &str, plan: PlanRecord) {
        if !plan.pods.is_empty() {
            self.held_until.extend(plan.ends().map(|until| (until, claim.to_owned())));
        }
        self.plan_index.add(claim, &plan);
        self.planned.insert(claim.to_owned(), plan);
    }

    pub(super) fn remove_plan(&mut self, claim: &str) {
        let Some(plan) = self.planned.remove(claim) else { return };
        self.plan_index.remove(claim, &plan);
        for until in plan.ends() {
            self.held_until.remove(&(until, claim.to_owned()));
        }
    }

    /// Whether a NodeClaim may hold room.
    pub(super) fn may_hold(&self, claim: &str) -> bool {
        self.planned.get(claim).is_some_and(|plan| !plan.pods.is_empty() && plan.ends_at() > self.observed_at)
    }

    /// Records a change of a NodeClaim or of its node that may affect the live holds. Those of other NodeClaims depend on the pods that its plan names, also
    /// after its own holds have ended.
    pub(super) fn record_holds_of(&mut self, claim: &str) {
        let Some(plan) = self.planned.get(claim) else { return };
        let concerns = |key: &String| self.pods.get(key).is_some_and(|pod| self.concerns_holds(key, pod));
        let is_live = |owner: &Owner| self.plan_index.is_live_owner(&owner.uid, self.observed_at);
        let affects = self.may_hold(claim) || plan.pods.iter().any(concerns) || plan.owners.values().any(is_live);
        self.hold_revision += u64::from(affects);
    }
}
