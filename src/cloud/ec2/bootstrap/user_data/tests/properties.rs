//! Properties of every merge: settings of the user are kept unless they are generated, generated settings take precedence, and the
//! result parses.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{Map, Value, json};

use super::*;
use crate::ec2::bootstrap::user_data::tests::{NODE_CONFIG, SHELL, input, mime_parts, our_node_config, settings};

/// 256 cases with a fixed seed, so that results are reproducible; PROPTEST_CASES and PROPTEST_RNG_SEED change them.
fn config() -> ProptestConfig {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(11);
    }
    config
}

/// A line that may be anything but an end of line, with more boundaries, quotes and markup than random text has.
fn line() -> impl Strategy<Value = String> {
    prop_oneof![
        "[ -~]{0,40}",
        "--//[0-9]{0,2}-{0,2}",
        "[a-z]{1,8}: [a-z'\"{}]{0,12}",
        "[äß€🦀 a-z]{0,12}",
        Just("</powershell>".to_owned()),
    ]
}

/// A script as users write them.
fn script() -> impl Strategy<Value = String> {
    prop::collection::vec(line(), 0..12).prop_map(|lines| format!("#!/bin/bash\n{}", lines.join("\n")))
}

/// A text that no script above contains as a boundary.
const BOUNDARY: &str = "=====outer=====";

/// MIME of several scripts.
fn multipart(scripts: &[String]) -> String {
    let part = |body: &String| format!("--{BOUNDARY}\nContent-Type: {SHELL}; charset=\"utf-8\"\n\n{body}\n");
    let parts: String = scripts.iter().map(part).collect();
    format!("MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"{BOUNDARY}\"\n\n{parts}--{BOUNDARY}--\n")
}

/// The name of a setting, often of a generated setting or of one that a family keeps.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z][a-z0-9-]{0,10}",
        Just("cluster-name".to_owned()),
        Just("max-pods".to_owned()),
        Just("api-server".to_owned()),
        Just("maxPods".to_owned()),
        Just("registerWithTaints".to_owned()),
    ]
}

/// A value of a setting, as JSON that TOML and YAML can express.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        "[ -~]{0,16}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec("[ -~]{0,8}".prop_map(Value::from), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z][a-z.]{0,8}", inner, 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

fn members() -> impl Strategy<Value = Map<String, Value>> {
    prop::collection::btree_map(name(), value(), 0..6).prop_map(|members| members.into_iter().collect())
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn scripts_of_the_user_run_as_they_are_before_ours(scripts in prop::collection::vec(script(), 1..4)) {
        for family in [AmiFamily::Al2, AmiFamily::Al2023] {
            let alone = UserDataInput { custom: None, ..input() };
            let ours = mime_parts(&user_data(family, &alone).unwrap());
            // A single script, or several in MIME.
            let texts = [(scripts[0].clone(), &scripts[..1]), (multipart(&scripts), &scripts[..])];
            for (custom, expected) in texts {
                let text = user_data(family, &UserDataInput { custom: Some(&custom), ..input() }).unwrap();
                let mut wanted: Vec<(String, String)> =
                    expected.iter().map(|body| (SHELL.to_owned(), body.clone())).collect();
                wanted.extend(ours.clone());
                prop_assert_eq!(mime_parts(&text), wanted);
            }
        }
    }

    #[test]
    fn a_node_config_of_the_user_stands_before_ours_which_says_what_it_would_alone(spec in members()) {
        let theirs = json!({"apiVersion": "node.eks.aws/v1alpha1", "kind": "NodeConfig", "spec": spec});
        let custom = serde_saphyr::to_string(&theirs).unwrap();
        let with = UserDataInput { custom: Some(&custom), ..input() };
        let parts = mime_parts(&user_data(AmiFamily::Al2023, &with).unwrap());
        prop_assert_eq!(parts.len(), 2);
        prop_assert!(parts.iter().all(|(kind, _)| kind == NODE_CONFIG));
        let first: Value = serde_saphyr::from_str(&parts[0].1).unwrap();
        prop_assert_eq!(first, theirs);
        prop_assert_eq!(our_node_config(&with), our_node_config(&input()), "the generated part does not depend on the user's parts");
    }

    #[test]
    fn bottlerocket_keeps_what_is_not_ours_and_ours_wins(
        other in members(),
        section in "[a-z]{1,8}",
        labels in prop::collection::btree_map("[a-z][a-z0-9./]{0,12}", "[ -~]{0,12}", 0..5),
        reserved in prop::collection::btree_map("[a-z]{1,8}", "[0-9]{1,4}", 0..4),
        ours in prop::collection::vec(name(), 0..3),
    ) {
        prop_assume!(!["kubernetes", "bootstrap-commands"].contains(&section.as_str()));
        let mut kubernetes = json!({"node-labels": labels, "kube-reserved": reserved, "allowed-unsafe-sysctls": ["a", "b"]});
        for name in ours.iter().filter(|name| ["cluster-name", "max-pods", "api-server"].contains(&name.as_str())) {
            kubernetes[name] = json!("theirs");
        }
        let whole = json!({"settings": {"kubernetes": kubernetes, (section.clone()): other}, "other": {"a": 1}});
        let custom = toml::to_string(&whole).unwrap();
        let with = UserDataInput { custom: Some(&custom), ..input() };
        let text = user_data(AmiFamily::Bottlerocket, &with).unwrap();
        let document: Value = serde_json::to_value(text.parse::<toml::Table>().unwrap()).unwrap();
        prop_assert_eq!(&document["other"], &json!({"a": 1}));
        let merged = &document["settings"];
        prop_assert_eq!(&merged[&section], &json!(other));
        let alone = settings(&input())["kubernetes"].take();
        for (name, ours) in alone.as_object().unwrap() {
            let merged = &merged["kubernetes"][name];
            // Labels are merged one by one.
            let Some(ours) = ours.as_object().filter(|_| name == "node-labels") else {
                prop_assert_eq!(merged, ours, "{}", name);
                continue;
            };
            for (key, value) in &labels {
                let expected = ours.get(key).cloned().unwrap_or_else(|| json!(value));
                prop_assert_eq!(&merged[key], &expected, "{}", key);
            }
            for (key, value) in ours {
                prop_assert_eq!(&merged[key], value, "{}", key);
            }
        }
        prop_assert_eq!(&merged["kubernetes"]["kube-reserved"], &json!(reserved));
        prop_assert_eq!(&merged["kubernetes"]["allowed-unsafe-sysctls"], &json!(["a", "b"]));
    }

    #[test]
    fn windows_lines_of_the_user_stand_before_ours(lines in prop::collection::vec(line(), 1..8)) {
        let custom = lines.join("\n");
        prop_assume!(!custom.trim().is_empty());
        let alone = user_data(AmiFamily::Windows2022, &input()).unwrap();
        let rest = alone.strip_prefix("<powershell>\n").unwrap();
        let text = user_data(AmiFamily::Windows2022, &UserDataInput { custom: Some(&custom), ..input() }).unwrap();
        prop_assert_eq!(text, format!("<powershell>\n{custom}\n{rest}"));
    }

    #[test]
    fn no_text_breaks_a_merge(custom in prop::collection::vec(prop_oneof![line(), any::<String>()], 0..6)) {
        let custom = custom.join("\n");
        for family in AmiFamily::ALL {
            // An error is valid; a panic, or a text that its parser rejects, is not.
            let Ok(text) = user_data(family, &UserDataInput { custom: Some(&custom), ..input() }) else { continue };
            match family {
                AmiFamily::Bottlerocket => prop_assert!(text.parse::<toml::Table>().is_ok()),
                AmiFamily::Al2 | AmiFamily::Al2023 => prop_assert!(!mime_parts(&text).is_empty()),
                _ => {}
            }
        }
    }
}
