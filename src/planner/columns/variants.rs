//! A NodePool whose template does not fix the value of a custom label is expanded into variants, one per value that pods distinguish, so
//! that the labels of every column are definite.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use stowage_model::labels::{self, is_label_value};
use stowage_model::pod_class::PodClass;
use stowage_model::requirement::{Requirements, ValueSet};

use crate::input::pod::Labels;
use crate::input::pool::Pool;
use crate::input::problem::Problem;

/// Maximum values of one open label, and maximum variants of one NodePool.
pub(crate) const MAX_VARIANTS: usize = 128;

/// Maximum combinations of custom labels that one term of a pod contributes where variants are scarce.
const TERM_PRODUCTS: usize = 16;

/// Values of `karpenter.k8s.aws/instance-tenancy`.
const SHARED: &str = "default";
const DEDICATED: &str = "dedicated";

/// A NodePool with definite custom labels.
#[derive(Debug)]
pub(crate) struct Variant {
    /// Index into the problem's pools.
    pub pool: usize,
    /// Template labels and chosen custom labels.
    pub labels: Labels,
    /// The chosen labels, which become requirements of the NodeClaim.
    pub pinned: Vec<(String, String)>,
}

/// Keys whose value the instance type or the offering decides.
pub(crate) fn well_known(key: &str) -> bool {
    matches!(
        key,
        labels::ZONE
            | labels::REGION
            | labels::ZONE_ID
            | labels::CAPACITY_TYPE
            | labels::INSTANCE_TYPE
            | labels::ARCH
            | labels::OS
            | labels::HOSTNAME
            | "node.kubernetes.io/windows-build"
    ) || (key.starts_with("karpenter.k8s.aws/") && key != labels::EC2_NODE_CLASS)
}

/// How pods refer to a label.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Mentioned {
    values: BTreeSet<Arc<str>>,
    /// Every value is distinguished: by topology rules, or by numeric bounds.
    all: bool,
}

/// How pods and daemons refer to labels, so that open labels get a variant per distinguished value.
pub(crate) fn mentioned_values(problem: &Problem) -> HashMap<Arc<str>, Mentioned> {
    let mut out: HashMap<Arc<str>, Mentioned> = HashMap::new();
    if problem.pools.iter().all(|pool| pool.requirements.iter().all(|r| well_known(&r.key))) {
        return out;
    }
    let mut last: Option<*const PodClass> = None;
    for class in problem.pods.iter().map(|p| &p.class).chain(problem.daemons.iter().map(|d| &d.class)) {
        if last == Some(Arc::as_ptr(class)) {
            continue;
        }
        last = Some(Arc::as_ptr(class));
        let preferred = class.preferred_nodes.iter().map(|(_, term)| term);
        for term in class.node_terms.iter().chain(&class.volume_terms).chain(preferred) {
            for (key, set) in term.labels.iter() {
                let mentioned = out.entry(Arc::clone(key)).or_default();
                mentioned.all |= set.has_bounds();
                mentioned.values.extend(named_values(set));
            }
        }
        for key in
            class.spread.iter().map(|s| &s.key).chain(class.affinity.iter().chain(&class.anti_affinity).map(|t| &t.key))
        {
            out.entry(Arc::clone(key)).or_default().all = true;
        }
    }
    out
}

/// The values that a set distinguishes, as far as a node can carry them: the API server accepts any text in preferred terms.
fn named_values(set: &ValueSet) -> impl Iterator<Item = Arc<str>> {
    set.named().cloned().chain(set.some_value().map(Arc::from)).filter(|value| is_label_value(value))
}

/// Whether the product of a NodePool's open labels may exceed [`MAX_VARIANTS`].
pub(crate) fn is_crowded(pools: &[Pool], mentioned: &HashMap<Arc<str>, Mentioned>) -> bool {
    pools.iter().any(|pool| {
        let open = pool.requirements.iter().filter(|r| !well_known(&r.key));
        let counts = open.filter_map(|r| mentioned.get(r.key.as_str()).map(|mentioned| (r, mentioned)));
        let counts = counts.map(|(r, mentioned)| {
            let all = if mentioned.all && r.operator == "In" { r.values.len() } else { 0 };
            mentioned.values.len().max(all).max(1)
        });
        counts.fold(1, usize::saturating_mul) > MAX_VARIANTS
    })
}

/// The combinations of custom labels that classes of pods require or prefer, for NodePools where not every combination gets a variant.
/// Namespaces take turns, each with what it requires first, so that no tenant uses up the variants of a NodePool.
pub(crate) fn combinations(problem: &Problem) -> Vec<Labels> {
    let offered = offered_values(problem);
    let mut by_namespace: BTreeMap<Arc<str>, [BTreeSet<Labels>; 2]> = BTreeMap::new();
    let mut last: Option<*const PodClass> = None;
    for class in problem.pods.iter().map(|p| &p.class).chain(problem.daemons.iter().map(|d| &d.class)) {
        if last.replace(Arc::as_ptr(class)) == Some(Arc::as_ptr(class)) {
            continue;
        }
        let [required, preferred] = by_namespace.entry(Arc::clone(&class.namespace)).or_default();
        for term in class.node_terms.iter().chain(&class.volume_terms) {
            required.extend(products(&term.labels, &offered));
        }
        for (_, term) in &class.preferred_nodes {
            preferred.extend(products(&term.labels, &offered));
        }
    }
    let mut turns: Vec<_> = by_namespace.into_values().map(|[first, then]| first.into_iter().chain(then)).collect();
    let mut out = Vec::new();
    let mut seen = BTreeSet::new();
    while out.len() < MAX_VARIANTS && !turns.is_empty() {
        // A combination that another namespace named already costs no turn.
        turns.retain_mut(|turn| {
            turn.find(|combination| seen.insert(combination.clone())).map(|found| out.push(found)).is_some()
        });
    }
    out
}

/// The values that NodePools list for custom labels.
fn offered_values(problem: &Problem) -> HashMap<&str, BTreeSet<Arc<str>>> {
    let mut out: HashMap<&str, BTreeSet<Arc<str>>> = HashMap::new();
    let listed = problem.pools.iter().flat_map(|pool| &pool.requirements).filter(|r| r.operator == "In");
    for requirement in listed.filter(|r| !well_known(&r.key)) {
        out.entry(&requirement.key)
            .or_default()
            .extend(requirement.values.iter().map(|value| Arc::from(value.as_str())));
    }
    out
}

/// The products of the values that a term names for custom labels, or of an offered value that it accepts; at most [`TERM_PRODUCTS`].
fn products(term: &Requirements, offered: &HashMap<&str, BTreeSet<Arc<str>>>) -> Vec<Labels> {
    let mut out = vec![Labels::new()];
    for (key, set) in term.iter().filter(|(key, _)| !well_known(key)) {
        let mut values: BTreeSet<Arc<str>> = named_values(set).filter(|value| set.contains(value)).collect();
        if set.finite().is_none() {
            let accepted = offered.get(key.as_ref()).into_iter().flatten().find(|value| set.contains(value));
            values.extend(accepted.cloned());
        }
        if !values.is_empty() {
            let with = |labels: &Labels, value: &str| {
                let mut labels = labels.clone();
                labels.insert(key.to_string(), value.to_owned());
                labels
            };
            out = out
                .iter()
                .flat_map(|labels| values.iter().map(move |value| with(labels, value)))
                .take(TERM_PRODUCTS)
                .collect();
        }
    }
    out.retain(|labels| !labels.is_empty());
    out
}

pub(crate) fn has_key(pool: &Pool, requirements: &Requirements, key: &str) -> bool {
    pool.labels.contains_key(key) || requirements.get(key).is_some()
}

/// Whether some pod requires or prefers dedicated instances.
pub(crate) fn dedicated_is_requested(problem: &Problem) -> bool {
    let mut last: Option<*const PodClass> = None;
    problem.pods.iter().any(|pod| {
        if last.replace(Arc::as_ptr(&pod.class)) == Some(Arc::as_ptr(&pod.class)) {
            return false;
        }
        let preferred = pod.class.preferred_nodes.iter().map(|(_, term)| term);
        pod.class.node_terms.iter().chain(preferred).any(|term| {
            let set = term.labels.get(labels::INSTANCE_TENANCY);
            set.is_some_and(|set| set.accepts(Some(DEDICATED)) && !set.accepts(Some(SHARED)))
        })
    })
}

/// Every instance type is available in shared and in dedicated tenancy; shared is the default. A variant with dedicated tenancy is added
/// where `set` allows nothing else or, with `requested`, where a pod requests it; its tenancy is pinned.
pub(crate) fn tenancies(variants: Vec<Variant>, set: Option<&ValueSet>, requested: bool) -> Vec<Variant> {
    let may = |value: &str| set.is_none_or(|set| set.accepts(Some(value)));
    let shared = may(SHARED);
    let dedicated = may(DEDICATED) && (requested || !shared);
    let mut out = Vec::new();
    for variant in variants {
        let alone = dedicated.then(|| {
            let (key, value) = (labels::INSTANCE_TENANCY.to_owned(), DEDICATED.to_owned());
            let (mut labels, mut pinned) = (variant.labels.clone(), variant.pinned.clone());
            labels.insert(key.clone(), value.clone());
            pinned.push((key, value));
            Variant { pool: variant.pool, labels, pinned }
        });
        // Shared first: ties in price go to the first variant.
        out.extend(shared.then_some(variant));
        out.extend(alone);
    }
    out
}

/// The variants with each of `combinations`, as far as the NodePool's open labels accept them, until there are [`MAX_VARIANTS`]. A label that
/// a combination leaves open has one value, or each of its values if pods distinguish all.
pub(crate) fn expand_combinations(
    variants: &[Variant],
    open: &[(&Arc<str>, &ValueSet)],
    mentioned: &HashMap<Arc<str>, Mentioned>,
    combinations: &[Labels],
) -> Vec<Variant> {
    let mut out = Vec::new();
    let mut seen = BTreeSet::new();
    let any = Labels::new();
    // Every value of a label that pods distinguish comes last and takes the remaining variants.
    let passes =
        [(&any, false)].into_iter().chain(combinations.iter().map(|wanted| (wanted, false))).chain([(&any, true)]);
    for (combination, every) in passes {
        for variant in variants {
            let mut made =
                vec![Variant { pool: variant.pool, labels: variant.labels.clone(), pinned: variant.pinned.clone() }];
            for (key, set) in open {
                let value = combination.get(key.as_ref()).filter(|value| set.contains(value));
                let fixed = value.map(|value| ValueSet::one(value));
                let all = mentioned.get(*key).filter(|mentioned| every && mentioned.all && set.finite().is_some());
                made = expand(made, key, fixed.as_ref().unwrap_or(set), if value.is_some() { None } else { all });
            }
            for variant in made {
                if out.len() < MAX_VARIANTS && seen.insert(variant.pinned.clone()) {
                    out.push(variant);
                }
            }
        }
    }
    out
}

/// The product of the variants and the distinguished values of an open label.
pub(crate) fn expand(variants: Vec<Variant>, key: &str, set: &ValueSet, mentioned: Option<&Mentioned>) -> Vec<Variant> {
    let mut options: Vec<Option<String>> = Vec::new();
    // Values that pods name come first: the cap must not drop them.
    let named = |value: &&Arc<str>| mentioned.is_some_and(|mentioned| mentioned.values.contains(*value));
    if set.finite().is_some() {
        let values = || set.finite().into_iter().flatten();
        let most = if mentioned.is_some_and(|mentioned| mentioned.all) { usize::MAX } else { 1 };
        let others = values().filter(|value| !named(value)).take(most);
        options.extend(values().filter(named).chain(others).map(|value| Some(value.to_string())));
    } else {
        let named = mentioned.iter().flat_map(|mentioned| &mentioned.values).filter(|value| set.contains(value));
        options.extend(named.map(|value| Some(value.to_string())));
        if !set.accepts_absence() && options.is_empty() {
            options.extend(set.some_value().map(Some));
        }
    }
    if set.accepts_absence() {
        options.insert(0, None);
    }
    // No pod refers to the label: any single value is enough.
    if mentioned.is_none() {
        options.truncate(1);
    }
    options.truncate(MAX_VARIANTS);
    let mut out = Vec::new();
    for variant in &variants {
        for option in &options {
            if out.len() == MAX_VARIANTS {
                return out;
            }
            let mut labels = variant.labels.clone();
            let mut pinned = variant.pinned.clone();
            if let Some(value) = option {
                labels.insert(key.to_owned(), value.clone());
                pinned.push((key.to_owned(), value.clone()));
            }
            out.push(Variant { pool: variant.pool, labels, pinned });
        }
    }
    out
}
