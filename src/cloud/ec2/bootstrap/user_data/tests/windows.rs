//! Windows: a PowerShell block.

use serde_json::json;

use super::*;
use crate::ec2::bootstrap::user_data::tests::{input, kubelet, made};

#[test]
fn c24_windows_arguments_are_in_order_after_the_users_lines() {
    let kubelet = kubelet(json!({"podsPerCore": 2, "kubeReserved": {"cpu": "50m"}}));
    let full = UserDataInput {
        kubelet: Some(&kubelet),
        custom: Some("Write-Host \"mine\""),
        capacity_type: CapacityType::Spot,
        local_disks: true,
        ..input()
    };
    for family in [AmiFamily::Windows2019, AmiFamily::Windows2022, AmiFamily::Windows2025] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(made(family, &full), @r#"
            <powershell>
            Write-Host "mine"
            $bootstrap = "$env:ProgramFiles\Amazon\EKS\Start-EKSBootstrap.ps1"
            & $bootstrap -EKSClusterName 'test-cluster' -APIServerEndpoint 'https://test-cluster' -Base64ClusterCA 'Y2EtYnVuZGxlCg==' -KubeletExtraArgs '--node-labels="karpenter.k8s.aws/ec2nodeclass=main,karpenter.sh/capacity-type=spot,karpenter.sh/do-not-sync-taints=true,karpenter.sh/nodepool=default,team=shop" --register-with-taints="dedicated=gpu:NoSchedule,karpenter.sh/unregistered:NoExecute" --max-pods=110 --pods-per-core=2 --kube-reserved="cpu=50m"' -DNSClusterIP '10.0.100.10'
            </powershell>
            "#);
        }
    }
    let bare = made(AmiFamily::Windows2022, &UserDataInput { ca_bundle: None, cluster_dns: None, ..input() });
    assert!(
        !bare.contains("-Base64ClusterCA") && !bare.contains("-DNSClusterIP") && !bare.contains("-ServiceCIDR"),
        "{bare}"
    );
    assert_eq!(bare.lines().count(), 4);
}
