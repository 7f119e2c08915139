//! The Node that a simulated kubelet registers. Requests to an API server are tested in e2e.

use stowage_model::offering::CapacityType;
use stowage_model::time::UnixMillis;
use stowage_model::units::{Bytes, Millicores};

use super::*;
use crate::catalog::{NodeSettings, SpotPricing, embedded};
use crate::simulated::engine_state::NodeProgress;

fn record(instance_type: &str) -> InstanceRecord {
    InstanceRecord {
        number: 1,
        id: "i-00112233445566778".to_owned(),
        client_token: "uid".to_owned(),
        node_claim: "claim".to_owned(),
        node_pool: "pool".to_owned(),
        node_class: "class".to_owned(),
        instance_type: instance_type.to_owned(),
        zone: "us-east-1b".to_owned(),
        capacity_type: CapacityType::Spot,
        image_id: "ami-1".to_owned(),
        private_ip: "10.1.2.3".to_owned(),
        labels: BTreeMap::from([
            ("karpenter.sh/nodepool".to_owned(), "pool".to_owned()),
            (keys::HOSTNAME.to_owned(), "not-for-the-caller-to-say".to_owned()),
        ]),
        taints: vec![Taint {
            key: keys::UNREGISTERED_TAINT.to_owned(),
            effect: "NoExecute".to_owned(),
            ..Taint::default()
        }],
        launched_at: UnixMillis(0),
        running_at: UnixMillis(0),
        boot_at: UnixMillis(0),
        shutdown_at: None,
        terminated_at: None,
        node: NodeProgress::default(),
    }
}

fn registered(record: &InstanceRecord) -> Node {
    let entry = embedded().instance_type(&record.instance_type).unwrap();
    node_object(record, &entry.as_node("us-east-1", &NodeSettings::default(), SpotPricing::Off), Timestamp::UNIX_EPOCH)
}

#[test]
fn a_node_is_registered_as_by_a_kubelet() {
    insta::assert_snapshot!(serde_saphyr::to_string(&registered(&record("g5.xlarge"))).unwrap(), @r#"
    apiVersion: v1
    kind: Node
    metadata:
      annotations:
        kwok.x-k8s.io/node: fake
      labels:
        beta.kubernetes.io/arch: amd64
        beta.kubernetes.io/instance-type: g5.xlarge
        beta.kubernetes.io/os: linux
        failure-domain.beta.kubernetes.io/region: us-east-1
        failure-domain.beta.kubernetes.io/zone: us-east-1b
        karpenter.sh/nodepool: pool
        kubernetes.io/arch: amd64
        kubernetes.io/hostname: ip-10-1-2-3.ec2.internal
        kubernetes.io/os: linux
        node.kubernetes.io/instance-type: g5.xlarge
        topology.kubernetes.io/region: us-east-1
        topology.kubernetes.io/zone: us-east-1b
      name: ip-10-1-2-3.ec2.internal
    spec:
      providerID: aws:///us-east-1b/i-00112233445566778
      taints:
      - effect: NoExecute
        key: karpenter.sh/unregistered
      - effect: NoSchedule
        key: node.kubernetes.io/not-ready
    status:
      addresses:
      - address: "10.1.2.3"
        type: InternalIP
      - address: ip-10-1-2-3.ec2.internal
        type: InternalDNS
      - address: ip-10-1-2-3.ec2.internal
        type: Hostname
      allocatable:
        cpu: 3920m
        ephemeral-storage: 17825792Ki
        memory: 14501888Ki
        nvidia.com/gpu: "1"
        pods: "58"
        vpc.amazonaws.com/pod-eni: "4"
      capacity:
        cpu: "4"
        ephemeral-storage: 20971520Ki
        memory: 15518720Ki
        nvidia.com/gpu: "1"
        pods: "58"
        vpc.amazonaws.com/pod-eni: "4"
      conditions:
      - lastHeartbeatTime: "1970-01-01T00:00:00Z"
        lastTransitionTime: "1970-01-01T00:00:00Z"
        message: the simulated kubelet has just started
        reason: KubeletNotReady
        status: "False"
        type: Ready
      - lastHeartbeatTime: "1970-01-01T00:00:00Z"
        lastTransitionTime: "1970-01-01T00:00:00Z"
        message: kubelet has sufficient memory available
        reason: KubeletHasSufficientMemory
        status: "False"
        type: MemoryPressure
      - lastHeartbeatTime: "1970-01-01T00:00:00Z"
        lastTransitionTime: "1970-01-01T00:00:00Z"
        message: kubelet has no disk pressure
        reason: KubeletHasNoDiskPressure
        status: "False"
        type: DiskPressure
      - lastHeartbeatTime: "1970-01-01T00:00:00Z"
        lastTransitionTime: "1970-01-01T00:00:00Z"
        message: kubelet has sufficient PID available
        reason: KubeletHasSufficientPID
        status: "False"
        type: PIDPressure
      daemonEndpoints:
        kubeletEndpoint:
          Port: 10250
      nodeInfo:
        architecture: amd64
        bootID: i-00112233445566778
        containerRuntimeVersion: containerd://2.1.0
        kernelVersion: 6.12.0-simulated
        kubeProxyVersion: ""
        kubeletVersion: v1.34.0
        machineID: "00112233445566778"
        operatingSystem: linux
        osImage: simulated by Stowage
        systemUUID: i-00112233445566778
    "#);
}

#[test]
fn quantities_are_in_the_kubelets_notation() {
    let resources = Resources {
        cpu: Millicores(1930),
        memory: Bytes::from_mib(6903),
        ephemeral_storage: Bytes(1025),
        pods: 29,
        extended: BTreeMap::new(),
    };
    let text: Vec<String> =
        quantities(&resources).into_iter().map(|(name, amount)| format!("{name}={}", amount.0)).collect();
    assert_eq!(text, ["cpu=1930m", "ephemeral-storage=1025", "memory=7068672Ki", "pods=29"]);
    let whole = Resources { cpu: Millicores(4000), ..resources };
    assert_eq!(quantities(&whole)["cpu"], Quantity("4".to_owned()));
}

#[test]
fn the_backoff_grows_up_to_five_seconds() {
    let milliseconds: Vec<u128> = [0, 1, 2, 3, 4, 5, 40].map(|attempt| backoff(attempt).as_millis()).to_vec();
    assert_eq!(milliseconds, [250, 500, 1000, 2000, 4000, 5000, 5000]);
}
