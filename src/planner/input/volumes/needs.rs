//! What a pod's claims require of its node: node terms, and volumes to attach by driver.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use stowage_model::pod_class::NodeTerm;

use crate::input::volumes::conjunction::both;
use crate::input::volumes::objects::{Claim, Volume, Volumes};

/// The volume assigned to each claim; `None` where no volume is left for it. A claim without an entry has no competition: any volume
/// that serves it is fine.
pub(crate) type Assigned = HashMap<Arc<str>, Option<Arc<str>>>;

/// Why a pod must wait for its volumes: no node can help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeProblem {
    #[error("PersistentVolumeClaim {0} does not exist")]
    NoClaim(Arc<str>),
    #[error("PersistentVolumeClaim {0} is being deleted")]
    Deleting(Arc<str>),
    #[error("PersistentVolumeClaim {0} has lost its volume")]
    Lost(Arc<str>),
    #[error("PersistentVolumeClaim {claim} is bound to PersistentVolume {volume}, which does not exist")]
    NoVolume { claim: Arc<str>, volume: Arc<str> },
    /// Neither bound nor of a class that provisions volumes.
    #[error("PersistentVolumeClaim {0} is not bound and has no StorageClass")]
    Classless(Arc<str>),
    #[error("PersistentVolumeClaim {claim} is of StorageClass {class}, which does not exist")]
    NoClass { claim: Arc<str>, class: Arc<str> },
    /// Bound by the volume controller without a pod (`Immediate` binding).
    #[error("PersistentVolumeClaim {0} is not bound yet, and its StorageClass does not wait for a pod to bind it")]
    Unbound(Arc<str>),
    /// The class has no provisioner, and no volume is free.
    #[error(
        "no PersistentVolume of StorageClass {class} is free for PersistentVolumeClaim {claim}, and nothing makes one"
    )]
    NoneFree { claim: Arc<str>, class: Arc<str> },
    /// A running pod uses the `ReadWriteOncePod` claim.
    #[error("its PersistentVolumeClaim {claim} is ReadWriteOncePod and in use by pod {pod}")]
    InUse {
        claim: Arc<str>,
        /// `namespace/name` of that pod.
        pod: Arc<str>,
    },
    /// Another pod of the plan gets the `ReadWriteOncePod` claim.
    #[error("its PersistentVolumeClaim {claim} is ReadWriteOncePod, and pod {pod} comes first")]
    Taken {
        claim: Arc<str>,
        /// `namespace/name` of that pod.
        pod: Arc<str>,
    },
    /// No node can use all volumes of the pod.
    #[error("no node can have all its volumes: {0} and the others are in different places")]
    Apart(Arc<str>),
}

/// What a pod's volumes require of its node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Needs {
    pub terms: Vec<NodeTerm>,
    /// Volumes to attach, by driver.
    pub attach: BTreeMap<Arc<str>, i64>,
}

impl Volumes {
    /// The free volumes of a class that serve a claim.
    pub(crate) fn serving(&self, claim: &Claim, class: &str) -> impl Iterator<Item = (&String, &Volume)> {
        self.volumes.iter().filter(move |(_, volume)| {
            *volume.storage_class == *class && volume.free.as_ref().is_some_and(|free| claim.wanted.served_by(free))
        })
    }

    /// The class of a claim that waits for its pod and that only a free volume can serve.
    pub(crate) fn served_class(&self, claim: &Claim) -> Option<Arc<str>> {
        let name = self.class_of(claim).filter(|_| claim.volume.is_none())?;
        self.classes.get(name.as_ref()).is_some_and(|class| class.waits && class.driver.is_none()).then_some(name)
    }

    fn class_of(&self, claim: &Claim) -> Option<Arc<str>> {
        match &claim.storage_class {
            Some(name) => Some(Arc::clone(name)).filter(|name| !name.is_empty()),
            None => self.classes.iter().find(|(_, class)| class.default).map(|(name, _)| Arc::from(name.as_str())),
        }
    }

    /// The driver that attaches the volume of a claim, where it is known.
    pub(crate) fn driver_of(&self, claim: &str) -> Option<Arc<str>> {
        let claim = self.claims.get(claim)?;
        match claim.volume.as_ref().and_then(|name| self.volumes.get(name.as_ref())) {
            Some(volume) => volume.driver.clone(),
            None => self.classes.get(self.class_of(claim)?.as_ref())?.driver.clone(),
        }
    }

    /// The node terms of a claim, and the driver that attaches its volume.
    fn place(&self, key: &Arc<str>, assigned: &Assigned) -> Result<(Vec<NodeTerm>, Option<Arc<str>>), VolumeProblem> {
        let claim = self.claims.get(key.as_ref()).ok_or_else(|| VolumeProblem::NoClaim(Arc::clone(key)))?;
        if claim.deleting {
            return Err(VolumeProblem::Deleting(Arc::clone(key)));
        }
        if claim.lost {
            return Err(VolumeProblem::Lost(Arc::clone(key)));
        }
        if let Some(name) = claim.volume.as_ref().filter(|_| claim.bound) {
            let volume = self.volumes.get(name.as_ref());
            let volume = volume.ok_or_else(|| VolumeProblem::NoVolume { claim: key.clone(), volume: name.clone() })?;
            return Ok((volume.terms.clone(), volume.driver.clone()));
        }
        let name = self.class_of(claim).ok_or_else(|| VolumeProblem::Classless(Arc::clone(key)))?;
        let class = self.classes.get(name.as_ref());
        let class = class.ok_or_else(|| VolumeProblem::NoClass { claim: key.clone(), class: name.clone() })?;
        if !class.waits || claim.volume.is_some() {
            return Err(VolumeProblem::Unbound(Arc::clone(key)));
        }
        if class.driver.is_some() {
            return Ok((class.terms.clone(), class.driver.clone()));
        }
        let mut terms: BTreeSet<NodeTerm> = BTreeSet::new();
        let mut everywhere = false;
        let mut driver = None;
        let serving: Vec<&Volume> = match assigned.get(key) {
            Some(volume) => volume.iter().filter_map(|volume| self.volumes.get(volume.as_ref())).collect(),
            None => self.serving(claim, &name).map(|(_, volume)| volume).collect(),
        };
        for volume in serving {
            everywhere |= volume.terms.is_empty();
            terms.extend(volume.terms.iter().cloned());
            driver = driver.max(volume.driver.clone());
        }
        if terms.is_empty() && !everywhere {
            return Err(VolumeProblem::NoneFree { claim: Arc::clone(key), class: name });
        }
        Ok((if everywhere { Vec::new() } else { terms.into_iter().collect() }, driver))
    }

    /// The node terms of the volumes of these claims.
    ///
    /// # Errors
    /// A pod with these claims must wait.
    pub fn node_terms(&self, claims: &[Arc<str>]) -> Result<Vec<NodeTerm>, VolumeProblem> {
        self.needs(claims, &Assigned::new()).map(|needs| needs.terms)
    }

    pub(crate) fn needs(&self, claims: &[Arc<str>], assigned: &Assigned) -> Result<Needs, VolumeProblem> {
        let mut needs = Needs::default();
        for key in claims {
            let (terms, driver) = self.place(key, assigned)?;
            if !terms.is_empty() {
                needs.terms = both(&needs.terms, &terms);
                if needs.terms.is_empty() {
                    return Err(VolumeProblem::Apart(Arc::clone(key)));
                }
            }
            if let Some(driver) = driver {
                *needs.attach.entry(driver).or_default() += 1;
            }
        }
        Ok(needs)
    }
}
