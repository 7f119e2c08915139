use std::sync::atomic::AtomicBool;

use super::*;
use crate::ec2::launch::templates::spec::tests::template;
use crate::test_support::fake_aws;

/// Responds as EC2 with one launch template.
fn endpoint(exists: Arc<AtomicBool>) -> fake_aws::Responder {
    let described = "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId></item></launchTemplates>";
    Box::new(move |request| match request.action.as_str() {
        "DescribeLaunchTemplates" if !exists.load(Ordering::SeqCst) => {
            fake_aws::error("InvalidLaunchTemplateName.NotFoundException", "gone")
        }
        "DescribeLaunchTemplates" => fake_aws::ok("DescribeLaunchTemplates", described),
        "CreateLaunchTemplate" => {
            exists.store(true, Ordering::SeqCst);
            fake_aws::ok(
                "CreateLaunchTemplate",
                "<launchTemplate><launchTemplateId>lt-1</launchTemplateId></launchTemplate>",
            )
        }
        "DeleteLaunchTemplate" => {
            exists.store(false, Ordering::SeqCst);
            fake_aws::ok("DeleteLaunchTemplate", "")
        }
        other => panic!("unexpected call {other}"),
    })
}

fn actions(seen: &Mutex<Vec<fake_aws::Request>>) -> Vec<String> {
    seen.lock().unwrap().iter().map(|request| request.action.clone()).collect()
}

#[tokio::test]
async fn c18_concurrent_launches_create_one_template() {
    let (clients, seen) = fake_aws::clients(endpoint(Arc::default()));
    let (templates, content) = (TemplateStore::default(), template());
    let burst = (0..20).map(|_| templates.ensure(&clients, &content, UnixMillis(0)));
    for held in futures::future::join_all(burst).await {
        assert_eq!(held.unwrap().name(), content.name());
    }
    assert_eq!(actions(&seen), ["DescribeLaunchTemplates", "CreateLaunchTemplate"]);
    let created = &seen.lock().unwrap()[1].form;
    assert_eq!(created["LaunchTemplateName"], content.name());
    assert_eq!(created["TagSpecification.1.ResourceType"], "launch-template");
    assert_eq!(created["LaunchTemplateData.ImageId"], "ami-std-x86");
    assert_eq!(created["LaunchTemplateData.NetworkInterface.1.SecurityGroupId.1"], "sg-1");
}

#[tokio::test]
async fn a_template_is_deleted_a_minute_after_its_last_use() {
    let exists = Arc::new(AtomicBool::new(false));
    let (clients, _) = fake_aws::clients(endpoint(Arc::clone(&exists)));
    let (templates, content) = (TemplateStore::default(), template());
    let held = templates.ensure(&clients, &content, UnixMillis(0)).await.unwrap();
    let remains = async |now: UnixMillis| {
        templates.delete_unused(&clients, now).await;
        exists.load(Ordering::SeqCst)
    };
    assert!(remains(UnixMillis(0) + TTL).await, "held");
    drop(held);
    drop(templates.ensure(&clients, &content, UnixMillis(30_000)).await.unwrap());
    assert!(remains(UnixMillis(89_999)).await, "used since");
    assert!(!remains(UnixMillis(90_000)).await);
    drop(templates.ensure(&clients, &content, UnixMillis(90_001)).await.unwrap());
    assert!(exists.load(Ordering::SeqCst), "created again");
}

#[tokio::test]
async fn a_launch_and_the_deletion_of_its_template_exclude_each_other() {
    let exists = Arc::new(AtomicBool::new(false));
    let (clients, seen) = fake_aws::clients(endpoint(Arc::clone(&exists)));
    let (templates, content) = (TemplateStore::default(), template());
    drop(templates.ensure(&clients, &content, UnixMillis(0)).await.unwrap());
    let launch = templates.ensure(&clients, &content, UnixMillis(0) + TTL);
    let (held, ()) = tokio::join!(biased; launch, templates.delete_unused(&clients, UnixMillis(0) + TTL));
    drop(held.unwrap());
    assert_eq!(actions(&seen).len(), 2, "launch first: the template is kept");
    let launch = templates.ensure(&clients, &content, UnixMillis(0) + 3 * TTL);
    let ((), held) = tokio::join!(biased; templates.delete_unused(&clients, UnixMillis(0) + 3 * TTL), launch);
    assert_eq!(
        actions(&seen)[2..],
        ["DeleteLaunchTemplate", "DescribeLaunchTemplates", "CreateLaunchTemplate"],
        "deletion first: the launch creates it again"
    );
    assert!(templates.touch(held.unwrap().name(), UnixMillis(0) + 3 * TTL), "the new template is recorded");
}

#[tokio::test]
async fn unused_templates_are_deleted_in_batches() {
    let item = |number: usize| {
        format!(
            "<item><launchTemplateId>lt-{number}</launchTemplateId><launchTemplateName>{number}</launchTemplateName></item>"
        )
    };
    let items: String = (0..50).map(item).collect();
    let (clients, seen) = fake_aws::clients(Box::new(move |request| match request.action.as_str() {
        "DescribeLaunchTemplates" => {
            fake_aws::ok("DescribeLaunchTemplates", &format!("<launchTemplates>{items}</launchTemplates>"))
        }
        _ => fake_aws::ok("DeleteLaunchTemplate", ""),
    }));
    let templates = TemplateStore::default();
    assert_eq!(templates.hydrate(&clients, "c1", UnixMillis(0)).await.unwrap(), 50);
    let mut deleted = Vec::new();
    for _ in 0..4 {
        templates.delete_unused(&clients, UnixMillis(0) + TTL).await;
        deleted.push(actions(&seen).len() - 1);
    }
    assert_eq!(deleted, [20, 40, 50, 50]);
}

#[tokio::test]
async fn a_failed_deletion_is_retried() {
    let refusals = AtomicI64::new(1);
    let (clients, seen) = fake_aws::clients(Box::new(move |request| match request.action.as_str() {
        "DescribeLaunchTemplates" => fake_aws::ok(
            "DescribeLaunchTemplates",
            "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId><launchTemplateName>a</launchTemplateName></item></launchTemplates>",
        ),
        _ if refusals.fetch_sub(1, Ordering::SeqCst) > 0 => fake_aws::error("UnauthorizedOperation", "no"),
        _ => fake_aws::ok("DeleteLaunchTemplate", ""),
    }));
    let templates = TemplateStore::default();
    assert_eq!(templates.hydrate(&clients, "c1", UnixMillis(0)).await.unwrap(), 1);
    let deletes = async |now: UnixMillis| {
        templates.delete_unused(&clients, now).await;
        actions(&seen).iter().filter(|action| *action == "DeleteLaunchTemplate").count()
    };
    assert_eq!(deletes(UnixMillis(0) + TTL).await, 1, "refused");
    assert_eq!(deletes(UnixMillis(-1) + 2 * TTL).await, 1, "not before the retry interval");
    assert_eq!(deletes(UnixMillis(0) + 2 * TTL).await, 2);
    assert_eq!(deletes(UnixMillis(0) + 9 * TTL).await, 2, "it is deleted");
}

#[tokio::test]
async fn c17_a_forgotten_template_is_described_and_created_again() {
    let exists = Arc::new(AtomicBool::new(false));
    let (clients, seen) = fake_aws::clients(endpoint(Arc::clone(&exists)));
    let (templates, content) = (TemplateStore::default(), template());
    let held = templates.ensure(&clients, &content, UnixMillis(0)).await.unwrap();
    exists.store(false, Ordering::SeqCst);
    templates.forget([held.name()]);
    templates.ensure(&clients, &content, UnixMillis(1)).await.unwrap();
    assert_eq!(actions(&seen).iter().filter(|action| *action == "CreateLaunchTemplate").count(), 2);
}

#[tokio::test]
async fn c35_the_templates_of_a_class_are_found_by_their_tags_and_deleted() {
    let (clients, seen) = fake_aws::clients(Box::new(|request| match request.action.as_str() {
        "DescribeLaunchTemplates" => fake_aws::ok(
            "DescribeLaunchTemplates",
            "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId><launchTemplateName>a</launchTemplateName></item>\
             <item><launchTemplateId>lt-2</launchTemplateId><launchTemplateName>b</launchTemplateName></item></launchTemplates>",
        ),
        _ if request.form["LaunchTemplateId"] == "lt-1" => fake_aws::error("InvalidLaunchTemplateId.NotFound", "gone"),
        _ => fake_aws::ok("DeleteLaunchTemplate", ""),
    }));
    delete_of_class(&clients, "c1", "default").await.unwrap();
    assert_eq!(actions(&seen), ["DescribeLaunchTemplates", "DeleteLaunchTemplate", "DeleteLaunchTemplate"]);
    let form = &seen.lock().unwrap()[0].form;
    assert_eq!(
        (&*form["Filter.1.Name"], &*form["Filter.2.Name"]),
        ("tag:eks:eks-cluster-name", "tag:karpenter.k8s.aws/ec2nodeclass")
    );
}

#[tokio::test]
async fn templates_with_names_of_earlier_versions_are_deleted() {
    let (clients, seen) = fake_aws::clients(Box::new(|request| match request.action.as_str() {
        "DescribeLaunchTemplates" => fake_aws::ok(
            "DescribeLaunchTemplates",
            "<launchTemplates><item><launchTemplateId>lt-1</launchTemplateId>\
             <launchTemplateName>karpenter.k8s.aws/1601366691206327847</launchTemplateName></item></launchTemplates>",
        ),
        _ => fake_aws::ok("DeleteLaunchTemplate", ""),
    }));
    let templates = TemplateStore::default();
    templates.hydrate(&clients, "c1", UnixMillis(0)).await.unwrap();
    templates.delete_unused(&clients, UnixMillis(0) + TTL).await;
    let seen = seen.lock().unwrap();
    assert_eq!((&*seen[1].action, &*seen[1].form["LaunchTemplateId"]), ("DeleteLaunchTemplate", "lt-1"));
}
