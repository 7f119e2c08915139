//! Which nodes of a plan depend on each other: pods on one require pods on the other near them.

use std::collections::BTreeMap;

use crate::groups::pod_selectors::Selectors;
use crate::input::problem::Problem;
use crate::output::plan::Plan;

/// The part that each new node of a plan belongs to, and last the part of all existing nodes together. Nodes are in one part if pods on one require pods on
/// the other near them (`podAffinity`), directly or by way of others. Existing nodes need nothing for the pods on them that others require.
pub fn dependent_parts(problem: &Problem, plan: &Plan) -> Vec<usize> {
    let existing = plan.new_nodes.len();
    let mut parts: Vec<usize> = (0..=existing).collect();
    let mut selectors = Selectors::new(&problem.namespaces);
    let pod = |pod: &usize| &problem.pods[*pod];
    let on_new = plan.new_nodes.iter().enumerate().flat_map(|(at, node)| node.pods.iter().map(move |of| (at, pod(of))));
    let on_existing = plan.placements.iter().flat_map(|placement| &placement.pods).map(|of| (existing, pod(of)));
    let mut node_of: BTreeMap<u32, usize> = BTreeMap::new();
    for (at, pod) in on_new.clone().chain(on_existing).filter(|(_, pod)| !pod.class.affinity.is_empty()) {
        if let Some(selector) = selectors.add_required(&pod.class.affinity) {
            join(&mut parts, *node_of.entry(selector).or_insert(at), at);
        }
    }
    if !node_of.is_empty() {
        for (at, pod) in on_new {
            for requiring in selectors.matching(pod).iter().filter_map(|selector| node_of.get(selector)) {
                join(&mut parts, *requiring, at);
            }
        }
    }
    (0..parts.len()).map(|at| root(&mut parts, at)).collect()
}

fn root(parts: &mut [usize], mut at: usize) -> usize {
    while parts[at] != at {
        parts[at] = parts[parts[at]];
        at = parts[at];
    }
    at
}

fn join(parts: &mut [usize], a: usize, b: usize) {
    let (a, b) = (root(parts, a), root(parts, b));
    parts[a] = b;
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::{HOST, World, ZONE, affinity};

    /// The new nodes in one part with others, by their pods, each of which fills one; and those in one part with the existing nodes.
    fn parts(pods: &[(&str, Value)]) -> String {
        let mut world = World::new();
        for (name, spec) in pods {
            world.pods(name, 1, &json!({"app": name}), "15", "1Gi", spec);
        }
        world.node("n", "z-a", 16, &[]);
        let plan = world.plan();
        let parts = dependent_parts(&world.problem, &plan);
        let mut names: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        for (node, part) in plan.new_nodes.iter().zip(&parts) {
            names.entry(*part).or_default().extend(node.pods.iter().map(|pod| pods[*pod].0));
        }
        names.entry(parts[plan.new_nodes.len()]).or_default().push("existing");
        let mut names: Vec<String> = names
            .into_values()
            .map(|mut of| {
                of.sort_unstable();
                of.join("+")
            })
            .collect();
        names.sort();
        names.join(" ")
    }

    #[test]
    fn nodes_depend_on_each_other_by_way_of_required_affinity() {
        let near = |app: &str| affinity("podAffinity", ZONE, &json!({"app": app}));
        let in_zone = |zone: &str| json!({"nodeSelector": {ZONE: zone}});
        let apart = affinity("podAntiAffinity", ZONE, &json!({"app": "x"}));
        let existing = ("first", json!({"nodeSelector": {HOST: "n"}}));
        assert_eq!(parts(&[existing.clone(), ("a", in_zone("z-b")), ("b", apart)]), "a b existing");
        assert_eq!(
            parts(&[
                existing.clone(),
                ("a", in_zone("z-b")),
                ("b", near("a")),
                ("c", near("b")),
                ("d", in_zone("z-c"))
            ]),
            "a+b+c d existing"
        );
        assert_eq!(
            parts(&[existing, ("a", near("first")), ("b", json!({}))]),
            "a b existing",
            "what runs there needs nothing"
        );
        let mut requiring = near("a");
        requiring["nodeSelector"] = json!({HOST: "n"});
        assert_eq!(parts(&[("first", requiring), ("a", in_zone("z-a")), ("b", near("a"))]), "a+b+existing");
    }
}
