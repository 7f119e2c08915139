//! Bottlerocket: TOML settings; the controller's settings override the user's.

use std::collections::BTreeMap;
use std::fmt::Display;

use stowage_api::node_class::{AmiSelectorTerm, AmiStatus};
use toml::{Table, Value};

use crate::ec2::bootstrap::user_data::input::{BootParameters, UserDataError};

/// The type of a setting.
#[derive(Clone, Copy)]
enum Kind {
    Text,
    Integer,
    Boolean,
    Texts,
    /// A string or a list of strings.
    TextOrTexts,
    TextByName,
    /// A table with these members.
    Table(Members),
    /// Tables with these members, by name.
    Tables(Members),
    /// Any value: the controller overrides it.
    Ours,
}

type Members = &'static [(&'static str, Kind)];

/// Known settings below `settings.kubernetes`, sorted. Others are dropped: Bottlerocket would reject them, and the instance would not
/// boot.
const KUBERNETES: Members = &[
    ("allowed-unsafe-sysctls", Kind::Texts),
    ("api-server", Kind::Ours),
    ("cloud-provider", Kind::Text),
    ("cluster-certificate", Kind::Ours),
    ("cluster-dns-ip", Kind::TextOrTexts),
    ("cluster-domain", Kind::Text),
    ("cluster-name", Kind::Ours),
    ("container-log-max-files", Kind::Integer),
    ("container-log-max-size", Kind::Text),
    ("container-log-max-workers", Kind::Integer),
    ("container-log-monitor-interval", Kind::Text),
    ("cpu-cfs-quota-enforced", Kind::Boolean),
    ("cpu-manager-policy", Kind::Text),
    ("cpu-manager-policy-options", Kind::Texts),
    ("cpu-manager-reconcile-period", Kind::Text),
    (
        "credential-providers",
        Kind::Tables(&[
            ("cache-duration", Kind::Text),
            ("enabled", Kind::Boolean),
            ("environment", Kind::TextByName),
            ("image-patterns", Kind::Texts),
        ]),
    ),
    ("device-ownership-from-security-context", Kind::Boolean),
    ("event-burst", Kind::Integer),
    ("event-qps", Kind::Integer),
    ("eviction-hard", Kind::TextByName),
    ("eviction-max-pod-grace-period", Kind::Integer),
    ("eviction-soft", Kind::TextByName),
    ("eviction-soft-grace-period", Kind::TextByName),
    ("hostname-override-source", Kind::Text),
    ("ids-per-pod", Kind::Integer),
    ("image-gc-high-threshold-percent", Kind::Text),
    ("image-gc-low-threshold-percent", Kind::Text),
    ("kube-api-burst", Kind::Integer),
    ("kube-api-qps", Kind::Integer),
    ("kube-reserved", Kind::TextByName),
    ("log-level", Kind::Integer),
    ("max-pods", Kind::Ours),
    ("memory-manager-policy", Kind::Text),
    (
        "memory-manager-reserved-memory",
        Kind::Tables(&[
            ("enabled", Kind::Boolean),
            ("hugepages-1Gi", Kind::Text),
            ("hugepages-2Mi", Kind::Text),
            ("memory", Kind::Text),
        ]),
    ),
    ("node-labels", Kind::TextByName),
    ("node-taints", Kind::Ours),
    ("pod-pids-limit", Kind::Integer),
    ("registry-burst", Kind::Integer),
    ("registry-qps", Kind::Integer),
    ("seccomp-default", Kind::Boolean),
    ("server-tls-bootstrap", Kind::Boolean),
    ("shutdown-grace-period", Kind::Text),
    ("shutdown-grace-period-for-critical-pods", Kind::Text),
    ("single-process-oom-kill", Kind::Boolean),
    ("static-pods", Kind::Tables(&[("enabled", Kind::Boolean), ("manifest", Kind::Text)])),
    ("system-reserved", Kind::TextByName),
    ("topology-manager-policy", Kind::Text),
    (
        "topology-manager-policy-options",
        Kind::Table(&[("max-allowable-numa-nodes", Kind::Integer), ("prefer-closest-numa-nodes", Kind::Boolean)]),
    ),
    ("topology-manager-scope", Kind::Text),
];

/// Name of the command that combines the local disks into one volume. Commands run in the order of their names.
const MOUNT_COMMAND: &str = "000-mount-instance-storage";

pub(crate) fn user_data(boot: &BootParameters<'_>) -> Result<String, UserDataError> {
    let mut document = parse(boot.custom().unwrap_or_default())?;
    let mut settings = take_table(&mut document, "settings", "settings")?;
    let user = take_table(&mut settings, "kubernetes", "settings.kubernetes")?;
    let mut kubernetes = known_members(KUBERNETES, "settings.kubernetes", user, &mut Vec::new())?;
    override_settings(&mut kubernetes, boot)?;
    settings.insert("kubernetes".to_owned(), kubernetes.into());
    if boot.input.local_disks {
        let mut commands = take_table(&mut settings, "bootstrap-commands", "settings.bootstrap-commands")?;
        commands.insert(MOUNT_COMMAND.to_owned(), mount_command(boot.input.image_version).into());
        settings.insert("bootstrap-commands".to_owned(), commands.into());
    }
    document.insert("settings".to_owned(), settings.into());
    toml::to_string(&document).map_err(|error| UserDataError::Write(error.to_string()))
}

/// Paths of settings in a class's user data that are dropped: unknown members of `settings.kubernetes`. Empty for invalid TOML, which
/// [`user_data`] reports.
pub fn ignored_settings(custom: &str) -> Vec<String> {
    let mut ignored = Vec::new();
    let kubernetes = parse(custom).and_then(|mut document| {
        let mut settings = take_table(&mut document, "settings", "settings")?;
        take_table(&mut settings, "kubernetes", "settings.kubernetes")
    });
    // Only the dropped settings matter here, not the types of the others.
    let _ =
        kubernetes.and_then(|kubernetes| known_members(KUBERNETES, "settings.kubernetes", kubernetes, &mut ignored));
    ignored
}

/// The version of a Bottlerocket image, such as `v1.46.0` or `latest`: the alias's; else the one in a term's name; else the
/// one in the name of an image that a term names by id; else the one in the name of any Bottlerocket image in use.
pub fn image_version<'a>(terms: &'a [AmiSelectorTerm], images: &'a [AmiStatus]) -> Option<&'a str> {
    let image_name = |image: &'a AmiStatus| image.name.as_deref().filter(|name| name.contains("bottlerocket"));
    let of_id = |id: &str| images.iter().find(|image| image.id == id && image_name(image).is_some());
    let alias = terms.iter().find_map(|term| Some(term.alias.as_deref()?.split_once('@')?.1));
    alias
        .or_else(|| terms.iter().find_map(|term| version_in(term.name.as_deref()?)))
        .or_else(|| terms.iter().find_map(|term| version_in(image_name(of_id(term.id.as_deref()?)?)?)))
        .or_else(|| images.iter().find_map(|image| version_in(image_name(image)?)))
}

/// `v1.46.0` in `bottlerocket-aws-k8s-1.33-x86_64-v1.46.0-431fe75a`.
fn version_in(name: &str) -> Option<&str> {
    name.split('-').find(|part| part.starts_with('v') && part.contains('.'))
}

/// Whether `apiclient ephemeral-storage bind` has default targets: from 1.46 on.
fn binds_by_default(version: Option<&str>) -> bool {
    let Some(version) = version else {
        return false;
    };
    let mut numbers = version.trim_start_matches('v').split('.').map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (1, 46),
        _ => version == "latest",
    }
}

fn parse(text: &str) -> Result<Table, UserDataError> {
    text.parse().map_err(|error: toml::de::Error| {
        let start = error.span().map_or(0, |span| span.start);
        let line = text.as_bytes().iter().take(start).filter(|byte| **byte == b'\n').count() + 1;
        UserDataError::Toml(format!("line {line}: {}", error.message()))
    })
}

/// Removes a table from another; an empty one where there is none.
fn take_table(from: &mut Table, key: &str, path: &str) -> Result<Table, UserDataError> {
    match from.remove(key) {
        None => Ok(Table::new()),
        Some(Value::Table(table)) => Ok(table),
        Some(other) => Err(wrong(path, "a table", &other)),
    }
}

fn wrong(path: &str, expected: &'static str, found: &Value) -> UserDataError {
    UserDataError::Setting { setting: path.to_owned(), expected, found: found.type_str() }
}

/// The known members of a table after a type check; the paths of the others are added to `ignored`.
fn known_members(
    members: Members,
    path: &str,
    table: Table,
    ignored: &mut Vec<String>,
) -> Result<Table, UserDataError> {
    let mut kept = Table::new();
    for (key, value) in table {
        let path = format!("{path}.{key}");
        match members.iter().find(|(known, _)| *known == key) {
            None => ignored.push(path),
            Some((_, kind)) => {
                let value = check(*kind, &path, value, ignored)?;
                kept.insert(key, value);
            }
        }
    }
    Ok(kept)
}

fn check(kind: Kind, path: &str, value: Value, ignored: &mut Vec<String>) -> Result<Value, UserDataError> {
    let are_texts = |value: &Value| value.as_array().is_some_and(|values| values.iter().all(Value::is_str));
    let (fits, expected) = match kind {
        Kind::Ours => (true, ""),
        Kind::Text => (value.is_str(), "a string"),
        Kind::Integer => (value.is_integer(), "a whole number"),
        Kind::Boolean => (value.is_bool(), "true or false"),
        Kind::Texts => (are_texts(&value), "a list of strings"),
        Kind::TextOrTexts => (value.is_str() || are_texts(&value), "a string or a list of strings"),
        Kind::TextByName => {
            (value.as_table().is_some_and(|table| table.values().all(Value::is_str)), "a table of strings")
        }
        Kind::Table(members) => {
            return match value {
                Value::Table(table) => known_members(members, path, table, ignored).map(Value::from),
                other => Err(wrong(path, "a table", &other)),
            };
        }
        Kind::Tables(members) => {
            let Value::Table(tables) = value else {
                return Err(wrong(path, "a table of tables", &value));
            };
            let mut kept = Table::new();
            for (name, value) in tables {
                let value = check(Kind::Table(members), &format!("{path}.{name}"), value, ignored)?;
                kept.insert(name, value);
            }
            return Ok(kept.into());
        }
    };
    if fits { Ok(value) } else { Err(wrong(path, expected, &value)) }
}

/// Sets the settings from the NodeClaim, the class's kubelet configuration and the cluster.
fn override_settings(kubernetes: &mut Table, boot: &BootParameters<'_>) -> Result<(), UserDataError> {
    let (input, kubelet) = (boot.input, &boot.kubelet);
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            kubernetes.insert(key.to_owned(), value);
        }
    };
    set("api-server", Some(input.endpoint.into()));
    set("cluster-certificate", input.ca_bundle.map(Value::from));
    set("cluster-name", Some(input.cluster_name.into()));
    set("cluster-dns-ip", boot.cluster_dns.first().map(|address| address.as_str().into()));
    set("max-pods", Some(boot.max_pods.into()));
    set(
        "eviction-max-pod-grace-period",
        kubelet.eviction_max_pod_grace_period.map(|seconds| i64::from(seconds).into()),
    );
    set("image-gc-high-threshold-percent", kubelet.image_gc_high_threshold_percent.map(|p| p.to_string().into()));
    set("image-gc-low-threshold-percent", kubelet.image_gc_low_threshold_percent.map(|p| p.to_string().into()));
    set("cpu-cfs-quota-enforced", kubelet.cpu_cfs_quota.map(Value::from));
    set("system-reserved", kubelet.system_reserved.as_ref().map(texts));
    set("kube-reserved", kubelet.kube_reserved.as_ref().map(texts));
    set("eviction-hard", kubelet.eviction_hard.as_ref().map(texts));
    set("eviction-soft", kubelet.eviction_soft.as_ref().map(texts));
    set("eviction-soft-grace-period", kubelet.eviction_soft_grace_period.as_ref().map(texts));
    set("node-taints", Some(node_taints(boot)));

    let mut labels = take_table(kubernetes, "node-labels", "settings.kubernetes.node-labels")?;
    labels.extend(boot.labels.iter().map(|(key, value)| (key.clone(), value.as_str().into())));
    kubernetes.insert("node-labels".to_owned(), labels.into());
    Ok(())
}

fn texts(map: &BTreeMap<String, impl Display>) -> Value {
    let table: Table = map.iter().map(|(key, value)| (key.clone(), value.to_string().into())).collect();
    table.into()
}

/// `value:effect` by key; a key may have several.
fn node_taints(boot: &BootParameters<'_>) -> Value {
    let mut by_key: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for taint in &boot.taints {
        let text = format!("{}:{}", taint.value.as_deref().unwrap_or_default(), taint.effect);
        by_key.entry(taint.key.as_str()).or_default().push(text.into());
    }
    let table: Table = by_key.into_iter().map(|(key, values)| (key.to_owned(), values.into())).collect();
    table.into()
}

fn mount_command(version: Option<&str>) -> Table {
    let command = |words: &[&str]| Value::Array(words.iter().map(|word| Value::from(*word)).collect());
    let bind: &[&str] = if binds_by_default(version) {
        &["apiclient", "ephemeral-storage", "bind"]
    } else {
        &[
            "apiclient",
            "ephemeral-storage",
            "bind",
            "--dirs",
            "/var/lib/containerd",
            "/var/lib/kubelet",
            "/var/log/pods",
        ]
    };
    let commands = vec![command(&["apiclient", "ephemeral-storage", "init"]), command(bind)];
    let mut table = Table::new();
    table.insert("commands".to_owned(), commands.into());
    table.insert("mode".to_owned(), "always".into());
    table.insert("essential".to_owned(), true.into());
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_settings_are_sorted() {
        assert!(KUBERNETES.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    #[test]
    fn the_version_is_in_the_alias_or_in_a_name() {
        let alias = |alias: &str| AmiSelectorTerm { alias: Some(alias.to_owned()), ..AmiSelectorTerm::default() };
        let name = |name: &str| AmiSelectorTerm { name: Some(name.to_owned()), ..AmiSelectorTerm::default() };
        let id = |id: &str| AmiSelectorTerm { id: Some(id.to_owned()), ..AmiSelectorTerm::default() };
        let image =
            |id: &str, name: &str| AmiStatus { id: id.to_owned(), name: Some(name.to_owned()), ..AmiStatus::default() };
        let images = [
            image("ami-0", "my-own-v9.9.9"),
            image("ami-1", "bottlerocket-aws-k8s-1.33-x86_64-v1.45.0-431fe75a"),
            image("ami-2", "bottlerocket-aws-k8s-1.33-aarch64-v1.46.0-431fe75a"),
        ];
        for (terms, expected) in [
            (vec![alias("bottlerocket@v1.44.1")], Some("v1.44.1")),
            (vec![alias("bottlerocket@latest")], Some("latest")),
            (vec![name("bottlerocket-aws-k8s-*"), name("bottlerocket-aws-k8s-1.33-*-v1.43.0-*")], Some("v1.43.0")),
            (vec![id("ami-2")], Some("v1.46.0")),
            (vec![id("ami-0")], Some("v1.45.0")),
            (vec![], Some("v1.45.0")),
        ] {
            assert_eq!(image_version(&terms, &images), expected, "{terms:?}");
        }
        assert_eq!(image_version(&[id("ami-0")], &images[..1]), None);
    }

    #[test]
    fn the_bind_command_has_defaults_from_1_46_on() {
        for (version, expected) in [
            (Some("v1.45.0"), false),
            (Some("1.45.9"), false),
            (Some("v1.46.0"), true),
            (Some("1.46.0"), true),
            (Some("v1.100.2"), true),
            (Some("v2.0.0"), true),
            (Some("v0.99.0"), false),
            (Some("latest"), true),
            (Some("newest"), false),
            (Some("v1.x.0"), false),
            (None, false),
        ] {
            assert_eq!(binds_by_default(version), expected, "{version:?}");
        }
    }
}
