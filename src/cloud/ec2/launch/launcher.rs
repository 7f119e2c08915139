//! Launches the claims of a launch group: adopts what earlier attempts launched, calls CreateFleet for the rest, and assigns an
//! instance to each claim.

use std::sync::Arc;

use kube::ResourceExt;
use stowage_api::launch_group::LaunchGroup;
use stowage_model::events;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;

use crate::ec2::aws::errors::ApiError;
use crate::ec2::instances::describe;
use crate::ec2::instances::describe::provider_id;
use crate::ec2::instances::instance_store::InstanceStore;
use crate::ec2::launch::batch::{Answer, BatchState, LaunchBatch, LaunchBatches, Turn};
use crate::ec2::launch::capacity_feedback::{FleetOutcome, create_fleet, record_unavailable};
use crate::ec2::launch::create_fleet::{LaunchedInstance, failure};
use crate::ec2::launch::idempotency::Attempts;
use crate::ec2::launch::launch_context::LaunchContext;
use crate::ec2::launch::launch_errors::no_response;
use crate::ec2::launch::prepare::{PreparedFleet, prepare, release_unused};
use crate::ec2::launch::templates::template_store::TemplateRef;
use crate::launch_request::launchable;
use crate::{Instance, InstanceState, LaunchDetails, LaunchError, LaunchRequest, Launched};

/// Full capacity reservations that one launch skips before it gives up.
const MAX_FULL_RESERVATIONS: u32 = 16;
/// Tokens of an earlier process that one launch skips before it waits for its next attempt.
const MAX_REUSED_TOKENS: u32 = 100;

#[derive(Debug)]
pub struct Launcher {
    context: Arc<LaunchContext>,
    instances: Arc<InstanceStore>,
    batches: LaunchBatches<PreparedFleet>,
    /// When this process began to lead: claims created before may have instances of the previous leader.
    leading_since: UnixMillis,
}

impl Launcher {
    pub fn new(context: Arc<LaunchContext>, instances: Arc<InstanceStore>) -> Self {
        Self { context, instances, batches: LaunchBatches::default(), leading_since: clock::now() }
    }

    /// Launches one instance for a claim, together with the other claims of its launch group, or returns the instance that the
    /// claim already has.
    ///
    /// # Errors
    /// Nothing was launched for the claim, or its instance is not known yet: retry with the same request.
    pub async fn launch(&self, request: &LaunchRequest) -> Result<Launched, LaunchError> {
        let Some(details) = &request.details else {
            return Err(LaunchError::other("the request lacks its node claim and class"));
        };
        launchable(&details.class)?;
        let uid = &request.client_token;
        let launch_group = LaunchGroup::of(&details.claim);
        let batch = self.batches.of(&launch_group.id, clock::now());
        let _ticket = batch.join(uid);
        let mut state = match batch.turn(uid).await {
            Turn::Answered(answer) => return with_claim_name(request, *answer),
            Turn::Call(state) => state,
        };
        let expected = launch_group.size.saturating_sub(state.attempts.seen()).max(1);
        let members = batch.gather(expected).await;
        let launched = self.launch_members(request, details, &launch_group, &batch, members.clone(), &mut state).await;
        if let Err(error) = launched {
            batch.answer_rest(members, &error);
        }
        let answer = batch.take(uid);
        with_claim_name(request, answer.unwrap_or_else(|| Err(LaunchError::other("its group was launched without it"))))
    }

    /// Launches an instance for each of `pending`, claims of a launch group whose requests are equivalent to `request`, and answers
    /// them as instances come.
    ///
    /// # Errors
    /// Why the claims that are not answered have no instance.
    async fn launch_members(
        &self,
        request: &LaunchRequest,
        details: &LaunchDetails,
        launch_group: &LaunchGroup,
        batch: &LaunchBatch<PreparedFleet>,
        mut pending: Vec<String>,
        state: &mut BatchState<PreparedFleet>,
    ) -> Result<(), LaunchError> {
        let context = &*self.context;
        let created = details.claim.creation_timestamp().map_or(UnixMillis(0), |time| UnixMillis::from(&time));
        if state.attempts.must_search(state.without_response.is_some(), created, self.leading_since) {
            self.adopt(launch_group, details, state).await?;
        }
        let (mut template_gone, mut full_reservations, mut reused_tokens) = (false, 0, 0);
        let (mut failed, mut called_at) = (None, None);
        while !assign(batch, &mut state.attempts, &mut pending, called_at) {
            if let Some(error) = failed {
                return Err(error);
            }
            let (prepared, is_retry) = if let Some(prepared) = state.without_response.take() {
                (prepared, true)
            } else {
                let token = state.attempts.token(&launch_group.id);
                (prepare(context, request, details, launch_group, pending.len(), token).await?, false)
            };
            called_at = Some(clock::now());
            match create_fleet(context, request, &prepared).await {
                FleetOutcome::Responded(response, feedback) => {
                    state.attempts.responded();
                    release_unused(context, &prepared, &response.launched);
                    let launched: Vec<Instance> =
                        response.launched.iter().map(|one| instance(&launch_group.id, one, &prepared)).collect();
                    self.instances.remember(&launched);
                    let new = state.attempts.found(launched, &details.named);
                    // A call for a part of the claims, or into a reservation, is followed by another call.
                    let continues =
                        new > 0 && (prepared.fleet.reservation.is_some() || response.is_complete(&prepared.fleet));
                    if response.lacks_template() && !template_gone {
                        template_gone = true;
                        self.forget_templates(&prepared);
                    } else if feedback.reservation_full && full_reservations < MAX_FULL_RESERVATIONS {
                        full_reservations += 1;
                    } else if !is_retry && !continues {
                        failed = Some(failure(&response.errors, &feedback));
                    }
                }
                FleetOutcome::ReservationFull => {
                    release_unused(context, &prepared, &[]);
                    state.attempts.responded();
                    full_reservations += 1;
                    if full_reservations > MAX_FULL_RESERVATIONS {
                        return Err(LaunchError::InsufficientCapacity { unavailable: vec![] });
                    }
                }
                FleetOutcome::TemplateGone => {
                    release_unused(context, &prepared, &[]);
                    self.forget_templates(&prepared);
                    if template_gone {
                        let message = "launch templates are deleted as soon as they are created".to_owned();
                        return Err(LaunchError::Rejected { event: events::LAUNCH_TEMPLATE_NOT_FOUND, message });
                    }
                    template_gone = true;
                }
                FleetOutcome::TokenReused => {
                    // A call of an earlier process was received: wait until its instances are described.
                    called_at = None;
                    release_unused(context, &prepared, &[]);
                    self.adopt(launch_group, details, state).await?;
                    // After the wait, every token that the earlier process used is skipped.
                    if state.attempts.token_reused(clock::now()) && reused_tokens < MAX_REUSED_TOKENS {
                        reused_tokens += 1;
                        continue;
                    }
                    let message = "an earlier call had the same token; waiting for its instances to appear";
                    failed = Some(LaunchError::other(message));
                }
                FleetOutcome::Refused(error) => {
                    release_unused(context, &prepared, &[]);
                    return Err(error);
                }
                FleetOutcome::Throttled => {
                    // Of the first attempt of a repeated call nothing is known.
                    if is_retry {
                        state.without_response = Some(prepared);
                    } else {
                        release_unused(context, &prepared, &[]);
                    }
                    return Err(LaunchError::Throttled);
                }
                FleetOutcome::ServerFault(error) => {
                    if state.attempts.server_fault() {
                        release_unused(context, &prepared, &[]);
                        return Err(record_unavailable(context, request, &prepared, &error));
                    }
                    state.without_response = Some(prepared);
                    return Err(no_response(&error));
                }
                FleetOutcome::NoResponse(error) => {
                    state.without_response = Some(prepared);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Adopts instances of earlier calls whose responses were lost or not recorded.
    async fn adopt(
        &self,
        launch_group: &LaunchGroup,
        details: &LaunchDetails,
        state: &mut BatchState<PreparedFleet>,
    ) -> Result<(), LaunchError> {
        let cluster = &self.context.options.cluster_name;
        let found = describe::of_launch_group(&self.context.clients, cluster, &launch_group.id).await;
        let found = found.map_err(|error: ApiError| no_response(&error))?;
        self.instances.remember(&found);
        let now = clock::now();
        self.context.offerings.with_reservations(|reservations| {
            for instance in &found {
                if let Some(reservation) = &instance.reservation {
                    reservations.allocate(&reservation.id, &instance.id, 1, now);
                    reservations.record_launched(&instance.id, &[&instance.id], now);
                }
            }
        });
        let new = state.attempts.found(found, &details.named);
        if new > 0 {
            tracing::info!(launch_group = launch_group.id, instances = new, "adopted instances of an earlier launch");
        }
        Ok(())
    }

    fn forget_templates(&self, prepared: &PreparedFleet) {
        let names: Vec<&str> = prepared.templates.iter().map(TemplateRef::name).collect();
        tracing::warn!(?names, "launch template no longer exists (deleted externally), recreating");
        self.context.templates.forget(names);
    }
}

/// Assigns unassigned instances, of a call at this time, to `pending` claims. Returns whether every claim has one.
fn assign(
    batch: &LaunchBatch<PreparedFleet>,
    attempts: &mut Attempts,
    pending: &mut Vec<String>,
    called_at: Option<UnixMillis>,
) -> bool {
    let instances = std::iter::from_fn(|| attempts.assign());
    let launched = instances.map(|instance| Ok(Launched { instance, unavailable: vec![], called_at }));
    let answers: Vec<(String, Answer)> = pending.iter().cloned().zip(launched).collect();
    pending.drain(..answers.len());
    batch.answer(answers);
    pending.is_empty()
}

/// The answer for a claim; its instance carries the name of the claim.
fn with_claim_name(request: &LaunchRequest, answer: Answer) -> Answer {
    answer.map(|mut launched| {
        launched.instance.node_claim.clone_from(&request.node_claim);
        launched
    })
}

fn instance(launch_group: &str, launched: &LaunchedInstance, prepared: &PreparedFleet) -> Instance {
    Instance {
        id: launched.id.clone(),
        provider_id: provider_id(&launched.zone, &launched.id),
        client_token: launch_group.to_owned(),
        node_claim: String::new(),
        instance_type: launched.instance_type.clone(),
        zone: launched.zone.clone(),
        capacity_type: prepared.fleet.capacity_type,
        reservation: prepared.fleet.reservation.clone(),
        partition: prepared.partition,
        image_id: launched.image.clone(),
        launched_at: clock::now(),
        state: InstanceState::Pending,
    }
}

#[cfg(test)]
mod tests;
