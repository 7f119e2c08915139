//! Which rules there are and how each is to be used.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::webhook::{accelerator_requests, accelerator_tolerations, contradictions, do_not_evict, legacy_keys};

/// Annotation on a changed pod: ids of the rules that changed it, as `n1,n13`.
pub const NORMALIZED: &str = "stowage.dev/normalized";
/// Label with the value `ignore` on pods that are to be left alone.
pub const OPT_OUT_LABEL: &str = "stowage.dev/webhook";

/// A rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// `n1`: legacy node label keys become today's.
    LegacyKeys,
    /// `n9`: `karpenter.sh/do-not-evict` also becomes `karpenter.sh/do-not-disrupt`.
    DoNotEvict,
    /// `n11`: warns when nodeSelector and node affinity cannot both hold.
    Contradictions,
    /// `n13`: pods that request accelerators tolerate the taint named after them.
    AcceleratorTolerations,
    /// `n22`: accelerator limits become requests where there are none.
    AcceleratorRequests,
}

/// How a rule is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Not at all.
    Off,
    /// The pod stays as it is; its creator is told what the rule would have done.
    Warn,
    /// The pod is changed.
    Enforce,
}

impl Rule {
    /// Every rule, in the order they run: requests before the tolerations that follow from them, warnings last.
    pub const ALL: [Self; 5] = [
        Self::LegacyKeys,
        Self::DoNotEvict,
        Self::AcceleratorRequests,
        Self::AcceleratorTolerations,
        Self::Contradictions,
    ];

    /// Id in annotations, metrics and settings.
    pub fn id(self) -> &'static str {
        match self {
            Self::LegacyKeys => "n1",
            Self::DoNotEvict => "n9",
            Self::Contradictions => "n11",
            Self::AcceleratorTolerations => "n13",
            Self::AcceleratorRequests => "n22",
        }
    }

    /// The rule with this id.
    #[must_use]
    pub fn from_id(id: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.id() == id)
    }

    /// Changes a pod; true when it did.
    pub(crate) fn apply(self, pod: &mut Value) -> bool {
        match self {
            Self::LegacyKeys => legacy_keys::apply(pod),
            Self::DoNotEvict => do_not_evict::apply(pod),
            Self::AcceleratorRequests => accelerator_requests::apply(pod),
            Self::AcceleratorTolerations => accelerator_tolerations::apply(pod),
            Self::Contradictions => false,
        }
    }

    /// What the creator of a pod should know, after all rules have changed it.
    pub(crate) fn warnings(self, pod: &Value) -> Vec<String> {
        match self {
            Self::LegacyKeys => legacy_keys::warnings(pod),
            Self::Contradictions => contradictions::warnings(pod),
            Self::DoNotEvict | Self::AcceleratorRequests | Self::AcceleratorTolerations => Vec::new(),
        }
    }

    /// What to say in [`Mode::Warn`] when the rule would have changed the pod.
    pub(crate) fn advice(self) -> &'static str {
        match self {
            Self::LegacyKeys => {
                "legacy node label keys: use topology.kubernetes.io, node.kubernetes.io and kubernetes.io keys"
            }
            Self::DoNotEvict => "karpenter.sh/do-not-evict is no longer read: use karpenter.sh/do-not-disrupt",
            Self::AcceleratorRequests => "accelerator limits without requests: set both to the same number",
            Self::AcceleratorTolerations => "accelerators are requested but their taint is not tolerated",
            Self::Contradictions => "constraints that cannot all hold",
        }
    }
}

impl Mode {
    /// Name in metrics and settings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Warn => "warn",
            Self::Enforce => "enforce",
        }
    }
}

/// Settings of the webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmissionConfig {
    /// Modes that differ from the default, which is [`Mode::Enforce`].
    pub modes: BTreeMap<Rule, Mode>,
    /// Namespaces whose pods are left alone, whatever the webhook's configuration selects.
    pub excluded_namespaces: BTreeSet<String>,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        let excluded = ["kube-system", "kube-node-lease", "kube-public"];
        Self { modes: BTreeMap::new(), excluded_namespaces: excluded.map(str::to_owned).into() }
    }
}

impl AdmissionConfig {
    /// How a rule is used.
    pub fn mode(&self, rule: Rule) -> Mode {
        self.modes.get(&rule).copied().unwrap_or(Mode::Enforce)
    }
}
