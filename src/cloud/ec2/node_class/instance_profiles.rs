//! Instance profiles of node classes: named by the class, or created for its role.
//!
//! A profile is immutable: when the role changes, a new profile is created and the old one is kept for the nodes that use it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::time::Duration;

use aws_sdk_iam::types::Tag;
use kube::{Resource, ResourceExt};
use stowage_api::Ec2NodeClass;
use stowage_model::draw::draw;
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::tags::CLUSTER_TAG;

/// How long the role of a profile is cached.
const PROFILE_TTL: Duration = Duration::from_mins(15);
/// How long the absence of a role is cached.
const MISSING_ROLE_TTL: Duration = Duration::from_mins(1);
/// How long an unused profile is kept after its creation or replacement: pending launches may use it.
const PROTECTION: Duration = Duration::from_hours(1);

/// The name of a role without its path.
pub fn role_name(role: &str) -> &str {
    role.rsplit('/').next().unwrap_or(role)
}

/// IAM path of the profiles of a class.
pub fn path(region: &str, cluster: &str, uid: &str) -> String {
    format!("/karpenter/{region}/{cluster}/{uid}/")
}

/// A name for a new profile of a class. `nonce` makes it unique.
fn new_name(region: &str, cluster: &str, class: &str, nonce: &str) -> String {
    format!("{cluster}_{}", draw(0, &[region, class, nonce]))
}

/// The name that Karpenter before 1.7 gave the only profile of a class: FNV-1 of region and class. `None` where IAM does not allow
/// the name.
fn legacy_name(region: &str, cluster: &str, class: &str) -> Option<String> {
    let hash = region
        .bytes()
        .chain(class.bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| hash.wrapping_mul(0x0000_0100_0000_01b3) ^ u64::from(byte));
    let name = format!("{cluster}_{hash}");
    let allowed = |c: char| c.is_ascii_alphanumeric() || "_+=,.@-".contains(c);
    (name.len() <= 128 && name.chars().all(allowed)).then_some(name)
}

/// Tags of a profile of a class.
fn tags(class: &Ec2NodeClass, cluster: &str, region: &str) -> Vec<(String, String)> {
    let mut all = class.spec.tags.clone().unwrap_or_default();
    all.insert(format!("kubernetes.io/cluster/{cluster}"), "owned".into());
    all.insert(CLUSTER_TAG.into(), cluster.into());
    all.insert(labels::EC2_NODE_CLASS.into(), class.name_any());
    all.insert(labels::REGION.into(), region.into());
    all.into_iter().collect()
}

/// Resolves, creates and deletes instance profiles; caches their roles.
#[derive(Debug, Default)]
pub struct InstanceProfiles {
    cache: Mutex<ProfileCache>,
}

#[derive(Debug, Default)]
struct ProfileCache {
    /// Role of a profile, and when the entry expires.
    roles: HashMap<String, (Option<String>, UnixMillis)>,
    /// Roles that don't exist, and when the entry expires.
    missing_roles: HashMap<String, (ApiError, UnixMillis)>,
    /// The profile last created for a class UID and role: the class's status may be older.
    created: HashMap<(String, String), String>,
    /// Profiles that are kept even if unused, and until when.
    protected: HashMap<String, UnixMillis>,
}

impl ProfileCache {
    /// Protects a profile from deletion for an hour: pending launches may use it.
    fn protect(&mut self, name: String, now: UnixMillis) {
        self.protected.insert(name, now + PROTECTION);
    }
}

impl InstanceProfiles {
    /// The profile of a class's instances: `spec.instanceProfile`, or one with `spec.role`, which is created where the status names
    /// none with this role. `nonce` makes the name of a new profile unique. A replaced profile is protected for an hour.
    ///
    /// # Errors
    /// An IAM call fails.
    pub async fn resolve(
        &self,
        clients: &AwsClients,
        cluster: &str,
        class: &Ec2NodeClass,
        nonce: &str,
        now: UnixMillis,
    ) -> Result<String, ApiError> {
        let before = class.status.as_ref().and_then(|status| status.instance_profile.clone());
        if let Some(given) = &class.spec.instance_profile {
            if let Some(replaced) = before.filter(|before| before != given) {
                lock(&self.cache).protect(replaced, now);
            }
            return Ok(given.clone());
        }
        let role = role_name(class.spec.role.as_deref().unwrap_or_default()).to_owned();
        let uid = class.meta().uid.clone().unwrap_or_default();
        let key = (uid.clone(), role.clone());
        let created = lock(&self.cache).created.get(&key).cloned();
        if let Some(name) = created.or(before) {
            if self.role_of(clients, &name, now).await?.as_deref() == Some(&*role) {
                return Ok(name);
            }
            lock(&self.cache).protect(name, now);
        }
        if let Some((error, expiry)) = lock(&self.cache).missing_roles.get(&role)
            && *expiry > now
        {
            return Err(error.clone());
        }
        let name = new_name(&clients.region, cluster, &class.name_any(), nonce);
        let path = path(&clients.region, cluster, &uid);
        if let Err(error) = create(clients, &name, &path, &role, tags(class, cluster, &clients.region)).await {
            if let Err(error) = delete(clients, &name).await {
                tracing::warn!(profile = name, %error, "could not delete instance profile without a role");
            }
            if error.is_missing_role() {
                lock(&self.cache).missing_roles.insert(role, (error.clone(), now + MISSING_ROLE_TTL));
            }
            return Err(error);
        }
        tracing::info!(profile = name, role, class = class.name_any(), "created instance profile");
        let mut cache = lock(&self.cache);
        cache.roles.insert(name.clone(), (Some(role), now + PROFILE_TTL));
        cache.protect(name.clone(), now);
        cache.created.insert(key, name.clone());
        Ok(name)
    }

    /// Role of a profile; `None` where the profile does not exist or has no role.
    async fn role_of(&self, clients: &AwsClients, name: &str, now: UnixMillis) -> Result<Option<String>, ApiError> {
        if let Some((role, expiry)) = lock(&self.cache).roles.get(name)
            && *expiry > now
        {
            return Ok(role.clone());
        }
        let role = get(clients, name).await?.flatten();
        lock(&self.cache).roles.insert(name.to_owned(), (role.clone(), now + PROFILE_TTL));
        Ok(role)
    }

    /// Deletes the unused profiles of the cluster that are older than an hour.
    ///
    /// # Errors
    /// An IAM call fails.
    pub async fn delete_unused(
        &self,
        clients: &AwsClients,
        cluster: &str,
        used: &BTreeSet<String>,
        now: UnixMillis,
    ) -> Result<(), ApiError> {
        let all = list(clients, &format!("/karpenter/{}/{cluster}/", clients.region)).await?;
        let unused: Vec<String> = {
            let mut cache = lock(&self.cache);
            cache.protected.retain(|_, until| *until > now);
            let old = all.into_iter().filter(|(_, created_at)| created_at.is_older_than(PROTECTION, now));
            let names = old.map(|(name, _)| name);
            names.filter(|name| !used.contains(name) && !cache.protected.contains_key(name)).collect()
        };
        delete_each(clients, unused).await
    }

    /// Deletes every profile that was created for a class.
    ///
    /// # Errors
    /// An IAM call fails.
    pub async fn delete_of_class(
        &self,
        clients: &AwsClients,
        cluster: &str,
        class: &Ec2NodeClass,
    ) -> Result<(), ApiError> {
        let uid = class.meta().uid.clone().unwrap_or_default();
        let found = list(clients, &path(&clients.region, cluster, &uid)).await?;
        let mut names: Vec<String> = found.into_iter().map(|(name, _)| name).collect();
        names.extend(legacy_name(&clients.region, cluster, &class.name_any()));
        delete_each(clients, names).await?;
        lock(&self.cache).created.retain(|(other, _), _| *other != uid);
        Ok(())
    }
}

/// Deletes profiles. A profile that IAM refuses to delete does not stop the others; a failure that would repeat for each of them does.
///
/// # Errors
/// The first refusal, or the failure.
async fn delete_each(clients: &AwsClients, names: Vec<String>) -> Result<(), ApiError> {
    let mut refused = Ok(());
    for name in names {
        match delete(clients, &name).await {
            Ok(()) => {}
            Err(error) if error.is_transient() => return Err(error),
            Err(error) => {
                tracing::warn!(profile = name, %error, "failed to delete instance profile");
                refused = refused.and(Err(error));
            }
        }
    }
    refused
}

/// Profiles under a path: names and creation times.
async fn list(clients: &AwsClients, path: &str) -> Result<Vec<(String, UnixMillis)>, ApiError> {
    let mut pages = clients.iam.list_instance_profiles().path_prefix(path).into_paginator().send();
    let mut found = Vec::new();
    while let Some(page) = pages.next().await {
        let page = page.map_err(ApiError::of("iam:ListInstanceProfiles"))?;
        found.extend(page.instance_profiles().iter().map(|profile| {
            let created_at = profile.create_date().to_millis().map_or(UnixMillis::MAX, UnixMillis);
            (profile.instance_profile_name().to_owned(), created_at)
        }));
    }
    Ok(found)
}

/// The role of a profile, if it has one; `None` where the profile does not exist.
///
/// # Errors
/// The IAM call fails.
pub(crate) async fn get(clients: &AwsClients, name: &str) -> Result<Option<Option<String>>, ApiError> {
    let call = clients.iam.get_instance_profile().instance_profile_name(name);
    match call.send().await.map_err(ApiError::of("iam:GetInstanceProfile")) {
        Ok(response) => {
            let roles = response.instance_profile().map(aws_sdk_iam::types::InstanceProfile::roles).unwrap_or_default();
            Ok(Some(roles.first().map(|role| role.role_name().to_owned())))
        }
        Err(error) if error.class == Class::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

async fn create(
    clients: &AwsClients,
    name: &str,
    path: &str,
    role: &str,
    tags: Vec<(String, String)>,
) -> Result<(), ApiError> {
    let tags: Vec<Tag> =
        tags.into_iter().filter_map(|(key, value)| Tag::builder().key(key).value(value).build().ok()).collect();
    let call = clients.iam.create_instance_profile().instance_profile_name(name).path(path).set_tags(Some(tags));
    match call.send().await.map_err(ApiError::of("iam:CreateInstanceProfile")) {
        Err(error) if error.class != Class::AlreadyExists => return Err(error),
        _ => {}
    }
    let call = clients.iam.add_role_to_instance_profile().instance_profile_name(name).role_name(role);
    call.send().await.map_err(ApiError::of("iam:AddRoleToInstanceProfile"))?;
    Ok(())
}

/// Removes the role of a profile and deletes it. No error where it does not exist.
///
/// # Errors
/// An IAM call fails.
pub async fn delete(clients: &AwsClients, name: &str) -> Result<(), ApiError> {
    let Some(role) = get(clients, name).await? else { return Ok(()) };
    if let Some(role) = role {
        let call = clients.iam.remove_role_from_instance_profile().instance_profile_name(name).role_name(role);
        ignore_not_found(call.send().await.map_err(ApiError::of("iam:RemoveRoleFromInstanceProfile")))?;
    }
    let call = clients.iam.delete_instance_profile().instance_profile_name(name);
    ignore_not_found(call.send().await.map_err(ApiError::of("iam:DeleteInstanceProfile")))?;
    tracing::info!(profile = name, "deleted instance profile");
    Ok(())
}

fn ignore_not_found<T>(result: Result<T, ApiError>) -> Result<(), ApiError> {
    match result {
        Err(error) if error.class != Class::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
