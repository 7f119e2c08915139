//! Images that a node class selects, and the image that an instance type boots.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::time::Duration;

use aws_sdk_ec2::types::Filter;
use stowage_api::node_class::{AmiRequirement, AmiSelectorTerm, AmiStatus};
use stowage_model::labels;
use stowage_model::time::UnixMillis;
use stowage_runtime::sync::lock;

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::{ApiError, Class};
use crate::ec2::aws::filters::{filter, tag_filters};
use crate::ec2::node_class::ami_alias;
use crate::ec2::node_class::ami_alias::{AliasError, one_of};

/// An image as EC2 describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub id: String,
    pub name: String,
    pub created_at: UnixMillis,
    /// When it becomes deprecated.
    pub deprecated_at: Option<UnixMillis>,
    /// `amd64` or `arm64`.
    pub arch: &'static str,
}

impl Image {
    /// Reads EC2's description; `None` for an architecture without a Kubernetes name, and for an image without an id.
    pub fn read(image: &aws_sdk_ec2::types::Image) -> Option<Self> {
        let arch = match image.architecture()?.as_str() {
            "x86_64" => "amd64",
            "arm64" => "arm64",
            _ => return None,
        };
        let time = |text: Option<&str>| text.and_then(UnixMillis::parse_rfc3339);
        Some(Self {
            id: image.image_id()?.to_owned(),
            name: image.name().unwrap_or_default().to_owned(),
            created_at: time(image.creation_date()).unwrap_or_default(),
            deprecated_at: time(image.deprecation_time()),
            arch,
        })
    }

    fn is_deprecated(&self, now: UnixMillis) -> bool {
        self.deprecated_at.is_some_and(|at| at <= now)
    }
}

/// A DescribeImages call.
#[derive(Clone, Debug, PartialEq)]
pub struct Query {
    /// Filters besides the state.
    pub filters: Vec<Filter>,
    /// Owners; empty for every owner.
    pub owners: Vec<String>,
}

/// The calls that find images by name and tags, one for each term with neither alias, id nor SSM parameter.
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

/// One call for a list of ids.
fn by_id(ids: BTreeSet<String>) -> Query {
    Query { filters: vec![filter("image-id", ids)], owners: vec![] }
}

/// The status list of images with their requirements, newest first, then by id. Of images with equal requirements one is kept:
/// first by not being deprecated, then the newest, then the one with the greatest name.
pub fn status(found: Vec<(Image, Vec<AmiRequirement>)>, now: UnixMillis) -> Vec<AmiStatus> {
    let rank = |image: &Image| (!image.is_deprecated(now), image.created_at, image.name.clone());
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
    kept.sort_by(|(a, _), (b, _)| b.created_at.cmp(&a.created_at).then_with(|| a.id.cmp(&b.id)));
    kept.into_iter()
        .map(|(image, requirements)| AmiStatus {
            deprecated: image.is_deprecated(now).then_some(true),
            id: image.id,
            name: Some(image.name),
            requirements,
        })
        .collect()
}

/// Why images could not be resolved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The alias can't be resolved.
    #[error(transparent)]
    Alias(#[from] AliasError),
    /// An API failed.
    #[error(transparent)]
    Api(#[from] ApiError),
}

/// How long the value of an alias's parameter is cached.
const ALIAS_TTL: Duration = Duration::from_hours(24);
/// How long the value of a user's own parameter is cached.
const CUSTOM_TTL: Duration = Duration::from_mins(5);

/// Cached values of SSM parameters, by name.
#[derive(Debug, Default)]
pub struct SsmParameterCache {
    values: Mutex<HashMap<String, CachedValue>>,
}

#[derive(Debug)]
struct CachedValue {
    value: String,
    expires_at: UnixMillis,
    /// Whether AWS updates the value with each release (`@latest`).
    is_latest: bool,
}

impl SsmParameterCache {
    async fn value(
        &self,
        clients: &AwsClients,
        name: &str,
        is_latest: bool,
        ttl: Duration,
        now: UnixMillis,
    ) -> Result<String, ApiError> {
        if let Some(cached) = lock(&self.values).get(name).filter(|cached| cached.expires_at > now) {
            return Ok(cached.value.clone());
        }
        let response = clients.ssm.get_parameter().name(name).send().await.map_err(ApiError::of("ssm:GetParameter"))?;
        let value = response.parameter().and_then(|parameter| parameter.value()).unwrap_or_default().to_owned();
        let cached = CachedValue { value: value.clone(), expires_at: now + ttl, is_latest };
        lock(&self.values).insert(name.to_owned(), cached);
        Ok(value)
    }

    /// Drops the `@latest` parameters whose image is deprecated or deleted, so that the next resolution reads the newer one.
    /// Returns their names.
    ///
    /// # Errors
    /// DescribeImages fails.
    pub async fn forget_deprecated(&self, clients: &AwsClients, now: UnixMillis) -> Result<Vec<String>, ApiError> {
        let is_latest =
            |cached: &&CachedValue| cached.is_latest && cached.expires_at > now && cached.value.starts_with("ami-");
        let checked: BTreeSet<String> =
            lock(&self.values).values().filter(is_latest).map(|cached| cached.value.clone()).collect();
        if checked.is_empty() {
            return Ok(vec![]);
        }
        let found = describe(clients, by_id(checked.clone())).await?;
        let current: BTreeSet<&str> =
            found.iter().filter(|image| !image.is_deprecated(now)).map(|image| image.id.as_str()).collect();
        let mut names = Vec::new();
        lock(&self.values).retain(|name, cached| {
            // A value that was read during the call is not among the checked ones, or is as current as a new read.
            let outdated =
                cached.is_latest && checked.contains(&cached.value) && !current.contains(cached.value.as_str());
            names.extend(outdated.then(|| name.clone()));
            !outdated
        });
        names.sort_unstable();
        Ok(names)
    }
}

/// Resolves selector terms for a cluster of `version` to images and their requirements.
///
/// # Errors
/// [`ImageError`]. A missing parameter of an alias is not an error unless all are missing.
pub async fn find(
    clients: &AwsClients,
    parameters: &SsmParameterCache,
    terms: &[AmiSelectorTerm],
    version: &str,
    now: UnixMillis,
) -> Result<Vec<(Image, Vec<AmiRequirement>)>, ImageError> {
    if let Some(alias) = terms.iter().find_map(|term| term.alias.as_deref()) {
        return by_alias(clients, parameters, alias, version, now).await;
    }
    let mut ids: BTreeSet<String> = terms.iter().filter_map(|term| term.id.clone()).collect();
    for name in terms.iter().filter(|term| term.id.is_none()).filter_map(|term| term.ssm_parameter.as_deref()) {
        match parameters.value(clients, name, false, CUSTOM_TTL, now).await {
            Ok(value) if value.starts_with("ami-") => {
                ids.insert(value);
            }
            Ok(_) => tracing::warn!(parameter = name, "ignored SSM parameter, its value is no image id"),
            Err(error) if error.class == Class::NotFound => {
                tracing::warn!(parameter = name, "ignored SSM parameter, it does not exist");
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
    clients: &AwsClients,
    parameters: &SsmParameterCache,
    alias: &str,
    version: &str,
    now: UnixMillis,
) -> Result<Vec<(Image, Vec<AmiRequirement>)>, ImageError> {
    let alias_parameters = ami_alias::parameters(alias, version)?;
    let values = alias_parameters
        .iter()
        .map(|parameter| parameters.value(clients, &parameter.name, parameter.is_latest, ALIAS_TTL, now));
    let values = futures::future::join_all(values).await;
    let mut requirements: Vec<(String, &Vec<AmiRequirement>)> = Vec::new();
    let mut failure = None;
    for (parameter, value) in alias_parameters.iter().zip(values) {
        match value {
            Ok(id) => requirements.extend(parameter.requirements.iter().map(|list| (id.clone(), list))),
            Err(error) => {
                tracing::debug!(parameter = parameter.name, %error, "no image in SSM parameter");
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

async fn describe(clients: &AwsClients, query: Query) -> Result<Vec<Image>, ApiError> {
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
