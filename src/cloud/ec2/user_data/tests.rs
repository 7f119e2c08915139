//! The conformance cases of user data, read back by each format's own parser: a mail parser for MIME, YAML for
//! NodeConfigs, TOML for Bottlerocket's settings.

use std::sync::LazyLock;

use mail_parser::{MessageParser, MimeHeaders};
use serde_json::{Value, json};

use super::*;

const SCRIPT: &str = "#!/bin/bash\necho \"a: b\"";
const SHELL: &str = "text/x-shellscript";
const NODE_CONFIG: &str = "application/node.eks.aws";

static LABELS: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    [
        ("team", "shop"),
        ("karpenter.sh/nodepool", "default"),
        ("karpenter.k8s.aws/ec2nodeclass", "main"),
        ("topology.kubernetes.io/zone", "us-east-1a"),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into()
});

fn taint(key: &str, value: &str, effect: &str) -> Taint {
    let value = (!value.is_empty()).then(|| value.to_owned());
    Taint { key: key.to_owned(), value, effect: effect.to_owned(), ..Taint::default() }
}

static TAINTS: LazyLock<Vec<Taint>> = LazyLock::new(|| vec![taint("dedicated", "gpu", "NoSchedule")]);

/// The inputs of the reference's goldens, with a few labels and a taint.
fn input() -> UserDataInput<'static> {
    UserDataInput {
        cluster_name: "test-cluster",
        endpoint: "https://test-cluster",
        ca_bundle: Some("Y2EtYnVuZGxlCg=="),
        service_cidr: Some("10.100.0.0/16"),
        cluster_dns: Some("10.0.100.10".parse().unwrap()),
        kubelet: None,
        max_pods: 110,
        labels: &LABELS,
        taints: &TAINTS,
        capacity_type: CapacityType::OnDemand,
        local_disks: false,
        custom: None,
        image_version: None,
    }
}

fn kubelet(value: Value) -> KubeletMap {
    serde_json::from_value(value).unwrap()
}

/// Type and body of each part, as a mail parser reads them.
fn mime_parts(text: &str) -> Vec<(String, String)> {
    assert!(!text.contains('\r'), "{text}");
    assert!(text.starts_with("MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"//\"\n"), "{text}");
    let message = MessageParser::default().parse(text.as_bytes()).unwrap();
    let part = |part: &mail_parser::MessagePart<'_>| {
        let kind = part.content_type().unwrap();
        let name = format!("{}/{}", kind.c_type, kind.c_subtype.as_deref().unwrap_or_default());
        (name, String::from_utf8(part.contents().to_vec()).unwrap())
    };
    // The first is the whole.
    message.parts[1..].iter().map(part).collect()
}

fn made(family: AmiFamily, input: &UserDataInput<'_>) -> String {
    user_data(family, input).unwrap()
}

/// The part that is ours: the last.
fn our_script(input: &UserDataInput<'_>) -> String {
    let (kind, body) = mime_parts(&made(AmiFamily::Al2, input)).pop().unwrap();
    assert_eq!(kind, SHELL);
    body
}

fn our_node_config(input: &UserDataInput<'_>) -> Value {
    let (kind, body) = mime_parts(&made(AmiFamily::Al2023, input)).pop().unwrap();
    assert_eq!(kind, NODE_CONFIG);
    serde_saphyr::from_str(&body).unwrap()
}

/// Bottlerocket's settings as JSON.
fn settings(input: &UserDataInput<'_>) -> Value {
    let document: toml::Table = made(AmiFamily::Bottlerocket, input).parse().unwrap();
    serde_json::to_value(&document["settings"]).unwrap()
}

/// Every interpreted member of a kubelet configuration.
fn all_settings() -> KubeletMap {
    kubelet(json!({
        "maxPods": 42, "podsPerCore": 3, "clusterDNS": ["10.0.9.9"],
        "systemReserved": {"memory": "200Mi", "cpu": "100m"},
        "kubeReserved": {"cpu": "50m", "ephemeral-storage": "2Gi"},
        "evictionHard": {"memory.available": "5%", "nodefs.available": "1Gi"},
        "evictionSoft": {"memory.available": "10%"},
        "evictionSoftGracePeriod": {"memory.available": "1m"},
        "evictionMaxPodGracePeriod": 30, "imageGCHighThresholdPercent": 80, "imageGCLowThresholdPercent": 60,
        "cpuCFSQuota": false,
    }))
}

const OUR_LABELS: &str = "karpenter.k8s.aws/ec2nodeclass=main,karpenter.sh/capacity-type=on-demand,\
                          karpenter.sh/do-not-sync-taints=true,karpenter.sh/nodepool=default,team=shop";

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
    assert_eq!(user_data(AmiFamily::Al2, &broken), Err(UserDataError::Mime(MimeError::NotMultipart(String::new()))));
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
fn c21_a_quote_in_a_word_stays_in_the_word() {
    let script = our_script(&UserDataInput { cluster_name: "it's; reboot", ..input() });
    assert!(script.contains(r"/etc/eks/bootstrap.sh 'it'\''s; reboot' --apiserver-endpoint"), "{script}");
    let text = made(AmiFamily::Windows2022, &UserDataInput { cluster_name: "it's; reboot", ..input() });
    assert!(text.contains("-EKSClusterName 'it''s; reboot' -APIServerEndpoint"), "{text}");
}

#[test]
fn c22_al2023_user_data_merges_shell_yaml_mime_and_empty() {
    let yaml =
        "apiVersion: node.eks.aws/v1alpha1\nkind: NodeConfig\nspec:\n  kubelet:\n    config:\n      maxPods: 42\n";
    // As in the reference's golden, the last boundary need not say that it is the last.
    let mime = format!(
        "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"//\"\n\n--//\nContent-Type: {NODE_CONFIG}\nX-Mine: 1\n\n{yaml}--//\n\
         Content-Type: text/x-shellscript; charset=\"us-ascii\"\n\n{SCRIPT}\n--//\n"
    );
    let our_text = mime_parts(&made(AmiFamily::Al2023, &input())).pop().unwrap();
    let part = |kind: &str, body: &str| (kind.to_owned(), body.to_owned());
    for (custom, expected) in [
        (Some(SCRIPT), vec![part(SHELL, SCRIPT)]),
        (Some("echo hi\n"), vec![part(SHELL, "echo hi\n")]),
        (Some(yaml), vec![part(NODE_CONFIG, yaml)]),
        (Some(mime.as_str()), vec![part(NODE_CONFIG, yaml.trim_end()), part(SHELL, SCRIPT)]),
        (Some("\n"), vec![]),
        (None, vec![]),
    ] {
        let text = made(AmiFamily::Al2023, &UserDataInput { custom, ..input() });
        let expected: Vec<_> = expected.into_iter().chain([our_text.clone()]).collect();
        assert_eq!(mime_parts(&text), expected, "{custom:?}");
        assert!(!text.contains("X-Mine"), "only the type of a part is kept");
        assert!(text.ends_with("\n\n--//--\n"), "{text}");
    }
    let encoded = "Content-Type: multipart/mixed; boundary=b\n\n--b\nContent-Type: text/x-shellscript\n\
                   content-transfer-encoding: base64\n\nIyEvYmluL3NoCg==\n--b--\n";
    let text = made(AmiFamily::Al2023, &UserDataInput { custom: Some(encoded), ..input() });
    assert_eq!(mime_parts(&text)[0], part(SHELL, "#!/bin/sh\n"), "an encoded part can still be decoded");
}

#[test]
fn c22_al2023_node_config_says_all_that_the_node_needs() {
    let raw = mime_parts(&made(AmiFamily::Al2023, &input())).pop().unwrap().1;
    assert!(
        raw.starts_with("# NodeConfig made by Stowage\n") && raw.ends_with('\n') && !raw.ends_with("\n\n"),
        "{raw}"
    );
    assert_eq!(
        our_node_config(&input()),
        json!({
            "apiVersion": "node.eks.aws/v1alpha1", "kind": "NodeConfig", "metadata": {},
            "spec": {
                "cluster": {
                    "apiServerEndpoint": "https://test-cluster", "certificateAuthority": "Y2EtYnVuZGxlCg==",
                    "cidr": "10.100.0.0/16", "name": "test-cluster",
                },
                "containerd": {},
                "instance": {"localStorage": {}},
                "kubelet": {
                    "config": {
                        "clusterDNS": ["10.0.100.10"], "maxPods": 110,
                        "registerWithTaints": [
                            {"effect": "NoSchedule", "key": "dedicated", "value": "gpu"},
                            {"effect": "NoExecute", "key": "karpenter.sh/unregistered"},
                        ],
                    },
                    "flags": [format!("--node-labels=\"{OUR_LABELS}\"")],
                },
            },
        })
    );
}

#[test]
fn c22_al2023_passes_every_kubelet_field_and_local_disks() {
    let mut kubelet = all_settings();
    kubelet.insert("logging".to_owned(), json!({"verbosity": 4, "format": "on"}));
    kubelet.insert("kubeReserved".to_owned(), json!({"cpu": "vcpus * 10", "memory": "0755"}));
    kubelet.insert("clusterDNS".to_owned(), json!(["10.0.9.9", "fd00::a"]));
    let config = our_node_config(&UserDataInput { kubelet: Some(&kubelet), local_disks: true, ..input() });
    assert_eq!(config["spec"]["instance"], json!({"localStorage": {"strategy": "RAID0"}}));
    let mut expected = kubelet;
    expected.insert("kubeReserved".to_owned(), json!({"memory": "0755"}));
    expected.insert("registerWithTaints".to_owned(), config["spec"]["kubelet"]["config"]["registerWithTaints"].clone());
    assert_eq!(config["spec"]["kubelet"]["config"], json!(expected), "expressions are left out, all else is as it was");
}

#[test]
fn c22_al2023_without_a_service_cidr_the_class_is_not_ready() {
    for service_cidr in [None, Some("")] {
        let without = UserDataInput { service_cidr, ..input() };
        assert_eq!(user_data(AmiFamily::Al2023, &without), Err(UserDataError::NoServiceCidr));
        assert!(user_data(AmiFamily::Al2, &without).is_ok(), "no other family needs it");
    }
    let bundle = UserDataInput { ca_bundle: Some("not base64!"), ..input() };
    assert!(matches!(user_data(AmiFamily::Al2023, &bundle), Err(UserDataError::CaBundle(_))));
    assert_eq!(
        our_node_config(&UserDataInput { ca_bundle: None, ..input() })["spec"]["cluster"].get("certificateAuthority"),
        None
    );
}

#[test]
fn c23_bottlerocket_settings_are_laid_over_the_users() {
    let custom = r#"
        [settings.kubernetes]
        "unknown-setting" = "unknown"
        api-server = 'replaceme'
        cloud-provider = 'external'
        cluster-certificate = "replaceme"
        cluster-name = 'replaceme'
        max-pods = 9999999999 # replaceme
        [settings.kubernetes.eviction-hard]
        "memory.available" = "12%"
        [settings.kubernetes.labels]
        "replace" = "me"
        [settings.kubernetes.node-labels]
        "custom-node-label" = "custom"
        "team" = "should-be-overridden"
        [settings.kubernetes.node-taints]
        "replace" = ["me:Schedule"]
        [settings.kubernetes.static-pods.web]
        enabled = true
        manifest = "cG9k"
        colour = "blue"
        [settings.network]
        hostname = "test.local"
        hosts = [["10.0.0.0", ["test.example.com", "test1.example.com"]]]
        [settings.ntp]
        time-servers = ["169.254.169.123"]
    "#;
    let expected = json!({
        "kubernetes": {
            "api-server": "https://test-cluster", "cloud-provider": "external", "cluster-certificate": "Y2EtYnVuZGxlCg==",
            "cluster-dns-ip": "10.0.100.10", "cluster-name": "test-cluster", "max-pods": 110,
            "eviction-hard": {"memory.available": "12%"},
            "node-labels": {
                "custom-node-label": "custom", "karpenter.k8s.aws/ec2nodeclass": "main", "karpenter.sh/capacity-type": "on-demand",
                "karpenter.sh/do-not-sync-taints": "true", "karpenter.sh/nodepool": "default", "team": "shop",
            },
            "node-taints": {"dedicated": ["gpu:NoSchedule"], "karpenter.sh/unregistered": [":NoExecute"]},
            "static-pods": {"web": {"enabled": true, "manifest": "cG9k"}},
        },
        "network": {"hostname": "test.local", "hosts": [["10.0.0.0", ["test.example.com", "test1.example.com"]]]},
        "ntp": {"time-servers": ["169.254.169.123"]},
    });
    assert_eq!(settings(&UserDataInput { custom: Some(custom), ..input() }), expected);
    assert_eq!(
        ignored_settings(custom),
        [
            "settings.kubernetes.labels",
            "settings.kubernetes.static-pods.web.colour",
            "settings.kubernetes.unknown-setting"
        ]
    );
    let bare = settings(&input());
    assert_eq!(bare["kubernetes"]["max-pods"], 110);
    assert_eq!(bare.as_object().unwrap().len(), 1);
    assert!(ignored_settings("").is_empty());
}

#[test]
fn c23_bottlerocket_each_kubelet_map_replaces_the_users_of_that_name() {
    let custom = "[settings.kubernetes]\ncluster-dns-ip = ['10.1.1.1']\n[settings.kubernetes.kube-reserved]\ncpu = '1'\nmemory = '1Gi'\n\
                  [settings.kubernetes.system-reserved]\ncpu = '1'\n[settings.kubernetes.eviction-hard]\n'memory.available' = '1%'\n";
    let mut kubelet = all_settings();
    kubelet.remove("evictionHard");
    kubelet.remove("podsPerCore");
    let kubernetes =
        settings(&UserDataInput { kubelet: Some(&kubelet), custom: Some(custom), ..input() })["kubernetes"].take();
    for (name, expected) in [
        ("cluster-dns-ip", json!("10.0.9.9")),
        ("max-pods", json!(42)),
        ("kube-reserved", json!({"cpu": "50m", "ephemeral-storage": "2Gi"})),
        ("system-reserved", json!({"cpu": "100m", "memory": "200Mi"})),
        ("eviction-hard", json!({"memory.available": "1%"})),
        ("eviction-soft", json!({"memory.available": "10%"})),
        ("eviction-soft-grace-period", json!({"memory.available": "1m0s"})),
        ("eviction-max-pod-grace-period", json!(30)),
        ("image-gc-high-threshold-percent", json!("80")),
        ("image-gc-low-threshold-percent", json!("60")),
        ("cpu-cfs-quota-enforced", json!(false)),
    ] {
        assert_eq!(kubernetes[name], expected, "{name}");
    }
    let nothing_discovered = UserDataInput { cluster_dns: None, custom: Some(custom), ..input() };
    assert_eq!(settings(&nothing_discovered)["kubernetes"]["cluster-dns-ip"], json!(["10.1.1.1"]));
}

#[test]
fn c23_bottlerocket_makes_a_volume_of_local_disks_before_the_users_commands() {
    let custom = "[settings.bootstrap-commands.100-mine]\ncommands = [['true']]\nmode = 'once'\nessential = false\n";
    let long = [
        "apiclient",
        "ephemeral-storage",
        "bind",
        "--dirs",
        "/var/lib/containerd",
        "/var/lib/kubelet",
        "/var/log/pods",
    ];
    for (version, bind) in
        [(None, &long[..]), (Some("v1.45.0"), &long[..]), (Some("v1.46.0"), &long[..3]), (Some("latest"), &long[..3])]
    {
        let with = UserDataInput { local_disks: true, image_version: version, custom: Some(custom), ..input() };
        assert_eq!(
            settings(&with)["bootstrap-commands"],
            json!({
                "000-mount-instance-storage": {
                    "commands": [["apiclient", "ephemeral-storage", "init"], bind], "mode": "always", "essential": true,
                },
                "100-mine": {"commands": [["true"]], "mode": "once", "essential": false},
            }),
            "{version:?}"
        );
    }
    assert_eq!(settings(&input()).get("bootstrap-commands"), None);
}

#[test]
fn c23_bottlerocket_user_data_that_is_wrong_is_named() {
    for (custom, expected) in [
        ("[settings]\nkubernetes = 5", "spec.userData: settings.kubernetes: expected a table, found integer"),
        ("settings = 'x'", "spec.userData: settings: expected a table, found string"),
        (
            "[settings.kubernetes]\nregistry-qps = 'ten'",
            "spec.userData: settings.kubernetes.registry-qps: expected a whole number, found string",
        ),
        (
            "[settings.kubernetes.node-labels]\nx = 1",
            "spec.userData: settings.kubernetes.node-labels: expected a table of strings, found table",
        ),
        (
            "[settings.kubernetes.static-pods]\nweb = true",
            "spec.userData: settings.kubernetes.static-pods.web: expected a table, found boolean",
        ),
        (
            "[settings.kubernetes]\nallowed-unsafe-sysctls = 'a'",
            "spec.userData: settings.kubernetes.allowed-unsafe-sysctls: expected a list of strings, found string",
        ),
    ] {
        let error = user_data(AmiFamily::Bottlerocket, &UserDataInput { custom: Some(custom), ..input() }).unwrap_err();
        assert_eq!(error.to_string(), expected, "{custom}");
    }
    let script = UserDataInput { custom: Some("[settings]\n#!/bin/bash\necho hi"), ..input() };
    let error = user_data(AmiFamily::Bottlerocket, &script).unwrap_err().to_string();
    assert!(error.starts_with("spec.userData is not TOML: line 3: "), "{error}");
}

#[test]
fn c24_windows_arguments_stand_in_order_after_the_users_lines() {
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

#[test]
fn c25_custom_user_data_is_the_users_alone() {
    for custom in [None, Some(""), Some("any\r\nthing \u{1f980}\0"), Some("MIME-Version: nonsense")] {
        let text = made(AmiFamily::Custom, &UserDataInput { custom, service_cidr: None, ..input() });
        assert_eq!(text, custom.unwrap_or_default());
    }
    let labels = node_labels(AmiFamily::Custom, &LABELS, CapacityType::Spot);
    assert_eq!(labels.get("karpenter.sh/do-not-sync-taints"), None);
    assert_eq!(labels["karpenter.sh/capacity-type"], "spot");
    assert!(AmiFamily::Custom.default_block_devices().is_empty());
}

#[test]
fn c26_labels_that_a_kubelet_may_not_set_are_left_out() {
    for (key, kept) in [
        ("kubernetes.io/os", false),
        ("node.kubernetes.io/instance-type", false),
        ("topology.kubernetes.io/zone", false),
        ("k8s.io/x", false),
        ("topology.k8s.io/x", false),
        ("node-restriction.kubernetes.io/x", false),
        ("sub.node-restriction.kubernetes.io/x", false),
        ("karpenter.sh/nodepool", true),
        ("karpenter.k8s.aws/instance-family", true),
        ("topology.k8s.aws/zone-id", true),
        ("mykubernetes.io/x", true),
        ("example.com/kubernetes.io", true),
        ("kubernetes.io", true),
        ("team", true),
    ] {
        let claim = [(key.to_owned(), "v".to_owned())].into();
        let labels = node_labels(AmiFamily::Al2023, &claim, CapacityType::Spot);
        assert_eq!(labels.contains_key(key), kept, "{key}");
        assert_eq!(labels.len(), if kept { 3 } else { 2 }, "{key}");
    }
    let zone = "topology.kubernetes.io/zone";
    for family in AmiFamily::ALL.into_iter().filter(|family| *family != AmiFamily::Custom) {
        let text = made(family, &input());
        assert!(!text.contains(zone) && text.contains("karpenter.sh/nodepool"), "{family}");
    }
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

#[test]
fn the_claims_own_unregistered_taint_is_not_doubled() {
    let own = [
        taint("karpenter.sh/unregistered", "", "NoExecute"),
        taint("a", "1", "NoSchedule"),
        taint("a", "2", "NoExecute"),
    ];
    let with = UserDataInput { taints: &own, ..input() };
    let flag = "--register-with-taints=\"karpenter.sh/unregistered:NoExecute,a=1:NoSchedule,a=2:NoExecute\"";
    assert!(our_script(&with).contains(flag));
    assert_eq!(
        settings(&with)["kubernetes"]["node-taints"],
        json!({"a": ["1:NoSchedule", "2:NoExecute"], "karpenter.sh/unregistered": [":NoExecute"]})
    );
    assert_eq!(our_node_config(&with)["spec"]["kubelet"]["config"]["registerWithTaints"].as_array().unwrap().len(), 3);
}

#[test]
fn a_kubelet_configuration_that_cannot_be_read_launches_nothing() {
    let wrong = kubelet(json!({"clusterDNS": "10.0.0.10"}));
    for family in AmiFamily::ALL.into_iter().filter(|family| *family != AmiFamily::Custom) {
        let error = user_data(family, &UserDataInput { kubelet: Some(&wrong), ..input() }).unwrap_err();
        assert!(matches!(error, UserDataError::Kubelet(_)), "{family}");
    }
}
