//! The launch of one NodeClaim: look for what an earlier attempt left, choose, make templates, ask EC2, learn from its answer.

use std::sync::PoisonError;

use futures::future::try_join_all;
use kube::ResourceExt;

use super::attempts::Begin;
use super::choose::{Choice, choose};
use super::choose_reserved::{Wanted, choose_reserved};
use super::class_view::PlacementGroup;
use super::errors::{ApiError, Class};
use super::fleet::{Born, FleetAnswer, FleetRequest, Lessons, failure};
use super::instances::{self, provider_id};
use super::prepare::{Ground, launchable};
use super::subnets::Taken;
use super::templates::Held;
use super::unavailable::scope;
use super::{Ec2, now_ms};
use crate::api::Ec2NodeClass;
use crate::cloud::{Instance, InstanceState, LaunchDetails, LaunchError, LaunchRequest, Launched, Override};
use crate::scheduling::requirement::Requirements;

/// Reservations that may turn out full in one launch before it is given up.
const MOST_FULL: u32 = 16;

/// A fleet request that is ready to go.
struct Ready {
    fleet: FleetRequest,
    /// Held so that the templates stay until EC2 has answered.
    templates: Vec<Held>,
    taken: Vec<Taken>,
    /// Placement group, or the partition of it.
    scope: Option<String>,
    /// Partition that was asked for.
    partition: Option<i32>,
}

/// What came of a fleet request.
enum Came {
    Launched(Box<Launched>),
    /// A template isn't there any more: make it and ask again.
    TemplateGone,
    /// The capacity reservation is full: choose again.
    ReservationFull,
}

impl Ec2 {
    /// Launches one instance for a claim, or returns the one it has already.
    pub(super) async fn launch_claim(&self, request: &LaunchRequest) -> Result<Launched, LaunchError> {
        let Some(details) = &request.details else {
            return Err(LaunchError::Other("the request lacks its node claim and class".into()));
        };
        launchable(&details.class)?;
        let _permit = self.launches.acquire().await;
        let uid = &request.client_token;
        let created_ms = details.claim.creation_timestamp().map_or(0, |time| time.0.as_millisecond());
        let Begin { mut token, look_first } = self.attempts().begin(uid, created_ms, now_ms());
        if look_first && let Some(instance) = self.left_by_earlier_attempt(uid).await? {
            return Ok(Launched { instance, unavailable: vec![] });
        }
        let (mut gone, mut full) = (false, 0);
        loop {
            let ready = self.prepare(request, details, token).await?;
            match self.ask(request, &ready).await? {
                Came::Launched(launched) => return Ok(*launched),
                Came::TemplateGone if gone => {
                    let message = "launch templates vanish as soon as they are made".to_owned();
                    return Err(LaunchError::Rejected { reason: "LaunchTemplateNotFound", message });
                }
                Came::TemplateGone => {
                    gone = true;
                    let names: Vec<&str> = ready.templates.iter().map(Held::name).collect();
                    tracing::warn!(claim = request.node_claim, ?names, "a launch template was deleted behind our back");
                    self.templates.forget(names);
                }
                Came::ReservationFull if full == MOST_FULL => {
                    return Err(LaunchError::InsufficientCapacity { unavailable: vec![] });
                }
                Came::ReservationFull => full += 1,
            }
            token = self.attempts().begin(uid, created_ms, now_ms()).token;
        }
    }

    /// The instance that an earlier attempt launched, whose answer was lost or not written down.
    async fn left_by_earlier_attempt(&self, uid: &str) -> Result<Option<Instance>, LaunchError> {
        let cluster = &self.options.cluster_name;
        let found = instances::of_claim(&self.clients, cluster, uid).await.map_err(|error| later(&error))?;
        if let Some(instance) = &found {
            tracing::info!(instance = instance.id, uid, "taking over the instance of an earlier attempt");
            self.remember(instance);
            self.attempts().launched(uid);
            if let Some(reservation) = &instance.reservation {
                let mut counts = self.reservations();
                counts.take(&reservation.id, uid, now_ms());
                counts.launched(uid, &instance.id, now_ms());
            }
        }
        Ok(found)
    }

    /// What a claim is launched as now. A place in a reservation is counted as taken from here on.
    fn choose(&self, request: &LaunchRequest, details: &LaunchDetails) -> Option<Choice> {
        let asked = &details.claim.spec.requirements;
        let free_choice = asked.iter().all(|requirement| requirement.min_values.is_none());
        let requirements = Requirements::from_api(asked).unwrap_or_default();
        let uid = &request.client_token;
        let mut counts = self.reservations();
        let left = |id: &str| counts.left(id);
        let wanted = Wanted { requirements: &requirements, free_choice, left: &left };
        let choice = choose_reserved(&request.overrides, &details.catalogue, &wanted);
        if let Some(reservation) = choice.as_ref().and_then(|choice| choice.reservation.as_ref()) {
            counts.take(&reservation.id, uid, now_ms());
        }
        drop(counts);
        choice.or_else(|| choose(&request.overrides, &details.catalogue, free_choice))
    }

    async fn prepare(
        &self,
        request: &LaunchRequest,
        details: &LaunchDetails,
        token: String,
    ) -> Result<Ready, LaunchError> {
        let Some(choice) = self.choose(request, details) else {
            return Err(LaunchError::InsufficientCapacity { unavailable: vec![] });
        };
        let ready = self.ready(request, details, token, &choice).await;
        if ready.is_err() {
            self.reservations().give_back(&request.client_token);
        }
        ready
    }

    async fn ready(
        &self,
        request: &LaunchRequest,
        details: &LaunchDetails,
        token: String,
        choice: &Choice,
    ) -> Result<Ready, LaunchError> {
        let group = self.group_of(&details.class).await?;
        let facts = self.facts.load_full();
        let ground = Ground {
            request,
            details,
            cluster: &facts,
            region: &self.clients.region,
            placement_group: group.as_ref().map(|group| group.id.as_str()),
            manages_reservations: self.options.reserved_capacity,
        };
        let tags = ground.tags()?;
        let groups = ground.groups(choice, &tags)?;
        let subnets = details.class.status.as_ref().map(|status| status.subnets.as_slice()).unwrap_or_default();
        let (chosen, taken) = self.addresses().take(subnets, &choice.fewest_pods());
        let held =
            try_join_all(groups.iter().map(|group| self.templates.ensure(&self.clients, &group.template, now_ms())));
        let templates = held.await.map_err(|error| {
            self.addresses().give_back(&taken, None);
            refused(&error)
        })?;
        let named: Vec<_> = templates.iter().map(|held| held.name().to_owned()).zip(&groups).collect();
        let Some(fleet) = ground.fleet(token, choice, &named, &chosen, tags) else {
            self.addresses().give_back(&taken, None);
            let message =
                format!("EC2NodeClass {} has no subnet in any zone of the offerings", details.class.name_any());
            return Err(LaunchError::Rejected { reason: "SubnetResolutionFailed", message });
        };
        let partition = groups.first().and_then(|group| group.template.partition);
        let scope = group.map(|group| scope(&group.id, partition.map(|partition| partition.to_string()).as_deref()));
        Ok(Ready { fleet, templates, taken, scope, partition })
    }

    /// Asks EC2, and learns from what it answers.
    async fn ask(&self, request: &LaunchRequest, ready: &Ready) -> Result<Came, LaunchError> {
        let answer = ready.fleet.input().send_with(&self.clients.ec2).await;
        let answer = match answer.map_err(ApiError::of("ec2:CreateFleet")) {
            Ok(answer) => FleetAnswer::read(&answer, &ready.fleet),
            Err(error) => {
                self.addresses().give_back(&ready.taken, None);
                self.reservations().give_back(&request.client_token);
                if let Some(reservation) =
                    ready.fleet.reservation.as_ref().filter(|_| error.class == Class::Unfulfillable)
                {
                    self.is_full(&reservation.id, now_ms());
                    self.attempts().nothing_launched(&request.client_token);
                    return Ok(Came::ReservationFull);
                }
                return self.refusal(request, &error).await;
            }
        };
        let uid = &request.client_token;
        let used = answer.born.first().and_then(|born| born.subnet.as_deref());
        self.addresses().give_back(&ready.taken, used);
        let lessons = self.learn(request, &answer, ready);
        if let Some(born) = answer.born.first() {
            for extra in &answer.born[1..] {
                tracing::warn!(instance = extra.id, uid, "EC2 launched more than was asked for, it is collected later");
            }
            let instance = instance(request, born, ready);
            self.reservations().launched(uid, &instance.id, now_ms());
            self.remember(&instance);
            self.attempts().launched(uid);
            return Ok(Came::Launched(Box::new(Launched { instance, unavailable: lessons.offerings() })));
        }
        self.attempts().nothing_launched(uid);
        self.reservations().give_back(uid);
        if answer.lacks_template() {
            return Ok(Came::TemplateGone);
        }
        match failure(&answer.errors, &lessons) {
            LaunchError::InsufficientCapacity { .. } if lessons.reservation_full => Ok(Came::ReservationFull),
            error => Err(error),
        }
    }

    fn learn(&self, request: &LaunchRequest, answer: &FleetAnswer, ready: &Ready) -> Lessons {
        let lessons = Lessons::of(&answer.errors, &ready.fleet, ready.scope.as_deref());
        for error in &answer.errors {
            tracing::info!(
                claim = request.node_claim,
                code = error.code,
                instance_type = error.instance_type,
                zone = error.zone,
                "EC2 could not launch: {}",
                error.message
            );
        }
        let now = now_ms();
        let mut marks = self.unavailable.lock().unwrap_or_else(PoisonError::into_inner);
        for subject in &lessons.marks {
            marks.mark(subject.clone(), now);
        }
        drop(marks);
        if let Some(reservation) = ready.fleet.reservation.as_ref().filter(|_| lessons.reservation_full) {
            self.is_full(&reservation.id, now);
        }
        for subnet in &lessons.exhausted {
            self.addresses().exhausted(subnet);
        }
        lessons
    }

    fn is_full(&self, reservation: &str, now_ms: i64) {
        tracing::info!(reservation, "the capacity reservation is full");
        self.reservations().found_full(reservation, now_ms);
    }

    /// What a refused call means.
    async fn refusal(&self, request: &LaunchRequest, error: &ApiError) -> Result<Came, LaunchError> {
        let uid = &request.client_token;
        match error.class {
            Class::LaunchTemplateGone => Ok(Came::TemplateGone),
            Class::TokenReused => {
                // An earlier call with this token and other offerings was heard: its instance must show itself.
                if let Some(instance) = self.left_by_earlier_attempt(uid).await? {
                    return Ok(Came::Launched(Box::new(Launched { instance, unavailable: vec![] })));
                }
                let next = self.attempts().token_reused(uid, now_ms());
                let what =
                    if next { "no instance of it came up, starting over" } else { "waiting for its instance to show" };
                Err(LaunchError::Other(format!("an earlier call had the same token; {what}")))
            }
            _ => Err(refused(error)),
        }
    }

    /// The placement group that a class asks for, as it was last resolved.
    async fn group_of(&self, class: &Ec2NodeClass) -> Result<Option<PlacementGroup>, LaunchError> {
        let Some(selector) = &class.spec.placement_group_selector else { return Ok(None) };
        if let Some(group) = self.known_group(class) {
            return Ok(Some(group));
        }
        match super::placement::find(&self.clients, selector).await {
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

fn instance(request: &LaunchRequest, born: &Born, ready: &Ready) -> Instance {
    Instance {
        id: born.id.clone(),
        provider_id: provider_id(&born.zone, &born.id),
        client_token: request.client_token.clone(),
        node_claim: request.node_claim.clone(),
        instance_type: born.instance_type.clone(),
        zone: born.zone.clone(),
        capacity_type: ready.fleet.capacity_type,
        reservation: ready.fleet.reservation.clone(),
        partition: ready.partition,
        image_id: born.image.clone(),
        launched_at_ms: now_ms(),
        state: InstanceState::Pending,
    }
}

/// A failure after which the same may be tried again: whether something was launched is not known.
fn later(error: &ApiError) -> LaunchError {
    match error.class {
        Class::Throttled => LaunchError::Throttled,
        _ => LaunchError::Other(error.to_string()),
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
pub(super) fn mark(ec2: &Ec2, offering: &Override) {
    let mut marks = ec2.unavailable.lock().unwrap_or_else(PoisonError::into_inner);
    marks.mark(super::unavailable::Subject::Offering(offering.clone(), None), now_ms());
}

#[cfg(test)]
#[path = "reserved_launch_tests.rs"]
mod reserved_tests;
