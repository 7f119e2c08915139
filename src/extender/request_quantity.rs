//! Quantities in a request: `1500m`, `2Gi`, or a bare number.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de};
use stowage_model::quantity::parse_amount;

/// Text of a quantity. The API server writes strings; numbers are accepted, too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Quantity<'a>(pub Cow<'a, str>);

impl Quantity<'_> {
    /// The amount of a resource, in the units of [`stowage_model::resources::Resources`]. An unreadable quantity counts as more than
    /// any node has: such a pod must neither use room that is reserved for other pods nor fail the whole request.
    pub fn amount(&self, resource: &str) -> i64 {
        parse_amount(resource, &self.0).unwrap_or(i64::MAX)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Quantity<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Quantity<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity such as \"500m\" or \"2Gi\"")
            }

            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Quantity(Cow::Borrowed(text)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Quantity(Cow::Owned(text.to_owned())))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
                Ok(Quantity(Cow::Owned(number.to_string())))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
                Ok(Quantity(Cow::Owned(number.to_string())))
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Self::Value, E> {
                Ok(Quantity(Cow::Owned(number.to_string())))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_the_units_of_their_resource() {
        for (json, resource, amount) in [
            ("\"1500m\"", "cpu", 1500),
            ("2", "cpu", 2000),
            ("0.5", "cpu", 500),
            ("\"1.5Gi\"", "memory", 1_610_612_736),
            ("\"1Ki\"", "ephemeral-storage", 1024),
            ("\"3\"", "nvidia.com/gpu", 3),
            ("\"2\\u0030\"", "pods", 20),
        ] {
            assert_eq!(
                serde_json::from_str::<Quantity<'_>>(json).unwrap().amount(resource),
                amount,
                "{json} {resource}"
            );
        }
    }

    #[test]
    fn an_unreadable_quantity_is_more_than_any_node_has() {
        for text in ["", "-1", "abc", "1x", "1.2.3"] {
            for resource in ["cpu", "memory", "nvidia.com/gpu"] {
                assert_eq!(Quantity(text.into()).amount(resource), i64::MAX, "{text:?} {resource}");
            }
        }
        assert!(serde_json::from_str::<Quantity<'_>>("[]").is_err());
    }
}
