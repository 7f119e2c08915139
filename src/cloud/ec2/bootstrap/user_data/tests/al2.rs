//! AL2: MIME whose last part calls the bootstrap script.

use serde_json::json;

use super::*;
use crate::ec2::bootstrap::user_data::tests::{
    SCRIPT, SHELL, all_settings, input, kubelet, made, mime_parts, our_script,
};

#[test]
fn c21_al2_user_data_merges_mime_script_and_empty() {
    let mime = "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"BOUNDARY\"\n\n--BOUNDARY\n\
                Content-Type: text/cloud-config; charset=\"us-ascii\"\nX-Mine: 1\n\npackages: [jq]\n\n--BOUNDARY\n\
                Content-Type: text/x-shellscript; charset=\"us-ascii\"\n\n#!/bin/sh\necho hi\n--BOUNDARY--";
    let type_first = mime.replacen(
        "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"BOUNDARY\"",
        "Content-Type: multipart/mixed; boundary=\"BOUNDARY\"\r\nMIME-Version: 1.0",
        1,
    );
    let script = our_script(&input());
    let own = (SHELL.to_owned(), script);
    let theirs = vec![
        ("text/cloud-config".to_owned(), "packages: [jq]\n".to_owned()),
        (SHELL.to_owned(), "#!/bin/sh\necho hi".to_owned()),
    ];
    for (custom, expected) in [
        (Some(mime), theirs.clone()),
        (Some(type_first.as_str()), theirs),
        (Some(SCRIPT), vec![(SHELL.to_owned(), SCRIPT.to_owned())]),
        (Some("#!/bin/sh\r\necho hi\r\n"), vec![(SHELL.to_owned(), "#!/bin/sh\necho hi\n".to_owned())]),
        (Some(" \n"), vec![]),
        (Some(""), vec![]),
        (None, vec![]),
    ] {
        let text = made(AmiFamily::Al2, &UserDataInput { custom, ..input() });
        let expected: Vec<_> = expected.into_iter().chain([own.clone()]).collect();
        assert_eq!(mime_parts(&text), expected, "{custom:?}");
        assert_eq!(
            text.contains("X-Mine: 1\n"),
            custom.is_some_and(|custom| custom.contains("X-Mine")),
            "headers are kept"
        );
    }
    let broken = UserDataInput { custom: Some("MIME-Version: 1.0\n\nhello"), ..input() };
    assert_eq!(
        user_data(AmiFamily::Al2, &broken),
        Err(UserDataError::Mime(crate::ec2::bootstrap::user_data::mime::MimeError::NotMultipart(String::new())))
    );
}

#[test]
fn c21_al2_calls_the_bootstrap_script_with_its_arguments_in_order() {
    insta::assert_snapshot!(our_script(&input()), @r#"
    #!/bin/bash -xe
    exec > >(tee /var/log/user-data.log >/dev/console) 2>&1
    /etc/eks/bootstrap.sh 'test-cluster' --apiserver-endpoint 'https://test-cluster' --b64-cluster-ca 'Y2EtYnVuZGxlCg==' \
    --dns-cluster-ip '10.0.100.10' \
    --use-max-pods false \
    --kubelet-extra-args '--node-labels="karpenter.k8s.aws/ec2nodeclass=main,karpenter.sh/capacity-type=on-demand,karpenter.sh/do-not-sync-taints=true,karpenter.sh/nodepool=default,team=shop" --register-with-taints="dedicated=gpu:NoSchedule,karpenter.sh/unregistered:NoExecute" --max-pods=110'
    "#);
    let kubelet = all_settings();
    let everything = UserDataInput { kubelet: Some(&kubelet), local_disks: true, ca_bundle: None, ..input() };
    insta::assert_snapshot!(our_script(&everything), @r#"
    #!/bin/bash -xe
    exec > >(tee /var/log/user-data.log >/dev/console) 2>&1
    /etc/eks/bootstrap.sh 'test-cluster' --apiserver-endpoint 'https://test-cluster' \
    --dns-cluster-ip '10.0.9.9' \
    --use-max-pods false \
    --kubelet-extra-args '--node-labels="karpenter.k8s.aws/ec2nodeclass=main,karpenter.sh/capacity-type=on-demand,karpenter.sh/do-not-sync-taints=true,karpenter.sh/nodepool=default,team=shop" --register-with-taints="dedicated=gpu:NoSchedule,karpenter.sh/unregistered:NoExecute" --max-pods=42 --pods-per-core=3 --system-reserved="cpu=100m,memory=200Mi" --kube-reserved="cpu=50m,ephemeral-storage=2Gi" --eviction-hard="memory.available<5%,nodefs.available<1Gi" --eviction-soft="memory.available<10%" --eviction-soft-grace-period="memory.available=1m0s" --eviction-max-pod-grace-period=30 --image-gc-high-threshold=80 --image-gc-low-threshold=60 --cpu-cfs-quota=false' \
    --local-disks raid0
    "#);
}

#[test]
fn c27_an_ipv6_dns_makes_al2_an_ipv6_node() {
    for (dns, listed, ipv6) in [
        (Some("fd30::a"), None, true),
        (Some("10.0.100.10"), None, false),
        (Some("10.0.100.10"), Some("fd30::b"), true),
        (Some("fd30::a"), Some("10.0.9.9"), false),
        (Some("::ffff:10.0.0.1"), None, false),
        (None, None, false),
    ] {
        let kubelet = listed.map(|address| kubelet(json!({"clusterDNS": [address]})));
        let cluster_dns = dns.map(|address| address.parse().unwrap());
        let script = our_script(&UserDataInput { kubelet: kubelet.as_ref(), cluster_dns, ..input() });
        assert_eq!(script.contains(" \\\n--ip-family ipv6 \\\n"), ipv6, "{dns:?} {listed:?}");
        let first = listed.or(dns).map(|address| format!("--dns-cluster-ip '{address}'"));
        assert_eq!(script.contains("--dns-cluster-ip"), first.is_some());
        assert!(first.is_none_or(|flag| script.contains(&flag)), "{script}");
    }
}
