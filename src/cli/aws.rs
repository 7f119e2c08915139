//! Settings of `--cloud ec2`, with the flags, variables and defaults of Karpenter's AWS provider.

use std::time::Duration;

use anyhow::bail;
use clap::{ArgAction, Args};
use stowage_cloud::ec2::Options;

use crate::cli::args::{parse_bool, parse_duration};

/// Settings of `--cloud ec2`.
#[derive(Args, Clone, Debug)]
pub struct AwsArgs {
    /// EC2: URL of the API server that instances join [default: from EKS].
    #[arg(long, env = "CLUSTER_ENDPOINT", default_value = "", hide_default_value = true, value_parser = parse_endpoint)]
    pub cluster_endpoint: String,
    /// EC2: CA bundle of the API server, base64 [default: the CA that this process uses].
    #[arg(long, env = "CLUSTER_CA_BUNDLE", default_value = "", hide_default_value = true)]
    pub cluster_ca_bundle: String,
    /// EC2: service CIDR of the cluster, such as 10.100.0.0/16 [default: from EKS or the API server].
    #[arg(long, env = "STOWAGE_SERVICE_CIDR", default_value = "", hide_default_value = true)]
    pub service_cidr: String,
    /// EC2: the VPC has no route to the IAM and Pricing APIs; do not call them.
    #[arg(long, env = "ISOLATED_VPC", default_value_t = false, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub isolated_vpc: bool,
    /// EC2: read the cluster version from the EKS API.
    #[arg(long, env = "EKS_CONTROL_PLANE", default_value_t = false, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub eks_control_plane: bool,
    /// EC2: share of an instance's memory that the hypervisor and the operating system reserve, 0 to 1.
    #[arg(long, env = "VM_MEMORY_OVERHEAD_PERCENT", default_value = "0.075", value_parser = parse_share)]
    pub vm_memory_overhead_percent: Share,
    /// EC2: name of the SQS interruption queue [default: none].
    #[arg(long, env = "INTERRUPTION_QUEUE", default_value = "", hide_default_value = true)]
    pub interruption_queue: String,
    /// EC2: number of ENIs reserved for other uses; subtracted when computing max pods.
    #[arg(long, env = "RESERVED_ENIS", default_value_t = 0, value_parser = clap::value_parser!(i64).range(0..))]
    pub reserved_enis: i64,
    /// EC2: skip dry-run validation of EC2NodeClasses.
    #[arg(long, env = "DISABLE_DRY_RUN", default_value_t = false, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub disable_dry_run: bool,
    /// EC2: respect ARC zonal shift: no launches in shifted zones, no calls for instances there.
    #[arg(long, env = "ENABLE_ZONAL_SHIFT", default_value_t = false, num_args = 0..=1, default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub enable_zonal_shift: bool,
    /// EC2: spot placement score, 1 to 10, below which an offering is penalized; 1 disables the penalty.
    #[arg(long, env = "STOWAGE_SPOT_PLACEMENT_SCORE_THRESHOLD", default_value_t = 7, value_parser = clap::value_parser!(u8).range(1..=10))]
    pub spot_placement_score_threshold: u8,
    /// EC2: maximum age of the resolved AMIs, at least 1m.
    #[arg(long, env = "AMI_REFRESH_INTERVAL", default_value = "1m", value_parser = parse_interval)]
    pub ami_refresh_interval: Duration,
    /// EC2: maximum age of the resolved subnets, at least 1m.
    #[arg(long, env = "SUBNET_REFRESH_INTERVAL", default_value = "1m", value_parser = parse_interval)]
    pub subnet_refresh_interval: Duration,
    /// EC2: feature gates of the AWS provider, such as NodeClassCEL=true (CEL expressions in kubelet configurations); unknown gates are ignored.
    #[arg(long, env = "AWS_FEATURE_GATES", default_value = "NodeClassCEL=false")]
    pub aws_feature_gates: String,
    /// Feature gates of Karpenter core: NodeRepair, ReservedCapacity (EC2), SpotToSpotConsolidation (off by default) and StaticCapacity; those of features that Stowage does not have can't be enabled.
    #[arg(long, env = "FEATURE_GATES", default_value = "NodeRepair=true,ReservedCapacity=true,SpotToSpotConsolidation=false,StaticCapacity=true", value_parser = parse_core_gates)]
    pub feature_gates: String,
}

/// A fraction in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(pub i64);

impl AwsArgs {
    /// The EC2 options for a cluster.
    ///
    /// # Errors
    /// The cluster name is empty.
    pub fn options(&self, cluster_name: &str) -> anyhow::Result<Options> {
        if cluster_name.is_empty() {
            bail!("--cloud ec2 needs the name of the cluster: set --cluster-name or CLUSTER_NAME");
        }
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Ok(Options {
            cluster_endpoint: some(&self.cluster_endpoint),
            cluster_ca_bundle: some(&self.cluster_ca_bundle),
            service_cidr: some(&self.service_cidr),
            eks_control_plane: self.eks_control_plane,
            isolated_vpc: self.isolated_vpc,
            interruption_queue: some(&self.interruption_queue),
            dry_run: !self.disable_dry_run,
            refresh: self.ami_refresh_interval.min(self.subnet_refresh_interval),
            reserved_enis: self.reserved_enis,
            vm_memory_overhead_ppm: self.vm_memory_overhead_percent.0,
            reserved_capacity: gate(&self.feature_gates, "ReservedCapacity").unwrap_or(true),
            spot_score_threshold: self.spot_placement_score_threshold,
            zonal_shift: self.enable_zonal_shift,
            node_class_cel: self.node_class_cel(),
            ..Options::of(cluster_name)
        })
    }

    /// The feature gate NodeRepair: unhealthy nodes are removed, on by default.
    pub fn node_repair(&self) -> bool {
        gate(&self.feature_gates, "NodeRepair").unwrap_or(true)
    }

    /// The feature gate StaticCapacity: NodePools with `spec.replicas`, on by default.
    pub fn static_capacity(&self) -> bool {
        gate(&self.feature_gates, "StaticCapacity").unwrap_or(true)
    }

    /// The feature gate SpotToSpotConsolidation: spot nodes are replaced with cheaper spot nodes, off by default.
    pub fn spot_to_spot(&self) -> bool {
        gate(&self.feature_gates, "SpotToSpotConsolidation").unwrap_or(false)
    }

    /// Gates of Karpenter core in the list that Stowage does not know. They have no effect.
    pub fn unknown_gates(&self) -> Vec<&str> {
        let known = |name: &&str| GATES.contains(name) || MISSING_GATES.contains(name);
        entries(&self.feature_gates).map(gate_name).filter(|name| !known(name)).collect()
    }

    /// The feature gate NodeClassCEL: CEL expressions in kubelet configurations, off by default.
    pub fn node_class_cel(&self) -> bool {
        gate(&self.aws_feature_gates, "NodeClassCEL").unwrap_or(false)
    }
}

/// Gates of Karpenter core.
const GATES: [&str; 4] = ["NodeRepair", "ReservedCapacity", "SpotToSpotConsolidation", "StaticCapacity"];
/// Gates of Karpenter core whose features Stowage does not have.
const MISSING_GATES: [&str; 2] = ["CapacityBuffer", "NodeOverlay"];

/// A list of gates of Karpenter core, each of which Stowage can obey.
fn parse_core_gates(list: &str) -> Result<String, String> {
    for entry in entries(list) {
        let name = gate_name(entry);
        let value = entry.split_once('=').and_then(|(_, word)| parse_bool(word.trim()).ok());
        let value = value.ok_or_else(|| format!("expected NAME=true or NAME=false instead of '{entry}'"))?;
        if value && MISSING_GATES.contains(&name) {
            return Err(format!(
                "this version does not have the feature of the gate {name}: remove it, or set it to false"
            ));
        }
    }
    Ok(list.to_owned())
}

/// The entries of a list of gates that are not empty.
fn entries(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|entry| !entry.is_empty())
}

fn gate_name(entry: &str) -> &str {
    entry.split_once('=').map_or(entry, |(name, _)| name.trim())
}

/// The value of a gate in a list such as `One=true,Other=false`; the last entry wins. `None` if the gate is not in the list.
pub fn gate(list: &str, name: &str) -> Option<bool> {
    let word = |entry: &str| {
        let (_, word) = entry.split_once('=').filter(|(key, _)| key.trim() == name)?;
        parse_bool(word.trim()).ok()
    };
    list.rsplit(',').find_map(word)
}

/// An absolute URL with a host, or an empty string.
fn parse_endpoint(text: &str) -> Result<String, String> {
    let host = text.split_once("://").map(|(scheme, rest)| {
        let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
        !scheme.is_empty() && !host.is_empty() && !host.starts_with(':')
    });
    if text.is_empty() || host == Some(true) {
        return Ok(text.to_owned());
    }
    Err("expected an absolute URL with a host, as https://api.example.com".into())
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    if interval < Duration::from_mins(1) {
        return Err("expected 1m or more".into());
    }
    Ok(interval)
}

fn parse_share(text: &str) -> Result<Share, String> {
    let share: f64 = text.parse().map_err(|_| "expected a number from 0 to 1, as 0.075".to_owned())?;
    if !(0.0..=1.0).contains(&share) {
        return Err("expected a number from 0 to 1, as 0.075".into());
    }
    // In range by the test above, and rounded, so the cast loses nothing.
    #[allow(clippy::cast_possible_truncation)]
    let millionths = (share * 1e6).round() as i64;
    Ok(Share(millionths))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        aws: AwsArgs,
    }

    fn parse(args: &[&str]) -> Result<AwsArgs, String> {
        let all = ["stowage"].iter().chain(args);
        Line::try_parse_from(all).map(|line| line.aws).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_karpenters() {
        let options = parse(&[]).unwrap().options("c1").unwrap();
        assert_eq!((options.vm_memory_overhead_ppm, options.reserved_enis, options.dry_run), (75_000, 0, true));
        assert_eq!((options.cluster_endpoint, options.interruption_queue), (None, None));
        assert_eq!(options.refresh, Duration::from_mins(1));
        assert!(options.reserved_capacity && !options.zonal_shift);
        assert_eq!(options.spot_score_threshold, 7);
        let eager = parse(&["--spot-placement-score-threshold", "9"]).unwrap().options("c1").unwrap();
        assert_eq!(eager.spot_score_threshold, 9);
        assert!(parse(&["--enable-zonal-shift", "true"]).unwrap().options("c1").unwrap().zonal_shift);
        let shut =
            parse(&["--feature-gates", "NodeRepair=true,ReservedCapacity=false"]).unwrap().options("c1").unwrap();
        assert!(!shut.reserved_capacity);
        assert!(parse(&["--feature-gates", "NodeRepair=true"]).unwrap().static_capacity());
        assert!(parse(&[]).unwrap().node_repair() && !parse(&[]).unwrap().spot_to_spot());
        assert!(parse(&["--feature-gates", "SpotToSpotConsolidation=true"]).unwrap().spot_to_spot());
        let off = parse(&["--feature-gates", "StaticCapacity=false,NodeRepair=false"]).unwrap();
        assert!(!off.static_capacity() && !off.node_repair());
    }

    #[test]
    fn booleans_are_parsed_as_in_karpenter() {
        for (args, expected) in [
            (&[][..], false),
            (&["--isolated-vpc"], true),
            (&["--isolated-vpc", "--eks-control-plane"], true),
            (&["--isolated-vpc", "1"], true),
            (&["--isolated-vpc", "t"], true),
            (&["--isolated-vpc", "TRUE"], true),
            (&["--isolated-vpc=True"], true),
            (&["--isolated-vpc", "0"], false),
            (&["--isolated-vpc", "F"], false),
            (&["--isolated-vpc=false"], false),
        ] {
            assert_eq!(parse(args).unwrap().isolated_vpc, expected, "{args:?}");
        }
        parse(&["--isolated-vpc", "tRuE"]).unwrap_err();
    }

    #[test]
    fn c34_expressions_are_off_unless_the_gate_enables_them() {
        for (list, expected) in [
            ("", false),
            ("NodeClassCEL=false", false),
            ("NodeClassCEL=true", true),
            ("Other=true, NodeClassCEL = True", true),
            ("NodeClassCEL=true,NodeClassCEL=false", false),
            ("NodeClassCEL=false,NodeClassCEL=true,Other=false", true),
            ("NodeClassCEL", false),
            ("NodeClassCEL=maybe", false),
            ("nodeclasscel=true", false),
            ("Unheard=true", false),
        ] {
            let options = parse(&["--aws-feature-gates", list]).unwrap().options("c1").unwrap();
            assert_eq!(options.node_class_cel, expected, "{list}");
        }
        assert!(!parse(&[]).unwrap().options("c1").unwrap().node_class_cel);
    }

    /// Before, every gate but one was ignored.
    #[test]
    fn f21_gates_of_missing_features_are_refused_and_unknown_ones_are_listed() {
        for (list, refused) in [
            ("", None),
            ("NodeRepair=true,StaticCapacity=false,,", None),
            ("NodeOverlay=false, SpotToSpotConsolidation = false,CapacityBuffer=false", None),
            ("NodeRepair=true, SpotToSpotConsolidation = true", None),
            ("NodeRepair=true, CapacityBuffer = true", Some("CapacityBuffer")),
            ("NodeOverlay=true,NodeOverlay=false", Some("NodeOverlay")),
            ("CapacityBuffer=1", Some("CapacityBuffer")),
            ("NodeRepair=perhaps", Some("'NodeRepair=perhaps'")),
            ("NodeRepair", Some("'NodeRepair'")),
        ] {
            match (parse(&["--feature-gates", list]), refused) {
                (Ok(_), None) => {}
                (Err(error), Some(what)) => assert!(error.contains(what), "{list}: {error}"),
                (found, _) => panic!("{list}: {}", found.is_ok()),
            }
        }
        let unknown = |list: &str| parse(&["--feature-gates", list]).unwrap().unknown_gates().join(" ");
        assert_eq!(unknown("Drift=true, NodeRepair=true,NodeOverlay=false,nodeRepair=false"), "Drift nodeRepair");
        assert_eq!(parse(&[]).unwrap().unknown_gates(), [""; 0]);
    }

    #[test]
    fn missing_and_invalid_settings_are_named() {
        let error = parse(&[]).unwrap().options("").unwrap_err().to_string();
        assert!(error.contains("CLUSTER_NAME"), "{error}");
        for (args, wanted) in [
            (["--cluster-endpoint", "api.example.com"], "absolute URL"),
            (["--cluster-endpoint", "https://"], "absolute URL"),
            (["--ami-refresh-interval", "30s"], "1m or more"),
            (["--vm-memory-overhead-percent", "7.5"], "from 0 to 1"),
            (["--reserved-enis", "many"], "reserved-enis"),
            (["--spot-placement-score-threshold", "11"], "10"),
            (["--isolated-vpc", "yes"], "true, false, 1, 0"),
        ] {
            let error = parse(&args).unwrap_err();
            assert!(error.contains(wanted), "{wanted} is not in: {error}");
        }
    }
}
