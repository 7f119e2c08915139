//! What pods would cost per hour on nodes that can be launched now. Beside it, the price of a node shows what its removal may save.

use std::collections::BTreeMap;

use kube::ResourceExt;
use stowage_api::parse_requirements;
use stowage_model::offering::{InstanceType, OFFERING_LABELS};
use stowage_model::requirement::Requirements;
use stowage_model::resources::Resources;
use stowage_model::units::MicroUsd;

use crate::state::pool_types::ReadyPool;

/// The offerings of each NodePool that some load may be cheapest on.
#[derive(Clone, Debug, Default)]
pub struct Market(BTreeMap<String, Vec<Offer>>);

/// An instance type at its lowest price.
#[derive(Clone, Debug)]
struct Offer {
    room: Resources,
    /// Micro-USD per hour.
    price: i64,
}

impl Market {
    /// The market of these NodePools.
    pub fn new<'a>(pools: impl Iterator<Item = &'a ReadyPool>) -> Self {
        Self(pools.map(|ready| (ready.pool.name_any(), offers(ready))).collect())
    }

    /// The price of the part of a node that a load takes, on the offering where it is least. `largest` is the elementwise maximum of the pods'
    /// requests: an offering without room for it does not count. `None`: no offering counts.
    pub fn value(&self, pool: &str, load: &Resources, largest: &Resources) -> Option<MicroUsd> {
        let offers = self.0.get(pool)?.iter().filter(|offer| largest.fits(&offer.room));
        offers.map(|offer| offer.share(load)).min().map(MicroUsd)
    }
}

/// Weights of a core and of a GiB whose sums a price is compared with.
const WEIGHTS: [(f64, f64); 8] =
    [(1.0, 0.0), (1.0, 0.03), (1.0, 0.06), (1.0, 0.12), (1.0, 0.25), (1.0, 0.5), (1.0, 1.0), (0.0, 1.0)];

/// What new nodes with some CPU and memory cost at least, however they are chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Floor(
    /// Prices of a core and of a GiB whose sum no node undercuts.
    pub Vec<(f64, f64)>,
);

impl Floor {
    /// The least price per hour, micro-USD, of nodes that have these millicores and bytes together; zero where no offering is known.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a bound: rounded down")]
    pub fn cost(&self, [cpu, memory]: [i64; 2]) -> i64 {
        let (cores, gib) = (cpu.max(0) as f64 / 1_000.0, memory.max(0) as f64 / GIB);
        self.0.iter().map(|(core, byte)| (core * cores + byte * gib) as i64).max().unwrap_or(0)
    }
}

const GIB: f64 = 1_073_741_824.0;

impl Market {
    /// The least prices over all NodePools.
    #[expect(clippy::cast_precision_loss, reason = "a bound")]
    pub fn floor(&self) -> Floor {
        let per_weight = |(core, gib): (f64, f64)| {
            let weight =
                |offer: &Offer| core * offer.room.cpu.0 as f64 / 1_000.0 + gib * offer.room.memory.0 as f64 / GIB;
            let offers = self.0.values().flatten();
            let price =
                offers.map(|offer| offer.price as f64 / weight(offer).max(f64::MIN_POSITIVE)).min_by(f64::total_cmp)?;
            Some((price * core, price * gib))
        };
        Floor(WEIGHTS.into_iter().filter_map(per_weight).collect())
    }
}

impl Offer {
    /// The cheapest offering of a type, of those that requirements and capacity allow.
    fn of(instance_type: &InstanceType, requirements: &Requirements) -> Option<Self> {
        let drawn = || OFFERING_LABELS.iter().filter_map(|key| Some((*key, requirements.get(key)?)));
        let allowed = instance_type
            .offerings
            .iter()
            .filter(|offering| offering.available && drawn().all(|(key, values)| values.accepts(offering.label(key))));
        let price = allowed.map(|offering| offering.price.0.max(0)).min()?;
        instance_type.serves(requirements).then(|| Self { room: instance_type.allocatable.clone(), price })
    }

    /// Price times the dominant share of a load, which may exceed one.
    fn share(&self, load: &Resources) -> i64 {
        let of = |(name, need): (&str, i64)| {
            let share = i128::from(self.price) * i128::from(need.max(0)) / i128::from(self.room.get(name).max(1));
            i64::try_from(share).unwrap_or(i64::MAX)
        };
        load.iter().map(of).max().unwrap_or(0)
    }

    /// Whether each load that fits the other offering fits this one, and costs no more on it.
    fn replaces(&self, other: &Self) -> bool {
        other.room.fits(&self.room)
            && other.room.iter().filter(|(_, room)| *room > 0).all(|(name, room)| {
                i128::from(self.price) * i128::from(room) <= i128::from(other.price) * i128::from(self.room.get(name))
            })
    }
}

fn offers(ready: &ReadyPool) -> Vec<Offer> {
    // An invalid NodePool offers nothing.
    let Ok(requirements) = parse_requirements(&ready.pool.spec.template.spec.requirements) else {
        return Vec::new();
    };
    let mut out: Vec<Offer> = Vec::new();
    for offer in ready.catalog.instance_types.iter().filter_map(|found| Offer::of(found, &requirements)) {
        if !out.iter().any(|known| known.replaces(&offer)) {
            out.retain(|known| !offer.replaces(known));
            out.push(offer);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};
    use stowage_model::offering::Catalog;
    use stowage_model::units::{Bytes, Millicores};
    use stowage_test_objects::{instance_type, node_pool, offering};

    use super::*;

    fn market(requirements: &Value) -> Market {
        let size = |cpu: &'static str, memory: &'static str| [("cpu", cpu), ("memory", memory)];
        let mut gone = offering("a", 1);
        gone.available = false;
        let types = [
            instance_type("small", &size("2", "8Gi"), vec![offering("a", 100), gone]),
            instance_type("large", &size("8", "32Gi"), vec![offering("a", 360), offering("b", 400)]),
            instance_type("lean", &size("8", "8Gi"), vec![offering("b", 240)]),
        ];
        let catalog = Catalog { region: "r".into(), instance_types: types.into_iter().map(Arc::new).collect() };
        let pool = node_pool("p", &json!({"spec": {"template": {"spec": {"requirements": requirements}}}}));
        Market::new([ReadyPool { pool: Arc::new(pool), catalog: Arc::new(catalog) }].iter())
    }

    fn load(cpu: i64, gib: i64) -> Resources {
        Resources { cpu: Millicores::from_cores(cpu), memory: Bytes::from_gib(gib), ..Resources::default() }
    }

    #[test]
    fn no_nodes_cost_less_than_the_floor() {
        let market = market(&json!([]));
        let (floor, rng) = (market.floor(), &mut fastrand::Rng::with_seed(1));
        let offers: Vec<&Offer> = market.0.values().flatten().collect();
        for _ in 0..1_000 {
            let bought: Vec<&Offer> = (0..rng.usize(1..9)).map(|_| offers[rng.usize(..offers.len())]).collect();
            let cost: i64 = bought.iter().map(|offer| offer.price).sum();
            let room = bought
                .iter()
                .fold([0, 0], |[cpu, memory], offer| [cpu + offer.room.cpu.0, memory + offer.room.memory.0]);
            assert!(floor.cost(room) <= cost, "{room:?} for {cost}");
            assert!(floor.cost([room[0], -1]) <= cost && floor.cost(room) * 2 >= cost, "{room:?} for {cost}");
        }
        assert_eq!(Market::default().floor().cost([1_000, 1 << 30]), 0);
    }

    #[test]
    fn a_load_is_worth_its_dominant_share_of_the_offering_where_that_costs_least() {
        let all = market(&json!([]));
        assert_eq!(all.0["p"].len(), 2, "small never costs less than large");
        let zone = json!([{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a"]}]);
        let in_a = market(&zone);
        let small = load(1, 1);
        for (case, market, load, largest, expected) in [
            ("memory decides", &all, load(1, 8), &small, Some(90)),
            ("CPU decides", &all, load(4, 1), &small, Some(120)),
            ("more than a node", &all, load(16, 2), &small, Some(480)),
            ("the cheapest lacks the memory of a pod", &all, load(4, 1), &load(1, 9), Some(180)),
            ("no type holds the pod", &all, load(4, 1), &load(9, 1), None),
            ("the requirements leave one zone", &in_a, load(4, 1), &small, Some(180)),
        ] {
            assert_eq!(market.value("p", &load, largest), expected.map(MicroUsd), "{case}");
        }
        assert_eq!(all.value("other", &load(1, 1), &load(1, 1)), None);
        let invalid = market(&json!([{"key": "a", "operator": "Near", "values": []}]));
        assert_eq!(invalid.value("p", &load(1, 1), &load(1, 1)), None);
    }
}
