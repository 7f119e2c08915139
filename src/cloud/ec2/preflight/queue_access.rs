//! Checks of the interruption queue: it exists, the controller may read it, and EventBridge may send to it.

use std::collections::HashMap;

use aws_sdk_sqs::types::QueueAttributeName as Attribute;
use serde_json::Value;

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::preflight::finding::{Finding, brief, remediation};

const GET_QUEUE_URL: &str = "sqs:GetQueueUrl";
const GET_ATTRIBUTES: &str = "sqs:GetQueueAttributes";
const RECEIVE: &str = "sqs:ReceiveMessage";
/// The principal that sends the events.
const SENDER: &str = "events.amazonaws.com";
/// The AWS-managed key of SQS, whose policy can't be changed.
const MANAGED_KEY: &str = "alias/aws/sqs";

/// Responses of SQS about an existing queue.
#[derive(Clone, Debug)]
pub struct QueueResponses {
    pub received: Result<(), ApiError>,
    pub attributes: Result<HashMap<Attribute, String>, ApiError>,
}

/// Calls SQS for a queue; `None` where no queue is configured.
pub async fn fetch(clients: &AwsClients, name: Option<&str>) -> Option<Result<QueueResponses, ApiError>> {
    let name = name?;
    let url = match clients.sqs.get_queue_url().queue_name(name).send().await.map_err(ApiError::of(GET_QUEUE_URL)) {
        Ok(response) => response.queue_url.unwrap_or_default(),
        Err(error) => return Some(Err(error)),
    };
    // With a visibility timeout of 0 a message received here stays visible to the controller.
    let receive = clients.sqs.receive_message().queue_url(&url).max_number_of_messages(1).visibility_timeout(0);
    let attributes = clients
        .sqs
        .get_queue_attributes()
        .queue_url(&url)
        .attribute_names(Attribute::Policy)
        .attribute_names(Attribute::KmsMasterKeyId)
        .attribute_names(Attribute::SqsManagedSseEnabled)
        .attribute_names(Attribute::MessageRetentionPeriod);
    let (received, attributes) = futures::join!(receive.wait_time_seconds(0).send(), attributes.send());
    Some(Ok(QueueResponses {
        received: received.map(|_| ()).map_err(ApiError::of(RECEIVE)),
        attributes: attributes
            .map(|response| response.attributes.unwrap_or_default())
            .map_err(ApiError::of(GET_ATTRIBUTES)),
    }))
}

/// The findings about the queue.
pub fn findings(name: Option<&str>, response: Option<&Result<QueueResponses, ApiError>>) -> Vec<Finding> {
    let check = "interruption queue";
    let (Some(name), Some(response)) = (name, response) else {
        let detail = "not set; spot interruptions, rebalance recommendations and maintenance are not handled in time";
        let help = "create one as in docs/aws and set INTERRUPTION_QUEUE";
        return vec![Finding::warning(check, detail.to_owned(), help.to_owned())];
    };
    let queue = match response {
        Ok(queue) => queue,
        Err(error) if error.class == Class::NotFound => {
            let help = "create it as in docs/aws, or correct INTERRUPTION_QUEUE";
            return vec![Finding::failed(check, format!("there is no queue {name}"), help.to_owned())];
        }
        Err(error) => return vec![Finding::failed(check, brief(error), remediation(error))],
    };
    let read = match &queue.received {
        Ok(()) => Finding::ok(check, format!("{name} exists and can be read")),
        Err(error) => Finding::failed(check, brief(error), remediation(error)),
    };
    let mut findings = vec![read];
    match &queue.attributes {
        Ok(attributes) => findings.extend([policy(attributes), encryption(attributes)]),
        Err(error) => {
            let detail = format!("not checked whether EventBridge may send to it: {}", brief(error));
            let help = "allow sqs:GetQueueAttributes, which only this check needs, or compare the queue with docs/aws";
            findings.push(Finding::warning("queue policy", detail, help.to_owned()));
        }
    }
    findings
}

fn policy(attributes: &HashMap<Attribute, String>) -> Finding {
    let check = "queue policy";
    let sent = attributes.get(&Attribute::Policy).and_then(|text| serde_json::from_str::<Value>(text).ok());
    if sent.is_some_and(|policy| allows_sender(&policy)) {
        return Finding::ok(check, format!("{SENDER} may send"));
    }
    let detail = format!("no statement allows {SENDER} to send to the queue, so no event arrives");
    Finding::failed(check, detail, format!("allow {SENDER} sqs:SendMessage in the queue's policy, as docs/aws does"))
}

/// Whether a queue's policy has a statement that allows EventBridge to send. Conditions are not evaluated.
fn allows_sender(policy: &Value) -> bool {
    listed(&policy["Statement"]).iter().any(|statement| {
        let action = |action: &&Value| {
            let text = action.as_str().unwrap_or_default().to_ascii_lowercase();
            ["sqs:sendmessage", "sqs:*", "*"].contains(&text.as_str())
        };
        let principal = &statement["Principal"];
        let services = [listed(principal), listed(&principal["Service"])].concat();
        statement["Effect"] == "Allow"
            && listed(&statement["Action"]).iter().any(action)
            && services.iter().any(|service| *service == "*" || *service == SENDER)
    })
}

/// The values of a policy element, which is a single value or a list.
fn listed(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(all) => all.iter().collect(),
        one => vec![one],
    }
}

fn encryption(attributes: &HashMap<Attribute, String>) -> Finding {
    let check = "queue encryption";
    let get = |name: &Attribute| attributes.get(name).map(String::as_str).filter(|value| !value.is_empty());
    match get(&Attribute::KmsMasterKeyId) {
        Some(key) if key.ends_with(MANAGED_KEY) => {
            let detail = format!("{MANAGED_KEY}, which EventBridge may not use, so no event arrives");
            Finding::failed(check, detail, "use SqsManagedSseEnabled, or a KMS key of your own".to_owned())
        }
        Some(key) => {
            let help = format!("make sure that its policy allows {SENDER} kms:Decrypt and kms:GenerateDataKey");
            Finding::warning(check, format!("KMS key {key}, whose policy is not checked"), help)
        }
        None if get(&Attribute::SqsManagedSseEnabled) == Some("true") => {
            Finding::ok(check, "by SQS's own keys".to_owned())
        }
        None => Finding::ok(check, "none, which events don't need".to_owned()),
    }
}
