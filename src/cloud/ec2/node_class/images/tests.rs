use super::*;
use crate::ec2::aws::filters::tests::text;
use crate::ec2::boot_image::image_of;
use crate::test_support::fake_aws;

fn image(id: &str, name: &str, created_at: i64, deprecated_at: Option<i64>) -> Image {
    let (created_at, deprecated_at) = (UnixMillis(created_at), deprecated_at.map(UnixMillis));
    Image { id: id.into(), name: name.into(), created_at, deprecated_at, arch: "amd64" }
}

fn amd64() -> Vec<AmiRequirement> {
    vec![one_of(labels::ARCH, "amd64")]
}

#[test]
fn c30_images_rank_by_deprecation_then_age_then_name() {
    let best = |images: &[Image]| {
        let found = images.iter().map(|image| (image.clone(), amd64())).collect();
        let list = status(found, UnixMillis(1_000));
        assert_eq!(list.len(), 1);
        (list[0].id.clone(), list[0].deprecated)
    };
    let (old, new) = (image("ami-1", "a", 10, None), image("ami-2", "b", 20, None));
    assert_eq!(best(&[old.clone(), new.clone()]), ("ami-2".into(), None));
    assert_eq!(best(&[new.clone(), old.clone()]), ("ami-2".into(), None));
    let deprecated = image("ami-3", "c", 30, Some(1_000));
    assert_eq!(best(&[deprecated.clone(), old.clone()]), ("ami-1".into(), None));
    assert_eq!(best(std::slice::from_ref(&deprecated)), ("ami-3".into(), Some(true)), "better than none");
    assert_eq!(best(&[image("ami-4", "d", 40, Some(1_001)), old]).0, "ami-4", "not deprecated yet");
    assert_eq!(best(&[image("ami-5", "z", 20, None), new]).0, "ami-5", "the greater name of two equally new ones");
}

#[test]
fn the_status_has_one_image_for_each_set_of_requirements_newest_first() {
    let arm = Image { arch: "arm64", ..image("ami-2", "arm", 20, None) };
    let found = vec![
        (image("ami-1", "x", 10, None), amd64()),
        (arm, vec![one_of(labels::ARCH, "arm64")]),
        (image("ami-0", "x", 5, None), amd64()),
    ];
    let ids: Vec<String> = status(found, UnixMillis(0)).into_iter().map(|image| image.id).collect();
    assert_eq!(ids, ["ami-2", "ami-1"]);
}

#[test]
fn c30_the_owners_default_to_self_and_amazon_for_a_name() {
    let term = |json: serde_json::Value| serde_json::from_value::<AmiSelectorTerm>(json).unwrap();
    let terms = [
        term(serde_json::json!({"name": "my-*"})),
        term(serde_json::json!({"name": "my-*", "owner": "123456789012"})),
        term(serde_json::json!({"tags": {"k": "v"}})),
        term(serde_json::json!({"id": "ami-1"})),
        term(serde_json::json!({"ssmParameter": "/mine"})),
    ];
    let calls: Vec<(Vec<String>, Vec<String>)> =
        queries(&terms).into_iter().map(|query| (text(&query.filters), query.owners)).collect();
    let strings = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        calls,
        [
            (strings(&["name=my-*"]), strings(&["self", "amazon"])),
            (strings(&["name=my-*"]), strings(&["123456789012"])),
            (strings(&["tag:k=v"]), vec![]),
        ]
    );
}

#[test]
fn an_instance_type_boots_the_first_matching_image() {
    let list = |alias: &str| {
        let parameters = crate::ec2::node_class::ami_alias::parameters(alias, "1.34").unwrap();
        let all = parameters
            .into_iter()
            .flat_map(|parameter| parameter.requirements.into_iter().map(move |list| (parameter.name.clone(), list)));
        all.map(|(name, requirements)| AmiStatus { id: name, requirements, ..AmiStatus::default() }).collect::<Vec<_>>()
    };
    let al2023 = list("al2023@latest");
    let boot = |labels: &[(&str, &str)]| {
        let own = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        image_of(&al2023, &own).map(|image| image.id.split('/').rev().skip(2).take(2).collect::<Vec<_>>().join(" "))
    };
    let gpus = ("karpenter.k8s.aws/instance-gpu-count", "4");
    let neuron = ("karpenter.k8s.aws/instance-accelerator-count", "1");
    assert_eq!(boot(&[(labels::ARCH, "amd64")]), Some("standard x86_64".into()));
    assert_eq!(boot(&[(labels::ARCH, "arm64"), gpus]), Some("nvidia arm64".into()));
    assert_eq!(boot(&[(labels::ARCH, "amd64"), neuron]), Some("neuron x86_64".into()));
    assert_eq!(boot(&[(labels::ARCH, "arm64"), neuron]), None);
    let windows = list("windows2022@latest");
    let own = [(labels::ARCH.to_owned(), "amd64".to_owned()), (labels::OS.to_owned(), "linux".to_owned())].into();
    assert!(image_of(&windows, &own).is_some());
}

fn described(ids: &[&str]) -> String {
    let one = |id: &&str| {
        format!(
            "<item><imageId>{id}</imageId><name>n-{id}</name><architecture>x86_64</architecture>\
             <creationDate>2026-01-02T03:04:05.000Z</creationDate></item>"
        )
    };
    format!("<imagesSet>{}</imagesSet>", ids.iter().map(one).collect::<String>())
}

#[tokio::test]
async fn c29_a_missing_parameter_of_an_alias_is_skipped_and_values_are_cached() {
    let (clients, seen) = fake_aws::clients(Box::new(|request| match request.action.as_str() {
        "GetParameter" if request.body.contains("x86_64/standard") => {
            Some((200, r#"{"Parameter": {"Value": "ami-standard"}}"#.into()))
        }
        "GetParameter" => Some((400, r#"{"__type": "ParameterNotFound", "message": "no"}"#.into())),
        _ => fake_aws::ok("DescribeImages", &described(&["ami-standard"])),
    }));
    let terms = [AmiSelectorTerm { alias: Some("al2023@latest".into()), ..AmiSelectorTerm::default() }];
    let parameters = SsmParameterCache::default();
    let found = find(&clients, &parameters, &terms, "1.34", UnixMillis(0)).await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].0.created_at, UnixMillis(1_767_323_045_000));
    let asked =
        |seen: &[fake_aws::Request], body: &str| seen.iter().filter(|request| request.body.contains(body)).count();
    find(&clients, &parameters, &terms, "1.34", UnixMillis(0) + ALIAS_TTL - Duration::from_millis(1)).await.unwrap();
    assert_eq!(asked(&seen.lock().unwrap(), "x86_64/standard"), 1);
    find(&clients, &parameters, &terms, "1.34", UnixMillis(0) + ALIAS_TTL).await.unwrap();
    assert_eq!(asked(&seen.lock().unwrap(), "x86_64/standard"), 2);
}

#[tokio::test]
async fn a_latest_parameter_is_dropped_when_its_image_is_deprecated_or_deleted() {
    let deprecated = "<deprecationTime>2026-01-03T00:00:00.000Z</deprecationTime>";
    let item = |id: &str, more: &str| {
        format!("<item><imageId>{id}</imageId><name>n</name><architecture>x86_64</architecture>{more}</item>")
    };
    let images = format!("<imagesSet>{}{}</imagesSet>", item("ami-standard", deprecated), item("ami-nvidia", ""));
    let (clients, seen) = fake_aws::clients(Box::new(move |request| {
        let value = |id: &str| Some((200, format!("{{\"Parameter\": {{\"Value\": \"{id}\"}}}}")));
        match request.action.as_str() {
            "GetParameter" if request.body.contains("/mine") => value("ami-mine"),
            "GetParameter" if request.body.contains("20260101") => value("ami-pinned"),
            "GetParameter" if request.body.contains("x86_64/standard") => value("ami-standard"),
            "GetParameter" if request.body.contains("x86_64/nvidia") => value("ami-nvidia"),
            "GetParameter" => value("ami-gone"),
            _ => fake_aws::ok("DescribeImages", &images),
        }
    }));
    let alias = |alias: &str| [AmiSelectorTerm { alias: Some(alias.into()), ..AmiSelectorTerm::default() }];
    let mine = [AmiSelectorTerm { ssm_parameter: Some("/mine".into()), ..AmiSelectorTerm::default() }];
    let (parameters, at) = (SsmParameterCache::default(), UnixMillis(1_767_400_000_000));
    assert!(parameters.forget_deprecated(&clients, at).await.unwrap().is_empty());
    assert!(seen.lock().unwrap().is_empty(), "nothing is cached, so EC2 is not called");
    for terms in [alias("al2023@latest"), alias("al2023@v20260101"), mine] {
        find(&clients, &parameters, &terms, "1.34", at).await.unwrap();
    }
    // Deprecated from January 3 on; parameters of deleted images are dropped at once.
    let early = parameters.forget_deprecated(&clients, at - Duration::from_secs(100_000)).await.unwrap();
    let is_kept = |name: &String| ["x86_64/standard", "x86_64/nvidia"].iter().any(|part| name.contains(part));
    assert!(!early.is_empty() && !early.iter().any(is_kept), "{early:?}");
    let names = parameters.forget_deprecated(&clients, at).await.unwrap();
    assert_eq!(names.len(), 1);
    assert!(names[0].contains("x86_64/standard"), "{names:?}");
    let count = || seen.lock().unwrap().iter().filter(|request| request.action == "GetParameter").count();
    let before = count();
    find(&clients, &parameters, &alias("al2023@v20260101"), "1.34", at).await.unwrap();
    assert_eq!(count(), before, "a pinned parameter stays cached");
    find(&clients, &parameters, &alias("al2023@latest"), "1.34", at).await.unwrap();
    assert!(count() > before, "the newer image is read");
}

#[tokio::test]
async fn c29_an_alias_without_any_parameter_is_an_error() {
    let (clients, _) =
        fake_aws::clients(Box::new(|_| Some((400, r#"{"__type": "ParameterNotFound", "message": "no"}"#.into()))));
    let terms = [AmiSelectorTerm { alias: Some("al2023@v20990101".into()), ..AmiSelectorTerm::default() }];
    let error = find(&clients, &SsmParameterCache::default(), &terms, "1.34", UnixMillis(0)).await.unwrap_err();
    assert!(matches!(error, ImageError::Api(ApiError { class: Class::NotFound, .. })), "{error}");
}

#[tokio::test]
async fn c30_ids_and_parameters_share_one_call() {
    let (clients, seen) = fake_aws::clients(Box::new(|request| match request.action.as_str() {
        "GetParameter" => Some((200, r#"{"Parameter": {"Value": "ami-3"}}"#.into())),
        _ => fake_aws::ok("DescribeImages", &described(&["ami-1", "ami-2", "ami-3"])),
    }));
    let id = |id: &str| AmiSelectorTerm { id: Some(id.into()), ..AmiSelectorTerm::default() };
    let parameter = AmiSelectorTerm { ssm_parameter: Some("/mine".into()), ..AmiSelectorTerm::default() };
    let found =
        find(&clients, &SsmParameterCache::default(), &[id("ami-1"), parameter, id("ami-2")], "1.34", UnixMillis(0))
            .await
            .unwrap();
    assert_eq!(found.len(), 3);
    let seen = seen.lock().unwrap();
    let call = seen.iter().find(|request| request.action == "DescribeImages").unwrap();
    assert_eq!(call.form["Filter.1.Name"], "image-id");
    assert_eq!(
        ["1", "2", "3"].map(|n| call.form[&format!("Filter.1.Value.{n}")].as_str()),
        ["ami-1", "ami-2", "ami-3"]
    );
    assert_eq!((&*call.form["Filter.2.Value.1"], &*call.form["IncludeDeprecated"]), ("available", "true"));
    assert!(!call.form.contains_key("Owner.1"));
}
