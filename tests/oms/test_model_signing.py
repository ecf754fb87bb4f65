"""The independent command and ours agree, either way, about folders, keys and certificates."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authorities import CURVES, SIGNER_NAME, Issued, MemorySigner, issue, issue_signer
from independent import ModelSigning, make_folder

from strongroom_security.certificates import Authority
from strongroom_security.oms import (
    GIT_PATHS,
    attest,
    decode_bundle,
    decode_statement,
    sign_folder,
    sign_payload,
    statement,
    subject_digest,
)
from strongroom_security.publickeys import PublicKey

WITHIN_S = 10


def digests_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).digest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def key(tmp_path: Path) -> MemorySigner:
    """A key, the halves of which are beside the folder: ``signer.pem``, ``signer.pub``."""
    return key_files(tmp_path, MemorySigner())


def key_files(folder: Path, signer: MemorySigner) -> MemorySigner:
    written(folder / "signer.pem", signer.private_pem)
    written(folder / "signer.pub", signer.public_key.pem)
    return signer


@pytest.fixture
def root() -> Issued:
    return issue("root")


@pytest.fixture
def certified(tmp_path: Path, root: Issued) -> MemorySigner:
    """A certified key: ``signer.pem``, ``signer.crt``, ``intermediate.crt`` and ``root.crt``."""
    intermediate = issue("intermediate", root)
    signer = key_files(tmp_path, MemorySigner("P-384"))
    leaf = issue_signer(intermediate, signer.private)
    written(tmp_path / "signer.crt", leaf.pem)
    written(tmp_path / "intermediate.crt", intermediate.pem)
    written(tmp_path / "root.crt", root.pem)
    signer.certificates = (leaf.der, intermediate.der)
    return signer


# ------------------------------------------------------------------------------------- ours, read by it


@pytest.mark.parametrize("curve", CURVES)
def test_a_folder_that_a_key_signed_here_is_accepted(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, curve: str
) -> None:
    signer = key_files(tmp_path, MemorySigner(curve))
    signature = written(tmp_path / "model.sig", sign_folder(folder, signer, within_s=WITHIN_S))
    assert model_signing.accepts(
        "key", folder, "--signature", signature, "--public_key", tmp_path / "signer.pub"
    )


@pytest.mark.parametrize("curve", CURVES)
def test_a_statement_over_digests_alone_is_accepted(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, curve: str
) -> None:
    """As a checkpoint is signed: nothing is ignored, and no file is read."""
    signer = key_files(tmp_path, MemorySigner(curve))
    payload = statement(digests_of(folder))
    signature = written(tmp_path / "signature.json", sign_payload(payload, signer, within_s=WITHIN_S))
    assert model_signing.accepts(
        "key", folder, "--signature", signature, "--public_key", tmp_path / "signer.pub"
    )


@pytest.mark.parametrize("with_root", (False, True), ids=("the root kept back", "the root sent along"))
def test_a_folder_that_a_certified_key_signed_here_is_accepted(
    model_signing: ModelSigning,
    folder: Path,
    tmp_path: Path,
    root: Issued,
    certified: MemorySigner,
    with_root: bool,
) -> None:
    if with_root:
        certified.certificates += (root.der,)
    signature = written(tmp_path / "model.sig", sign_folder(folder, certified, within_s=WITHIN_S))
    assert model_signing.accepts(
        "certificate", folder, "--signature", signature, "--certificate_chain", tmp_path / "root.crt"
    )


def test_a_signature_that_lies_in_its_folder_is_accepted(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, key: MemorySigner
) -> None:
    signature = folder / "model.sig"
    written(signature, sign_folder(folder, key, ignore=["model.sig"], within_s=WITHIN_S))
    assert model_signing.accepts(
        "key", folder, "--signature", signature, "--public_key", tmp_path / "signer.pub"
    )


def test_what_was_ignored_when_it_was_signed_may_change(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, key: MemorySigner
) -> None:
    signature = written(
        tmp_path / "model.sig", sign_folder(folder, key, ignore=["sub", "notes.txt"], within_s=WITHIN_S)
    )
    (folder / "sub/part.bin").write_bytes(b"another")
    (folder / "notes.txt").write_bytes(b"new")
    (folder / ".gitignore").write_bytes(b"new")
    assert model_signing.accepts(
        "key", folder, "--signature", signature, "--public_key", tmp_path / "signer.pub"
    )


def test_a_manifest_that_is_signed_alone_is_accepted_beside_what_it_lists(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, key: MemorySigner
) -> None:
    """As a checkpoint is signed whose files have digests of another kind."""
    manifest = {"MANIFEST.json": digests_of(folder)["MANIFEST.json"]}
    signature = written(
        tmp_path / "signature.json", sign_payload(statement(manifest), key, within_s=WITHIN_S)
    )
    arguments = (folder, "--signature", signature, "--public_key", tmp_path / "signer.pub")
    assert "Extra files" in model_signing.reason("key", *arguments)
    assert model_signing.accepts("key", *arguments, "--ignore_unsigned_files")
    (folder / "MANIFEST.json").write_bytes(b"{ }")
    assert "Hash mismatch for 'MANIFEST.json'" in model_signing.reason(
        "key", *arguments, "--ignore_unsigned_files"
    )


# ------------------------------------------------------------------------------- ours, tampered with


def flip_a_byte(folder: Path) -> None:
    path = folder / "00000-00.safetensors"
    data = bytearray(path.read_bytes())
    data[1_000_000] ^= 1
    path.write_bytes(data)


def add_a_file(folder: Path) -> None:
    (folder / "sub/more.bin").write_bytes(b"more")


def remove_a_file(folder: Path) -> None:
    (folder / "00001-00.safetensors").unlink()


def rename_a_file(folder: Path) -> None:
    (folder / "sub/part.bin").rename(folder / "sub/parts.bin")


def swap_two_files(folder: Path) -> None:
    (folder / "sub/part.bin").write_bytes(b"two")
    (folder / "sub.d/part.bin").write_bytes(b"one")


def cut_a_file(folder: Path) -> None:
    os.truncate(folder / "00000-00.safetensors", 256)


def put_a_link(folder: Path) -> None:
    content = (folder / "sub/part.bin").read_bytes()
    (folder / "sub/part.bin").unlink()
    (folder.parent / "elsewhere").write_bytes(content)
    (folder / "sub/part.bin").symlink_to(folder.parent / "elsewhere")


TAMPERING: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped byte": (flip_a_byte, "Hash mismatch for '00000-00.safetensors'"),
    "an added file": (add_a_file, "Extra files found in model 'data': sub/more.bin"),
    "a removed file": (remove_a_file, "Missing files in model 'data': 00001-00.safetensors"),
    "a renamed file": (rename_a_file, "Missing files in model 'data': sub/part.bin"),
    "two files swapped": (swap_two_files, "Hash mismatch for 'sub.d/part.bin'"),
    "a file cut short": (cut_a_file, "Hash mismatch for '00000-00.safetensors'"),
    "a link in place of a file": (put_a_link, "because it is a symlink"),
}


@pytest.mark.parametrize(("tamper", "reason"), TAMPERING.values(), ids=TAMPERING)
def test_a_folder_that_was_tampered_with_is_rejected(
    model_signing: ModelSigning,
    folder: Path,
    tmp_path: Path,
    key: MemorySigner,
    tamper: Callable[[Path], None],
    reason: str,
) -> None:
    payload = statement(digests_of(folder))
    signature = written(tmp_path / "signature.json", sign_payload(payload, key, within_s=WITHIN_S))
    tamper(folder)
    assert reason in model_signing.reason(
        "key", folder, "--signature", signature, "--public_key", tmp_path / "signer.pub"
    )


def test_a_foreign_key_is_rejected(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, key: MemorySigner
) -> None:
    signature = written(tmp_path / "model.sig", sign_folder(folder, key, within_s=WITHIN_S))
    foreign = written(tmp_path / "foreign.pub", MemorySigner().public_key.pem)
    arguments = (folder, "--signature", signature, "--public_key", foreign)
    assert "Key mismatch" in model_signing.reason("key", *arguments)
    # Nobody signed the hint: what counts is that the signature does not hold.
    change(signature, lambda bundle: set_hint(bundle, PublicKey.from_pem(foreign.read_bytes(), "it").id))
    assert not model_signing.accepts("key", *arguments)


def test_a_foreign_authority_is_rejected(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, certified: MemorySigner
) -> None:
    signature = written(tmp_path / "model.sig", sign_folder(folder, certified, within_s=WITHIN_S))
    foreign = written(tmp_path / "foreign.crt", issue("root").pem)
    assert not model_signing.accepts(
        "certificate", folder, "--signature", signature, "--certificate_chain", foreign
    )


def change(signature: Path, how: Callable[[dict[str, Any]], None]) -> None:
    bundle = json.loads(signature.read_bytes())
    how(bundle)
    signature.write_text(json.dumps(bundle))


def set_hint(bundle: dict[str, Any], key_id: str) -> None:
    bundle["verificationMaterial"]["publicKey"]["hint"] = key_id


@pytest.mark.parametrize("method", ("key", "certificate"))
def test_an_edited_payload_is_rejected(
    model_signing: ModelSigning,
    folder: Path,
    tmp_path: Path,
    method: str,
    request: pytest.FixtureRequest,
) -> None:
    """The folder is changed, and the statement with it: all fits but the signature."""
    signer = request.getfixturevalue("key" if method == "key" else "certified")
    trusted = ("--public_key", "signer.pub") if method == "key" else ("--certificate_chain", "root.crt")
    signature = written(
        tmp_path / "signature.json", sign_payload(statement(digests_of(folder)), signer, within_s=WITHIN_S)
    )
    arguments = (folder, "--signature", signature, trusted[0], tmp_path / trusted[1])
    assert model_signing.accepts(method, *arguments)
    flip_a_byte(folder)
    payload = base64.b64encode(statement(digests_of(folder))).decode()
    change(signature, lambda bundle: bundle["dsseEnvelope"].update(payload=payload))
    assert not model_signing.accepts(method, *arguments)


def test_a_signature_over_another_folder_is_rejected(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, key: MemorySigner
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "MANIFEST.json").write_bytes(b"{}")
    signature = written(tmp_path / "signature.json", sign_folder(other, key, within_s=WITHIN_S))
    assert "Signature mismatch" in model_signing.reason(
        "key", folder, "--signature", signature, "--public_key", tmp_path / "signer.pub"
    )


def test_a_signed_statement_of_provenance_is_not_taken_for_one_of_the_folder(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, key: MemorySigner
) -> None:
    digests = digests_of(folder)
    payload = attest({"data": subject_digest(digests)}, "https://slsa.dev/provenance/v1", {})
    signature = written(tmp_path / "provenance.sig", sign_payload(payload, key, within_s=WITHIN_S))
    assert "Predicate type mismatch" in model_signing.reason(
        "key", folder, "--signature", signature, "--public_key", tmp_path / "signer.pub"
    )


# ------------------------------------------------------------------------------------- its, read by us


@pytest.mark.parametrize("curve", CURVES)
def test_what_it_signs_by_a_key_is_accepted_here(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, curve: str
) -> None:
    signer = key_files(tmp_path, MemorySigner(curve))
    expected = digests_of(folder)
    (folder / ".git").mkdir()
    (folder / ".git/HEAD").write_bytes(b"x")
    signature = folder / "model.sig"
    model_signing.sign("key", folder, "--signature", signature, "--private_key", tmp_path / "signer.pem")

    bundle = decode_bundle(signature.read_bytes(), "model.sig")
    assert bundle.key_id == signer.public_key.id
    assert signer.public_key.verify(bundle.envelope.to_be_signed, bundle.envelope.signature)
    read = decode_statement(bundle.envelope.payload, "model.sig")
    assert read.resources == expected
    assert set(read.ignored) == {*GIT_PATHS, "model.sig"}
    # Folders come before what is in them there, and names as a whole here.
    assert list(read.resources) != sorted(expected)
    assert read.subject != subject_digest(expected)


def test_where_the_orders_agree_it_names_the_folder_as_it_is_named_here(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, key: MemorySigner
) -> None:
    """A checkpoint's files lie in one folder, and there the orders do agree."""
    for name in ("sub", "sub.d", "sub-d"):
        for path in sorted((folder / name).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    signature = tmp_path / "model.sig"
    model_signing.sign("key", folder, "--signature", signature, "--private_key", tmp_path / "signer.pem")
    read = decode_statement(decode_bundle(signature.read_bytes(), "it").envelope.payload, "it")
    assert read.subject == subject_digest(digests_of(folder))


@pytest.mark.parametrize(
    ("paths", "options", "git"),
    (
        ((), ("--no-ignore-git-paths",), ()),
        (("notes and more.txt",), (), GIT_PATHS),
        (("sub", "absent/part"), (), GIT_PATHS),
    ),
    ids=("nothing of git's ignored", "a file ignored", "folders ignored"),
)
def test_what_it_leaves_out_is_told(
    model_signing: ModelSigning,
    folder: Path,
    tmp_path: Path,
    key: MemorySigner,
    paths: tuple[str, ...],
    options: tuple[str, ...],
    git: tuple[str, ...],
) -> None:
    for path in paths:
        if not (folder / path).exists():
            make_folder(folder, {path: b"x"})
    for path in paths:
        options += ("--ignore-paths", str(folder / path))
    signature = tmp_path / "model.sig"
    model_signing.sign(
        "key", folder, "--signature", signature, "--private_key", tmp_path / "signer.pem", *options
    )
    read = decode_statement(decode_bundle(signature.read_bytes(), "it").envelope.payload, "it")
    assert set(read.ignored) == {*git, *paths}
    assert read.resources == {
        name: digest
        for name, digest in digests_of(folder).items()
        if not any(Path(name).is_relative_to(path) for path in paths)
    }


def test_what_it_signs_by_a_certificate_is_accepted_here(
    model_signing: ModelSigning, folder: Path, tmp_path: Path, certified: MemorySigner
) -> None:
    signature = tmp_path / "model.sig"
    model_signing.sign(
        "certificate",
        folder,
        *("--signature", signature, "--private_key", tmp_path / "signer.pem"),
        *("--signing_certificate", tmp_path / "signer.crt"),
        *("--certificate_chain", tmp_path / "intermediate.crt"),
        *("--certificate_chain", tmp_path / "root.crt"),
    )
    bundle = decode_bundle(signature.read_bytes(), "model.sig")
    assert bundle.key_id is None
    signer = Authority.read(tmp_path / "root.crt", [SIGNER_NAME]).leaf(bundle.certificates, "model.sig")
    assert signer == certified.public_key
    assert signer.verify(bundle.envelope.to_be_signed, bundle.envelope.signature)
    assert decode_statement(bundle.envelope.payload, "model.sig").resources == digests_of(folder)
