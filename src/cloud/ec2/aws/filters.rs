//! Selector terms as filters of Describe calls.

use std::collections::BTreeMap;

use aws_sdk_ec2::types::Filter;

/// A filter that takes any of some values.
pub fn filter<I: IntoIterator<Item = S>, S: Into<String>>(name: impl Into<String>, values: I) -> Filter {
    Filter::builder().name(name).set_values(Some(values.into_iter().map(Into::into).collect())).build()
}

/// Filters of tags that must all be present; the value `*` matches any value of the key.
pub fn tag_filters(tags: &BTreeMap<String, String>) -> Vec<Filter> {
    let one = |(key, value): (&String, &String)| match value.as_str() {
        "*" => filter("tag-key", [key]),
        value => filter(format!("tag:{key}"), [value]),
    };
    tags.iter().map(one).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Filters as text, for tables.
    pub fn text(filters: &[Filter]) -> Vec<String> {
        let one = |filter: &Filter| format!("{}={}", filter.name().unwrap_or_default(), filter.values().join(","));
        filters.iter().map(one).collect()
    }

    #[test]
    fn a_star_asks_for_the_key() {
        let tags = BTreeMap::from([("Name".to_owned(), "*Public*".to_owned()), ("team".to_owned(), "*".to_owned())]);
        assert_eq!(text(&tag_filters(&tags)), ["tag:Name=*Public*", "tag-key=team"]);
    }
}
