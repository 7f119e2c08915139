//! Planner settings, shared by `stowage controller` and `stowage simulate`.

use std::collections::BTreeMap;

use clap::{ArgAction, Args, ValueEnum};
use stowage_model::units::MicroUsd;
use stowage_planner::{DefaultSpread, MinValuesPolicy, NodeSizes, PlanSettings, PreferencePolicy};

use crate::cli::args::parse_bool;

/// `--preference-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preferences {
    /// Preferences are satisfied where possible
    #[value(name = "Respect")]
    Respect,
    /// Preferences are ignored by the planner and left to kube-scheduler
    #[value(name = "Ignore")]
    Ignore,
}

/// `--min-values-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MinValues {
    /// minValues must be satisfied
    #[value(name = "Strict")]
    Strict,
    /// minValues are lowered to what is available
    #[value(name = "BestEffort")]
    BestEffort,
}

/// Planner settings.
#[derive(Args, Clone, Debug)]
pub struct PlanArgs {
    /// Whether the planner respects preferred affinity and ScheduleAnyway constraints.
    #[arg(long, env = "PREFERENCE_POLICY", value_enum, default_value = "Respect")]
    pub preference_policy: Preferences,
    /// What happens when a NodePool's minValues cannot be satisfied.
    #[arg(long, env = "MIN_VALUES_POLICY", value_enum, default_value = "Strict")]
    pub min_values_policy: MinValues,
    /// The cluster's default topology spread: `{podTopologySpread: {defaultConstraints: [{maxSkew: 1, topologyKey: KEY,
    /// whenUnsatisfiable: ScheduleAnyway}]}}`, as in kube-scheduler's configuration.
    #[arg(long, env = "SCHEDULER_CONFIG", value_name = "YAML", default_value = "", hide_default_value = true, value_parser = DefaultSpread::parse)]
    pub scheduler_config: DefaultSpread,
    /// Range of vCPUs per node, such as `4-64`, `4-` or `-64`.
    #[arg(long, env = "STOWAGE_NODE_VCPUS", value_name = "RANGE", default_value = "-", hide_default_value = true, allow_hyphen_values = true, value_parser = parse_sizes)]
    pub node_vcpus: NodeSizes,
    /// Fixed cost per node in USD/h added to the objective; higher values favor fewer, larger nodes.
    #[arg(long, env = "STOWAGE_NODE_PENALTY", value_name = "USD", default_value = "0", value_parser = parse_usd)]
    pub node_penalty: MicroUsd,
    /// Value of an instance family in percent when plans are compared, such as `m7g=115,m5=90`; 100 for families not listed.
    #[arg(long, env = "STOWAGE_FAMILY_WEIGHTS", value_name = "FAMILY=PERCENT,…", default_value = "", hide_default_value = true, value_parser = parse_weights)]
    pub family_weights: FamilyWeights,
    /// Purchase spot or reserved capacity wherever it is allowed and available, even where on-demand is cheaper.
    #[arg(long, env = "STOWAGE_PREFER_SPOT", default_value_t = false, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub prefer_spot: bool,
    /// Maximum number of pods of one controller (a Deployment's revision, a StatefulSet, a Job) per node; 0 means no limit.
    #[arg(long, env = "STOWAGE_MAX_WORKLOAD_PODS_PER_NODE", value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(i32).range(0..))]
    pub max_workload_pods_per_node: i32,
}

/// Percent by instance family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FamilyWeights(BTreeMap<String, i64>);

impl PlanArgs {
    /// The settings of the planner.
    pub fn settings(&self) -> PlanSettings {
        PlanSettings {
            preference_policy: match self.preference_policy {
                Preferences::Respect => PreferencePolicy::Respect,
                Preferences::Ignore => PreferencePolicy::Ignore,
            },
            prove: false,
            min_values_policy: match self.min_values_policy {
                MinValues::Strict => MinValuesPolicy::Strict,
                MinValues::BestEffort => MinValuesPolicy::BestEffort,
            },
            node_sizes: self.node_vcpus,
            node_penalty: self.node_penalty,
            family_weights: self.family_weights.0.clone(),
            prefer_spot: self.prefer_spot,
            workload_pods_per_node: (self.max_workload_pods_per_node > 0).then_some(self.max_workload_pods_per_node),
        }
    }
}

fn parse_sizes(text: &str) -> Result<NodeSizes, String> {
    let expected = "expected a range of vCPUs such as 4-64, 4- or -64";
    if text.trim().is_empty() {
        return Ok(NodeSizes::default());
    }
    let (least, most) = text.split_once('-').ok_or(expected)?;
    let bound = |text: &str| match text.trim() {
        "" => Ok(None),
        number => number.parse::<i64>().ok().filter(|n| *n > 0).map(Some).ok_or(expected),
    };
    let sizes = NodeSizes { least_vcpus: bound(least)?, most_vcpus: bound(most)? };
    if let (Some(least), Some(most)) = (sizes.least_vcpus, sizes.most_vcpus)
        && least > most
    {
        return Err(format!("the first of {text} must not be larger than the second"));
    }
    Ok(sizes)
}

fn parse_usd(text: &str) -> Result<MicroUsd, String> {
    let expected = "expected USD per hour from 0 to 1000 with at most six decimals";
    if text.trim().is_empty() {
        return Ok(MicroUsd(0));
    }
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || whole.len() > 4 || decimals.len() > 6 || !digits(whole) || !digits(decimals) {
        return Err(expected.to_owned());
    }
    let micro = format!("{whole}{decimals:0<6}").parse::<i64>().map_err(|_| expected.to_owned())?;
    if micro > 1_000_000_000 { Err(expected.to_owned()) } else { Ok(MicroUsd(micro)) }
}

fn parse_weights(text: &str) -> Result<FamilyWeights, String> {
    let mut weights = BTreeMap::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let wanted = || format!("{part:?} is not FAMILY=PERCENT with a percentage from 1 to 1000, as m7g=115");
        let (family, percent) = part.split_once('=').ok_or_else(wanted)?;
        let percent = percent.trim().parse::<i64>().ok().filter(|n| (1..=1000).contains(n)).ok_or_else(wanted)?;
        if family.trim().is_empty() {
            return Err(wanted());
        }
        if weights.insert(family.trim().to_owned(), percent).is_some() {
            return Err(format!("family {} is there twice", family.trim()));
        }
    }
    Ok(FamilyWeights(weights))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        plan: PlanArgs,
    }

    fn settings(args: &[&str]) -> Result<PlanSettings, String> {
        let all = ["x"].iter().chain(args);
        Command::try_parse_from(all).map(|command| command.plan.settings()).map_err(|error| error.to_string())
    }

    #[test]
    fn planner_settings_are_parsed() {
        assert_eq!(settings(&[]).unwrap(), PlanSettings::default());
        let read = settings(&[
            "--node-vcpus",
            "4-64",
            "--node-penalty",
            "0.0125",
            "--family-weights",
            "m7g=115, m5=90",
            "--prefer-spot",
            "true",
            "--max-workload-pods-per-node",
            "3",
        ])
        .unwrap();
        assert_eq!(read.node_sizes, NodeSizes { least_vcpus: Some(4), most_vcpus: Some(64) });
        assert_eq!(read.node_penalty, MicroUsd(12_500));
        assert_eq!(read.family_weights, [("m7g".to_owned(), 115), ("m5".to_owned(), 90)].into());
        assert!(read.prefer_spot);
        assert_eq!(read.workload_pods_per_node, Some(3));
        assert_eq!(settings(&["--node-vcpus=-8"]).unwrap().node_sizes.most_vcpus, Some(8));
    }

    #[test]
    fn an_invalid_setting_is_an_error_with_its_name_and_the_expected_syntax() {
        for (name, value, wanted) in [
            ("--node-vcpus", "8", "4-64"),
            ("--node-vcpus", "64-4", "must not be larger"),
            ("--node-vcpus", "0-4", "4-64"),
            ("--node-penalty", "-1", "from 0 to 1000"),
            ("--node-penalty", "1e3", "from 0 to 1000"),
            ("--node-penalty", "1000.1", "from 0 to 1000"),
            ("--family-weights", "m7g", "m7g=115"),
            ("--family-weights", "m7g=0", "from 1 to 1000"),
            ("--family-weights", "m5=1,m5=2", "m5 is there twice"),
            ("--prefer-spot", "yes", "true, false"),
            ("--max-workload-pods-per-node", "-1", "--max-workload-pods-per-node"),
            ("--scheduler-config", "profiles: []", "podTopologySpread.defaultConstraints"),
        ] {
            let error = settings(&[&format!("{name}={value}")]).unwrap_err();
            for part in [name, value, wanted] {
                assert!(error.contains(part), "{part} is not in: {error}");
            }
        }
    }
}
