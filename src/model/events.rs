//! The registry of events: every event that Stowage emits is declared here once. An event is emitted from its declaration only, and
//! `docs/reference/events.md` is rendered from the registry.

use std::fmt;

/// The type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventType {
    Normal,
    Warning,
}

/// Sections of the reference page, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Topic {
    Pods,
    Lifecycle,
    LaunchFailures,
    Drift,
    Disruption,
    Conditions,
    Interruption,
    NodePools,
    NodeClasses,
    OptionalApis,
}

/// Where Karpenter has the same reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InKarpenter {
    /// On an event about the same kind of object.
    Event,
    /// On a condition only.
    Condition,
    No,
}

/// An event that Stowage may emit. Only this module creates values.
#[derive(PartialEq, Eq)]
pub struct DeclaredEvent {
    reason: &'static str,
    event_type: EventType,
    topic: Topic,
    objects: &'static [&'static str],
    in_karpenter: InKarpenter,
    meaning: &'static str,
}

impl DeclaredEvent {
    /// The reason; that of a condition, too, where the event reports one.
    pub const fn reason(&self) -> &'static str {
        self.reason
    }

    pub const fn event_type(&self) -> EventType {
        self.event_type
    }

    pub const fn topic(&self) -> Topic {
        self.topic
    }

    /// Kinds of the objects that it is about.
    pub const fn objects(&self) -> &'static [&'static str] {
        self.objects
    }

    pub const fn in_karpenter(&self) -> InKarpenter {
        self.in_karpenter
    }

    /// When it is emitted, and what to do about it.
    pub const fn meaning(&self) -> &'static str {
        self.meaning
    }

    /// The event with a note, to be emitted.
    pub fn note<'a>(&'static self, note: &'a str) -> EventSpec<'a> {
        EventSpec { declared: self, note }
    }
}

impl fmt::Display for DeclaredEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason)
    }
}

impl fmt::Debug for DeclaredEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.event_type, self.reason)
    }
}

/// An event to emit: a declared one with its note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventSpec<'a> {
    declared: &'static DeclaredEvent,
    note: &'a str,
}

impl<'a> EventSpec<'a> {
    pub const fn declared(&self) -> &'static DeclaredEvent {
        self.declared
    }

    pub const fn note(&self) -> &'a str {
        self.note
    }
}

/// Declares events as constants, and [`ALL`] as the list of them. The list repeats the declarations instead of naming the constants, so
/// that `tests/architecture.rs` finds a constant that no code emits.
macro_rules! events {
    ($($id:ident = $reason:literal, $event_type:ident, $topic:ident, [$($object:literal),+], $in_karpenter:ident, $meaning:literal;)*) => {
        $(
            #[doc = $meaning]
            pub const $id: &DeclaredEvent = &events!(@ $reason, $event_type, $topic, [$($object),+], $in_karpenter, $meaning);
        )*
        /// Every event, in the order of the reference page: by topic, then by reason.
        pub const ALL: &[DeclaredEvent] =
            &[$(events!(@ $reason, $event_type, $topic, [$($object),+], $in_karpenter, $meaning)),*];
    };
    (@ $reason:literal, $event_type:ident, $topic:ident, [$($object:literal),+], $in_karpenter:ident, $meaning:literal) => {
        DeclaredEvent {
            reason: $reason,
            event_type: EventType::$event_type,
            topic: Topic::$topic,
            objects: &[$($object),+],
            in_karpenter: InKarpenter::$in_karpenter,
            meaning: $meaning,
        }
    };
}

events! {
    DO_NOT_DISRUPT_ENDED = "DoNotDisruptGracePeriodElapsed", Normal, Pods, ["Pod"], Event,
        "The time for which `karpenter.sh/do-not-disrupt` protected the pod is over.";
    DO_NOT_DISRUPT_UNTIL = "DoNotDisruptUntil", Normal, Pods, ["Pod"], Event,
        "`karpenter.sh/do-not-disrupt` protects the pod until the time in the note. Emitted once, and again by another leader.";
    EVICTED = "Evicted", Normal, Pods, ["Pod"], Event,
        "The pod was evicted because its node is drained. The note names the node.";
    FAILED_SCHEDULING = "FailedScheduling", Warning, Pods, ["Pod"], Event,
        "No node can be purchased for the pod, or the pod cannot be parsed. The note names each NodePool and its first obstacle: change the pod or a NodePool.";
    INVALID_DO_NOT_DISRUPT = "InvalidDoNotDisruptAnnotation", Warning, Pods, ["Pod", "Node", "NodeClaim"], Event,
        "`karpenter.sh/do-not-disrupt` is neither `true` nor `false` nor a duration. The pod or node is protected without an end; the note says what to write.";
    NOMINATED = "Nominated", Normal, Pods, ["Pod"], Event,
        "Room is kept for the pod. The note names the NodeClaim, its Node once there is one, and the offering.";
    PURCHASED_IN_VAIN = "PurchasedInVain", Warning, Pods, ["Pod", "NodePool"], No,
        "A node that was purchased for the pod did not take it. The note has the number of such nodes so far, what kept the pod off (what the objects show, else kube-scheduler's message), and when the pod is planned on a new node again: at once after the first, a minute after the second, then after 10 and 20 minutes. A changed NodePool, EC2NodeClass, DaemonSet or pod ends the wait, with at most three nodes in ten minutes. On the NodePool of the node: how many of its nodes this happened to at that moment.";
    QUARANTINED = "Quarantined", Warning, Pods, ["Pod", "NodePool", "Node", "NodeClaim", "DaemonSet"], No,
        "The pod is left out of plans for the time in the note, because the API server rejects the NodeClaim of its node, or because the planner panics over it. The note has the error. A pod with another spec is planned at once. Likewise a NodePool, node or DaemonSet that the planner panics over: nothing is purchased from the NodePool, the room of the node is not used, and new nodes reserve nothing for the pods of the DaemonSet. A changed NodePool is planned with at once.";
    SURGED = "Surged", Normal, Pods, ["Pod"], No,
        "The pod has `stowage.dev/surge` and leaves its ReplicaSet, which creates its successor. It is evicted when the successor is ready, or goes back if its node stays.";

    AWAITING_VOLUME_DETACHMENT = "AwaitingVolumeDetachment", Normal, Lifecycle, ["NodeClaim", "Node"], Event,
        "The node is drained, and its instance is terminated when the volumes of the note are detached: at the end of the `terminationGracePeriod` at the latest, or after ten minutes without one.";
    CAPACITY_BLOCK_EXPIRING = "CapacityBlockExpiring", Warning, Lifecycle, ["NodeClaim"], No,
        "The capacity block ends in 40 minutes or less. The node is replaced and drained before EC2 starts to terminate its instances, 30 minutes before the end.";
    DISRUPTED = "Disrupted", Warning, Lifecycle, ["NodeClaim", "Pod"], Event,
        "The NodeClaim is deleted because it cannot become a node. The note says why; its pods are planned again. About a pod: it is deleted because the time for the drain of its node ends, without regard to PodDisruptionBudgets and `do-not-disrupt`.";
    EXPIRED = "Expired", Normal, Lifecycle, ["NodeClaim"], No,
        "The NodeClaim is older than its `expireAfter` and is deleted.";
    FAILED_CONSISTENCY_CHECK = "FailedConsistencyCheck", Warning, Lifecycle, ["NodeClaim"], Event,
        "The node has less than nine tenths of the capacity that its instance type should have. The note names the resource: plans for such nodes are wrong.";
    FAILED_DRAINING = "FailedDraining", Warning, Lifecycle, ["NodeClaim", "Node"], Event,
        "Pods keep the node: the note names up to five of them, protected by `karpenter.sh/do-not-disrupt`, by a PodDisruptionBudget, or terminating for longer than their grace period. The drain continues; if it never ends, remove the protection or set a `terminationGracePeriod`. The condition `Drained` of the NodeClaim (Unknown, `Draining`) says the same.";
    FINALIZED = "Finalized", Normal, Lifecycle, ["NodeClaim", "Node"], Event,
        "The finalizer `karpenter.sh/termination` is removed: the instance is terminated, and the object goes.";
    LAUNCHED = "Launched", Normal, Lifecycle, ["NodeClaim"], Event,
        "The instance was launched. The note names its instance type, zone and capacity type.";
    MULTIPLE_NODES_FOUND = "MultipleNodesFound", Warning, Lifecycle, ["NodeClaim"], Condition,
        "Several Nodes have the provider ID of the NodeClaim. None of them is registered, and the NodeClaim is deleted after 15 minutes; a Node that is registered already stays. Delete the Node that is not the instance's own, and find out who created it.";
    NODE_REPAIR_BLOCKED = "NodeRepairBlocked", Warning, Lifecycle, ["NodeClaim", "Node"], Event,
        "The node is unhealthy, and it is not removed: too many nodes are unhealthy at once, which has probably another cause, or its annotation `karpenter.sh/do-not-repair` forbids it.";
    NODE_UNHEALTHY = "NodeUnhealthy", Warning, Lifecycle, ["NodeClaim", "Node"], No,
        "A condition of the Node has been unhealthy for longer than is tolerated. The node is removed without waiting for its pods.";
    NOT_INITIALIZED = "NotInitialized", Warning, Lifecycle, ["NodeClaim", "Node"], No,
        "The node is not initialized 15 minutes after it registered. The note has the reason of the condition `Initialized`, such as `StartupTaintsExist`: nobody removes a startup taint of the NodePool. It is deleted when no pod needs it.";
    TERMINATION_GRACE_PERIOD_EXPIRING = "TerminationGracePeriodExpiring", Warning, Lifecycle, ["NodeClaim", "Node"], Event,
        "The NodeClaim is being deleted and has a deadline. The note says when its remaining pods will be deleted without eviction.";
    UNREGISTERED_TAINT_MISSING = "UnregisteredTaintMissing", Warning, Lifecycle, ["NodeClaim"], Event,
        "The Node registered without the taint `karpenter.sh/unregistered`. It is registered nevertheless, but pods may have been bound to it before. Set the taint in the image or the user data.";

    AMI_AUTHORIZATION_FAILURE = "AMIAuthorizationFailure", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "The account may not use the image. Share the image with the account, or select another one.";
    AMI_NOT_FOUND = "AMINotFound", Warning, LaunchFailures, ["NodeClaim", "EC2NodeClass"], Condition,
        "The image of a launch does not exist, or `amiSelectorTerms` select none. Correct the terms.";
    ACCOUNT_PENDING_VERIFICATION = "AccountPendingVerification", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "AWS still verifies the account for this region. Wait, or contact AWS Support.";
    FLEET_QUOTA_EXCEEDED = "FleetQuotaExceeded", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "The account has as many fleets as its quota allows. Raise the quota.";
    FREE_TIER_INELIGIBLE = "FreeTierIneligible", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "The account is limited to instance types of the free tier. Require such types, or upgrade the account.";
    INSTANCE_PROFILE_NAME_INVALID = "InstanceProfileNameInvalid", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "EC2 does not accept the instance profile. Correct `role` or `instanceProfile` of the EC2NodeClass.";
    INSUFFICIENT_CAPACITY_ERROR = "InsufficientCapacityError", Warning, LaunchFailures, ["NodeClaim"], Event,
        "No offering of the NodeClaim has capacity. The NodeClaim is deleted, and its pods are planned again without these offerings; if that repeats, allow more instance types and zones.";
    INSUFFICIENT_FREE_ADDRESSES = "InsufficientFreeAddressesInSubnet", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "A subnet has too few free addresses. Select larger or more subnets.";
    INTERNAL_ERROR = "InternalError", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "EC2 failed.";
    INVALID_AMI_ID = "InvalidAMIID", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "The id of the image is malformed. Correct `amiSelectorTerms` of the EC2NodeClass.";
    LAUNCH_FAILED = "LaunchFailed", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "The launch failed for a reason without a name of its own, EC2 throttled it, or EC2 did not answer. The note has the error.";
    LAUNCH_TEMPLATE_NOT_FOUND = "LaunchTemplateNotFound", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "Launch templates are deleted as soon as they are created. Find the program that deletes them.";
    NODE_CLASS_READINESS_UNKNOWN = "NodeClassReadinessUnknown", Warning, LaunchFailures, ["NodeClaim", "NodePool"], Condition,
        "The EC2NodeClass has not been evaluated yet. If that lasts, see its conditions and events.";
    REQUEST_LIMIT_EXCEEDED = "RequestLimitExceeded", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "EC2 throttled the launch. If that lasts, find the other callers in the account.";
    SECURITY_GROUP_SUBNET_VPC_MISMATCH = "SecurityGroupSubnetVPCMismatch", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "Security groups and subnets of the EC2NodeClass are in different VPCs. Correct its selector terms.";
    SPOT_QUOTA_EXCEEDED = "SpotQuotaExceeded", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "The account's quota of spot instances is used up. Raise the quota, or allow on-demand capacity.";
    SPOT_SLR_CREATION_FAILED = "SpotSLRCreationFailed", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "The account lacks the service-linked role of EC2 spot, and the controller may not create it. The NodeClaim is deleted, and its pods are planned again; create the role with the command of the note.";
    SUBNET_RESOLUTION_FAILED = "SubnetResolutionFailed", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "The EC2NodeClass has no subnet in any zone of the NodeClaim's offerings. Select subnets in these zones.";
    UNAUTHORIZED = "Unauthorized", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "AWS denied a call of the launch. Allow the action of the note in the controller's policy; `stowage preflight` checks all of them.";
    USER_DATA_SIZE_LIMIT_EXCEEDED = "UserDataSizeLimitExceeded", Warning, LaunchFailures, ["NodeClaim", "EC2NodeClass"], Condition,
        "The user data is longer than EC2 accepts. Shorten `userData` of the EC2NodeClass.";
    VCPU_LIMIT_EXCEEDED = "VCPULimitExceeded", Warning, LaunchFailures, ["NodeClaim"], Condition,
        "The account's vCPU quota is used up. Raise the quota.";

    AMI_DRIFT = "AMIDrift", Normal, Drift, ["NodeClaim"], Condition,
        "The EC2NodeClass selects another image for the instance type.";
    CAPACITY_RESERVATION_DRIFT = "CapacityReservationDrift", Normal, Drift, ["NodeClaim"], Condition,
        "The EC2NodeClass no longer selects the capacity reservation of the instance.";
    INSTANCE_TYPE_NOT_FOUND = "InstanceTypeNotFound", Normal, Drift, ["NodeClaim"], Condition,
        "The NodePool no longer offers the instance type with this capacity type in this zone.";
    NODE_CLASS_DRIFT = "NodeClassDrift", Normal, Drift, ["NodeClaim"], Condition,
        "Fields of the EC2NodeClass that apply to the instance changed.";
    NODE_POOL_DRIFTED = "NodePoolDrifted", Normal, Drift, ["NodeClaim"], Condition,
        "The template of the NodePool changed.";
    PLACEMENT_GROUP_DRIFT = "PlacementGroupDrift", Normal, Drift, ["NodeClaim"], Condition,
        "The EC2NodeClass selects another placement group, or none.";
    REQUIREMENTS_DRIFTED = "RequirementsDrifted", Normal, Drift, ["NodeClaim"], Condition,
        "The requirements of the NodePool do not admit the node.";
    SECURITY_GROUP_DRIFT = "SecurityGroupDrift", Normal, Drift, ["NodeClaim"], Condition,
        "The EC2NodeClass selects other security groups.";
    SUBNET_DRIFT = "SubnetDrift", Normal, Drift, ["NodeClaim"], Condition,
        "The EC2NodeClass no longer selects the subnet of the instance.";

    CONSOLIDATION_APPROVED = "ConsolidationApproved", Normal, Disruption, ["NodeClaim", "Node", "NodePool"], Event,
        "Consolidation under the policy `Balanced` begins. The note has the score; on the NodePool, if several nodes are removed together.";
    CONSOLIDATION_CANDIDATE = "ConsolidationCandidate", Normal, Disruption, ["NodeClaim", "Node"], Event,
        "Consolidation chose to remove the node. The note has what is removed and purchased together, and the saving.";
    CONSOLIDATION_REJECTED = "ConsolidationRejected", Normal, Disruption, ["NodeClaim", "Node"], Event,
        "A chosen node is not removed: it or its pods changed meanwhile, or a budget or a cap allows no more. It is evaluated again.";
    DISRUPTION_BLOCKED = "DisruptionBlocked", Normal, Disruption, ["NodeClaim", "Node", "NodePool"], Event,
        "On a NodeClaim and its Node: the node is not disrupted now, because the Node or a pod is protected, PodDisruptionBudgets refuse an eviction, pods are expected on it, or it is not initialized; a drifted one, or one that expires soon, also because its pods have no other place. The note says why; the node is evaluated again. On a NodePool: a budget allows no disruption for the reason in the note.";
    DISRUPTION_CANCELED = "DisruptionCanceled", Normal, Disruption, ["NodeClaim", "Node"], No,
        "A disruption that began is taken back before any pod was evicted: the new nodes were not ready in time or cost too much, a pod has no room elsewhere, or something protects the node now. The note says why. The node is tried again later.";
    DISRUPTION_LAUNCHING = "DisruptionLaunching", Normal, Disruption, ["NodeClaim"], Event,
        "The NodeClaim takes pods of nodes that are disrupted. The note names their NodeClaims, and why they are disrupted.";
    DISRUPTION_REPORTED = "DisruptionReported", Normal, Disruption, ["NodeClaim", "Node"], No,
        "The node would be disrupted now, for the reason in the note, but the ConfigMap `stowage-pause` has `disruption: report`. Repeated every 15 minutes.";
    DISRUPTION_TERMINATING = "DisruptionTerminating", Normal, Disruption, ["NodeClaim", "Node"], Event,
        "A voluntary disruption starts. The note has its reason: `Empty`, `Drifted`, `Underutilized` or `Expired`.";
    DISRUPTION_WAITING_READINESS = "DisruptionWaitingReadiness", Normal, Disruption, ["NodeClaim"], Event,
        "The instance of a replacement is launched. The nodes of the note are removed when it is ready.";
    SCALED_DOWN = "ScaledDown", Normal, Disruption, ["NodeClaim", "Node"], No,
        "The static NodePool has more nodes than `spec.replicas`, and this one is removed.";
    UNCONSOLIDATABLE = "Unconsolidatable", Normal, Disruption, ["NodeClaim", "Node"], Event,
        "Consolidation does not remove the node: the NodePool does not allow it, its pods have no other place, or its removal would not save enough. The note says why, and has the price of the node and what its removal could save. Emitted when the reason changes, and every 15 minutes.";

    CONSISTENT_STATE_FOUND = "ConsistentStateFound", Normal, Conditions, ["NodeClaim"], Event,
        "Whether the node has the capacity of its instance type.";
    DISK_PRESSURE = "DiskPressure", Normal, Conditions, ["Node"], Event,
        "Written by the kubelet.";
    DISRUPTION_REASON = "DisruptionReason", Normal, Conditions, ["NodeClaim"], Event,
        "The node is marked for a voluntary disruption.";
    DRAINED = "Drained", Normal, Conditions, ["NodeClaim"], Event,
        "Whether the pods have left the node that is terminated.";
    DRIFTED = "Drifted", Normal, Conditions, ["NodeClaim"], Event,
        "Whether the node is as its NodePool and EC2NodeClass are now.";
    INITIALIZED = "Initialized", Normal, Conditions, ["NodeClaim"], Event,
        "Whether the node is ready, with its resources and without startup taints.";
    MEMORY_PRESSURE = "MemoryPressure", Normal, Conditions, ["Node"], Event,
        "Written by the kubelet.";
    NETWORK_UNAVAILABLE = "NetworkUnavailable", Normal, Conditions, ["Node"], Event,
        "Written by the network plugin.";
    NODE_CLASS_READY = "NodeClassReady", Normal, Conditions, ["NodePool"], Event,
        "Whether the EC2NodeClass of the NodePool is ready.";
    NODE_REGISTRATION_HEALTHY = "NodeRegistrationHealthy", Normal, Conditions, ["NodePool"], Event,
        "Whether the instances of the NodePool become nodes.";
    PID_PRESSURE = "PIDPressure", Normal, Conditions, ["Node"], Event,
        "Written by the kubelet.";
    READY = "Ready", Normal, Conditions, ["NodePool", "NodeClaim", "Node"], Event,
        "Whether the conditions that it depends on are True; of a Node, what its kubelet reports.";
    REGISTERED = "Registered", Normal, Conditions, ["NodeClaim"], Event,
        "Whether the instance has become a Node.";
    VALIDATION_SUCCEEDED = "ValidationSucceeded", Normal, Conditions, ["NodePool"], Event,
        "Whether the spec is valid.";
    VOLUMES_DETACHED = "VolumesDetached", Normal, Conditions, ["NodeClaim"], Event,
        "Whether the volumes of the drained node are detached.";

    CAPACITY_RESERVATION_INSTANCE_INTERRUPTED = "CapacityReservationInstanceInterrupted", Warning, Interruption, ["NodeClaim", "Node"], Event,
        "The owner of the capacity reservation reclaims the instance in two minutes. The pods get another node.";
    INSTANCE_STOPPING = "InstanceStopping", Warning, Interruption, ["NodeClaim", "Node"], Event,
        "The instance is stopping. The NodeClaim is deleted.";
    INSTANCE_TERMINATING = "InstanceTerminating", Warning, Interruption, ["NodeClaim", "Node"], Event,
        "The instance is shutting down. The NodeClaim is deleted.";
    INSTANCE_UNHEALTHY = "InstanceUnhealthy", Warning, Interruption, ["NodeClaim", "Node"], Event,
        "AWS Health has scheduled a change of the instance, a status check failed, or an event of the instance is scheduled. The pods get another node.";
    SPOT_INTERRUPTED = "SpotInterrupted", Warning, Interruption, ["NodeClaim", "Node"], Event,
        "EC2 reclaims the spot instance in two minutes. The pods get another node.";
    SPOT_REBALANCE_RECOMMENDATION = "SpotRebalanceRecommendation", Normal, Interruption, ["NodeClaim", "Node"], Event,
        "The spot instance has an elevated risk of interruption. Nothing else happens.";
    STATUS_CHECKS_REFUSED = "StatusChecksRefused", Warning, Interruption, ["EC2NodeClass"], No,
        "Instances whose status checks fail are not replaced until the next start. Allow `ec2:DescribeInstanceStatus` in the controller's policy and restart it.";
    TERMINATING_ON_INTERRUPTION = "TerminatingOnInterruption", Warning, Interruption, ["NodeClaim", "Node"], Event,
        "The NodeClaim was deleted because of one of these interruptions, or because its capacity block ends.";

    INVALID_CONSOLIDATION_SETTING = "InvalidConsolidationSetting", Warning, NodePools, ["NodePool"], No,
        "An annotation of the NodePool that sets consolidation is invalid, and the default is used. The note says what to write.";
    NO_COMPATIBLE_INSTANCE_TYPES = "NoCompatibleInstanceTypes", Warning, NodePools, ["NodePool"], Event,
        "Nothing can be purchased from the NodePool: no instance type of its EC2NodeClass satisfies its requirements, or none that does has capacity now. The note says which.";
    NO_OFFERING_AVAILABLE = "NoOfferingAvailable", Warning, NodePools, ["NodePool"], No,
        "A static NodePool has fewer nodes than `spec.replicas`, and no available offering satisfies its requirements. Allow more instance types, zones or capacity types, or wait for capacity.";
    NODE_CLAIM_REJECTED = "NodeClaimRejected", Warning, NodePools, ["NodePool"], No,
        "The API server, an admission policy or a webhook rejects the NodeClaims of the NodePool, whatever pods they are for. Nothing is launched for it; the note has the error.";
    NODE_CLASS_NOT_FOUND = "NodeClassNotFound", Warning, NodePools, ["NodePool"], Condition,
        "The EC2NodeClass of the NodePool does not exist. Create it, or name another in `nodeClassRef`.";
    NODE_CLASS_TERMINATING = "NodeClassTerminating", Warning, NodePools, ["NodePool"], Condition,
        "The EC2NodeClass of the NodePool is being deleted.";
    NODE_LIMIT_REACHED = "NodeLimitReached", Warning, NodePools, ["NodePool"], No,
        "A static NodePool has fewer nodes than `spec.replicas`, because `spec.limits.nodes` is reached. Raise the limit, or lower the replicas.";
    NODE_POOL_VALIDATION_FAILED = "NodePoolValidationFailed", Warning, NodePools, ["NodePool"], Condition,
        "The spec of the NodePool is invalid. The note names each field.";
    STATIC_CAPACITY_DISABLED = "StaticCapacityDisabled", Warning, NodePools, ["NodePool"], No,
        "The NodePool has `spec.replicas`, and the feature gate `StaticCapacity` is off: nothing is launched for it. Enable the gate, or delete the NodePool.";
    UNHEALTHY_DEPENDENTS = "UnhealthyDependents", Warning, NodePools, ["NodePool"], Condition,
        "The EC2NodeClass of the NodePool is not Ready. The note names its conditions that are False.";
    UNSUPPORTED_KIND = "UnsupportedKind", Warning, NodePools, ["NodeOverlay", "CapacityBuffer"], No,
        "The object has no effect: Stowage does not implement its kind. Delete it, or take what it asks for into account otherwise; the note says how.";
    ZONAL_SHIFT_ACTIVE = "ZonalShiftActive", Warning, NodePools, ["NodePool"], Event,
        "A zonal shift moves away from a zone of the NodePool. Nothing is launched in the zone, and its nodes are left alone.";
    ZONAL_SHIFT_CLEARED = "ZonalShiftCleared", Normal, NodePools, ["NodePool"], Event,
        "The zonal shift has ended. The zone is used again.";

    CAPACITY_RESERVATIONS_UNREADABLE = "CapacityReservationsUnreadable", Warning, NodeClasses, ["EC2NodeClass"], No,
        "Capacity reservations could not be read. The note has the error and says whether known reservations are used; the class stays Ready.";
    CLUSTER_CIDR_RESOLUTION_FAILED = "ClusterCIDRResolutionFailed", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "The service CIDR, which AL2023 needs, is unknown. Allow `eks:DescribeCluster`, or set `STOWAGE_SERVICE_CIDR`.";
    CREATE_FLEET_AUTH_CHECK_FAILED = "CreateFleetAuthCheckFailed", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "A dry run shows that the controller may not call `ec2:CreateFleet` for this class. Allow it in the controller's policy.";
    CREATE_LAUNCH_TEMPLATE_AUTH_CHECK_FAILED = "CreateLaunchTemplateAuthCheckFailed", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "The controller may not call `ec2:CreateLaunchTemplate` for this class. Allow it in the controller's policy.";
    DEPENDENCIES_NOT_READY = "DependenciesNotReady", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "The class cannot be validated until the conditions of the note are True.";
    INSTANCE_PROFILE_NOT_FOUND = "InstanceProfileNotFound", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "EC2 does not know `spec.instanceProfile`. Create the instance profile, or name another.";
    INVALID_KUBELET_CONFIGURATION = "InvalidKubeletConfiguration", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "The kubelet would reject or ignore members of `spec.kubelet`. The note names them.";
    KUBELET_EXPRESSION_DROPPED = "KubeletExpressionDropped", Warning, NodeClasses, ["EC2NodeClass"], No,
        "An expression for a reserved amount fails on an instance type, where it counts as not set. The class stays Ready; correct the expression.";
    KUBELET_EXPRESSION_EVALUATION_FAILED = "KubeletExpressionEvaluationFailed", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "The expression of `maxPods` fails or is negative on an instance type. Correct the expression.";
    KUBELET_EXPRESSION_INVALID = "KubeletExpressionInvalid", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "An expression in `spec.kubelet` is not valid CEL. Correct the expression.";
    KUBELET_EXPRESSIONS_DISABLED = "KubeletExpressionsDisabled", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "`spec.kubelet` holds an expression, and expressions are disabled. Write a number, or set `AWS_FEATURE_GATES` to `NodeClassCEL=true`.";
    NOT_JUDGED = "NotJudged", Warning, NodeClasses, ["EC2NodeClass"], No,
        "A condition could not be evaluated and keeps its last status. The note has the error; the evaluation is retried.";
    OTHER_LEADER = "OtherLeader", Warning, NodeClasses, ["EC2NodeClass"], No,
        "Another controller of the same NodeClaims leads, such as Karpenter with a Lease in another namespace. The note names its Lease and holder. Stop it, or share its Lease with `settings.leaderElection.namespace`; Stowage leads when that Lease expires.";
    PAUSED = "Paused", Warning, NodeClasses, ["EC2NodeClass"], No,
        "The ConfigMap `stowage-pause` pauses provisioning, disruption or both. Delete it, or set `pause: none`, to resume.";
    PLACEMENT_GROUP_NOT_FOUND = "PlacementGroupNotFound", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "`placementGroupSelector` selects no placement group.";
    PLACEMENT_GROUP_RESOLUTION_FAILED = "PlacementGroupResolutionFailed", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "The placement group could not be read. The note has the error.";
    RATE_CAPPED = "RateCapped", Warning, NodeClasses, ["EC2NodeClass"], No,
        "More nodes would be purchased or disrupted in a minute than the settings allow; the rest waits. Find the cause before the cap is raised.";
    RESUMED = "Resumed", Normal, NodeClasses, ["EC2NodeClass"], No,
        "The emergency stop pauses nothing any more.";
    RUN_INSTANCES_AUTH_CHECK_FAILED = "RunInstancesAuthCheckFailed", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "A dry run shows that the controller may not call `ec2:RunInstances` for this class. Allow it in the controller's policy.";
    SECURITY_GROUPS_NOT_FOUND = "SecurityGroupsNotFound", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "`securityGroupSelectorTerms` select no security groups. Correct the terms.";
    SUBNETS_NOT_FOUND = "SubnetsNotFound", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "`subnetSelectorTerms` select no subnets. Correct the terms.";
    TAG_VALIDATION_FAILED = "TagValidationFailed", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "`spec.tags` has a reserved key, or so many tags that an instance has no room for those that are added. Remove some.";
    UNSUPPORTED_ALIAS = "UnsupportedAlias", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "The image alias is not supported. The note says why.";
    UNSUPPORTED_KUBELET_CONFIGURATION = "UnsupportedKubeletConfiguration", Warning, NodeClasses, ["EC2NodeClass"], Condition,
        "The AMI family does not support members of `spec.kubelet`. The note names them.";
    USER_DATA_INVALID = "UserDataInvalid", Warning, NodeClasses, ["EC2NodeClass"], No,
        "No user data can be rendered for the class. The note says why.";
    WAITING_ON_NODE_CLAIM_TERMINATION = "WaitingOnNodeClaimTermination", Normal, NodeClasses, ["EC2NodeClass"], Event,
        "The class is deleted when its NodeClaims are. The note names up to five.";

    CLUSTER_FACTS_READABLE = "ClusterFactsReadable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "The version, the endpoint and the CA of the cluster can be read again.";
    CLUSTER_FACTS_UNREADABLE = "ClusterFactsUnreadable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "The version, the endpoint and the CA of the cluster cannot be read. The last known ones are used.";
    INSTANCE_PROFILES_UNWRITABLE = "InstanceProfilesUnwritable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "IAM denies the deletion of unused instance profiles, which are kept. Allow the action of the note.";
    INSTANCE_PROFILES_WRITABLE = "InstanceProfilesWritable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "Unused instance profiles can be deleted again.";
    INSTANCE_TAGS_UNWRITABLE = "InstanceTagsUnwritable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "Instances are not tagged with the names of their nodes. The note has the error.";
    INSTANCE_TAGS_WRITABLE = "InstanceTagsWritable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "Instances can be tagged again.";
    INSTANCE_TYPE_ZONES_READABLE = "InstanceTypeZonesReadable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "The zones of instance types can be read again.";
    INSTANCE_TYPE_ZONES_UNREADABLE = "InstanceTypeZonesUnreadable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "The zones of instance types cannot be read. The last response is used; without one, the embedded table.";
    INSTANCE_TYPES_READABLE = "InstanceTypesReadable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "The instance types of the region can be read again.";
    INSTANCE_TYPES_UNREADABLE = "InstanceTypesUnreadable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "The instance types of the region cannot be read. The last response is used; without one, the embedded table.";
    INTERRUPTION_QUEUE_READABLE = "InterruptionQueueReadable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "The interruption queue can be read again.";
    INTERRUPTION_QUEUE_UNREADABLE = "InterruptionQueueUnreadable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "The interruption queue cannot be read, and interruptions are not noticed. Check its name and policy with `stowage preflight`.";
    ON_DEMAND_PRICES_READABLE = "OnDemandPricesReadable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "On-demand prices can be read again.";
    ON_DEMAND_PRICES_UNREADABLE = "OnDemandPricesUnreadable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "On-demand prices cannot be read, or the partition has no Pricing API. The last response is used; without one, the embedded prices of us-east-1.";
    PLACEMENT_SCORES_READABLE = "PlacementScoresReadable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "Spot placement scores can be read again.";
    PLACEMENT_SCORES_UNREADABLE = "PlacementScoresUnreadable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "Spot placement scores cannot be read. The last scores are used for an hour; if AWS denied the call, it is not repeated until the next start.";
    SPOT_PRICES_READABLE = "SpotPricesReadable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "Spot prices can be read again.";
    SPOT_PRICES_UNREADABLE = "SpotPricesUnreadable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "Spot prices cannot be read. The last response is used; without one, on-demand prices.";
    STATUS_CHECKS_READABLE = "StatusChecksReadable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "Status checks of instances can be read again.";
    STATUS_CHECKS_UNREADABLE = "StatusChecksUnreadable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "Status checks of instances cannot be read. Instances whose checks fail are not replaced.";
    ZONAL_SHIFTS_READABLE = "ZonalShiftsReadable", Normal, OptionalApis, ["EC2NodeClass"], No,
        "Zonal shifts can be read again.";
    ZONAL_SHIFTS_UNREADABLE = "ZonalShiftsUnreadable", Warning, OptionalApis, ["EC2NodeClass"], No,
        "Zonal shifts cannot be read. Known shifts stay until they expire; register the cluster for zonal shift, or set `ENABLE_ZONAL_SHIFT=false`.";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Limit of the API server (`validateV1Event`).
    const MAX_REASON: usize = 128;

    #[test]
    fn reasons_are_unique_and_sorted_by_topic() {
        let reasons: BTreeSet<&str> = ALL.iter().map(DeclaredEvent::reason).collect();
        assert_eq!(reasons.len(), ALL.len(), "two events share a reason");
        for pair in ALL.windows(2) {
            let keys = [&pair[0], &pair[1]].map(|event| (event.topic(), event.reason()));
            assert!(keys[0] < keys[1], "{keys:?}");
        }
    }

    #[test]
    fn reasons_are_camel_case_and_short() {
        for event in ALL {
            let reason = event.reason();
            assert!(reason.starts_with(|first: char| first.is_ascii_uppercase()), "{reason}");
            assert!(reason.chars().all(|c| c.is_ascii_alphanumeric()), "{reason}");
            assert!(reason.len() <= MAX_REASON, "{reason}");
        }
    }

    #[test]
    fn meanings_are_sentences_about_known_kinds() {
        for event in ALL {
            assert!(event.meaning().ends_with(['.', ')']), "{event}: {}", event.meaning());
            let supported = ["Pod", "DaemonSet", "Node", "NodeClaim", "NodePool", "EC2NodeClass"];
            let unsupported = ["NodeOverlay", "CapacityBuffer"];
            let kinds = if event == UNSUPPORTED_KIND { &unsupported[..] } else { &supported };
            assert!(event.objects().iter().all(|kind| kinds.contains(kind)), "{event}: {:?}", event.objects());
        }
    }

    #[test]
    fn an_event_that_is_emitted_has_reason_and_type_of_its_declaration() {
        let event = LAUNCHED.note("m5.large");
        assert_eq!((event.declared().reason(), event.note()), ("Launched", "m5.large"));
        assert_eq!(event.declared().event_type(), EventType::Normal);
    }
}
