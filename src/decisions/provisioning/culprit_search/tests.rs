use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::json;
use stowage_planner::Interner;
use stowage_test_objects as objects;

use super::*;

/// Pods `namespace/name`; those with one name in one namespace have one class.
fn pods(interner: &mut Interner, keys: &[(usize, usize)]) -> Vec<PodEntry> {
    let mut pod = |(namespace, class): &(usize, usize)| {
        let meta = json!({"namespace": format!("ns-{namespace:04}")});
        let selector = json!({"class": class.to_string()});
        interner.intern(&objects::pod("p", &json!({"metadata": meta, "spec": {"nodeSelector": selector}}))).unwrap()
    };
    keys.iter().map(&mut pod).collect()
}

/// Searches with this judge of trials. Returns the verdict and the number of trials.
fn search(pods: &[PodEntry], max_trials: usize, fails: impl Fn(&[usize]) -> bool) -> (Verdict, usize) {
    let mut search = CulpritSearch::new(pods, |_| false, max_trials);
    let mut trials = 0;
    while let Some(trial) = search.trial() {
        trials += 1;
        search.record(!fails(&trial));
    }
    (search.finish(), trials)
}

#[test]
fn a_culprit_among_a_thousand_namespaces_is_found_in_about_log_n_trials() {
    let keys: Vec<_> = (0..1_000).flat_map(|namespace| (0..3).map(move |class| (namespace, class))).collect();
    let pods = pods(&mut Interner::default(), &keys);
    for culprit in [0, 1_234, 2_999] {
        let (verdict, trials) = search(&pods, 32, |trial| trial.contains(&culprit));
        assert_eq!((verdict.culprits.as_slice(), verdict.untried.as_slice()), (&[culprit][..], &[][..]));
        assert_eq!(verdict.accepted.len(), keys.len() - 1);
        assert!(trials <= 18, "{trials} trials for culprit {culprit}");
    }
}

#[test]
fn all_pods_of_a_class_are_one_unit() {
    let keys: Vec<_> = (0..500).map(|pod| (0, pod % 2)).collect();
    let pods = pods(&mut Interner::default(), &keys);
    let (verdict, trials) = search(&pods, 32, |trial| trial.iter().any(|pod| pod % 2 == 1));
    assert_eq!(verdict.culprits, (0..500).filter(|pod| pod % 2 == 1).collect::<Vec<_>>());
    assert!(trials <= 4, "{trials}");
}

#[test]
fn a_tenant_with_countless_culprits_costs_other_tenants_nothing() {
    let keys: Vec<_> = (0..1_000).map(|pod| if pod < 900 { (0, pod) } else { (pod, 0) }).collect();
    let pods = pods(&mut Interner::default(), &keys);
    let (verdict, trials) = search(&pods, 20, |trial| trial.iter().any(|pod| *pod < 900));
    assert_eq!((trials, verdict.untried.len()), (20, 0));
    assert!((900..1_000).all(|pod| verdict.accepted.contains(&pod)));
    assert!(verdict.culprits.iter().all(|pod| *pod < 900));
}

#[test]
fn pods_that_fail_only_together_are_both_left_out_and_others_are_not() {
    // The first namespace fails with each of the others.
    let keys: Vec<_> = (0..64).map(|namespace| (namespace, 0)).collect();
    let pods = pods(&mut Interner::default(), &keys);
    let (verdict, trials) = search(&pods, 32, |trial| trial.contains(&0) && trial.len() > 1);
    assert_eq!(verdict.culprits[0], 0);
    assert_eq!((verdict.culprits.len(), verdict.accepted.len()), (2, 62));
    assert!(trials <= 16, "{trials}");
}

#[test]
fn classes_that_failed_before_are_left_out_first() {
    let keys: Vec<_> = (0..256).map(|namespace| (namespace, 0)).collect();
    let pods = pods(&mut Interner::default(), &keys);
    let mut search = CulpritSearch::new(&pods, |class| Arc::ptr_eq(class, &pods[7].class), 32);
    let first = search.trial().unwrap();
    assert_eq!((first.len(), first.contains(&7)), (255, false));
    let mut trials = 0;
    while let Some(trial) = search.trial() {
        trials += 1;
        search.record(!trial.contains(&7));
    }
    assert_eq!((trials, search.finish().culprits), (2, vec![7]));
}

#[test]
fn without_a_trial_a_single_class_is_the_culprit() {
    let pods = pods(&mut Interner::default(), &[(0, 0), (0, 0)]);
    let (verdict, trials) = search(&pods, 32, |_| true);
    assert_eq!((verdict, trials), (Verdict { culprits: vec![0, 1], ..Verdict::default() }, 0));
}

proptest! {
    #[test]
    fn a_verdict_is_a_partition_whose_accepted_pods_pass(
        keys in prop::collection::vec((0..8_usize, 0..4_usize), 1..60),
        culprits in prop::collection::btree_set(0..60_usize, 1..6),
        max_trials in 0..40_usize,
    ) {
        let culprits: BTreeSet<usize> = culprits.into_iter().map(|culprit| culprit % keys.len()).collect();
        let pods = pods(&mut Interner::default(), &keys);
        let fails = |trial: &[usize]| trial.iter().any(|pod| culprits.contains(pod));
        let (verdict, trials) = search(&pods, max_trials, fails);
        prop_assert!(trials <= max_trials);
        prop_assert!(!fails(&verdict.accepted));
        let mut all = [verdict.accepted, verdict.culprits.clone(), verdict.untried.clone()].concat();
        all.sort_unstable();
        prop_assert_eq!(all, (0..keys.len()).collect::<Vec<_>>());
        let guilty: BTreeSet<usize> = culprits.iter().map(|pod| keys[*pod].0).collect();
        if verdict.untried.is_empty() && max_trials == 39 {
            prop_assert!(verdict.culprits.iter().all(|pod| guilty.contains(&keys[*pod].0)));
        }
    }
}
