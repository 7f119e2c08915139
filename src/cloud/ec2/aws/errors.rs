//! Classification of AWS errors by their code.

use std::error::Error;
use std::fmt;

use aws_sdk_ec2::config::http::HttpResponse;
use aws_sdk_ec2::error::{ProvideErrorMetadata, SdkError};

/// The meaning of an error to a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A resource of the request does not exist.
    NotFound,
    /// The launch template of the request does not exist: deleted externally.
    LaunchTemplateNotFound,
    AlreadyExists,
    /// EC2 has no such capacity, or a quota of the account is exhausted.
    Unfulfillable,
    /// The account has no service-linked role for spot instances, and the caller may not create it.
    NoSpotRole,
    /// A dry run succeeded.
    DryRunOk,
    Unauthorized,
    Throttled,
    /// The client token was used before with other parameters.
    TokenReused,
    /// The service failed.
    Server,
    /// No response: the effect of the call is unknown.
    NoResponse,
    /// Any other error: the request is invalid.
    Rejected,
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
        "InvalidLaunchTemplateName.NotFoundException" | "InvalidLaunchTemplateId.NotFound" => {
            Class::LaunchTemplateNotFound
        }
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
        _ => Class::Rejected,
    }
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The IAM action of the call, as `ec2:CreateFleet`.
    pub action: &'static str,
    /// The error code; empty without one, as without a response.
    pub code: String,
    pub message: String,
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
    /// Converts an SDK error; for `map_err`.
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
                    Class::Rejected if status.is_some_and(|status| status >= 500) => Class::Server,
                    class => class,
                };
                let message = service.message().unwrap_or_default().to_owned();
                return Self { action, code: code.to_owned(), message, class };
            }
            let class = match status {
                Some(status) if status >= 500 => Class::Server,
                Some(429) => Class::Throttled,
                Some(403) => Class::Unauthorized,
                Some(status) if status >= 300 => Class::Rejected,
                // A truncated or unreadable response: the call may have succeeded.
                Some(_) | None => Class::NoResponse,
            };
            Self { action, code: String::new(), message: with_causes(&error), class }
        }
    }

    /// The error of a call that was not made.
    pub fn not_called(action: &'static str) -> Self {
        Self { action, code: String::new(), message: "the call was not made".into(), class: Class::NoResponse }
    }

    /// Whether a later retry may succeed.
    pub fn is_transient(&self) -> bool {
        matches!(self.class, Class::Throttled | Class::Server | Class::NoResponse)
    }

    /// The reason in conditions and metrics: see [`reason`].
    pub fn reason(&self) -> &'static str {
        reason(&self.to_string())
    }
}

/// An error and its causes. The SDK's error chain formatter also prints the raw response.
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

/// The reason of a failed launch: Karpenter's reasons in the Launched condition, matched on the error text in Karpenter's order.
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
    use crate::test_support::fake_aws;

    #[test]
    fn codes_are_classified() {
        for (code, class) in [
            ("InsufficientInstanceCapacity", Class::Unfulfillable),
            ("MaxFleetCountExceeded", Class::Unfulfillable),
            ("Unsupported", Class::Unfulfillable),
            ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", Class::NoSpotRole),
            ("InvalidLaunchTemplateName.NotFoundException", Class::LaunchTemplateNotFound),
            ("InvalidInstanceID.NotFound", Class::NotFound),
            ("NoSuchEntity", Class::NotFound),
            ("EntityAlreadyExists", Class::AlreadyExists),
            ("DryRunOperation", Class::DryRunOk),
            ("UnauthorizedOperation", Class::Unauthorized),
            ("RequestLimitExceeded", Class::Throttled),
            ("IdempotentParameterMismatch", Class::TokenReused),
            ("InternalError", Class::Server),
            ("InvalidParameterValue", Class::Rejected),
        ] {
            assert_eq!(class_of(code), class, "{code}");
        }
    }

    #[test]
    fn reasons_are_karpenters_and_matched_in_its_order() {
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
    async fn sdk_errors_are_classified() {
        let call = async |response: Option<(u16, String)>| {
            let (clients, _) = fake_aws::clients(Box::new(move |_| response.clone()));
            let error = clients.ec2.describe_subnets().send().await.unwrap_err();
            ApiError::of("ec2:DescribeSubnets")(error)
        };
        let error = call(fake_aws::error("UnauthorizedOperation", "You are not")).await;
        assert_eq!(error.class, Class::Unauthorized);
        assert_eq!(error.to_string(), "ec2:DescribeSubnets: UnauthorizedOperation: You are not");
        assert_eq!(call(fake_aws::error("RequestLimitExceeded", "slow")).await.class, Class::Throttled);
        assert_eq!(call(Some((503, "<html>".into()))).await.class, Class::Server);
        let error = call(None).await;
        assert_eq!((error.class, error.is_transient()), (Class::NoResponse, true));
        assert_eq!(error.message, "dispatch failure: timeout: no answer", "the causes without the raw response");
    }
}
