"""Log messages of Stowage that the tests and the demo search for, in one place: a reworded message changes here only. messages_test.py
compares them with the source."""

PLANNED = "planned"
PLANNED_NODE = "planned node"
LAUNCHED = "launched nodeclaim"
CLAIMS_WRITTEN = "node claims written"
FLEET_REQUESTED = "calling CreateFleet"
LOG_LEVEL_CHANGED = "log level changed"
INSTANCE_GONE = "deleting node claim without instance"
DRAINING = "draining node"
# The fields that the tests and the demo read, by their names in the source. In the log, some have those of Karpenter (src/cli/controller/log_lines.rs).
OFFERING = ("instance_type", "zone", "capacity_type", "usd_per_hour")
FIELDS = {
    PLANNED: ("pods", "nodes", "on_existing", "later", "usd_per_hour", "gap", "solve_ms"),
    PLANNED_NODE: OFFERING,
    LAUNCHED: ("claim", "called_ms", *OFFERING),
    CLAIMS_WRITTEN: ("api_us",),
    FLEET_REQUESTED: ("token", "prepared_us"),
    LOG_LEVEL_CHANGED: ("log_level",),
    INSTANCE_GONE: ("claim",),
    DRAINING: ("claim", "node", "node_pool"),
}

LEASE_LOST = "no renewal succeeded"  # part of the last line of a replica that could not renew its lease
OTHER_LEADER = "leads, too, with the lease"  # part of the last line of a replica that found another leader
OTHER_LEADER_WAIT = "another controller leads, waiting until its lease expires"
