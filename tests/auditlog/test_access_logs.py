"""Server access logs: lines as documented, whatever a client has put into them, and what is no line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.errors import FormatError
from strongroom_security.auditlog.reconciling.accesses import AccessKind, Served
from strongroom_security.auditlog.reconciling.accesslogs import access_of_line, kind_of

OWNER = "79a59df900b949e55d96a1e698fbacedfd6e09d98eacf8f8d5218e7cd47ef2be"
ROLE = "arn:aws:sts::111122223333:assumed-role/trainer-writer/job-7"


def line_of(
    *,
    time: str = "30/Nov/2026:09:00:38 +0000",
    address: str = "192.0.2.3",
    requester: str = ROLE,
    operation: str = "REST.GET.OBJECT",
    key: str = "runs/run-a/run.json",
    uri: str = '"GET /runs/run-a/run.json HTTP/1.1"',
    status: str = "200",
    error: str = "-",
    sent: str = "113",
    agent: str = '"Boto3/1.44 md/strongroom/0.1"',
    rest: str = "hostid= SigV4 TLS_AES_128_GCM_SHA256 AuthHeader bucket.s3.amazonaws.com TLSv1.3 - -",
) -> str:
    """A line by the fields that the user guide lists, in its order."""
    return (
        f"{OWNER} bucket [{time}] {address} {requester} 3E57427F3EXAMPLE {operation} {key} {uri} {status} "
        f'{error} {sent} 4096 7 6 "-" {agent} - {rest}'
    )


def test_a_line_tells_who_read_what_when_and_from_where() -> None:
    access = access_of_line(line_of(), "log:1")
    assert access is not None
    assert (access.kind, access.served, access.time) == (AccessKind.READ, Served.DONE, 1_796_029_238_000)
    assert (access.identity, access.address, access.bucket) == (ROLE, "192.0.2.3", "bucket")
    assert (access.key, access.request, access.sent_bytes) == ("runs/run-a/run.json", "3E57427F3EXAMPLE", 113)
    assert access.agent == "Boto3/1.44 md/strongroom/0.1"


def test_the_fields_that_later_years_brought_may_be_missing_or_be_more() -> None:
    assert access_of_line(line_of(rest="hostid=").removesuffix(" hostid="), "log:1") is not None
    assert access_of_line(line_of(rest="hostid= SigV4 - - - - - - new 1 2 3"), "log:1") is not None


def test_another_offset_is_the_same_moment() -> None:
    there = access_of_line(line_of(time="30/Nov/2026:11:30:38 +0230"), "log:1")
    here = access_of_line(line_of(), "log:1")
    assert there is not None
    assert here is not None
    assert there.time == here.time


def test_what_is_not_known_is_a_dash() -> None:
    access = access_of_line(line_of(address="-", requester="-", uri="-", agent="-", sent="-"), "log:1")
    assert access is not None
    assert (access.address, access.identity, access.agent, access.sent_bytes) == (None, None, None, None)


@pytest.mark.parametrize(
    ("operation", "kind"),
    (
        ("REST.GET.OBJECT", AccessKind.READ),
        ("WEBSITE.GET.OBJECT", AccessKind.READ),
        ("REST.COPY.OBJECT_GET", AccessKind.READ),
        ("REST.COPY.PART_GET", AccessKind.READ),
        ("REST.SELECT.OBJECT", AccessKind.READ),
        ("REST.POST.RESTORE", AccessKind.READ),
        ("S3.RESTORE.OBJECT", AccessKind.READ),
        ("REST.GET.SOMETHING_NEW", AccessKind.READ),
        ("REST.HEAD.OBJECT", AccessKind.LOOK),
        ("REST.GET.OBJECT_TAGGING", AccessKind.LOOK),
        ("REST.GET.ACL", AccessKind.LOOK),
        ("REST.PUT.OBJECT", AccessKind.WRITE),
        ("REST.PUT.PART", AccessKind.WRITE),
        ("REST.POST.UPLOADS", AccessKind.WRITE),
        ("REST.COPY.OBJECT", AccessKind.WRITE),
        ("REST.PUT.ACL", AccessKind.WRITE),
        ("REST.DELETE.UPLOAD", AccessKind.WRITE),
        ("REST.NEW.VERB", AccessKind.WRITE),
        ("REST.DELETE.OBJECT", AccessKind.DELETE),
        ("BATCH.DELETE.OBJECT", AccessKind.DELETE),
        ("S3.EXPIRE.OBJECT", AccessKind.DELETE),
        ("S3.CREATE.DELETEMARKER", AccessKind.DELETE),
        ("S3.TRANSITION_SIA.OBJECT", AccessKind.LOOK),
    ),
)
def test_each_operation_is_what_it_does_to_an_object(operation: str, kind: AccessKind) -> None:
    assert kind_of(operation, has_key=True) is kind


def test_a_listing_is_about_what_it_lists_and_other_questions_of_a_bucket_are_passed_over() -> None:
    listing = access_of_line(
        line_of(
            operation="REST.GET.BUCKET", key="-", uri='"GET /?list-type=2&prefix=runs%2Frun-a%2F HTTP/1.1"'
        ),
        "log:1",
    )
    assert listing is not None
    assert (listing.kind, listing.key) == (AccessKind.LOOK, "runs/run-a/")
    asked = line_of(operation="REST.GET.VERSIONING", key="-", uri='"GET /?versioning HTTP/1.1"')
    assert access_of_line(asked, "log:1") is None


def test_a_key_is_decoded_once_as_it_was_encoded_for_the_log() -> None:
    access = access_of_line(line_of(key="runs/my%2520run/run.json"), "log:1")
    assert access is not None
    assert access.key == "runs/my%20run/run.json"


@pytest.mark.parametrize(
    ("status", "error", "served"),
    (
        ("206", "-", Served.DONE),
        ("-", "-", Served.DONE),
        ("403", "AccessDenied", Served.REFUSED),
        ("404", "NoSuchKey", Served.FAILED),
        ("304", "-", Served.FAILED),
    ),
)
def test_what_was_not_served_is_told_apart(status: str, error: str, served: Served) -> None:
    access = access_of_line(line_of(status=status, error=error), "log:1")
    assert access is not None
    assert access.served is served


def test_a_client_cannot_talk_its_request_out_of_the_log() -> None:
    """Whoever puts a quotation mark into a request may pretend that it came to nothing: it counts as done."""
    forged = '"GET /runs/run-a/run.json" 404 NoSuchKey - - 7 6 "-" "x" - a" HTTP/1.1"'
    access = access_of_line(line_of(uri=forged), "log:1")
    assert access is not None
    assert (access.kind, access.served, access.key) == (AccessKind.READ, Served.DONE, "runs/run-a/run.json")
    agent = access_of_line(line_of(agent='"strongroom" 404 - "'), "log:1")
    assert agent is not None
    assert agent.served is Served.DONE


@pytest.mark.parametrize(
    "line",
    (
        "",
        "not a line",
        line_of()[:200],
        line_of(time="30/Foo/2026:09:00:38 +0000"),
        line_of(time="31/Nov/2026:09:00:38 +0000"),
        line_of(status="abc"),
        line_of().replace(OWNER, ""),
    ),
)
def test_what_is_no_line_is_refused_in_words(line: str) -> None:
    with pytest.raises(FormatError, match="log:9 "):
        access_of_line(line, "log:9")


@given(st.text(max_size=400) | st.integers(0, 700).map(lambda cut: line_of()[:cut]))
def test_nothing_else_is_raised_for_any_line(line: str) -> None:
    try:
        access_of_line(line, "log:1")
    except FormatError:
        return


@given(st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=60))
def test_whatever_a_client_calls_itself_its_read_is_seen(agent: str) -> None:
    access = access_of_line(line_of(agent=f'"{agent}"'), "log:1")
    assert access is not None
    assert (access.kind, access.served) == (AccessKind.READ, Served.DONE)
