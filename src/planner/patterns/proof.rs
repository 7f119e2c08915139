//! What is proven of a small plan when it is launched already: that nodes for its pods cost no less. It changes nothing but the bound.

use crate::columns::dims::real;
use crate::patterns::pattern_search::PatternSearch;
use crate::state::demand::pattern::Pattern;

/// Ceilings that branch and bound tries.
const MAX_CEILINGS: usize = 4;

/// A search by branch and bound that is yet to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Proof {
    search: PatternSearch,
    steps: usize,
}

impl Proof {
    /// The search must be for all pods of the plan, or some of them, with any columns that other plans may use, and its bound raised.
    pub(crate) fn new(search: PatternSearch, steps: usize) -> Self {
        Self { search, steps }
    }

    /// Raises a lower bound on the cost of nodes for the pods, by proofs that none cost less than `paid`, or than a part of the difference. In micro-USD per
    /// hour.
    pub(crate) fn raise(mut self, bound: f64, paid: i64) -> f64 {
        let (search, mut steps) = (&mut self.search, self.steps);
        let bound = bound.max(search.bound);
        let mut ceiling = real(paid);
        for _ in 0..MAX_CEILINGS {
            if bound >= ceiling || search.bound <= 0.0 {
                break;
            }
            // Prices are whole micro-USD.
            let branched = search.branch(ceiling - 0.5, steps);
            if branched.is_proven {
                let price = |(node, _): &(usize, Pattern)| search.kinds.nodes[*node].price;
                let cheapest = branched.nodes.map_or(ceiling, |nodes| nodes.iter().map(price).sum());
                return bound.max(cheapest);
            }
            ceiling = bound.midpoint(ceiling).floor();
            steps /= 2;
        }
        bound
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::output::plan::Plan;
    use crate::plan;
    use crate::test_support::{World, ZONE, spread};

    #[test]
    fn a_proof_changes_the_bound_only() {
        let mut world = World::new();
        let labels = json!({"app": "p"});
        world.pods("p", 6, &labels, "3", "2Gi", &spread(ZONE, &labels, &json!({})));
        let launchable = plan(&world.problem, &world.column_cache);
        assert!(!launchable.optimal && launchable.lower_bound < Some(launchable.cost), "nothing is proven yet");
        let mut proven = launchable.clone();
        proven.prove();
        let (lower_bound, optimal, proof) = (Some(launchable.cost), true, None);
        assert_eq!(proven, Plan { lower_bound, optimal, proof, ..launchable });
        let again = proven.clone();
        proven.prove();
        assert_eq!(proven, again);
    }
}
