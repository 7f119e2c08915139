//! What a pod's claims require of its node: node terms, and volumes to attach by driver.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::model::pod_class::NodeTerm;
use crate::planner::input::volumes::conjunction::both;
use crate::planner::input::volumes::objects::{Claim, Volume, Volumes};

/// The volume that each claim is to have; `None` where none is left for it. Claims that no other pod competes with are not
/// in it: they may have any that serves them.
pub(crate) type Assigned = HashMap<Arc<str>, Option<Arc<str>>>;

/// Why a pod has to wait for its volumes: no node would help it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeProblem {
    /// No such claim.
    #[error("PersistentVolumeClaim {0} does not exist")]
    NoClaim(Arc<str>),
    /// The claim is being deleted.
    #[error("PersistentVolumeClaim {0} is being deleted")]
    Deleting(Arc<str>),
    /// The claim lost its volume.
    #[error("PersistentVolumeClaim {0} has lost its volume")]
    Lost(Arc<str>),
    /// The claim is bound to a volume that is not there.
    #[error("PersistentVolumeClaim {claim} is bound to PersistentVolume {volume}, which does not exist")]
    NoVolume {
        /// Claim.
        claim: Arc<str>,
        /// Volume.
        volume: Arc<str>,
    },
    /// Neither bound nor of a class that could make a volume.
    #[error("PersistentVolumeClaim {0} is not bound and has no StorageClass")]
    Classless(Arc<str>),
    /// The class is not there.
    #[error("PersistentVolumeClaim {claim} is of StorageClass {class}, which does not exist")]
    NoClass {
        /// Claim.
        claim: Arc<str>,
        /// Storage class.
        class: Arc<str>,
    },
    /// Bound by the volume controller, whatever pods do.
    #[error("PersistentVolumeClaim {0} is not bound yet, and its StorageClass does not wait for a pod to bind it")]
    Unbound(Arc<str>),
    /// Nothing makes volumes of the class, and none is free.
    #[error(
        "no PersistentVolume of StorageClass {class} is free for PersistentVolumeClaim {claim}, and nothing makes one"
    )]
    NoneFree {
        /// Claim.
        claim: Arc<str>,
        /// Storage class.
        class: Arc<str>,
    },
    /// Another pod uses a claim that one pod may use.
    #[error("its PersistentVolumeClaim {claim} is ReadWriteOncePod and in use by pod {pod}")]
    InUse {
        /// Claim.
        claim: Arc<str>,
        /// `namespace/name` of the pod that has it.
        pod: Arc<str>,
    },
    /// Another pod is planned to use a claim that one pod may use.
    #[error("its PersistentVolumeClaim {claim} is ReadWriteOncePod, and pod {pod} comes first")]
    Taken {
        /// Claim.
        claim: Arc<str>,
        /// `namespace/name` of the pod that comes first.
        pod: Arc<str>,
    },
    /// Volumes that can't be on one node.
    #[error("no node can have all its volumes: {0} and the others are in different places")]
    Apart(Arc<str>),
}

/// What a pod's volumes ask of its node.
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

    /// The driver that attaches a claim's volume, where that is known.
    pub(crate) fn driver_of(&self, claim: &str) -> Option<Arc<str>> {
        let claim = self.claims.get(claim)?;
        match claim.volume.as_ref().and_then(|name| self.volumes.get(name.as_ref())) {
            Some(volume) => volume.driver.clone(),
            None => self.classes.get(self.class_of(claim)?.as_ref())?.driver.clone(),
        }
    }

    /// Where one claim lets its pod run, and what attaches it.
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
