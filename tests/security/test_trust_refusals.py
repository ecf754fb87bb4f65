"""What a writer to the storage can do to a signed, sealed checkpoint: each is refused, in words of its own.

None reaches a tensor or whoever keeps the keys. ``COMMIT`` follows each change, as its digest of itself keeps
nobody from changing it; where it says so, even a trusted key has signed what is wrong.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Keeper
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from signed_checkpoints import key_of, signer

from strongroom import Checkpointer, layout
from strongroom.digest import sha256_of
from strongroom.errors import IntegrityError, UntrustedError
from strongroom.manifest import Commit
from strongroom_security import Seal, SecurityPolicy, Sign, Verify
from strongroom_security.dsse import pae
from strongroom_security.requirements import RequireSigner, Threshold
from strongroom_security.trustlist import Revocation, TrustedKey, TrustList, sign_trust_list

TRAINER = key_of("trainer")
IN_TOTO = "application/vnd.in-toto+json"


@dataclass(frozen=True)
class Root:
    """A run of two checkpoints, 1 and 2, and who keeps their keys."""

    path: Path
    keeper: Keeper

    def folder(self, step: int = 2) -> Path:
        (found,) = self.path.glob(f"step-{step:012d}-*")
        return found

    def bundle(self, step: int = 2) -> Any:
        return json.loads((self.folder(step) / layout.SIGNATURE).read_bytes())

    def payload(self, step: int = 2) -> bytes:
        return base64.b64decode(self.bundle(step)["dsseEnvelope"]["payload"])

    def put(self, signature: bytes | None) -> None:
        """Make it the signature of the newest checkpoint, as ``COMMIT`` says too."""
        path = self.folder() / layout.SIGNATURE
        path.unlink(missing_ok=True)
        if signature is not None:
            path.write_bytes(signature)
        commit = Commit.decode((self.folder() / layout.COMMIT).read_bytes(), "COMMIT")
        changed = replace(commit, signature=None if signature is None else sha256_of(signature))
        (self.folder() / layout.COMMIT).write_bytes(changed.encode())


def policy(keeper: Keeper, **verify: Any) -> SecurityPolicy:
    verify = verify or {"keys": [TRAINER]}
    return SecurityPolicy(seal=Seal(recipients=[keeper]), verify=Verify(**verify))


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Root:
    root = Root(tmp_path_factory.mktemp("refusals") / "run", Keeper())
    signing = SecurityPolicy(seal=Seal(recipients=[root.keeper]), sign=Sign(key=signer("trainer")))
    with Checkpointer(root.path, security=signing) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.full((3,), float(step))}).result(timeout_s=60)
    return root


@pytest.fixture
def root(pristine: Root, tmp_path: Path) -> Root:
    keeper = Keeper()
    shutil.copytree(pristine.path, tmp_path / "run")
    return Root(tmp_path / "run", keeper)


def check_refused(root: Root, words: str, *, reaches: int | None = 1, **verify: Any) -> None:
    """The newest checkpoint is refused, by itself and on the way to an older one.

    Args:
        words: of which the error is to be.
        reaches: the step that is restored in its place; None: nothing is.
    """
    with Checkpointer(root.path, security=policy(root.keeper, **verify)) as checkpointer:
        tensor = torch.zeros(3)
        with pytest.raises(IntegrityError, match=words):
            checkpointer.restore({"w": tensor}, step=2)
        assert torch.equal(tensor, torch.zeros(3))
        assert root.keeper.unwraps == []
        if reaches is None:
            with pytest.raises(IntegrityError):
                checkpointer.restore({"w": tensor})
            assert root.keeper.unwraps == []
            return
        restored = checkpointer.restore({"w": tensor})
        assert restored is not None
        assert restored.step == reaches
        assert [step for step, _ in restored.skipped] == [2]
        assert all(context.step == 1 for context in root.keeper.unwraps)


def test_what_these_tests_change_is_accepted_before(root: Root) -> None:
    with Checkpointer(root.path, security=policy(root.keeper)) as checkpointer:
        restored = checkpointer.restore({"w": torch.zeros(3)})
        assert restored is not None
        assert restored.step == 2
        assert restored.state["w"].tolist() == [2.0, 2.0, 2.0]
    assert root.keeper.unwraps
    root.put((root.folder() / layout.SIGNATURE).read_bytes())
    root.put(signed(root, root.payload()))
    with Checkpointer(root.path, security=policy(root.keeper)) as checkpointer:
        restored = checkpointer.restore({"w": torch.zeros(3)})
        assert restored is not None
        assert restored.step == 2


# ------------------------------------------------------------------------------------------- the envelope


def signed(root: Root, payload: bytes, *, by: str = "trainer", kind: str = IN_TOTO) -> bytes:
    """A bundle over a payload; of the newest checkpoint's in all else."""
    bundle = root.bundle()
    signature = signer(by).sign(pae(kind, payload), within_s=9)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    return json.dumps(bundle).encode()


def changed(change: Callable[[Any], None]) -> Callable[[Root], bytes]:
    """Its bundle with a change that nobody signed."""

    def change_it(root: Root) -> bytes:
        bundle = root.bundle()
        change(bundle)
        return json.dumps(bundle).encode()

    return change_it


def replaced(old: bytes, new: bytes) -> Callable[[Root], bytes]:
    def replace_it(root: Root) -> bytes:
        whole = json.dumps(root.bundle()).encode()
        assert whole.count(old) == 1
        return whole.replace(old, new)

    return replace_it


def flipped(root: Root) -> bytes:
    bundle = root.bundle()
    value = bytearray(base64.b64decode(bundle["dsseEnvelope"]["signatures"][0]["sig"]))
    value[-1] ^= 1
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(value).decode()
    return json.dumps(bundle).encode()


def of_another_curve(root: Root) -> bytes:
    """A P-384 signature under the name of the P-256 key that is trusted."""
    bundle = root.bundle()
    value = signer("thief", "P-384").sign(pae(IN_TOTO, root.payload()), within_s=9)
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(value).decode()
    return json.dumps(bundle).encode()


def certified_on(curve: ec.EllipticCurve) -> Callable[[Root], bytes]:
    def certify(root: Root) -> bytes:
        key = ec.derive_private_key(7, curve)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "thief")])
        now = dt.datetime(2027, 1, 1, tzinfo=dt.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(now)
            .not_valid_after(now + dt.timedelta(days=1))
            .sign(key, hashes.SHA256())
        )
        return with_certificates([certificate.public_bytes(Encoding.DER)])(root)

    return certify


def with_certificates(certificates: list[bytes]) -> Callable[[Root], bytes]:
    chain = {"certificates": [{"rawBytes": base64.b64encode(each).decode()} for each in certificates]}
    return changed(
        lambda each: each.update(verificationMaterial={"x509CertificateChain": chain, "tlogEntries": []})
    )


def twice_signed(bundle: Any) -> None:
    bundle["dsseEnvelope"]["signatures"] *= 2


ENVELOPES: dict[str, tuple[Callable[[Root], bytes | None], str]] = {
    "unsigned": (lambda root: None, "it is signed by nobody"),
    "foreign key": (
        lambda root: signed(root, root.payload(), by="thief"), f"the signature by {TRAINER.id} is wrong",
    ),
    "foreign key by its own name": (
        changed(lambda each: each["verificationMaterial"]["publicKey"].update(hint=key_of("thief").id)),
        f"is by the key {key_of('thief').id}, not known here",
    ),
    "flipped bit": (flipped, "signature .* (is wrong|is not an ECDSA signature)"),
    "edited payload": (
        changed(
            lambda each: each["dsseEnvelope"].update(
                payload=base64.b64encode(b'{"_type":"nonsense"}').decode()
            )
        ),
        "the signature by .* is wrong",
    ),
    "wrong curve": (of_another_curve, f"the signature by {TRAINER.id} is wrong"),
    "a certificate on a curve that is none of the three": (
        certified_on(ec.SECP256K1()), "curve secp256k1 is not one",
    ),
    "a certificate that nobody knows": (certified_on(ec.SECP256R1()), "neither it nor an authority is known"),
    "a certificate that is none": (with_certificates([b"\x30\x03abc"]), "certificate of .* is not X"),
    "wrong payload type": (
        changed(lambda each: each["dsseEnvelope"].update(payloadType="application/json")),
        "the payload type of .* is 'application/json'",
    ),
    "signed as another payload type": (
        lambda root: signed(root, root.payload(), kind="application/vnd.strongroom.launch+json"),
        "the signature by .* is wrong",
    ),
    "two signatures": (changed(twice_signed), "has 2 signatures; exactly one is read"),
    "no signature": (
        changed(lambda each: each["dsseEnvelope"].update(signatures=[])), "has 0 signatures",
    ),
    "an empty signature": (
        changed(lambda each: each["dsseEnvelope"]["signatures"][0].update(sig="")),
        "is not an ECDSA signature in DER",
    ),
    "another media type": (
        changed(lambda each: each.update(mediaType="application/json")), "the media type of",
    ),
    "an unknown member": (changed(lambda each: each.update(more=1)), "has the member 'more'"),
    "a member twice": (
        replaced(b'"mediaType":', b'"mediaType": "x", "mediaType":'), "names the member 'mediaType' twice",
    ),
    "a huge number": (
        replaced(b'"tlogEntries": []', b'"tlogEntries": [' + b"9" * 5000 + b"]"), "is not below 2\\^53",
    ),
    "a fraction": (replaced(b'"tlogEntries": []', b'"tlogEntries": [1.5]'), "not an integer"),
    "deep nesting": (
        replaced(b'"tlogEntries": []', b'"tlogEntries": ' + b"[" * 500 + b"]" * 500), "nests .* deep",
    ),
    "half of a character": (
        replaced(b'"tlogEntries": []', rb'"tlogEntries": ["\ud800"]'), "is not valid Unicode",
    ),
    "a byte-order mark": (
        lambda root: b"\xef\xbb\xbf" + json.dumps(root.bundle()).encode(), "byte-order mark",
    ),
    "bytes behind the end": (lambda root: json.dumps(root.bundle()).encode() + b"{}", "is not JSON"),
    "cut short": (lambda root: json.dumps(root.bundle()).encode()[:-9], "is not JSON"),
    "empty": (lambda root: b"", "is not JSON"),
    "longer than any": (lambda root: b" " * (66 << 20), "at most"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENVELOPES)
def test_a_signature_file_that_is_wrong(case: str, root: Root) -> None:
    change, words = ENVELOPES[case]
    root.put(change(root))
    check_refused(root, words)


def test_a_signature_that_is_another_than_the_commit_pins(root: Root) -> None:
    (root.folder() / layout.SIGNATURE).write_bytes(signed(root, root.payload()))
    check_refused(root, "signature.json has digest .* and COMMIT pins")


def test_a_signature_that_is_gone(root: Root) -> None:
    (root.folder() / layout.SIGNATURE).unlink()
    check_refused(root, "signature.json is absent, and COMMIT pins it")


# ------------------------------------------------------------------------------------------ what was signed


def resources(statement: Any) -> list[Any]:
    found: list[Any] = statement["predicate"]["resources"]
    return found


def with_true_subject(statement: Any) -> None:
    digests = b"".join(bytes.fromhex(each["digest"]) for each in resources(statement))
    statement["subject"][0]["digest"]["sha256"] = sha256_of(digests).value.hex()


def said(change: Callable[[Any], object], *, is_consistent: bool = True) -> Callable[[Root], bytes]:
    """The statement with a change, under the trusted key's own signature."""

    def say(root: Root) -> bytes:
        statement = json.loads(root.payload())
        change(statement)
        if is_consistent:
            with_true_subject(statement)
        return signed(root, json.dumps(statement).encode())

    return say


def spelled(old: bytes, new: bytes) -> Callable[[Root], bytes]:
    def spell(root: Root) -> bytes:
        payload = root.payload()
        assert old in payload
        return signed(root, payload.replace(old, new, 1))

    return spell


def renamed(name: str) -> Callable[[Root], bytes]:
    """The last file in the list under another name."""
    return said(lambda statement: resources(statement)[-1].update(name=name))


def added(name: str) -> Callable[[Root], bytes]:
    def add(statement: Any) -> None:
        listed = resources(statement)
        listed.append({"algorithm": "sha256", "digest": "0" * 64, "name": name})
        listed.sort(key=lambda each: each["name"])

    return said(add)


STATEMENTS: dict[str, tuple[Callable[[Root], bytes], str]] = {
    "another step": (lambda root: signed(root, root.payload(1)), "is over another checkpoint"),
    "the manifest is not listed": (
        said(lambda each: resources(each).pop(1 if resources(each)[0]["name"] != layout.MANIFEST else 0)),
        "does not list",
    ),
    "a file is missing": (said(lambda each: resources(each).pop()), "does not list .*, unlike the manifest"),
    "a file too many": (added("zzz.bin"), "lists zzz.bin, unlike the manifest"),
    "a file twice": (
        said(lambda each: resources(each).append(resources(each)[-1])), "twice",
    ),
    "another digest of a file": (
        said(lambda each: resources(each)[-1].update(digest="0" * 64)), "and the manifest as sha256:",
    ),
    "another digest of the manifest": (
        said(lambda each: next(one for one in resources(each) if one["name"] == layout.MANIFEST).update(
            digest="0" * 64)),
        "is over another checkpoint",
    ),
    "another subject": (
        said(lambda each: each["subject"][0]["digest"].update(sha256="0" * 64), is_consistent=False),
        "is inconsistent",
    ),
    "two subjects": (said(lambda each: each["subject"].append(each["subject"][0])), "has 2 subjects"),
    "nothing is listed": (said(lambda each: resources(each).clear()), "lists no file"),
    "another predicate": (
        said(lambda each: each.update(predicateType="https://slsa.dev/provenance/v1")), "the predicate type",
    ),
    "another type of statement": (
        said(lambda each: each.update(_type="https://in-toto.io/Statement/v0.1")), "the type of the stat",
    ),
    "an unknown member": (said(lambda each: each.update(more=1)), "the member 'more'"),
    "a downgraded digest of a file": (
        said(lambda each: resources(each)[-1].update(algorithm="md5")), "md5",
    ),
    "a downgraded digest of everything": (
        said(lambda each: each["predicate"]["serialization"].update(hash_type="sha1")), "sha1",
    ),
    "another method": (
        said(lambda each: each["predicate"]["serialization"].update(method="shards")), "shards",
    ),
    "a digest that is too short": (
        said(lambda each: resources(each)[-1].update(digest="00"), is_consistent=False), "digest",
    ),
    "climbing out": (renamed("../../etc/passwd"), "is not a safe path"),
    "an absolute path": (renamed("/etc/passwd"), "is not a safe path"),
    "a backslash": (renamed("..\\x"), "is not a safe path"),
    "a hidden name": (renamed(".bashrc"), "is not a safe path"),
    "an empty part": (renamed("z//x"), "is not a safe path"),
    "a zero character": (renamed("zzz\0.bin"), "is not a safe path"),
    "an empty name": (renamed(""), "is not a safe path"),
    "a name that is no text": (
        said(lambda each: resources(each)[-1].update(name=7)), "is a number; expected a string",
    ),
    "two names that differ by case alone": (added("STATE.json.floe"), "which some file systems take for one"),
    "a member twice": (
        spelled(b'"_type":', b'"_type":"x","_type":'), "names the member '_type' twice",
    ),
    "a huge number": (
        spelled(b'"allow_symlinks":false', b'"allow_symlinks":1' + b"0" * 5000), "is not below 2\\^53",
    ),
    "deep nesting": (
        spelled(b'"allow_symlinks":false', b'"allow_symlinks":' + b"[" * 9999 + b"]" * 9999), "nests .* deep",
    ),
    "no JSON": (lambda root: signed(root, b"\x80\x04K\x01."), "is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATEMENTS)
def test_a_statement_that_is_wrong_though_a_trusted_key_has_signed_it(case: str, root: Root) -> None:
    change, words = STATEMENTS[case]
    root.put(change(root))
    check_refused(root, words)


# -------------------------------------------------------------------------------------------- whose it is


def listed(tmp_path: Path, *, revoked: bool = False, **window: int) -> dict[str, Any]:
    """What a policy says that reads a list of trusted keys."""
    trust_list = TrustList(
        version=1,
        issued_at_ms=1,
        keys=(TrustedKey(key=TRAINER, name="trainer", **window),),
        revoked=(Revocation(id=TRAINER.id, reason="stolen", revoked_at_ms=1),) if revoked else (),
    )
    path = tmp_path / "trust.json"
    path.write_bytes(sign_trust_list(trust_list, [signer("root")]))
    return {"keys": [TRAINER], "trust": path, "trust_keys": [key_of("root")]}


def test_a_key_that_had_expired(root: Root, tmp_path: Path) -> None:
    check_refused(root, r"\(trainer\) expired at", reaches=None, **listed(tmp_path, not_after_ms=1000))


def test_a_key_that_is_not_good_yet(root: Root, tmp_path: Path) -> None:
    check_refused(root, r"\(trainer\) is good from", reaches=None, **listed(tmp_path, not_before_ms=2**52))


def test_a_key_that_is_revoked(root: Root, tmp_path: Path) -> None:
    check_refused(root, r"is revoked \(stolen\)", reaches=None, **listed(tmp_path, revoked=True))


def test_a_key_that_is_not_trusted(root: Root) -> None:
    check_refused(root, f"{TRAINER.id}, not known here", reaches=None, keys=[key_of("validator")])


def test_a_threshold_that_is_not_met(root: Root) -> None:
    requirement = Threshold(2, [TRAINER, key_of("validator")])
    words = f"signatures by 2 of 2 keys are needed, and 1 found; missing: {key_of('validator').id}"
    check_refused(root, words, reaches=None, requirement=requirement)


# ------------------------------------------------------------------------------------------- anything at all


def test_any_bytes_for_a_signature_are_refused_as_such(root: Root) -> None:
    """Nothing but our own errors, whatever byte is changed; and never does what is changed pass."""
    from random import Random

    from strongroom.stores.open import open_store
    from strongroom_security.trust import ManifestTrust

    random = Random(20270101)
    whole = (root.folder() / layout.SIGNATURE).read_bytes()
    manifest = (root.folder() / "data" / layout.MANIFEST).read_bytes()
    trust = ManifestTrust(RequireSigner([TRAINER]))
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(random.choice((1, 1, 2, 40))):
            data[random.randrange(len(data))] = random.randrange(256)
        if random.random() < 0.2:
            del data[random.randrange(len(data)) :]
        if bytes(data) == whole:
            continue
        root.put(bytes(data))
        commit = Commit.decode((root.folder() / layout.COMMIT).read_bytes(), "COMMIT")
        with pytest.raises((IntegrityError, UntrustedError)):
            trust.judge(open_store(root.path), commit, manifest)
