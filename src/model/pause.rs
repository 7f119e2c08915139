//! The emergency stop: what an operator pauses with the ConfigMap [`NAME`], which also has the log level.

use std::collections::BTreeMap;

/// Name of the ConfigMap, in the namespace of the service. Without it nothing is paused.
pub const NAME: &str = "stowage-pause";
/// Key of the ConfigMap.
pub const KEY: &str = "pause";

/// Key of the ConfigMap for disruption alone: `report` computes what would be disrupted, and only reports it.
pub const DISRUPTION_KEY: &str = "disruption";

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
    /// Disruption is paused, and what it would do is reported.
    pub report: bool,
}

impl Pause {
    /// Everything.
    pub const ALL: Self = Self { provisioning: true, disruption: true, report: false };

    /// What a ConfigMap with this data pauses: see [`Self::parse`]. Without [`KEY`], nothing if all its keys are known. A value of [`DISRUPTION_KEY`]
    /// that is neither `report` nor `none` pauses disruption.
    pub fn of(data: &BTreeMap<String, String>) -> Self {
        let is_known = |key: &String| [LOG_LEVEL_KEY, DISRUPTION_KEY].contains(&key.as_str());
        let has_only_known = !data.is_empty() && data.keys().all(is_known);
        let paused = if has_only_known { Self::default() } else { Self::parse(data.get(KEY).map(String::as_str)) };
        match data.get(DISRUPTION_KEY).map(|value| value.trim()) {
            None | Some("none") => paused,
            Some(value) => Self { disruption: true, report: value == "report", ..paused },
        }
    }

    /// Whether it may be decided which nodes to disrupt, be it only for a report.
    pub fn allows_decisions(self) -> bool {
        !self.disruption || self.report
    }

    /// Parses the value of [`KEY`]: `provisioning`, `disruption`, `all`, or `none`. The presence of any other value, or of the
    /// ConfigMap without the key, pauses everything: whoever writes it wants something to stop, and a typing error must not let it
    /// continue.
    pub fn parse(value: Option<&str>) -> Self {
        match value.map(str::trim) {
            Some("none") => Self::default(),
            Some("provisioning") => Self { provisioning: true, ..Self::default() },
            Some("disruption") => Self { disruption: true, ..Self::default() },
            _ => Self::ALL,
        }
    }

    /// The equivalent value of the ConfigMap; `report` where disruption is only reported.
    pub fn label(self) -> &'static str {
        match (self.provisioning, self.disruption, self.report) {
            (false, false, _) => "none",
            (true, false, _) => "provisioning",
            (false, true, false) => "disruption",
            (false, true, true) => "report",
            (true, true, _) => "all",
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

    #[test]
    fn disruption_that_is_only_reported_is_paused() {
        for (data, label) in [
            (&[(DISRUPTION_KEY, " report\n")][..], "report"),
            (&[(DISRUPTION_KEY, "report"), (LOG_LEVEL_KEY, "debug")], "report"),
            (&[(DISRUPTION_KEY, "report"), (KEY, "none")], "report"),
            (&[(DISRUPTION_KEY, "report"), (KEY, "disruption")], "report"),
            (&[(DISRUPTION_KEY, "report"), (KEY, "provisioning")], "all"),
            (&[(DISRUPTION_KEY, "Report")], "disruption"),
            (&[(DISRUPTION_KEY, "")], "disruption"),
            (&[(DISRUPTION_KEY, "none")], "none"),
            (&[(DISRUPTION_KEY, "none"), (KEY, "disruption")], "disruption"),
            (&[(DISRUPTION_KEY, "report"), ("puase", "none")], "all"),
        ] {
            let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
            let pause = Pause::of(&data.iter().map(text).collect());
            assert_eq!(pause.label(), label, "{data:?}");
            assert!(pause.disruption || label == "none", "{data:?}");
        }
    }
}
