use super::*;

const NOW: UnixMillis = UnixMillis(1_000_000);

fn class(namespace: &str, priority: i32) -> Arc<PodClass> {
    Arc::new(PodClass { namespace: namespace.into(), priority, ..PodClass::default() })
}

#[test]
fn a_class_is_left_out_for_longer_with_each_failure_up_to_five_minutes() {
    let (mut quarantine, poison) = (Quarantine::default(), class("a", 1));
    let mut now = NOW;
    for seconds in [30, 60, 120, 240, 300, 300] {
        let wait = quarantine.add(&poison, Cause::PlannerPanic, now).unwrap();
        assert_eq!(wait, Duration::from_secs(seconds));
        assert_eq!(quarantine.cause(&poison, now + wait - Duration::from_millis(1)), Some(Cause::PlannerPanic));
        now += wait;
        assert_eq!(quarantine.cause(&poison, now), None, "it is planned again");
        assert!(quarantine.has_failed(&poison));
    }
    quarantine.release(&poison);
    assert!(quarantine.is_empty());
    assert_eq!(quarantine.add(&poison, Cause::PlannerPanic, now), Some(BACKOFF.0), "it starts over");
}

#[test]
fn a_changed_spec_is_planned_at_once_and_what_no_pod_has_is_forgotten() {
    let mut quarantine = Quarantine::default();
    let (poison, changed) = (class("a", 1), class("a", 2));
    quarantine.add(&poison, Cause::NodeClaimRejected, NOW);
    assert_eq!(quarantine.cause(&changed, NOW), None);
    let over = NOW + BACKOFF.0;
    quarantine.forget(&HashSet::from([&*poison]), over);
    assert!(quarantine.has_failed(&poison), "its pod waits for the next attempt");
    quarantine.forget(&HashSet::from([&*changed]), NOW);
    assert!(quarantine.has_failed(&poison), "a replacement of its pod gets no new attempt yet");
    quarantine.forget(&HashSet::from([&*changed]), over);
    assert!(quarantine.is_empty());
}

#[test]
fn a_namespace_with_ever_new_failing_classes_is_left_out_as_a_whole() {
    let (mut quarantine, healthy) = (Quarantine::default(), class("attacker", -1));
    for at in 0..1_000 {
        let blocked = quarantine.cause(&healthy, NOW).is_some();
        assert_eq!(blocked, usize::try_from(at).unwrap() > MAX_CLASSES, "after {at} classes");
        quarantine.add(&class("attacker", at), Cause::PlannerPanic, NOW);
    }
    assert_eq!(quarantine.namespaces.values().map(HashMap::len).sum::<usize>(), MAX_CLASSES + 1);
    assert_eq!(quarantine.cause(&class("other", 1), NOW), None);
    let over = NOW + BACKOFF.0;
    assert_eq!(quarantine.cause(&healthy, over), None);
    assert_eq!(quarantine.add(&class("attacker", 1_000), Cause::PlannerPanic, over), Some(BACKOFF.0 * 2));
}

#[test]
fn the_number_of_namespaces_is_bounded() {
    let mut quarantine = Quarantine::default();
    for at in 0..MAX_NAMESPACES {
        assert!(quarantine.add(&class(&at.to_string(), 0), Cause::PlannerPanic, NOW).is_some());
    }
    assert_eq!(quarantine.add(&class("one more", 0), Cause::PlannerPanic, NOW), None);
    assert!(quarantine.add(&class("7", 0), Cause::PlannerPanic, NOW).is_some());
}
