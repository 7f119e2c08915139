//! The launch of one NodeClaim: look for what an earlier attempt left, choose, make templates, ask EC2, learn from its answer.

use std::sync::PoisonError;

use futures::future::try_join_all;
use kube::ResourceExt;

use super::attempts::Begin;
use super::choose::choose;
use super::class_view::PlacementGroup;
use super::errors::{self, ApiError, Class};
use super::fleet::{Born, FleetAnswer, FleetRequest, Lessons, failure};
use super::instances::{self, provider_id};
use super::prepare::{Ground, launchable};
use super::subnets::Taken;
use super::templates::Held;
use super::{Ec2, now_ms};
use crate::api::Ec2NodeClass;
use crate::cloud::{Instance, InstanceState, LaunchDetails, LaunchError, LaunchRequest, Launched, Override};

/// A fleet request that is ready to go.
struct Ready {
    fleet: FleetRequest,
    /// Held so that the templates stay until EC2 has answered.
    templates: Vec<Held>,
    taken: Vec<Taken>,
    group: Option<String>,
}

/// What came of a fleet request.
enum Came {
    Launched(Box<Launched>),
    /// A template isn't there any more: make it and ask again.
    TemplateGone,
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
        for last in [false, true] {
            let ready = self.prepare(request, details, token).await?;
            match self.ask(request, &ready).await? {
                Came::Launched(launched) => return Ok(*launched),
                Came::TemplateGone if last => break,
                Came::TemplateGone => {
                    let names: Vec<&str> = ready.templates.iter().map(Held::name).collect();
                    tracing::warn!(claim = request.node_claim, ?names, "a launch template was deleted behind our back");
                    self.templates.forget(names);
                }
            }
            token = self.attempts().begin(uid, created_ms, now_ms()).token;
        }
        let message = "launch templates vanish as soon as they are made".to_owned();
        Err(LaunchError::Rejected { reason: "LaunchTemplateNotFound", message })
    }

    /// The instance that an earlier attempt launched, whose answer was lost or not written down.
    async fn left_by_earlier_attempt(&self, uid: &str) -> Result<Option<Instance>, LaunchError> {
        let cluster = &self.options.cluster_name;
        let found = instances::of_claim(&self.clients, cluster, uid).await.map_err(|error| later(&error))?;
        if let Some(instance) = &found {
            tracing::info!(instance = instance.id, uid, "taking over the instance of an earlier attempt");
            self.remember(instance);
            self.attempts().launched(uid);
        }
        Ok(found)
    }

    async fn prepare(
        &self,
        request: &LaunchRequest,
        details: &LaunchDetails,
        token: String,
    ) -> Result<Ready, LaunchError> {
        let free_choice = details.claim.spec.requirements.iter().all(|requirement| requirement.min_values.is_none());
        let Some(choice) = choose(&request.overrides, &details.catalogue, free_choice) else {
            return Err(LaunchError::InsufficientCapacity { unavailable: vec![] });
        };
        let group = self.group_of(&details.class).await?;
        let facts = self.facts.load_full();
        let ground = Ground {
            request,
            details,
            cluster: &facts,
            region: &self.clients.region,
            placement_group: group.as_ref().map(|group| group.id.as_str()),
        };
        let tags = ground.tags()?;
        let groups = ground.groups(&choice, &tags)?;
        let subnets = details.class.status.as_ref().map(|status| status.subnets.as_slice()).unwrap_or_default();
        let (chosen, taken) = self.addresses().take(subnets, &choice.fewest_pods());
        let held =
            try_join_all(groups.iter().map(|group| self.templates.ensure(&self.clients, &group.template, now_ms())));
        let templates = held.await.map_err(|error| {
            self.addresses().give_back(&taken, None);
            refused(&error)
        })?;
        let named: Vec<_> = templates.iter().map(|held| held.name().to_owned()).zip(&groups).collect();
        let Some(fleet) = ground.fleet(token, choice.capacity_type, &named, &chosen, tags) else {
            self.addresses().give_back(&taken, None);
            let message =
                format!("EC2NodeClass {} has no subnet in any zone of the offerings", details.class.name_any());
            return Err(LaunchError::Rejected { reason: "SubnetResolutionFailed", message });
        };
        Ok(Ready { fleet, templates, taken, group: group.map(|group| group.id) })
    }

    /// Asks EC2, and learns from what it answers.
    async fn ask(&self, request: &LaunchRequest, ready: &Ready) -> Result<Came, LaunchError> {
        let answer = ready.fleet.input().send_with(&self.clients.ec2).await;
        let answer = match answer.map_err(ApiError::of("ec2:CreateFleet")) {
            Ok(answer) => FleetAnswer::read(&answer, &ready.fleet),
            Err(error) => {
                self.addresses().give_back(&ready.taken, None);
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
            let instance = instance(request, born, &ready.fleet);
            self.remember(&instance);
            self.attempts().launched(uid);
            return Ok(Came::Launched(Box::new(Launched { instance, unavailable: lessons.offerings() })));
        }
        self.attempts().nothing_launched(uid);
        if answer.lacks_template() {
            return Ok(Came::TemplateGone);
        }
        Err(failure(&answer.errors, &lessons))
    }

    fn learn(&self, request: &LaunchRequest, answer: &FleetAnswer, ready: &Ready) -> Lessons {
        let lessons = Lessons::of(&answer.errors, &ready.fleet, ready.group.as_deref());
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
        let now = now_ms();
        let mut marks = self.unavailable.lock().unwrap_or_else(PoisonError::into_inner);
        for subject in &lessons.marks {
            marks.mark(subject.clone(), now);
        }
        drop(marks);
        for subnet in &lessons.exhausted {
            self.addresses().exhausted(subnet);
        }
        lessons
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

fn instance(request: &LaunchRequest, born: &Born, fleet: &FleetRequest) -> Instance {
    Instance {
        id: born.id.clone(),
        provider_id: provider_id(&born.zone, &born.id),
        client_token: request.client_token.clone(),
        node_claim: request.node_claim.clone(),
        instance_type: born.instance_type.clone(),
        zone: born.zone.clone(),
        capacity_type: fleet.capacity_type,
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
