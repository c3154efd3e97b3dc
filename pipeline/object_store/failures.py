"""What a store answers, as errors in four parts.

The codes are those of Amazon's list and of stores that imitate it:
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html#ErrorCodeList
"""

from __future__ import annotations

import re
from typing import Any

from shims.errors import SinkError, SpecshimError, UsageError


class StoreError(SinkError):
    """The store cannot be reached, has no space, or gave something else than it was given. What is finished is kept."""


_DENIED = ("AccessDenied", "403", "Forbidden", "AllAccessDisabled", "AccountProblem")
_WHO = (
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired", "401",
    "RequestTimeTooSkewed", "AuthorizationHeaderMalformed", "RequestExpired",
)  # fmt: skip
_FULL = (
    "QuotaExceeded", "InsufficientStorage", "507", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
    "ServiceQuotaExceededException", "OverQuota",
)  # fmt: skip
_ELSEWHERE = ("PermanentRedirect", "301", "IllegalLocationConstraintException", "307")
ABSENT = ("NoSuchKey", "404", "NotFound")
NOT_MET = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")
NOT_DONE = ("NotImplemented", "501")
"""The store has no such operation, or no conditions."""
_AGAIN = "what is finished is kept: the same command goes on from there"


def code_of(error: Exception) -> str:
    """The store's code of a refusal; "" where the error is no answer of a store."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    return str(response.get("Error", {}).get("Code") or status)


def explained(error: Exception, where: str) -> SpecshimError:
    """The error in place of one of boto3's.

    Args:
        where: the object's address.

    Returns:
        A UsageError for what stays wrong until somebody changes it, else a StoreError. Neither holds a secret: the
        library's messages name at most an access key's id, and are used only where no answer came.
    """
    code = code_of(error)
    if code == "NoSuchBucket":
        return UsageError(where, "a bucket that exists", "NoSuchBucket", "check the name, or make the bucket")
    if code in _DENIED:
        return UsageError(
            where,
            "permission to list, read, write and delete objects there",
            f"the store answered {code}",
            "give this identity the permission, or use another one (AWS_PROFILE, AWS_ACCESS_KEY_ID, …)",
        )
    if code in _WHO:
        return UsageError(
            where,
            "an identity that the store knows",
            f"the store answered {code}",
            "check the credentials, the clock, AWS_REGION and AWS_ENDPOINT_URL",
        )
    if code in _ELSEWHERE:
        return UsageError(where, "the bucket's own region", f"the store answered {code}", "set AWS_REGION to it")
    if code in _FULL:
        return StoreError(where, "space in the store", f"the store answered {code}", f"make room there; {_AGAIN}")
    if code:
        return StoreError(where, "the store to do what it was asked", f"it answered {code}", _AGAIN)
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
                "TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"):  # fmt: skip
        return UsageError(
            where,
            "credentials, as other programs for S3 take them: AWS_PROFILE, AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or the machine's own role",
            f"{name}: none that can be used",
            "set them in the environment or in ~/.aws",
        )
    if name in ("ParamValidationError", "InvalidRegionError", "InvalidConfigError", "ConfigParseError", "ValueError"):
        return UsageError(
            where, "settings that an S3 client can use", f"{name}: {_text(error)}", "check the AWS_… variables"
        )
    return StoreError(
        where,
        "the store to answer",
        f"{name}: {_text(error)}",
        f"check the network and AWS_ENDPOINT_URL; {_AGAIN}",
    )


def _text(error: Exception) -> str:
    """The library's message; an endpoint's address may hold a password."""
    return re.sub(r"//[^/@\s]*@", "//…@", str(error).strip()) or "no message"
