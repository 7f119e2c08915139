//! Which of the images of a node class an instance type boots.

use std::collections::BTreeMap;

use stowage_api::node_class::{AmiRequirement, AmiStatus};
use stowage_model::labels;

/// Whether an instance type with these labels boots an image with these requirements. Requirements on the operating system and
/// the Windows build are ignored: instance types do not have these labels.
pub fn boots(requirements: &[AmiRequirement], own: &BTreeMap<String, String>) -> bool {
    requirements.iter().filter(|requirement| ![labels::OS, labels::WINDOWS_BUILD].contains(&&*requirement.key)).all(
        |requirement| {
            let value = own.get(&requirement.key);
            let listed = || value.is_some_and(|value| requirement.values.contains(value));
            let beyond = |ordering| {
                let bound = requirement.values.first().and_then(|bound| bound.parse::<i64>().ok());
                let value = value.and_then(|value| value.parse::<i64>().ok());
                value.zip(bound).is_some_and(|(value, bound)| value.cmp(&bound) == ordering)
            };
            match requirement.operator.as_str() {
                "In" => listed(),
                "NotIn" => !listed(),
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                "Gt" => beyond(std::cmp::Ordering::Greater),
                "Lt" => beyond(std::cmp::Ordering::Less),
                _ => false,
            }
        },
    )
}

/// The image an instance type boots: the first compatible image of the status.
pub fn image_of<'a>(images: &'a [AmiStatus], own: &BTreeMap<String, String>) -> Option<&'a AmiStatus> {
    images.iter().find(|image| boots(&image.requirements, own))
}
