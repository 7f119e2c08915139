//! Interned pod selectors of a problem. Matching uses an index on one label of each selector, so that its cost does not grow with pods
//! times selectors.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use stowage_model::pod_class::{Namespaces, PodTerm, Selector};

use crate::input::pod::{Labels, PodEntry};

#[derive(PartialEq, Eq, Hash, Clone)]
struct Entry {
    selector: Selector,
    namespaces: Namespaces,
    /// Further selectors that must select the pod, too.
    others: Vec<(Selector, Namespaces)>,
}

/// A table of selectors; ids start at zero.
#[derive(Default)]
pub(crate) struct Selectors<'p> {
    entries: Vec<Entry>,
    ids: HashMap<Entry, u32>,
    by_label: HashMap<(Arc<str>, Arc<str>), Vec<u32>>,
    unindexed: Vec<u32>,
    namespace_labels: Option<&'p BTreeMap<String, Labels>>,
    /// By the addresses of labels and namespace: interned, so equal values mostly share an address.
    cache: HashMap<(*const Labels, *const u8), Arc<[u32]>>,
}

impl<'p> Selectors<'p> {
    pub fn new(namespace_labels: &'p BTreeMap<String, Labels>) -> Self {
        Self { namespace_labels: Some(namespace_labels), ..Self::default() }
    }

    /// Adds a selector over namespaces; `None` selects no pod and has no id. Invalidates cached matches.
    pub fn add(&mut self, selector: Option<&Selector>, namespaces: &Namespaces) -> Option<u32> {
        self.enter(Entry { selector: selector?.clone(), namespaces: namespaces.clone(), others: Vec::new() })
    }

    fn enter(&mut self, entry: Entry) -> Option<u32> {
        if let Some(id) = self.ids.get(&entry) {
            return Some(*id);
        }
        let id = u32::try_from(self.entries.len()).ok()?;
        let index = entry.selector.terms.iter().find(|(_, set)| !set.accepts_absence() && set.finite().is_some());
        match index {
            Some((key, set)) => {
                for value in set.finite().into_iter().flatten() {
                    self.by_label.entry((Arc::clone(key), Arc::clone(value))).or_default().push(id);
                }
            }
            None => self.unindexed.push(id),
        }
        self.ids.insert(entry.clone(), id);
        self.entries.push(entry);
        self.cache.clear();
        Some(id)
    }

    pub fn add_term(&mut self, term: &PodTerm) -> Option<u32> {
        self.add(term.selector.as_ref(), &term.namespaces)
    }

    /// Adds the conjunction of a pod's required affinity terms: as in kube-scheduler, a pod that only some terms select counts for none.
    pub fn add_required(&mut self, terms: &[PodTerm]) -> Option<u32> {
        let all: Option<Vec<_>> =
            terms.iter().map(|term| Some((term.selector.as_ref()?.clone(), term.namespaces.clone()))).collect();
        let mut others = all?;
        others.dedup();
        let (selector, namespaces) = (!others.is_empty()).then(|| others.remove(0))?;
        others.retain(|other| *other != (selector.clone(), namespaces.clone()));
        self.enter(Entry { selector, namespaces, others })
    }

    /// Ids of the selectors that select a pod, ascending.
    pub fn matching(&mut self, pod: &PodEntry) -> Arc<[u32]> {
        if self.entries.is_empty() {
            return Arc::default();
        }
        let key = (Arc::as_ptr(&pod.labels), pod.class.namespace.as_ptr());
        if let Some(known) = self.cache.get(&key) {
            return Arc::clone(known);
        }
        let mut found: Vec<u32> = self.unindexed.iter().copied().filter(|id| self.selects(*id, pod)).collect();
        for (name, value) in pod.labels.iter() {
            let label = (Arc::from(name.as_str()), Arc::from(value.as_str()));
            if let Some(candidates) = self.by_label.get(&label) {
                found.extend(candidates.iter().copied().filter(|id| self.selects(*id, pod)));
            }
        }
        found.sort_unstable();
        found.dedup();
        let found: Arc<[u32]> = found.into();
        self.cache.insert(key, Arc::clone(&found));
        found
    }

    fn selects(&self, id: u32, pod: &PodEntry) -> bool {
        let entry = &self.entries[id as usize];
        let namespace = &pod.class.namespace;
        let selects = |selector: &Selector, namespaces: &Namespaces| {
            let inside = namespaces.names.contains(namespace)
                || namespaces.selector.as_ref().is_some_and(|selector| {
                    static NONE: Labels = Labels::new();
                    let labels = self.namespace_labels.and_then(|all| all.get(namespace.as_ref()));
                    selector.selects(labels.unwrap_or(&NONE))
                });
            inside && selector.selects(&pod.labels)
        };
        selects(&entry.selector, &entry.namespaces) && entry.others.iter().all(|(s, n)| selects(s, n))
    }
}
