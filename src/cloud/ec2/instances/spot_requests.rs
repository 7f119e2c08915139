//! The status of spot requests, from DescribeSpotInstanceRequests: EC2 shows there that it is about to interrupt an instance. Karpenter's
//! policy does not grant this right.

use std::collections::{HashMap, HashSet};

use aws_sdk_ec2::Client;

use crate::ec2::aws::batcher::{BY_GROUP, BatchMetrics, Coalescer};
use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::ApiError;
use crate::ec2::aws::filters::filter;

/// The call.
pub const SPOT_REQUESTS: &str = "ec2:DescribeSpotInstanceRequests";
/// Beginnings of the codes of requests whose instance EC2 interrupts, or has interrupted.
const INTERRUPTED: [&str; 3] = ["marked-for-", "instance-terminated-", "instance-stopped-"];

/// Whether EC2 interrupts each instance; batched by instance id.
pub type Interruptions = Coalescer<String, Result<bool, ApiError>>;

/// Starts the batches.
pub fn interruptions(clients: &AwsClients) -> Interruptions {
    let ec2 = clients.ec2.clone();
    let metrics = BatchMetrics::new(&clients.metrics, "describe_spot_instance_requests");
    Coalescer::start(BY_GROUP, metrics, move |ids: Vec<String>| {
        let ec2 = ec2.clone();
        async move {
            let found = interrupted(&ec2, &ids).await;
            let one = |id: String| match &found {
                Ok(found) => (id.clone(), Ok(found.contains(&id))),
                Err(error) => (id, Err(error.clone())),
            };
            ids.into_iter().map(one).collect::<HashMap<_, _>>()
        }
    })
}

/// The instances among `ids` that EC2 interrupts.
async fn interrupted(ec2: &Client, ids: &[String]) -> Result<HashSet<String>, ApiError> {
    let call = ec2.describe_spot_instance_requests().filters(filter("instance-id", ids.to_vec()));
    let requests: Result<Vec<_>, _> = call.into_paginator().items().send().collect().await;
    let requests = requests.map_err(ApiError::of(SPOT_REQUESTS))?;
    let marked = requests.into_iter().filter(|request| {
        let code = request.status().and_then(|status| status.code()).unwrap_or_default();
        INTERRUPTED.iter().any(|prefix| code.starts_with(prefix))
    });
    Ok(marked.filter_map(|request| request.instance_id).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ec2::aws::errors::Class;
    use crate::test_support::fake_aws;

    #[tokio::test]
    async fn ec2_shows_which_instances_it_interrupts_in_one_call() {
        let (clients, requests) = fake_aws::clients(Box::new(|_| {
            let item = |(id, code): (&str, &str)| {
                format!("<item><instanceId>{id}</instanceId><status><code>{code}</code></status></item>")
            };
            let items = [
                ("i-1", "fulfilled"),
                ("i-2", "marked-for-termination"),
                ("i-3", "instance-terminated-no-capacity"),
                ("i-4", "request-canceled-and-instance-running"),
                ("i-9", "marked-for-termination"),
            ];
            let items: String = items.map(item).concat();
            fake_aws::ok(
                "DescribeSpotInstanceRequests",
                &format!("<spotInstanceRequestSet>{items}</spotInstanceRequestSet>"),
            )
        }));
        let interruptions = interruptions(&clients);
        let ids = ["i-1", "i-2", "i-3", "i-4", "i-5"];
        let asked = futures::future::join_all(ids.map(|id| interruptions.ask(id.to_owned()))).await;
        let asked: Vec<bool> = asked.into_iter().map(|answer| answer.unwrap().unwrap()).collect();
        assert_eq!(asked, [false, true, true, false, false]);
        assert_eq!(requests.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn without_the_right_nothing_is_confirmed() {
        let (clients, _) = fake_aws::clients(Box::new(|_| fake_aws::error("UnauthorizedOperation", "no")));
        let answer = interruptions(&clients).ask("i-1".to_owned()).await.unwrap();
        assert_eq!(answer.unwrap_err().class, Class::Unauthorized);
    }
}
