"""CloudTrail's events of S3 objects and of KMS keys. Pure.

The members are those of the CloudTrail user guide ("CloudTrail record contents", "userIdentity element"), of
the S3 user guide (data events) and of the KMS developer guide (log entries of each operation). Members that
are not needed are passed over, and none is ever shown that may hold a key: requests for KMS are read for
the key's name and the encryption context alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Final

from strongroom.errors import ConfigError, FormatError
from strongroom.layout import CheckpointName
from strongroom_security.auditlog.reconciling.accesses import (
    Access,
    AccessKind,
    Damage,
    Served,
    Subject,
    is_access_point,
    unquoted,
)

__all__ = ["accesses_of", "records_of"]

_S3: Final = "s3.amazonaws.com"
_KMS: Final = "kms.amazonaws.com"

_OBJECT_CALLS: Final = {
    "GetObject": AccessKind.READ,
    "GetObjectTorrent": AccessKind.READ,
    "SelectObjectContent": AccessKind.READ,
    "RestoreObject": AccessKind.READ,
    "HeadObject": AccessKind.LOOK,
    "GetObjectAcl": AccessKind.LOOK,
    "GetObjectAttributes": AccessKind.LOOK,
    "GetObjectLegalHold": AccessKind.LOOK,
    "GetObjectRetention": AccessKind.LOOK,
    "GetObjectTagging": AccessKind.LOOK,
    "ListParts": AccessKind.LOOK,
    "ListMultipartUploads": AccessKind.LOOK,
    "ListObjects": AccessKind.LOOK,
    "ListObjectsV2": AccessKind.LOOK,
    "ListObjectVersions": AccessKind.LOOK,
    "DeleteObject": AccessKind.DELETE,
}
"""What is not here and names an object counts as a read if it begins with ``Get``, and else as a write."""

_KEY_CALLS: Final = {
    "Decrypt": AccessKind.UNWRAP,
    "DeriveSharedSecret": AccessKind.UNWRAP,
    "Encrypt": AccessKind.WRAP,
    "GenerateDataKey": AccessKind.WRAP,
    "GenerateDataKeyPair": AccessKind.WRAP,
    "GenerateDataKeyPairWithoutPlaintext": AccessKind.WRAP,
    "GenerateDataKeyWithoutPlaintext": AccessKind.WRAP,
    "ReEncrypt": AccessKind.REWRAP,
    "Sign": AccessKind.SIGN,
}

_REFUSALS: Final = ("AccessDenied", "NotAuthorized", "UnauthorizedOperation", "Forbidden")
_NETWORK: Final = "NetworkActivity"
"""What passed a VPC endpoint: each is told of as a data event as well, with its object."""
_ANONYMOUS: Final = "ANONYMOUS_PRINCIPAL"
_OBJECT_ARN: Final = re.compile(r"arn:[a-z-]+:s3:::(?P<bucket>[^/]+)/(?P<key>.+)", re.DOTALL)
_BUCKET_ARN: Final = re.compile(r"arn:[a-z-]+:s3:::(?P<bucket>[^/]+)")
_POINT_OBJECT: Final = re.compile(r"(?P<point>arn:[^/]*:accesspoint/[^/]+)/object/(?P<key>.+)", re.DOTALL)
_OUTPOST_OBJECT: Final = re.compile(r"(?P<point>arn:[^/]*:outpost/.+?)/object/(?P<key>.+)", re.DOTALL)
_DIGITS: Final = re.compile(r"[0-9]{1,12}")


def records_of(text: str, source: str) -> Iterator[tuple[str, dict[str, Any]] | Damage]:
    """The events in a file, each with its place, in any of the forms in which CloudTrail's come.

    Those are a delivered log file, what ``lookup-events`` prints, an event as EventBridge hands it on, a
    bare one, a list of them; or one of these a line.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        yield from _of_lines(text, source)
        return
    yield from _within(document, source)


def _of_lines(text: str, source: str) -> Iterator[tuple[str, dict[str, Any]] | Damage]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{source}:{number}"
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            yield Damage(source=place, reason="it is not JSON")
            continue
        yield from _within(document, place)


def _within(document: Any, place: str) -> Iterator[tuple[str, dict[str, Any]] | Damage]:
    if isinstance(document, list):
        for number, each in enumerate(document, start=1):
            yield from _one(each, f"{place}#{number}")
    elif isinstance(document, dict) and isinstance(document.get("Records"), list):
        yield from _within(document["Records"], place)
    elif isinstance(document, dict) and isinstance(document.get("Events"), list):
        yield from _within(document["Events"], place)
    elif isinstance(document, dict) and "digestStartTime" in document:
        return  # a digest of log files, which CloudTrail puts beside them
    else:
        yield from _one(document, place)


def _one(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]] | Damage]:
    if isinstance(value, dict) and isinstance(value.get("CloudTrailEvent"), str):
        # As lookup-events prints it: the event is text, and what it is about stands beside it.
        resources = value.get("Resources")
        try:
            value = json.loads(value["CloudTrailEvent"])
        except (ValueError, RecursionError):
            yield Damage(source=place, reason="its CloudTrailEvent is not JSON")
            return
        if isinstance(value, dict) and isinstance(resources, list):
            value = {**value, "_looked_up": resources}
    elif isinstance(value, dict) and isinstance(value.get("detail"), dict):
        value = value["detail"]
    if not isinstance(value, dict):
        yield Damage(source=place, reason=f"it is {type(value).__name__}, and an event is an object")
        return
    yield place, value


def accesses_of(event: Mapping[str, Any], source: str) -> list[Access]:
    """What an event tells: nothing, one request, or of a copy two.

    Args:
        source: its file, and its place there.

    Raises:
        FormatError: it is no event, or does not say what it is about.
    """
    name, service = _text(event, "eventName", source), _text(event, "eventSource", source)
    if service == _KMS:
        kind = _KEY_CALLS.get(name)
        return [] if kind is None else [_key_call(event, name, kind, source)]
    if service == _S3:
        return _object_calls(event, name, source)
    return []


def _object_calls(event: Mapping[str, Any], name: str, source: str) -> list[Access]:
    asked = event.get("requestParameters")
    asked = asked if isinstance(asked, dict) else {}
    bucket, key = _object(event, asked)
    kind = _OBJECT_CALLS.get(name)
    if kind is None:
        kind = AccessKind.READ if name.startswith("Get") else AccessKind.WRITE
        if key is None:
            # Of a bucket as a whole; "DeleteObjects" tells its objects one by one as well.
            return []
    elif key is None and kind is not AccessKind.LOOK:
        if event.get("errorCode") or event.get("eventCategory") == _NETWORK:
            return []  # it came to nothing before that was known; or its data event tells
        raise FormatError(f"{source} tells of {name} and not of which object")
    if key is None:
        key = _value(asked.get("prefix"))
    extra = event.get("additionalEventData")
    sent = extra.get("bytesTransferredOut") if isinstance(extra, dict) else None
    base = _base(event, name, source)
    calls = []
    if name in ("CopyObject", "UploadPartCopy"):
        origin, origin_key = _copied(_value(asked.get("x-amz-copy-source")))
        if origin and origin_key:
            calls.append(Access(**base, kind=AccessKind.READ, bucket=origin, key=origin_key))
        elif base["served"] is Served.DONE:
            raise FormatError(f"{source} tells of {name} and not of which object was copied")
    elif name == "RenameObject":
        moved = unquoted(_value(asked.get("x-amz-rename-source"))).lstrip("/")
        if moved:
            calls.append(Access(**base, kind=AccessKind.DELETE, bucket=bucket, key=moved))
    sent_bytes = int(sent) if isinstance(sent, int | float) and 0 <= sent < 2**63 else None
    return [*calls, Access(**base, kind=kind, bucket=bucket, key=key, sent_bytes=sent_bytes)]


def _object(event: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The object's bucket and key; a request may name an access point where the resources name a bucket."""
    bucket, key = _value(asked.get("bucketName")), _value(asked.get("key"))
    listed = event.get("resources")
    arns = [_value(each.get("ARN")) for each in listed or () if isinstance(each, dict)]
    objects = [(found["bucket"], found["key"]) for found in map(_OBJECT_ARN.fullmatch, arns) if found]
    if bucket and key:
        # Of a copy the resources name what was copied as well.
        alike = [each for each in objects if each[1] == key]
        if alike:
            return (bucket, key) if (bucket, key) in alike else alike[0]
        buckets = [found["bucket"] for found in map(_BUCKET_ARN.fullmatch, arns) if found]
        return (buckets[0], key) if buckets and is_access_point(bucket) else (bucket, key)
    if objects:
        return objects[0]
    there = {
        _value(each.get("ResourceType")): _value(each.get("ResourceName"))
        for each in event.get("_looked_up") or ()
        if isinstance(each, dict)
    }
    bucket = bucket or there.get("AWS::S3::Bucket", "")
    key = key or there.get("AWS::S3::Object", "")
    return bucket or None, key or None


def _copied(told: str) -> tuple[str, str]:
    """The bucket, or the access point, and the key that a copy names as its source; empty: it names none.

    Clients encode the key, and some of them the slash before it too.
    """
    text = unquoted(told.partition("?versionId=")[0]).lstrip("/")
    point = _POINT_OBJECT.fullmatch(text) or _OUTPOST_OBJECT.fullmatch(text)
    if point is not None:
        return point["point"], point["key"]
    bucket, _, key = text.partition("/")
    return bucket, key


def _key_call(event: Mapping[str, Any], name: str, kind: AccessKind, source: str) -> Access:
    asked = event.get("requestParameters")
    # A fake of KMS may tell the request as it came, whose members begin with a capital.
    told = {each[:1].lower() + each[1:]: asked[each] for each in asked} if isinstance(asked, dict) else {}
    contexts = [
        told.get(each)
        for each in ("encryptionContext", "sourceEncryptionContext", "destinationEncryptionContext")
    ]
    subject = next((found for found in map(_subject, contexts) if found is not None), None)
    key = _value(told.get("keyId")) or _value(told.get("sourceKeyId")) or None
    for each in event.get("resources") or ():
        if isinstance(each, dict) and each.get("type") == "AWS::KMS::Key" and _value(each.get("ARN")):
            key = _value(each.get("ARN"))
            break
    return Access(**_base(event, name, source), kind=kind, kms_key=key, subject=subject)


def _subject(context: Any) -> Subject | None:
    if not isinstance(context, dict) or context.get("strongroom") != "v1":
        return None
    run, attempt = _value(context.get("run")), _value(context.get("attempt"))
    launch, step = _value(context.get("launch")), _value(context.get("step"))
    folder = None
    if _DIGITS.fullmatch(launch) and _DIGITS.fullmatch(step):
        try:
            folder = CheckpointName(launch=int(launch), step=int(step), attempt=attempt).folder
        except ConfigError:
            folder = None
    return Subject(run=run[:128], folder=folder)


def _base(event: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    error = _value(event.get("errorCode"))
    served = Served.DONE
    if error:
        served = Served.REFUSED if any(each in error for each in _REFUSALS) else Served.FAILED
    return {
        "source": source,
        "time": _time(_text(event, "eventTime", source), source),
        "operation": name[:60],
        "served": served,
        "identity": _identity(event.get("userIdentity"), source),
        "address": _value(event.get("sourceIPAddress")) or None,
        "agent": _value(event.get("userAgent")) or None,
        "request": _value(event.get("requestID")) or None,
    }


def _identity(told: Any, source: str) -> str | None:
    """Who asked, as one text: an ARN where there is one."""
    if not isinstance(told, dict):
        raise FormatError(f"{source} has no userIdentity")
    arn, account = _value(told.get("arn")), _value(told.get("accountId"))
    if arn:
        return arn
    if account == _ANONYMOUS:
        return None
    service = _value(told.get("invokedBy"))
    if _value(told.get("type")) == "AWSService" and service:
        return f"service:{service}"
    issuer = told.get("sessionContext")
    issuer = issuer.get("sessionIssuer") if isinstance(issuer, dict) else None
    if isinstance(issuer, dict) and _value(issuer.get("arn")):
        return _value(issuer.get("arn"))
    # Another account's, of which this one is told no more.
    who = [
        each for each in (account, _value(told.get("principalId")) or _value(told.get("userName"))) if each
    ]
    return f"account:{'/'.join(who)}" if who else None


def _time(text: str, source: str) -> int:
    try:
        moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        raise FormatError(f"{source} tells no time: expected as 2026-11-30T09:00:00Z") from None
    return round(moment.timestamp() * 1000)


def _text(event: Mapping[str, Any], member: str, source: str) -> str:
    found = event.get(member)
    if not isinstance(found, str) or not found:
        raise FormatError(f"{source} is no event of CloudTrail: it has no {member}")
    return found


def _value(found: Any) -> str:
    return found if isinstance(found, str) else ""
