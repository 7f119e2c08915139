//! Security groups that a node class selects.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::Filter;
use stowage_api::node_class::{SecurityGroupSelectorTerm, SecurityGroupStatus};

use crate::ec2::aws::client::AwsClients;
use crate::ec2::aws::errors::ApiError;
use crate::ec2::aws::filters::{filter, tag_filters};

/// The calls for selector terms: one for all ids, one for all names, one for each term with tags.
pub fn queries(terms: &[SecurityGroupSelectorTerm]) -> Vec<Vec<Filter>> {
    let ids: Vec<&String> = terms.iter().filter_map(|term| term.id.as_ref()).collect();
    let names: Vec<&String> = terms.iter().filter_map(|term| term.name.as_ref()).collect();
    let mut out = Vec::new();
    if !ids.is_empty() {
        out.push(vec![filter("group-id", ids)]);
    }
    if !names.is_empty() {
        out.push(vec![filter("group-name", names)]);
    }
    let tagged = terms.iter().filter(|term| term.id.is_none() && term.name.is_none());
    out.extend(tagged.map(|term| tag_filters(&term.tags)));
    out
}

/// The status list: each group once, by id.
pub fn status(found: Vec<(String, Option<String>)>) -> Vec<SecurityGroupStatus> {
    let by_id: BTreeMap<String, Option<String>> = found.into_iter().collect();
    by_id.into_iter().map(|(id, name)| SecurityGroupStatus { id, name }).collect()
}

/// Describes the security groups that some terms select: ids and names.
///
/// # Errors
/// A call fails.
pub async fn find(
    clients: &AwsClients,
    terms: &[SecurityGroupSelectorTerm],
) -> Result<Vec<(String, Option<String>)>, ApiError> {
    let mut found = Vec::new();
    for filters in queries(terms) {
        let call = clients.ec2.describe_security_groups().set_filters(Some(filters)).max_results(500);
        let mut pages = call.into_paginator().send();
        while let Some(page) = pages.next().await {
            let page = page.map_err(ApiError::of("ec2:DescribeSecurityGroups"))?;
            let groups = page.security_groups().iter();
            found.extend(
                groups.filter_map(|group| Some((group.group_id()?.to_owned(), group.group_name().map(str::to_owned)))),
            );
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ec2::aws::filters::tests::text;

    #[test]
    fn all_ids_share_one_call_and_so_do_all_names() {
        let id = |id: &str| SecurityGroupSelectorTerm { id: Some(id.into()), ..Default::default() };
        let name = |name: &str| SecurityGroupSelectorTerm { name: Some(name.into()), ..Default::default() };
        let tags = SecurityGroupSelectorTerm { tags: [("k".into(), "v".into())].into(), ..Default::default() };
        let calls: Vec<_> =
            queries(&[name("web"), id("sg-1"), tags, id("sg-2")]).iter().map(|filters| text(filters)).collect();
        assert_eq!(calls, [vec!["group-id=sg-1,sg-2"], vec!["group-name=web"], vec!["tag:k=v"]]);
    }

    #[test]
    fn the_status_is_sorted_and_without_duplicates() {
        let group = |id: &str| (id.to_owned(), Some(format!("name-{id}")));
        let list = status(vec![group("sg-2"), group("sg-1"), group("sg-2")]);
        let ids: Vec<&str> = list.iter().map(|group| &*group.id).collect();
        assert_eq!(ids, ["sg-1", "sg-2"]);
        assert_eq!(list[0].name.as_deref(), Some("name-sg-1"));
    }
}
