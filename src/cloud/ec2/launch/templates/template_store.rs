//! Launch templates in EC2: created on first use or [in advance](crate::ec2::launch::templates::prewarm), deleted a minute
//! after the last use.
//!
//! Locks: `entries` is released before the id of an entry is awaited. Both are held together only by `touch`, which does not wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::aws::filters::filter;
use crate::ec2::launch::templates::spec::Template;
use crate::ec2::tags::CLUSTER_TAG;

/// A template is deleted this long after its last use.
const TTL: Duration = Duration::from_mins(1);

/// Maximum deletions of a sweep: launches share their rate limit.
const MAX_DELETED: usize = 20;
/// Bytes of user data that cause a warning: 90 % of the limit of EC2.
const USER_DATA_WARNING: usize = 14_745;

/// A reference to a template in EC2. The template is not deleted as unused while a reference exists.
#[derive(Clone, Debug)]
pub struct TemplateRef {
    entry: Arc<Entry>,
}

impl TemplateRef {
    pub fn name(&self) -> &str {
        &self.entry.name
    }
}

#[derive(Debug)]
struct Entry {
    name: String,
    /// Id in EC2 once known. Locked while the template is searched or created, so that concurrent launches do so once.
    id: tokio::sync::Mutex<Option<String>>,
    /// [`UnixMillis`] of the last use.
    used_at: AtomicI64,
}

impl Entry {
    fn is_unused(&self, now: UnixMillis) -> bool {
        UnixMillis(self.used_at.load(Ordering::Relaxed)).is_older_than(TTL, now)
    }
}

/// The known templates by name.
#[derive(Debug, Default)]
pub struct TemplateStore {
    entries: Mutex<HashMap<String, Arc<Entry>>>,
}

impl TemplateStore {
    fn entries(&self) -> MutexGuard<'_, HashMap<String, Arc<Entry>>> {
        lock(&self.entries)
    }

    /// Returns a reference to the template in EC2, and creates it if it does not exist.
    ///
    /// # Errors
    /// DescribeLaunchTemplates or CreateLaunchTemplate failed.
    pub async fn ensure(
        &self,
        clients: &AwsClients,
        template: &Template,
        now: UnixMillis,
    ) -> Result<TemplateRef, ApiError> {
        let name = template.name();
        let entry = {
            let mut entries = self.entries();
            let new = || {
                let (id, used_at) = (tokio::sync::Mutex::default(), AtomicI64::new(now.0));
                Arc::new(Entry { name: name.clone(), id, used_at })
            };
            Arc::clone(entries.entry(name.clone()).or_insert_with(new))
        };
        entry.used_at.fetch_max(now.0, Ordering::Relaxed);
        let mut id = entry.id.lock().await;
        if id.is_none() {
            let found = match find(clients, &name).await? {
                Some(found) => found,
                None => create(clients, &name, template).await?,
            };
            *id = Some(found);
        }
        drop(id);
        Ok(TemplateRef { entry })
    }

    /// Records a use of a template. Returns whether it is known to exist in EC2.
    pub fn touch(&self, name: &str, now: UnixMillis) -> bool {
        self.entries().get(name).is_some_and(|entry| {
            entry.used_at.fetch_max(now.0, Ordering::Relaxed);
            entry.id.try_lock().is_ok_and(|id| id.is_some())
        })
    }

    /// Removes templates that EC2 reported as missing, so that their next use creates them.
    pub fn forget<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        let mut entries = self.entries();
        for name in names {
            entries.remove(name);
        }
    }

    /// Adds the existing templates of the cluster, left by an earlier process: they expire in a minute unless used.
    ///
    /// # Errors
    /// DescribeLaunchTemplates failed.
    pub async fn hydrate(&self, clients: &AwsClients, cluster: &str, now: UnixMillis) -> Result<usize, ApiError> {
        let found = list(clients, &[(CLUSTER_TAG, cluster)]).await?;
        let count = found.len();
        let mut entries = self.entries();
        for (name, id) in found {
            let new = || {
                let (id, used_at) = (tokio::sync::Mutex::new(Some(id)), AtomicI64::new(now.0));
                Arc::new(Entry { name: name.clone(), id, used_at })
            };
            entries.entry(name.clone()).or_insert_with(new);
        }
        Ok(count)
    }

    /// Deletes up to [`MAX_DELETED`] templates that were not used for a minute and have no reference. A failed deletion is retried in a
    /// minute.
    pub async fn delete_unused(&self, clients: &AwsClients, now: UnixMillis) {
        for entry in self.unused(now) {
            // A launch that needs the template now waits for this lock and recreates it.
            let mut id = entry.id.lock().await;
            if !entry.is_unused(now) {
                continue;
            }
            if let Some(known) = id.as_deref() {
                if let Err(error) = delete(clients, known).await {
                    tracing::warn!(id = known, %error, "failed to delete unused launch template, retrying in a minute");
                    entry.used_at.fetch_max(now.0, Ordering::Relaxed);
                    continue;
                }
                tracing::info!(id = known, "deleted unused launch template");
                *id = None;
            }
            drop(id);
            self.remove(&entry);
        }
    }

    /// Up to [`MAX_DELETED`] templates that were not used for a minute and have no reference.
    fn unused(&self, now: UnixMillis) -> Vec<Arc<Entry>> {
        // The table holds one reference.
        let unused = |entry: &&Arc<Entry>| entry.is_unused(now) && Arc::strong_count(entry) == 1;
        self.entries().values().filter(unused).take(MAX_DELETED).cloned().collect()
    }

    /// Removes a deleted template, unless a launch waits to recreate it.
    fn remove(&self, entry: &Arc<Entry>) {
        let mut entries = self.entries();
        let is_same = entries.get(&entry.name).is_some_and(|known| Arc::ptr_eq(known, entry));
        // The references of the table and the caller. A third could only come from the table, which is locked.
        if is_same && Arc::strong_count(entry) == 2 {
            entries.remove(&entry.name);
        }
    }
}

/// The id of the template with this name.
async fn find(clients: &AwsClients, name: &str) -> Result<Option<String>, ApiError> {
    let call = clients.ec2.describe_launch_templates().launch_template_names(name);
    match call.send().await.map_err(ApiError::of("ec2:DescribeLaunchTemplates")) {
        Ok(response) => {
            Ok(response.launch_templates().first().and_then(|found| found.launch_template_id()).map(str::to_owned))
        }
        Err(error) if error.class == Class::LaunchTemplateNotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Creates a template and returns its id.
async fn create(clients: &AwsClients, name: &str, template: &Template) -> Result<String, ApiError> {
    let call = clients
        .ec2
        .create_launch_template()
        .launch_template_name(name)
        .launch_template_data(template.data())
        .tag_specifications(template.tags());
    let bytes = template.user_data_bytes();
    if bytes >= USER_DATA_WARNING {
        tracing::warn!(class = template.class, bytes, "user data is close to the limit of 16384 bytes");
    }
    match call.send().await.map_err(ApiError::of("ec2:CreateLaunchTemplate")) {
        Ok(response) => {
            let id = response.launch_template().and_then(|made| made.launch_template_id()).unwrap_or_default();
            tracing::info!(
                template = name,
                id,
                image = template.image_id,
                class = template.class,
                "created launch template"
            );
            Ok(id.to_owned())
        }
        // Created by an attempt whose response was lost, or by another replica: equal names mean equal contents.
        Err(error) if error.class == Class::AlreadyExists => find(clients, name).await?.ok_or(error),
        Err(error) => Err(error),
    }
}

/// Names and ids of the templates with these tags.
///
/// # Errors
/// DescribeLaunchTemplates failed.
pub(crate) async fn list(clients: &AwsClients, tags: &[(&str, &str)]) -> Result<Vec<(String, String)>, ApiError> {
    let filters = tags.iter().map(|(key, value)| filter(format!("tag:{key}"), [*value])).collect();
    let call = clients.ec2.describe_launch_templates().set_filters(Some(filters)).max_results(200);
    let mut pages = call.into_paginator().send();
    let mut found = Vec::new();
    while let Some(page) = pages.next().await {
        let page = page.map_err(ApiError::of("ec2:DescribeLaunchTemplates"))?;
        found.extend(page.launch_templates().iter().filter_map(|template| {
            Some((template.launch_template_name()?.to_owned(), template.launch_template_id()?.to_owned()))
        }));
    }
    Ok(found)
}

/// Deletes a template; a missing template is not an error.
async fn delete(clients: &AwsClients, id: &str) -> Result<(), ApiError> {
    let call = clients.ec2.delete_launch_template().launch_template_id(id);
    match call.send().await.map_err(ApiError::of("ec2:DeleteLaunchTemplate")) {
        Err(error) if !matches!(error.class, Class::LaunchTemplateNotFound | Class::NotFound) => Err(error),
        _ => Ok(()),
    }
}

/// Deletes every template of a node class.
///
/// # Errors
/// DescribeLaunchTemplates or DeleteLaunchTemplate failed.
pub async fn delete_of_class(clients: &AwsClients, cluster: &str, class: &str) -> Result<(), ApiError> {
    for (name, id) in list(clients, &[(CLUSTER_TAG, cluster), (labels::EC2_NODE_CLASS, class)]).await? {
        delete(clients, &id).await?;
        tracing::info!(template = name, class, "deleted launch template of a deleted node class");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
