"""Log messages of Stowage that the tests and the demo search for, in one place: a reworded message changes here only."""

PLANNED = "planned"  # fields: pods, nodes, on_existing, usd_per_hour, gap, solve_ms
PLANNED_NODE = "planned node"  # fields: instance_type, zone, capacity_type, usd_per_hour
LAUNCHED = "launched"  # the same fields
CLAIMS_WRITTEN = "node claims written"  # fields: api_us
FLEET_REQUESTED = "asking EC2 for a fleet"  # fields: token, prepared_us
INSTANCE_GONE = "its instance is gone, it goes"  # fields: claim
LEASE_LOST = "the API server took no renewal"  # part of the last line of a replica that could not renew its lease
