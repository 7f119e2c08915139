use super::*;

#[test]
fn a_script_is_yaml_or_json() {
    let yaml = "# faults\n- {at: 1h30m, do: spot-interruption, capacityType: spot, count: 2}\n\
                - at: 0s\n  for: 5m\n  do: out-of-capacity\n  instanceType: \"m7g.*\"\n  zone: us-east-1a\n\
                - {launch: 3, do: slow-boot, delay: 4m}\n- {launch: 5, after: 20s, do: kernel-panic, nodePool: p}\n\
                - {at: 500ms, do: price, factor: 1.5}\n";
    let json = r#"[{"at": "1h30m", "do": "spot-interruption", "capacityType": "spot", "count": 2},
        {"at": "0s", "for": "5m", "do": "out-of-capacity", "instanceType": "m7g.*", "zone": "us-east-1a"},
        {"launch": 3, "do": "slow-boot", "delay": "4m"}, {"launch": 5, "after": "20s", "do": "kernel-panic", "nodePool": "p"},
        {"at": "500ms", "do": "price", "factor": 1.5}]"#;
    let parsed = Script::parse(yaml).unwrap();
    assert_eq!(parsed, Script::parse(json).unwrap());
    assert_eq!(
        parsed.events[0],
        Event {
            trigger: Trigger::At(Duration::from_mins(90)),
            action: Action::Instance(InstanceEvent::SpotInterruption),
            selector: Selector { capacity_type: Some(CapacityType::Spot), ..Selector::default() },
            lasts: None,
            count: Some(2),
        }
    );
    assert_eq!((parsed.events[1].lasts, parsed.events[1].count), (Some(Duration::from_mins(5)), None));
    assert_eq!(parsed.events[2].action, Action::SlowBoot { delay: Duration::from_mins(4) });
    assert_eq!(parsed.events[2].count, Some(1));
    assert_eq!(parsed.events[3].trigger, Trigger::Launch { number: 5, after: Duration::from_secs(20) });
    assert_eq!(parsed.events[4].action, Action::Price { factor_ppm: 1_500_000 });
    assert_eq!(Script::parse("\n# nothing\n").unwrap(), Script::default());
    let share = |text| Script::parse(text).unwrap().events[0].action;
    assert_eq!(share("[{at: 0s, do: throttle, share: 0.8}]"), Action::Throttle { share_ppm: 800_000 });
    assert_eq!(share("[{at: 0s, do: server-error}]"), Action::ServerError { share_ppm: 1_000_000 });
}

#[test]
fn errors_name_the_entry_the_field_and_the_expected_value() {
    let durations = "expected as 30s, 500ms or 1h30m";
    let cases = [
        ("at: 3s", "the script is not a list of entries, each as {at: 30s, do: throttle, for: 10s}".to_owned()),
        ("- throttle", "the script is not a list of entries, each as {at: 30s, do: throttle, for: 10s}".to_owned()),
        ("- {at: 3s}", format!("entry 1 of the script, field `do`: is missing; expected one of {ACTIONS}")),
        (
            "- {at: 3s, do: throttle}\n- {at: 3s, do: spot-interupt}",
            format!("entry 2 of the script, field `do`: `spot-interupt` is no action; expected one of {ACTIONS}"),
        ),
        (
            "- {do: throttle}",
            "entry 1 of the script, field `at`: is missing; expected `at` (as 30s) or `launch` (as 3)".to_owned(),
        ),
        ("- {at: 30, do: throttle}", format!("entry 1 of the script, field `at`: 30 is no duration; {durations}")),
        ("- {at: 3d, do: throttle}", format!("entry 1 of the script, field `at`: `3d` is no duration; {durations}")),
        (
            "- {at: 3s, launch: 1, do: throttle}",
            "entry 1 of the script, field `launch`: is not valid with `at`; keep one of them".to_owned(),
        ),
        (
            "- {launch: 0, do: throttle}",
            "entry 1 of the script, field `launch`: 0 is no count; expected a whole number from 1".to_owned(),
        ),
        (
            "- {launch: 1, do: slow-boot}",
            "entry 1 of the script, field `delay`: is missing; expected a duration, as 4m".to_owned(),
        ),
        (
            "- {at: 1s, do: price, factor: -1}",
            "entry 1 of the script, field `factor`: expected a number from 0 to 1000 that prices are multiplied by, as 1.5".to_owned(),
        ),
        (
            "- {at: 1s, do: throttle, share: 2}",
            "entry 1 of the script, field `share`: expected the share of the calls, a number from 0 to 1, as 0.8".to_owned(),
        ),
        (
            "- {at: 1s, do: throttle, capacityType: cheap}",
            "entry 1 of the script, field `capacityType`: `cheap` is no capacity type; expected spot or on-demand".to_owned(),
        ),
        (
            "- {at: 1s, do: rebalance, for: 3s}",
            "entry 1 of the script, field `for`: is only valid with `at` and an action that lasts, such as out-of-capacity or throttle".to_owned(),
        ),
        (
            "- {at: 1s, do: throttle, instance-type: m5.large}",
            "entry 1 of the script, field `instance-type`: is not valid in this entry; the fields are at, launch, after, do, for, delay, \
             factor, share, count, instanceType, zone, capacityType, nodeClaim, nodePool"
                .to_owned(),
        ),
        (
            "- {at: 1s, do: throttle, delay: 3s}",
            "entry 1 of the script, field `delay`: is not valid in this entry; the fields are at, launch, after, do, for, delay, \
             factor, share, count, instanceType, zone, capacityType, nodeClaim, nodePool"
                .to_owned(),
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(Script::parse(text).unwrap_err().to_string(), expected, "{text}");
    }
    assert!(matches!(Script::parse("- {at: 3s, do: [}"), Err(ScriptError::Syntax(_))));
}

#[test]
fn durations_are_parsed() {
    for (text, millis) in [
        ("0s", Some(0)),
        ("1h2m3s4ms", Some(3_723_004)),
        ("90s", Some(90_000)),
        ("", None),
        ("s", None),
        ("5", None),
        ("-5s", None),
        ("9999999999999h", None),
    ] {
        assert_eq!(parse_duration(text), millis.map(Duration::from_millis), "{text}");
    }
}
