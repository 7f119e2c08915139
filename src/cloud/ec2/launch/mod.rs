//! The launch of the claims of a group: look for what an earlier attempt left, choose, make templates, ask EC2, learn from its
//! answer, give each claim its instance.

pub mod create_fleet;
pub mod dry_run;
pub mod dry_run_instance;
pub mod dry_run_type;
pub mod group_batch;
pub mod idempotency;
pub mod request;
pub mod select;
pub mod select_reserved;
pub mod templates;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use kube::ResourceExt;

use crate::api::{Ec2NodeClass, NodeClaim};
use crate::cloud::ec2::Ec2Provider;
use crate::cloud::ec2::aws::errors;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::instances::describe;
use crate::cloud::ec2::instances::describe::provider_id;
use crate::cloud::ec2::launch::create_fleet::{CapacityFeedback, FleetAnswer, FleetRequest, LaunchedInstance, failure};
use crate::cloud::ec2::launch::group_batch::{Answer, Turn};
use crate::cloud::ec2::launch::request::{LaunchInputs, Shapes, TemplateInputs, launchable};
use crate::cloud::ec2::launch::select::{Choice, choose, min_values_hold};
use crate::cloud::ec2::launch::select_reserved::{Wanted, choose_reserved};
use crate::cloud::ec2::launch::templates::recent::{Kept, LaunchShape};
use crate::cloud::ec2::launch::templates::store::Held;
use crate::cloud::ec2::node_class::subnets::AddressReservation;
use crate::cloud::ec2::offerings::unavailable::placement_scope;
use crate::cloud::ec2::placement_group::PlacementGroup;
use crate::cloud::launch_group::LaunchGroup;
use crate::cloud::{Instance, InstanceState, LaunchDetails, LaunchError, LaunchRequest, Launched, Override};
use crate::model::requirement::Requirements;
use crate::model::time::UnixMillis;
use crate::sync::lock;

/// Reservations that may turn out full in one launch before it is given up.
const MOST_FULL: u32 = 16;

/// A fleet request that is ready to go.
#[derive(Debug)]
pub(crate) struct PreparedFleet {
    fleet: FleetRequest,
    /// Held so that the templates stay until EC2 has answered.
    templates: Vec<Held>,
    taken: Vec<AddressReservation>,
    /// Placement group, or the partition of it.
    scope: Option<String>,
    /// Partition that was asked for.
    partition: Option<i32>,
    /// How long it took to make, calls for templates included.
    took: Duration,
}

/// What came of a fleet request.
enum FleetOutcome {
    /// EC2 answered: what it launched, and what it could not.
    Answered(FleetAnswer, CapacityFeedback),
    /// The capacity reservation is full: choose again.
    ReservationFull,
    /// A template isn't there any more: make it and ask again.
    TemplateGone,
    /// An earlier call had the same token and asked for something else.
    TokenReused,
    /// EC2 refused, so that nothing was launched.
    Refused(LaunchError),
    /// Whether EC2 heard it is not known.
    Unanswered(LaunchError),
}

impl Ec2Provider {
    /// Launches one instance for a claim, with others of its group, or returns the one it has already.
    pub(crate) async fn launch_claim(&self, request: &LaunchRequest) -> Result<Launched, LaunchError> {
        let Some(details) = &request.details else {
            return Err(LaunchError::other("the request lacks its node claim and class"));
        };
        launchable(&details.class)?;
        let uid = &request.client_token;
        let group = LaunchGroup::of(&details.claim);
        let batch = self.batches.of(&group.id, crate::clock::now().0);
        let _place = batch.join(uid);
        let mut turn = batch.turn().await;
        if let Some(answer) = turn.take(uid) {
            return own(request, answer);
        }
        let expected = group.size.saturating_sub(turn.attempts.seen()).max(1);
        let members = batch.gather(&turn, expected).await;
        if let Err(error) = self.launch_members(request, details, &group, members.clone(), &mut turn).await {
            for member in members {
                turn.answer_unless(member, &error);
            }
        }
        let answer = turn.take(uid);
        own(request, answer.unwrap_or_else(|| Err(LaunchError::other("its group was launched without it"))))
    }

    /// Launches an instance for each of `left`, claims of a group whose requests come to the same as `request`.
    ///
    /// # Errors
    /// Why those that are not answered have none.
    async fn launch_members(
        &self,
        request: &LaunchRequest,
        details: &LaunchDetails,
        group: &LaunchGroup,
        mut left: Vec<String>,
        turn: &mut Turn<PreparedFleet>,
    ) -> Result<(), LaunchError> {
        let created_ms = details.claim.creation_timestamp().map_or(0, |time| time.0.as_millisecond());
        if turn.attempts.must_look(turn.unanswered.is_some(), created_ms, self.leading_since_ms) {
            self.look(group, details, turn).await?;
        }
        let (mut template_gone, mut full) = (false, 0);
        let mut failed = None;
        while !give(turn, &mut left) {
            if let Some(error) = failed {
                return Err(error);
            }
            let (ready, again) = match turn.unanswered.take() {
                Some(ready) => (ready, true),
                None => {
                    (self.prepare(request, details, group, left.len(), turn.attempts.token(&group.id)).await?, false)
                }
            };
            match self.ask(request, &ready).await {
                FleetOutcome::Answered(answer, lessons) => {
                    turn.attempts.answered();
                    self.settle(&ready, &answer.born);
                    let born: Vec<Instance> =
                        answer.born.iter().map(|born| instance(&group.id, born, &ready)).collect();
                    self.remember(&born);
                    let reserved = ready.fleet.reservation.is_some() && !born.is_empty();
                    turn.attempts.found(born, &details.named);
                    if answer.lacks_template() && !template_gone {
                        template_gone = true;
                        self.forget_templates(&ready);
                    } else if lessons.reservation_full && full < MOST_FULL {
                        full += 1;
                    } else if !again && !reserved {
                        failed = Some(failure(&answer.errors, &lessons));
                    }
                }
                FleetOutcome::ReservationFull => {
                    self.settle(&ready, &[]);
                    turn.attempts.answered();
                    full += 1;
                    if full > MOST_FULL {
                        return Err(LaunchError::InsufficientCapacity { unavailable: vec![] });
                    }
                }
                FleetOutcome::TemplateGone => {
                    self.settle(&ready, &[]);
                    self.forget_templates(&ready);
                    if template_gone {
                        let message = "launch templates vanish as soon as they are made".to_owned();
                        return Err(LaunchError::Rejected { reason: "LaunchTemplateNotFound", message });
                    }
                    template_gone = true;
                }
                FleetOutcome::TokenReused => {
                    // An earlier process's call was heard: its instances must show themselves.
                    self.settle(&ready, &[]);
                    self.look(group, details, turn).await?;
                    let over = turn.attempts.token_reused(crate::clock::now().0);
                    let what = if over {
                        "no instance of it came up, starting over"
                    } else {
                        "waiting for its instances to show"
                    };
                    failed = Some(LaunchError::other(format!("an earlier call had the same token; {what}")));
                }
                FleetOutcome::Refused(error) => {
                    self.settle(&ready, &[]);
                    return Err(error);
                }
                FleetOutcome::Unanswered(error) => {
                    turn.unanswered = Some(ready);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Looks for instances that earlier calls launched, whose answers were lost or not written down.
    async fn look(
        &self,
        group: &LaunchGroup,
        details: &LaunchDetails,
        turn: &mut Turn<PreparedFleet>,
    ) -> Result<(), LaunchError> {
        let cluster = &self.options.cluster_name;
        let found = describe::of_group(&self.clients, cluster, &group.id).await.map_err(|error| later(&error))?;
        self.remember(&found);
        {
            let (mut counts, now) = (self.reservations(), crate::clock::now());
            for instance in &found {
                if let Some(reservation) = &instance.reservation {
                    counts.allocate(&reservation.id, &instance.id, now);
                    counts.record_launched(&instance.id, &instance.id, now);
                }
            }
        }
        let new = turn.attempts.found(found, &details.named);
        if new > 0 {
            tracing::info!(group = group.id, instances = new, "taking over what an earlier attempt launched");
        }
        Ok(())
    }

    /// What claims are launched as now. A place in a reservation is counted as taken by the call of this token from here on.
    fn choose(&self, request: &LaunchRequest, details: &LaunchDetails, token: &str) -> Option<Choice> {
        let asked = &details.claim.spec.requirements;
        let free_choice = asked.iter().all(|requirement| requirement.min_values.is_none());
        let requirements = Requirements::from_api(asked).unwrap_or_default();
        let mut counts = self.reservations();
        let left = |id: &str| counts.available(id);
        let wanted = Wanted { requirements: &requirements, free_choice, left: &left };
        let choice = choose_reserved(&request.overrides, &details.catalog, &wanted);
        if let Some(reservation) = choice.as_ref().and_then(|choice| choice.reservation.as_ref()) {
            counts.allocate(&reservation.id, token, crate::clock::now());
        }
        drop(counts);
        if choice.is_none()
            && self.options.strict_min_values
            && !min_values_hold(&request.overrides, &details.catalog, asked)
        {
            return None;
        }
        choice.or_else(|| choose(&request.overrides, &details.catalog, free_choice))
    }

    async fn prepare(
        &self,
        request: &LaunchRequest,
        details: &LaunchDetails,
        launch_group: &LaunchGroup,
        count: usize,
        token: String,
    ) -> Result<PreparedFleet, LaunchError> {
        let Some(choice) = self.choose(request, details, &token) else {
            return Err(LaunchError::InsufficientCapacity { unavailable: vec![] });
        };
        // Places in a reservation are counted one by one.
        let count = if choice.reservation.is_some() { 1 } else { i32::try_from(count).unwrap_or(i32::MAX) };
        let ready = self.ready(request, details, &choice, count, token.clone()).await;
        match ready {
            Ok(mut ready) => {
                ready.fleet.for_group(launch_group, count);
                Ok(ready)
            }
            Err(error) => {
                self.reservations().release(&token);
                Err(error)
            }
        }
    }

    /// What templates of a class are made of now.
    pub(crate) fn basis(&self, class: Arc<Ec2NodeClass>, group: Option<PlacementGroup>) -> TemplateInputs {
        TemplateInputs { class, cluster: self.facts.load_full(), group }
    }

    /// What a launch of a claim is made of.
    pub(crate) fn ground<'a>(
        &'a self,
        request: &'a LaunchRequest,
        claim: &'a NodeClaim,
        basis: &'a TemplateInputs,
        shapes: Option<Shapes<'a>>,
    ) -> LaunchInputs<'a> {
        let (region, manages_reservations) = (self.clients.region.as_str(), self.options.reserved_capacity);
        LaunchInputs { request, claim, basis, region, manages_reservations, shapes }
    }

    async fn ready(
        &self,
        request: &LaunchRequest,
        details: &LaunchDetails,
        choice: &Choice,
        count: i32,
        token: String,
    ) -> Result<PreparedFleet, LaunchError> {
        let begun = Instant::now();
        let basis = self.basis(Arc::clone(&details.class), self.group_of(&details.class).await?);
        let (settings, region) = (self.options.settings(&details.class), self.snapshot());
        let ground = self.ground(request, &details.claim, &basis, Shapes::of(&settings, &region.types));
        let tags = ground.tags()?;
        let groups = ground.groups(choice, &tags)?;
        let subnets = details.class.status.as_ref().map(|status| status.subnets.as_slice()).unwrap_or_default();
        let (chosen, taken) = self.addresses().reserve(subnets, &choice.fewest_pods(), count.into());
        let held = try_join_all(
            groups.iter().map(|group| self.templates.ensure(&self.clients, &group.template, crate::clock::now().0)),
        );
        let templates = held.await.map_err(|error| {
            self.addresses().release(&taken, &[]);
            refused(&error)
        })?;
        let named: Vec<_> = templates.iter().map(|held| held.name().to_owned()).zip(&groups).collect();
        let Some(fleet) = ground.fleet(token, choice, &named, &chosen, tags) else {
            self.addresses().release(&taken, &[]);
            let message =
                format!("EC2NodeClass {} has no subnet in any zone of the offerings", details.class.name_any());
            return Err(LaunchError::Rejected { reason: "SubnetResolutionFailed", message });
        };
        let partition = groups.first().and_then(|group| group.template.partition);
        let number = partition.map(|partition| partition.to_string());
        let scope = basis.group.as_ref().map(|group| placement_scope(&group.id, number.as_deref()));
        if let Some(shape) = LaunchShape::of(request, &details.claim, choice) {
            let names = templates.iter().map(|held| held.name().to_owned()).collect();
            self.shapes.keep(Kept {
                shape,
                class: Arc::clone(&basis.class),
                basis,
                names,
                used_ms: crate::clock::now().0,
            });
        }
        Ok(PreparedFleet { fleet, templates, taken, scope, partition, took: begun.elapsed() })
    }

    /// Asks EC2, and learns from what it answers.
    async fn ask(&self, request: &LaunchRequest, ready: &PreparedFleet) -> FleetOutcome {
        tracing::info!(
            claim = request.node_claim,
            token = ready.fleet.token,
            instances = ready.fleet.count,
            capacity_type = %ready.fleet.capacity_type,
            offerings = ready.fleet.templates.iter().map(|(_, slots)| slots.len()).sum::<usize>(),
            prepared_us = u64::try_from(ready.took.as_micros()).unwrap_or(u64::MAX),
            "asking EC2 for a fleet"
        );
        let answer = ready.fleet.input().send_with(&self.clients.ec2).await;
        match answer.map_err(ApiError::of("ec2:CreateFleet")) {
            Ok(answer) => {
                let answer = FleetAnswer::read(&answer, &ready.fleet);
                let lessons = self.learn(request, &answer, ready);
                FleetOutcome::Answered(answer, lessons)
            }
            Err(error) => match (error.class, &ready.fleet.reservation) {
                (Class::Unfulfillable, Some(reservation)) => {
                    self.is_full(&reservation.id, crate::clock::now());
                    FleetOutcome::ReservationFull
                }
                (Class::LaunchTemplateGone, _) => FleetOutcome::TemplateGone,
                (Class::TokenReused, _) => FleetOutcome::TokenReused,
                _ if error.is_passing() => FleetOutcome::Unanswered(later(&error)),
                _ => FleetOutcome::Refused(refused(&error)),
            },
        }
    }

    /// Gives back the addresses and the place in a reservation that a call did not take.
    fn settle(&self, ready: &PreparedFleet, born: &[LaunchedInstance]) {
        let mut counts = self.reservations();
        match born.first() {
            Some(born) => counts.record_launched(&ready.fleet.token, &born.id, crate::clock::now()),
            None => counts.release(&ready.fleet.token),
        }
        drop(counts);
        let used: Vec<&str> = born.iter().filter_map(|born| born.subnet.as_deref()).collect();
        self.addresses().release(&ready.taken, &used);
    }

    fn forget_templates(&self, ready: &PreparedFleet) {
        let names: Vec<&str> = ready.templates.iter().map(Held::name).collect();
        tracing::warn!(?names, "a launch template was deleted behind our back");
        self.templates.forget(names);
    }

    fn learn(&self, request: &LaunchRequest, answer: &FleetAnswer, ready: &PreparedFleet) -> CapacityFeedback {
        let lessons = CapacityFeedback::of(&answer.errors, &ready.fleet, ready.scope.as_deref());
        for error in &answer.errors {
            tracing::info!(
                claim = request.node_claim,
                code = error.code,
                instance_type = error.instance_type,
                zone = error.zone,
                "EC2 could not launch: {}",
                error.message
            );
            let zone = error.zone.as_deref().unwrap_or_default();
            let reason = errors::reason(&format!("{}: {}", error.code, error.message));
            let labels = [zone, &self.zone_id(zone), ready.fleet.capacity_type.as_str(), reason];
            self.clients.metrics.launch_failures.with_label_values(&labels).inc();
        }
        let now = crate::clock::now();
        let mut unavailable = lock(&self.unavailable);
        for scope in &lessons.marks {
            unavailable.mark(scope.clone(), now);
        }
        drop(unavailable);
        if let Some(reservation) = ready.fleet.reservation.as_ref().filter(|_| lessons.reservation_full) {
            self.is_full(&reservation.id, now);
        }
        for subnet in &lessons.exhausted {
            self.addresses().record_exhausted(subnet);
        }
        lessons
    }

    fn is_full(&self, reservation: &str, now: UnixMillis) {
        tracing::info!(reservation, "the capacity reservation is full");
        self.reservations().record_exhausted(reservation, now);
    }

    /// The placement group that a class asks for, as it was last resolved.
    async fn group_of(&self, class: &Ec2NodeClass) -> Result<Option<PlacementGroup>, LaunchError> {
        let Some(selector) = &class.spec.placement_group_selector else { return Ok(None) };
        if let Some(group) = self.known_group(class) {
            return Ok(Some(group));
        }
        match crate::cloud::ec2::node_class::placement_group::find(&self.clients, selector).await {
            Ok(Some(group)) => {
                self.know_group(class, Some(group.clone()));
                Ok(Some(group))
            }
            Ok(None) => Err(LaunchError::NodeClassNotReady {
                name: class.name_any(),
                reason: "its placement group does not exist".into(),
            }),
            Err(error) => Err(later(&error)),
        }
    }
}

/// Gives instances to the claims that are `left`, and answers them. Returns whether none is left.
fn give(turn: &mut Turn<PreparedFleet>, left: &mut Vec<String>) -> bool {
    while !left.is_empty() {
        let Some(instance) = turn.attempts.give() else { return false };
        turn.answer(left.remove(0), Ok(Launched { instance, unavailable: vec![] }));
    }
    true
}

/// A claim's answer, on its instance its own name.
fn own(request: &LaunchRequest, answer: Answer) -> Answer {
    answer.map(|mut launched| {
        launched.instance.node_claim.clone_from(&request.node_claim);
        launched
    })
}

fn instance(group: &str, born: &LaunchedInstance, ready: &PreparedFleet) -> Instance {
    Instance {
        id: born.id.clone(),
        provider_id: provider_id(&born.zone, &born.id),
        client_token: group.to_owned(),
        node_claim: String::new(),
        instance_type: born.instance_type.clone(),
        zone: born.zone.clone(),
        capacity_type: ready.fleet.capacity_type,
        reservation: ready.fleet.reservation.clone(),
        partition: ready.partition,
        image_id: born.image.clone(),
        launched_at: crate::clock::now(),
        state: InstanceState::Pending,
    }
}

/// A failure after which the same may be tried again: whether something was launched is not known.
fn later(error: &ApiError) -> LaunchError {
    match error.class {
        Class::Throttled => LaunchError::Throttled,
        _ => LaunchError::Other { reason: error.reason(), message: error.to_string() },
    }
}

/// A call that EC2 refused, so that nothing was launched, unless the service failed.
fn refused(error: &ApiError) -> LaunchError {
    if error.is_passing() {
        return later(error);
    }
    LaunchError::Rejected { reason: error.reason(), message: error.to_string() }
}

/// An offering that a message or a launch showed to be without capacity.
pub(crate) fn mark(ec2: &Ec2Provider, offering: &Override) {
    let mut marks = lock(&ec2.unavailable);
    marks.mark(
        crate::cloud::ec2::offerings::unavailable::CapacityScope::Offering(offering.clone(), None),
        crate::clock::now(),
    );
}

#[cfg(test)]
mod reserved_launch_tests;
