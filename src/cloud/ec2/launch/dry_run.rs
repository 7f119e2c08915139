//! Whether EC2 would launch a class: a launch template is really made, and CreateFleet and RunInstances are tried dry. The verdict
//! is kept for half an hour, as long as the class and what it comes to stay the same.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use aws_sdk_ec2::types::{InstanceNetworkInterfaceSpecification, LaunchTemplateSpecification};
use kube::ResourceExt;

use crate::api::{Ec2NodeClass, NodeClaim, NodeClaimSpec, Requirement};
use crate::cloud::ami_family::AmiFamily;
use crate::cloud::draw::draw;
use crate::cloud::ec2::Ec2Provider;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::bootstrap::user_data::ignored_settings;
use crate::cloud::ec2::launch::create_fleet::{FleetRequest, Slot};
use crate::cloud::ec2::launch::dry_run_instance::{dry_run_instance, is_permitted, no_retries};
use crate::cloud::ec2::launch::dry_run_type::dry_type;
use crate::cloud::ec2::launch::request::Shapes;
use crate::cloud::ec2::launch::select::Choice;
use crate::cloud::ec2::launch::templates::spec::Template;
use crate::cloud::{Cloud, LaunchError, LaunchRequest, Verdict};
use crate::model::labels;
use crate::model::offering::CapacityType;
use crate::model::requirement::Requirements;
use crate::sync::lock;

/// How long a verdict holds, milliseconds.
const TTL_MS: i64 = 1_800_000;

/// Verdicts by UID of the class: the state they were made on, and when they end.
#[derive(Debug, Default)]
pub struct Verdicts {
    kept: Mutex<HashMap<String, (u64, Verdict, i64)>>,
}

impl Verdicts {
    fn get(&self, uid: &str, state: u64, now_ms: i64) -> Option<Verdict> {
        let kept = lock(&self.kept);
        let (known, verdict, until) = kept.get(uid)?;
        (*known == state && *until > now_ms).then(|| verdict.clone())
    }

    fn keep(&self, uid: String, state: u64, verdict: Verdict, now_ms: i64) {
        let mut kept = lock(&self.kept);
        kept.retain(|_, (_, _, until)| *until > now_ms);
        kept.insert(uid, (state, verdict, now_ms + TTL_MS));
    }
}

/// What a verdict depends on: the spec, the annotations, the lists of the status, and what NodePools ask for.
fn state_of(class: &Ec2NodeClass, demands: &[Requirements]) -> u64 {
    let status = class.status.clone().unwrap_or_default();
    let lists = (&status.subnets, &status.security_groups, &status.amis, &status.instance_profile);
    let text = format!("{:?} {:?} {lists:?} {demands:?}", class.spec, class.annotations());
    draw(0, &[&class.name_any(), &text])
}

/// What a dry run's answer means: `Ok(())` passes.
pub(crate) enum Outcome {
    /// EC2 would launch it.
    Passed,
    /// Certain until something changes.
    Certain(Verdict),
    /// To be asked again.
    Passing(Verdict),
}

impl Outcome {
    /// What it says of the class.
    pub(crate) fn verdict(self) -> Verdict {
        match self {
            Self::Passed => Verdict::True,
            Self::Certain(verdict) | Self::Passing(verdict) => verdict,
        }
    }

    fn refused(reason: &'static str, text: &str, error: &ApiError) -> Self {
        Self::Certain(Verdict::False(reason, format!("{text}: {}: {error}", error.reason())))
    }
}

/// What the answer to the making of the template means.
fn template_outcome(error: &ApiError) -> Outcome {
    if error.message.contains("User data is limited to") {
        let text = "the user data is too long for EC2";
        return Outcome::refused("UserDataSizeLimitExceeded", text, error);
    }
    match error.class {
        Class::Unauthorized => {
            let text = "the controller may not call ec2:CreateLaunchTemplate as this class needs it";
            Outcome::refused("CreateLaunchTemplateAuthCheckFailed", text, error)
        }
        _ => Outcome::Passing(Verdict::Unjudged(error.to_string())),
    }
}

/// What the answer to a dry CreateFleet means.
fn fleet_outcome(answer: Result<(), ApiError>) -> Outcome {
    match answer {
        Ok(()) => Outcome::Passed,
        Err(error) => match error.class {
            Class::DryRunOk => Outcome::Passed,
            Class::Unauthorized => {
                let text = "the controller may not call ec2:CreateFleet as this class needs it";
                Outcome::refused("CreateFleetAuthCheckFailed", text, &error)
            }
            _ => Outcome::Passing(Verdict::Unjudged(error.to_string())),
        },
    }
}

/// What the answers to dry RunInstances mean, one for each subnet tried: one that passes is enough, else the first decides.
fn run_outcome(answers: &[Result<(), ApiError>], own_profile: bool) -> Outcome {
    if answers.iter().any(is_permitted) {
        return Outcome::Passed;
    }
    let Some(Err(error)) = answers.first() else {
        return Outcome::Passing(Verdict::Unjudged("the class has no subnet to try".into()));
    };
    if error.code == "InvalidParameterValue" && error.message.contains("Invalid IAM Instance Profile name") {
        return Outcome::Passing(if own_profile {
            // IAM takes a while to show a new profile to EC2.
            Verdict::Unjudged(error.to_string())
        } else {
            Verdict::False("InstanceProfileNotFound", format!("EC2 does not know spec.instanceProfile: {error}"))
        });
    }
    if error.class == Class::Unauthorized {
        let text = "the controller may not call ec2:RunInstances as this class needs it";
        return Outcome::refused("RunInstancesAuthCheckFailed", text, error);
    }
    Outcome::Passing(Verdict::Unjudged(error.to_string()))
}

/// What is tried dry.
pub(crate) struct Attempt {
    /// The launch template.
    pub(crate) template: Template,
    /// The instance type.
    pub(crate) instance_type: String,
    /// Subnets, those in zones where the instance type is offered first: the first one's error decides.
    pub(crate) subnets: Vec<String>,
    /// Tags of everything.
    pub(crate) tags: std::collections::BTreeMap<String, String>,
}

impl Attempt {
    /// The request for a fleet by a template of this name.
    pub(crate) fn fleet(&self, class: &Ec2NodeClass, template: &str) -> FleetRequest {
        let slot = |subnet: &String| Slot {
            instance_type: self.instance_type.clone(),
            zone: zone_of(class, subnet),
            subnet: subnet.clone(),
            image: self.template.image_id.clone(),
            price: crate::model::units::MicroUsd(0),
        };
        FleetRequest {
            token: String::new(),
            count: 1,
            context: class.spec.context.clone(),
            capacity_type: CapacityType::OnDemand,
            reservation: None,
            prioritized: false,
            templates: vec![(template.to_owned(), self.subnets.iter().map(slot).collect())],
            tags: self.tags.clone(),
            instance_tags: std::collections::BTreeMap::new(),
        }
    }
}

impl Ec2Provider {
    /// Tries a class, whose status is what it comes to now; or says what is still known from half an hour ago at most. Where
    /// launches are not tried dry, what can be told without EC2 is.
    pub(crate) async fn try_dry(&self, class: &Ec2NodeClass, demands: &[Requirements], now_ms: i64) -> Verdict {
        if !self.options.dry_run {
            return match self.to_try(class, demands) {
                Err(Outcome::Certain(verdict)) => verdict,
                Err(Outcome::Passed | Outcome::Passing(_)) | Ok(_) => Verdict::True,
            };
        }
        let uid = class.uid().unwrap_or_default();
        let state = state_of(class, demands);
        if let Some(verdict) = self.verdicts.get(&uid, state, now_ms) {
            return verdict;
        }
        match self.dry_launch(class, demands).await {
            Outcome::Passed => {
                self.verdicts.keep(uid, state, Verdict::True, now_ms);
                Verdict::True
            }
            Outcome::Certain(verdict) => {
                self.verdicts.keep(uid, state, verdict.clone(), now_ms);
                verdict
            }
            Outcome::Passing(verdict) => verdict,
        }
    }

    /// What is tried for a class, whose status is what it comes to and whose NodePools ask for `demands`.
    ///
    /// # Errors
    /// There is nothing to try: what that means.
    pub(crate) fn to_try(&self, class: &Ec2NodeClass, demands: &[Requirements]) -> Result<Attempt, Outcome> {
        let catalog = self.catalog(class);
        let images = class.status.as_ref().map(|status| status.amis.as_slice()).unwrap_or_default();
        let Some(candidate) = dry_type(&catalog, images, demands) else {
            let message = "no instance type is offered in the zones of the class's subnets and boots its images";
            return Err(Outcome::Passing(Verdict::Unjudged(message.into())));
        };
        let choice = Choice { capacity_type: CapacityType::OnDemand, reservation: None, candidates: vec![candidate] };
        let claim = NodeClaim::new("", NodeClaimSpec { requirements: tenancy(demands), ..NodeClaimSpec::default() });
        let request = LaunchRequest {
            client_token: String::new(),
            node_claim: String::new(),
            node_pool: String::new(),
            node_class: class.name_any(),
            overrides: vec![],
            labels: std::collections::BTreeMap::new(),
            taints: vec![],
            details: None,
        };
        let basis = self.basis(Arc::new(class.clone()), self.known_group(class));
        let (settings, region) = (self.options.settings(class), self.snapshot());
        let ground = self.ground(&request, &claim, &basis, Shapes::of(&settings, &region.types));
        let made = ground.tags().and_then(|tags| ground.groups(&choice, &tags).map(|groups| (tags, groups)));
        let (tags, groups) = match made {
            Ok(made) => made,
            Err(LaunchError::NodeClassNotReady { reason, .. }) => {
                return Err(Outcome::Certain(Verdict::False("UserDataInvalid", reason)));
            }
            Err(error) => return Err(Outcome::Passing(Verdict::Unjudged(error.to_string()))),
        };
        let Some(template) = groups.into_iter().next().map(|group| group.template) else {
            return Err(Outcome::Passing(Verdict::Unjudged("nothing to try".into())));
        };
        let told = self.clients.metrics.user_data_bytes.with_label_values(&[class.name_any()]);
        told.set(i64::try_from(template.user_data_bytes()).unwrap_or(i64::MAX));
        let candidate = &choice.candidates[0];
        let mut subnets: Vec<_> = class.status.iter().flat_map(|status| &status.subnets).collect();
        subnets.sort_by_key(|subnet| !candidate.zones.contains_key(&subnet.zone));
        let subnets = subnets.into_iter().map(|subnet| subnet.id.clone()).collect();
        Ok(Attempt { template, instance_type: candidate.instance_type.name.to_string(), subnets, tags })
    }

    async fn dry_launch(&self, class: &Ec2NodeClass, demands: &[Requirements]) -> Outcome {
        let tried = match self.to_try(class, demands) {
            Ok(tried) => tried,
            Err(outcome) => return outcome,
        };
        if AmiFamily::of(&class.spec) == AmiFamily::Bottlerocket {
            let ignored = ignored_settings(class.spec.user_data.as_deref().unwrap_or_default());
            if !ignored.is_empty() {
                tracing::warn!(class = class.name_any(), ?ignored, "settings in spec.userData that nodes do not get");
            }
        }
        let held = match self.templates.ensure(&self.clients, &tried.template, crate::clock::now().0).await {
            Ok(held) => held,
            Err(error) => return template_outcome(&error),
        };
        match fleet_outcome(self.dry_fleet(&tried.fleet(class, held.name())).await) {
            Outcome::Passed => {}
            other => return other,
        }
        let mut answers = Vec::new();
        for subnet in &tried.subnets {
            let answer = self.dry_run(class, held.name(), &tried.instance_type, subnet, &tried.tags).await;
            let permitted = is_permitted(&answer);
            answers.push(answer);
            if permitted {
                break;
            }
        }
        run_outcome(&answers, class.spec.instance_profile.is_none())
    }

    /// Asks for a fleet that is not made.
    ///
    /// # Errors
    /// EC2's; [`Class::DryRunOk`] says that it would be.
    pub(crate) async fn dry_fleet(&self, fleet: &FleetRequest) -> Result<(), ApiError> {
        let input = fleet.input().set_client_token(None).dry_run(true);
        let call = self.clients.ec2.create_fleet();
        let call = call
            .dry_run(true)
            .set_type(input.get_type().clone())
            .set_context(input.get_context().clone())
            .set_launch_template_configs(input.get_launch_template_configs().clone())
            .set_target_capacity_specification(input.get_target_capacity_specification().clone())
            .set_on_demand_options(input.get_on_demand_options().clone())
            .set_tag_specifications(input.get_tag_specifications().clone());
        let answer = call.customize().config_override(no_retries()).send().await;
        answer.map(|_| ()).map_err(ApiError::of("ec2:CreateFleet"))
    }

    async fn dry_run(
        &self,
        class: &Ec2NodeClass,
        template: &str,
        instance_type: &str,
        subnet: &str,
        tags: &std::collections::BTreeMap<String, String>,
    ) -> Result<(), ApiError> {
        let interface = || InstanceNetworkInterfaceSpecification::builder().subnet_id(subnet);
        let interfaces = if class.spec.network_interfaces.is_empty() {
            vec![interface().device_index(0).build()]
        } else {
            let listed = class.spec.network_interfaces.iter().map(|listed| {
                interface()
                    .device_index(listed.device_index)
                    .network_card_index(listed.network_card_index)
                    .interface_type(&listed.interface_type)
                    .build()
            });
            listed.collect()
        };
        let template = LaunchTemplateSpecification::builder().launch_template_name(template).version("$Latest").build();
        dry_run_instance(&self.clients, instance_type, interfaces, tags, |call| call.launch_template(template)).await
    }
}

/// The tenancy to try, as a claim asks for it: dedicated where a NodePool asks for a tenancy that may be, also among others.
fn tenancy(demands: &[Requirements]) -> Vec<Requirement> {
    let key = labels::INSTANCE_TENANCY;
    let dedicated = demands.iter().filter_map(|demand| demand.get(key)).any(|tenancy| tenancy.contains("dedicated"));
    let asked =
        || Requirement { key: key.into(), operator: "In".into(), values: vec!["dedicated".into()], min_values: None };
    dedicated.then(asked).into_iter().collect()
}

fn zone_of(class: &Ec2NodeClass, subnet: &str) -> String {
    let subnets = class.status.iter().flat_map(|status| &status.subnets);
    subnets.filter(|other| other.id == subnet).map(|other| other.zone.clone()).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::ec2::launch::request::tests as tests_of_prepare;

    fn error(code: &str, message: &str) -> ApiError {
        let class = crate::cloud::ec2::aws::errors::class_of(code);
        ApiError { action: "ec2:X", code: code.into(), message: message.into(), class }
    }

    fn reason(outcome: Outcome) -> (&'static str, bool) {
        match outcome {
            Outcome::Passed => ("passed", true),
            Outcome::Certain(Verdict::False(reason, _)) => (reason, true),
            Outcome::Passing(Verdict::False(reason, _)) => (reason, false),
            Outcome::Passing(Verdict::Unjudged(_)) => ("unjudged", false),
            Outcome::Certain(other) | Outcome::Passing(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn c33_each_denied_action_has_its_reason() {
        let denied = error("UnauthorizedOperation", "no");
        assert_eq!(reason(template_outcome(&denied)), ("CreateLaunchTemplateAuthCheckFailed", true));
        let long = error("InvalidUserData.Malformed", "User data is limited to 16384 bytes");
        assert_eq!(reason(template_outcome(&long)), ("UserDataSizeLimitExceeded", true));
        assert_eq!(reason(template_outcome(&error("InternalError", ""))), ("unjudged", false));
        assert_eq!(reason(fleet_outcome(Err(denied.clone()))), ("CreateFleetAuthCheckFailed", true));
        assert_eq!(reason(fleet_outcome(Err(error("DryRunOperation", "")))), ("passed", true));
        assert_eq!(reason(run_outcome(&[Err(denied)], true)), ("RunInstancesAuthCheckFailed", true));
    }

    #[test]
    fn c33_a_later_subnet_that_passes_is_enough_and_else_the_first_decides() {
        let (denied, dry) = (error("UnauthorizedOperation", "no"), error("DryRunOperation", ""));
        assert_eq!(reason(run_outcome(&[Err(denied.clone()), Err(dry)], true)), ("passed", true));
        let answers = [Err(error("InvalidSubnetID.NotFound", "")), Err(denied)];
        assert_eq!(reason(run_outcome(&answers, true)), ("unjudged", false));
        assert_eq!(reason(run_outcome(&[], true)), ("unjudged", false));
    }

    #[tokio::test]
    async fn c33_subnets_in_zones_without_the_type_are_tried_last() {
        let (clients, _) = crate::cloud::ec2::aws::client::wire::clients(Box::new(|_| None));
        let ec2 = Ec2Provider::new(clients, crate::cloud::ec2::options::Options::of("c1"), tests_of_prepare::facts());
        let mut class = tests_of_prepare::class(serde_json::json!({}));
        let subnets = &mut class.status.as_mut().unwrap().subnets;
        let second = serde_json::json!({"id": "subnet-b2", "zone": "us-east-1b", "zoneID": "use1-az2"});
        subnets.push(serde_json::from_value(second).unwrap());
        for (zones, expected) in [
            (&["us-east-1a", "us-east-1b"][..], ["subnet-a", "subnet-b", "subnet-b2"]),
            (&["us-east-1b"], ["subnet-b", "subnet-b2", "subnet-a"]),
        ] {
            let zones = zones.iter().map(|zone| (*zone).to_owned()).collect();
            let zones = Some(Ok([("m5.large".to_owned(), zones)].into()));
            ec2.learn_region(crate::cloud::ec2::offerings::region_snapshot::RegionResponses {
                zones,
                ..Default::default()
            });
            let Ok(tried) = ec2.to_try(&class, &[]) else { panic!("there is something to try") };
            assert_eq!(
                (tried.instance_type.as_str(), &tried.subnets[..]),
                ("m5.large", &expected.map(str::to_owned)[..])
            );
        }
    }

    #[tokio::test]
    async fn c33_a_class_is_tried_as_dedicated_where_a_pool_may_have_dedicated_nodes() {
        let (clients, _) = crate::cloud::ec2::aws::client::wire::clients(Box::new(|_| None));
        let ec2 = Ec2Provider::new(clients, crate::cloud::ec2::options::Options::of("c1"), tests_of_prepare::facts());
        let class = tests_of_prepare::class(serde_json::json!({}));
        let asks = |operator: &str, values: &[&str]| {
            let values = values.iter().map(|value| (*value).to_owned()).collect();
            let key = labels::INSTANCE_TENANCY.to_owned();
            Requirements::from_api(&[Requirement { key, operator: operator.into(), values, min_values: None }]).unwrap()
        };
        let silent = Requirements::default;
        for (what, demands, expected) in [
            ("no pool", vec![], "default"),
            ("a pool that says nothing", vec![silent()], "default"),
            ("shared hardware", vec![asks("In", &["default"])], "default"),
            ("not dedicated", vec![asks("NotIn", &["dedicated"])], "default"),
            ("dedicated", vec![asks("In", &["dedicated"])], "dedicated"),
            ("either", vec![asks("In", &["default", "dedicated"])], "dedicated"),
            ("any", vec![asks("Exists", &[])], "dedicated"),
            ("one of two pools", vec![silent(), asks("In", &["dedicated"])], "dedicated"),
        ] {
            let Ok(tried) = ec2.to_try(&class, &demands) else { panic!("there is something to try") };
            assert_eq!(tried.template.tenancy, expected, "{what}");
        }
    }

    #[test]
    fn c33_a_profile_that_ec2_does_not_know_is_the_users_fault_only_when_it_is_the_users() {
        let unknown = || [Err(error("InvalidParameterValue", "Value (x) ... Invalid IAM Instance Profile name"))];
        assert_eq!(reason(run_outcome(&unknown(), true)), ("unjudged", false));
        assert_eq!(reason(run_outcome(&unknown(), false)), ("InstanceProfileNotFound", false));
    }

    #[tokio::test]
    async fn user_data_that_can_not_be_used_is_told_without_a_dry_run() {
        let class = |user_data: &str| {
            let mut class =
                tests_of_prepare::class(serde_json::json!({"amiFamily": "Bottlerocket", "userData": user_data}));
            class.metadata.uid = Some(user_data.to_owned());
            class
        };
        let (clients, seen) = crate::cloud::ec2::aws::client::wire::clients(Box::new(|_| None));
        let options =
            crate::cloud::ec2::options::Options { dry_run: false, ..crate::cloud::ec2::options::Options::of("c1") };
        let ec2 = Ec2Provider::new(clients, options, tests_of_prepare::facts());
        let verdict = ec2.try_dry(&class("settings = 3"), &[], 0).await;
        assert!(matches!(verdict, Verdict::False("UserDataInvalid", _)), "{verdict:?}");
        assert_eq!(ec2.try_dry(&class("[settings.motd]"), &[], 0).await, Verdict::True);
        assert!(seen.lock().unwrap().is_empty(), "EC2 was not asked");
    }

    #[test]
    fn c33_a_verdict_holds_for_half_an_hour_unless_an_annotation_changes() {
        let mut class = crate::test_support::objects::node_class("default", &serde_json::json!({}));
        let verdicts = Verdicts::default();
        verdicts.keep("u".into(), state_of(&class, &[]), Verdict::True, 0);
        assert_eq!(verdicts.get("u", state_of(&class, &[]), TTL_MS - 1), Some(Verdict::True));
        assert_eq!(verdicts.get("u", state_of(&class, &[]), TTL_MS), None);
        class.metadata.annotations = Some([("touched".to_owned(), "1".to_owned())].into());
        assert_eq!(verdicts.get("u", state_of(&class, &[]), 1), None);
    }
}
