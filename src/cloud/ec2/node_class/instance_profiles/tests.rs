use std::sync::Arc;

use serde_json::json;
use stowage_test_objects::node_class;

use super::*;
use crate::test_support::fake_aws;

fn class(role: Option<&str>, profile: Option<&str>, status: Option<&str>) -> Ec2NodeClass {
    let spec = json!({"role": role, "instanceProfile": profile, "tags": {"team": "a"}});
    let meta = json!({"uid": "class-uid"});
    node_class("default", &json!({"metadata": meta, "spec": spec, "status": {"instanceProfile": status}}))
}

/// A fake IAM with profiles by name and their roles; roles that start with `no-` don't exist.
#[derive(Default)]
struct Iam {
    profiles: HashMap<String, Option<String>>,
}

fn profile_xml(name: &str, role: Option<&String>) -> String {
    let role = role.map(|role| {
        format!(
            "<member><Path>/</Path><RoleName>{role}</RoleName><RoleId>r</RoleId><Arn>a</Arn><CreateDate>2026-01-01T00:00:00Z</CreateDate></member>"
        )
    });
    format!(
        "<Path>/</Path><InstanceProfileName>{name}</InstanceProfileName><InstanceProfileId>p</InstanceProfileId><Arn>a</Arn>\
         <CreateDate>2026-01-01T00:00:00Z</CreateDate><Roles>{}</Roles>",
        role.unwrap_or_default()
    )
}

fn refused(code: &str, message: &str) -> (u16, String) {
    let body = format!(
        r#"<ErrorResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/"><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>"#
    );
    (404, body)
}

fn fake(iam: Arc<Mutex<Iam>>) -> fake_aws::Responder {
    Box::new(move |request| {
        let mut iam = iam.lock().unwrap();
        let name = request.form.get("InstanceProfileName").cloned().unwrap_or_default();
        let action = request.action.as_str();
        let ok = |inner: String| {
            let body = format!(
                r#"<{action}Response xmlns="https://iam.amazonaws.com/doc/2010-05-08/"><{action}Result>{inner}</{action}Result></{action}Response>"#
            );
            Some((200, body))
        };
        let missing = || Some(refused("NoSuchEntity", "Instance Profile cannot be found."));
        match action {
            "GetInstanceProfile" => match iam.profiles.get(&name) {
                None => missing(),
                Some(role) => ok(format!("<InstanceProfile>{}</InstanceProfile>", profile_xml(&name, role.as_ref()))),
            },
            "CreateInstanceProfile" => {
                iam.profiles.insert(name.clone(), None);
                ok(format!("<InstanceProfile>{}</InstanceProfile>", profile_xml(&name, None)))
            }
            "AddRoleToInstanceProfile" => {
                let role = request.form["RoleName"].clone();
                if role.starts_with("no-") {
                    return Some(refused("NoSuchEntity", "The role with name no- cannot be found."));
                }
                iam.profiles.insert(name, Some(role));
                ok(String::new())
            }
            "RemoveRoleFromInstanceProfile" => {
                iam.profiles.insert(name, None);
                ok(String::new())
            }
            "DeleteInstanceProfile" => {
                iam.profiles.remove(&name);
                ok(String::new())
            }
            "ListInstanceProfiles" => {
                assert!(request.form["PathPrefix"].starts_with("/karpenter/us-east-1/c1/"));
                let all = iam.profiles.iter().filter(|(name, _)| !name.starts_with("other"));
                let members = all.map(|(name, role)| format!("<member>{}</member>", profile_xml(name, role.as_ref())));
                ok(format!(
                    "<IsTruncated>false</IsTruncated><InstanceProfiles>{}</InstanceProfiles>",
                    members.collect::<String>()
                ))
            }
            other => panic!("unexpected action {other}"),
        }
    })
}

#[test]
fn new_names_are_unique_and_the_legacy_name_is_karpenters() {
    assert_ne!(new_name("r", "c1", "default", "1"), new_name("r", "c1", "default", "2"));
    assert!(new_name("r", "c1", "default", "1").starts_with("c1_"));
    // FNV-1 of the empty text is its offset.
    assert_eq!(legacy_name("", "c1", "").as_deref(), Some("c1_14695981039346656037"));
    assert_eq!(legacy_name("r", "c 1", "x"), None);
    assert_eq!(role_name("path/to/role"), "role");
}

#[tokio::test]
async fn a_profile_named_by_the_class_is_used_without_a_call() {
    let (clients, seen) = fake_aws::clients(fake(Arc::default()));
    let profiles = InstanceProfiles::default();
    let name = profiles.resolve(&clients, "c1", &class(None, Some("mine"), None), "n", UnixMillis(0)).await.unwrap();
    assert_eq!((name.as_str(), seen.lock().unwrap().len()), ("mine", 0));
}

#[tokio::test]
async fn c36_a_profile_is_created_once_for_each_role() {
    let iam = Arc::new(Mutex::new(Iam::default()));
    let (clients, seen) = fake_aws::clients(fake(Arc::clone(&iam)));
    let profiles = InstanceProfiles::default();
    let first = profiles.resolve(&clients, "c1", &class(Some("role-a"), None, None), "1", UnixMillis(0)).await.unwrap();
    assert_eq!(iam.lock().unwrap().profiles[&first].as_deref(), Some("role-a"));
    {
        let seen = seen.lock().unwrap();
        let made = seen.iter().find(|request| request.action == "CreateInstanceProfile").unwrap();
        assert_eq!(made.form["Path"], "/karpenter/us-east-1/c1/class-uid/");
        let keys: Vec<&String> = (1..=5).map(|n| &made.form[&format!("Tags.member.{n}.Key")]).collect();
        assert_eq!(
            keys,
            [
                "eks:eks-cluster-name",
                "karpenter.k8s.aws/ec2nodeclass",
                "kubernetes.io/cluster/c1",
                "team",
                "topology.kubernetes.io/region"
            ]
        );
    }
    let before = seen.lock().unwrap().len();
    let again =
        profiles.resolve(&clients, "c1", &class(Some("path/role-a"), None, None), "2", UnixMillis(1)).await.unwrap();
    assert_eq!((&again, seen.lock().unwrap().len()), (&first, before), "the status is not written yet");
    let second =
        profiles.resolve(&clients, "c1", &class(Some("role-b"), None, Some(&first)), "3", UnixMillis(2)).await.unwrap();
    assert_ne!(second, first);
    let iam = iam.lock().unwrap();
    assert_eq!(iam.profiles[&first].as_deref(), Some("role-a"), "kept for the nodes that use it");
    assert_eq!(iam.profiles[&second].as_deref(), Some("role-b"));
}

#[tokio::test]
async fn c36_a_missing_role_is_cached_for_a_minute_and_leaves_no_profile() {
    let iam = Arc::new(Mutex::new(Iam::default()));
    let (clients, seen) = fake_aws::clients(fake(Arc::clone(&iam)));
    let profiles = InstanceProfiles::default();
    let class = class(Some("no-role"), None, None);
    profiles.resolve(&clients, "c1", &class, "1", UnixMillis(0)).await.unwrap_err();
    assert!(iam.lock().unwrap().profiles.is_empty());
    let before = seen.lock().unwrap().len();
    profiles
        .resolve(&clients, "c1", &class, "2", UnixMillis(0) + MISSING_ROLE_TTL - Duration::from_millis(1))
        .await
        .unwrap_err();
    assert_eq!(seen.lock().unwrap().len(), before);
    profiles.resolve(&clients, "c1", &class, "3", UnixMillis(0) + MISSING_ROLE_TTL).await.unwrap_err();
    assert!(seen.lock().unwrap().len() > before);
}

#[tokio::test]
async fn c35_every_profile_of_a_class_is_deleted_after_its_role_is_removed() {
    let legacy = legacy_name("us-east-1", "c1", "default").unwrap();
    let role = || Some("role-a".to_owned());
    let profiles =
        [("c1_1".to_owned(), role()), ("c1_2".to_owned(), None), (legacy, role()), ("other".to_owned(), role())];
    let iam = Arc::new(Mutex::new(Iam { profiles: profiles.into() }));
    let (clients, _) = fake_aws::clients(fake(Arc::clone(&iam)));
    InstanceProfiles::default().delete_of_class(&clients, "c1", &class(Some("role-a"), None, None)).await.unwrap();
    assert_eq!(iam.lock().unwrap().profiles.keys().collect::<Vec<_>>(), ["other"]);
}

#[tokio::test]
async fn a_profile_that_cannot_be_deleted_does_not_stop_the_others() {
    let profiles = ["a", "b", "c"].map(|name| (name.to_owned(), None));
    let iam = Arc::new(Mutex::new(Iam { profiles: profiles.into() }));
    let delete = fake(Arc::clone(&iam));
    let (clients, _) = fake_aws::clients(Box::new(move |request| {
        let is_refused = request.form.get("InstanceProfileName").is_some_and(|name| name == "a");
        match request.action.as_str() {
            "DeleteInstanceProfile" if is_refused => Some(refused("DeleteConflict", "in use")),
            _ => delete(request),
        }
    }));
    let names = ["a", "b", "c"].map(str::to_owned).to_vec();
    let error = delete_each(&clients, names).await.unwrap_err();
    assert_eq!(error.code, "DeleteConflict");
    assert_eq!(iam.lock().unwrap().profiles.keys().collect::<Vec<_>>(), ["a"]);
}

#[tokio::test]
async fn c36_a_replaced_profile_is_kept_for_an_hour_and_while_it_is_used() {
    let iam = Arc::new(Mutex::new(Iam::default()));
    let (clients, _) = fake_aws::clients(fake(Arc::clone(&iam)));
    let profiles = InstanceProfiles::default();
    // The fake reports the start of 2026 as the creation time of every profile.
    let now = UnixMillis(1_767_225_600_000) + 10 * PROTECTION;
    let first =
        profiles.resolve(&clients, "c1", &class(Some("role-a"), None, None), "1", now - PROTECTION).await.unwrap();
    let second = profiles.resolve(&clients, "c1", &class(Some("role-b"), None, Some(&first)), "2", now).await.unwrap();
    let left = || {
        let mut names: Vec<String> = iam.lock().unwrap().profiles.keys().cloned().collect();
        names.sort();
        names
    };
    let mut both = vec![first.clone(), second.clone()];
    both.sort();
    let used = BTreeSet::from([second.clone()]);
    profiles.delete_unused(&clients, "c1", &used, now + PROTECTION - Duration::from_millis(1)).await.unwrap();
    assert_eq!(left(), both, "replaced less than an hour ago");
    let annotated = BTreeSet::from([first.clone(), second.clone()]);
    profiles.delete_unused(&clients, "c1", &annotated, now + PROTECTION).await.unwrap();
    assert_eq!(left(), both, "a claim uses it");
    profiles.delete_unused(&clients, "c1", &used, now + PROTECTION).await.unwrap();
    assert_eq!(left(), [second]);
}

#[tokio::test]
async fn c36_a_profile_replaced_by_a_named_one_is_kept_for_an_hour() {
    let iam = Arc::new(Mutex::new(Iam::default()));
    let (clients, _) = fake_aws::clients(fake(Arc::clone(&iam)));
    let profiles = InstanceProfiles::default();
    let now = UnixMillis(1_767_225_600_000) + 10 * PROTECTION;
    let made =
        profiles.resolve(&clients, "c1", &class(Some("role-a"), None, None), "1", now - PROTECTION).await.unwrap();
    let given = profiles.resolve(&clients, "c1", &class(None, Some("mine"), Some(&made)), "2", now).await.unwrap();
    let used = BTreeSet::from([given]);
    profiles.delete_unused(&clients, "c1", &used, now + PROTECTION - Duration::from_millis(1)).await.unwrap();
    assert!(iam.lock().unwrap().profiles.contains_key(&made), "replaced less than an hour ago");
    // The status now names the profile of the spec.
    profiles
        .resolve(&clients, "c1", &class(None, Some("mine"), Some("mine")), "3", now + Duration::from_millis(1))
        .await
        .unwrap();
    profiles.delete_unused(&clients, "c1", &used, now + PROTECTION).await.unwrap();
    assert!(iam.lock().unwrap().profiles.is_empty());
}
