//! Launch templates in EC2: made when first needed, or [ahead](crate::cloud::ec2::launch::templates::prewarm) of that; kept while they are wanted, deleted a minute
//! after.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::aws::filters::filter;
use crate::cloud::ec2::launch::templates::spec::Template;
use crate::cloud::ec2::tags::CLUSTER_TAG;
use crate::model::labels;
use crate::sync::lock;

/// A template that nobody used or wanted for so long is deleted, milliseconds.
const TTL_MS: i64 = 60_000;

/// Templates that are deleted in one go: launches share their rate limit.
const MOST_DELETED: usize = 20;
/// Bytes of user data that are warned of: nine tenths of what EC2 takes.
const NEARLY_TOO_LONG: usize = 14_745;

/// A template that is known to be in EC2. While one of these is held the template is not deleted for being unused.
#[derive(Clone, Debug)]
pub struct Held {
    slot: Arc<Slot>,
}

impl Held {
    /// Name of the template.
    pub fn name(&self) -> &str {
        &self.slot.name
    }
}

#[derive(Debug)]
struct Slot {
    name: String,
    /// Id in EC2, once it is known to be there. Held while it is looked up or made, so that a burst does so once.
    id: tokio::sync::Mutex<Option<String>>,
    used_ms: AtomicI64,
}

impl Slot {
    fn is_unused(&self, now_ms: i64) -> bool {
        now_ms - self.used_ms.load(Ordering::Relaxed) >= TTL_MS
    }
}

/// The templates this process knows.
#[derive(Debug, Default)]
pub struct Templates {
    slots: Mutex<HashMap<String, Arc<Slot>>>,
}

impl Templates {
    fn slots(&self) -> MutexGuard<'_, HashMap<String, Arc<Slot>>> {
        lock(&self.slots)
    }

    /// The template in EC2; makes it where it isn't there.
    ///
    /// # Errors
    /// EC2's, of DescribeLaunchTemplates and CreateLaunchTemplate.
    pub async fn ensure(&self, clients: &Clients, template: &Template, now_ms: i64) -> Result<Held, ApiError> {
        let name = template.name();
        let slot = {
            let mut slots = self.slots();
            let new = || {
                let (id, used_ms) = (tokio::sync::Mutex::default(), AtomicI64::new(now_ms));
                Arc::new(Slot { name: name.clone(), id, used_ms })
            };
            Arc::clone(slots.entry(name.clone()).or_insert_with(new))
        };
        slot.used_ms.fetch_max(now_ms, Ordering::Relaxed);
        let mut id = slot.id.lock().await;
        if id.is_none() {
            let found = match find(clients, &name).await? {
                Some(found) => found,
                None => create(clients, &name, template).await?,
            };
            *id = Some(found);
        }
        drop(id);
        Ok(Held { slot })
    }

    /// Notes that a template is wanted. Returns whether it is known to be in EC2.
    pub fn touch(&self, name: &str, now_ms: i64) -> bool {
        self.slots().get(name).is_some_and(|slot| {
            slot.used_ms.fetch_max(now_ms, Ordering::Relaxed);
            slot.id.try_lock().is_ok_and(|id| id.is_some())
        })
    }

    /// Forgets templates that EC2 says aren't there, so that they are made anew.
    pub fn forget<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        let mut slots = self.slots();
        for name in names {
            slots.remove(name);
        }
    }

    /// Takes in the templates of the cluster that an earlier process left: they are deleted in a minute unless used.
    ///
    /// # Errors
    /// EC2's.
    pub async fn hydrate(&self, clients: &Clients, cluster: &str, now_ms: i64) -> Result<usize, ApiError> {
        let found = list(clients, &[(CLUSTER_TAG, cluster)]).await?;
        let count = found.len();
        let mut slots = self.slots();
        for (name, id) in found {
            let new = || {
                let (id, used_ms) = (tokio::sync::Mutex::new(Some(id)), AtomicI64::new(now_ms));
                Arc::new(Slot { name: name.clone(), id, used_ms })
            };
            slots.entry(name.clone()).or_insert_with(new);
        }
        Ok(count)
    }

    /// Deletes templates that nobody used or wanted for a minute and nobody holds, a few at a time. One that can't be deleted is
    /// tried again in a minute.
    pub async fn delete_unused(&self, clients: &Clients, now_ms: i64) {
        for slot in self.unused(now_ms) {
            // A launch that wants it after all waits here, and makes it anew.
            let mut id = slot.id.lock().await;
            if !slot.is_unused(now_ms) {
                continue;
            }
            if let Some(known) = id.as_deref() {
                if let Err(error) = delete(clients, known).await {
                    tracing::warn!(id = known, %error, "unused launch template could not be deleted, trying again in a minute");
                    slot.used_ms.fetch_max(now_ms, Ordering::Relaxed);
                    continue;
                }
                tracing::info!(id = known, "unused launch template deleted");
                *id = None;
            }
            drop(id);
            self.remove(&slot);
        }
    }

    /// The first few templates that nobody used or wanted for a minute and nobody holds.
    fn unused(&self, now_ms: i64) -> Vec<Arc<Slot>> {
        // One is this table's own.
        let unused = |slot: &&Arc<Slot>| slot.is_unused(now_ms) && Arc::strong_count(slot) == 1;
        self.slots().values().filter(unused).take(MOST_DELETED).cloned().collect()
    }

    /// Forgets a template that is gone, unless somebody waits to make it anew.
    fn remove(&self, slot: &Arc<Slot>) {
        let mut slots = self.slots();
        let is_same = slots.get(&slot.name).is_some_and(|known| Arc::ptr_eq(known, slot));
        // The table's and the caller's. Another could only be had from the table, which is locked.
        if is_same && Arc::strong_count(slot) == 2 {
            slots.remove(&slot.name);
        }
    }
}

/// Id of the template of a name.
async fn find(clients: &Clients, name: &str) -> Result<Option<String>, ApiError> {
    let call = clients.ec2.describe_launch_templates().launch_template_names(name);
    match call.send().await.map_err(ApiError::of("ec2:DescribeLaunchTemplates")) {
        Ok(answer) => {
            Ok(answer.launch_templates().first().and_then(|found| found.launch_template_id()).map(str::to_owned))
        }
        Err(error) if error.class == Class::LaunchTemplateGone => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes a template; returns its id.
///
/// # Errors
/// EC2's.
async fn create(clients: &Clients, name: &str, template: &Template) -> Result<String, ApiError> {
    let call = clients
        .ec2
        .create_launch_template()
        .launch_template_name(name)
        .launch_template_data(template.data())
        .tag_specifications(template.tags());
    let bytes = template.user_data_bytes();
    if bytes >= NEARLY_TOO_LONG {
        tracing::warn!(class = template.class, bytes, "user data is nearly as long as EC2 allows, 16384 bytes");
    }
    match call.send().await.map_err(ApiError::of("ec2:CreateLaunchTemplate")) {
        Ok(answer) => {
            let id = answer.launch_template().and_then(|made| made.launch_template_id()).unwrap_or_default();
            tracing::info!(
                template = name,
                id,
                image = template.image_id,
                class = template.class,
                "launch template made"
            );
            Ok(id.to_owned())
        }
        // An attempt whose answer was lost, or another process of ours: the same name is the same content.
        Err(error) if error.class == Class::AlreadyExists => find(clients, name).await?.ok_or(error),
        Err(error) => Err(error),
    }
}

/// Names and ids of the templates with these tags.
///
/// # Errors
/// EC2's.
pub(crate) async fn list(clients: &Clients, tags: &[(&str, &str)]) -> Result<Vec<(String, String)>, ApiError> {
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

/// Deletes a template; one that is gone already is fine.
///
/// # Errors
/// EC2's.
async fn delete(clients: &Clients, id: &str) -> Result<(), ApiError> {
    let call = clients.ec2.delete_launch_template().launch_template_id(id);
    match call.send().await.map_err(ApiError::of("ec2:DeleteLaunchTemplate")) {
        Err(error) if !matches!(error.class, Class::LaunchTemplateGone | Class::NotFound) => Err(error),
        _ => Ok(()),
    }
}

/// Deletes every template that was made for a node class.
///
/// # Errors
/// EC2's.
pub async fn delete_of_class(clients: &Clients, cluster: &str, class: &str) -> Result<(), ApiError> {
    for (name, id) in list(clients, &[(CLUSTER_TAG, cluster), (labels::EC2_NODE_CLASS, class)]).await? {
        delete(clients, &id).await?;
        tracing::info!(template = name, class, "launch template of a deleted node class is gone");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::cloud::ec2::aws::client::wire;
    use crate::cloud::ec2::launch::templates::spec::tests::template;

    fn answers(exists: Arc<AtomicBool>) -> wire::Answer {
        let described = "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId></item></launchTemplates>";
        Box::new(move |request| match request.action.as_str() {
            "DescribeLaunchTemplates" if !exists.load(Ordering::SeqCst) => {
                wire::refusal("InvalidLaunchTemplateName.NotFoundException", "gone")
            }
            "DescribeLaunchTemplates" => wire::ok("DescribeLaunchTemplates", described),
            "CreateLaunchTemplate" => {
                exists.store(true, Ordering::SeqCst);
                wire::ok(
                    "CreateLaunchTemplate",
                    "<launchTemplate><launchTemplateId>lt-1</launchTemplateId></launchTemplate>",
                )
            }
            "DeleteLaunchTemplate" => {
                exists.store(false, Ordering::SeqCst);
                wire::ok("DeleteLaunchTemplate", "")
            }
            other => panic!("{other} was not expected"),
        })
    }

    fn actions(seen: &Mutex<Vec<wire::Seen>>) -> Vec<String> {
        seen.lock().unwrap().iter().map(|request| request.action.clone()).collect()
    }

    #[tokio::test]
    async fn c18_a_burst_makes_one_template_and_later_launches_find_it() {
        let (clients, seen) = wire::clients(answers(Arc::default()));
        let (templates, content) = (Templates::default(), template());
        let burst = (0..20).map(|_| templates.ensure(&clients, &content, 0));
        for held in futures::future::join_all(burst).await {
            assert_eq!(held.unwrap().name(), content.name());
        }
        assert_eq!(actions(&seen), ["DescribeLaunchTemplates", "CreateLaunchTemplate"]);
        let made = &seen.lock().unwrap()[1].form;
        assert_eq!(made["LaunchTemplateName"], content.name());
        assert_eq!(made["TagSpecification.1.ResourceType"], "launch-template");
        assert_eq!(made["LaunchTemplateData.ImageId"], "ami-std-x86");
        assert_eq!(made["LaunchTemplateData.NetworkInterface.1.SecurityGroupId.1"], "sg-1");
    }

    #[tokio::test]
    async fn a_template_is_deleted_a_minute_after_its_last_use_but_not_while_held() {
        let exists = Arc::new(AtomicBool::new(false));
        let (clients, _) = wire::clients(answers(Arc::clone(&exists)));
        let (templates, content) = (Templates::default(), template());
        let held = templates.ensure(&clients, &content, 0).await.unwrap();
        let there = async |now_ms: i64| {
            templates.delete_unused(&clients, now_ms).await;
            exists.load(Ordering::SeqCst)
        };
        assert!(there(TTL_MS).await, "held");
        drop(held);
        drop(templates.ensure(&clients, &content, 30_000).await.unwrap());
        assert!(there(89_999).await, "used again");
        assert!(!there(90_000).await);
        drop(templates.ensure(&clients, &content, 90_001).await.unwrap());
        assert!(exists.load(Ordering::SeqCst), "made again");
    }

    #[tokio::test]
    async fn a_launch_and_the_deletion_of_its_template_wait_for_each_other() {
        let exists = Arc::new(AtomicBool::new(false));
        let (clients, seen) = wire::clients(answers(Arc::clone(&exists)));
        let (templates, content) = (Templates::default(), template());
        drop(templates.ensure(&clients, &content, 0).await.unwrap());
        let launch = templates.ensure(&clients, &content, TTL_MS);
        let (held, ()) = tokio::join!(biased; launch, templates.delete_unused(&clients, TTL_MS));
        drop(held.unwrap());
        assert_eq!(actions(&seen).len(), 2, "the launch came first");
        let launch = templates.ensure(&clients, &content, 3 * TTL_MS);
        let ((), held) = tokio::join!(biased; templates.delete_unused(&clients, 3 * TTL_MS), launch);
        assert_eq!(
            actions(&seen)[2..],
            ["DeleteLaunchTemplate", "DescribeLaunchTemplates", "CreateLaunchTemplate"],
            "the deletion came first, and the launch waited for it"
        );
        assert!(templates.touch(held.unwrap().name(), 3 * TTL_MS), "and it is known");
    }

    #[tokio::test]
    async fn many_unused_templates_are_deleted_a_few_at_a_time() {
        let item = |number: usize| {
            format!(
                "<item><launchTemplateId>lt-{number}</launchTemplateId><launchTemplateName>{number}</launchTemplateName></item>"
            )
        };
        let items: String = (0..50).map(item).collect();
        let (clients, seen) = wire::clients(Box::new(move |request| match request.action.as_str() {
            "DescribeLaunchTemplates" => {
                wire::ok("DescribeLaunchTemplates", &format!("<launchTemplates>{items}</launchTemplates>"))
            }
            _ => wire::ok("DeleteLaunchTemplate", ""),
        }));
        let templates = Templates::default();
        assert_eq!(templates.hydrate(&clients, "c1", 0).await.unwrap(), 50);
        let mut deleted = Vec::new();
        for _ in 0..4 {
            templates.delete_unused(&clients, TTL_MS).await;
            deleted.push(actions(&seen).len() - 1);
        }
        assert_eq!(deleted, [20, 40, 50, 50]);
    }

    #[tokio::test]
    async fn a_template_that_could_not_be_deleted_is_tried_again() {
        let refusals = AtomicI64::new(1);
        let (clients, seen) = wire::clients(Box::new(move |request| match request.action.as_str() {
            "DescribeLaunchTemplates" => wire::ok(
                "DescribeLaunchTemplates",
                "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId><launchTemplateName>a</launchTemplateName></item></launchTemplates>",
            ),
            _ if refusals.fetch_sub(1, Ordering::SeqCst) > 0 => wire::refusal("UnauthorizedOperation", "no"),
            _ => wire::ok("DeleteLaunchTemplate", ""),
        }));
        let templates = Templates::default();
        assert_eq!(templates.hydrate(&clients, "c1", 0).await.unwrap(), 1);
        let deletes = async |now_ms: i64| {
            templates.delete_unused(&clients, now_ms).await;
            actions(&seen).iter().filter(|action| *action == "DeleteLaunchTemplate").count()
        };
        assert_eq!(deletes(TTL_MS).await, 1, "refused");
        assert_eq!(deletes(2 * TTL_MS - 1).await, 1, "not at once");
        assert_eq!(deletes(2 * TTL_MS).await, 2);
        assert_eq!(deletes(9 * TTL_MS).await, 2, "it is gone");
    }

    #[tokio::test]
    async fn c17_a_forgotten_template_is_looked_up_and_made_anew() {
        let exists = Arc::new(AtomicBool::new(false));
        let (clients, seen) = wire::clients(answers(Arc::clone(&exists)));
        let (templates, content) = (Templates::default(), template());
        let held = templates.ensure(&clients, &content, 0).await.unwrap();
        exists.store(false, Ordering::SeqCst);
        templates.forget([held.name()]);
        templates.ensure(&clients, &content, 1).await.unwrap();
        assert_eq!(actions(&seen).iter().filter(|action| *action == "CreateLaunchTemplate").count(), 2);
    }

    #[tokio::test]
    async fn c35_the_templates_of_a_class_are_found_by_their_tags_and_deleted() {
        let (clients, seen) = wire::clients(Box::new(|request| match request.action.as_str() {
            "DescribeLaunchTemplates" => wire::ok(
                "DescribeLaunchTemplates",
                "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId><launchTemplateName>a</launchTemplateName></item>\
                 <item><launchTemplateId>lt-2</launchTemplateId><launchTemplateName>b</launchTemplateName></item></launchTemplates>",
            ),
            _ if request.form["LaunchTemplateId"] == "lt-1" => {
                wire::refusal("InvalidLaunchTemplateId.NotFound", "gone")
            }
            _ => wire::ok("DeleteLaunchTemplate", ""),
        }));
        delete_of_class(&clients, "c1", "default").await.unwrap();
        assert_eq!(actions(&seen), ["DescribeLaunchTemplates", "DeleteLaunchTemplate", "DeleteLaunchTemplate"]);
        let asked = &seen.lock().unwrap()[0].form;
        assert_eq!(
            (&*asked["Filter.1.Name"], &*asked["Filter.2.Name"]),
            ("tag:eks:eks-cluster-name", "tag:karpenter.k8s.aws/ec2nodeclass")
        );
    }
}
