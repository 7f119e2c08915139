//! Images: which ones a node class selects, and which of them an instance type boots.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard};

use aws_sdk_ec2::types::Filter;
use k8s_openapi::jiff::Timestamp;

use crate::api::node_class::{AmiRequirement, AmiSelectorTerm, AmiStatus};
use crate::cloud::ec2::aws::client::Clients;
use crate::cloud::ec2::aws::errors::{ApiError, Class};
use crate::cloud::ec2::aws::filters::{filter, tag_filters};
use crate::cloud::ec2::node_class::ami_alias;
use crate::cloud::ec2::node_class::ami_alias::{AliasError, one_of};
use crate::model::labels;
use crate::sync::lock;

/// An image as EC2 describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Image id.
    pub id: String,
    /// Image name.
    pub name: String,
    /// Milliseconds since the epoch.
    pub created_ms: i64,
    /// When it is deprecated from, milliseconds since the epoch.
    pub deprecated_ms: Option<i64>,
    /// `amd64` or `arm64`.
    pub arch: &'static str,
}

impl Image {
    /// Reads EC2's description; `None` for architectures that Kubernetes nodes don't have and for images without an id.
    pub fn read(image: &aws_sdk_ec2::types::Image) -> Option<Self> {
        let arch = match image.architecture()?.as_str() {
            "x86_64" => "amd64",
            "arm64" => "arm64",
            _ => return None,
        };
        let time =
            |text: Option<&str>| text.and_then(|text| text.parse::<Timestamp>().ok()).map(Timestamp::as_millisecond);
        Some(Self {
            id: image.image_id()?.to_owned(),
            name: image.name().unwrap_or_default().to_owned(),
            created_ms: time(image.creation_date()).unwrap_or(0),
            deprecated_ms: time(image.deprecation_time()),
            arch,
        })
    }

    fn is_deprecated(&self, now_ms: i64) -> bool {
        self.deprecated_ms.is_some_and(|at| at <= now_ms)
    }
}

/// A DescribeImages call.
#[derive(Clone, Debug, PartialEq)]
pub struct Query {
    /// Filters besides the state.
    pub filters: Vec<Filter>,
    /// Owners; empty asks for every owner.
    pub owners: Vec<String>,
}

/// The calls that find images by name and tags, one for each such term.
pub fn queries(terms: &[AmiSelectorTerm]) -> Vec<Query> {
    let explicit = |term: &&AmiSelectorTerm| term.alias.is_none() && term.id.is_none() && term.ssm_parameter.is_none();
    let query = |term: &AmiSelectorTerm| {
        let mut filters: Vec<Filter> = term.name.iter().map(|name| filter("name", [name])).collect();
        filters.extend(tag_filters(&term.tags));
        let owners = match (&term.owner, &term.name) {
            (Some(owner), _) => vec![owner.clone()],
            (None, Some(_)) => vec!["self".to_owned(), "amazon".to_owned()],
            (None, None) => vec![],
        };
        Query { filters, owners }
    };
    terms.iter().filter(explicit).map(query).collect()
}

/// Asks for one list of ids.
fn by_id(ids: BTreeSet<String>) -> Query {
    Query { filters: vec![filter("image-id", ids)], owners: vec![] }
}

/// The status list of images with what each boots on. For equal requirements one image is kept: one that isn't deprecated
/// before one that is, then the newest, then the greatest name. Newest first, then by id.
pub fn status(found: Vec<(Image, Vec<AmiRequirement>)>, now_ms: i64) -> Vec<AmiStatus> {
    let rank = |image: &Image| (!image.is_deprecated(now_ms), image.created_ms, image.name.clone());
    let mut kept: Vec<(Image, Vec<AmiRequirement>)> = Vec::new();
    for (image, requirements) in found {
        match kept.iter_mut().find(|(_, other)| *other == requirements) {
            None => kept.push((image, requirements)),
            Some((other, _)) => {
                if rank(&image) > rank(other) {
                    *other = image;
                }
            }
        }
    }
    kept.sort_by(|(a, _), (b, _)| b.created_ms.cmp(&a.created_ms).then_with(|| a.id.cmp(&b.id)));
    kept.into_iter()
        .map(|(image, requirements)| AmiStatus {
            deprecated: image.is_deprecated(now_ms).then_some(true),
            id: image.id,
            name: Some(image.name),
            requirements,
        })
        .collect()
}

/// Why no images were found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The alias can't be had.
    #[error(transparent)]
    Alias(#[from] AliasError),
    /// An API failed.
    #[error(transparent)]
    Api(#[from] ApiError),
}

/// How long the value of a parameter that moves, or never does, is remembered, milliseconds.
const ALIAS_TTL_MS: i64 = 86_400_000;
/// How long the value of a user's own parameter is remembered, milliseconds.
const CUSTOM_TTL_MS: i64 = 300_000;

/// Values of SSM parameters, by name.
#[derive(Debug, Default)]
pub struct Parameters {
    known: Mutex<HashMap<String, Known>>,
}

#[derive(Debug)]
struct Known {
    value: String,
    /// When it is asked for again, milliseconds since the epoch.
    until_ms: i64,
    /// Whether AWS sets it anew with each image (`@latest`).
    moves: bool,
}

impl Parameters {
    fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        lock(&self.known)
    }

    async fn value(
        &self,
        clients: &Clients,
        name: &str,
        moves: bool,
        ttl_ms: i64,
        now_ms: i64,
    ) -> Result<String, ApiError> {
        if let Some(known) = self.known().get(name).filter(|known| known.until_ms > now_ms) {
            return Ok(known.value.clone());
        }
        let answer = clients.ssm.get_parameter().name(name).send().await.map_err(ApiError::of("ssm:GetParameter"))?;
        let value = answer.parameter().and_then(|parameter| parameter.value()).unwrap_or_default().to_owned();
        self.known().insert(name.to_owned(), Known { value: value.clone(), until_ms: now_ms + ttl_ms, moves });
        Ok(value)
    }

    /// Forgets the moving parameters whose image is deprecated by now, or gone: the next look asks for the newer one. Returns their
    /// names.
    ///
    /// # Errors
    /// EC2's, of DescribeImages.
    pub async fn forget_deprecated(&self, clients: &Clients, now_ms: i64) -> Result<Vec<String>, ApiError> {
        let moving = |known: &&Known| known.moves && known.until_ms > now_ms && known.value.starts_with("ami-");
        let asked: BTreeSet<String> = self.known().values().filter(moving).map(|known| known.value.clone()).collect();
        if asked.is_empty() {
            return Ok(vec![]);
        }
        let found = describe(clients, by_id(asked.clone())).await?;
        let good: BTreeSet<&str> =
            found.iter().filter(|image| !image.is_deprecated(now_ms)).map(|image| image.id.as_str()).collect();
        let mut names = Vec::new();
        self.known().retain(|name, known| {
            // One that was asked for meanwhile has another value, or is as good as the others will be.
            let old = known.moves && asked.contains(&known.value) && !good.contains(known.value.as_str());
            names.extend(old.then(|| name.clone()));
            !old
        });
        names.sort_unstable();
        Ok(names)
    }
}

/// Finds what some terms select, for a cluster of `version`: images and what each boots on.
///
/// # Errors
/// [`ImageError`]. That a parameter of an alias isn't there is no error as long as another one is.
pub async fn find(
    clients: &Clients,
    parameters: &Parameters,
    terms: &[AmiSelectorTerm],
    version: &str,
    now_ms: i64,
) -> Result<Vec<(Image, Vec<AmiRequirement>)>, ImageError> {
    if let Some(alias) = terms.iter().find_map(|term| term.alias.as_deref()) {
        return by_alias(clients, parameters, alias, version, now_ms).await;
    }
    let mut ids: BTreeSet<String> = terms.iter().filter_map(|term| term.id.clone()).collect();
    for name in terms.iter().filter(|term| term.id.is_none()).filter_map(|term| term.ssm_parameter.as_deref()) {
        match parameters.value(clients, name, false, CUSTOM_TTL_MS, now_ms).await {
            Ok(value) if value.starts_with("ami-") => {
                ids.insert(value);
            }
            Ok(_) => tracing::warn!(parameter = name, "the SSM parameter holds no image id, it is left out"),
            Err(error) if error.class == Class::NotFound => {
                tracing::warn!(parameter = name, "the SSM parameter does not exist, it is left out");
            }
            Err(error) => return Err(error.into()),
        }
    }
    let mut all = queries(terms);
    if !ids.is_empty() {
        all.push(by_id(ids));
    }
    let mut found = Vec::new();
    for query in all {
        found.extend(describe(clients, query).await?);
    }
    Ok(found.into_iter().map(|image| (image.clone(), vec![one_of(labels::ARCH, image.arch)])).collect())
}

async fn by_alias(
    clients: &Clients,
    parameters: &Parameters,
    alias: &str,
    version: &str,
    now_ms: i64,
) -> Result<Vec<(Image, Vec<AmiRequirement>)>, ImageError> {
    let wanted = ami_alias::parameters(alias, version)?;
    let values = wanted.iter().map(|one| parameters.value(clients, &one.name, one.moves, ALIAS_TTL_MS, now_ms));
    let values = futures::future::join_all(values).await;
    let mut requirements: Vec<(String, &Vec<AmiRequirement>)> = Vec::new();
    let mut failure = None;
    for (parameter, value) in wanted.iter().zip(values) {
        match value {
            Ok(id) => requirements.extend(parameter.requirements.iter().map(|list| (id.clone(), list))),
            Err(error) => {
                tracing::debug!(parameter = parameter.name, %error, "no image from this parameter");
                failure = Some(error);
            }
        }
    }
    if requirements.is_empty() {
        return failure.map_or(Ok(vec![]), |error| Err(error.into()));
    }
    let images = describe(clients, by_id(requirements.iter().map(|(id, _)| id.clone()).collect())).await?;
    let found = requirements.into_iter().filter_map(|(id, list)| {
        let image = images.iter().find(|image| image.id == id)?;
        Some((image.clone(), list.clone()))
    });
    Ok(found.collect())
}

async fn describe(clients: &Clients, query: Query) -> Result<Vec<Image>, ApiError> {
    let mut call = clients.ec2.describe_images().include_deprecated(true).max_results(1000);
    call = call.set_filters(Some(query.filters)).filters(filter("state", ["available"]));
    if !query.owners.is_empty() {
        call = call.set_owners(Some(query.owners));
    }
    let mut pages = call.into_paginator().send();
    let mut found = Vec::new();
    while let Some(page) = pages.next().await {
        let page = page.map_err(ApiError::of("ec2:DescribeImages"))?;
        found.extend(page.images().iter().filter_map(Image::read));
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
