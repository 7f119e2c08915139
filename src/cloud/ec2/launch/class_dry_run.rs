//! Validates a node class with EC2: creates a real launch template, then calls CreateFleet and RunInstances as dry runs. The verdict
//! is cached while the class and its status are unchanged: success for half an hour, a refusal for 90 s.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_ec2::types::{InstanceNetworkInterfaceSpecification, LaunchTemplateSpecification};
use kube::ResourceExt;
use stowage_api::{Ec2NodeClass, NodeClaim, NodeClaimSpec, Requirement};
use stowage_model::draw::draw;
use stowage_model::events;
use stowage_model::events::DeclaredEvent;
use stowage_model::labels;
use stowage_model::offering::CapacityType;
use stowage_model::requirement::Requirements;
use stowage_model::time::UnixMillis;
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::ami_family::AmiFamily;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::bootstrap::user_data::ignored_settings;
use crate::ec2::launch::create_fleet::{FleetOverride, FleetRequest};
use crate::ec2::launch::dry_run_instance::{dry_run_instance, is_permitted, no_retries};
use crate::ec2::launch::dry_run_type::dry_type;
use crate::ec2::launch::launch_context::LaunchContext;
use crate::ec2::launch::request::Shapes;
use crate::ec2::launch::select::Choice;
use crate::ec2::launch::templates::spec::Template;
use crate::{LaunchError, LaunchRequest, Verdict};

/// How long success is cached.
const TTL: Duration = Duration::from_mins(30);
/// How long a refusal is cached: a new permission takes seconds to minutes to become effective.
const REFUSED_TTL: Duration = Duration::from_secs(90);

/// Cached verdicts by UID of the class: the hash of their inputs, and their expiry.
#[derive(Debug, Default)]
struct Verdicts {
    cached: Mutex<HashMap<String, (u64, Verdict, UnixMillis)>>,
}

impl Verdicts {
    fn get(&self, uid: &str, inputs: u64, now: UnixMillis) -> Option<Verdict> {
        let cached = lock(&self.cached);
        let (hash, verdict, until) = cached.get(uid)?;
        (*hash == inputs && *until > now).then(|| verdict.clone())
    }

    fn put(&self, uid: String, inputs: u64, verdict: Verdict, now: UnixMillis) {
        let mut cached = lock(&self.cached);
        cached.retain(|_, (_, _, until)| *until > now);
        let ttl = if verdict == Verdict::True { TTL } else { REFUSED_TTL };
        cached.insert(uid, (inputs, verdict, now + ttl));
    }
}

/// The hash of the inputs of a verdict: the spec, the annotations, the lists of the status, and the requirements of NodePools. The
/// status lists subnets by free addresses, an order that changes with every pod; it does not matter here.
fn inputs_of(class: &Ec2NodeClass, demands: &[Requirements]) -> u64 {
    let mut status = class.status.clone().unwrap_or_default();
    status.subnets.sort_by(|a, b| a.id.cmp(&b.id));
    status.security_groups.sort_by(|a, b| a.id.cmp(&b.id));
    let lists = (&status.subnets, &status.security_groups, &status.amis, &status.instance_profile);
    let text = format!("{:?} {:?} {lists:?} {demands:?}", class.spec, class.annotations());
    draw(0, &[&class.name_any(), &text])
}

/// The result of a dry run.
pub enum DryRunOutcome {
    /// EC2 would launch the class.
    Passed,
    /// Valid until an input changes.
    Final(Verdict),
    /// Retried with the next resolution of the class.
    Transient(Verdict),
}

impl DryRunOutcome {
    pub fn verdict(self) -> Verdict {
        match self {
            Self::Passed => Verdict::True,
            Self::Final(verdict) | Self::Transient(verdict) => verdict,
        }
    }

    fn refused(event: &'static DeclaredEvent, text: &str, error: &ApiError) -> Self {
        Self::Final(Verdict::False(event, format!("{text}: {}: {error}", error.launch_event())))
    }
}

/// The result of a failed CreateLaunchTemplate call.
fn template_outcome(error: &ApiError) -> DryRunOutcome {
    if error.is_user_data_too_long() {
        let text = "the user data is too long for EC2";
        return DryRunOutcome::refused(events::USER_DATA_SIZE_LIMIT_EXCEEDED, text, error);
    }
    match error.class {
        Class::Unauthorized => {
            let text = "the controller may not call ec2:CreateLaunchTemplate as this class needs it";
            DryRunOutcome::refused(events::CREATE_LAUNCH_TEMPLATE_AUTH_CHECK_FAILED, text, error)
        }
        _ => DryRunOutcome::Transient(Verdict::Unjudged(error.to_string())),
    }
}

/// The result of a CreateFleet dry run.
fn fleet_outcome(response: Result<(), ApiError>) -> DryRunOutcome {
    match response {
        Ok(()) => DryRunOutcome::Passed,
        Err(error) => match error.class {
            Class::DryRunOk => DryRunOutcome::Passed,
            Class::Unauthorized => {
                let text = "the controller may not call ec2:CreateFleet as this class needs it";
                DryRunOutcome::refused(events::CREATE_FLEET_AUTH_CHECK_FAILED, text, &error)
            }
            _ => DryRunOutcome::Transient(Verdict::Unjudged(error.to_string())),
        },
    }
}

/// The result of RunInstances dry runs, one per subnet: one success is enough, otherwise the first error decides.
fn run_outcome(responses: &[Result<(), ApiError>], own_profile: bool) -> DryRunOutcome {
    if responses.iter().any(is_permitted) {
        return DryRunOutcome::Passed;
    }
    let Some(Err(error)) = responses.first() else {
        return DryRunOutcome::Transient(Verdict::Unjudged("the class has no subnet for a dry run".into()));
    };
    if error.is_unknown_instance_profile() {
        return DryRunOutcome::Transient(if own_profile {
            // A new instance profile becomes visible to EC2 after a delay.
            Verdict::Unjudged(error.to_string())
        } else {
            Verdict::False(
                events::INSTANCE_PROFILE_NOT_FOUND,
                format!("EC2 does not know spec.instanceProfile: {error}"),
            )
        });
    }
    if error.class == Class::Unauthorized {
        let text = "the controller may not call ec2:RunInstances as this class needs it";
        return DryRunOutcome::refused(events::RUN_INSTANCES_AUTH_CHECK_FAILED, text, error);
    }
    DryRunOutcome::Transient(Verdict::Unjudged(error.to_string()))
}

/// The inputs of the dry runs of a class.
pub struct DryRunInputs {
    pub template: Template,
    pub instance_type: String,
    /// Subnet ids; subnets in zones that offer the instance type come first, since the first error decides.
    pub subnets: Vec<String>,
    /// Tags of everything that would be launched.
    pub tags: BTreeMap<String, String>,
}

impl DryRunInputs {
    /// The fleet request with the template of this name.
    pub fn fleet(&self, class: &Ec2NodeClass, template: &str) -> FleetRequest {
        let fleet_override = |subnet: &String| FleetOverride {
            instance_type: self.instance_type.clone(),
            zone: zone_of(class, subnet),
            subnet: subnet.clone(),
            image: self.template.image_id.clone(),
            price: stowage_model::units::MicroUsd(0),
        };
        FleetRequest {
            token: String::new(),
            count: 1,
            context: class.spec.context.clone(),
            capacity_type: CapacityType::OnDemand,
            reservation: None,
            prioritized: false,
            templates: vec![(template.to_owned(), self.subnets.iter().map(fleet_override).collect())],
            tags: self.tags.clone(),
            instance_tags: BTreeMap::new(),
        }
    }
}

#[derive(Debug)]
pub struct DryRunValidator {
    context: Arc<LaunchContext>,
    verdicts: Verdicts,
}

impl DryRunValidator {
    pub fn new(context: Arc<LaunchContext>) -> Self {
        Self { context, verdicts: Verdicts::default() }
    }

    /// Validates a class with a resolved status, or returns the cached verdict. With dry runs disabled, only what is known without
    /// EC2 is evaluated.
    pub async fn validate(&self, class: &Ec2NodeClass, demands: &[Requirements], now: UnixMillis) -> Verdict {
        if !self.context.options.dry_run {
            return match self.inputs(class, demands) {
                Err(DryRunOutcome::Final(verdict)) => verdict,
                Err(DryRunOutcome::Passed | DryRunOutcome::Transient(_)) | Ok(_) => Verdict::True,
            };
        }
        let uid = class.uid().unwrap_or_default();
        let inputs = inputs_of(class, demands);
        if let Some(verdict) = self.verdicts.get(&uid, inputs, now) {
            return verdict;
        }
        match self.run(class, demands).await {
            DryRunOutcome::Passed => {
                self.verdicts.put(uid, inputs, Verdict::True, now);
                Verdict::True
            }
            DryRunOutcome::Final(verdict) => {
                self.verdicts.put(uid, inputs, verdict.clone(), now);
                verdict
            }
            DryRunOutcome::Transient(verdict) => verdict,
        }
    }

    /// The inputs of the dry runs of a class with a resolved status, whose NodePools require `demands`.
    ///
    /// # Errors
    /// The class has nothing to launch; the outcome says why.
    pub fn inputs(&self, class: &Ec2NodeClass, demands: &[Requirements]) -> Result<DryRunInputs, DryRunOutcome> {
        let context = &*self.context;
        let catalog = context.catalog(class);
        let images = class.status.as_ref().map(|status| status.amis.as_slice()).unwrap_or_default();
        let Some(candidate) = dry_type(&catalog, images, demands) else {
            let message = "no instance type is offered in the zones of the class's subnets and boots its images";
            return Err(DryRunOutcome::Transient(Verdict::Unjudged(message.into())));
        };
        let choice = Choice { capacity_type: CapacityType::OnDemand, reservation: None, candidates: vec![candidate] };
        let claim = NodeClaim::new("", NodeClaimSpec { requirements: tenancy(demands), ..NodeClaimSpec::default() });
        let request = LaunchRequest {
            client_token: String::new(),
            node_claim: String::new(),
            node_pool: String::new(),
            node_class: class.name_any(),
            overrides: vec![],
            labels: BTreeMap::new(),
            taints: vec![],
            details: None,
        };
        let placement_group = context.node_classes.placement_group(class);
        let template_inputs = context.template_inputs(Arc::new(class.clone()), placement_group);
        let (settings, region) = (context.options.settings(class), context.offerings.snapshot());
        let shapes = Shapes::of(&settings, &region.types);
        let inputs = context.launch_inputs(&request, &claim, &template_inputs, shapes);
        let rendered = inputs.tags().and_then(|tags| Ok((inputs.template_groups(&choice, &tags)?, tags)));
        let (groups, tags) = match rendered {
            Ok(rendered) => rendered,
            Err(LaunchError::NodeClassNotReady { reason, .. }) => {
                return Err(DryRunOutcome::Final(Verdict::False(events::USER_DATA_INVALID, reason)));
            }
            Err(error) => return Err(DryRunOutcome::Transient(Verdict::Unjudged(error.to_string()))),
        };
        let Some(template) = groups.into_iter().next().map(|group| group.template) else {
            return Err(DryRunOutcome::Transient(Verdict::Unjudged("no launch template for a dry run".into())));
        };
        let user_data_bytes = context.clients.metrics.user_data_bytes.with_label_values(&[class.name_any()]);
        user_data_bytes.set(i64::try_from(template.user_data_bytes()).unwrap_or(i64::MAX));
        let candidate = &choice.candidates[0];
        let mut subnets: Vec<_> = class.status.iter().flat_map(|status| &status.subnets).collect();
        subnets.sort_by_key(|subnet| !candidate.zones.contains_key(&subnet.zone));
        let subnets = subnets.into_iter().map(|subnet| subnet.id.clone()).collect();
        Ok(DryRunInputs { template, instance_type: candidate.instance_type.name.to_string(), subnets, tags })
    }

    async fn run(&self, class: &Ec2NodeClass, demands: &[Requirements]) -> DryRunOutcome {
        let inputs = match self.inputs(class, demands) {
            Ok(inputs) => inputs,
            Err(outcome) => return outcome,
        };
        if AmiFamily::of(&class.spec) == AmiFamily::Bottlerocket {
            let ignored = ignored_settings(class.spec.user_data.as_deref().unwrap_or_default());
            if !ignored.is_empty() {
                tracing::warn!(class = class.name_any(), ?ignored, "settings in spec.userData are ignored");
            }
        }
        let context = &*self.context;
        let now = clock::now();
        let template = match context.templates.ensure(&context.clients, &inputs.template, now).await {
            Ok(template) => template,
            Err(error) => return template_outcome(&error),
        };
        match fleet_outcome(self.create_fleet(&inputs.fleet(class, template.name())).await) {
            DryRunOutcome::Passed => {}
            other => return other,
        }
        let mut responses = Vec::new();
        for subnet in &inputs.subnets {
            let response = self.run_instances(class, template.name(), &inputs, subnet).await;
            let passed = is_permitted(&response);
            responses.push(response);
            if passed {
                break;
            }
        }
        run_outcome(&responses, class.spec.instance_profile.is_none())
    }

    /// Calls CreateFleet as a dry run.
    ///
    /// # Errors
    /// Always an error of EC2; [`Class::DryRunOk`] is success.
    pub async fn create_fleet(&self, fleet: &FleetRequest) -> Result<(), ApiError> {
        let input = fleet.input().set_client_token(None).dry_run(true);
        let call = self.context.clients.ec2.create_fleet();
        let call = call
            .dry_run(true)
            .set_type(input.get_type().clone())
            .set_context(input.get_context().clone())
            .set_launch_template_configs(input.get_launch_template_configs().clone())
            .set_target_capacity_specification(input.get_target_capacity_specification().clone())
            .set_on_demand_options(input.get_on_demand_options().clone())
            .set_tag_specifications(input.get_tag_specifications().clone());
        let response = call.customize().config_override(no_retries()).send().await;
        response.map(|_| ()).map_err(ApiError::of("ec2:CreateFleet"))
    }

    /// Calls RunInstances as a dry run.
    async fn run_instances(
        &self,
        class: &Ec2NodeClass,
        template: &str,
        inputs: &DryRunInputs,
        subnet: &str,
    ) -> Result<(), ApiError> {
        let interface = || InstanceNetworkInterfaceSpecification::builder().subnet_id(subnet);
        let listed = class.spec.network_interfaces.as_deref().unwrap_or_default();
        let interfaces = if listed.is_empty() {
            vec![interface().device_index(0).build()]
        } else {
            let listed = listed.iter().map(|listed| {
                interface()
                    .device_index(listed.device_index)
                    .network_card_index(listed.network_card_index)
                    .interface_type(&listed.interface_type)
                    .build()
            });
            listed.collect()
        };
        let template = LaunchTemplateSpecification::builder().launch_template_name(template).version("$Latest").build();
        let metadata = inputs.template.metadata_of_request();
        dry_run_instance(&self.context.clients, &inputs.instance_type, interfaces, &inputs.tags, metadata, |call| {
            call.launch_template(template)
        })
        .await
    }
}

/// The tenancy requirement of the dry run: dedicated when a NodePool permits dedicated tenancy, else none.
fn tenancy(demands: &[Requirements]) -> Vec<Requirement> {
    let key = labels::INSTANCE_TENANCY;
    let dedicated = demands.iter().filter_map(|demand| demand.get(key)).any(|tenancy| tenancy.contains("dedicated"));
    let requirement =
        || Requirement { key: key.into(), operator: "In".into(), values: vec!["dedicated".into()], min_values: None };
    dedicated.then(requirement).into_iter().collect()
}

fn zone_of(class: &Ec2NodeClass, subnet: &str) -> String {
    let subnets = class.status.iter().flat_map(|status| &status.subnets);
    subnets.filter(|other| other.id == subnet).map(|other| other.zone.clone()).next().unwrap_or_default()
}

#[cfg(test)]
mod tests;
