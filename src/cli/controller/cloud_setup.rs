//! The cloud that the arguments select.

use std::sync::Arc;

use anyhow::Context as _;
use stowage_cloud::catalog::SpotPricing;
use stowage_cloud::ec2;
use stowage_cloud::simulated::{SimulatedConfig, SimulatedEc2};

use crate::cli::controller::arguments::{CloudKind, ControllerArgs};
use crate::cli::planning::MinValues;

/// A cloud with parsed settings, not connected yet.
pub(crate) enum Prepared {
    Simulated(Arc<SimulatedEc2>),
    Ec2(Box<ec2::Options>),
}

pub(crate) fn cloud(args: &ControllerArgs) -> anyhow::Result<Prepared> {
    match args.cloud {
        CloudKind::Ec2 => {
            let strict_min_values = args.plan.min_values_policy == MinValues::Strict;
            let offering_metrics = args.offering_metrics;
            let options = ec2::Options { strict_min_values, offering_metrics, ..args.aws.options(&args.cluster_name)? };
            Ok(Prepared::Ec2(Box::new(options)))
        }
        CloudKind::Simulated => Ok(Prepared::Simulated(simulated(args)?)),
    }
}

fn simulated(args: &ControllerArgs) -> anyhow::Result<Arc<SimulatedEc2>> {
    let config = SimulatedConfig {
        seed: args.simulated_seed,
        spot: SpotPricing::Synthetic { seed: args.simulated_seed },
        boot_delay: args.simulated_boot_delay,
        interruption_notice: args.simulated_interruption_notice,
        state_file: args.simulated_state.clone(),
        node_class_cel: args.aws.node_class_cel(),
        ..SimulatedConfig::default()
    };
    Ok(Arc::new(SimulatedEc2::open(config).context("--simulated-state")?))
}
