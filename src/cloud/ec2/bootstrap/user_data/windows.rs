//! Windows: a PowerShell block that calls the EKS bootstrap script, after the user's lines. Local disks are not configured.

use crate::ec2::bootstrap::user_data::flags::kubelet_flags;
use crate::ec2::bootstrap::user_data::input::BootParameters;

pub(crate) fn user_data(boot: &BootParameters<'_>) -> String {
    let input = boot.input;
    let flags = kubelet_flags(boot);
    let arguments = [
        ("EKSClusterName", Some(input.cluster_name)),
        ("APIServerEndpoint", Some(input.endpoint)),
        ("Base64ClusterCA", input.ca_bundle),
        ("KubeletExtraArgs", Some(flags.as_str())),
        ("DNSClusterIP", boot.cluster_dns.first().map(String::as_str)),
    ];
    let call: Vec<String> = arguments
        .into_iter()
        .filter_map(|(name, value)| value.map(|value| format!(" -{name} {}", quoted(value))))
        .collect();
    let mut lines = vec!["<powershell>"];
    lines.extend(boot.custom());
    lines.push(r#"$bootstrap = "$env:ProgramFiles\Amazon\EKS\Start-EKSBootstrap.ps1""#);
    let call = format!("& $bootstrap{}", call.concat());
    lines.extend([call.as_str(), "</powershell>"]);
    lines.join("\n")
}

/// A literal string for PowerShell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
