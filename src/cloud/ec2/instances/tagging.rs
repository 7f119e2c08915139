//! Tags that instances get once they are Nodes. The controller's IAM policy allows no others after the launch.
//!
//! What instances have is read for many in one call. Each has a name of its own, so most calls that write tags are for one; those
//! that lack the very same share a call.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{Stream, StreamExt, stream};

use crate::cloud::ec2::Ec2Provider;
use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::degraded_apis;
use crate::cloud::ec2::instances::describe;
use crate::cloud::ec2::tags::CLAIM_TAG;
use crate::cloud::ec2::tags::{CLUSTER_TAG, tags};
use crate::cloud::{CloudError, Untagged, without_encoded_details};
use crate::sync::lock;

/// Instances whose tags are read in one call: few, since those that are read first must still be so when the last is written.
const LOOK: usize = 10;
/// Wait after each call that writes tags.
pub const PAUSE: Duration = Duration::from_secs(1);

const CREATE: &str = "ec2:CreateTags";

/// Tags by key.
type Tags = BTreeMap<String, String>;

/// The place of an instance among those that are due, and its id.
type Place<'a> = (usize, &'a str);

/// What became of the instance at a place.
pub type Outcome = (usize, Result<(), CloudError>);

/// What is missing of an instance's tags: its node's name as `Name`, unless the user has one, its claim and its cluster.
pub fn missing(present: &Tags, node: &str, claim: &str, cluster: &str) -> Tags {
    let wanted = [("Name", node), (CLAIM_TAG, claim), (CLUSTER_TAG, cluster)];
    let absent = wanted.into_iter().filter(|(key, _)| !present.contains_key(*key));
    absent.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn read(instance: &aws_sdk_ec2::types::Instance) -> Option<(String, Tags)> {
    let present = instance.tags().iter().filter_map(|tag| Some((tag.key()?.to_owned(), tag.value()?.to_owned())));
    Some((instance.instance_id()?.to_owned(), present.collect()))
}

async fn create(clients: &Clients, missing: &Tags, ids: Vec<String>) -> Result<(), ApiError> {
    let call = clients.ec2.create_tags().set_resources(Some(ids)).set_tags(Some(tags(missing)));
    call.send().await.map_err(ApiError::of(CREATE)).map(|_| ())
}

impl Ec2Provider {
    /// Tags what lacks tags, and waits for `pause` after each call that does.
    pub(crate) fn tag_all<'a>(
        &'a self,
        due: &'a [Untagged],
        pause: Duration,
    ) -> impl Stream<Item = Outcome> + Send + 'a {
        self.keep_untaggable(due);
        let (mut out_of_reach, mut places) = (Vec::new(), Vec::new());
        for (at, one) in due.iter().enumerate() {
            match self.reachable(&one.provider_id) {
                Ok(id) => places.push((at, id)),
                Err(error) => out_of_reach.push((at, Err(error))),
            }
        }
        let chunks: Vec<Vec<Place<'a>>> = places.chunks(LOOK).map(<[_]>::to_vec).collect();
        let looked = stream::iter(chunks).then(move |chunk| self.read_tags(due, chunk));
        let tagged = looked.flat_map(move |(known, lacking)| {
            let calls = stream::iter(lacking).then(move |(missing, of)| self.write_tags(missing, of, pause));
            stream::iter(known).chain(calls.flat_map(stream::iter))
        });
        stream::iter(out_of_reach).chain(tagged)
    }

    /// Reads the tags of instances: outcomes that need no call more, and the instances that lack the same, by what they lack.
    async fn read_tags<'a>(
        &self,
        due: &[Untagged],
        chunk: Vec<Place<'a>>,
    ) -> (Vec<Outcome>, BTreeMap<Tags, Vec<Place<'a>>>) {
        let ids: Vec<String> = chunk.iter().map(|(_, id)| (*id).to_owned()).collect();
        let found = describe::each(&self.clients, &ids, read).await;
        let (mut known, mut lacking) = (Vec::new(), BTreeMap::<Tags, Vec<Place<'a>>>::new());
        for (at, id) in chunk {
            let one = &due[at];
            match found.get(id) {
                Some(Ok(Some(present))) => match missing(present, &one.node, &one.claim, &self.options.cluster_name) {
                    missing if missing.is_empty() => known.push((at, self.note_tagged(id, Ok(())))),
                    missing => lacking.entry(missing).or_default().push((at, id)),
                },
                Some(Err(error)) => known.push((at, Err(error.clone().into()))),
                Some(Ok(None)) | None => known.push((at, self.note_absent(id))),
            }
        }
        (known, lacking)
    }

    /// Writes tags onto instances. One that is gone fails the whole call: then each is tried by itself.
    async fn write_tags(&self, missing: Tags, of: Vec<Place<'_>>, pause: Duration) -> Vec<Outcome> {
        let ids = of.iter().map(|(_, id)| (*id).to_owned()).collect();
        let answer = create(&self.clients, &missing, ids).await;
        tokio::time::sleep(pause).await;
        match answer {
            Err(error) if error.class == Class::NotFound && of.len() > 1 => {
                let mut out = Vec::new();
                for (at, id) in of {
                    let answer = create(&self.clients, &missing, vec![id.to_owned()]).await;
                    tokio::time::sleep(pause).await;
                    out.push((at, self.tagged(id, answer)));
                }
                out
            }
            answer => of.into_iter().map(|(at, id)| (at, self.tagged(id, answer.clone()))).collect(),
        }
    }

    fn tagged(&self, id: &str, answer: Result<(), ApiError>) -> Result<(), CloudError> {
        match answer {
            Err(error) if error.class == Class::NotFound => self.note_absent(id),
            answer => self.note_tagged(id, answer),
        }
    }

    /// What an instance's absence means: it is gone, unless it was just launched.
    fn note_absent(&self, id: &str) -> Result<(), CloudError> {
        self.note_tagged(id, Ok(()))?;
        if self.just_launched(id) {
            return Err(CloudError::Other(format!("EC2 does not know {id} yet, which it just launched")));
        }
        Ok(())
    }

    /// Notes whether an instance could be tagged: while one can't, people are told so.
    fn note_tagged(&self, id: &str, answer: Result<(), ApiError>) -> Result<(), CloudError> {
        let mut untaggable = lock(&self.untaggable);
        match &answer {
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
                self.degraded
                    .record_failure(degraded_apis::TAGS, format!("instances are not named after their nodes: {help}"));
            }
            Ok(()) => {
                if untaggable.remove(id) && untaggable.is_empty() {
                    self.degraded.record_recovery(degraded_apis::TAGS);
                }
            }
        }
        Ok(answer?)
    }

    /// Forgets those that could not be tagged and are not due any more.
    fn keep_untaggable(&self, due: &[Untagged]) {
        let mut untaggable = lock(&self.untaggable);
        if untaggable.is_empty() {
            return;
        }
        let due: BTreeSet<&str> = due.iter().filter_map(|one| describe::instance_id(&one.provider_id)).collect();
        untaggable.retain(|id| due.contains(&**id));
        if untaggable.is_empty() {
            self.degraded.record_recovery(degraded_apis::TAGS);
        }
    }
}

#[cfg(test)]
mod tests;
