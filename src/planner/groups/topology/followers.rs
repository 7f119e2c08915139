//! Groups that follow others by required affinity: a target must go where its followers can be.

use std::collections::{BTreeSet, HashMap};

use crate::groups::group::Group;
use crate::groups::topology::counts::Topology;
use crate::groups::topology::places::Divided;

/// Groups visited from one target.
const MAX_FOLLOWERS: usize = 100;

/// All groups with required affinity, by the counters that they follow.
#[derive(Default)]
pub(crate) struct FollowerIndex {
    members: Vec<Member>,
    by_counter: HashMap<usize, Vec<usize>>,
    /// By host counter.
    by_host: HashMap<u32, Vec<usize>>,
}

struct Member {
    /// For each key of its rules: the domains that hold its pods, where some do not, and the counters that it follows.
    keys: Vec<(usize, Option<BTreeSet<usize>>, Vec<usize>)>,
    raises: Vec<usize>,
    host_raises: Vec<u32>,
}

/// The groups that follow a group, directly or through others: where each of them can be.
#[derive(Default)]
pub(crate) struct Followers {
    all: BTreeSet<Follower>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Follower {
    /// Key, and the domains that hold the follower's pods.
    key: usize,
    domains: BTreeSet<usize>,
    /// Counter of the pods that it follows.
    counter: Option<usize>,
}

impl FollowerIndex {
    pub fn new(topology: &Topology, groups: &[Group], divided: &[Divided]) -> Self {
        let mut out = Self::default();
        for one in divided.iter().filter(|one| one.wants.is_some() || one.has_affinity()) {
            let number = out.members.len();
            let mut keys = Vec::new();
            for (at, (key, rules)) in one.keys.iter().enumerate() {
                let counters: Vec<usize> =
                    rules.affinity.iter().filter(|(_, _, hard)| *hard).map(|(counter, _, _)| *counter).collect();
                for counter in &counters {
                    out.by_counter.entry(*counter).or_default().push(number);
                }
                let domains: BTreeSet<usize> = one.open().map(|place| one.domain(place, at)).collect();
                let limited = domains.len() < topology.keys[*key].values.len();
                keys.push((*key, limited.then_some(domains), counters));
            }
            if let Some((counter, _)) = one.wants {
                out.by_host.entry(counter).or_default().push(number);
            }
            out.members.push(Member { keys, raises: raised(one), host_raises: groups[one.group].host.raises.clone() });
        }
        out
    }

    /// The followers of a group.
    pub fn of(&self, groups: &[Group], one: &Divided) -> Followers {
        let mut out = Followers::default();
        if self.members.is_empty() {
            return out;
        }
        let mut seen: BTreeSet<usize> = BTreeSet::new();
        let mut open = vec![(raised(one), groups[one.group].host.raises.clone())];
        while let Some((raises, hosts)) = open.pop() {
            let on_host: BTreeSet<usize> =
                hosts.iter().filter_map(|c| self.by_host.get(c)).flatten().copied().collect();
            let by_counter = raises.iter().filter_map(|counter| self.by_counter.get(counter)).flatten().copied();
            for number in on_host.iter().copied().chain(by_counter) {
                if seen.len() >= MAX_FOLLOWERS {
                    return out;
                }
                if !seen.insert(number) {
                    continue;
                }
                let member = &self.members[number];
                for (key, domains, counters) in &member.keys {
                    let counter = counters.iter().copied().find(|counter| raises.contains(counter));
                    let follows = counter.is_some() || on_host.contains(&number);
                    if let Some(domains) = domains.as_ref().filter(|_| follows) {
                        out.all.insert(Follower { key: *key, domains: domains.clone(), counter });
                    }
                }
                open.push((member.raises.clone(), member.host_raises.clone()));
            }
        }
        out
    }
}

fn raised(one: &Divided) -> Vec<usize> {
    one.keys.iter().flat_map(|(_, rules)| rules.raises.iter().copied()).collect()
}

impl Followers {
    /// How many followers a domain of a key does not serve that no other domain serves yet.
    pub fn blocked(&self, topology: &Topology, key: usize, domain: usize) -> usize {
        let unserved = |follower: &&Follower| {
            follower.key == key
                && !follower.domains.contains(&domain)
                && follower.counter.is_none_or(|c| follower.domains.iter().all(|d| topology.counters[c].total(*d) == 0))
        };
        self.all.iter().filter(unserved).count()
    }
}
