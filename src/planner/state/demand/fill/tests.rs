use serde_json::{Value, json};

use crate::groups::existing_nodes::HostState;
use crate::state::demand::pattern::Bin;
use crate::state::plan_state::PlanState;
use crate::test_support::plan_stages::{described, instance, item, pattern};
use crate::test_support::{HOST, World, affinity};

const GIB: i64 = 1 << 30;
/// A CPU and a GiB are worth 1,000 each.
const PRICES: [f64; 4] = [1.0, 1000.0 / 1_073_741_824.0, 0.0, 0.0];

/// Room for the given CPUs and GiB, and 50 pods.
fn room(cpus: i64, gib: i64) -> Vec<i64> {
    vec![cpus * 1000, gib * GIB, 50, 20 * GIB]
}

/// Pods as name, count, CPU and memory, filled into a room at [`PRICES`].
fn filled(pods: &[(&str, usize, &str, &str)], room: &[i64], cosine_power: i32) -> String {
    let mut world = World::new();
    for (name, count, cpu, memory) in pods {
        world.pods(name, *count, &json!({}), cpu, memory, &json!({}));
    }
    let mut instance = instance(&world);
    let mut state = instance.state(false);
    for class in 0..state.demand.tiers.classes.len() {
        state.demand.set_prices(class, PRICES.to_vec());
    }
    let pattern = fill(&mut state, room, cosine_power);
    described(&state, &pattern)
}

fn fill(state: &mut PlanState<'_, '_>, room: &[i64], cosine_power: i32) -> Vec<(usize, usize)> {
    let (host, buckets) = (HostState::default(), state.demand.open_buckets(|_| true));
    let bin = Bin { room, host: &host, pattern: &[] };
    state.demand.fill(&bin, &PRICES, &buckets, None, &[], cosine_power)
}

#[test]
fn a_bin_is_filled_until_a_resource_is_exhausted() {
    let pods = [("p", 9, "1", "1Gi")];
    assert_eq!(filled(&pods, &room(5, 100), 0), "p 5");
    assert_eq!(filled(&pods, &room(100, 3), 0), "p 3");
    assert_eq!(filled(&pods, &[100_000, 100 * GIB, 2, 0], 0), "p 2", "pod slots");
    assert_eq!(filled(&pods, &room(100, 100), 0), "p 9");
    assert_eq!(filled(&pods, &room(0, 9), 0), "");
}

#[test]
fn dot_product_scores_prefer_large_pods_and_cosine_scores_keep_the_mix() {
    let pods = [("cpu", 1, "4", "512Mi"), ("even", 9, "1", "1Gi")];
    assert_eq!(filled(&pods, &room(4, 4), 0), "cpu 1");
    assert_eq!(filled(&pods, &room(4, 4), 2), "even 4");
}

#[test]
fn a_swap_replaces_a_pod_by_a_more_valuable_pod_that_fits() {
    let pods = [("small", 3, "1", "1Gi"), ("large", 2, "2", "512Mi")];
    // The cosine selects three small pods, which leaves one CPU unused.
    assert_eq!(filled(&pods, &room(4, 4), 2), "small 2, large 1");
}

#[test]
fn a_bin_without_room_for_its_seed_stays_empty() {
    let mut world = World::new();
    world.pods("p", 1, &json!({}), "1", "1Gi", &json!({}));
    world.pods("seed", 1, &json!({}), "8", "1Gi", &json!({"nodeSelector": {"kubernetes.io/arch": "amd64"}}));
    let mut instance = instance(&world);
    let mut state = instance.state(false);
    let seed = state.demand.items[item(&state, "seed")].column_pool;
    let (host, buckets, room) = (HostState::default(), state.demand.open_buckets(|_| true), room(4, 4));
    let bin = Bin { room: &room, host: &host, pattern: &[] };
    assert!(state.demand.fill(&bin, &PRICES, &buckets, Some(seed), &[], 0).is_empty());
    assert_eq!(state.demand.fill(&bin, &PRICES, &buckets, None, &[], 0), pattern(&state, &[("p", 1)]));
}

#[test]
fn host_rules_limit_a_bin_and_determine_feasibility() {
    let labels = json!({"app": "p"});
    let mut world = World::new();
    world.pods("p", 3, &labels, "1", "1Gi", &affinity("podAntiAffinity", HOST, &labels));
    let mut instance = instance(&world);
    let mut state = instance.state(false);
    let room = room(8, 8);
    assert_eq!(fill(&mut state, &room, 0), [(0, 1)], "required anti-affinity against itself");
    let mut taken = HostState::default();
    taken.add(state.demand.host(0));
    let host = HostState::default();
    let mut is_feasible = |host: &HostState, count: usize, cpus: i64| {
        let room = [cpus * 1000, 8 * GIB, 50, 0];
        state.demand.is_feasible(&Bin { room: &room, host, pattern: &[(0, count)] })
    };
    assert!(is_feasible(&host, 1, 1));
    assert!(!is_feasible(&host, 2, 8), "two pods exclude each other");
    assert!(!is_feasible(&host, 1, 0), "no CPU");
    assert!(!is_feasible(&taken, 1, 8), "such a pod runs there");
}

#[test]
fn followers_join_only_bins_with_a_pod_that_they_follow() {
    let follow: Value = affinity("podAffinity", HOST, &json!({"app": "lead"}));
    let mut world = World::new();
    world.pods("lead", 1, &json!({"app": "lead"}), "1", "1Gi", &json!({}));
    world.pods("side", 5, &json!({}), "1", "1Gi", &follow);
    let mut instance = instance(&world);
    let mut state = instance.state(false);
    let (host, buckets, room) = (HostState::default(), state.demand.open_buckets(|_| true), room(4, 8));
    let lead = pattern(&state, &[("lead", 1)]);
    let with_lead = Bin { room: &room, host: &host, pattern: &lead };
    let joined = state.demand.fill_followers(&with_lead, &buckets);
    assert_eq!(described(&state, &joined), "side 3");
    let without = Bin { room: &room, host: &host, pattern: &[] };
    assert!(state.demand.fill_followers(&without, &buckets).is_empty());
}
