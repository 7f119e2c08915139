//! Tags instances with the names of their Node, NodeClaim and cluster after they become Nodes. The IAM policy of the controller
//! permits no other tags after the launch.
//!
//! One call reads the tags of many instances. Most calls that write tags are for one instance, since names differ; instances that
//! lack the same tags share a call.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use stowage_runtime::clock;
use stowage_runtime::sync::lock;

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::failing_apis::DegradedApis;
use crate::ec2::instances::describe;
use crate::ec2::instances::instance_store::InstanceStore;
use crate::ec2::tags::CLAIM_TAG;
use crate::ec2::tags::{CLUSTER_TAG, tags};
use crate::{CloudError, OptionalApi, Untagged, without_encoded_details};

/// Instances whose tags are read in one call: a small number, so that the tags are still current when the last of them is written.
const READ_BATCH: usize = 10;
/// Wait after each call that writes tags.
pub const PAUSE: Duration = Duration::from_secs(1);

const CREATE: &str = "ec2:CreateTags";

/// Tags by key.
type Tags = BTreeMap<String, String>;

/// The index of an instance among the due instances, and its id.
type Indexed<'a> = (usize, &'a str);

/// The result for the instance at an index.
pub type TagOutcome = (usize, Result<(), CloudError>);

/// The missing tags of an instance: the name of its Node as `Name`, unless the user sets one, its NodeClaim and its cluster.
pub fn missing(present: &Tags, node: &str, claim: &str, cluster: &str) -> Tags {
    let wanted = [("Name", node), (CLAIM_TAG, claim), (CLUSTER_TAG, cluster)];
    let absent = wanted.into_iter().filter(|(key, _)| !present.contains_key(*key));
    absent.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn read(instance: &aws_sdk_ec2::types::Instance) -> Option<(String, Tags)> {
    let present = instance.tags().iter().filter_map(|tag| Some((tag.key()?.to_owned(), tag.value()?.to_owned())));
    Some((instance.instance_id()?.to_owned(), present.collect()))
}

async fn create(clients: &AwsClients, missing: &Tags, ids: Vec<String>) -> Result<(), ApiError> {
    let call = clients.ec2.create_tags().set_resources(Some(ids)).set_tags(Some(tags(missing)));
    call.send().await.map_err(ApiError::of(CREATE)).map(|_| ())
}

/// Writes the tags. Locks `untaggable` before the list of degraded APIs.
#[derive(Debug)]
pub struct Tagger {
    clients: AwsClients,
    cluster_name: String,
    instances: Arc<InstanceStore>,
    degraded_apis: Arc<DegradedApis>,
    /// Ids of due instances whose last tagging failed.
    untaggable: Mutex<BTreeSet<String>>,
}

impl Tagger {
    pub fn new(
        clients: AwsClients,
        cluster_name: &str,
        instances: Arc<InstanceStore>,
        degraded_apis: Arc<DegradedApis>,
    ) -> Self {
        Self { clients, cluster_name: cluster_name.to_owned(), instances, degraded_apis, untaggable: Mutex::default() }
    }

    /// Tags the instances that lack tags, and waits for `pause` after each CreateTags call.
    pub fn tag_all<'a>(&'a self, due: &'a [Untagged], pause: Duration) -> impl Stream<Item = TagOutcome> + Send + 'a {
        self.retain_due(due);
        let (mut unreachable, mut indexed) = (Vec::new(), Vec::new());
        for (at, one) in due.iter().enumerate() {
            match self.instances.reachable(&one.provider_id) {
                Ok(id) => indexed.push((at, id)),
                Err(error) => unreachable.push((at, Err(error))),
            }
        }
        let chunks: Vec<Vec<Indexed<'a>>> = indexed.chunks(READ_BATCH).map(<[_]>::to_vec).collect();
        let read = stream::iter(chunks).then(move |chunk| self.read_tags(due, chunk));
        let tagged = read.flat_map(move |(known, lacking)| {
            let calls = stream::iter(lacking).then(move |(missing, of)| self.write_tags(missing, of, pause));
            stream::iter(known).chain(calls.flat_map(stream::iter))
        });
        stream::iter(unreachable).chain(tagged)
    }

    /// Reads the tags of instances. Returns the outcomes that need no further call, and the other instances by their missing tags.
    async fn read_tags<'a>(
        &self,
        due: &[Untagged],
        chunk: Vec<Indexed<'a>>,
    ) -> (Vec<TagOutcome>, BTreeMap<Tags, Vec<Indexed<'a>>>) {
        let ids: Vec<String> = chunk.iter().map(|(_, id)| (*id).to_owned()).collect();
        let found = describe::each(&self.clients, &ids, vec![describe::existing()], read).await;
        let (mut known, mut lacking) = (Vec::new(), BTreeMap::<Tags, Vec<Indexed<'a>>>::new());
        for (at, id) in chunk {
            let one = &due[at];
            match found.get(id) {
                Some(Ok(Some(present))) => match missing(present, &one.node, &one.claim, &self.cluster_name) {
                    missing if missing.is_empty() => known.push((at, self.record_tagged(id, Ok(())))),
                    missing => lacking.entry(missing).or_default().push((at, id)),
                },
                Some(Err(error)) => known.push((at, Err(error.clone().into()))),
                Some(Ok(None)) | None => known.push((at, self.record_absent(id))),
            }
        }
        (known, lacking)
    }

    /// Writes tags. A terminated instance fails the whole call; each instance is then tagged by a separate call.
    async fn write_tags(&self, missing: Tags, of: Vec<Indexed<'_>>, pause: Duration) -> Vec<TagOutcome> {
        let ids = of.iter().map(|(_, id)| (*id).to_owned()).collect();
        let response = create(&self.clients, &missing, ids).await;
        tokio::time::sleep(pause).await;
        match response {
            Err(error) if error.class == Class::NotFound && of.len() > 1 => {
                let mut out = Vec::new();
                for (at, id) in of {
                    let response = create(&self.clients, &missing, vec![id.to_owned()]).await;
                    tokio::time::sleep(pause).await;
                    out.push((at, self.tagged(id, response)));
                }
                out
            }
            response => of.into_iter().map(|(at, id)| (at, self.tagged(id, response.clone()))).collect(),
        }
    }

    fn tagged(&self, id: &str, response: Result<(), ApiError>) -> Result<(), CloudError> {
        match response {
            Err(error) if error.class == Class::NotFound => self.record_absent(id),
            response => self.record_tagged(id, response),
        }
    }

    /// The outcome of an instance that EC2 does not know: it is terminated, unless it was launched recently.
    fn record_absent(&self, id: &str) -> Result<(), CloudError> {
        self.record_tagged(id, Ok(()))?;
        if self.instances.recent(id, clock::now()).is_some() {
            return Err(CloudError::Other(format!("EC2 does not know {id} yet, which it just launched")));
        }
        Ok(())
    }

    /// Records whether an instance was tagged. Tagging is degraded while any due instance fails.
    fn record_tagged(&self, id: &str, response: Result<(), ApiError>) -> Result<(), CloudError> {
        let mut untaggable = lock(&self.untaggable);
        match &response {
            Err(error) => {
                untaggable.insert(id.to_owned());
                let help = match error.class {
                    Class::Unauthorized => {
                        format!(
                            "allow {CREATE} in the controller's policy ({})",
                            without_encoded_details(&error.to_string())
                        )
                    }
                    _ => error.to_string(),
                };
                self.degraded_apis.record_failure(
                    OptionalApi::InstanceTags,
                    format!("instances are not named after their nodes: {help}"),
                );
            }
            Ok(()) => {
                if untaggable.remove(id) && untaggable.is_empty() {
                    self.degraded_apis.record_recovery(OptionalApi::InstanceTags);
                }
            }
        }
        Ok(response?)
    }

    /// Removes failed instances that are no longer due.
    fn retain_due(&self, due: &[Untagged]) {
        let mut untaggable = lock(&self.untaggable);
        if untaggable.is_empty() {
            return;
        }
        let due: BTreeSet<&str> = due.iter().filter_map(|one| describe::instance_id(&one.provider_id)).collect();
        untaggable.retain(|id| due.contains(&**id));
        if untaggable.is_empty() {
            self.degraded_apis.record_recovery(OptionalApi::InstanceTags);
        }
    }
}

#[cfg(test)]
mod tests;
