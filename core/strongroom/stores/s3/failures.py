"""What can go wrong with one request, and what each failure means. Pure: no boto3, no clock.

`TryFailedError` is one failed try, told without boto3's types; `explain` makes of it the store error that a
caller sees, which says what was refused and what to do.
"""

from __future__ import annotations

from typing import Final

from strongroom.errors import (
    AccessDeniedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from strongroom.stores.s3.location import Location

__all__ = [
    "CREDENTIALS",
    "NO_CREDENTIALS",
    "TLS",
    "TOO_LATE",
    "UNREACHABLE",
    "UNREADABLE",
    "GaveUpError",
    "TryFailedError",
    "explain",
    "too_late",
]

CREDENTIALS: Final = "CredentialsNotRenewed"
NO_CREDENTIALS: Final = "NoCredentials"
UNREACHABLE: Final = "Unreachable"
TLS: Final = "Tls"
UNREADABLE: Final = "Unreadable"
TOO_LATE: Final = "TooLate"

# Codes are those of the S3 API reference ("Error responses"), of Ceph RGW's rgw_common.cc, and of MinIO.
_FULL: Final = frozenset(
    {
        "InsufficientStorage",
        "QuotaExceeded",
        "ServiceQuotaExceededException",
        "StorageFull",
        "XMinioAdminBucketQuotaExceeded",
        "XMinioStorageFull",
    }
)
_PASSING: Final = frozenset(
    {
        "BadDigest",
        "Busy",
        "ConcurrentModification",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestLimitExceeded",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
"""What another try with the same bytes may well get past; any 5xx and 429 besides."""
_DIGESTS: Final = frozenset({"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
_BARE: Final = ("", "404", "NoSuchKey")
"""404s that are about no object: without words, or on the bucket itself."""
_ARCHIVED: Final = "InvalidObjectState"
_ELSEWHERE: Final = frozenset(
    {"301", "307", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}
)
_EXPIRED: Final = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
)
_DENIED: Final[dict[str, str]] = {
    "InvalidAccessKeyId": "the server does not know this access key: see which credentials boto3 finds here "
    "(AWS_ACCESS_KEY_ID, AWS_PROFILE), and that the endpoint is the one that they are for",
    "InvalidClientTokenId": "the server does not know this access key: see which one boto3 finds here",
    "InvalidToken": "the session token is not one: see AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "this machine's clock is off: set it right (NTP) and try again",
    "SignatureDoesNotMatch": "the secret key does not go with the access key, or a proxy changes requests: "
    "see AWS_SECRET_ACCESS_KEY",
    "AccountProblem": "the account is suspended: ask whoever pays for it",
    "AllAccessDisabled": "all access to this bucket is disabled: ask its owner",
    "KMS.DisabledException": "the bucket's KMS key is disabled: ask whoever keeps it",
}

_ACTIONS: Final[dict[str, str]] = {
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "complete_multipart_upload": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "list_objects_v2": "s3:ListBucket",
    "list_parts": "s3:ListMultipartUploadParts",
    "put_object": "s3:PutObject",
    "upload_part": "s3:PutObject",
}
"""What a policy calls the right to each request."""


class TryFailedError(Exception):
    """One try at one request that failed.

    Args:
        message: what happened, for people; no credentials.
        status: HTTP's; 0: there was no answer.
        code: S3's, or one of this module's where there was no answer.
        was_sent: whether the server may have had the whole request.
        is_passing: whether another try may well succeed.
    """

    def __init__(
        self, message: str, *, status: int = 0, code: str = "", was_sent: bool = True, is_passing: bool = True
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self._was_sent = was_sent
        self._is_passing = is_passing

    @property
    def is_passing(self) -> bool:
        """Whether another try may well succeed."""
        if self.status == 0:
            return self._is_passing
        if self.code in _FULL or self.status in (501, 505, 507):
            return False
        return self.code in _PASSING or self.code == UNREADABLE or self.status == 429 or self.status >= 500

    @property
    def may_have_landed(self) -> bool:
        """Whether the server may have done what was asked all the same: who answers may not be who did it."""
        return self._was_sent if self.status == 0 else self.status >= 500 and self.is_passing

    @property
    def is_denied(self) -> bool:
        """Whether it was refused for who asked."""
        if self.code in _FULL or self.code == _ARCHIVED:
            return False
        return (
            self.status in (401, 403)
            or self.code in _DENIED
            or self.code in _EXPIRED
            or self.code == NO_CREDENTIALS
            or (self.code == CREDENTIALS and not self._is_passing)
        )

    @property
    def may_be_expired(self) -> bool:
        """Whether newer credentials may help; what HEAD is answered has no code that tells."""
        return self.code in _EXPIRED or (self.status == 400 and self.code == "400")

    @property
    def is_absent(self) -> bool:
        """Whether the object is not there, in S3's own words.

        Any other 404 (a gateway's page, an absent bucket, upload or access point, and what HEAD is answered,
        which has no body) tells nothing of the object.
        """
        return self.status == 404 and self.code == "NoSuchKey"

    @property
    def is_gone_upload(self) -> bool:
        return self.code == "NoSuchUpload"

    @property
    def exists(self) -> bool:
        """Whether a condition on what stands there was not met."""
        return self.status == 412 or self.code == "PreconditionFailed"


class GaveUpError(Exception):
    """A request failed for good.

    Args:
        failure: of the last try.
        tries: how many there were.
        was_lost: whether one before the last may have been done, and its answer lost.
    """

    def __init__(self, failure: TryFailedError, *, tries: int, was_lost: bool) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.tries = tries
        self.was_lost = was_lost

    @property
    def may_have_landed(self) -> bool:
        """Whether what was asked may have been done by any of the tries."""
        return self.was_lost or self.failure.may_have_landed


def too_late() -> TryFailedError:
    """A request that was not sent, since its time was over."""
    return TryFailedError("its time was over", code=TOO_LATE, was_sent=False, is_passing=False)


def explain(
    given_up: GaveUpError, operation: str, key: str | None, where: Location, endpoint: str
) -> StoreError:
    """The store error that a failed request comes to.

    Args:
        operation: boto3's name of the request.
        key: the object's; None: it was about the bucket.
        endpoint: where it went, for people.
    """
    failure = given_up.failure
    what = where.uri if key is None else where.name(key)
    action = _ACTIONS.get(operation, operation)
    told = f"{failure.code} {failure.status or ''}".strip()
    answered = f"{told}: {failure.message}" if told else failure.message
    if failure.code == "NoSuchBucket":
        return StoreError(
            f"{what}: there is no bucket {where.bucket} at {endpoint}; create it, or mend the root or the "
            "endpoint"
        )
    if failure.is_absent and key is not None:
        return ObjectNotFoundError(f"{what} does not exist")
    if failure.code == CREDENTIALS:
        unsent = f"{what}: there are no credentials for {action} now: {failure.message}"
        return StoreUnavailableError(unsent) if failure.is_passing else AccessDeniedError(unsent)
    if failure.code == _ARCHIVED:
        return StoreError(
            f"{what}: the object is in an archive class and has to be restored before it can be read "
            f"({answered}): aws s3api restore-object does, and takes hours; see which lifecycle rule moved it"
        )
    if failure.code in _FULL or failure.status == 507:
        return StoreFullError(
            f"{what}: the server has no room left for it ({answered}); free some, or raise the quota, and "
            "save again"
        )
    if failure.is_denied:
        return AccessDeniedError(
            f"{what}: {action} was refused ({answered}); {_advice_on_denial(failure, action)}"
        )
    if failure.exists:
        return ObjectExistsError(
            f"{what} exists; an object is never overwritten: write it under another name"
        )
    if failure.code in _ELSEWHERE or failure.status in (301, 307):
        return StoreError(
            f"{what}: the bucket is in another region, or behind another endpoint, than was asked "
            f"({answered}); set S3Options.region_name, AWS_DEFAULT_REGION, or region= in ~/.aws/config"
        )
    if failure.code == TLS:
        return StoreUnavailableError(
            f"{what}: {endpoint} could not be spoken to over TLS ({failure.message}); if its certificate is "
            "from an authority of your own, name that with S3Options.ca_bundle or AWS_CA_BUNDLE"
        )
    if failure.code == UNREACHABLE:
        return StoreUnavailableError(
            f"{what}: {endpoint} could not be reached ({_tries(given_up)}: {failure.message}); see the "
            "endpoint (S3Options.endpoint_url, AWS_ENDPOINT_URL_S3), the network and the proxy"
        )
    if failure.code == UNREADABLE:
        return StoreUnavailableError(
            f"{what}: what answers at {endpoint} does not speak S3 ({_tries(given_up)}: {failure.message}); "
            "see the endpoint and the proxy"
        )
    if failure.code == TOO_LATE:
        return StoreUnavailableError(
            f"{what}: {action} was not sent any more ({_tries(given_up)}: {failure.message}); save again, "
            "with a longer deadline if the store is slow"
        )
    if failure.status == 404 and failure.code in _BARE:
        return StoreUnavailableError(
            f"{what}: {endpoint} answered {action} with a 404 that tells nothing of the object; see the "
            "endpoint and the proxy"
        )
    if failure.code in _DIGESTS:
        return StoreUnavailableError(
            f"{what}: the server got other bytes than were sent ({_tries(given_up)}: {answered}); see this "
            "machine's memory and the network"
        )
    if failure.status == 501 or failure.code == "NotImplemented":
        return StoreError(
            f"{what}: the server does not do what {action} asked ({answered}); Strongroom needs conditional "
            "writes (If-None-Match) on PutObject and CompleteMultipartUpload"
        )
    if failure.is_passing:
        return StoreUnavailableError(
            f"{what}: {action} failed ({_tries(given_up)}: {answered}); try again later"
        )
    return StoreError(f"{what}: the server refused {action} ({answered})")


def _advice_on_denial(failure: TryFailedError, action: str) -> str:
    if failure.code == NO_CREDENTIALS:
        return (
            "boto3 finds no credentials here: set AWS_PROFILE or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give this machine a role"
        )
    if failure.code in _EXPIRED:
        return "the credentials have expired: renew them (aws sso login, or whatever hands out tokens here)"
    if failure.code in _DENIED:
        return _DENIED[failure.code]
    return f"allow this identity {action} on it, or use credentials that may"


def _tries(given_up: GaveUpError) -> str:
    return "1 try" if given_up.tries == 1 else f"{given_up.tries} tries"
