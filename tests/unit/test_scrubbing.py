"""Secrets do not get into provenance, whatever holds them; what only sounds like one stays."""

from __future__ import annotations

import argparse
import json
import pathlib
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strongroom.decoding import Decoder
from strongroom.scrubbing import SCRUBBED, Scrubber, secret_values, without_userinfo
from strongroom.values import Encoder

# None of these is anybody's; they only have the forms.
PEM = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIBexample\n-----END EC PRIVATE KEY-----"
SECRETS = {
    "AWS access key id": "AKIA" + "Q7ZK2M5X3B4N6P2R",
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiJub2JvZHkifQ.c2lnbmF0dXJlLW9mLW5vYm9keQ",
    "GitHub token": "ghp_" + "0123456789abcdefghijABCDEFGHIJ012345",
    "GitHub fine-grained token": "github_pat_" + "11ABCDEFG0123456789abcdefghijk",
    "GitLab token": "glpat-" + "abcdefghij0123456789",
    "Hugging Face token": "hf_" + "abcdefghijABCDEFGHIJ0123456789wxyz",
    "Weights & Biases key": "wandb_v1_" + "abcdefghij0123456789ABCDEFGHIJ",
    "private key": PEM,
    "bearer": "Bearer " + "abc.def-123_456~/+==",
    "age key": "AGE-SECRET-KEY-1" + "Q" * 58,
    "Slack token": "xoxb-" + "123456789012-abcdefABCDEF",
}


def scrubbed(value: Any, known: Any = ()) -> tuple[Any, list[str]]:
    scrubber = Scrubber(known)
    node = scrubber.node(Encoder().encode(value), "p")
    return Decoder().decode(node), scrubber.found


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_a_secret_by_its_form_is_replaced_wherever_it_stands(secret: str) -> None:
    for value in (
        secret,
        f"before {secret} after",
        [1, (secret,), {"a": {"b": secret}}],
        {secret: 1},
        {frozenset({secret, "b"})},
        argparse.Namespace(note=secret),
        types.SimpleNamespace(note=secret),
        OrderedDict(note=secret),
        defaultdict(str, note=secret),
        Counter({secret: 2}),
        deque([secret], maxlen=3),
        secret.encode(),
        bytearray(secret, "utf-8"),
        pathlib.PurePosixPath("/data") / secret,
        f"{secret} \ud800",
    ):
        scrubber = Scrubber()
        node = scrubber.node(Encoder().encode(value), "p")
        Decoder().decode(node)  # What is left can be read back.
        assert secret not in json.dumps(node), value
        assert secret.encode() not in b"".join(_bytes_in(Decoder().decode(node))), value
        assert scrubber.found, value


def _bytes_in(value: Any) -> list[bytes]:
    return [bytes(value)] if isinstance(value, bytes | bytearray) else []


@pytest.mark.parametrize(
    "name",
    (
        "password", "db_password", "dbPassword", "PASSWD", "secret", "client_secret", "clientSecret",
        "api_key", "apiKey", "OPENAI_API_KEY", "wandb_api_key", "aws_secret_access_key", "private_key",
        "token", "hf_token", "access_token", "refreshToken", "auth_token", "ssh_key", "credentials",
        "passphrase", "Authorization", "cookie", "wandb.key", "key",
        "pass", "passwd", "db_pass", "smtpPass", "PASS",
    ),
)  # fmt: skip
def test_a_secret_by_its_name_is_replaced(name: str) -> None:
    found, places = scrubbed({name: "hunter2-x9"})
    assert found == {name: SCRUBBED}
    assert places == [f"p[{name!r}]"]


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("key_dim", 64),
        ("value_dim", "64"),
        ("num_tokens", 2048),
        ("max_tokens", "2048"),
        ("tokens_seen", 10**12),
        ("token", 5),
        ("tokenizer", "gpt2"),
        ("tokenizer_name", "meta/llama"),
        ("pad_token", "<pad>"),
        ("eos_token", "end of text"),
        ("mask_token", "[MASK]"),
        ("sort_key", "length"),
        ("text_key", "document.text"),
        ("key", "image"),
        ("secret_size", 16),
        ("secret_seed", 3),
        ("use_auth_token", True),
        ("password", None),
        ("api_key", ""),
        ("monkey", "banana42"),
        ("passed", "test-42"),
        ("pass_rate", "0.5/1"),
        ("bypass", "layer-4"),
        ("compass", "n0rth"),
        ("forward_pass", "fp8-e4m3"),
        ("pass", 3),
        ("pass", "2"),
        ("pass", "true"),
        ("pass", {"loss": 0.5, "kind": "warm"}),
        ("log", "second pass: done, pass=halfway"),
        ("keyboard", "qwerty123"),
        ("commit", "0123456789abcdef0123456789abcdef01234567"),
        ("manifest_digest", "sha256:" + "ab" * 32),
        ("url", "https://example.com/data?version=3#part"),
        ("lr", 0.1),
        ("note", "loss: 0.5, step=300, token_accuracy=0.25"),
        ("windows", "C:\\data\\x"),
        ("arguments", ["--lr", "0.1", "--tokenizer", "gpt2"]),
    ),
)
def test_what_only_sounds_like_a_secret_stays(name: str, value: Any) -> None:
    assert scrubbed({name: value}) == ({name: value}, [])


def test_of_a_url_only_the_secret_parts_are_replaced() -> None:
    assert scrubbed("s3://user:p@ss@bucket/x")[0] == f"s3://{SCRUBBED}@bucket/x"
    assert (
        scrubbed("see https://tok3n@host/a and http://b/c")[0]
        == f"see https://{SCRUBBED}@host/a and http://b/c"
    )
    signed = "https://bucket/x?X-Amz-Signature=0123abcd&X-Amz-Date=2026"
    assert scrubbed(signed)[0] == f"https://bucket/x?X-Amz-Signature={SCRUBBED}&X-Amz-Date=2026"


@pytest.mark.parametrize(
    "userinfo",
    ("u:pa/ss", "u:p@s/s", "u:a:b/c@d", "u:/ss", "u:pa?s#s", "me@corp.example:pa/ss", ":pa/ss"),
)
def test_a_password_in_a_url_need_not_have_been_escaped(userinfo: str) -> None:
    assert scrubbed(f"from postgres://{userinfo}@host/db on")[0] == f"from postgres://{SCRUBBED}@host/db on"
    assert without_userinfo(f"https://{userinfo}@host/db") == "https://host/db"


@pytest.mark.parametrize(
    "text",
    (
        "git+https://github.com/org/repo@v1.2#egg=x",
        "https://host:8080/org/repo@v1.2",
        "docker://registry:5000/image:tag@sha256:0123",
        "http://[::1]:8080/a@b",
        "file://C:/data/a@b",
        "https://host/@scope/a:b@c",
        "see http://host:8080 and mail me@host",
    ),
)
def test_an_at_sign_behind_the_host_is_no_password(text: str) -> None:
    assert scrubbed(text) == (text, [])


def test_of_several_urls_each_keeps_its_host() -> None:
    assert scrubbed("a://u:p/1@h1/x,b://u:p/2@h2/y")[0] == f"a://{SCRUBBED}@h1/x,b://{SCRUBBED}@h2/y"


def test_a_hostile_text_of_many_urls_takes_no_longer_than_its_length_times_a_bound() -> None:
    text = "a://u:" * 20_000
    assert scrubbed(text) == (text, [])


def test_arguments_are_scrubbed_in_each_of_their_spellings() -> None:
    line = ["train.py", "--api-key", "hunter2", "--hf-token=hunter2", "--lr", "0.1", "API_KEY=hunter2"]
    found, places = scrubbed({"argv": line, "command": " ".join(line)})
    assert found["argv"] == [
        "train.py", "--api-key", SCRUBBED, f"--hf-token={SCRUBBED}", "--lr", "0.1", f"API_KEY={SCRUBBED}",
    ]  # fmt: skip
    assert found["command"].count("hunter2") == 1  # After a space nothing says that it belongs to a name.
    assert places[0] == "p['argv'][2]"


def test_a_variables_secret_is_found_in_any_text() -> None:
    known = secret_values(
        {
            "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
            "DB_PASSWORD": "short",
            "HOME": "/home/someone",
            "GOOGLE_APPLICATION_CREDENTIALS_FILE": "/etc/keys/google.json",
            "TOKENIZERS_PARALLELISM": "parallelism=false",
        }
    )
    assert known == {"0123456789abcdef0123456789abcdef01234567"}
    found, _ = scrubbed({"note": "logged in as 0123456789abcdef0123456789abcdef01234567."}, known)
    assert found == {"note": f"logged in as {SCRUBBED}."}


@pytest.mark.parametrize(
    "name", ("DB_PASSWORD", "SIGNER_PASSPHRASE", "CLIENT_SECRET", "PGPASSWORD", "DB_PASS", "DB_PASSWORD_OLD")
)
@pytest.mark.parametrize("value", ("correct horse battery", "swordfish", "swordfish\n"))
def test_a_variables_password_is_a_secret_where_it_is_plain_words_too(name: str, value: str) -> None:
    known = secret_values({name: value})
    assert known == {value.strip()}
    found, places = scrubbed(
        {"note": f"pw is {value.strip()}, really", "as_key": {value.strip() + "!": 1}}, known
    )
    assert found == {"note": f"pw is {SCRUBBED}, really", "as_key": {f"{SCRUBBED}!": 1}}
    assert len(places) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("DB_PASSWORD", "1"),
        ("DB_PASSWORD", "true"),
        ("DB_PASSWORD", "disabled"),
        ("SECRET_BACKEND", "filesystem"),
        ("PASSWORD_POLICY", "very strict"),
        ("WANDB_API_KEY", "anonymous"),
        ("FORWARD_PASS", "bfloat precision"),
        ("PWD", "/home/someone/project"),
        ("OLDPWD", "/home/someone/project"),
        ("CREDENTIALS_DIRECTORY", "/run/credentials/train"),
    ),
)
def test_a_variable_that_holds_no_secret_is_not_looked_for(name: str, value: str) -> None:
    assert secret_values({name: value}) == set()


def test_a_password_that_is_a_word_is_looked_for_as_a_word() -> None:
    known = secret_values({"DB_PASSWORD": "training"})
    value = {"training": {"phase": "pretraining"}, "trainings": ["retraining"]}
    assert scrubbed(value, known) == (value, [])
    assert scrubbed(["in training."], known)[0] == [f"in {SCRUBBED}."]


def test_two_keys_that_are_scrubbed_stay_two() -> None:
    first, second = SECRETS["GitHub token"], SECRETS["GitLab token"]
    assert scrubbed({first: 1, second: 2, "c": 3})[0] == {SCRUBBED: 1, f"{SCRUBBED} 2": 2, "c": 3}


def test_a_container_under_a_secret_name_is_replaced_whole() -> None:
    assert scrubbed({"credentials": {"user": "me", "pin": 1234}})[0] == {"credentials": SCRUBBED}
    assert scrubbed({"secrets": []})[0] == {"secrets": []}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abc xyz", max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text("abcdefgh_", max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_a_value_without_secrets_comes_back_as_it_is(value: Any) -> None:
    assert scrubbed(value) == (value, [])


@given(PLAIN, st.sampled_from(sorted(SECRETS.values())))
def test_no_nesting_hides_a_secret(value: Any, secret: str) -> None:
    node = Scrubber().node(Encoder().encode({"deep": [value, {"x": (secret, value)}]}), "p")
    assert json.dumps(secret)[1:-1] not in json.dumps(node)
    Decoder().decode(node)


@pytest.mark.parametrize(
    ("url", "bare"),
    (
        ("https://user:token@host/path.git", "https://host/path.git"),
        ("https://token@host/path.git", "https://host/path.git"),
        ("https://host/path.git?private_token=abc#x", "https://host/path.git"),
        ("ssh://git@host:22/path.git", "ssh://host:22/path.git"),
        ("git@host:team/path.git", "host:team/path.git"),
        ("/srv/git/path.git", "/srv/git/path.git"),
        ("../path", "../path"),
    ),
)
def test_a_repositorys_address_says_nothing_of_who_fetches_it(url: str, bare: str) -> None:
    assert without_userinfo(url) == bare
