//! The record of a new instance: its identity, address and boot time are drawn from the seed. Pure.

use std::net::Ipv4Addr;
use std::time::Duration;

use stowage_model::draw::{draw, draw_between};
use stowage_model::time::UnixMillis;

use crate::simulated::engine_state::{InstanceRecord, NodeProgress};
use crate::simulated::simulation_settings::Timings;
use crate::{LaunchRequest, Override};

/// Image of every simulated instance, by which its NodeClaim is recognized.
pub const IMAGE_ID: &str = "ami-0512a1ed5104a7ed0";

/// A launch in an offering with capacity.
pub(crate) struct NewInstance<'a> {
    /// Number of the launch in the simulation, from 1.
    pub(crate) number: u64,
    pub(crate) request: &'a LaunchRequest,
    pub(crate) offering: &'a Override,
}

impl NewInstance<'_> {
    /// The record of the instance. Equal inputs give equal records; simulations that start at different times differ.
    pub(crate) fn record(
        &self,
        seed: u64,
        timings: &Timings,
        started_at: UnixMillis,
        now: UnixMillis,
    ) -> InstanceRecord {
        let (start, count) = (started_at.0.to_string(), self.number.to_string());
        let (shortest, longest) = timings.boot;
        let delay = draw_between(seed, &["boot", &start, &count], millis(shortest), millis(longest));
        let boot_at = now + Duration::from_millis(u64::try_from(delay).unwrap_or(0));
        let high = draw(seed, &["instance", &start, &count]);
        let low = draw(seed, &["instance", &start, &count, "low"]) & 0xf;
        let (request, offering) = (self.request, self.offering);
        InstanceRecord {
            number: self.number,
            id: format!("i-{high:016x}{low:x}"),
            client_token: request.client_token.clone(),
            node_claim: request.node_claim.clone(),
            node_pool: request.node_pool.clone(),
            node_class: request.node_class.clone(),
            instance_type: offering.instance_type.clone(),
            zone: offering.zone.clone(),
            capacity_type: offering.capacity_type,
            image_id: IMAGE_ID.to_owned(),
            private_ip: address(seed, self.number, &start),
            labels: request.labels.clone(),
            taints: request.taints.clone(),
            launched_at: now,
            running_at: now + timings.pending,
            boot_at,
            shutdown_at: None,
            terminated_at: None,
            node: NodeProgress::default(),
        }
    }
}

/// An address in 10.0.0.0/10, unique among the first four million instances of the simulation.
fn address(seed: u64, number: u64, start: &str) -> String {
    const SPACE: u64 = 1 << 22;
    // An odd factor permutes the space; the offset separates consecutive simulations.
    let index = number.wrapping_mul(2_654_435_761).wrapping_add(draw(seed, &["address", start])) % SPACE;
    let index = u32::try_from(index).unwrap_or(0);
    Ipv4Addr::from((10 << 24) | index).to_string()
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
