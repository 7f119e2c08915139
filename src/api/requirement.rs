//! Conversion of the requirements of NodePools and NodeClaims to the value sets of [`crate::model::requirement`].

use crate::api::node_pool::Requirement;
use crate::model::requirement::{RequirementError, Requirements, ValueSet};

impl Requirements {
    /// Parses the requirements of a NodePool or NodeClaim.
    ///
    /// # Errors
    /// An operator is unknown, or a numeric operator lacks its integer.
    pub fn from_api(requirements: &[Requirement]) -> Result<Self, RequirementError> {
        let mut out = Self::default();
        for r in requirements {
            out.require(&r.key, &ValueSet::parse(&r.key, &r.operator, &r.values)?);
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b01_requirements_on_one_key_are_intersected() {
        let requirement = |operator: &str| Requirement {
            key: "beta.kubernetes.io/arch".into(),
            operator: operator.into(),
            values: vec!["arm64".into()],
            min_values: None,
        };
        let r = Requirements::from_api(&[requirement("In"), requirement("NotIn")]).unwrap();
        assert_eq!(r.contradiction(), Some("kubernetes.io/arch"));
        assert!(Requirements::from_api(&[requirement("Near")]).is_err());
    }
}
