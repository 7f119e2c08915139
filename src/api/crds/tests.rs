use std::path::{Path, PathBuf};

use super::*;

/// The folder of the top level.
fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn checked_in_crds_match_the_types() {
    let folder = package().join("crds");
    let files = files().unwrap();
    if std::env::var_os("STOWAGE_REGENERATE").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in &files {
            std::fs::write(folder.join(name), text).unwrap();
        }
    }
    for (name, text) in &files {
        let checked_in = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        assert!(checked_in == *text, "crds/{name} is stale: run STOWAGE_REGENERATE=1 cargo test -p stowage-api crds");
    }
    let mut present: Vec<String> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    present.sort();
    let mut expected: Vec<String> = files.into_iter().map(|(name, _)| name).collect();
    expected.sort();
    assert_eq!(present, expected, "files of crds/");
}

#[test]
fn yaml_parses_back_to_the_same_document() {
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
fn typed_crds_contain_the_cel_rules() {
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
    let folder = package().join("tests/data/manifests").join(folder);
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

/// Paths and values of `manifest` that `typed` lost or changed.
fn lost(manifest: &Value, typed: &Value, at: &str) -> Vec<String> {
    match (manifest, typed) {
        (Value::Object(manifest), Value::Object(_)) => {
            manifest.iter().flat_map(|(key, value)| lost(value, &typed[key], &format!("{at}.{key}"))).collect()
        }
        (Value::Array(manifest), Value::Array(typed)) if manifest.len() == typed.len() => {
            manifest.iter().zip(typed).flat_map(|(value, typed)| lost(value, typed, &format!("{at}[]"))).collect()
        }
        // Quantities written as numbers are read as text.
        (Value::Number(number), Value::String(text)) if number.to_string() == *text => vec![],
        (manifest, typed) if manifest == typed => vec![],
        (manifest, typed) => vec![format!("{at}: {manifest} became {typed}")],
    }
}

#[test]
fn types_lose_nothing_of_a_valid_manifest() {
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

/// Manifests that only an API server can reject: changes, members that the Rust types don't have, and sizes of lists.
const ONLY_THE_API_SERVER: [&str; 6] = [
    "nodepool-budget-reason-twice",
    "nodepool-nodeclassref-group-changed",
    "nodepool-nodeclassref-kind-changed",
    "nodepool-replicas-added",
    "nodepool-requirements-101",
    "nodepool-unknown-member",
];

#[test]
fn validation_rejects_the_pools_that_the_api_server_rejects() {
    let valid = |spec: Value| match serde_json::from_value(spec) {
        Ok(spec) => crate::validation::node_pool(&spec),
        Err(error) => vec![crate::validation::Invalid { field: "spec".into(), message: error.to_string() }],
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
