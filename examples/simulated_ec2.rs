//! Simulated EC2 against the cluster of `KUBECONFIG`: launches instances, plays their kubelets, prints what happens.
//!
//! `cargo run --example simulated_ec2 -- COUNT [STATE_FILE [SCRIPT]]`; ends with Ctrl-C. Tokens are numbered, so with a state file a second run
//! gets the same instances back. While it runs, try `kubectl annotate node NAME simulated.stowage.dev/event=spot-interruption`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use stowage::cloud::simulated::{BootDelay, Script, SimulatedConfig, SimulatedEc2};
use stowage::cloud::{Cloud, LaunchRequest, Override};
use stowage::scheduling::offering::CapacityType;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_env_filter("warn,stowage=info").init();
    let mut arguments = std::env::args().skip(1);
    let count: usize = arguments.next().context("say how many instances")?.parse().context("COUNT is no number")?;
    let state_file = arguments.next().map(PathBuf::from);
    let script = match arguments.next() {
        Some(file) => Script::parse(&std::fs::read_to_string(&file).with_context(|| file.clone())?)?,
        None => Script::default(),
    };
    let config = SimulatedConfig {
        state_file,
        script,
        boot_delay: BootDelay::Between(Duration::from_secs(2), Duration::from_secs(4)),
        interruption_notice: Duration::from_secs(10),
        ..SimulatedConfig::default()
    };
    let ec2 = Arc::new(SimulatedEc2::open(config)?);
    let client = kube::Client::try_default().await?;
    let kubelets = tokio::spawn(Arc::clone(&ec2).run(client, async {
        let _ = tokio::signal::ctrl_c().await;
    }));
    for number in 0..count {
        let offering = |zone: &str, capacity_type| Override {
            instance_type: ["m7g.large", "g5.xlarge", "c7i.2xlarge"][number % 3].to_owned(),
            zone: zone.to_owned(),
            capacity_type,
        };
        let request = LaunchRequest {
            client_token: format!("example-{number}"),
            node_claim: format!("example-{number}"),
            node_pool: "example".to_owned(),
            node_class: "example".to_owned(),
            overrides: vec![
                offering("us-east-1a", CapacityType::Spot),
                offering("us-east-1b", CapacityType::Spot),
                offering("us-east-1a", CapacityType::OnDemand),
            ],
            labels: [("karpenter.sh/nodepool".to_owned(), "example".to_owned())].into(),
            taints: Vec::new(),
        };
        match ec2.launch(request).await {
            Ok(launched) => println!("launched {:?}, unavailable {:?}", launched.instance, launched.unavailable),
            Err(error) => println!("example-{number}: {error}"),
        }
    }
    while !kubelets.is_finished() {
        for message in ec2.receive_messages().await? {
            println!("{message:?}");
            ec2.delete_message(&message.receipt).await?;
        }
    }
    for instance in ec2.list().await? {
        println!("still there: {instance:?}");
    }
    Ok(())
}
