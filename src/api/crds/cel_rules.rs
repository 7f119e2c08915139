//! CEL validation rules, which the API server evaluates in addition to the schema, each with its error message.
//!
//! The rules are Karpenter's, with three deliberate differences: a rule about an entry of a list is attached to the entry, so
//! that the message carries its index; a selector term with mutually exclusive members is rejected at every position of the list
//! (Karpenter rejects the list only when every term is invalid); and a restricted domain is that domain and its subdomains, not
//! every domain that ends in the same letters.

use stowage_model::labels;

use crate::node_class::selectors::ALIAS_FAMILIES;

/// A rule and the schema node that it is attached to.
pub(crate) struct Rule {
    /// Path of the node from the root of the object; `[]` steps into a list.
    pub(crate) at: &'static str,
    /// CEL expression, true when the value is valid.
    pub(crate) cel: String,
    /// Error message when the expression is false.
    pub(crate) message: String,
    /// CEL expression for an error message that names the invalid value; `message` is the fallback if the evaluation fails.
    pub(crate) naming: Option<String>,
}

fn rule(at: &'static str, cel: impl Into<String>, message: impl Into<String>) -> Rule {
    Rule { at, cel: cel.into(), message: message.into(), naming: None }
}

/// A list literal in CEL: `["a", "b"]`.
fn list<'a>(items: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<String> = items.into_iter().map(|item| format!("'{item}'")).collect();
    format!("[{}]", quoted.join(", "))
}

/// Rules for restricted label keys: a CEL expression that is true when `key` is allowed, and the rest of the error message, which
/// begins with the key.
fn key_restrictions(key: &str, pool: bool) -> Vec<(String, &'static str)> {
    let mut all = vec![
        (
            format!(
                "{key} in {} || !{key}.matches('^([^/]+[.])?karpenter[.]sh/')",
                list([labels::CAPACITY_TYPE, labels::NODE_POOL])
            ),
            "is restricted: of the keys of karpenter.sh only karpenter.sh/capacity-type may be named here",
        ),
        (
            format!(
                "{key} in {} || !{key}.matches('^([^/]+[.])?karpenter[.]k8s[.]aws/')",
                list(labels::EC2_LABELS.iter().copied())
            ),
            "is restricted: of the keys of karpenter.k8s.aws only those that describe instances may be named here",
        ),
        (format!("{key} != '{}'", labels::HOSTNAME), "is restricted: a node's name is not known before it exists"),
    ];
    if pool {
        all.push((format!("{key} != '{}'", labels::NODE_POOL), "is restricted: it is set to the name of the NodePool"));
    }
    all
}

fn requirement_rules(at: &'static str, key_at: &'static str, pool: bool) -> Vec<Rule> {
    let mut rules = vec![
        rule(
            at,
            "self.operator != 'In' || (has(self.values) && self.values.size() > 0)",
            "operator 'In' needs at least one value",
        ),
        rule(
            at,
            "!(self.operator in ['Gt', 'Lt', 'Gte', 'Lte']) || (has(self.values) && self.values.size() == 1 && \
             self.values[0].matches('^[0-9]+$') && int(self.values[0]) >= 0)",
            "operators 'Gt', 'Lt', 'Gte' and 'Lte' need exactly one value, an integer of zero or more",
        ),
        rule(
            at,
            "self.operator != 'In' || !has(self.minValues) || (has(self.values) && self.values.size() >= self.minValues)",
            "operator 'In' needs at least as many values as 'minValues' says",
        ),
    ];
    rules.extend(key_restrictions("self", pool).into_iter().map(|(cel, why)| Rule {
        naming: Some(format!(r#""'" + self + "' {why}""#)),
        ..rule(key_at, cel, format!("the key {why}"))
    }));
    rules
}

/// Rules of NodePool.
pub(crate) fn node_pool() -> Vec<Rule> {
    let mut rules = vec![
        rule(
            "spec",
            "has(self.replicas) == has(oldSelf.replicas)",
            "'replicas' can't be added or removed: a static NodePool can't become dynamic, nor the other way round; make a new NodePool",
        ),
        rule(
            "spec",
            "!has(self.replicas) || !has(self.limits) || size(self.limits) == 0 || \
             (size(self.limits) == 1 && 'nodes' in self.limits)",
            "a static NodePool (one with 'replicas') supports only 'limits.nodes'",
        ),
        rule(
            "spec",
            "!has(self.replicas) || !has(self.weight)",
            "a static NodePool (one with 'replicas') doesn't support 'weight'",
        ),
        rule(
            "spec.disruption.budgets[]",
            "has(self.schedule) == has(self.duration)",
            "'schedule' and 'duration' must be set together",
        ),
        rule(
            "spec.template.spec.nodeClassRef",
            "self.group == oldSelf.group",
            "nodeClassRef.group can't be changed; make a new NodePool",
        ),
        rule(
            "spec.template.spec.nodeClassRef",
            "self.kind == oldSelf.kind",
            "nodeClassRef.kind can't be changed; make a new NodePool",
        ),
    ];
    for (cel, why) in key_restrictions("k", true) {
        // The message does not name the key: map keys have no length bound, so the API server's CEL cost estimate would be exceeded.
        rules.push(rule("spec.template.metadata.labels", format!("self.all(k, {cel})"), format!("a label {why}")));
    }
    rules.extend(node_class_ref_rules([
        "spec.template.spec.nodeClassRef.group",
        "spec.template.spec.nodeClassRef.kind",
        "spec.template.spec.nodeClassRef.name",
    ]));
    rules.extend(requirement_rules("spec.template.spec.requirements[]", "spec.template.spec.requirements[].key", true));
    rules
}

/// Rules of NodeClaim.
pub(crate) fn node_claim() -> Vec<Rule> {
    let mut rules = vec![rule("spec", "self == oldSelf", "the spec of a NodeClaim can't be changed")];
    rules.extend(node_class_ref_rules(["spec.nodeClassRef.group", "spec.nodeClassRef.kind", "spec.nodeClassRef.name"]));
    rules.extend(requirement_rules("spec.requirements[]", "spec.requirements[].key", false));
    rules
}

fn node_class_ref_rules(paths: [&'static str; 3]) -> impl Iterator<Item = Rule> {
    paths.into_iter().map(|at| {
        let member = at.rsplit_once('.').map_or(at, |(_, member)| member);
        rule(at, "self != ''", format!("nodeClassRef.{member} may not be empty"))
    })
}

/// Rules of EC2NodeClass.
pub(crate) fn node_class() -> Vec<Rule> {
    let mut rules = vec![
        rule(
            "spec",
            "has(self.role) != has(self.instanceProfile)",
            "must specify exactly one of 'role' and 'instanceProfile'",
        ),
        rule(
            "spec",
            "has(self.amiFamily) || self.amiSelectorTerms.exists(t, has(t.alias))",
            "must specify 'amiFamily' when 'amiSelectorTerms' has no 'alias'",
        ),
        rule("spec.role", "self != ''", "role may not be empty"),
        rule("spec.instanceProfile", "self != ''", "instanceProfile may not be empty"),
    ];
    for (alias, family) in ALIAS_FAMILIES {
        rules.push(rule(
            "spec",
            format!(
                "!has(self.amiFamily) || self.amiFamily in ['Custom', '{family}'] || \
                 !self.amiSelectorTerms.exists(t, has(t.alias) && t.alias.startsWith('{alias}@'))"
            ),
            format!("with an '{alias}' alias, 'amiFamily' must be absent, '{family}' or 'Custom'"),
        ));
    }
    rules.extend(selector_rules());
    rules.extend(tag_rules());
    rules.extend([
        rule(
            "spec.blockDeviceMappings",
            "self.filter(m, has(m.rootVolume) && m.rootVolume).size() <= 1",
            "only one of 'blockDeviceMappings' may be the 'rootVolume'",
        ),
        rule(
            "spec.blockDeviceMappings[].ebs",
            "has(self.snapshotID) || has(self.volumeSize)",
            "must specify 'snapshotID' or 'volumeSize'",
        ),
        rule(
            "spec.blockDeviceMappings[].ebs",
            "!has(self.volumeInitializationRate) || (has(self.snapshotID) && self.snapshotID != '')",
            "'volumeInitializationRate' needs a 'snapshotID'",
        ),
        rule(
            "spec.networkInterfaces",
            "self.size() == 0 || \
             self.exists(i, i.networkCardIndex == 0 && i.deviceIndex == 0 && i.interfaceType == 'interface')",
            "networkInterfaces must have one with networkCardIndex 0, deviceIndex 0 and interfaceType 'interface'",
        ),
        rule(
            "spec.networkInterfaces",
            "self.all(x, self.filter(y, x.networkCardIndex == y.networkCardIndex && x.deviceIndex == y.deviceIndex).size() == 1)",
            "no two networkInterfaces may have the same networkCardIndex and deviceIndex",
        ),
        rule(
            "spec.networkInterfaces",
            "self.all(x, x.interfaceType != 'efa-only' || \
             self.filter(y, x.networkCardIndex == y.networkCardIndex && y.interfaceType == 'efa-only').size() == 1)",
            "a network card may have at most one interface of type 'efa-only'",
        ),
        rule(
            "spec.connectionTracking",
            "has(self.tcpEstablishedTimeout) || has(self.udpStreamTimeout) || has(self.udpTimeout)",
            "must specify at least one of 'tcpEstablishedTimeout', 'udpStreamTimeout' and 'udpTimeout'",
        ),
    ]);
    rules
}

fn selector_rules() -> Vec<Rule> {
    let subnet = "spec.subnetSelectorTerms[]";
    let group = "spec.securityGroupSelectorTerms[]";
    let reservation = "spec.capacityReservationSelectorTerms[]";
    let ami = "spec.amiSelectorTerms[]";
    let placement = "spec.placementGroupSelector";
    let families = || ALIAS_FAMILIES.iter().map(|(alias, _)| *alias);
    let windows = || families().filter(|alias| alias.starts_with("windows"));
    vec![
        rule("spec.subnetSelectorTerms", "self.size() != 0", "subnetSelectorTerms may not be empty"),
        rule(subnet, "has(self.tags) || has(self.id)", "a subnet selector term needs one of 'tags' and 'id'"),
        rule(
            subnet,
            "!(has(self.id) && has(self.tags))",
            "'id' and 'tags' exclude each other in a subnet selector term",
        ),
        rule("spec.securityGroupSelectorTerms", "self.size() != 0", "securityGroupSelectorTerms may not be empty"),
        rule(
            group,
            "has(self.tags) || has(self.id) || has(self.name)",
            "a security group selector term needs one of 'tags', 'id' and 'name'",
        ),
        rule(
            group,
            "!has(self.id) || !(has(self.tags) || has(self.name))",
            "'id' excludes all other members of a security group selector term",
        ),
        rule(
            group,
            "!has(self.name) || !(has(self.tags) || has(self.id))",
            "'name' excludes all other members of a security group selector term",
        ),
        rule(
            reservation,
            "has(self.tags) || has(self.id) || has(self.instanceMatchCriteria)",
            "a capacity reservation selector term needs at least one of 'tags', 'id' and 'instanceMatchCriteria'",
        ),
        rule(
            reservation,
            "!has(self.id) || !(has(self.tags) || has(self.ownerID) || has(self.instanceMatchCriteria))",
            "'id' excludes all other members of a capacity reservation selector term",
        ),
        rule(
            placement,
            "has(self.name) != has(self.id)",
            "must specify exactly one of 'name' and 'id' of a placement group",
        ),
        rule(
            ami,
            "has(self.tags) || has(self.id) || has(self.name) || has(self.alias) || has(self.ssmParameter)",
            "an AMI selector term needs at least one of 'tags', 'id', 'name', 'alias' and 'ssmParameter'",
        ),
        rule(
            ami,
            "!has(self.id) || !(has(self.alias) || has(self.tags) || has(self.name) || has(self.owner))",
            "'id' excludes 'alias', 'tags', 'name' and 'owner' in an AMI selector term",
        ),
        rule(
            ami,
            "!has(self.alias) || !(has(self.id) || has(self.tags) || has(self.name) || has(self.owner))",
            "'alias' excludes 'id', 'tags', 'name' and 'owner' in an AMI selector term",
        ),
        rule(
            "spec.amiSelectorTerms",
            "self.size() == 1 || !self.exists(t, has(t.alias))",
            "an AMI selector term with 'alias' must be the only term",
        ),
        rule(
            "spec.amiSelectorTerms[].alias",
            "self.matches('^[a-zA-Z0-9]+@.+$')",
            "alias must have the form 'family@version', as 'al2023@latest'",
        ),
        rule(
            "spec.amiSelectorTerms[].alias",
            format!("self.split('@')[0] in {}", list(families())),
            format!("the family of an alias must be one of {}", families().collect::<Vec<_>>().join(", ")),
        ),
        rule(
            "spec.amiSelectorTerms[].alias",
            format!(
                "!(self.split('@')[0] in {}) || (self.split('@').size() > 1 && self.split('@')[1] == 'latest')",
                list(windows())
            ),
            "an alias of a Windows family must have the version 'latest'",
        ),
    ]
}

fn tag_rules() -> Vec<Rule> {
    let selector = [
        "spec.subnetSelectorTerms[].tags",
        "spec.securityGroupSelectorTerms[].tags",
        "spec.capacityReservationSelectorTerms[].tags",
        "spec.amiSelectorTerms[].tags",
    ];
    let mut rules: Vec<Rule> = selector
        .into_iter()
        .map(|at| {
            rule(
                at,
                "self.all(k, k != '' && self[k] != '')",
                "keys and values of selector tags may not be empty; the value '*' matches any value of the key",
            )
        })
        .collect();
    rules.push(rule("spec.tags", "self.all(k, k != '')", "keys of tags may not be empty"));
    rules.push(rule(
        "spec.tags",
        "self.all(k, !k.startsWith('kubernetes.io/cluster'))",
        "tag keys that start with 'kubernetes.io/cluster' are restricted: they are set by the controller",
    ));
    for key in labels::RESTRICTED_TAGS {
        rules.push(rule(
            "spec.tags",
            format!("self.all(k, k != '{key}')"),
            format!("tag '{key}' is restricted: it is set by the controller"),
        ));
    }
    rules
}
