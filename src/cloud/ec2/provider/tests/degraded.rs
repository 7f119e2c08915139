//! Failed AWS calls in the lists of degraded APIs.

use std::collections::BTreeSet;
use std::sync::Mutex;

use crate::ec2::launch::request::tests::facts;
use crate::ec2::options::Options;
use crate::ec2::provider::Ec2Provider;
use crate::test_support::fake_aws;
use crate::{CloudError, InstanceEvents, NodeClassCloud, OptionalApi, ServiceStatus};

/// A provider whose calls get these responses, last first; the first response repeats.
fn scripted(responses: Vec<Option<(u16, String)>>) -> Ec2Provider {
    let responses = Mutex::new(responses);
    let (clients, _) = fake_aws::clients(Box::new(move |_| {
        let mut left = responses.lock().unwrap();
        if left.len() > 1 { left.pop().unwrap() } else { left[0].clone() }
    }));
    Ec2Provider::new(clients, Options::of("c1"), facts())
}

#[tokio::test]
async fn failed_status_calls_are_degraded_and_unauthorized_ones_are_not() {
    let reported = |ec2: &Ec2Provider| ec2.failing_apis().into_keys().collect::<Vec<_>>();
    let failing = scripted(vec![fake_aws::error("InvalidParameterValue", "odd")]);
    failing.unhealthy().await.unwrap_err();
    assert_eq!(reported(&failing), [OptionalApi::StatusChecks]);
    assert!(
        failing.failing_apis()[&OptionalApi::StatusChecks]
            .contains("ec2:DescribeInstanceStatus: InvalidParameterValue")
    );
    let refused = scripted(vec![fake_aws::error("UnauthorizedOperation", "no")]);
    assert!(matches!(refused.unhealthy().await, Err(CloudError::Refused(_))));
    assert!(reported(&refused).is_empty());
    let recovered = scripted(vec![fake_aws::ok("DescribeInstanceStatus", "<instanceStatusSet/>")]);
    recovered.degraded_apis.record_failure(OptionalApi::StatusChecks, "it failed".into());
    assert!(recovered.unhealthy().await.unwrap().is_empty());
    assert!(reported(&recovered).is_empty());
}

#[tokio::test]
async fn unauthorized_profile_deletions_are_reported_until_one_succeeds() {
    let refusal = |code: &str| {
        let error = format!("<Error><Type>Sender</Type><Code>{code}</Code><Message>no</Message></Error>");
        let iam = "https://iam.amazonaws.com/doc/2010-05-08/";
        Some((403, format!(r#"<ErrorResponse xmlns="{iam}">{error}<RequestId>r</RequestId></ErrorResponse>"#)))
    };
    let none = r#"<ListInstanceProfilesResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/"><ListInstanceProfilesResult>
        <InstanceProfiles/><IsTruncated>false</IsTruncated></ListInstanceProfilesResult></ListInstanceProfilesResponse>"#;
    let ec2 = scripted(vec![Some((200, none.to_owned())), refusal("ValidationError"), refusal("AccessDenied")]);
    let used = BTreeSet::new();
    let reported = || ec2.failing_apis().into_values().collect::<String>();
    assert!(matches!(ec2.delete_unused_profiles(&used).await, Err(CloudError::Refused(_))));
    assert!(reported().contains("allow iam:ListInstanceProfiles in the controller's policy"), "{}", reported());
    ec2.delete_unused_profiles(&used).await.unwrap_err();
    assert!(!reported().is_empty(), "another failure does not clear the missing permission");
    ec2.delete_unused_profiles(&used).await.unwrap();
    assert_eq!(reported(), "");
}
