//! AL2: a shell script that calls the EKS bootstrap script, after the user's parts. EKS images of Ubuntu use the same format.

use std::net::IpAddr;

use crate::ec2::bootstrap::user_data::flags::kubelet_flags;
use crate::ec2::bootstrap::user_data::input::{BootParameters, UserDataError};
use crate::ec2::bootstrap::user_data::mime;
use crate::ec2::bootstrap::user_data::mime::Part;

pub(crate) fn user_data(boot: &BootParameters<'_>) -> Result<String, UserDataError> {
    let mut parts = match boot.custom() {
        None => Vec::new(),
        Some(text) if mime::is_mime(text) => mime::parts(text)?,
        Some(text) => vec![Part::script(text)],
    };
    parts.push(Part::script(&script(boot)));
    Ok(mime::write(&parts))
}

fn script(boot: &BootParameters<'_>) -> String {
    let input = boot.input;
    // The script separates values from flags by a space.
    let mut call = vec![
        "/etc/eks/bootstrap.sh".to_owned(),
        quoted(input.cluster_name),
        "--apiserver-endpoint".to_owned(),
        quoted(input.endpoint),
    ];
    if let Some(bundle) = input.ca_bundle {
        call.extend(["--b64-cluster-ca".to_owned(), quoted(bundle)]);
    }
    let dns = boot.cluster_dns.first();
    let flags = [
        dns.filter(|address| is_ipv6(address)).map(|_| "--ip-family ipv6".to_owned()),
        dns.map(|address| format!("--dns-cluster-ip {}", quoted(address))),
        // The number is passed to the kubelet below.
        Some("--use-max-pods false".to_owned()),
        Some(format!("--kubelet-extra-args {}", quoted(&kubelet_flags(boot)))),
        input.local_disks.then(|| "--local-disks raid0".to_owned()),
    ];
    let lines: Vec<String> = [call.join(" ")].into_iter().chain(flags.into_iter().flatten()).collect();
    format!("#!/bin/bash -xe\nexec > >(tee /var/log/user-data.log >/dev/console) 2>&1\n{}\n", lines.join(" \\\n"))
}

fn is_ipv6(address: &str) -> bool {
    address.parse().is_ok_and(|address: IpAddr| address.to_canonical().is_ipv6())
}

/// A literal string for the shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
