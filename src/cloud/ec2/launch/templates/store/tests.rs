use std::sync::atomic::AtomicBool;

use super::*;
use crate::cloud::ec2::launch::templates::spec::tests::template;
use crate::test_support::fake_aws;

fn answers(exists: Arc<AtomicBool>) -> fake_aws::Responder {
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
        other => panic!("{other} was not expected"),
    })
}

fn actions(seen: &Mutex<Vec<fake_aws::Request>>) -> Vec<String> {
    seen.lock().unwrap().iter().map(|request| request.action.clone()).collect()
}

#[tokio::test]
async fn c18_a_burst_makes_one_template_and_later_launches_find_it() {
    let (clients, seen) = fake_aws::clients(answers(Arc::default()));
    let (templates, content) = (TemplateStore::default(), template());
    let burst = (0..20).map(|_| templates.ensure(&clients, &content, UnixMillis(0)));
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
    let (clients, _) = fake_aws::clients(answers(Arc::clone(&exists)));
    let (templates, content) = (TemplateStore::default(), template());
    let held = templates.ensure(&clients, &content, UnixMillis(0)).await.unwrap();
    let there = async |now: UnixMillis| {
        templates.delete_unused(&clients, now).await;
        exists.load(Ordering::SeqCst)
    };
    assert!(there(UnixMillis(0) + TTL).await, "held");
    drop(held);
    drop(templates.ensure(&clients, &content, UnixMillis(30_000)).await.unwrap());
    assert!(there(UnixMillis(89_999)).await, "used again");
    assert!(!there(UnixMillis(90_000)).await);
    drop(templates.ensure(&clients, &content, UnixMillis(90_001)).await.unwrap());
    assert!(exists.load(Ordering::SeqCst), "made again");
}

#[tokio::test]
async fn a_launch_and_the_deletion_of_its_template_wait_for_each_other() {
    let exists = Arc::new(AtomicBool::new(false));
    let (clients, seen) = fake_aws::clients(answers(Arc::clone(&exists)));
    let (templates, content) = (TemplateStore::default(), template());
    drop(templates.ensure(&clients, &content, UnixMillis(0)).await.unwrap());
    let launch = templates.ensure(&clients, &content, UnixMillis(0) + TTL);
    let (held, ()) = tokio::join!(biased; launch, templates.delete_unused(&clients, UnixMillis(0) + TTL));
    drop(held.unwrap());
    assert_eq!(actions(&seen).len(), 2, "the launch came first");
    let launch = templates.ensure(&clients, &content, UnixMillis(0) + 3 * TTL);
    let ((), held) = tokio::join!(biased; templates.delete_unused(&clients, UnixMillis(0) + 3 * TTL), launch);
    assert_eq!(
        actions(&seen)[2..],
        ["DeleteLaunchTemplate", "DescribeLaunchTemplates", "CreateLaunchTemplate"],
        "the deletion came first, and the launch waited for it"
    );
    assert!(templates.touch(held.unwrap().name(), UnixMillis(0) + 3 * TTL), "and it is known");
}

#[tokio::test]
async fn many_unused_templates_are_deleted_a_few_at_a_time() {
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
async fn a_template_that_could_not_be_deleted_is_tried_again() {
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
    assert_eq!(deletes(UnixMillis(-1) + 2 * TTL).await, 1, "not at once");
    assert_eq!(deletes(UnixMillis(0) + 2 * TTL).await, 2);
    assert_eq!(deletes(UnixMillis(0) + 9 * TTL).await, 2, "it is gone");
}

#[tokio::test]
async fn c17_a_forgotten_template_is_looked_up_and_made_anew() {
    let exists = Arc::new(AtomicBool::new(false));
    let (clients, seen) = fake_aws::clients(answers(Arc::clone(&exists)));
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
    let asked = &seen.lock().unwrap()[0].form;
    assert_eq!(
        (&*asked["Filter.1.Name"], &*asked["Filter.2.Name"]),
        ("tag:eks:eks-cluster-name", "tag:karpenter.k8s.aws/ec2nodeclass")
    );
}
