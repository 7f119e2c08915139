//! The CustomResourceDefinitions, generated from the Rust types and checked in under `crds/`.
//!
//! `STOWAGE_REGENERATE=1 cargo test --lib crds` regenerates them; without the variable the same test fails when a file is stale.

pub mod cel_rules;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use crate::crds::cel_rules::Rule;
use crate::{Ec2NodeClass, NodeClaim, NodePool};

/// The CRDs of NodePool, NodeClaim and EC2NodeClass.
///
/// # Panics
/// Never: the documents consist of constants, and the tests generate all of them.
pub fn all() -> Vec<CustomResourceDefinition> {
    documents()
        .into_iter()
        .map(|(_, document)| serde_json::from_value(document).expect("generated from a CustomResourceDefinition"))
        .collect()
}

/// Each CRD's file name (`group_plural.yaml`) and its text.
///
/// # Errors
/// When a document can't be written as YAML, which no schema here causes.
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
        document("karpenter.sh_nodepools.yaml", &NodePool::crd(), &[], cel_rules::node_pool()),
        document("karpenter.sh_nodeclaims.yaml", &NodeClaim::crd(), &[], cel_rules::node_claim()),
        document(
            "karpenter.k8s.aws_ec2nodeclasses.yaml",
            &Ec2NodeClass::crd(),
            &["amiSelectorTerms", "securityGroupSelectorTerms", "subnetSelectorTerms"],
            cel_rules::node_class(),
        ),
    ]
}

/// Completes a CRD from the derive macros. `required` names members of spec that the Rust types treat as optional and that the
/// API server must require.
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
/// When there is none: a path is a constant of this module, and a test resolves every path.
fn node<'a>(root: &'a mut Value, path: &str) -> &'a mut Value {
    path.split('.').fold(root, |at, step| {
        let (member, is_list) = step.strip_suffix("[]").map_or((step, false), |member| (member, true));
        let at = &mut at["properties"][member];
        let at = if is_list { &mut at["items"] } else { at };
        assert!(at.is_object(), "no schema node {step} of {path}");
        at
    })
}

/// Converts a schema and everything below it to Karpenter's form: no member is nullable; integers are written without a
/// fraction; a quantity is an integer or a string.
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
mod tests;
