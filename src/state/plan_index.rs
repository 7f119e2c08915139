//! Index of the plans that NodeClaims carry: which claims name a pod, or the controller of a displaced pod.

use std::collections::{BTreeSet, HashMap};

use stowage_model::time::UnixMillis;

use crate::state::plan_record::PlanRecord;

/// NodeClaims by the end of their holds.
type Claims = BTreeSet<(UnixMillis, String)>;

/// The index; updated with every change of a plan.
#[derive(Debug, Default)]
pub struct PlanIndex {
    by_pod: HashMap<String, Claims>,
    by_owner: HashMap<String, Claims>,
}

impl PlanIndex {
    /// Adds the plan of a claim that is not in the index.
    pub fn add(&mut self, claim: &str, plan: &PlanRecord) {
        let entry = || (plan.ends_at(), claim.to_owned());
        for pod in &plan.pods {
            self.by_pod.entry(pod.clone()).or_default().insert(entry());
        }
        for owner in plan.owners.values() {
            self.by_owner.entry(owner.uid.clone()).or_default().insert(entry());
        }
    }

    /// Removes the plan of a claim; `plan` must be equal to the plan that was added.
    pub fn remove(&mut self, claim: &str, plan: &PlanRecord) {
        let entry = (plan.ends_at(), claim.to_owned());
        for pod in &plan.pods {
            remove(&mut self.by_pod, pod, &entry);
        }
        for owner in plan.owners.values() {
            remove(&mut self.by_owner, &owner.uid, &entry);
        }
    }

    /// NodeClaims whose plans name a pod, `namespace/name`.
    pub fn claims_of(&self, pod: &str) -> impl Iterator<Item = &String> {
        self.by_pod.get(pod).into_iter().flatten().map(|(_, claim)| claim)
    }

    /// Whether a plan whose holds end after `now` names the pod.
    pub fn is_live(&self, pod: &str, now: UnixMillis) -> bool {
        ends_after(self.by_pod.get(pod), now)
    }

    /// Whether a plan whose holds end after `now` names the UID of a controller.
    pub fn is_live_owner(&self, uid: &str, now: UnixMillis) -> bool {
        ends_after(self.by_owner.get(uid), now)
    }
}

fn ends_after(claims: Option<&Claims>, now: UnixMillis) -> bool {
    claims.and_then(BTreeSet::last).is_some_and(|(until, _)| *until > now)
}

fn remove(claims: &mut HashMap<String, Claims>, key: &str, entry: &(UnixMillis, String)) {
    if let Some(of_key) = claims.get_mut(key) {
        of_key.remove(entry);
        if of_key.is_empty() {
            claims.remove(key);
        }
    }
}
