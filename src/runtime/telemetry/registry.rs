//! The registry of metrics: every metric is declared here once, with its type, labels and help text. The structs of this folder create
//! their collectors from it, and `docs/reference/metrics.md` is rendered from it.
//!
//! Names start with `stowage_`, those of metrics of Karpenter with `karpenter_`, those of its libraries as they have them; some are published under both prefixes ([`MetricNames`]). Labels take few
//! values: verbs, codes, rules and reasons, never names of pods or nodes, but for the series of these ([`Source::Objects`]).

use crate::telemetry::buckets::{
    BATCH_SIZES, CLOUD_SECONDS, CONDITION_SECONDS, DURATIONS, LIFETIME_SECONDS, RATIOS, RECONCILER_SECONDS, SCORES,
    STANDARD_SECONDS, TERMINATION_SECONDS, VERDICT_SECONDS,
};
use crate::telemetry::metric::{Kind, Metric, MetricNames, Source};

/// The name of a metric, and Karpenter's if it has both.
macro_rules! names {
    ($name:literal) => {
        (concat!("stowage_", $name), None::<&str>)
    };
    (both $name:literal) => {
        (concat!("stowage_", $name), Some(concat!("karpenter_", $name)))
    };
    (karpenter $name:literal) => {
        (concat!("karpenter_", $name), None::<&str>)
    };
    (plain $name:literal) => {
        ($name, None::<&str>)
    };
    (operator $name:literal) => {
        (concat!("operator_", $name), None::<&str>)
    };
}

/// Declares metrics as constants, and [`ALL`] as the list of them.
macro_rules! metrics {
    ($($id:ident = $($scope:ident)? $name:literal, $kind:expr, $source:ident, [$($label:literal: $values:literal),* $(,)?], $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $id: &Metric = &Metric {
                name: names!($($scope)? $name).0,
                karpenter: names!($($scope)? $name).1,
                kind: $kind,
                source: Source::$source,
                labels: &[$(($label, $values)),*],
                help: $help,
            };
        )*
        /// Every metric, in the order of the reference page.
        pub const ALL: &[&Metric] = &[$($id),*];
    };
}

metrics! {
    PLAN_SECONDS = "plan_seconds", Kind::Histogram(RECONCILER_SECONDS), Leader, [],
        "Duration of planning, in seconds.";
    SCHEDULING_SECONDS = karpenter "scheduler_scheduling_duration_seconds", Kind::Histogram(DURATIONS), Leader, ["controller": "`provisioner`, `disruption`"],
        "Duration of planning, in seconds, also of what consolidation plans.";
    QUEUE_DEPTH = karpenter "scheduler_queue_depth", Kind::Gauge, Leader, ["controller": "`provisioner`", "scheduling_id": "always empty"],
        "Pods that wait for a plan.";
    UNSCHEDULABLE_PODS = karpenter "scheduler_unschedulable_pods_count", Kind::Gauge, Leader, ["controller": "`provisioner`"],
        "Pods that the last plan left without a node.";
    PENDING_BY_ZONE = karpenter "scheduler_pending_pods_by_effective_zone_count", Kind::Gauge, Leader, ["controller": "`provisioner`", "zone": "the only zone that node affinity and volumes leave a pod; `flexible` for several, `none` without one"],
        "Pods that wait for a plan, by zone. Topology spread constraints do not count: the plan decides what they leave.";
    IGNORED_PODS = karpenter "scheduler_ignored_pods_count", Kind::Gauge, Leader, [],
        "Pods without a node whose spec is invalid: no plan takes them.";
    CLUSTER_STATE_SYNCED = karpenter "cluster_state_synced", Kind::Gauge, Leader, [],
        "1 while the watched state is new enough to remove nodes by it, otherwise 0.";
    CLUSTER_STATE_UNSYNCED_SECONDS = karpenter "cluster_state_unsynced_time_seconds", Kind::Gauge, Leader, [],
        "Age of the oldest watch that is too old for that, in seconds; 0 while the state is new enough.";
    CLUSTER_STATE_NODES = karpenter "cluster_state_node_count", Kind::Gauge, Leader, [],
        "Nodes of the cluster, and NodeClaims without one.";
    CLUSTER_UTILIZATION = karpenter "cluster_utilization_percent", Kind::Gauge, Leader, ["resource_type": "resource in snake case, such as `cpu` or `ephemeral_storage`"],
        "Percentage of what all nodes have allocatable that pods request.";
    NODEPOOLS_USAGE = karpenter "nodepools_usage", Kind::Gauge, Leader, ["resource_type": "as above, and `nodes`", "nodepool": "name of the NodePool"],
        "Capacity of the nodes of a NodePool, as its status has it; CPU in cores.";
    NODEPOOLS_LIMIT = karpenter "nodepools_limit", Kind::Gauge, Leader, ["resource_type": "as above", "nodepool": "name of the NodePool"],
        "`spec.limits` of a NodePool; CPU in cores.";
    NODEPOOLS_ALLOWED_DISRUPTIONS = karpenter "nodepools_allowed_disruptions", Kind::Gauge, Leader, ["nodepool": "name of the NodePool", "reason": "`Underutilized`, `Empty`, `Drifted`"],
        "Nodes of a NodePool that its budgets allow to be disrupted at a time; 2147483647 without a budget.";
    NODEPOOLS_CONSUMING = karpenter "nodepools_nodes_consuming_budgets", Kind::Gauge, Leader, ["nodepool": "name of the NodePool", "reason": "as above"],
        "Nodes of a NodePool that its budgets count: leaving or not ready.";
    NODEPOOLS_COST = karpenter "nodepools_cost_total", Kind::Gauge, Leader, ["nodepool": "name of the NodePool"],
        "Prices of the nodes of a NodePool, in USD per hour.";
    USD_PER_HOUR = "usd_per_hour", Kind::Gauge, Leader, [
            "nodepool": "name of the NodePool",
            "capacity_type": "`on-demand`, `spot`, `reserved`",
            "used": "`true`, or `false`: no pod on it needs another node when it is removed",
        ],
        "Prices of the nodes of a NodePool, in USD per hour, by capacity type and whether pods use the node.";
    LEAST_COST = "lower_bound_usd_per_hour", Kind::Gauge, Leader, [],
        "Lower bound on the price of new nodes for all pods that run on nodes of NodePools, in USD per hour, usually half a minute old at most: what is above it in `stowage_usd_per_hour` is the most that consolidation could save. No room on other nodes counts. Absent until it is known, and while the NodePool of a node is not ready.";
    SAVED = "saved_usd_per_hour_total", Kind::Counter, Leader, ["nodepool": "name of the NodePool", "reason": "`empty`, `underutilized`"],
        "Prices of the nodes that consolidation removed less those of the nodes that it purchased for them, in USD per hour.";
    PLANNED_COST = "planned_usd_per_hour_total", Kind::Counter, Leader, [],
        "Prices of the new nodes of plans that have a lower bound, in USD per hour. Nodes that are planned again count again.";
    PLANNED_BOUND = "planned_lower_bound_usd_per_hour_total", Kind::Counter, Leader, [],
        "Lower bounds of these prices: no plan of the same pods costs less.";
    DISRUPTED_UTILIZATION = "disrupted_nodes_utilization_ratio", Kind::Histogram(RATIOS), Leader, ["nodepool": "name of the NodePool", "resource_type": "`cpu`, `memory`"],
        "Share of what a node has allocatable that its pods requested when it was disrupted.";
    ELIGIBLE_NODES = karpenter "voluntary_disruption_eligible_nodes", Kind::Gauge, Leader, ["reason": "`underutilized`, `empty`, `drifted`"],
        "Nodes that may be disrupted but for budgets: quiet ones and empty ones that are not protected, and drifted ones.";
    DECISIONS = karpenter "voluntary_disruption_decisions_total", Kind::Counter, Leader, ["decision": "`delete`, `replace` (by new nodes)", "reason": "`underutilized`, `empty`, `drifted`, and others that nodes are replaced for", "consolidation_type": "`empty`, `single` (one node), `multi`; empty for other reasons"],
        "Decisions of voluntary disruption that began.";
    DECISIONS_BY_POOL = karpenter "voluntary_disruption_decisions_by_nodepool_total", Kind::Counter, Leader, ["nodepool": "name of a NodePool of the nodes", "decision": "as above", "reason": "as above", "consolidation_type": "as above"],
        "Decisions of voluntary disruption that began, once for each NodePool of their nodes.";
    DECISIONS_FAILED = karpenter "voluntary_disruption_queue_failures_total", Kind::Counter, Leader, ["decision": "as above", "reason": "as above", "consolidation_type": "as above"],
        "Decisions of voluntary disruption that were taken back after they began.";
    FAILED_VALIDATIONS = karpenter "voluntary_disruption_failed_validations_total", Kind::Counter, Leader, ["consolidation_type": "as above"],
        "Nodes that were chosen for voluntary disruption and changed before it began.";
    EVALUATION_SECONDS = karpenter "voluntary_disruption_decision_evaluation_duration_seconds", Kind::Histogram(DURATIONS), Leader, ["reason": "as above", "consolidation_type": "`empty`, `multi`; empty for other reasons"],
        "Duration of the choice of nodes for voluntary disruption, in seconds.";
    CONSOLIDATION_TIMEOUTS = karpenter "voluntary_disruption_consolidation_timeouts_total", Kind::Counter, Leader, ["consolidation_type": "`multi`; `single` is always 0"],
        "Searches of consolidation that ran out of time, and took the best nodes so far.";
    PLANS_FAILED = "plans_failed_total", Kind::Counter, Leader, [],
        "Plans that ended in a panic of the planner, which is a defect.";
    PODS_QUARANTINED = "pods_quarantined", Kind::Gauge, Leader, [
            "cause": "`planner_panic`, `nodeclaim_rejected` (both for up to five minutes), `purchased_in_vain` (for up to twenty)",
        ],
        "Pods that need a node and are left out of plans for a while, because a plan with them failed, or because nodes that were purchased for them did not take them, by cause.";
    PURCHASED_IN_VAIN = "purchases_in_vain_total", Kind::Counter, Leader, ["nodepool": "name of the NodePool"],
        "Nodes that did not take a pod that they were purchased for.";
    SUPPLY_QUARANTINED = "supply_quarantined", Kind::Gauge, Leader, ["kind": "`nodepool`, `node`, `daemonset`"],
        "NodePools, nodes and DaemonSets that are left out of plans for up to five minutes, because the planner panics over them, which is a defect.";
    NODECLAIMS_REJECTED = "nodeclaims_rejected_total", Kind::Counter, Leader, ["nodepool": "name of the NodePool"],
        "NodeClaims that the API server, an admission policy or a webhook rejected.";
    DETECT_TO_CLAIM_SECONDS = "detect_to_claim_seconds", Kind::Histogram(RECONCILER_SECONDS), Leader, [],
        "Seconds from observing an unschedulable pod to creating its NodeClaim.";
    POD_WAIT_SECONDS = "pod_wait_seconds", Kind::Histogram(RECONCILER_SECONDS), Leader, [
            "part": "`created_to_call` (from its creation, as the leader observed it, to the call that launched its node), `rejected_to_call` (from its first rejection by kube-scheduler to that call; pods that were rejected before it), `rejected_to_launched` (until the NodeClaim is recorded as launched), `ready_to_bound` (from the time at which its new node is ready)",
        ],
        "Seconds that a pod waits for its new node, by part of the way; the first launch for the pod counts.";
    NODECLAIMS_CREATED = both "nodeclaims_created_total", Kind::Counter, Leader, [
            "reason": "`provisioned`; of a replacement why the node is disrupted, such as `underutilized` or `drifted`",
            "nodepool": "name of the NodePool",
            "min_values_relaxed": "`true`, `false`",
        ],
        "NodeClaims created, by reason, NodePool and whether minValues were lowered.";
    NODECLAIMS_DISRUPTED = both "nodeclaims_disrupted_total", Kind::Counter, Leader, [
            "reason": "`empty`, `underutilized`, `drifted`, `expired`, `unhealthy`, `spot_interrupted`, `capacity_reservation_interrupted`, `scheduled_change`, `instance_stopped`, `instance_terminated`, `event_status`, `instance_status`, `system_status`, `insufficient_capacity`, `nodeclass_not_ready`, `launch_timeout`, `registration_timeout`, `initialization_timeout`, `garbage_collected`, `capacity_block_expiring`, `unknown` (a disruption that another program marked)",
            "nodepool": "name of the NodePool",
            "capacity_type": "`on-demand`, `spot`, `reserved`; empty before the launch",
            "consolidation_policy": "of the reasons `empty` and `underutilized`, otherwise empty",
            "termination_mode": "`graceful` without a `terminationGracePeriod`, `forceful` with one of 0, otherwise `eventual`",
        ],
        "NodeClaims disrupted, by reason, NodePool, capacity type, consolidation policy and termination mode.";
    NODECLAIMS_UNHEALTHY_DISRUPTED = both "nodeclaims_unhealthy_disrupted_total", Kind::Counter, Leader, [
            "condition": "type of the unhealthy condition of the Node, such as `ready`",
            "nodepool": "name of the NodePool",
            "capacity_type": "`on-demand`, `spot`, `reserved`",
            "image_id": "image of the instance",
        ],
        "NodeClaims deleted because a condition of their Node was unhealthy, by condition, NodePool, capacity type and image.";
    NODECLAIMS_TERMINATED = karpenter "nodeclaims_terminated_total", Kind::Counter, Leader, [
            "nodepool": "name of the NodePool",
            "capacity_type": "`on-demand`, `spot`, `reserved`; empty before the launch",
            "zone": "zone name; empty before the launch",
        ],
        "NodeClaims whose instance is terminated, by NodePool, capacity type and zone.";
    NODECLAIMS_TERMINATION_SECONDS = karpenter "nodeclaims_termination_duration_seconds", Kind::Histogram(TERMINATION_SECONDS), Leader, [
            "nodepool": "name of the NodePool",
        ],
        "Seconds from the deletion of a NodeClaim to the removal of its finalizer, drain included.";
    INSTANCE_TERMINATION_SECONDS = karpenter "nodeclaims_instance_termination_duration_seconds", Kind::Histogram(TERMINATION_SECONDS.split_at(11).0), Leader, [
            "nodepool": "name of the NodePool",
        ],
        "Seconds from the call that terminates an instance to its end.";
    NODES_CREATED = both "nodes_created_total", Kind::Counter, Leader, [
            "nodepool": "name of the NodePool",
            "zone": "zone name",
        ],
        "Nodes that registered, by NodePool and zone.";
    NODES_TERMINATED = karpenter "nodes_terminated_total", Kind::Counter, Leader, [
            "nodepool": "name of the NodePool",
            "zone": "zone name",
        ],
        "Nodes whose instance is terminated, by NodePool and zone.";
    NODES_DRAINED = karpenter "nodes_drained_total", Kind::Counter, Leader, ["nodepool": "name of the NodePool"],
        "Nodes that were drained, by NodePool.";
    NODES_LIFETIME_SECONDS = karpenter "nodes_lifetime_duration_seconds", Kind::Histogram(LIFETIME_SECONDS), Leader, ["nodepool": "name of the NodePool"],
        "Seconds from the creation of a Node to the end of its instance.";
    NODES_TERMINATION_SECONDS = karpenter "nodes_termination_duration_seconds", Kind::Summary, Leader, ["nodepool": "name of the NodePool"],
        "Seconds from the deletion of a Node to the removal of its finalizer; the quantiles 0, 0.5, 0.9, 0.95, 0.99 and 1 are of the last ten minutes.";
    PODS_DECISION_SECONDS = karpenter "pods_scheduling_decision_duration_seconds", Kind::Histogram(DURATIONS), Leader, [],
        "Seconds from the first rejection of a pod by the scheduler to the first plan that decides on it.";
    PODS_BOUND_SECONDS = karpenter "pods_bound_duration_seconds", Kind::Histogram(DURATIONS), Leader, [],
        "Seconds from the creation of a pod until it was bound.";
    PODS_STARTUP_SECONDS = karpenter "pods_startup_duration_seconds", Kind::Summary, Leader, [],
        "Seconds from the creation of a pod until it was ready; quantiles as above.";
    PODS_PLANNED_BOUND_SECONDS = karpenter "pods_provisioning_bound_duration_seconds", Kind::Histogram(DURATIONS), Leader, [],
        "Seconds from the first plan that has a node for a pod until the pod was bound.";
    PODS_PLANNED_STARTUP_SECONDS = karpenter "pods_provisioning_startup_duration_seconds", Kind::Histogram(DURATIONS), Leader, [],
        "Seconds from that plan until the pod was ready.";
    PODS_DISRUPTED = karpenter "pods_disruption_initiated_total", Kind::Counter, Leader, ["reason": "as of `karpenter_nodeclaims_disrupted_total`", "nodepool": "as above", "capacity_type": "as above", "consolidation_policy": "as above", "termination_mode": "as above"],
        "Pods that need another node, on the nodes of disrupted NodeClaims.";
    STEPS_PANICKED = "lifecycle_step_panics_total", Kind::Counter, Leader, [],
        "Steps of a NodeClaim's lifecycle that panicked, which is a defect. The step is retried after 30 s; other NodeClaims are not affected.";
    NOMINATIONS = "nominations_total", Kind::Counter, Leader, [],
        "Attempts to write a nomination into a pod's status.";
    HOLDS_ENDED = "holds_ended_total", Kind::Counter, Leader, [
            "result": "`planned` (bound to the planned node), `elsewhere` (bound to another node), `stray` (the successor of a displaced pod, bound to another node before it had the hold), `released` (no pod takes the room)",
            "reason": "of `elsewhere`: `no_node` (the planned node did not exist so far), `not_ready` (it was not ready), `chosen` (kube-scheduler chose another one); of `released`: `pod_gone`, `node_gone`, `expired` (the pod still waits), `replanned`; otherwise empty",
        ],
        "Holds that ended, by result and reason.";
    PODS_PLANNED_UNATTEMPTED = "pods_planned_unattempted_total", Kind::Counter, Leader, [
            "result": "`planned` (bound to the planned node), `elsewhere` (bound to another node)",
        ],
        "Bound pods that had been planned before kube-scheduler attempted them, by where they were bound.";
    EVICTION_REQUESTS = karpenter "pods_eviction_requests_total", Kind::Counter, Leader, ["code": "status code of the response; empty without one"],
        "Eviction API requests, by code.";
    PODS_DRAINED = karpenter "pods_drained_total", Kind::Counter, Leader, ["reason": "why the NodeClaim is disrupted, such as `Underutilized`, otherwise `Forceful Termination`"],
        "Pods that were evicted from nodes that are terminated, by reason.";
    EVICTIONS = "evictions_total", Kind::Counter, Leader, [
            "result": "`ok`, `refused` (by a PodDisruptionBudget), `failed`",
        ],
        "Eviction API requests, by result.";
    GARBAGE_COLLECTED = "garbage_collected_total", Kind::Counter, Leader, [
            "kind": "`instance`, `nodeclaim`, `node`",
        ],
        "Orphaned objects removed, by kind.";
    STALE_DECISIONS = "stale_decisions_total", Kind::Counter, Leader, [
            "decision": "`disruption`, `departure`, `expiration`, `garbage_collection`, `repair`, `abandonment`",
        ],
        "Passes without removals because a watch that they depend on was older than 60 seconds.";
    DRAINS_RESUMED = "drains_resumed_total", Kind::Counter, Leader, [],
        "Nodes that the watch showed as drained, and on which the API server still had pods.";
    CLOUD_STARTS_FAILED = "cloud_starts_failed_total", Kind::Counter, Leader, [],
        "Failed attempts of the leader to connect to its cloud.";
    INSTANCES_UNHEALTHY = both "interruption_instance_status_unhealthy_total", Kind::Counter, Leader, [
            "category": "`instance_status`, `system_status`, `event_status`",
        ],
        "Unhealthy instances reported by EC2, counted once per occurrence.";
    PAUSED = "paused", Kind::Gauge, Leader, ["scope": "`provisioning`, `disruption`; `report` while disruption is paused and what it would do is reported"],
        "1 while the emergency stop pauses a scope, otherwise 0.";
    CONSOLIDATION_NODES = "consolidation_nodes", Kind::Gauge, Leader, ["blocker": "why the nodes stay, see [consolidation](../disruption.md#why-a-node-stays); `none`: they are removed"],
        "NodeClaims by what the last decision of consolidation found about them.";
    CONSOLIDATION_MOVES = both "consolidation_moves_total", Kind::Counter, Leader, [
            "decision": "`approved`: it begins; `rejected`: by itself it does not save enough",
            "nodepool": "name of the NodePool of a removed node",
            "policy": "its `consolidationPolicy`",
        ],
        "Moves of consolidation that were planned, once for each NodePool that they remove nodes of.";
    CONSOLIDATION_SCORE = both "consolidation_score", Kind::Histogram(SCORES), Leader, [
            "decision": "`approved` from a score of 0.5 on, else `rejected`",
            "nodepool": "name of the NodePool",
            "policy": "always `Balanced`",
        ],
        "Scores of moves of consolidation under the policy `Balanced`.";
    RATE_CAPPED = "rate_capped_total", Kind::Counter, Leader, ["action": "`purchase`, `disruption`"],
        "Nodes that waited since the cap per minute was reached, counted at each attempt.";
    SPOT_INTERRUPTIONS = "spot_interruptions_total", Kind::Counter, Leader, ["instance_type": "name of the instance type", "zone": "zone name", "nodepool": "name of the NodePool"],
        "Nodes with a spot interruption warning.";
    MESSAGES_REFUSED = "interruption_refused_messages_total", Kind::Counter, Leader, [
            "message_type": "`spot_interrupted`, `capacity_reservation_interrupted`, `scheduled_change`, `instance_stopped`, `instance_terminated`",
            "reason": "`running` (EC2 describes the instance as running a minute after the event), `wrong_capacity_type` (such as a spot interruption of an on-demand instance), `too_many` (unconfirmed warnings drained as many nodes in a minute as they may; the message is redelivered)",
        ],
        "Messages of the interruption queue that had no effect since they are not confirmed: forged messages, unless the reason is `too_many`.";
    CLAIM_TRANSITIONS = operator "nodeclaim_status_condition_transitions_total", Kind::Counter, Leader, ["type": "type of the condition", "status": "`True`, `False`, `Unknown`", "reason": "of the condition", "karpenter_k8s_aws_ec2nodeclass": "label of the NodeClaim", "karpenter_sh_nodepool": "label of the NodeClaim"],
        "Transitions of conditions of NodeClaims to a status, as observed once a second.";
    CLAIM_TRANSITION_SECONDS = operator "nodeclaim_status_condition_transition_seconds", Kind::Histogram(CONDITION_SECONDS), Leader, ["type": "type of the condition", "status": "before the transition: `True`, `False`, `Unknown`", "karpenter_k8s_aws_ec2nodeclass": "label of the NodeClaim", "karpenter_sh_nodepool": "label of the NodeClaim"],
        "Seconds that conditions of NodeClaims had a status, observed when it ended.";
    CLAIM_TERMINATION_SECONDS = operator "nodeclaim_termination_duration_seconds", Kind::Histogram(CONDITION_SECONDS), Leader, ["karpenter_k8s_aws_ec2nodeclass": "label of the NodeClaim", "karpenter_sh_nodepool": "label of the NodeClaim"],
        "Seconds from the deletion of a NodeClaim until it was gone.";
    POOL_TRANSITIONS = operator "nodepool_status_condition_transitions_total", Kind::Counter, Leader, ["type": "type of the condition", "status": "`True`, `False`, `Unknown`", "reason": "of the condition"],
        "Transitions of conditions of NodePools to a status, as observed once a second.";
    POOL_TRANSITION_SECONDS = operator "nodepool_status_condition_transition_seconds", Kind::Histogram(CONDITION_SECONDS), Leader, ["type": "type of the condition", "status": "before the transition: `True`, `False`, `Unknown`"],
        "Seconds that conditions of NodePools had a status, observed when it ended.";
    POOL_TERMINATION_SECONDS = operator "nodepool_termination_duration_seconds", Kind::Histogram(CONDITION_SECONDS), Leader, [],
        "Seconds from the deletion of a NodePool until it was gone.";
    NODE_TRANSITIONS = operator "node_status_condition_transitions_total", Kind::Counter, Leader, ["type": "type of the condition", "status": "`True`, `False`, `Unknown`", "reason": "of the condition", "karpenter_k8s_aws_ec2nodeclass": "label of the Node", "karpenter_sh_nodepool": "label of the Node", "karpenter_sh_initialized": "label of the Node"],
        "Transitions of conditions of Nodes to a status, as observed once a second.";
    NODE_TRANSITION_SECONDS = operator "node_status_condition_transition_seconds", Kind::Histogram(CONDITION_SECONDS), Leader, ["type": "type of the condition", "status": "before the transition: `True`, `False`, `Unknown`", "karpenter_k8s_aws_ec2nodeclass": "label of the Node", "karpenter_sh_nodepool": "label of the Node", "karpenter_sh_initialized": "label of the Node"],
        "Seconds that conditions of Nodes had a status, observed when it ended.";
    NODE_TERMINATION_SECONDS = operator "node_termination_duration_seconds", Kind::Histogram(CONDITION_SECONDS), Leader, ["karpenter_k8s_aws_ec2nodeclass": "label of the Node", "karpenter_sh_nodepool": "label of the Node", "karpenter_sh_initialized": "label of the Node"],
        "Seconds from the deletion of a Node until it was gone.";
    CLASS_TRANSITIONS = operator "ec2nodeclass_status_condition_transitions_total", Kind::Counter, Leader, ["type": "type of the condition", "status": "`True`, `False`, `Unknown`", "reason": "of the condition"],
        "Transitions of conditions of EC2NodeClasses to a status, as observed once a second.";
    CLASS_TRANSITION_SECONDS = operator "ec2nodeclass_status_condition_transition_seconds", Kind::Histogram(STANDARD_SECONDS), Leader, ["type": "type of the condition", "status": "before the transition: `True`, `False`, `Unknown`"],
        "Seconds that conditions of EC2NodeClasses had a status, observed when it ended.";
    CLASS_TERMINATION_SECONDS = operator "ec2nodeclass_termination_duration_seconds", Kind::Histogram(STANDARD_SECONDS), Leader, [],
        "Seconds from the deletion of an EC2NodeClass until it was gone.";

    NODES_ALLOCATABLE = karpenter "nodes_allocatable", Kind::Gauge, Objects, ["resource_type": "resource in snake case, such as `cpu`", "node_name": "name of the Node", "managed": "whether it has a NodeClaim: `true`, `false`", "nodepool": "name of the NodePool", "…": "`phase`, and the other well-known labels of the Node in snake case, such as `zone`, `instance_type`, `arch`, `capacity_type`; without a value they are left out"],
        "What a node has allocatable; CPU in cores.";
    NODES_POD_REQUESTS = karpenter "nodes_total_pod_requests", Kind::Gauge, Objects, ["…": "as above"],
        "What the pods on a node request, those of DaemonSets included; CPU in cores.";
    NODES_POD_LIMITS = karpenter "nodes_total_pod_limits", Kind::Gauge, Objects, ["…": "as above"],
        "Limits of the pods on a node, those of DaemonSets included; CPU in cores.";
    NODES_DAEMON_REQUESTS = karpenter "nodes_total_daemon_requests", Kind::Gauge, Objects, ["…": "as above"],
        "What the pods of DaemonSets on a node request; CPU in cores.";
    NODES_DAEMON_LIMITS = karpenter "nodes_total_daemon_limits", Kind::Gauge, Objects, ["…": "as above"],
        "Limits of the pods of DaemonSets on a node; CPU in cores.";
    NODES_OVERHEAD = karpenter "nodes_system_overhead", Kind::Gauge, Objects, ["…": "as above"],
        "Capacity of a node less what is allocatable; CPU in cores.";
    NODES_LIFETIME = karpenter "nodes_current_lifetime_seconds", Kind::Gauge, Objects, ["…": "as above, without `resource_type`"],
        "Age of a node, in seconds.";
    PODS_STATE = karpenter "pods_state", Kind::Gauge, Objects, ["name": "name of the pod", "namespace": "its namespace", "owner": "path of its first owner", "node": "name of its node", "scheduled": "whether it has one: `true`, `false`", "phase": "`Pending`, `Running`, `Succeeded`, `Failed`, `Unknown`", "ready": "`true`, `false`", "managed": "whether its node has a NodePool: `true`, `false`", "nodepool": "of its node; without a value it is left out, as the following", "zone": "of its node", "arch": "of its node", "capacity_type": "of its node", "instance_type": "of its node"],
        "Always 1.";
    PODS_UNBOUND = karpenter "pods_unbound_time_seconds", Kind::Gauge, Objects, ["name": "name of the pod", "namespace": "its namespace"],
        "Seconds since the creation of a pod that has no node.";
    PODS_UNSTARTED = karpenter "pods_unstarted_time_seconds", Kind::Gauge, Objects, ["name": "as above", "namespace": "as above"],
        "Seconds since the creation of a pod that was observed pending and is not ready so far.";
    PODS_PLANNED_UNBOUND = karpenter "pods_provisioning_unbound_time_seconds", Kind::Gauge, Objects, ["name": "as above", "namespace": "as above"],
        "Seconds since the first plan that has a node for a pod, while the pod has none. The leader remembers the plan; another one does not know it.";
    PODS_PLANNED_UNSTARTED = karpenter "pods_provisioning_unstarted_time_seconds", Kind::Gauge, Objects, ["name": "as above", "namespace": "as above"],
        "Seconds since that plan, while the pod is not ready.";
    PODS_UNDECIDED = karpenter "pods_provisioning_scheduling_undecided_time_seconds", Kind::Gauge, Objects, ["name": "as above", "namespace": "as above"],
        "Seconds since the scheduler rejected a pod, until a plan decides on it.";
    CLAIM_CONDITION_COUNT = operator "nodeclaim_status_condition_count", Kind::Gauge, Objects, ["name": "name of the NodeClaim", "type": "type of the condition", "status": "`True`, `False`, `Unknown`", "reason": "of the condition", "karpenter_k8s_aws_ec2nodeclass": "label of the NodeClaim", "karpenter_sh_nodepool": "label of the NodeClaim"],
        "1 for each condition of each NodeClaim.";
    CLAIM_CONDITION_SECONDS = operator "nodeclaim_status_condition_current_status_seconds", Kind::Gauge, Objects, ["…": "as above"],
        "Seconds since the last transition of the condition.";
    CLAIM_TERMINATING_SECONDS = operator "nodeclaim_termination_current_time_seconds", Kind::Gauge, Objects, ["name": "name of the NodeClaim", "karpenter_k8s_aws_ec2nodeclass": "label of the NodeClaim", "karpenter_sh_nodepool": "label of the NodeClaim"],
        "Seconds since the deletion of a NodeClaim that is still there.";
    POOL_CONDITION_COUNT = operator "nodepool_status_condition_count", Kind::Gauge, Objects, ["name": "name of the NodePool", "type": "type of the condition", "status": "`True`, `False`, `Unknown`", "reason": "of the condition"],
        "1 for each condition of each NodePool.";
    POOL_CONDITION_SECONDS = operator "nodepool_status_condition_current_status_seconds", Kind::Gauge, Objects, ["…": "as above"],
        "Seconds since the last transition of the condition.";
    POOL_TERMINATING_SECONDS = operator "nodepool_termination_current_time_seconds", Kind::Gauge, Objects, ["name": "name of the NodePool"],
        "Seconds since the deletion of a NodePool that is still there.";
    NODE_CONDITION_COUNT = operator "node_status_condition_count", Kind::Gauge, Objects, ["name": "name of the Node", "type": "type of the condition", "status": "`True`, `False`, `Unknown`", "reason": "of the condition", "karpenter_k8s_aws_ec2nodeclass": "label of the Node", "karpenter_sh_nodepool": "label of the Node", "karpenter_sh_initialized": "label of the Node"],
        "1 for each condition of each Node.";
    NODE_CONDITION_SECONDS = operator "node_status_condition_current_status_seconds", Kind::Gauge, Objects, ["…": "as above"],
        "Seconds since the last transition of the condition.";
    NODE_TERMINATING_SECONDS = operator "node_termination_current_time_seconds", Kind::Gauge, Objects, ["name": "name of the Node", "karpenter_k8s_aws_ec2nodeclass": "label of the Node", "karpenter_sh_nodepool": "label of the Node", "karpenter_sh_initialized": "label of the Node"],
        "Seconds since the deletion of a Node that is still there.";
    CLASS_CONDITION_COUNT = operator "ec2nodeclass_status_condition_count", Kind::Gauge, Objects, ["name": "name of the EC2NodeClass", "type": "type of the condition", "status": "`True`, `False`, `Unknown`", "reason": "of the condition"],
        "1 for each condition of each EC2NodeClass.";
    CLASS_CONDITION_SECONDS = operator "ec2nodeclass_status_condition_current_status_seconds", Kind::Gauge, Objects, ["…": "as above"],
        "Seconds since the last transition of the condition.";
    CLASS_TERMINATING_SECONDS = operator "ec2nodeclass_termination_current_time_seconds", Kind::Gauge, Objects, ["name": "name of the EC2NodeClass"],
        "Seconds since the deletion of an EC2NodeClass that is still there.";

    CLOUD_DURATION = both "cloudprovider_duration_seconds", Kind::Histogram(CLOUD_SECONDS), Ec2, [
            "controller": "`nodeclaim.lifecycle`, `nodeclaim.garbagecollection`: Karpenter's names of what makes the call",
            "method": "`Create`, `Get`, `List`, `Delete`",
            "provider": "`aws`",
        ],
        "Duration of cloud provider method calls in seconds, waits for the client's rate limit and for a batch included.";
    CLOUD_ERRORS = both "cloudprovider_errors_total", Kind::Counter, Ec2, [
            "controller": "as above",
            "method": "`Create`, `Get`, `List`, `Delete`",
            "provider": "`aws`",
            "error": "`InsufficientCapacityError`, `NodeClassNotReadyError`, otherwise empty",
        ],
        "Cloud provider method calls that failed.";
    BATCH_SECONDS = both "cloudprovider_batcher_batch_time_seconds", Kind::Histogram(CLOUD_SECONDS), Ec2, [
            "batcher": "`describe_instances`, `find_instances` (instances of a NodeClaim that names none), `terminate_instances`, `describe_spot_instance_requests`",
        ],
        "Time that a batch of requests was open before its call, in seconds.";
    BATCH_SIZE = both "cloudprovider_batcher_batch_size", Kind::Histogram(BATCH_SIZES), Ec2, [
            "batcher": "as above",
        ],
        "Requests per batched call.";
    LAUNCH_FAILURES = both "cloudprovider_instance_launch_failures_total", Kind::Counter, Ec2, [
            "zone": "zone name",
            "zone_id": "zone id",
            "capacity_type": "`on-demand`, `spot`, `reserved`",
            "reason": "as in the condition `Launched`",
        ],
        "Offerings for which a launch failed, by reason.";
    TERMINATION_FAILURES = both "cloudprovider_instance_termination_failures_total", Kind::Counter, Ec2, [
            "zone": "zone name",
            "zone_id": "zone id",
        ],
        "Instance terminations that failed.";
    TYPE_CPUS = both "cloudprovider_instance_type_cpu_cores", Kind::Gauge, Ec2, ["instance_type": "name of the instance type"],
        "vCPUs of an instance type that the region offers.";
    TYPE_MEMORY = both "cloudprovider_instance_type_memory_bytes", Kind::Gauge, Ec2, ["instance_type": "name of the instance type"],
        "Memory of an instance type that the region offers, before any overhead, in bytes.";
    OFFERING_AVAILABLE = both "cloudprovider_instance_type_offering_available", Kind::Gauge, Ec2, [
            "instance_type": "name of the instance type",
            "capacity_type": "`on-demand`, `spot`, `reserved` (with the gate ReservedCapacity)",
            "zone": "zone name",
        ],
        "1 unless the offering recently had insufficient capacity, or, for reserved offerings, no reservation has room.";
    OFFERING_PRICE = both "cloudprovider_instance_type_offering_price_estimate", Kind::Gauge, Ec2, [
            "instance_type": "name of the instance type",
            "capacity_type": "as above; `reserved` only where there is a reservation",
            "zone": "zone name",
        ],
        "Estimated price of an offering in USD per hour.";
    USER_DATA_BYTES = both "ec2nodeclasses_userdata_bytes", Kind::Gauge, Ec2, ["nodeclass": "name of the EC2NodeClass"],
        "User data of the class's nodes at the last validation, in bytes before base64; EC2 accepts 16384.";
    INTERRUPTION_READS = "interruption_reads_total", Kind::Counter, Ec2, ["result": "`ok`, `error`"],
        "Reads of the interruption queue, each of which waits up to 20 s for messages. Absent without a queue.";
    MESSAGES_RECEIVED = both "interruption_received_messages_total", Kind::Counter, Ec2, [
            "message_type": "`spot_interrupted`, `rebalance_recommendation`, `capacity_reservation_interrupted`, `scheduled_change`, `instance_stopped`, `instance_terminated`; without effect: `no_op`, `malformed`, `foreign` (of another account or region)",
        ],
        "Messages received from the interruption queue.";
    MESSAGES_DELETED = both "interruption_deleted_messages_total", Kind::Counter, Ec2, [],
        "Messages deleted from the interruption queue.";
    MESSAGE_SECONDS = both "interruption_message_queue_duration_seconds", Kind::Histogram(CLOUD_SECONDS), Ec2, [],
        "Seconds from an event to the receipt of its message.";
    EC2_REQUESTS = "ec2_requests_total", Kind::Counter, Ec2, ["action": "name of the EC2 action"],
        "EC2 API requests, retries included.";

    EXTENDER_REQUESTS = "extender_requests_total", Kind::Counter, Serving, [
            "verb": "`filter`, `prioritize`, `preempt`",
            "code": "HTTP status",
        ],
        "Extender requests.";
    EXTENDER_SECONDS = "extender_seconds", Kind::Histogram(VERDICT_SECONDS), Serving, ["verb": "as above"],
        "Seconds from reading the whole body of an extender request to its answer.";
    FILTER_DENIED = "filter_denied_total", Kind::Counter, Serving, ["reason": "`planned_elsewhere`, `waiting_for_node`, `room_reserved`, `disrupting`"],
        "Nodes denied by filter.";
    EXTENDER_STALE = "extender_stale_total", Kind::Counter, Serving, [],
        "Extender requests answered without restraint because the view was older than 60 seconds.";
    PREEMPT_DROPPED = "preempt_dropped_total", Kind::Counter, Serving, ["reason": "as above"],
        "Preemption candidates dropped.";
    WEBHOOK_REQUESTS = "webhook_requests_total", Kind::Counter, Serving, [
            "result": "`exempt`, `unchanged`, `patched`, `doubtful` (a patch that was not sent, a defect), or an HTTP status",
        ],
        "Admission reviews, by result.";
    WEBHOOK_SECONDS = "webhook_seconds", Kind::Histogram(VERDICT_SECONDS), Serving, [],
        "Seconds from reading the whole body of an admission review to its answer.";
    WEBHOOK_RULES = "webhook_rule_total", Kind::Counter, Serving, ["rule": "id of the admission rule"],
        "Pods that an admission rule changed.";
    CERT_EXPIRY = "cert_expiry_seconds", Kind::Gauge, Serving, ["certificate": "`serving` (with its intermediates), `client_ca`, `webhook_client_ca`"],
        "Seconds until the first of these certificates expires; negative afterwards.";
    CERT_RELOADS = "cert_reloads_total", Kind::Counter, Serving, ["result": "`ok`, `error`"],
        "Certificate reloads, by result.";
    HANDLER_PANICS = "handler_panics_total", Kind::Counter, Serving, [],
        "Requests answered 500 because their handler panicked, which is a defect.";
    CONNECTIONS = "connections", Kind::Gauge, Serving, ["listener": "`https`, `metrics`, `health`"],
        "Open connections.";
    CONNECTIONS_CLOSED = "connections_closed_total", Kind::Counter, Serving,
        [
            "listener": "as above",
            "reason": "`evicted` (for a connection of another peer, with 1,024 open), `refused` (with 1,024 open), `idle` (no request in time)",
        ],
        "Connections that the server closed because of a limit.";
    REQUESTS_IN_FLIGHT = "requests_in_flight", Kind::Gauge, Serving, [],
        "HTTPS requests whose head is read and that are not answered yet.";
    STATE_OBJECTS = "state_objects", Kind::Gauge, Serving,
        [
            "table": "`pods`, `nodes`, `nodeclaims`, `owners`, `pod_events`, `node_changes`, `claim_changes`, `interned_classes`, \
                `interned_labels`, `interned_names`",
        ],
        "Entries of the tables of watched objects and of what is derived from them.";
    API_REQUESTS = "apiserver_requests_total", Kind::Counter, Serving, [
            "verb": "`get`, `list`, `watch`, `create`, `update`, `patch`, `delete`",
            "resource": "plural name, with the subresource after a slash",
            "code": "HTTP status, or `none` without a response",
        ],
        "Requests to the API server, retries included.";
    API_SECONDS = "apiserver_request_seconds", Kind::Histogram(RECONCILER_SECONDS), Serving, ["verb": "as above", "resource": "as above"],
        "Seconds from sending a request to the API server to the head of its response.";
    WATCH_AGE = "watch_age_seconds", Kind::Gauge, Serving, ["kind": "plural name of the watched kind"],
        "Seconds since the last event or bookmark of a watch. Beyond 60 nothing is removed because of it, and the extender restrains no pod.";
    WATCH_LISTS = "watch_lists_total", Kind::Counter, Serving, ["kind": "plural name of the watched kind"],
        "Complete lists of a watched kind: one at the start, others after the API server compacted its history.";
    LOOP_TURN = "loop_turn_seconds", Kind::Gauge, Serving, ["loop": "name of the loop; watches have the name of their kind"],
        "Seconds that the present turn of a loop takes, since its last response of the API server; 0 between two turns. /livez fails beyond the limit of the loop.";
    LOOP_PANICS = "loop_panics_total", Kind::Counter, Serving, ["loop": "as above"],
        "Panics of a loop, which are defects. The loop starts over after a second to a minute; a watch leaves the object out, and nothing is removed because of its kind meanwhile.";
    TURNS = plain "controller_runtime_reconcile_total", Kind::Counter, Serving, ["controller": "name of the loop", "result": "`success`; `error` after a panic"],
        "Turns of loops that ended. Loops correspond to controllers of Karpenter, but other ones; `provisioner` and `disruption` are in both.";
    TURN_SECONDS = plain "controller_runtime_reconcile_time_seconds", Kind::Histogram(DURATIONS.split_at(40).0), Serving, ["controller": "as above"],
        "Duration of the turns of a loop, in seconds.";
    LEADER = "leader", Kind::Gauge, Serving, [],
        "1 while this replica leads.";
    LEADER_STATUS = plain "leader_election_master_status", Kind::Gauge, Serving, ["name": "name of the Lease"],
        "1 while this replica leads, otherwise 0.";
    LEASE_TRANSITIONS = "lease_transitions", Kind::Gauge, Serving, [],
        "Changes of the leader since the Lease was created, as this replica last read it.";
    OTHER_LEADER = "other_leader", Kind::Gauge, Serving, [],
        "1 while this replica does not lead because another controller of the same NodeClaims does, such as Karpenter with a Lease in another namespace.";
    PODS_PENDING = "pods_pending", Kind::Gauge, Serving, [],
        "Pods that the scheduler rejected and that need a node.";
    PODS_PENDING_AGE = "pods_pending_oldest_seconds", Kind::Gauge, Serving, [],
        "Seconds since the oldest of these pods was rejected; 0 without one.";
    NODES_LEAVING = "nodes_leaving", Kind::Gauge, Serving, [
            "reason": "`deleted` (without the annotation `stowage.dev/disrupting`: by a person, or for a reason without replacement), otherwise as of `stowage_nodeclaims_disrupted_total`",
        ],
        "NodeClaims that are deleted or marked for disruption, by reason.";
    NODES_LEAVING_AGE = "nodes_leaving_oldest_seconds", Kind::Gauge, Serving, [],
        "Seconds since the oldest of the deleted ones was deleted; 0 without one.";
    BUILD_INFO = both "build_info", Kind::Gauge, Serving, [
            "version": "version of the binary",
            "goversion": "always empty",
            "goarch": "architecture of the binary: `amd64`, `arm64`",
            "commit": "always empty",
        ],
        "Always 1.";
    READY = "ready", Kind::Gauge, Serving, [],
        "1 when /readyz answers 200, as of the last probe or scrape.";
}

/// The names under which a metric of the registry is published: its own, Karpenter's, or both.
pub fn published(name: &str, names: MetricNames) -> impl Iterator<Item = &str> {
    let karpenter = ALL.iter().find(|metric| metric.name == name).and_then(|metric| metric.karpenter);
    let own = (karpenter.is_none() || names != MetricNames::Karpenter).then_some(name);
    own.into_iter().chain(karpenter.filter(|_| names != MetricNames::Stowage))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prometheus::core::Collector;

    use super::*;
    use crate::telemetry::Metrics;
    use crate::telemetry::cloud_metrics::CloudMetrics;
    use crate::telemetry::controllers::ControllerMetrics;

    #[test]
    fn every_declared_metric_is_registered_by_its_family() {
        let metrics = Metrics::new();
        let registry = metrics.registry();
        ControllerMetrics::new(registry).unwrap();
        CloudMetrics::new().register(registry, |_| {}).unwrap();
        // No collector keeps the series of nodes and pods.
        for metric in ALL.iter().filter(|metric| metric.source != Source::Objects) {
            let again: Box<dyn Collector> = match metric.kind {
                Kind::Counter => Box::new(metric.counters()),
                Kind::Gauge => Box::new(metric.gauges()),
                Kind::Histogram(_) => Box::new(metric.histograms()),
                Kind::Summary => Box::new(metric.summaries()),
            };
            let Err(refused) = registry.register(again) else {
                panic!("{} has no collector: create it in metrics.rs, controllers.rs or cloud.rs", metric.name)
            };
            assert!(matches!(refused, prometheus::Error::AlreadyReg), "{}: {refused}", metric.name);
        }
    }

    #[test]
    fn names_and_help_follow_the_conventions() {
        let names: BTreeSet<&str> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), ALL.len(), "two metrics share a name");
        for metric in ALL {
            assert!(
                ["stowage_", "karpenter_", "operator_", "controller_runtime_", "leader_election_"]
                    .iter()
                    .any(|prefix| metric.name.starts_with(prefix)),
                "{}",
                metric.name
            );
            // Karpenter's name of a gauge.
            let total = metric.name.ends_with("_total") && metric.name != "karpenter_nodepools_cost_total";
            let counter = metric.kind == Kind::Counter;
            assert_eq!(counter, total, "{}: counters, and no others, end in _total", metric.name);
            assert!(metric.help.ends_with('.'), "{}: the help text is no sentence: {}", metric.name, metric.help);
            assert!(
                metric.labels.iter().all(|(name, values)| !name.is_empty() && !values.is_empty()),
                "{}",
                metric.name
            );
        }
    }
}
