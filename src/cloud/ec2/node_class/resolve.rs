//! What a node class comes to: its subnets, security groups, images, instance profile, placement group and capacity
//! reservations, and a verdict on each.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;

use crate::api::conditions;
use crate::api::conditions::VALIDATION_SUCCEEDED;
use crate::api::node_class::AmiRequirement;
use crate::api::{Ec2NodeClass, Ec2NodeClassStatus, NodePool};
use crate::cloud::ami_family::AmiFamily;
use crate::cloud::ec2::Ec2Provider;
use crate::cloud::ec2::aws::errors::ApiError;
use crate::cloud::ec2::bootstrap::kubelet_validation;
use crate::cloud::ec2::bootstrap::kubelet_validation::{Gate, InvalidKubelet};
use crate::cloud::ec2::launch::dry_run_type::demands;
use crate::cloud::ec2::node_class::images;
use crate::cloud::ec2::node_class::images::ImageError;
use crate::cloud::ec2::node_class::subnets::Subnet;
use crate::cloud::ec2::node_class::{capacity_reservations, placement_group, security_groups, subnets};
use crate::cloud::ec2::placement_group::PlacementGroup;
use crate::cloud::ec2::tags::restricted_tag;
use crate::cloud::kubelet_config::expressions::Unusable;
use crate::cloud::{Resolution, Verdict};

/// Conditions, by the names that [`conditions::EC2_NODE_CLASS_DEPENDENTS`] lists.
const AMIS: &str = "AMIsReady";
const RESERVATIONS: &str = "CapacityReservationsReady";
const PROFILE: &str = "InstanceProfileReady";
const PLACEMENT: &str = "PlacementGroupReady";
const SECURITY_GROUPS: &str = "SecurityGroupsReady";
const SUBNETS: &str = "SubnetsReady";

/// What validation waits for.
const BEFORE_VALIDATION: [&str; 4] = [AMIS, PROFILE, SECURITY_GROUPS, SUBNETS];
/// When to look again after an API failed.
const AGAIN_SOON: Duration = Duration::from_secs(10);

/// What EC2 and IAM answered for a class.
pub struct Answers {
    /// Subnets.
    pub subnets: Result<Vec<Subnet>, ApiError>,
    /// Ids and names of security groups.
    pub security_groups: Result<Vec<(String, Option<String>)>, ApiError>,
    /// Images and what each boots on.
    pub images: Result<Vec<(images::Image, Vec<AmiRequirement>)>, ImageError>,
    /// Name of the instance profile.
    pub profile: Result<String, ApiError>,
    /// The placement group; `None` where the class asks for none.
    pub placement: Option<Result<Option<PlacementGroup>, ApiError>>,
    /// Capacity reservations; `None` where the class asks for none, or they are not used at all.
    pub reservations: Option<Result<Vec<capacity_reservations::Found>, ApiError>>,
}

/// The status and the verdicts that follow from the answers; what failed leaves what was there.
pub fn judge(
    before: &Ec2NodeClassStatus,
    answers: Answers,
    now_ms: i64,
) -> (Ec2NodeClassStatus, Vec<(&'static str, Verdict)>) {
    let mut status = before.clone();
    let unjudged = |error: &dyn std::fmt::Display| Verdict::Unjudged(error.to_string());
    let subnets = match answers.subnets {
        Ok(found) => {
            status.subnets = subnets::status(found);
            found_or(status.subnets.is_empty(), "SubnetsNotFound", "subnetSelectorTerms select no subnets")
        }
        Err(error) => unjudged(&error),
    };
    let security_groups = match answers.security_groups {
        Ok(found) => {
            status.security_groups = security_groups::status(found);
            let none = status.security_groups.is_empty();
            found_or(none, "SecurityGroupsNotFound", "securityGroupSelectorTerms select no security groups")
        }
        Err(error) => unjudged(&error),
    };
    let amis = match answers.images {
        Ok(found) => {
            status.amis = images::status(found, now_ms);
            found_or(status.amis.is_empty(), "AMINotFound", "amiSelectorTerms select no images")
        }
        Err(ImageError::Alias(error)) => {
            status.amis = vec![];
            Verdict::False("UnsupportedAlias", error.to_string())
        }
        Err(error @ ImageError::Api(_)) => unjudged(&error),
    };
    let profile = match answers.profile {
        Ok(name) => {
            status.instance_profile = Some(name);
            Verdict::True
        }
        Err(error) => unjudged(&error),
    };
    let placement = match answers.placement {
        None | Some(Ok(Some(_))) => Verdict::True,
        Some(Ok(None)) => Verdict::False("PlacementGroupNotFound", "placementGroupSelector selects no group".into()),
        Some(Err(error)) => Verdict::False("PlacementGroupResolutionFailed", error.to_string()),
    };
    let (found, reservations) = match answers.reservations {
        None => (vec![], Verdict::True),
        Some(Ok(found)) => (found.into_iter().map(|one| one.status).collect(), Verdict::True),
        // What is known of them stays, and the class launches all the same: reservations save money, no node depends on them.
        Some(Err(error)) => {
            let known = std::mem::take(&mut status.capacity_reservations);
            let left = if known.is_empty() { "none is used" } else { "those known so far are used" };
            let message = format!("capacity reservations could not be read, {left}: {error}");
            (known, Verdict::Degraded("CapacityReservationsUnreadable", message))
        }
    };
    status.capacity_reservations = capacity_reservations::status(found, now_ms);
    let verdicts = vec![
        (AMIS, amis),
        (RESERVATIONS, reservations),
        (PROFILE, profile),
        (PLACEMENT, placement),
        (SECURITY_GROUPS, security_groups),
        (SUBNETS, subnets),
    ];
    (status, verdicts)
}

fn found_or(none: bool, reason: &'static str, message: &str) -> Verdict {
    if none { Verdict::False(reason, message.to_owned()) } else { Verdict::True }
}

/// What can be said about a class without asking EC2 whether it would launch it; `None` asks EC2. `kubelet` is what is wrong
/// with its kubelet configuration.
pub fn validate(
    class: &Ec2NodeClass,
    verdicts: &[(&'static str, Verdict)],
    service_cidr: Option<&str>,
    kubelet: Option<&InvalidKubelet>,
) -> Option<Verdict> {
    if AmiFamily::of(&class.spec) == AmiFamily::Al2023 && service_cidr.is_none() {
        let message = "the addresses of services are not known, which AL2023 needs: allow eks:DescribeCluster or set STOWAGE_SERVICE_CIDR";
        return Some(Verdict::False("ClusterCIDRResolutionFailed", message.into()));
    }
    if let Some(error) = kubelet {
        return Some(Verdict::False(error.reason(), error.to_string()));
    }
    let before = class.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let mut unknown = Vec::new();
    let mut unready = Vec::new();
    for kind in BEFORE_VALIDATION {
        let verdict = verdicts.iter().find(|(other, _)| *other == kind).map(|(_, verdict)| verdict);
        match verdict {
            Some(Verdict::True | Verdict::Degraded(..)) => {}
            Some(Verdict::False(..)) => unready.push(kind),
            // What was known before stands.
            _ => match conditions::get(before, kind).map(|condition| condition.status.as_str()) {
                Some("True") => {}
                Some("False") => unready.push(kind),
                _ => unknown.push(kind),
            },
        }
    }
    if !unready.is_empty() {
        return Some(Verdict::False("DependenciesNotReady", format!("waiting for {}", unready.join(", "))));
    }
    if !unknown.is_empty() {
        return Some(Verdict::Unknown("DependenciesNotReady", format!("waiting for {}", unknown.join(", "))));
    }
    restricted_tag(&class.spec.tags)
        .map(|key| Verdict::False("TagValidationFailed", format!("tag {key} may not be set, remove it from spec.tags")))
}

impl Ec2Provider {
    /// What is wrong with a class's kubelet configuration, on the instance types of the region.
    pub(crate) fn judge_kubelet(&self, class: &Ec2NodeClass) -> Result<Option<Unusable>, InvalidKubelet> {
        let settings = self.options.settings(class);
        kubelet_validation::validate(&class.spec, Gate::of(&self.options, &settings, &self.snapshot().types))
    }

    /// Asks for what a class comes to.
    pub(crate) async fn resolve_class(&self, class: &Ec2NodeClass, pools: &[Arc<NodePool>]) -> Resolution {
        let (clients, spec, now) = (&self.clients, &class.spec, crate::clock::now().0);
        let facts = self.facts.load_full();
        let placement = async {
            match &spec.placement_group_selector {
                None => None,
                Some(selector) => Some(placement_group::find(clients, selector).await),
            }
        };
        let reservations = async {
            let terms = &spec.capacity_reservation_selector_terms;
            let asked = self.options.reserved_capacity && !terms.is_empty();
            if asked { Some(capacity_reservations::find(clients, terms).await) } else { None }
        };
        // Names of new profiles must not repeat, also where two processes begin in the same millisecond.
        let nonce = format!("{now}/{}", std::process::id());
        let (subnets, security_groups, images, profile, placement, reservations) = futures::join!(
            subnets::find(clients, &spec.subnet_selector_terms),
            security_groups::find(clients, &spec.security_group_selector_terms),
            images::find(clients, &self.parameters, &spec.ami_selector_terms, &facts.version, now),
            self.profiles.resolve(clients, &self.options.cluster_name, class, &nonce, now),
            placement,
            reservations,
        );
        if let Ok(subnets) = &subnets {
            self.addresses().describe(subnets);
            let zones = subnets.iter().filter_map(|subnet| Some((subnet.zone.as_str(), subnet.zone_id.as_deref()?)));
            self.shifts().know_zones(zones);
        }
        match &placement {
            None => self.know_group(class, None),
            Some(Ok(group)) => self.know_group(class, group.clone()),
            // The last good answer stays: launches keep working.
            Some(Err(_)) => {}
        }
        if let Some(Ok(found)) = &reservations {
            let counts = found.iter().map(|one| (one.status.id.as_str(), one.available));
            self.reservations().describe(counts, now);
        }
        let before = class.status.clone().unwrap_or_default();
        let answers = Answers { subnets, security_groups, images, profile, placement, reservations };
        let (status, mut verdicts) = judge(&before, answers, now);
        let mut resolved = class.clone();
        resolved.status = Some(status.clone());
        let kubelet = self.judge_kubelet(class);
        let known = validate(&resolved, &verdicts, facts.service_cidr.as_deref(), kubelet.as_ref().err());
        let validation = if let Some(verdict) = known {
            verdict
        } else {
            let demands = demands(pools.iter().map(|pool| &**pool), &class.name_any());
            self.try_dry(&resolved, &demands, now).await
        };
        let validation = match (validation, kubelet) {
            (Verdict::True, Ok(Some(unusable))) => Verdict::Degraded(
                "KubeletExpressionDropped",
                format!("{unusable}; what it would reserve counts as not set"),
            ),
            (verdict, _) => verdict,
        };
        verdicts.push((VALIDATION_SUCCEEDED, validation));
        let failed = verdicts.iter().any(|(_, verdict)| matches!(verdict, Verdict::Unjudged(_)));
        let again = if failed { AGAIN_SOON } else { self.options.refresh };
        let again =
            capacity_reservations::changes_in(&status.capacity_reservations, now).map_or(again, |wait| again.min(wait));
        Resolution { status: Some(status), verdicts, requeue_after: again }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::ec2::aws::errors::Class;
    use crate::cloud::ec2::node_class::capacity_reservations::tests::reservation;
    use crate::test_support::objects::node_class;
    use serde_json::json;

    fn class(spec: serde_json::Value) -> Ec2NodeClass {
        let mut whole = json!({"role": null});
        json_patch::merge(&mut whole, &spec);
        node_class("default", &json!({"spec": whole}))
    }

    fn throttled() -> ApiError {
        ApiError { action: "ec2:X", code: "RequestLimitExceeded".into(), message: "m".into(), class: Class::Throttled }
    }

    fn subnet() -> Subnet {
        Subnet { id: "subnet-1".into(), zone: "a".into(), zone_id: None, free: 1 }
    }

    fn answers() -> Answers {
        Answers {
            subnets: Ok(vec![subnet()]),
            security_groups: Ok(vec![("sg-1".into(), None)]),
            images: Ok(vec![]),
            profile: Ok("profile".into()),
            placement: None,
            reservations: None,
        }
    }

    fn verdict<'a>(verdicts: &'a [(&'static str, Verdict)], kind: &str) -> &'a Verdict {
        &verdicts.iter().find(|(other, _)| *other == kind).unwrap().1
    }

    #[test]
    fn what_is_not_found_is_false_and_its_list_is_empty() {
        let before = Ec2NodeClassStatus { subnets: subnets::status(vec![subnet()]), ..Ec2NodeClassStatus::default() };
        let nothing =
            Answers { subnets: Ok(vec![]), security_groups: Ok(vec![]), placement: Some(Ok(None)), ..answers() };
        let (status, verdicts) = judge(&before, nothing, 0);
        assert!(status.subnets.is_empty());
        for (kind, reason) in [
            (SUBNETS, "SubnetsNotFound"),
            (SECURITY_GROUPS, "SecurityGroupsNotFound"),
            (AMIS, "AMINotFound"),
            (PLACEMENT, "PlacementGroupNotFound"),
        ] {
            assert!(matches!(verdict(&verdicts, kind), Verdict::False(found, _) if *found == reason), "{kind}");
        }
        assert_eq!(verdict(&verdicts, PROFILE), &Verdict::True);
        assert_eq!(status.instance_profile.as_deref(), Some("profile"));
    }

    #[test]
    fn an_api_that_fails_leaves_what_was_known() {
        let before = Ec2NodeClassStatus {
            subnets: subnets::status(vec![subnet()]),
            instance_profile: Some("old".into()),
            ..Ec2NodeClassStatus::default()
        };
        let failed = Answers {
            subnets: Err(throttled()),
            profile: Err(throttled()),
            images: Err(ImageError::Api(throttled())),
            placement: Some(Err(throttled())),
            ..answers()
        };
        let (status, verdicts) = judge(&before, failed, 0);
        assert_eq!((status.subnets.len(), status.instance_profile.as_deref()), (1, Some("old")));
        for kind in [SUBNETS, PROFILE, AMIS] {
            assert!(matches!(verdict(&verdicts, kind), Verdict::Unjudged(_)), "{kind}");
        }
        assert!(matches!(verdict(&verdicts, PLACEMENT), Verdict::False("PlacementGroupResolutionFailed", _)));
    }

    #[test]
    fn reservations_that_can_not_be_read_are_told_and_hold_up_nothing() {
        let known = reservation("cr-1", "capacity-block", Some(41 * 60_000));
        let before = Ec2NodeClassStatus { capacity_reservations: vec![known.clone()], ..Ec2NodeClassStatus::default() };
        let (status, verdicts) = judge(&before, answers(), 0);
        assert_eq!(verdict(&verdicts, RESERVATIONS), &Verdict::True, "without terms");
        assert!(status.capacity_reservations.is_empty());
        let none = Answers { reservations: Some(Ok(vec![])), ..answers() };
        let (status, verdicts) = judge(&before, none, 0);
        assert_eq!((verdict(&verdicts, RESERVATIONS), status.capacity_reservations.len()), (&Verdict::True, 0));
        let found = capacity_reservations::Found { status: known, available: 1 };
        let (status, verdicts) =
            judge(&Ec2NodeClassStatus::default(), Answers { reservations: Some(Ok(vec![found])), ..answers() }, 0);
        assert_eq!((verdict(&verdicts, RESERVATIONS), &status), (&Verdict::True, &with(&status, &before)));
        let failed = || Answers { reservations: Some(Err(throttled())), ..answers() };
        let (status, verdicts) = judge(&before, failed(), 0);
        assert_eq!(status.capacity_reservations, before.capacity_reservations);
        assert!(matches!(verdict(&verdicts, RESERVATIONS), Verdict::Degraded("CapacityReservationsUnreadable", _)));
        let (status, _) = judge(&before, failed(), 60_000);
        assert_eq!(status.capacity_reservations[0].state, "expiring", "time goes on without the API");
        let (status, verdicts) = judge(&Ec2NodeClassStatus::default(), failed(), 0);
        assert!(status.capacity_reservations.is_empty());
        let Verdict::Degraded(_, message) = verdict(&verdicts, RESERVATIONS) else { panic!("told") };
        assert!(message.contains("none is used") && message.contains("RequestLimitExceeded"), "{message}");
    }

    /// A status with the reservations of another.
    fn with(status: &Ec2NodeClassStatus, other: &Ec2NodeClassStatus) -> Ec2NodeClassStatus {
        Ec2NodeClassStatus { capacity_reservations: other.capacity_reservations.clone(), ..status.clone() }
    }

    #[test]
    fn c29_an_alias_without_images_for_the_version_is_told() {
        let error = crate::cloud::ec2::node_class::ami_alias::parameters("al2@latest", "1.34").unwrap_err();
        let (_, verdicts) =
            judge(&Ec2NodeClassStatus::default(), Answers { images: Err(error.into()), ..answers() }, 0);
        assert!(matches!(verdict(&verdicts, AMIS), Verdict::False("UnsupportedAlias", _)));
    }

    fn all_true() -> Vec<(&'static str, Verdict)> {
        BEFORE_VALIDATION.map(|kind| (kind, Verdict::True)).into()
    }

    fn reason(class: &Ec2NodeClass, verdicts: &[(&'static str, Verdict)], cidr: Option<&str>) -> Option<&'static str> {
        let kubelet = kubelet_validation::validate(&class.spec, Gate::Off);
        validate(class, verdicts, cidr, kubelet.as_ref().err()).map(|verdict| match verdict {
            Verdict::False(reason, _) | Verdict::Unknown(reason, _) => reason,
            Verdict::True | Verdict::Degraded(..) | Verdict::Unjudged(_) => "",
        })
    }

    #[test]
    fn c33_validation_says_the_first_thing_that_is_wrong() {
        let al2023 = class(json!({"amiFamily": "AL2023", "kubelet": {"nonsense": 1}}));
        assert_eq!(reason(&al2023, &all_true(), None), Some("ClusterCIDRResolutionFailed"));
        assert_eq!(reason(&al2023, &all_true(), Some("10.0.0.0/16")), Some("InvalidKubeletConfiguration"));
        let tagged = class(json!({"amiFamily": "Custom", "tags": {"karpenter.sh/nodepool": "x"}}));
        let mut verdicts = all_true();
        verdicts[0].1 = Verdict::False("AMINotFound", String::new());
        assert_eq!(reason(&tagged, &verdicts, None), Some("DependenciesNotReady"));
        verdicts[0].1 = Verdict::Unjudged(String::new());
        assert!(matches!(validate(&tagged, &verdicts, None, None), Some(Verdict::Unknown("DependenciesNotReady", _))));
        assert_eq!(reason(&tagged, &all_true(), None), Some("TagValidationFailed"));
        assert_eq!(reason(&class(json!({"amiFamily": "Custom"})), &all_true(), None), None, "EC2 is asked");
    }
}
