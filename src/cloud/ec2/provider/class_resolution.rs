//! Resolution of a node class, and drift from it: gathers the responses of AWS, evaluates them with the pure functions of
//! [`crate::ec2::node_class`], and runs the dry-run validation.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use stowage_api::conditions::VALIDATION_SUCCEEDED;
use stowage_api::{Ec2NodeClass, NodeClaim, NodePool};
use stowage_model::events;
use stowage_model::labels;
use stowage_runtime::clock;

use crate::ec2::aws::errors::ApiError;
use crate::ec2::bootstrap::kubelet_validation;
use crate::ec2::bootstrap::kubelet_validation::{Gate, InvalidKubelet};
use crate::ec2::instances::describe;
use crate::ec2::instances::describe::{InstanceFacts, instance_id};
use crate::ec2::launch::dry_run_type::demands;
use crate::ec2::node_class::class_drift::{DriftInputs, ResolvedGroup, drift_reason};
use crate::ec2::node_class::resolve::{ClassResponses, RETRY, resolved_status, validate};
use crate::ec2::node_class::{images, security_groups, select_capacity_reservations, select_placement_group, subnets};
use crate::ec2::provider::Ec2Provider;
use crate::ec2::tags::{TagRoom, tag_room};
use crate::kubelet_config::expressions::Unusable;
use crate::{CloudError, Drift, Resolution, Verdict};

/// Time limit of one lookup: the others of a class, whose calls have responses, then update its status. Profiles have none, since a
/// canceled lookup could leave a new profile behind; IAM calls have few attempts instead.
const LOOKUP_TIMEOUT: Duration = Duration::from_mins(1);

/// The result of a lookup, or an error when it takes longer than `limit`.
async fn within<T, E: From<ApiError>>(limit: Duration, lookup: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    tokio::time::timeout(limit, lookup)
        .await
        .unwrap_or_else(|_| Err(ApiError::timed_out("resolving a node class").into()))
}

impl Ec2Provider {
    /// Validates a class's kubelet configuration on the instance types of the region.
    pub(crate) fn validate_kubelet(&self, class: &Ec2NodeClass) -> Result<Option<Unusable>, InvalidKubelet> {
        let settings = self.options.settings(class);
        let region = self.offerings.snapshot();
        kubelet_validation::validate(&class.spec, Gate::of(&self.options, &settings, &region.types))
    }

    /// Resolves and validates a class.
    pub(crate) async fn resolve_class(&self, class: &Ec2NodeClass, pools: &[Arc<NodePool>]) -> Resolution {
        let (clients, spec, now) = (&self.clients, &class.spec, clock::now());
        let facts = self.node_classes.cluster();
        let placement = async {
            match &spec.placement_group_selector {
                None => None,
                Some(selector) => Some(within(LOOKUP_TIMEOUT, select_placement_group::find(clients, selector)).await),
            }
        };
        let reservations = async {
            let terms = &spec.capacity_reservation_selector_terms;
            let selected = self.options.reserved_capacity && !terms.is_empty();
            if selected {
                Some(within(LOOKUP_TIMEOUT, select_capacity_reservations::find(clients, terms)).await)
            } else {
                None
            }
        };
        // Names of new profiles must be unique, even if two processes start in the same millisecond.
        let nonce = format!("{}/{}", now.0, std::process::id());
        let (subnets, security_groups, images, profile, placement, reservations) = futures::join!(
            within(LOOKUP_TIMEOUT, subnets::find(clients, &spec.subnet_selector_terms)),
            within(LOOKUP_TIMEOUT, security_groups::find(clients, &spec.security_group_selector_terms)),
            within(
                LOOKUP_TIMEOUT,
                images::find(clients, self.node_classes.parameters(), &spec.ami_selector_terms, &facts.version, now),
            ),
            self.node_classes.profiles().resolve(clients, &self.options.cluster_name, class, &nonce, now),
            placement,
            reservations,
        );
        if let Ok(subnets) = &subnets {
            self.node_classes.with_addresses(|addresses| addresses.set_described(subnets));
            let zones = subnets.iter().filter_map(|subnet| Some((subnet.zone.as_str(), subnet.zone_id.as_deref()?)));
            self.offerings.shifts().record_zone_ids(zones);
        }
        match &placement {
            None => self.node_classes.set_placement_group(class, None),
            Some(Ok(group)) => self.node_classes.set_placement_group(class, group.clone()),
            // The last resolved group stays valid, so that launches keep working.
            Some(Err(_)) => {}
        }
        if let Some(Ok(found)) = &reservations {
            let counts = found.iter().map(|one| (one.status.id.as_str(), one.available));
            self.offerings.with_reservations(|reservations| reservations.set_described(counts, now));
        }
        let before = class.status.clone().unwrap_or_default();
        let responses = ClassResponses { subnets, security_groups, images, profile, placement, reservations };
        let (status, mut verdicts) = resolved_status(&before, responses, now);
        let mut resolved = class.clone();
        resolved.status = Some(status.clone());
        let kubelet = self.validate_kubelet(class);
        let verdict = validate(&resolved, &verdicts, facts.service_cidr.as_deref(), kubelet.as_ref().err());
        let validation = if let Some(verdict) = verdict {
            verdict
        } else {
            let demands = demands(pools.iter().map(|pool| &**pool), &class.name_any());
            self.dry_run.validate(&resolved, &demands, now).await
        };
        let validation = match (validation, kubelet) {
            (Verdict::True, Ok(Some(unusable))) => Verdict::Degraded(
                events::KUBELET_EXPRESSION_DROPPED,
                format!("{unusable}; what it would reserve counts as not set"),
            ),
            (Verdict::True, _) if spec.tags.as_ref().is_some_and(|tags| tag_room(tags) == TagRoom::NoName) => {
                Verdict::Degraded(
                    events::TAG_VALIDATION_FAILED,
                    "instances get no tag Name: an instance has at most 50 tags, remove one of the 44 of spec.tags"
                        .into(),
                )
            }
            (verdict, _) => verdict,
        };
        verdicts.push((VALIDATION_SUCCEEDED, validation));
        let failed = verdicts.iter().any(|(_, verdict)| matches!(verdict, Verdict::Unjudged(_)));
        let again = if failed { RETRY } else { self.options.refresh };
        let again = select_capacity_reservations::changes_in(&status.capacity_reservations, now)
            .map_or(again, |wait| again.min(wait));
        Resolution { status: Some(status), verdicts, requeue_after: again }
    }

    /// Drift of a claim's instance, by the last list of instances. Drift from a capacity reservation is re-validated with a fresh
    /// description: EC2 turns such instances into on-demand ones, which do not drift.
    pub(crate) async fn drift_of(&self, claim: &NodeClaim, class: &Ec2NodeClass) -> Result<Option<Drift>, CloudError> {
        let id = claim.status.as_ref().and_then(|status| instance_id(status.provider_id.as_deref()?));
        let catalog = self.launch_context.catalog(class);
        let name = claim.labels().get(labels::INSTANCE_TYPE).map(String::as_str).unwrap_or_default();
        let entry = catalog.instance_types.iter().find(|entry| *entry.name == *name);
        let group = self.node_classes.placement_group(class);
        let placement_group = match &group {
            Some(group) => ResolvedGroup::Id(&group.id),
            None if self.node_classes.is_placement_group_resolved(class) => ResolvedGroup::Absent,
            None => ResolvedGroup::Unknown,
        };
        let evaluate = |instance: Option<&InstanceFacts>| {
            let inputs = DriftInputs { type_labels: entry.map(|entry| &entry.labels), instance, placement_group };
            drift_reason(claim, class, &inputs).map_err(|error| CloudError::Other(error.to_string()))
        };
        let drift = evaluate(id.and_then(|id| self.instances.facts(id)).as_ref())?;
        match (&drift, id) {
            (Some(Drift { event: events::CAPACITY_RESERVATION_DRIFT, .. }), Some(id)) => {
                evaluate(describe::facts_of(&self.clients, id).await?.as_ref())
            }
            _ => Ok(drift),
        }
    }
}
