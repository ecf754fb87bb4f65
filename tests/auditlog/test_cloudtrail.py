"""CloudTrail's events of objects and keys: in each form in which they come, and what else is in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import FormatError
from strongroom.layout import CheckpointName
from strongroom_security.auditlog.reconciling.accesses import Access, AccessKind, Damage, Served
from strongroom_security.auditlog.reconciling.cloudtrail import accesses_of, records_of
from strongroom_security.fields import Context

FIXTURES = Path(__file__).parent / "fixtures"
NAME = CheckpointName(step=1200, launch=3, attempt="0123456789abcdef")
CONTEXT = Context.of("run-a", NAME).pairs()
ROLE = "arn:aws:sts::111122223333:assumed-role/trainer-writer/job-7"
POINT = "arn:aws:s3:eu-central-1:111122223333:accesspoint/loot"


def event_of(name: str = "GetObject", **members: Any) -> dict[str, Any]:
    """An event of an object, by the members that the S3 user guide shows of a data event."""
    return {
        "eventVersion": "1.09",
        "userIdentity": {"type": "AssumedRole", "arn": ROLE, "accountId": "111122223333"},
        "eventTime": "2026-11-30T09:00:38Z",
        "eventSource": "s3.amazonaws.com",
        "eventName": name,
        "awsRegion": "eu-central-1",
        "sourceIPAddress": "192.0.2.3",
        "userAgent": "[Boto3/1.44 strongroom/0.1]",
        "requestParameters": {"bucketName": "bucket", "key": "runs/run-a/run.json"},
        "responseElements": None,
        "additionalEventData": {"SignatureVersion": "SigV4", "bytesTransferredOut": 113.0},
        "requestID": "3E57427F3EXAMPLE",
        "eventID": "cdc4b7ed-e171-4cef-975a-ad829d4123e8",
        "readOnly": True,
        "eventCategory": "Data",
    } | members


def key_event_of(name: str = "Decrypt", **members: Any) -> dict[str, Any]:
    """An event of a key, by the members that the KMS developer guide shows."""
    return event_of(
        name,
        eventSource="kms.amazonaws.com",
        requestParameters={"encryptionAlgorithm": "SYMMETRIC_DEFAULT", "encryptionContext": dict(CONTEXT)},
        resources=[{"type": "AWS::KMS::Key", "ARN": "arn:aws:kms:eu-central-1:111122223333:key/1234"}],
    ) | dict(members)


def accesses_in(text: str) -> list[Access | Damage]:
    found: list[Access | Damage] = []
    for each in records_of(text, "trail.json"):
        found += [each] if isinstance(each, Damage) else accesses_of(each[1], each[0])
    return found


def test_a_data_event_tells_who_read_what_when_and_from_where() -> None:
    (access,) = accesses_of(event_of(), "trail.json#1")
    assert (access.kind, access.served, access.time) == (AccessKind.READ, Served.DONE, 1_796_029_238_000)
    assert (access.identity, access.address) == (ROLE, "192.0.2.3")
    assert (access.bucket, access.key, access.sent_bytes) == ("bucket", "runs/run-a/run.json", 113)


def test_a_copy_reads_one_object_and_writes_another() -> None:
    asked = {
        "bucketName": "other",
        "key": "stolen",
        "x-amz-copy-source": "/bucket/runs/run-a/run.json?versionId=3",
    }
    read, write = accesses_of(event_of("CopyObject", requestParameters=asked), "t")
    assert (read.kind, read.bucket, read.key) == (AccessKind.READ, "bucket", "runs/run-a/run.json")
    assert (write.kind, write.bucket, write.key) == (AccessKind.WRITE, "other", "stolen")


@pytest.mark.parametrize(
    ("told", "bucket"),
    (
        ("bucket%2Fruns%2Frun-a%2Frun.json", "bucket"),
        ("%2Fbucket%252Fruns/run-a/%2572un.json?versionId=3", "bucket"),
        (f"{POINT}/object/runs/run-a/run.json", POINT),
        (f"{POINT}/object/runs/run-a/run.json".replace("/", "%2F").replace(":", "%3A"), POINT),
    ),
)
def test_what_was_copied_is_known_however_its_name_was_spelled(told: str, bucket: str) -> None:
    asked = {"bucketName": "other", "key": "stolen", "x-amz-copy-source": told}
    read, _ = accesses_of(event_of("CopyObject", requestParameters=asked), "t")
    assert (read.kind, read.bucket, read.key) == (AccessKind.READ, bucket, "runs/run-a/run.json")


def test_a_copy_that_does_not_say_of_what_is_damaged_and_not_passed_over() -> None:
    asked = {"bucketName": "other", "key": "stolen"}
    with pytest.raises(FormatError, match="not of which object was copied"):
        accesses_of(event_of("CopyObject", requestParameters=asked), "t")


@pytest.mark.parametrize("named", (POINT, "loot-abcdef0123456789-s3alias"))
@pytest.mark.parametrize(
    "resources",
    (
        [{"type": "AWS::S3::Object", "ARN": "arn:aws:s3:::bucket/runs/run-a/run.json"}],
        [{"type": "AWS::S3::AccessPoint", "ARN": POINT}, {"ARN": "arn:aws:s3:::bucket"}],
    ),
)
def test_what_went_by_an_access_point_is_known_by_its_bucket(named: str, resources: list[Any]) -> None:
    asked = {"bucketName": named, "key": "runs/run-a/run.json"}
    (access,) = accesses_of(event_of(requestParameters=asked, resources=resources), "t")
    assert (access.bucket, access.key) == ("bucket", "runs/run-a/run.json")


def test_what_is_renamed_is_gone_from_where_it_was() -> None:
    asked = {"bucketName": "bucket", "key": "x", "x-amz-rename-source": "/runs%2Frun-a/run.json"}
    removed, written = accesses_of(event_of("RenameObject", requestParameters=asked), "t")
    assert (removed.kind, removed.bucket, removed.key) == (AccessKind.DELETE, "bucket", "runs/run-a/run.json")
    assert (written.kind, written.key) == (AccessKind.WRITE, "x")


@pytest.mark.parametrize(
    ("name", "kind"),
    (
        ("SelectObjectContent", AccessKind.READ),
        ("RestoreObject", AccessKind.READ),
        ("GetObjectOfTomorrow", AccessKind.READ),
        ("HeadObject", AccessKind.LOOK),
        ("GetObjectTagging", AccessKind.LOOK),
        ("PutObject", AccessKind.WRITE),
        ("CompleteMultipartUpload", AccessKind.WRITE),
        ("PutObjectAcl", AccessKind.WRITE),
        ("DeleteObject", AccessKind.DELETE),
    ),
)
def test_each_call_is_what_it_does_to_an_object(name: str, kind: AccessKind) -> None:
    assert [access.kind for access in accesses_of(event_of(name), "t")] == [kind]


def test_a_key_call_tells_its_checkpoint_by_the_encryption_context() -> None:
    (access,) = accesses_of(key_event_of(), "t")
    assert access.kind is AccessKind.UNWRAP
    assert access.subject is not None
    assert (access.subject.run, access.subject.folder) == ("run-a", NAME.folder)
    assert access.kms_key == "arn:aws:kms:eu-central-1:111122223333:key/1234"


@pytest.mark.parametrize(
    ("name", "asked", "kind"),
    (
        ("GenerateDataKey", {"encryptionContext": CONTEXT, "keyId": "alias/ckpt"}, AccessKind.WRAP),
        ("Encrypt", {"EncryptionContext": CONTEXT, "KeyId": "1234"}, AccessKind.WRAP),
        ("ReEncrypt", {"destinationEncryptionContext": CONTEXT}, AccessKind.REWRAP),
    ),
)
def test_every_call_with_our_context_is_one_of_ours(
    name: str, asked: dict[str, Any], kind: AccessKind
) -> None:
    (access,) = accesses_of(key_event_of(name, requestParameters=asked), "t")
    assert access.kind is kind
    assert access.subject is not None


@pytest.mark.parametrize(
    "context",
    (
        None,
        {},
        {"aws:s3:arn": "arn:aws:s3:::bucket"},
        {**CONTEXT, "strongroom": "v0"},
        "strongroom",
    ),
)
def test_a_context_of_another_program_is_not_ours(context: Any) -> None:
    (access,) = accesses_of(key_event_of(requestParameters={"encryptionContext": context}), "t")
    assert access.subject is None


@pytest.mark.parametrize("wrong", ({"step": "x"}, {"attempt": "../x"}, {"launch": "0"}, {"step": "9" * 40}))
def test_a_context_that_names_no_checkpoint_still_names_its_run(wrong: dict[str, str]) -> None:
    (access,) = accesses_of(key_event_of(requestParameters={"encryptionContext": CONTEXT | wrong}), "t")
    assert access.subject is not None
    assert (access.subject.run, access.subject.folder) == ("run-a", None)


def test_what_was_refused_or_failed_is_told_apart() -> None:
    (refused,) = accesses_of(event_of(errorCode="AccessDenied"), "t")
    (failed,) = accesses_of(event_of(errorCode="NoSuchKey"), "t")
    assert (refused.served, failed.served) == (Served.REFUSED, Served.FAILED)


@pytest.mark.parametrize(
    ("identity", "expected"),
    (
        ({"type": "IAMUser", "arn": "arn:aws:iam::1:user/a", "userName": "a"}, "arn:aws:iam::1:user/a"),
        ({"type": "AWSService", "invokedBy": "backup.amazonaws.com"}, "service:backup.amazonaws.com"),
        (
            {"type": "AWSAccount", "accountId": "444455556666", "principalId": "AIDA"},
            "account:444455556666/AIDA",
        ),
        ({"type": "AWSAccount", "accountId": "ANONYMOUS_PRINCIPAL", "principalId": ""}, None),
        (
            {"type": "Role", "sessionContext": {"sessionIssuer": {"arn": "arn:aws:iam::1:role/r"}}},
            "arn:aws:iam::1:role/r",
        ),
        ({"type": "Unknown"}, None),
    ),
)
def test_whoever_asked_has_a_name(identity: dict[str, Any], expected: str | None) -> None:
    (access,) = accesses_of(event_of(userIdentity=identity), "t")
    assert access.identity == expected


def test_the_object_is_found_among_the_resources_as_well() -> None:
    resources = [{"type": "AWS::S3::Object", "ARN": "arn:aws:s3:::bucket/runs/run-a/run.json"}]
    (access,) = accesses_of(event_of(requestParameters=None, resources=resources), "t")
    assert (access.bucket, access.key) == ("bucket", "runs/run-a/run.json")


def test_an_event_comes_in_every_form_in_which_aws_hands_it_out() -> None:
    event = event_of()
    looked_up = {"Events": [{"EventName": "GetObject", "CloudTrailEvent": json.dumps(event)}]}
    bridged = {"detail-type": "AWS API Call via CloudTrail", "source": "aws.s3", "detail": event}
    forms = [event, [event], {"Records": [event]}, looked_up, bridged, [bridged, bridged]]
    for form in forms:
        found = accesses_in(json.dumps(form))
        assert {type(each) for each in found} == {Access}
    lines = "\n".join(json.dumps(form) for form in forms)
    assert len(accesses_in(lines)) == 7


def test_damaged_events_are_told_with_their_place_and_hide_no_others() -> None:
    records = [event_of(), 3, {"eventName": "GetObject"}, {"CloudTrailEvent": "{"}, event_of()]
    told = []
    for each in records_of(json.dumps({"Records": records}), "trail.json"):
        try:
            told.append(each.reason if isinstance(each, Damage) else len(accesses_of(each[1], each[0])))
        except FormatError as error:
            told.append(str(error))
    assert told == [
        1,
        "it is int, and an event is an object",
        "trail.json#3 is no event of CloudTrail: it has no eventSource",
        "its CloudTrailEvent is not JSON",
        1,
    ]


def test_a_read_that_does_not_say_of_what_is_damaged_and_not_passed_over() -> None:
    with pytest.raises(FormatError, match="tells of GetObject and not of which object"):
        accesses_of(event_of(requestParameters={}), "t")


def test_what_came_to_nothing_or_passed_an_endpoint_need_not_say_of_what() -> None:
    assert accesses_of(event_of(requestParameters=None, errorCode="InvalidRequest"), "t") == []
    assert accesses_of(event_of(requestParameters=None, eventCategory="NetworkActivity"), "t") == []


def test_nothing_of_a_request_that_may_be_a_key_is_kept() -> None:
    asked = {
        "encryptionContext": CONTEXT,
        "ciphertextBlob": "SECRET",
        "plaintext": "SECRET",
        "message": "SECRET",
    }
    (access,) = accesses_of(key_event_of(requestParameters=asked), "t")
    assert "SECRET" not in repr(access)


def test_the_fixtures_are_read_whole() -> None:
    found = accesses_in((FIXTURES / "cloudtrail.json").read_text())
    assert [type(each) for each in found] == [Access] * len(found)
    kinds = [each.kind for each in found if isinstance(each, Access)]
    assert kinds == [AccessKind.READ, AccessKind.WRITE, AccessKind.UNWRAP, AccessKind.UNWRAP, AccessKind.WRAP]


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(event_of())), _ANYTHING, max_size=5), st.booleans())
def test_nothing_but_a_format_error_is_raised_for_any_event(members: dict[str, Any], is_key: bool) -> None:
    event = (key_event_of() if is_key else event_of()) | members
    try:
        accesses_of(event, "t")
    except FormatError:
        return


@given(_ANYTHING.map(json.dumps) | st.text(max_size=200))
def test_any_text_is_read_to_its_end(text: str) -> None:
    for each in records_of(text, "t"):
        assert isinstance(each, Damage) or isinstance(each[1], dict)
