//! What an AWS error means, from its code.

use std::error::Error;
use std::fmt;

use aws_sdk_ec2::config::http::HttpResponse;
use aws_sdk_ec2::error::{ProvideErrorMetadata, SdkError};

/// What can be done about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// What was named isn't there.
    NotFound,
    /// A launch template that was named isn't there: deleted behind our back.
    LaunchTemplateGone,
    /// It is there already.
    AlreadyExists,
    /// EC2 has no capacity of that kind, or the account may have no more of it.
    Unfulfillable,
    /// The account has no role for spot instances and may not make it.
    NoSpotRole,
    /// A dry run says that the call would have worked.
    DryRunOk,
    /// Not permitted.
    Unauthorized,
    /// Too many calls.
    Throttled,
    /// The token of this call was used with other parameters.
    TokenReused,
    /// The service failed.
    Server,
    /// No answer: whether the call had an effect is not known.
    Unanswered,
    /// Anything else: the request is wrong.
    Refused,
}

/// The class of an error code.
pub fn class_of(code: &str) -> Class {
    match code {
        "InsufficientInstanceCapacity"
        | "MaxSpotInstanceCountExceeded"
        | "VcpuLimitExceeded"
        | "UnfulfillableCapacity"
        | "Unsupported"
        | "InsufficientFreeAddressesInSubnet"
        | "MaxFleetCountExceeded"
        | "ReservationCapacityExceeded" => Class::Unfulfillable,
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted" => Class::NoSpotRole,
        "InvalidLaunchTemplateName.NotFoundException" | "InvalidLaunchTemplateId.NotFound" => Class::LaunchTemplateGone,
        "InvalidCapacityReservationId.NotFound"
        | "InvalidCapacityReservationId.Malformed"
        | "InvalidInstanceID.NotFound"
        | "InvalidInstanceID.Malformed"
        | "QueueDoesNotExist"
        | "AWS.SimpleQueueService.NonExistentQueue"
        | "NoSuchEntity"
        | "NoSuchEntityException"
        | "NoSuchResourceException"
        | "ParameterNotFound"
        | "InvalidPlacementGroup.Unknown"
        | "ResourceNotFoundException" => Class::NotFound,
        "EntityAlreadyExists" | "EntityAlreadyExistsException" | "InvalidLaunchTemplateName.AlreadyExistsException" => {
            Class::AlreadyExists
        }
        "DryRunOperation" => Class::DryRunOk,
        "UnauthorizedOperation" | "AccessDenied" | "AccessDeniedException" => Class::Unauthorized,
        "IdempotentParameterMismatch" => Class::TokenReused,
        "RequestLimitExceeded"
        | "Throttling"
        | "ThrottlingException"
        | "EC2ThrottledException"
        | "RequestThrottled"
        | "TooManyRequestsException"
        | "BandwidthLimitExceeded"
        | "ResourceCountLimitExceeded" => Class::Throttled,
        "InternalError" | "InternalFailure" | "ServerInternal" | "ServiceUnavailable" | "Unavailable" => Class::Server,
        _ => Class::Refused,
    }
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// What was called, as `ec2:CreateFleet`.
    pub action: &'static str,
    /// The service's code; empty where there was no answer.
    pub code: String,
    /// The service's message.
    pub message: String,
    /// What it means.
    pub class: Class,
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if self.code.is_empty() { "" } else { ": " };
        write!(f, "{}: {}{separator}{}", self.action, self.code, self.message)
    }
}

impl Error for ApiError {}

impl ApiError {
    /// Reads an error of the SDK. Made for `map_err`.
    pub fn of<E>(action: &'static str) -> impl Fn(SdkError<E, HttpResponse>) -> Self
    where
        E: ProvideErrorMetadata + Error + 'static,
    {
        move |error| {
            let status = error.raw_response().map(|raw| raw.status().as_u16());
            if let Some(service) = error.as_service_error()
                && let Some(code) = service.code()
            {
                let class = match class_of(code) {
                    Class::Refused if status.is_some_and(|status| status >= 500) => Class::Server,
                    class => class,
                };
                let message = service.message().unwrap_or_default().to_owned();
                return Self { action, code: code.to_owned(), message, class };
            }
            let class = match status {
                Some(status) if status >= 500 => Class::Server,
                Some(429) => Class::Throttled,
                Some(403) => Class::Unauthorized,
                Some(status) if status >= 300 => Class::Refused,
                // An answer that broke off or can't be read: the call may have had its effect.
                Some(_) | None => Class::Unanswered,
            };
            Self { action, code: String::new(), message: with_causes(&error), class }
        }
    }

    /// A call that was not made, where an answer is wanted.
    pub fn unasked(action: &'static str) -> Self {
        Self { action, code: String::new(), message: "not asked".into(), class: Class::Unanswered }
    }

    /// Whether trying again later may help by itself.
    pub fn is_passing(&self) -> bool {
        matches!(self.class, Class::Throttled | Class::Server | Class::Unanswered)
    }

    /// The reason for people and metrics: see [`reason`].
    pub fn reason(&self) -> &'static str {
        reason(&self.to_string())
    }
}

/// An error and its causes. The SDK's own display adds the error as it is in memory, answers included.
fn with_causes(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

impl From<ApiError> for crate::cloud::CloudError {
    fn from(error: ApiError) -> Self {
        match error.class {
            Class::Throttled => Self::Throttled,
            Class::Unauthorized => Self::Refused(error.to_string()),
            _ => Self::Other(error.to_string()),
        }
    }
}

/// Why a launch failed, in a word: the reasons that Karpenter writes into the Launched condition, tested in its order on the
/// error's text.
pub fn reason(text: &str) -> &'static str {
    let has = |part: &str| text.contains(part);
    if has("AuthFailure.ServiceLinkedRoleCreationNotPermitted") {
        return "SpotSLRCreationFailed";
    }
    if has("UnauthorizedOperation") || has("AccessDenied") || has("AuthFailure") {
        return if has("Not authorized for images") { "AMIAuthorizationFailure" } else { "Unauthorized" };
    }
    if has("InvalidParameter") && has("belong to different networks") {
        return "SecurityGroupSubnetVPCMismatch";
    }
    let by_text = [
        ("iamInstanceProfile.name is invalid", "InstanceProfileNameInvalid"),
        ("InvalidLaunchTemplateId.NotFound", "LaunchTemplateNotFound"),
        ("User data is limited to", "UserDataSizeLimitExceeded"),
        ("InvalidAMIID.Malformed", "InvalidAMIID"),
        ("InvalidAMIID.NotFound", "AMINotFound"),
        ("RequestLimitExceeded", "RequestLimitExceeded"),
        ("InternalError", "InternalError"),
        ("not eligible for Free Tier", "FreeTierIneligible"),
        ("MaxFleetCountExceeded", "FleetQuotaExceeded"),
        ("PendingVerification", "AccountPendingVerification"),
        ("MaxSpotInstanceCountExceeded", "SpotQuotaExceeded"),
        ("VcpuLimitExceeded", "VCPULimitExceeded"),
        ("InsufficientFreeAddressesInSubnet", "InsufficientFreeAddressesInSubnet"),
    ];
    by_text.iter().find(|(part, _)| has(part)).map_or("LaunchFailed", |(_, reason)| reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cloud::ec2::aws::client::wire;

    #[test]
    fn codes_are_classed() {
        for (code, class) in [
            ("InsufficientInstanceCapacity", Class::Unfulfillable),
            ("MaxFleetCountExceeded", Class::Unfulfillable),
            ("Unsupported", Class::Unfulfillable),
            ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", Class::NoSpotRole),
            ("InvalidLaunchTemplateName.NotFoundException", Class::LaunchTemplateGone),
            ("InvalidInstanceID.NotFound", Class::NotFound),
            ("NoSuchEntity", Class::NotFound),
            ("EntityAlreadyExists", Class::AlreadyExists),
            ("DryRunOperation", Class::DryRunOk),
            ("UnauthorizedOperation", Class::Unauthorized),
            ("RequestLimitExceeded", Class::Throttled),
            ("IdempotentParameterMismatch", Class::TokenReused),
            ("InternalError", Class::Server),
            ("InvalidParameterValue", Class::Refused),
        ] {
            assert_eq!(class_of(code), class, "{code}");
        }
    }

    #[test]
    fn reasons_are_karpenters_and_tested_in_its_order() {
        for (text, expected) in [
            ("AuthFailure.ServiceLinkedRoleCreationNotPermitted: no", "SpotSLRCreationFailed"),
            ("UnauthorizedOperation: denied", "Unauthorized"),
            ("AuthFailure: Not authorized for images: [ami-1]", "AMIAuthorizationFailure"),
            ("InvalidParameter: sg and subnet belong to different networks", "SecurityGroupSubnetVPCMismatch"),
            ("InvalidParameterValue: iamInstanceProfile.name is invalid", "InstanceProfileNameInvalid"),
            ("InvalidUserData.Malformed: User data is limited to 16384 bytes", "UserDataSizeLimitExceeded"),
            ("InvalidAMIID.NotFound: ami-1", "AMINotFound"),
            ("VcpuLimitExceeded: you have", "VCPULimitExceeded"),
            ("Something: else", "LaunchFailed"),
        ] {
            assert_eq!(reason(text), expected, "{text}");
        }
    }

    #[tokio::test]
    async fn errors_on_the_wire_are_read() {
        let ask = async |answer: Option<(u16, String)>| {
            let (clients, _) = wire::clients(Box::new(move |_| answer.clone()));
            let error = clients.ec2.describe_subnets().send().await.unwrap_err();
            ApiError::of("ec2:DescribeSubnets")(error)
        };
        let error = ask(wire::refusal("UnauthorizedOperation", "You are not")).await;
        assert_eq!(error.class, Class::Unauthorized);
        assert_eq!(error.to_string(), "ec2:DescribeSubnets: UnauthorizedOperation: You are not");
        assert_eq!(ask(wire::refusal("RequestLimitExceeded", "slow")).await.class, Class::Throttled);
        assert_eq!(ask(Some((503, "<html>".into()))).await.class, Class::Server);
        let error = ask(None).await;
        assert_eq!((error.class, error.is_passing()), (Class::Unanswered, true));
        assert_eq!(error.message, "dispatch failure: timeout: no answer", "the causes, and no innards of the SDK");
    }
}
