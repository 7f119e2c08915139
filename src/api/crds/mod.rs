//! The CustomResourceDefinitions, made from the Rust types and checked in under `crds/`.
//!
//! `STOWAGE_REGENERATE=1 cargo test --lib crds` writes them anew; without the variable the same test fails when a file is stale.

pub mod rules;
pub mod schema;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use crate::api::crds::rules::Rule;
use crate::api::{Ec2NodeClass, NodeClaim, NodePool};

/// NodePool, NodeClaim and EC2NodeClass as the API server must know them.
///
/// # Panics
/// Never: what is made here has only constants in it, and the tests make it.
pub fn all() -> Vec<CustomResourceDefinition> {
    documents()
        .into_iter()
        .map(|(_, document)| serde_json::from_value(document).expect("made from a CustomResourceDefinition"))
        .collect()
}

/// Each CRD's file name (`group_plural.yaml`) and its text.
///
/// # Errors
/// When YAML can't be written, which no schema of ours causes.
pub fn files() -> Result<Vec<(String, String)>, serde_saphyr::ser::Error> {
    documents()
        .into_iter()
        .map(|(name, document)| {
            let yaml = serde_saphyr::to_string(&document)?;
            Ok((name, format!("# Generated from src/api; see src/api/crds.\n{yaml}")))
        })
        .collect()
}

fn documents() -> Vec<(String, Value)> {
    vec![
        document("karpenter.sh_nodepools.yaml", &NodePool::crd(), &[], rules::node_pool()),
        document("karpenter.sh_nodeclaims.yaml", &NodeClaim::crd(), &[], rules::node_claim()),
        document(
            "karpenter.k8s.aws_ec2nodeclasses.yaml",
            &Ec2NodeClass::crd(),
            &["amiSelectorTerms", "securityGroupSelectorTerms", "subnetSelectorTerms"],
            rules::node_class(),
        ),
    ]
}

/// Finishes what the derive macros made. `required` names members of spec that our types read leniently and that the API
/// server must insist on.
fn document(name: &str, crd: &CustomResourceDefinition, required: &[&str], rules: Vec<Rule>) -> (String, Value) {
    let mut document = serde_json::to_value(crd).expect("a CustomResourceDefinition is JSON");
    document["spec"]["names"]["listKind"] = json!(format!("{}List", crd.spec.names.kind));
    let root = &mut document["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    if let Some(root) = root.as_object_mut() {
        root.remove("title");
    }
    root["type"] = json!("object");
    finish(root);
    for member in required {
        let spec = node(root, "spec");
        if let Some(property) = spec["properties"][*member].as_object_mut() {
            property.remove("default");
        }
    }
    if !required.is_empty() {
        node(root, "spec")["required"] = json!(required);
    }
    for Rule { at, cel, message, naming } in rules {
        let node = node(root, at);
        if node["x-kubernetes-validations"].is_null() {
            node["x-kubernetes-validations"] = json!([]);
        }
        if let Some(validations) = node["x-kubernetes-validations"].as_array_mut() {
            let mut validation = json!({ "rule": cel, "message": message });
            if let Some(naming) = naming {
                validation["messageExpression"] = json!(naming);
            }
            validations.push(validation);
        }
    }
    (name.to_owned(), document)
}

/// The schema node at `path` below `root`.
///
/// # Panics
/// When there is none: a path is a constant of this module and every one of them is walked by a test.
fn node<'a>(root: &'a mut Value, path: &str) -> &'a mut Value {
    path.split('.').fold(root, |at, step| {
        let (member, is_list) = step.strip_suffix("[]").map_or((step, false), |member| (member, true));
        let at = &mut at["properties"][member];
        let at = if is_list { &mut at["items"] } else { at };
        assert!(at.is_object(), "no schema node {step} of {path}");
        at
    })
}

/// Brings a schema and everything below it to Karpenter's form: absent members are absent, never null; whole numbers are
/// written as such; an amount is an integer or a string.
fn finish(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            if members.get("nullable") == Some(&Value::Bool(true)) {
                members.remove("nullable");
            }
            if members.get("x-kubernetes-int-or-string") == Some(&Value::Bool(true)) {
                members.insert("anyOf".into(), json!([{ "type": "integer" }, { "type": "string" }]));
                members.remove("type");
            }
            for bound in ["minimum", "maximum"] {
                if let Some(number) = members.get(bound).and_then(Value::as_f64) {
                    #[expect(clippy::cast_possible_truncation, reason = "bounds are small whole numbers")]
                    members.insert(bound.into(), json!(number as i64));
                }
            }
            members.values_mut().for_each(finish);
        }
        Value::Array(items) => items.iter_mut().for_each(finish),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn checked_in_crds_are_what_the_types_say() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("crds");
        let files = files().unwrap();
        if std::env::var_os("STOWAGE_REGENERATE").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            for (name, text) in &files {
                std::fs::write(folder.join(name), text).unwrap();
            }
        }
        for (name, text) in &files {
            let checked_in = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
            assert!(checked_in == *text, "crds/{name} is stale: run STOWAGE_REGENERATE=1 cargo test --lib crds");
        }
        let mut present: Vec<String> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        present.sort();
        let mut expected: Vec<String> = files.into_iter().map(|(name, _)| name).collect();
        expected.sort();
        assert_eq!(present, expected, "files of crds/");
    }

    #[test]
    fn yaml_reads_back_as_what_was_written() {
        for ((name, document), (_, text)) in documents().into_iter().zip(files().unwrap()) {
            let read: Value = serde_saphyr::from_str(&text).unwrap();
            assert_eq!(read, document, "{name}");
        }
    }

    #[test]
    fn no_member_may_be_null() {
        for (name, document) in documents() {
            assert!(!document.to_string().contains("nullable"), "{name}");
        }
    }

    #[test]
    fn typed_definitions_carry_the_rules() {
        let all = all();
        let names: Vec<_> = all.iter().map(|crd| crd.metadata.name.clone().unwrap_or_default()).collect();
        assert_eq!(names, ["nodepools.karpenter.sh", "nodeclaims.karpenter.sh", "ec2nodeclasses.karpenter.k8s.aws"]);
        for crd in &all {
            let schema = crd.spec.versions[0].schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap();
            let spec = &schema.properties.as_ref().unwrap()["spec"];
            assert!(!spec.x_kubernetes_validations.as_ref().unwrap().is_empty(), "{}", crd.spec.names.kind);
        }
    }

    /// The documents of each manifest in `tests/data/manifests/<folder>`, by file name.
    fn manifests(folder: &str) -> Vec<(String, Vec<Value>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/manifests").join(folder);
        let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(!files.is_empty());
        files
            .into_iter()
            .map(|path| {
                let documents = serde_saphyr::from_multiple(&std::fs::read_to_string(&path).unwrap()).unwrap();
                (path.file_stem().unwrap().to_string_lossy().into_owned(), documents)
            })
            .collect()
    }

    fn typed(manifest: &Value) -> Result<Value, serde_json::Error> {
        let manifest = manifest.clone();
        match manifest["kind"].as_str() {
            Some("NodePool") => serde_json::from_value::<NodePool>(manifest).and_then(serde_json::to_value),
            Some("NodeClaim") => serde_json::from_value::<NodeClaim>(manifest).and_then(serde_json::to_value),
            _ => serde_json::from_value::<Ec2NodeClass>(manifest).and_then(serde_json::to_value),
        }
    }

    /// Where `typed` lacks something that `manifest` says.
    fn lost(manifest: &Value, typed: &Value, at: &str) -> Vec<String> {
        match (manifest, typed) {
            (Value::Object(manifest), Value::Object(_)) => {
                manifest.iter().flat_map(|(key, value)| lost(value, &typed[key], &format!("{at}.{key}"))).collect()
            }
            (Value::Array(manifest), Value::Array(typed)) if manifest.len() == typed.len() => {
                manifest.iter().zip(typed).flat_map(|(value, typed)| lost(value, typed, &format!("{at}[]"))).collect()
            }
            // Amounts written as numbers are read as text.
            (Value::Number(number), Value::String(text)) if number.to_string() == *text => vec![],
            (manifest, typed) if manifest == typed => vec![],
            (manifest, typed) => vec![format!("{at}: {manifest} became {typed}")],
        }
    }

    #[test]
    fn types_hold_all_that_a_good_manifest_says() {
        for (name, documents) in manifests("good") {
            for manifest in documents {
                assert_eq!(lost(&manifest, &typed(&manifest).unwrap(), ""), Vec::<String>::new(), "{name}");
            }
        }
    }

    #[test]
    fn types_apply_the_defaults_of_the_api_server() {
        let good = manifests("good");
        let spec = |name: &str| {
            let (_, documents) = good.iter().find(|(file, _)| file == name).unwrap();
            typed(&documents[0]).unwrap()["spec"].clone()
        };
        assert_eq!(
            spec("nodepool-minimal"),
            json!({
                "disruption": {
                    "budgets": [{ "nodes": "10%" }],
                    "consolidateAfter": "0s",
                    "consolidationPolicy": "WhenEmptyOrUnderutilized",
                },
                "template": { "spec": {
                    "expireAfter": "720h",
                    "nodeClassRef": { "group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default" },
                    "requirements": [{ "key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"] }],
                } },
            })
        );
        assert_eq!(
            spec("nodeclass-minimal")["metadataOptions"],
            json!({
                "httpEndpoint": "enabled",
                "httpProtocolIPv6": "disabled",
                "httpPutResponseHopLimit": 1,
                "httpTokens": "required",
            })
        );
        assert_eq!(spec("nodeclaim-minimal")["expireAfter"], "720h");
    }

    /// What only an API server can know or say: changes, members that our types don't have, and sizes of lists.
    const ONLY_THE_API_SERVER: [&str; 6] = [
        "nodepool-budget-reason-twice",
        "nodepool-nodeclassref-group-changed",
        "nodepool-nodeclassref-kind-changed",
        "nodepool-replicas-added",
        "nodepool-requirements-101",
        "nodepool-unknown-member",
    ];

    #[test]
    fn validation_finds_in_pools_what_the_api_server_refuses() {
        let valid = |spec: Value| match serde_json::from_value(spec) {
            Ok(spec) => crate::api::validation::node_pool(&spec),
            Err(error) => vec![crate::api::validation::Invalid { field: "spec".into(), message: error.to_string() }],
        };
        for (name, documents) in manifests("good") {
            if name.starts_with("nodepool") {
                assert_eq!(valid(documents[0]["spec"].clone()), [], "{name}");
            }
        }
        let missed: Vec<String> = manifests("bad")
            .into_iter()
            .filter(|(name, documents)| name.starts_with("nodepool") && valid(documents[0]["spec"].clone()).is_empty())
            .map(|(name, _)| name)
            .collect();
        assert_eq!(missed, ONLY_THE_API_SERVER);
    }
}
