//! User data of an instance in the format of its AMI family, merged with the class's `spec.userData`. Pure: text in, text out; the
//! caller encodes it as base64 and checks its length.

pub mod al2;
pub mod bottlerocket;
pub mod flags;
pub mod input;
pub mod mime;
pub mod nodeadm;
pub mod windows;

pub use crate::ec2::bootstrap::user_data::bottlerocket::{ignored_settings, image_version};
pub use crate::ec2::bootstrap::user_data::input::{UserDataError, UserDataInput};

use crate::ami_family::AmiFamily;
use crate::ec2::bootstrap::user_data::input::BootParameters;

/// The user data of an instance of the family, before base64. Equal inputs give equal texts.
///
/// # Errors
/// [`UserDataError`].
pub fn user_data(family: AmiFamily, input: &UserDataInput<'_>) -> Result<String, UserDataError> {
    if family == AmiFamily::Custom {
        return Ok(input.custom.unwrap_or_default().to_owned());
    }
    let boot = BootParameters::of(family, input)?;
    match family {
        AmiFamily::Al2 => al2::user_data(&boot),
        AmiFamily::Al2023 => nodeadm::user_data(&boot),
        AmiFamily::Bottlerocket => bottlerocket::user_data(&boot),
        AmiFamily::Windows2019 | AmiFamily::Windows2022 | AmiFamily::Windows2025 | AmiFamily::Custom => {
            Ok(windows::user_data(&boot))
        }
    }
}

#[cfg(test)]
mod tests;
