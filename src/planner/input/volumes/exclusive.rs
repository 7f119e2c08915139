//! `ReadWriteOncePod`: a claim that one pod uses at a time. kube-scheduler binds no other pod while a pod uses it.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::input::pod::PodEntry;
use crate::input::problem::Problem;
use crate::input::volumes::needs::{Assigned, VolumeProblem};

/// The pods, by index, that must wait until another pod releases a claim. Among pods that wait for the same claim, the first by
/// priority, age and key gets it.
pub(crate) fn shut_out(problem: &Problem, assigned: &Assigned) -> HashMap<usize, VolumeProblem> {
    let volumes = &problem.volumes;
    let single = |claim: &Arc<str>| volumes.claims.get(claim.as_ref()).is_some_and(|claim| claim.single_pod);
    let asking = |pod: &PodEntry| pod.claims.iter().any(single);
    let mut pods: Vec<usize> = (0..problem.pods.len()).filter(|at| asking(&problem.pods[*at])).collect();
    if pods.is_empty() {
        return HashMap::new();
    }
    let wanted: HashSet<&Arc<str>> = pods.iter().flat_map(|at| problem.pods[*at].claims.iter()).collect();
    let mut users: HashMap<&Arc<str>, (&PodEntry, bool)> = HashMap::new();
    for pod in problem.nodes.iter().flat_map(|node| &node.pods) {
        for claim in pod.claims.iter().filter(|claim| wanted.contains(claim) && single(claim)) {
            users.entry(claim).or_insert((pod, true));
        }
    }
    pods.sort_by_key(|at| {
        let pod = &problem.pods[*at];
        (Reverse(pod.class.priority), pod.created_at, &pod.key)
    });
    let mut out = HashMap::new();
    for at in pods {
        let pod = &problem.pods[at];
        let other = pod.claims.iter().find_map(|claim| {
            let (user, runs) = users.get(claim).filter(|(user, _)| user.key != pod.key)?;
            let (claim, user) = (Arc::clone(claim), Arc::clone(&user.key));
            Some(if *runs {
                VolumeProblem::InUse { claim, pod: user }
            } else {
                VolumeProblem::Taken { claim, pod: user }
            })
        });
        if let Some(why) = other {
            out.insert(at, why);
        } else if volumes.needs(&pod.claims, assigned).is_ok() {
            for claim in pod.claims.iter().filter(|claim| single(claim)) {
                users.entry(claim).or_insert((pod, false));
            }
        }
    }
    out
}
