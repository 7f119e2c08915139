//! Conversion of the requirements of NodePools and NodeClaims to the value sets of [`stowage_model::requirement`].

use stowage_model::requirement::{RequirementError, Requirements, ValueSet};

use crate::node_pool::Requirement;

/// Parses the requirements of a NodePool or NodeClaim.
///
/// # Errors
/// An operator is unknown, or a numeric operator lacks its integer.
pub fn parse_requirements(requirements: &[Requirement]) -> Result<Requirements, RequirementError> {
    let mut out = Requirements::default();
    for r in requirements {
        out.require(&r.key, &ValueSet::parse(&r.key, &r.operator, &r.values)?);
    }
    Ok(out)
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
        let r = parse_requirements(&[requirement("In"), requirement("NotIn")]).unwrap();
        assert_eq!(r.contradiction(), Some("kubernetes.io/arch"));
        assert!(parse_requirements(&[requirement("Near")]).is_err());
    }
}
