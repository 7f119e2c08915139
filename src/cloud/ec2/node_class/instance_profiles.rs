//! Instance profiles: given by name, or made for a role.
//!
//! A profile is never changed: when the role changes a new one is made, and the old one is kept for the nodes that have it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;

use aws_sdk_iam::types::Tag;
use kube::{Resource, ResourceExt};

use crate::api::Ec2NodeClass;
use crate::cloud::draw::draw;
use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::tags::CLUSTER_TAG;
use crate::model::labels;
use crate::sync::lock;

/// How long the role of a profile is remembered, milliseconds.
const PROFILE_TTL_MS: i64 = 900_000;
/// How long it is remembered that a role doesn't exist, milliseconds.
const NO_ROLE_TTL_MS: i64 = 60_000;

/// How long a profile that was made or replaced is kept though nothing names it, milliseconds.
const PROTECTED_MS: i64 = 3_600_000;

/// The name that IAM knows a role by: what is after the last slash.
pub fn role_name(role: &str) -> &str {
    role.rsplit('/').next().unwrap_or(role)
}

/// Path of the profiles of a class.
pub fn path(region: &str, cluster: &str, uid: &str) -> String {
    format!("/karpenter/{region}/{cluster}/{uid}/")
}

/// A new name for a profile of a class. `nonce` makes it unlike every earlier one.
fn new_name(region: &str, cluster: &str, class: &str, nonce: &str) -> String {
    format!("{cluster}_{}", draw(0, &[region, class, nonce]))
}

/// The name that versions of Karpenter before 1.7 gave to the one profile of a class: FNV-1 of region and class. `None` where
/// IAM allows no such name.
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
    let mut all = class.spec.tags.clone();
    all.insert(format!("kubernetes.io/cluster/{cluster}"), "owned".into());
    all.insert(CLUSTER_TAG.into(), cluster.into());
    all.insert(labels::EC2_NODE_CLASS.into(), class.name_any());
    all.insert(labels::REGION.into(), region.into());
    all.into_iter().collect()
}

/// What is known of profiles and roles.
#[derive(Debug, Default)]
pub struct Profiles {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// Role of a profile, and until when that is believed.
    roles: HashMap<String, (Option<String>, i64)>,
    /// Roles that don't exist, and until when that is believed.
    missing: HashMap<String, (ApiError, i64)>,
    /// The profile last made for a class UID and role: its status may be older.
    made: HashMap<(String, String), String>,
    /// Profiles that are kept though nothing may name them, and until when.
    protected: HashMap<String, i64>,
}

impl Known {
    /// Keeps a profile for an hour: launches that are under way may have it.
    fn protect(&mut self, name: String, now_ms: i64) {
        self.protected.insert(name, now_ms + PROTECTED_MS);
    }
}

impl Profiles {
    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        lock(&self.known)
    }

    /// The profile that instances of a class get: `spec.instanceProfile`, or one with `spec.role`, which is made where the
    /// status names none that has this role. `nonce` goes into the name of a new one. One that is replaced is kept for an hour.
    ///
    /// # Errors
    /// IAM's.
    pub async fn resolve(
        &self,
        clients: &Clients,
        cluster: &str,
        class: &Ec2NodeClass,
        nonce: &str,
        now_ms: i64,
    ) -> Result<String, ApiError> {
        let before = class.status.as_ref().and_then(|status| status.instance_profile.clone());
        if let Some(given) = &class.spec.instance_profile {
            if let Some(replaced) = before.filter(|before| before != given) {
                self.known().protect(replaced, now_ms);
            }
            return Ok(given.clone());
        }
        let role = role_name(class.spec.role.as_deref().unwrap_or_default()).to_owned();
        let uid = class.meta().uid.clone().unwrap_or_default();
        let key = (uid.clone(), role.clone());
        let made = self.known().made.get(&key).cloned();
        if let Some(name) = made.or(before) {
            if self.role_of(clients, &name, now_ms).await?.as_deref() == Some(&*role) {
                return Ok(name);
            }
            self.known().protect(name, now_ms);
        }
        if let Some((error, until)) = self.known().missing.get(&role)
            && *until > now_ms
        {
            return Err(error.clone());
        }
        let name = new_name(&clients.region, cluster, &class.name_any(), nonce);
        let path = path(&clients.region, cluster, &uid);
        if let Err(error) = make(clients, &name, &path, &role, tags(class, cluster, &clients.region)).await {
            if let Err(left) = delete(clients, &name).await {
                tracing::warn!(profile = name, error = %left, "an instance profile without a role is left over");
            }
            let lacks_role = error.class == Class::NotFound && error.message.to_lowercase().contains("role");
            if lacks_role {
                self.known().missing.insert(role, (error.clone(), now_ms + NO_ROLE_TTL_MS));
            }
            return Err(error);
        }
        tracing::info!(profile = name, role, class = class.name_any(), "instance profile made");
        let mut known = self.known();
        known.roles.insert(name.clone(), (Some(role), now_ms + PROFILE_TTL_MS));
        known.protect(name.clone(), now_ms);
        known.made.insert(key, name.clone());
        Ok(name)
    }

    /// Role of a profile; `None` where the profile or its role isn't there.
    async fn role_of(&self, clients: &Clients, name: &str, now_ms: i64) -> Result<Option<String>, ApiError> {
        if let Some((role, until)) = self.known().roles.get(name)
            && *until > now_ms
        {
            return Ok(role.clone());
        }
        let role = get(clients, name).await?.flatten();
        self.known().roles.insert(name.to_owned(), (role.clone(), now_ms + PROFILE_TTL_MS));
        Ok(role)
    }

    /// Deletes the profiles made for the cluster that are older than an hour and that nothing uses.
    ///
    /// # Errors
    /// IAM's.
    pub async fn delete_unused(
        &self,
        clients: &Clients,
        cluster: &str,
        used: &BTreeSet<String>,
        now_ms: i64,
    ) -> Result<(), ApiError> {
        let all = list(clients, &format!("/karpenter/{}/{cluster}/", clients.region)).await?;
        let unused: Vec<String> = {
            let mut known = self.known();
            known.protected.retain(|_, until| *until > now_ms);
            let old = all.into_iter().filter(|(_, created_ms)| now_ms - created_ms >= PROTECTED_MS);
            let names = old.map(|(name, _)| name);
            names.filter(|name| !used.contains(name) && !known.protected.contains_key(name)).collect()
        };
        for name in unused {
            delete(clients, &name).await?;
        }
        Ok(())
    }

    /// Deletes every profile that was made for a class.
    ///
    /// # Errors
    /// IAM's.
    pub async fn delete_of_class(
        &self,
        clients: &Clients,
        cluster: &str,
        class: &Ec2NodeClass,
    ) -> Result<(), ApiError> {
        let uid = class.meta().uid.clone().unwrap_or_default();
        let found = list(clients, &path(&clients.region, cluster, &uid)).await?;
        let mut names: Vec<String> = found.into_iter().map(|(name, _)| name).collect();
        names.extend(legacy_name(&clients.region, cluster, &class.name_any()));
        for name in names {
            delete(clients, &name).await?;
        }
        self.known().made.retain(|(other, _), _| *other != uid);
        Ok(())
    }
}

/// Profiles under a path: names, and when they were made, milliseconds since the epoch.
async fn list(clients: &Clients, path: &str) -> Result<Vec<(String, i64)>, ApiError> {
    let mut pages = clients.iam.list_instance_profiles().path_prefix(path).into_paginator().send();
    let mut found = Vec::new();
    while let Some(page) = pages.next().await {
        let page = page.map_err(ApiError::of("iam:ListInstanceProfiles"))?;
        found.extend(page.instance_profiles().iter().map(|profile| {
            (profile.instance_profile_name().to_owned(), profile.create_date().to_millis().unwrap_or(i64::MAX))
        }));
    }
    Ok(found)
}

/// `None` without a profile; its role, if it has one.
///
/// # Errors
/// IAM's.
pub(crate) async fn get(clients: &Clients, name: &str) -> Result<Option<Option<String>>, ApiError> {
    let call = clients.iam.get_instance_profile().instance_profile_name(name);
    match call.send().await.map_err(ApiError::of("iam:GetInstanceProfile")) {
        Ok(answer) => {
            let roles = answer.instance_profile().map(aws_sdk_iam::types::InstanceProfile::roles).unwrap_or_default();
            Ok(Some(roles.first().map(|role| role.role_name().to_owned())))
        }
        Err(error) if error.class == Class::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

async fn make(
    clients: &Clients,
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

/// Deletes a profile and takes its role off before; one that isn't there is fine.
///
/// # Errors
/// IAM's.
pub async fn delete(clients: &Clients, name: &str) -> Result<(), ApiError> {
    let Some(role) = get(clients, name).await? else { return Ok(()) };
    if let Some(role) = role {
        let call = clients.iam.remove_role_from_instance_profile().instance_profile_name(name).role_name(role);
        gone_is_fine(call.send().await.map_err(ApiError::of("iam:RemoveRoleFromInstanceProfile")))?;
    }
    let call = clients.iam.delete_instance_profile().instance_profile_name(name);
    gone_is_fine(call.send().await.map_err(ApiError::of("iam:DeleteInstanceProfile")))?;
    tracing::info!(profile = name, "instance profile deleted");
    Ok(())
}

fn gone_is_fine<T>(result: Result<T, ApiError>) -> Result<(), ApiError> {
    match result {
        Err(error) if error.class != Class::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
