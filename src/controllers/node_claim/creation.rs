//! Creates NodeClaims under names that are chosen here: a creation whose answer was lost is repeated, and the NodeClaim is there once.

use std::collections::HashSet;
use std::iter::repeat_with;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, stream};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use stowage_api::NodeClaim;
use tokio::time::sleep;

use crate::controllers::context::Context;
use crate::controllers::node_claim::claim_metrics;
use crate::decisions::disruption::reason::DisruptionReason;
use crate::state::object_ext::ObjectExt;

/// NodeClaims that are created concurrently.
const CONCURRENCY: usize = 32;
/// Waits before a creation is repeated whose answer was lost.
const REPEAT_AFTER: [Duration; 3] = [Duration::ZERO, Duration::from_millis(250), Duration::from_secs(1)];
/// None is repeated this long after it began: an answer may take half a minute.
const REPEAT_FOR: Duration = Duration::from_secs(5);
/// Names that are tried, where others are taken.
const MAX_NAMES: usize = 5;

/// Characters and length of the random end of a name, and the longest name, as the API server generates names from `generateName`.
const CHARACTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
const RANDOM: usize = 5;
const MAX_NAME: usize = 63;

/// Creates these NodeClaims, each with what it is for, up to [`CONCURRENCY`] at a time and in this order. `reason` is why the nodes are disrupted that they replace. Those that exist are counted and known to the
/// cluster state. A NodeClaim whose creation failed may exist.
pub fn create_all<T>(
    ctx: &Context,
    claims: Vec<(T, NodeClaim)>,
    reason: Option<DisruptionReason>,
) -> impl Stream<Item = (T, Result<NodeClaim, kube::Error>)> {
    let api: Api<NodeClaim> = Api::all(ctx.plan_client.clone());
    let mut names = HashSet::new();
    let named: Vec<(T, NodeClaim)> = {
        let state = ctx.cluster.read();
        let mut with_name = |(of, mut claim): (T, NodeClaim)| {
            let is_free = |name: &String| !state.claims.contains_key(name) && names.insert(name.clone());
            let free = repeat_with(|| name(&claim)).take(MAX_NAMES).find(is_free);
            claim.metadata.name = Some(free.unwrap_or_else(|| name(&claim)));
            (of, claim)
        };
        claims.into_iter().map(&mut with_name).collect()
    };
    let creations = named.into_iter().map(move |(of, claim)| {
        let api = api.clone();
        async move {
            let created = create(&api, claim).await;
            if let Ok(claim) = &created {
                claim_metrics::count_created(ctx, claim, reason);
                ctx.cluster.update(|state| state.apply_claim(claim.clone()));
            }
            (of, created)
        }
    });
    stream::iter(creations.collect::<Vec<_>>()).buffer_unordered(CONCURRENCY)
}

/// Creates a NodeClaim. If another has its name, it gets a new one.
async fn create(api: &Api<NodeClaim>, mut claim: NodeClaim) -> Result<NodeClaim, kube::Error> {
    let (begun, mut repeat_after, mut other_names) = (Instant::now(), REPEAT_AFTER.into_iter(), 1..MAX_NAMES);
    loop {
        let error = match api.create(&PostParams::default(), &claim).await {
            Err(error) => error,
            created => return created,
        };
        if is_lost(&error)
            && begun.elapsed() < REPEAT_FOR
            && let Some(wait) = repeat_after.next()
        {
            sleep(wait).await;
        } else if is_taken(&error) && other_names.next().is_some() {
            if let Some(found) = api.get_opt(&claim.name_any()).await?.filter(|found| is_same(found, &claim)) {
                return Ok(found);
            }
            claim.metadata.name = Some(name(&claim));
        } else {
            return Err(error);
        }
    }
}

/// A name as the API server generates it from the claim's `generateName`.
fn name(claim: &NodeClaim) -> String {
    let prefix = claim.metadata.generate_name.as_deref().unwrap_or_default();
    let end = prefix.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= MAX_NAME - RANDOM).last();
    let random = (0..RANDOM).map(|_| char::from(CHARACTERS[fastrand::usize(..CHARACTERS.len())]));
    prefix[..end.unwrap_or(0)].chars().chain(random).collect()
}

/// Whether the API server may have carried out the request, and its answer did not arrive.
fn is_lost(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Service(_) | kube::Error::HyperError(_))
}

/// Whether an object has the name.
fn is_taken(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_already_exists())
}

/// Whether `found` was created as `claim`: it has its labels, annotations and owner. Those of a plan name its pods.
fn is_same(found: &NodeClaim, claim: &NodeClaim) -> bool {
    let has_labels = claim.labels().iter().all(|(key, value)| found.labels().get(key) == Some(value));
    let has_annotations = claim.annotations().iter().all(|(key, value)| found.annotations().get(key) == Some(value));
    has_labels && has_annotations && found.owner_references() == claim.owner_references() && !found.is_deleting()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use serde_json::json;
    use stowage_model::labels;
    use stowage_test_objects as objects;

    use super::*;
    use crate::decisions::placement::mode::PlacementMode;
    use crate::test_support::failures::outcome;
    use crate::test_support::kubernetes::object_store::{Key, Refusal};
    use crate::test_support::kubernetes::{FakeApi, Fault, Recorded};
    use crate::test_support::scripted_cloud::FakeCloud;

    fn claim(pods: &str) -> NodeClaim {
        let meta = json!({"generateName": "default-", "labels": {(labels::NODE_POOL): "default"}, "annotations": {(labels::PLANNED_PODS): pods}});
        let mut claim = objects::claim("", &json!({"metadata": meta}));
        (claim.metadata.name, claim.metadata.uid) = (Some(name(&claim)), None);
        claim
    }

    /// The result of a creation under a fault that every request meets `times`, and the numbers of requests and of NodeClaims.
    async fn created(fault: Option<Fault>, times: usize) -> (String, usize, usize) {
        let api = FakeApi::default();
        if let Some(fault) = fault {
            api.inject(fault, times, Recorded::is_write);
        }
        let result = create(&api.all(), claim("a")).await;
        (outcome(result), api.writes().len(), api.objects().len())
    }

    #[tokio::test]
    async fn a_creation_without_an_answer_is_repeated_and_creates_one_claim() {
        assert_eq!(created(None, 0).await, ("ok".into(), 1, 1));
        assert_eq!(created(Some(Fault::LostAnswer), 1).await, ("ok".into(), 2, 1));
        assert_eq!(created(Some(Fault::LostAnswer), 2).await, ("ok".into(), 3, 1));
        let invalid = Fault::Refused(Refusal::invalid("the object is invalid"));
        assert_eq!(created(Some(invalid), 1).await, ("error 422".into(), 1, 0), "a rejection is an answer");
        let conflict = Fault::Refused(Refusal::conflict(&Key::new("objects", "", "o")));
        assert_eq!(created(Some(conflict), 1).await, ("error 409".into(), 1, 0));
    }

    #[tokio::test]
    async fn a_name_that_is_taken_is_followed_by_another() {
        // The answer says that the name is taken, and the claim of that name is another, deleted, or not there.
        let taken = || Fault::Refused(Refusal::already_exists(&Key::new("nodeclaims", "", "c")));
        assert_eq!(created(Some(taken()), 1).await, ("ok".into(), 2, 1));
        assert_eq!(created(Some(taken()), MAX_NAMES - 1).await, ("ok".into(), MAX_NAMES, 1));
        assert_eq!(created(Some(taken()), usize::MAX).await, ("error 409".into(), MAX_NAMES, 0));
    }

    #[tokio::test]
    async fn equal_claims_get_names_that_no_claim_has() {
        // The generator draws the names of the claims that exist again.
        let (seed, api) = (7, FakeApi::default());
        fastrand::seed(seed);
        let existing = [claim("a"), claim("a")].map(|claim| api.put(&claim).name_any());
        let ctx = api.context(Arc::new(FakeCloud::default()), PlacementMode::Extender);
        fastrand::seed(seed);
        let claims = vec![((), claim("a")), ((), claim("a"))];
        let created: Vec<_> =
            create_all(&ctx, claims, None).map(|((), result)| result.unwrap().name_any()).collect().await;
        assert!(created[0] != created[1] && !created.iter().any(|name| existing.contains(name)), "{created:?}");
        assert_eq!((ctx.cluster.read().claims.len(), api.objects().len()), (4, 4));
    }

    #[test]
    fn only_a_claim_for_the_same_pods_and_node_pool_is_the_same() {
        let deleted = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let mut labeled = claim("a");
        labeled.labels_mut().insert("more".into(), "after the launch".into());
        for (case, found, same) in [
            ("as sent", claim("a"), true),
            ("with more labels", labeled, true),
            ("other pods", claim("b"), false),
            ("no plan", objects::claim("c", &json!({})), false),
            ("deleted", NodeClaim { metadata: objects::claim("c", &deleted).metadata, ..claim("a") }, false),
        ] {
            assert_eq!(is_same(&found, &claim("a")), same, "{case}");
        }
    }

    #[test]
    fn names_are_those_that_the_api_server_would_generate() {
        let name = |prefix: &str| {
            let mut claim = claim("a");
            claim.metadata.generate_name = Some(prefix.into());
            super::name(&claim)
        };
        let names: BTreeSet<String> = (0..100).map(|_| name("default-")).collect();
        assert_eq!(names.len(), 100);
        for name in names {
            let random = name.strip_prefix("default-").unwrap().as_bytes();
            assert!(random.len() == RANDOM && random.iter().all(|c| CHARACTERS.contains(c)), "{name}");
        }
        let long = name(&"p".repeat(200));
        assert_eq!((long.len(), long.starts_with(&"p".repeat(MAX_NAME - RANDOM))), (MAX_NAME, true));
    }
}
