//! Where the annotation of a price is missing or out of date: on nodes that another controller launched, and after spot prices have moved.

use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::NodeClaim;
use stowage_model::labels;
use stowage_model::units::MicroUsd;

use crate::decisions::disruption::node_facts::{Facts, NodeFacts};
use crate::state::object_ext::ObjectExt;
use crate::state::tables::ClusterState;

/// A price is written again when it is higher or lower than the written one by this share of it, as a percentage: spot prices move all the time.
const CHANGE: f64 = 10.0;

/// A node whose price is to be written.
#[derive(Clone, Debug)]
pub struct DuePrice {
    pub claim: Arc<NodeClaim>,
    /// Name of the node.
    pub node: String,
    pub price: MicroUsd,
    /// Whether the NodeClaim has another price, and whether the Node has.
    pub on: (bool, bool),
}

/// The nodes with another price than is written, at most `most`; those after the one of this name come first.
pub fn due(state: &ClusterState, facts: &Facts, after: &str, most: usize) -> Vec<DuePrice> {
    let next = facts.nodes.partition_point(|node| node.node.as_str() <= after);
    let (before, nodes) = facts.nodes.split_at(next);
    nodes.iter().chain(before).filter_map(|node| due_price(state, node)).take(most).collect()
}

fn due_price(state: &ClusterState, facts: &NodeFacts) -> Option<DuePrice> {
    let claim = state.claims.get(&facts.claim).filter(|claim| !claim.is_deleting())?;
    let node = state.nodes.get(&*facts.node)?;
    // Zero is unknown.
    if facts.price.0 == 0 {
        return None;
    }
    let on = (
        is_due(claim.annotations().get(labels::USD_PER_HOUR), facts.price),
        is_due(node.annotations().get(labels::USD_PER_HOUR), facts.price),
    );
    (on.0 || on.1).then(|| DuePrice { claim: Arc::clone(claim), node: facts.node.clone(), price: facts.price, on })
}

fn is_due(annotation: Option<&String>, price: MicroUsd) -> bool {
    let known = annotation.and_then(|text| text.parse::<f64>().ok()).filter(|usd| usd.is_finite());
    known.is_none_or(|usd| (usd - price.usd()).abs() * 100.0 > usd.abs() * CHANGE)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::small_cluster::SmallCluster;

    /// Three nodes for 0.1 USD per hour, the NodeClaims and Nodes with these annotations.
    fn cluster(annotations: [[Option<&str>; 2]; 3]) -> SmallCluster {
        let mut cluster = SmallCluster::new(&[("p", json!({}))]);
        for (name, [on_claim, on_node]) in ["a", "b", "c"].into_iter().zip(annotations) {
            cluster.add_node(name, "p", "small/on-demand");
            let annotated =
                |text: Option<&str>| text.map(|text| [(labels::USD_PER_HOUR.to_owned(), text.to_owned())].into());
            let mut claim = (*cluster.state.claims[name]).clone();
            claim.metadata.annotations = annotated(on_claim);
            cluster.state.apply_claim(claim);
            let mut node = (*cluster.state.nodes[name]).clone();
            node.metadata.annotations = annotated(on_node);
            cluster.state.apply_node(node);
        }
        cluster
    }

    fn found(cluster: &SmallCluster, after: &str, most: usize) -> Vec<(String, (bool, bool))> {
        let due = due(&cluster.state, &cluster.facts(), after, most);
        assert!(due.iter().all(|due| due.price.to_string() == "0.1"));
        due.into_iter().map(|due| (due.node, due.on)).collect()
    }

    #[test]
    fn a_price_is_written_where_it_is_missing_invalid_or_has_moved_by_a_tenth() {
        let all = cluster([[None, None], [Some("0.1"), None], [Some("0.1"), Some("0.1")]]);
        let expected = [("a".to_owned(), (true, true)), ("b".to_owned(), (false, true))];
        assert_eq!(found(&all, "", 9), expected);
        let moved = cluster([[Some("0.0915"), Some("0.12")], [Some("free"), Some("NaN")], [Some("0.105"), Some("0")]]);
        let on = |found: Vec<(String, (bool, bool))>| found.into_iter().map(|(_, on)| on).collect::<Vec<_>>();
        assert_eq!(on(found(&moved, "", 9)), [(false, true), (true, true), (false, true)]);
    }

    #[test]
    fn nodes_take_turns() {
        let all = cluster([[None, None]; 3]);
        let names =
            |after: &str, most: usize| found(&all, after, most).into_iter().map(|(name, _)| name).collect::<String>();
        assert_eq!([names("", 2), names("b", 2), names("c", 9)], ["ab", "ca", "abc"]);
    }

    #[test]
    fn a_node_of_unknown_price_or_one_that_goes_has_nothing_to_write() {
        let mut cluster = cluster([[None, None]; 3]);
        cluster.pools.clear();
        assert_eq!(due(&cluster.state, &cluster.facts(), "", 9).len(), 0);
    }
}
