//! What AWS errors mean: their classes by code, and what only a code or a text distinguishes. Nothing else compares codes and texts.

use std::error::Error;
use std::fmt;

use aws_sdk_ec2::config::http::HttpResponse;
use aws_sdk_ec2::error::{ProvideErrorMetadata, SdkError};
use stowage_model::events;
use stowage_model::events::DeclaredEvent;

/// Part of the message about user data that is too long.
const USER_DATA_LIMIT: &str = "User data is limited to";

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
        // The spot price is above the on-demand price.
        | "SpotMaxPriceTooLow"
        // The zone does not support the instance type, as some Local Zones.
        | "InvalidFleetConfiguration"
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

/// Whether an offering could not be used because its subnet has no free address.
pub fn is_out_of_addresses(code: &str) -> bool {
    code == "InsufficientFreeAddressesInSubnet"
}

/// Whether an offering could not be used because the spread placement group has as many instances in its zone as it may have.
pub fn is_full_spread_group(message: &str) -> bool {
    message.contains("limit of instances in this spread placement group")
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The IAM action of the call, such as `ec2:CreateFleet`.
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

    /// The error of calls that together took too long.
    pub fn timed_out(action: &'static str) -> Self {
        Self { action, code: String::new(), message: "it took too long".into(), class: Class::NoResponse }
    }

    /// Whether a later retry may succeed.
    pub fn is_transient(&self) -> bool {
        matches!(self.class, Class::Throttled | Class::Server | Class::NoResponse)
    }

    /// Whether a CreateFleet call is invalid as a whole, by a code that means no capacity in the error of an offering.
    pub fn is_invalid_fleet(&self) -> bool {
        self.code == "InvalidFleetConfiguration"
    }

    /// Whether EC2 has no capacity for any offering of a call: `Unsupported` then means something else.
    pub fn lacks_all_capacity(&self) -> bool {
        self.class == Class::Unfulfillable && self.code != "Unsupported"
    }

    pub fn is_user_data_too_long(&self) -> bool {
        self.message.contains(USER_DATA_LIMIT)
    }

    /// Whether EC2 does not know the instance profile of a request, or not yet.
    pub fn is_unknown_instance_profile(&self) -> bool {
        self.code == "InvalidParameterValue" && self.message.contains("Invalid IAM Instance Profile name")
    }

    /// Whether IAM does not know the role of a request.
    pub fn is_missing_role(&self) -> bool {
        self.class == Class::NotFound && self.message.to_lowercase().contains("role")
    }

    /// Whether it is about the launch template that a request names.
    pub fn is_about_launch_template(&self) -> bool {
        self.class == Class::LaunchTemplateNotFound || self.message.contains("launch-template/")
    }

    /// Whether there were too many distinct requests for placement scores within 24 hours.
    pub fn is_daily_limit(&self) -> bool {
        self.code == "MaxConfigLimitExceeded"
    }

    /// The event about a launch that failed with it: see [`launch_event`].
    pub fn launch_event(&self) -> &'static DeclaredEvent {
        launch_event(&self.to_string())
    }
}

/// An error and its causes. The SDK's error chain formatter also prints the raw response.
fn with_causes(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

impl From<ApiError> for crate::CloudError {
    fn from(error: ApiError) -> Self {
        match error.class {
            Class::Throttled => Self::Throttled,
            Class::Unauthorized => Self::Refused(error.to_string()),
            _ => Self::Other(error.to_string()),
        }
    }
}

/// The event about a launch that failed with this error text. The reasons are those of Karpenter's Launched condition, matched in
/// Karpenter's order.
pub fn launch_event(text: &str) -> &'static DeclaredEvent {
    let has = |part: &str| text.contains(part);
    if has("AuthFailure.ServiceLinkedRoleCreationNotPermitted") {
        return events::SPOT_SLR_CREATION_FAILED;
    }
    if has("UnauthorizedOperation") || has("AccessDenied") || has("AuthFailure") {
        return if has("Not authorized for images") { events::AMI_AUTHORIZATION_FAILURE } else { events::UNAUTHORIZED };
    }
    if has("InvalidParameter") && has("belong to different networks") {
        return events::SECURITY_GROUP_SUBNET_VPC_MISMATCH;
    }
    let by_text = [
        ("iamInstanceProfile.name is invalid", events::INSTANCE_PROFILE_NAME_INVALID),
        ("InvalidLaunchTemplateId.NotFound", events::LAUNCH_TEMPLATE_NOT_FOUND),
        (USER_DATA_LIMIT, events::USER_DATA_SIZE_LIMIT_EXCEEDED),
        ("InvalidAMIID.Malformed", events::INVALID_AMI_ID),
        ("InvalidAMIID.NotFound", events::AMI_NOT_FOUND),
        ("RequestLimitExceeded", events::REQUEST_LIMIT_EXCEEDED),
        ("InternalError", events::INTERNAL_ERROR),
        ("not eligible for Free Tier", events::FREE_TIER_INELIGIBLE),
        ("MaxFleetCountExceeded", events::FLEET_QUOTA_EXCEEDED),
        ("PendingVerification", events::ACCOUNT_PENDING_VERIFICATION),
        ("MaxSpotInstanceCountExceeded", events::SPOT_QUOTA_EXCEEDED),
        ("VcpuLimitExceeded", events::VCPU_LIMIT_EXCEEDED),
        ("InsufficientFreeAddressesInSubnet", events::INSUFFICIENT_FREE_ADDRESSES),
    ];
    by_text.iter().find(|(part, _)| has(part)).map_or(events::LAUNCH_FAILED, |(_, event)| *event)
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
            assert_eq!(launch_event(text).reason(), expected, "{text}");
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
