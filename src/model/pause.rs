//! The emergency stop: what an operator pauses with the ConfigMap [`NAME`], which also has the log level.

use std::collections::BTreeMap;

/// Name of the ConfigMap, in the namespace of the service. Without it nothing is paused.
pub const NAME: &str = "stowage-pause";
/// Key of the ConfigMap.
pub const KEY: &str = "pause";

/// Key of the ConfigMap with the log level of every replica. Without it the level is that of the setting.
pub const LOG_LEVEL_KEY: &str = "logLevel";

/// What is paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pause {
    /// No NodeClaim is created, and none is launched. Nodes with pods are not disrupted voluntarily, and none expires: their pods would
    /// find no node.
    pub provisioning: bool,
    /// No node is disrupted voluntarily, and no garbage is collected. Interruptions, failed status checks and deletions by users
    /// continue: the instance is lost anyway, or somebody wants it.
    pub disruption: bool,
}

impl Pause {
    /// Everything.
    pub const ALL: Self = Self { provisioning: true, disruption: true };

    /// What a ConfigMap with this data pauses: see [`Self::parse`]. Nothing if the log level is all that it has.
    pub fn of(data: &BTreeMap<String, String>) -> Self {
        if data.len() == 1 && data.contains_key(LOG_LEVEL_KEY) {
            return Self::default();
        }
        Self::parse(data.get(KEY).map(String::as_str))
    }

    /// Parses the value of [`KEY`]: `provisioning`, `disruption`, `all`, or `none`. The presence of any other value, or of the
    /// ConfigMap without the key, pauses everything: whoever writes it wants something to stop, and a typing error must not let it
    /// continue.
    pub fn parse(value: Option<&str>) -> Self {
        match value.map(str::trim) {
            Some("none") => Self::default(),
            Some("provisioning") => Self { provisioning: true, disruption: false },
            Some("disruption") => Self { provisioning: false, disruption: true },
            _ => Self::ALL,
        }
    }

    /// The equivalent value of the ConfigMap.
    pub fn label(self) -> &'static str {
        match (self.provisioning, self.disruption) {
            (false, false) => "none",
            (true, false) => "provisioning",
            (false, true) => "disruption",
            (true, true) => "all",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreadable_value_pauses_everything() {
        for (value, label) in [
            (Some("none"), "none"),
            (Some("provisioning"), "provisioning"),
            (Some(" disruption\n"), "disruption"),
            (Some("all"), "all"),
            (Some("false"), "all"),
            (Some("Disruption"), "all"),
            (Some(""), "all"),
            (None, "all"),
        ] {
            assert_eq!(Pause::parse(value).label(), label, "{value:?}");
        }
    }

    #[test]
    fn a_log_level_alone_pauses_nothing() {
        let paused = |keys: &[&str]| {
            let data = keys.iter().map(|key| ((*key).to_owned(), "none".to_owned())).collect();
            Pause::of(&data).label()
        };
        assert_eq!(paused(&[LOG_LEVEL_KEY]), "none");
        assert_eq!(paused(&[LOG_LEVEL_KEY, KEY]), "none");
        for keys in [&[][..], &["puase"], &[LOG_LEVEL_KEY, "puase"]] {
            assert_eq!(paused(keys), "all", "{keys:?}");
        }
    }
}
