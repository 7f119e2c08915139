//! The order in which the removal of nodes is tried.

use stowage_model::units::MicroUsd;

use crate::decisions::disruption::eviction_cost::EvictionUnits;
use crate::decisions::disruption::size::{Size, sum};

/// A node that may be removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub claim: String,
    pub pool: String,
    /// Hourly price.
    pub price: MicroUsd,
    /// Pods that move when it is removed.
    pub pods: usize,
    pub units: EvictionUnits,
    /// What each of these pods needs, the largest first.
    pub sizes: Vec<Size>,
    /// Price less the market value of its pods: high on nearly empty nodes, and on full ones that cost more than others.
    pub surplus: i64,
    /// Price less the cost of its evictions: what its removal is worth if its pods fit on other nodes.
    pub gain: i64,
}

impl Source {
    /// What its pods need together.
    pub fn load(&self) -> Size {
        self.sizes.iter().copied().fold([0; 2], sum)
    }
}

/// Descending by surplus per eviction unit; of equals, fewer pods first.
pub fn by_surplus(sources: &mut [Source]) {
    sources.sort_by(|a, b| {
        let key = |source: &Source, other: &Source| i128::from(source.surplus) * i128::from(other.units.0);
        key(b, a).cmp(&key(a, b)).then_with(|| (a.pods, &a.claim).cmp(&(b.pods, &b.claim)))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(claim: &str, price: i64, pods: usize, market_value: i64) -> Source {
        let units = 1_000 * i64::try_from(pods + 1).unwrap();
        let (claim, pool, price) = (claim.into(), "p".into(), MicroUsd(price));
        Source {
            claim,
            pool,
            price,
            pods,
            units: EvictionUnits(units),
            sizes: Vec::new(),
            surplus: price.0 - market_value,
            gain: 0,
        }
    }

    #[test]
    fn nearly_empty_nodes_and_full_ones_that_cost_more_than_others_come_first() {
        let mut sources = [
            source("well-filled", 100, 9, 95),
            source("underpriced", 100, 9, 250),
            source("nearly empty", 100, 1, 10),
            source("overpriced", 300, 9, 100),
            source("same, more pods", 200, 19, 190),
        ];
        by_surplus(&mut sources);
        let order: Vec<&str> = sources.iter().map(|source| &*source.claim).collect();
        assert_eq!(order, ["nearly empty", "overpriced", "well-filled", "same, more pods", "underpriced"]);
    }

    /// Karpenter core reference 4.15: nine pods on a node of price 1 rank 0.1, an empty node of price 0.2 ranks 0.2.
    #[test]
    fn pods_of_no_market_value_leave_the_order_of_karpenter() {
        let mut sources = [source("nine", 1_000_000, 9, 0), source("empty", 200_000, 0, 0)];
        by_surplus(&mut sources);
        assert_eq!(sources[0].claim, "empty");
    }
}
