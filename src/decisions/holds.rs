//! Resolves the plans of NodeClaims to live holds. Every replica and every restart derives the same holds from the same objects.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::pod_class::PodClass;
use stowage_model::resources::Resources;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::panics::{Panic, catch};

use crate::state::node_state::BOOT_TIMEOUT;
use crate::state::object_ext::ObjectExt;
use crate::state::plan_record::{Hold, Holds, Owner, PlanRecord};
use crate::state::pods::PodRecord;
use crate::state::tables::ClusterState;

/// Duration of a hold on a node that is yet to boot.
pub const HOLD_LAUNCH: Duration = BOOT_TIMEOUT;
/// Duration of a hold on a registered node.
pub const HOLD_READY: Duration = Duration::from_mins(1);

/// Longest reuse of a result after a change that cannot affect it.
const MAX_AGE: Duration = Duration::from_secs(1);

/// A NodeClaim whose evaluation panicked is evaluated again after this time.
const LEFT_OUT: Duration = Duration::from_secs(30);

/// The last result of [`resolve`] for one [`ClusterState`], reused until a change that affects holds, or until a hold ends.
#[derive(Debug, Default)]
pub struct HoldsCache {
    last: Option<Resolved>,
    /// NodeClaims whose evaluation panicked, with the end of the time for which they are left out.
    panicked: BTreeMap<String, UnixMillis>,
}

#[derive(Debug)]
struct Resolved {
    holds: Arc<Holds>,
    /// [`ClusterState::revision`], and the part of it that affects holds.
    revision: (u64, u64),
    at: UnixMillis,
    /// End of the first hold.
    until: UnixMillis,
}

impl Resolved {
    fn is_current(&self, state: &ClusterState, now: UnixMillis) -> bool {
        let unchanged = self.revision.0 == state.revision;
        let unaffected = self.revision.1 == state.hold_revision && now >= self.at && now < self.at + MAX_AGE;
        // After the clock was set back, holds that had ended are live again, and changes of them were not recorded.
        let set_back = self.at.max(state.observed_at()) > now + MAX_AGE;
        (unchanged || unaffected) && !set_back && now < self.until
    }
}

impl HoldsCache {
    /// The last result, and its time.
    pub fn last(&self) -> Option<(UnixMillis, Arc<Holds>)> {
        self.last.as_ref().map(|last| (last.at, Arc::clone(&last.holds)))
    }

    /// The live holds at `now`.
    pub fn resolve(&mut self, state: &ClusterState, now: UnixMillis) -> Arc<Holds> {
        self.resolve_by(state, now, |_, _| ())
    }

    fn resolve_by(&mut self, state: &ClusterState, now: UnixMillis, before: impl Fn(Step, &str)) -> Arc<Holds> {
        if let Some(last) = self.last.as_ref().filter(|last| last.is_current(state, now)) {
            return Arc::clone(&last.holds);
        }
        self.panicked.retain(|_, until| now < *until && *until <= now + LEFT_OUT);
        let (holds, panics) = evaluate(state, now, |claim| self.panicked.contains_key(claim), before);
        for (claim, panic) in panics {
            tracing::error!(claim, %panic, "hold evaluation panicked, keeping the last holds");
            self.panicked.insert(claim, now + LEFT_OUT);
        }
        let holds = Arc::new(holds);
        let until = state.held_after(now).next().map_or(UnixMillis::MAX, |(until, _)| *until);
        let retried = self.panicked.values().min().copied().unwrap_or(UnixMillis::MAX);
        let revision = (state.revision, state.hold_revision);
        self.last = Some(Resolved { holds: Arc::clone(&holds), revision, at: now, until: until.min(retried) });
        holds
    }
}

/// The live holds at `now`: first those of the planned pods themselves, on every claim; then the room of displaced pods that are
/// gone is assigned to their successors.
#[cfg(test)]
pub fn resolve(state: &ClusterState, now: UnixMillis) -> Holds {
    evaluate(state, now, |_| false, |_, _| ()).0
}

/// A part of the evaluation of one NodeClaim, which may panic without an effect on other NodeClaims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The planned pods themselves.
    Own,
    /// The successors of displaced pods.
    Successors,
    /// What no longer fits on the node.
    Fit,
}

/// The live holds at `now`, and the NodeClaims whose evaluation panicked, which is a defect. `before` is called before each step. Of a
/// NodeClaim that is left out, or whose pods' evaluation panics, each waiting pod that its plan names keeps its hold: otherwise each
/// plan would purchase another node for it.
fn evaluate(
    state: &ClusterState,
    now: UnixMillis,
    is_left_out: impl Fn(&str) -> bool,
    before: impl Fn(Step, &str),
) -> (Holds, Vec<(String, Panic)>) {
    let (mut holds, mut panics) = (Holds::default(), Vec::new());
    let (mut open, mut strays) = (Displaced::new(), BTreeMap::new());
    let mut names: Vec<&String> = state.held_after(now).map(|(_, name)| name).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let (Some(claim), Some(planned)) = (state.claims.get(name), state.planned.get(name)) else { continue };
        if !keeps_room(claim) {
            continue;
        }
        let own = || {
            before(Step::Own, name);
            own_holds(state, claim, planned, now)
        };
        let live = if is_left_out(name) {
            named_holds(state, planned, now)
        } else {
            match catch(own) {
                Ok(own) => {
                    if !own.displaced.is_empty() {
                        open.insert(name, own.displaced);
                    }
                    strays.extend(own.strays.into_iter().map(|pod| (pod.clone(), name.clone())));
                    own.live
                }
                Err(panic) => {
                    panics.push((name.clone(), panic));
                    named_holds(state, planned, now)
                }
            }
        };
        for pod in live.iter().filter_map(|hold| hold.pod.clone()) {
            holds.by_pod.entry(pod).or_insert_with(|| name.clone());
        }
        if !live.is_empty() {
            holds.by_claim.insert(name.clone(), live);
        }
    }
    let of_owners = successors_of_owners(state, &open, now);
    let mut rooms: BTreeMap<&String, Vec<Room<'_>>> = BTreeMap::new();
    for (name, displaced) in open {
        let found = catch(|| {
            before(Step::Successors, name);
            rooms_of(state, name, displaced, &of_owners)
        });
        match found {
            Ok(found) => drop(rooms.insert(name, found)),
            Err(panic) => panics.push((name.clone(), panic)),
        }
    }
    assign(state, &mut rooms, &of_owners, &holds);
    for (name, rooms) in rooms {
        match catch(|| successors(state, name, &rooms)) {
            Ok(successors) if successors.is_empty() => {}
            Ok(successors) => holds.by_claim.entry(name.clone()).or_default().extend(successors),
            Err(panic) => panics.push((name.clone(), panic)),
        }
    }
    for (name, live) in &mut holds.by_claim {
        if is_left_out(name) {
            continue;
        }
        if let Some(node) = state.claims.get(name).and_then(|claim| state.node_of(claim)) {
            let fit = catch(|| {
                before(Step::Fit, name);
                drop_overcommitted(state, node, live);
            });
            panics.extend(fit.err().map(|panic| (name.clone(), panic)));
        }
    }
    // A pod that several plans name has the first of the holds that are left: its withdrawal from the other plans failed.
    holds.by_pod.clear();
    for (name, live) in &mut holds.by_claim {
        live.retain(|hold| {
            let Some(pod) = &hold.pod else { return true };
            holds.by_pod.entry(pod.clone()).or_insert_with(|| name.clone()) == name
        });
    }
    holds.by_claim.retain(|_, live| !live.is_empty());
    holds.strays = of_owners.into_values().flat_map(|of_owner| of_owner.strays).chain(strays).collect();
    (holds, panics)
}

/// Whether the plan of a claim counts: its node stays, unless it is empty.
pub fn keeps_room(claim: &NodeClaim) -> bool {
    let is_leaving = |why: &String| !why.starts_with("Empty/");
    !claim.is_deleting() && !claim.annotations().get(labels::DISRUPTING).is_some_and(is_leaving)
}

/// Controllers of displaced pods: namespace and UID.
pub type OwnerKey = (String, String);

/// Displaced pods that are gone, by the NodeClaim whose plan names them.
type Displaced<'a> = BTreeMap<&'a String, Vec<(&'a String, &'a Owner)>>;

/// The successors of the displaced pods of one controller.
struct Successors<'s> {
    /// How many displaced pods that are planned on a NodeClaim have a successor that is bound, there or elsewhere.
    bound: BTreeMap<&'s String, usize>,
    waiting: Vec<&'s PodRecord>,
    /// Those bound elsewhere, with the NodeClaim where room was kept for them until then.
    strays: BTreeMap<String, String>,
}

/// Of the controllers of displaced pods that room may be kept for.
fn successors_of_owners<'s>(
    state: &'s ClusterState,
    open: &Displaced<'s>,
    now: UnixMillis,
) -> BTreeMap<OwnerKey, Successors<'s>> {
    let mut of_owner: BTreeMap<OwnerKey, Vec<(&String, &Owner)>> = BTreeMap::new();
    for (claim, displaced) in open {
        for (original, owner) in displaced {
            of_owner.entry(owner_key(original, owner)).or_default().push((*claim, *owner));
        }
    }
    let of = |(key, planned): (OwnerKey, Vec<_>)| {
        let found = catch(|| Successors::of(state, &key, planned, now));
        let found = found.inspect_err(|panic| tracing::error!(%panic, "evaluation of successors panicked"));
        Some((key, found.ok()??))
    };
    of_owner.into_iter().filter_map(of).collect()
}

impl<'s> Successors<'s> {
    /// `planned` are displaced pods that are gone, each as the NodeClaim it is planned on and its owner. `None` when no room is kept for any.
    fn of(
        state: &'s ClusterState,
        key: &OwnerKey,
        mut planned: Vec<(&'s String, &'s Owner)>,
        now: UnixMillis,
    ) -> Option<Self> {
        let waiting: Vec<&PodRecord> =
            pods_of(state, key).filter(|pod| pod.node.is_none() && pod.deleted_at.is_none()).collect();
        if waiting.is_empty() && planned.iter().all(|(_, owner)| has_left(state, owner)) {
            return None;
        }
        planned.sort_by_key(|(claim, owner)| (owner.planned_at, *claim));
        let earliest = planned.first()?.1.planned_at;
        let mut by_node: HashMap<String, VecDeque<usize>> = HashMap::new();
        for (at, (claim, _)) in planned.iter().enumerate() {
            if let Some(node) = node_name_of(state, claim) {
                by_node.entry(node).or_default().push_back(at);
            }
        }
        let mut out = Self { bound: BTreeMap::new(), waiting, strays: BTreeMap::new() };
        let mut pods = bound_successors(state, key, earliest);
        without_settled(state, key, &mut pods, now);
        let mut arrived = BTreeSet::new();
        // Its name says which pod a pod of a StatefulSet succeeds, and no plan names it.
        pods.retain(|pod| {
            let of_node = pod.node.as_deref().and_then(|node| by_node.get_mut(node));
            let at =
                of_node.and_then(|of_node| of_node.pop_front_if(|at| is_successor(pod, planned[*at].1.planned_at)));
            arrived.extend(at);
            at.is_none() && !pod.keeps_name
        });
        for at in &arrived {
            *out.bound.entry(planned[*at].0).or_default() += 1;
        }
        let left = planned.iter().enumerate().filter(|(at, _)| !arrived.contains(at)).map(|(_, one)| *one);
        let (gone, running): (Vec<_>, Vec<_>) = left.partition(|(_, owner)| has_left(state, owner));
        let (mut gone, mut running) = (gone.into_iter().peekable(), running.into_iter().peekable());
        for pod in pods {
            let precedes = |(_, owner): &(&String, &Owner)| is_successor(pod, owner.planned_at);
            // A pod whose old node is gone has a successor before others do.
            if let Some((claim, _)) = gone.next_if(precedes) {
                *out.bound.entry(claim).or_default() += 1;
            } else if let Some((claim, _)) = running.next_if(precedes) {
                *out.bound.entry(claim).or_default() += 1;
                out.strays.insert(pod.key(), claim.clone());
            }
        }
        Some(out)
    }
}

/// Removes the successors of displaced pods whose holds have ended, or end with their node: they run as an earlier plan says, and take no room that is kept for others.
fn without_settled(state: &ClusterState, key: &OwnerKey, pods: &mut Vec<&PodRecord>, now: UnixMillis) {
    let settled_on = |node: &str| {
        let claim = state.nodes.get(node).and_then(|node| state.claim_of(node));
        let plan = claim.and_then(|claim| Some((claim, state.planned.get(&claim.name_any())?)));
        let Some((claim, planned)) = plan else { return VecDeque::new() };
        let is_settled = |(original, owner): &(&String, &Owner)| {
            owner_key(original, owner) == *key
                && !state.pods.get(*original).is_some_and(PodRecord::active)
                && (planned.until(original) <= now || !keeps_room(claim))
        };
        let mut settled: Vec<_> = planned.owners.iter().filter(is_settled).map(|(_, owner)| owner.planned_at).collect();
        settled.sort_unstable();
        settled.into()
    };
    let mut settled: HashMap<&str, VecDeque<UnixMillis>> = HashMap::new();
    pods.retain(|pod| {
        let Some(node) = pod.node.as_deref() else { return false };
        let settled = settled.entry(node).or_insert_with(|| settled_on(node));
        settled.pop_front_if(|planned_at| is_successor(pod, *planned_at)).is_none()
    });
}

/// The controller of a displaced pod, given its key.
pub fn owner_key(original: &str, owner: &Owner) -> OwnerKey {
    let namespace = original.split_once('/').map_or("", |(namespace, _)| namespace);
    (namespace.to_owned(), owner.uid.clone())
}

fn node_name_of(state: &ClusterState, claim: &str) -> Option<String> {
    state.claims.get(claim).and_then(|claim| state.node_of(claim)).map(|node| node.name_any())
}

/// Active pods of a controller. A UID may be copied to another namespace.
pub fn pods_of<'s>(state: &'s ClusterState, (namespace, uid): &OwnerKey) -> impl Iterator<Item = &'s PodRecord> {
    state.pods_of(uid).filter(move |pod| pod.active() && pod.namespace == *namespace)
}

/// The bound pods of a controller that were created after `planned_at` and that no plan names, oldest first: a plan may name pods that are bound to its
/// own node.
fn bound_successors<'s>(state: &'s ClusterState, key: &OwnerKey, planned_at: UnixMillis) -> Vec<&'s PodRecord> {
    let may_succeed = |pod: &&PodRecord| pod.node.is_some() && is_successor(pod, planned_at) && !is_named(state, pod);
    let mut pods: Vec<&PodRecord> = pods_of(state, key).filter(may_succeed).collect();
    let created = |pod: &PodRecord| pod.entry.as_ref().map_or(UnixMillis::MAX, |entry| entry.created_at);
    pods.sort_by_cached_key(|pod| (created(pod), pod.key()));
    pods
}

fn is_named(state: &ClusterState, pod: &PodRecord) -> bool {
    state.plan_index.claims_of(&pod.key()).next().is_some()
}

/// Whether a pod was created after a plan for the pods of its controller. Creation timestamps are whole seconds.
fn is_successor(pod: &PodRecord, planned_at: UnixMillis) -> bool {
    let created = pod.entry.as_ref().map(|entry| entry.created_at.0.div_euclid(1_000));
    created.is_ok_and(|created| created >= planned_at.0.div_euclid(1_000))
}

/// What follows from the pods that a plan names.
#[derive(Default)]
struct OwnHolds<'a> {
    live: Vec<Hold>,
    /// Displaced pods that are gone.
    displaced: Vec<(&'a String, &'a Owner)>,
    /// Pods whose successors have the same names, as those of a StatefulSet, and were bound elsewhere.
    strays: Vec<&'a String>,
}

fn own_holds<'a>(state: &ClusterState, claim: &NodeClaim, planned: &'a PlanRecord, now: UnixMillis) -> OwnHolds<'a> {
    let node = state.node_of(claim).map(|node| node.name_any());
    let OwnHolds { mut live, mut displaced, mut strays } = OwnHolds::default();
    for key in planned.pods.iter().filter(|key| planned.until(key) > now) {
        let until = planned.until(key);
        let record = state.pods.get(key).filter(|record| record.active());
        match (record, planned.owners.get(key)) {
            (Some(record), owner) if record.node.is_none() && record.deleted_at.is_none() => {
                live.push(hold(state, key, Some(key), owner, until));
            }
            // Bound to the planned node, or to a third one as a pod of the same name: the hold is over.
            (Some(record), _) if record.node.is_some() && record.node.as_deref() == node.as_deref() => {}
            (Some(record), Some(Owner { node: Some(source), .. }))
                if record.node.as_ref().is_some_and(|node| **node != **source) =>
            {
                strays.push(key);
            }
            // Still running on the node that it is displaced from, and its successor does not exist.
            (Some(record), Some(owner)) if record.deleted_at.is_none() && !record.has_surged() => {
                live.push(hold(state, key, None, Some(owner), until));
            }
            (_, Some(owner)) => displaced.push((key, owner)),
            _ => {}
        }
    }
    OwnHolds { live, displaced, strays }
}

/// Whether the NodeClaim that a pod was moved from is gone.
pub fn has_left(state: &ClusterState, owner: &Owner) -> bool {
    owner.source.as_ref().is_some_and(|claim| !state.claims.contains_key(claim))
}

/// A hold for each waiting pod that a plan names, whatever else is known of it.
fn named_holds(state: &ClusterState, planned: &PlanRecord, now: UnixMillis) -> Vec<Hold> {
    let waits = |key: &&String| {
        planned.until(key) > now && state.pods.get(*key).is_some_and(|pod| pod.node.is_none() && pod.active())
    };
    planned.pods.iter().filter(waits).map(|key| hold(state, key, Some(key), None, planned.until(key))).collect()
}

/// The room of a displaced pod that is gone, on its planned NodeClaim.
struct Room<'s> {
    original: &'s String,
    owner: &'s Owner,
    key: OwnerKey,
    /// Whether the NodeClaim that the pod was moved from is gone: the move no longer keeps the room.
    has_left: bool,
    /// The waiting pod that it is assigned to.
    pod: Option<&'s PodRecord>,
}

/// The room of displaced pods that are gone, on one NodeClaim, without that of pods whose successors are bound.
fn rooms_of<'s>(
    state: &ClusterState,
    name: &String,
    displaced: Vec<(&'s String, &'s Owner)>,
    of_owners: &BTreeMap<OwnerKey, Successors<'s>>,
) -> Vec<Room<'s>> {
    let mut of_owner: BTreeMap<OwnerKey, Vec<Room<'_>>> = BTreeMap::new();
    for (original, owner) in displaced {
        let (key, has_left) = (owner_key(original, owner), has_left(state, owner));
        of_owner.entry(key.clone()).or_default().push(Room { original, owner, key, has_left, pod: None });
    }
    let mut out = Vec::new();
    for (key, mut rooms) in of_owner {
        let Some(of_owner) = of_owners.get(&key) else { continue };
        rooms.sort_by_key(|room| !room.has_left);
        out.extend(rooms.into_iter().skip(of_owner.bound.get(name).copied().unwrap_or(0)));
    }
    out
}

/// Assigns room to the waiting pods of its controllers: first where a pod tolerates the planned taint, so that it may be bound there at any time. Then what
/// moves still keep; at last what they kept until their sources were gone, the latest first, for pods that are newer than the plan.
fn assign<'s>(
    state: &ClusterState,
    rooms: &mut BTreeMap<&'s String, Vec<Room<'s>>>,
    of_owners: &BTreeMap<OwnerKey, Successors<'s>>,
    holds: &Holds,
) {
    let has_no_hold = |pod: &&&PodRecord| !holds.by_pod.contains_key(&pod.key());
    let waiting = |of_owner: &Successors<'s>| of_owner.waiting.iter().filter(has_no_hold).copied().collect();
    let mut waiting: BTreeMap<&OwnerKey, VecDeque<&PodRecord>> =
        of_owners.iter().map(|(key, of_owner)| (key, waiting(of_owner))).collect();
    let uid = |name: &&'s String| state.claims.get(*name).and_then(|claim| claim.metadata.uid.clone());
    let by_uid: HashMap<String, &'s String> = rooms.keys().filter_map(|name| Some((uid(name)?, *name))).collect();
    for (key, pods) in &mut waiting {
        pods.make_contiguous().sort_by_cached_key(|pod| (!pod.admitted.is_empty(), pod.key()));
        pods.retain(|pod| {
            for name in pod.admitted.iter().filter_map(|uid| by_uid.get(&**uid)) {
                let mut of_claim = rooms.get_mut(name).into_iter().flatten();
                if let Some(room) = of_claim.find(|room| room.pod.is_none() && room.key == **key) {
                    room.pod = Some(pod);
                    return false;
                }
            }
            true
        });
    }
    let open = rooms.values_mut().flatten().filter(|room| room.pod.is_none());
    let (mut left, kept): (Vec<_>, Vec<_>) = open.partition(|room| room.has_left);
    for room in kept {
        room.pod = waiting.get_mut(&room.key).and_then(VecDeque::pop_front);
    }
    left.sort_by_key(|room| Reverse(room.owner.planned_at));
    for room in left {
        let Some(waiting) = waiting.get_mut(&room.key) else { continue };
        let newer = waiting.iter().position(|pod| is_successor(pod, room.owner.planned_at));
        room.pod = newer.and_then(|at| waiting.remove(at));
    }
}

/// The holds of assigned room on a NodeClaim, and of room that a move keeps for a pod that is to come.
fn successors(state: &ClusterState, name: &String, rooms: &[Room<'_>]) -> Vec<Hold> {
    let Some(planned) = state.planned.get(name) else { return Vec::new() };
    let kept = rooms.iter().filter(|room| room.pod.is_some() || !room.has_left);
    let hold = |room: &Room<'_>| {
        let pod = room.pod.map(PodRecord::key);
        hold(state, room.original, pod.as_ref(), Some(room.owner), planned.until(room.original))
    };
    kept.map(hold).collect()
}

/// Drops the holds that no longer fit next to the pods bound to the node, such as those bound while the plan was computed. The
/// pods of dropped holds are demand again.
fn drop_overcommitted(state: &ClusterState, node: &Node, live: &mut Vec<Hold>) {
    let Some(mut room) = free(state, node) else { return };
    live.retain(|hold| {
        let Some(class) = &hold.class else { return true };
        room.sub(&class.requests);
        let fits = is_enough(&room);
        if !fits {
            room.add(&class.requests);
        }
        fits
    });
}

/// What the bound pods leave free on a node. `None` if the kubelet has not reported its size yet.
fn free(state: &ClusterState, node: &Node) -> Option<Resources> {
    let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref())?;
    let mut room = Resources::from_map(allocatable).ok()?;
    if room.cpu.0 == 0 || room.memory.0 == 0 || room.pods == 0 {
        return None;
    }
    let name = node.name_any();
    let bound = state.pods_on(&name).filter(|pod| pod.active());
    bound.filter_map(class_of).for_each(|class| room.sub(&class.requests));
    Some(room)
}

fn is_enough(room: &Resources) -> bool {
    room.cpu.0 >= 0 && room.memory.0 >= 0 && room.pods >= 0
}

fn class_of(pod: &PodRecord) -> Option<Arc<PodClass>> {
    pod.entry.as_ref().ok().map(|entry| Arc::clone(&entry.class))
}

/// The first of these pods, all of which are planned on NodeClaims, that runs and whose successor has no hold, such as because other pods took the room.
pub fn unheld<'p>(state: &ClusterState, holds: &Holds, mut pods: impl Iterator<Item = &'p str>) -> Option<&'p str> {
    let held: HashSet<&str> = holds.by_claim.values().flatten().map(|hold| &*hold.original).collect();
    let has_owner = |pod: &PodRecord| pod.entry.as_ref().is_ok_and(|entry| entry.owner.is_some());
    pods.find(|pod| state.pods.get(*pod).is_some_and(|pod| pod.active() && has_owner(pod)) && !held.contains(pod))
}

fn hold(
    state: &ClusterState,
    original: &String,
    pod: Option<&String>,
    owner: Option<&Owner>,
    expires_at: UnixMillis,
) -> Hold {
    let owner = owner.map(|owner| owner.uid.clone());
    let own = state.pods.get(pod.unwrap_or(original)).and_then(class_of);
    // Until a displaced pod that is gone has a successor, another pod of its controller represents it.
    let of_another = || {
        let (namespace, _) = original.split_once('/')?;
        let uid = owner.as_deref().filter(|_| pod.is_none())?;
        state.pods_of(uid).filter(|other| other.namespace == namespace).find_map(class_of)
    };
    let class = own.or_else(of_another);
    Hold { original: original.clone(), pod: pod.cloned(), owner, class, expires_at }
}

#[cfg(test)]
mod tests;
