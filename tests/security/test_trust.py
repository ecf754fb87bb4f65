"""Whose word a checkpoint is: signatures that count, windows, revocations, and what came before them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from signed_checkpoints import AT_MS, RUN, Certifier, Written, key_of, launch, line, name_of, signer, write

from strongroom import layout
from strongroom.digest import sha256_of
from strongroom.errors import IntegrityError, ObjectNotFoundError, UntrustedError
from strongroom.manifest import CheckpointRef, LaunchSignature
from strongroom.signing import Trust, Trusted
from strongroom.stores.base import Store
from strongroom.stores.memory import MemoryStore
from strongroom_security import oms
from strongroom_security.certificates import Authority
from strongroom_security.requirements import (
    AllOf,
    AnyOf,
    Requirement,
    RequireSigner,
    Threshold,
    UnsafeAllowUnsigned,
)
from strongroom_security.signers.file import FileSigner
from strongroom_security.trust import ManifestTrust
from strongroom_security.trustlist import Revocation, TrustedKey, TrustList, UpTo, sign_trust_list

TRAINER = key_of("trainer")
NAME = "spiffe://example.org/trainer"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def judged(written: Written, trust: ManifestTrust) -> Trusted:
    return trust.judge(written.store, written.commit, written.data)


def by(*names: str) -> ManifestTrust:
    return ManifestTrust(RequireSigner([key_of(name) for name in names]))


def listing(*keys: TrustedKey, revoked: Revocation | None = None, **members: Any) -> TrustList:
    return TrustList(
        version=1,
        issued_at_ms=AT_MS,
        keys=tuple(sorted(keys, key=lambda each: each.key.id)),
        revoked=() if revoked is None else (revoked,),
        **members,
    )


def revoking(name: str, *up_to: CheckpointRef, run: str = RUN) -> TrustList:
    named = tuple(UpTo(run=run, checkpoint=ref) for ref in up_to)
    return listing(
        revoked=Revocation(id=key_of(name).id, reason="a laptop was stolen", revoked_at_ms=AT_MS, up_to=named)
    )


class Counting(MemoryStore):
    """Remembers what was read, listed and not found."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def read(self, key: str, *, limit_bytes: int) -> bytes:
        self.asked.append(key)
        return super().read(key, limit_bytes=limit_bytes)

    def list_names(self, prefix: str) -> list[str]:
        self.asked.append(f"{prefix}/")
        return super().list_names(prefix)


# ------------------------------------------------------------------------------------------ what is accepted


@pytest.mark.parametrize("algorithm", ("sha256", "blake3"))
def test_a_checkpoint_that_the_right_key_has_signed_is_trusted(algorithm: Any, store: MemoryStore) -> None:
    written = write(store, signer("trainer"), algorithm=algorithm)
    trusted = judged(written, by("trainer"))
    assert trusted == Trusted(manifest=written.manifest, signers=(TRAINER.id,))


def test_the_seam_is_filled() -> None:
    assert isinstance(by("trainer"), Trust)


def test_one_signature_that_the_commit_pins_takes_one_read() -> None:
    store = Counting()
    written = write(store, signer("trainer"))
    judged(written, by("trainer", "validator"))
    assert store.asked == [layout.signature_key(written.commit.name)]


def test_any_accepted_curve_signs(store: MemoryStore) -> None:
    written = write(store, signer("trainer", "P-384"))
    judged(written, ManifestTrust(RequireSigner([key_of("trainer", "P-384")])))


@pytest.mark.parametrize("lists", ("manifest", "everything"))
@pytest.mark.parametrize("algorithm", ("sha256", "blake3"))
def test_a_list_is_of_the_manifest_alone_or_of_everything(
    lists: str, algorithm: Any, store: MemoryStore
) -> None:
    """The independent signer lists every file, whatever digest the manifest has."""
    written = write(store, None, algorithm=algorithm)
    names = [layout.MANIFEST, *([record.path for record in written.manifest.files] * (lists == "everything"))]
    resources = {
        name: oms_digest(store.read(layout.data_key(written.commit.name, name), limit_bytes=9999))
        for name in names
    }
    written.add(bundle_over(resources, "trainer"), TRAINER.id)
    judged(written, by("trainer"))


def oms_digest(data: bytes) -> bytes:
    from strongroom.digest import sha256_of

    return sha256_of(data).value


def bundle_over(resources: dict[str, bytes], name: str) -> bytes:
    from signed_checkpoints import bundle

    return bundle(oms.statement(resources), signer(name))


def test_a_threshold_counts_further_signatures(store: MemoryStore) -> None:
    written = write(store, signer("trainer"))
    trust = ManifestTrust(Threshold(2, [TRAINER, key_of("validator"), key_of("publisher")]))
    with pytest.raises(UntrustedError, match="signatures by 2 of 3 keys are needed, and 1 found"):
        judged(written, trust)
    written.add(written.sign(signer("publisher")), key_of("publisher").id)
    assert set(judged(written, trust).signers) == {TRAINER.id, key_of("publisher").id}


def test_a_further_signature_can_stand_for_a_writer_that_did_not_sign(store: MemoryStore) -> None:
    written = write(store, None)
    written.add(written.sign(signer("validator")), key_of("validator").id)
    assert judged(written, by("validator")).signers == (key_of("validator").id,)


def test_a_writer_that_is_not_known_here_does_not_spoil_what_another_vouches_for(store: MemoryStore) -> None:
    written = write(store, signer("somebody"))
    written.add(written.sign(signer("validator")), key_of("validator").id)
    assert judged(written, by("validator")).signers == (key_of("validator").id,)


@pytest.mark.parametrize("planted", ("junk", "stolen", "other step", "wrong name"))
def test_what_is_planted_among_further_signatures_is_told_and_spoils_nothing(
    planted: str, store: MemoryStore
) -> None:
    written = write(store, signer("trainer"))
    other = write(store, signer("trainer"), step=9)
    data = {
        "junk": b"{",
        "stolen": written.sign(signer("thief"), hint=key_of("validator").id),
        "other step": other.sign(signer("validator")),
        "wrong name": written.sign(signer("trainer")),
    }[planted]
    written.add(data, key_of("validator").id)
    trust = ManifestTrust(Threshold(2, [TRAINER, key_of("validator"), key_of("publisher")]))
    with pytest.raises(UntrustedError) as caught:
        judged(written, trust)
    assert layout.further_signature_key(written.commit.name, key_of("validator").id) in str(caught.value)
    written.add(written.sign(signer("publisher")), key_of("publisher").id)
    assert len(judged(written, trust).signers) == 2


def test_one_key_counts_once_wherever_its_signatures_stand(store: MemoryStore) -> None:
    written = write(store, signer("trainer"))
    written.add(written.sign(signer("trainer")), TRAINER.id)
    with pytest.raises(UntrustedError, match="and 1 found"):
        judged(written, ManifestTrust(Threshold(2, [TRAINER, key_of("validator")])))


def test_a_listed_key_that_is_not_required_does_not_count(store: MemoryStore) -> None:
    trust_list = listing(TrustedKey(key=key_of("intern"), name="intern"))
    written = write(store, signer("intern"))
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=trust_list)
    with pytest.raises(UntrustedError, match="is trusted, and its signature is not one of those needed"):
        judged(written, trust)


def test_a_store_that_cannot_be_asked_is_no_verdict(store: MemoryStore) -> None:
    from strongroom.errors import StoreUnavailableError

    class Silent(MemoryStore):
        def read(self, key: str, *, limit_bytes: int) -> bytes:
            raise StoreUnavailableError("out of reach")

    written = write(store, signer("trainer"))
    with pytest.raises(StoreUnavailableError):
        by("trainer").judge(Silent(), written.commit, written.data)


# ----------------------------------------------------------------------------------------- what is unsigned


def test_what_nobody_has_signed_is_refused(store: MemoryStore) -> None:
    with pytest.raises(
        UntrustedError, match=f"a signature by {TRAINER.id} is needed; it is signed by nobody"
    ):
        judged(write(store, None), by("trainer"))


def test_what_nobody_has_signed_passes_loudly_where_that_is_allowed(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    trust = ManifestTrust(UnsafeAllowUnsigned(RequireSigner([TRAINER])))
    written = write(store, None)
    for _ in range(2):
        caplog.clear()
        assert judged(written, trust) == Trusted(manifest=written.manifest, signers=())
        assert f"UNSAFE: {written.commit.name} of run {RUN} is signed by nobody" in caplog.text
    caplog.clear()
    trust.judge_launch(launch(None))
    assert "UNSAFE: launch 1" in caplog.text


def test_what_is_wrongly_signed_is_refused_even_where_unsigned_is_allowed(store: MemoryStore) -> None:
    trust = ManifestTrust(UnsafeAllowUnsigned(RequireSigner([TRAINER])))
    with pytest.raises(UntrustedError, match="not known here"):
        judged(write(store, signer("thief")), trust)
    with pytest.raises(UntrustedError, match=r"signature by [0-9a-f]+ is wrong"):
        written = write(store, None, step=11)
        written.add(written.sign(signer("thief"), hint=TRAINER.id), TRAINER.id)
        judged(written, trust)
    with pytest.raises(UntrustedError):
        trust.judge_launch(launch(signer("thief")))
    judged(write(store, signer("trainer"), step=12), trust)
    trust.judge_launch(launch(signer("trainer")))


# ------------------------------------------------------------------------------------------------ authorities


@pytest.fixture(scope="session")
def certifier() -> Certifier:
    return Certifier()


def authority(certifier: Certifier) -> Authority:
    return Authority.read(certifier.pem, [NAME])


def test_a_certificate_from_an_authority_counts(certifier: Certifier, store: MemoryStore) -> None:
    written = write(store, certifier.signer("certified"))
    trust = ManifestTrust(RequireSigner([authority(certifier)]))
    assert judged(written, trust).signers == (key_of("certified").id,)
    trust.judge_launch(launch(certifier.signer("certified")))


def test_a_certificate_in_another_name_or_from_another_authority_does_not(
    certifier: Certifier, store: MemoryStore
) -> None:
    trust = ManifestTrust(RequireSigner([authority(certifier)]))
    for step, by_whom in enumerate(
        (
            certifier.signer("certified", uri="spiffe://example.org/web"),
            Certifier("other authority").signer("certified"),
        )
    ):
        with pytest.raises(UntrustedError):
            judged(write(store, by_whom, step=step), trust)
        with pytest.raises(UntrustedError):
            trust.judge_launch(launch(by_whom))


def test_a_certificate_counts_for_what_was_made_while_it_was_valid(
    certifier: Certifier, store: MemoryStore
) -> None:
    trust = ManifestTrust(RequireSigner([authority(certifier)]))
    year_ms = 366 * 24 * 3600 * 1000
    for step, created_at_ms in enumerate((AT_MS - year_ms, AT_MS + year_ms)):
        written = write(store, certifier.signer("certified"), step=step, created_at_ms=created_at_ms)
        with pytest.raises(UntrustedError, match="valid from 2027"):
            judged(written, trust)
        with pytest.raises(UntrustedError, match="valid from 2027"):
            trust.judge_launch(launch(certifier.signer("certified"), created_at_ms=created_at_ms))


def test_an_authoritys_signature_is_found_among_further_ones(
    certifier: Certifier, store: MemoryStore
) -> None:
    written = write(store, signer("trainer"))
    trust = ManifestTrust(AllOf(RequireSigner([TRAINER]), RequireSigner([authority(certifier)])))
    with pytest.raises(UntrustedError, match=authority(certifier).id):
        judged(written, trust)
    certified = certifier.signer("certified")
    written.add(written.sign(certified), certified.public_key.id)
    assert set(judged(written, trust).signers) == {TRAINER.id, certified.public_key.id}


def test_an_authority_counts_once_however_many_keys_it_has_certified(
    certifier: Certifier, store: MemoryStore
) -> None:
    written = write(store, certifier.signer("certified"))
    other = certifier.signer("certified too")
    written.add(written.sign(other), other.public_key.id)
    with pytest.raises(UntrustedError, match="and 1 found"):
        judged(written, ManifestTrust(Threshold(2, [authority(certifier), TRAINER])))


def test_a_key_that_is_required_and_certified_counts_once(certifier: Certifier, store: MemoryStore) -> None:
    written = write(store, certifier.signer("trainer"))
    written.add(written.sign(certifier.signer("trainer")), TRAINER.id)
    with pytest.raises(UntrustedError, match="and 1 found"):
        judged(written, ManifestTrust(Threshold(2, [authority(certifier), TRAINER])))


def test_a_certified_key_that_is_required_itself_needs_no_authority(
    certifier: Certifier, store: MemoryStore
) -> None:
    written = write(store, certifier.signer("trainer", until=2028), created_at_ms=AT_MS + 10**12)
    assert judged(written, by("trainer")).signers == (TRAINER.id,)
    by("trainer").judge_launch(launch(certifier.signer("trainer")))


def test_a_flood_of_further_signatures_is_read_in_part_and_told(
    certifier: Certifier, store: MemoryStore
) -> None:
    counting = Counting()
    written = write(counting, None)
    for number in range(80):
        written.add(b"{", f"{number:064x}")
    with pytest.raises(UntrustedError, match="holds 80 more; the first 64 were looked at"):
        judged(written, ManifestTrust(RequireSigner([authority(certifier)])))
    assert len(counting.asked) < 70


# ------------------------------------------------------------------------------------------ windows, expiry


@pytest.mark.parametrize(
    ("first", "end", "is_good"),
    ((None, None, True), (AT_MS, AT_MS + 1, True), (None, AT_MS, False), (AT_MS + 1, None, False)),
)
def test_a_window_is_judged_at_the_manifests_time(
    first: int | None, end: int | None, is_good: bool, store: MemoryStore
) -> None:
    window = listing(TrustedKey(key=TRAINER, name="trainer", not_before_ms=first, not_after_ms=end))
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=window, now_ms=lambda: AT_MS + 10**12)
    written = write(store, signer("trainer"))
    if is_good:
        judged(written, trust)
        trust.judge_launch(launch(signer("trainer")))
        return
    with pytest.raises(UntrustedError, match=rf"key {TRAINER.id} \(trainer\) (expired|is good from)"):
        judged(written, trust)
    with pytest.raises(UntrustedError, match=r"expired|is good from"):
        trust.judge_launch(launch(signer("trainer")))


def test_another_ones_signature_can_take_the_place_of_an_expired_ones(store: MemoryStore) -> None:
    window = listing(TrustedKey(key=TRAINER, name="trainer", not_after_ms=AT_MS))
    trust = ManifestTrust(RequireSigner([TRAINER, key_of("validator")]), trust_list=window)
    written = write(store, signer("trainer"))
    written.add(written.sign(signer("validator")), key_of("validator").id)
    assert judged(written, trust).signers == (key_of("validator").id,)


def test_an_expired_list_counts_and_is_told(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    now = [AT_MS + 99]
    trust = ManifestTrust(
        RequireSigner([TRAINER]), trust_list=listing(expires_at_ms=AT_MS + 100), now_ms=lambda: now[0]
    )
    written = write(store, signer("trainer"))
    with caplog.at_level(logging.WARNING, logger="strongroom"):
        judged(written, trust)
        assert "expired" not in caplog.text
        now[0] += 1
        judged(written, trust)
        judged(written, trust)
    assert caplog.text.count("the list of trusted keys (version 1) has expired") == 1


# ---------------------------------------------------------------------------------------------- revocations

POSITIONS = ((1, 10), (1, 20), (2, 15), (2, 30), (3, 40))


def test_a_revoked_keys_signature_counts_for_nothing_whenever_it_says_it_was_made(store: MemoryStore) -> None:
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=revoking("trainer"))
    written = write(store, signer("trainer"), created_at_ms=1)
    with pytest.raises(UntrustedError, match=rf"{TRAINER.id} is revoked \(a laptop was stolen\)"):
        judged(written, trust)


def test_a_revoked_authority_takes_all_it_has_certified_with_it(
    certifier: Certifier, store: MemoryStore
) -> None:
    whole = authority(certifier)
    for revoked in (whole.id, key_of("certified").id):
        trust_list = listing(revoked=Revocation(id=revoked, reason="broken into", revoked_at_ms=AT_MS))
        trust = ManifestTrust(RequireSigner([whole]), trust_list=trust_list)
        with pytest.raises(UntrustedError, match=f"{revoked} is revoked"):
            judged(write(MemoryStore(), certifier.signer("certified")), trust)
        with pytest.raises(UntrustedError, match=f"{revoked} is revoked"):
            trust.judge_launch(launch(certifier.signer("certified")))


def test_a_named_checkpoint_and_what_it_came_from_stay_good(store: MemoryStore) -> None:
    written = line(store, signer("trainer"), POSITIONS)
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=revoking("trainer", written[3].commit.ref))
    for order in (range(5), reversed(range(5))):
        for place in order:
            if place <= 3:
                judged(written[place], trust)
            else:
                with pytest.raises(UntrustedError, match="this is neither step 30"):
                    judged(written[place], trust)


def test_a_thief_cannot_sign_a_place_below_the_named_checkpoint(store: MemoryStore) -> None:
    """Whoever has the key can sign any position; only what the line pins stays good."""
    written = line(store, signer("trainer"), POSITIONS)
    forged = [
        write(store, signer("trainer"), launch=1, step=15, parent=written[0].commit.ref),
        write(MemoryStore(), signer("trainer"), launch=1, step=20, parent=written[0].commit.ref,
              files={"state.json": b"evil"}),
    ]  # fmt: skip
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=revoking("trainer", written[3].commit.ref))
    for each in forged:
        with pytest.raises(UntrustedError, match="nor an ancestor"):
            trust.judge(store, each.commit, each.data) if each.store is store else judged(each, trust)
    judged(written[1], trust)


def test_the_line_is_followed_as_far_as_its_manifests_are_there(store: MemoryStore) -> None:
    written = line(store, signer("trainer"), POSITIONS)
    gone = layout.data_key(written[1].commit.name, layout.MANIFEST)
    named = revoking("trainer", written[3].commit.ref)
    for damage in (None, b"not the manifest"):
        store.delete(gone)
        if damage is not None:
            store.put(gone, damage)
        trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=named)
        # The one whose manifest is gone is still pinned by its child.
        for place in (3, 2, 1):
            judged(written[place], trust)
        with pytest.raises(UntrustedError, match=r"what step 20 .* came from cannot be told"):
            judged(written[0], trust)
    both = revoking("trainer", written[3].commit.ref, written[0].commit.ref)
    judged(written[0], ManifestTrust(RequireSigner([TRAINER]), trust_list=both))


def test_a_checkpoint_of_another_run_is_not_named(store: MemoryStore) -> None:
    written = line(store, signer("trainer"), POSITIONS)
    trust = ManifestTrust(
        RequireSigner([TRAINER]), trust_list=revoking("trainer", written[3].commit.ref, run="run-b")
    )
    with pytest.raises(UntrustedError, match="no checkpoint of this run is named"):
        judged(written[1], trust)


def test_following_a_line_reads_each_manifest_once(store: MemoryStore) -> None:
    counting = Counting()
    written = line(counting, signer("trainer"), [(1, step) for step in range(30)])
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=revoking("trainer", written[-1].commit.ref))
    for each in written:
        judged(each, trust)
    manifests = [key for key in counting.asked if key.endswith(layout.MANIFEST)]
    assert len(manifests) == len(set(manifests)) == 29


def test_another_copy_of_the_root_is_asked_itself(store: MemoryStore) -> None:
    written = line(store, signer("trainer"), POSITIONS)
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=revoking("trainer", written[3].commit.ref))
    empty = MemoryStore("copy")
    copied = layout.signature_key(written[0].commit.name)
    empty.put(copied, store.read(copied, limit_bytes=9999))
    with pytest.raises(UntrustedError):
        trust.judge(empty, written[0].commit, written[0].data)
    judged(written[0], trust)


def test_a_revoked_keys_launches_are_good_up_to_that_of_a_named_checkpoint(store: MemoryStore) -> None:
    written = line(store, signer("trainer"), POSITIONS)
    trust = ManifestTrust(
        RequireSigner([TRAINER]),
        trust_list=revoking("trainer", written[0].commit.ref, written[2].commit.ref),
    )
    trust.judge_launch(launch(signer("trainer"), 1))
    trust.judge_launch(launch(signer("trainer"), 2))
    with pytest.raises(UntrustedError, match=r"is revoked .* and its launches are good up to 2"):
        trust.judge_launch(launch(signer("trainer"), 3))
    with pytest.raises(UntrustedError, match=r"is revoked \(a laptop was stolen\)$"):
        trust.judge_launch(launch(signer("trainer"), 1, run="run-b"))


# -------------------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize(
    "requirement",
    (RequireSigner([TRAINER]), Threshold(2, [TRAINER, key_of("validator")]), AllOf(RequireSigner([TRAINER]))),
    ids=lambda each: type(each).__name__,
)
def test_a_launch_needs_one_of_the_keys_whatever_a_checkpoint_needs(requirement: Requirement) -> None:
    trust = ManifestTrust(requirement)
    trust.judge_launch(launch(signer("trainer")))
    with pytest.raises(UntrustedError, match="launch 1 of run run-a is signed by nobody"):
        trust.judge_launch(launch(None))
    with pytest.raises(UntrustedError, match="not known here"):
        trust.judge_launch(launch(signer("thief")))


def test_a_launch_by_a_key_that_is_listed_and_not_required_is_refused() -> None:
    trust = ManifestTrust(
        RequireSigner([TRAINER]), trust_list=listing(TrustedKey(key=key_of("intern"), name="intern"))
    )
    with pytest.raises(UntrustedError, match="is not one of those needed"):
        trust.judge_launch(launch(signer("intern")))


def test_any_change_to_a_launch_is_a_wrong_signature() -> None:
    good = launch(signer("trainer"), 2)
    assert good.signature is not None
    for changed in (
        replace(good, launch=3),
        replace(good, run="run-b"),
        replace(good, created_at_ms=AT_MS + 1),
        replace(good, deadline_s=601),
        replace(good, parent=CheckpointRef(launch=1, step=1, attempt="0" * 16, manifest=write_digest())),
        replace(good, signature=replace(good.signature, value=good.signature.value[:-1] + b"\0")),
    ):
        with pytest.raises(UntrustedError, match=f"the signature by {TRAINER.id} is wrong"):
            by("trainer").judge_launch(changed)


def write_digest() -> Any:
    from strongroom.digest import sha256_of

    return sha256_of(b"")


def test_reading_a_pinned_signature_that_is_gone_is_damage(store: Store) -> None:
    written = write(store, signer("trainer"))
    store.delete(layout.signature_key(written.commit.name))
    with pytest.raises(IntegrityError, match="is absent, and COMMIT pins it") as caught:
        judged(written, by("trainer"))
    assert not isinstance(caught.value, ObjectNotFoundError)


# ---------------------------------------------------------------------- what is true, and of something else


def test_a_signed_manifest_under_another_checkpoints_name_is_refused(store: MemoryStore) -> None:
    """An old checkpoint, whole and signed, in the place of a new one."""
    written = write(store, signer("trainer"))
    signature = store.read(layout.signature_key(written.commit.name), limit_bytes=9999)
    for commit in (
        replace(written.commit, name=name_of(7, 70)),
        replace(written.commit, run="run-b"),
    ):
        elsewhere = MemoryStore()
        elsewhere.put(layout.signature_key(commit.name), signature)
        with pytest.raises(IntegrityError, match=r"says that it is of step 10 .* and COMMIT is of"):
            by("trainer").judge(elsewhere, commit, written.data)


def test_a_pinned_signature_over_other_files_refuses_whoever_else_has_signed(store: MemoryStore) -> None:
    manifest = write(MemoryStore(), None).data
    resources = {layout.MANIFEST: oms_digest(manifest), "state.json": oms_digest(b"{}")}
    written = write(store, None, signature=bundle_over(resources, "trainer"))
    written.add(written.sign(signer("validator")), key_of("validator").id)
    with pytest.raises(UntrustedError, match=r"does not list 00000-00.safetensors, unlike the manifest"):
        judged(written, by("trainer", "validator"))


def test_a_manifest_that_was_exchanged_does_not_lead_the_line_elsewhere(store: MemoryStore) -> None:
    written = line(store, signer("trainer"), POSITIONS)
    forged = write(store, signer("trainer"), launch=1, step=5)
    key = layout.data_key(written[1].commit.name, layout.MANIFEST)
    store.delete(key)
    store.put(key, replace(written[1].manifest, parent=forged.commit.ref).encode())
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=revoking("trainer", written[3].commit.ref))
    with pytest.raises(UntrustedError, match="and its child pins"):
        judged(forged, trust)


def test_a_manifest_of_another_name_or_run_does_not_lead_the_line_elsewhere(store: MemoryStore) -> None:
    written = line(store, signer("trainer"), POSITIONS)
    other = name_of(9, 90)
    store.put(layout.data_key(other, layout.MANIFEST), written[3].data)
    named = CheckpointRef(launch=9, step=90, attempt=other.attempt, manifest=written[3].commit.manifest)
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=revoking("trainer", named))
    with pytest.raises(UntrustedError, match=r"cannot be told: .* is of step 30"):
        judged(written[1], trust)


def test_a_parent_that_is_not_older_ends_the_line(store: MemoryStore) -> None:
    later = write(store, signer("trainer"), launch=3, step=40)
    named = write(store, signer("trainer"), launch=2, step=30, parent=later.commit.ref)
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=revoking("trainer", named.commit.ref))
    judged(named, trust)
    with pytest.raises(UntrustedError, match="nor an ancestor"):
        judged(later, trust)
    with pytest.raises(UntrustedError, match="names a parent that is not older than itself"):
        judged(write(store, signer("trainer"), launch=1, step=1), trust)


def test_what_is_above_a_named_checkpoint_is_refused_without_following_its_line() -> None:
    counting = Counting()
    written = line(counting, signer("trainer"), POSITIONS)
    trust = ManifestTrust(RequireSigner([TRAINER]), trust_list=revoking("trainer", written[3].commit.ref))
    with pytest.raises(UntrustedError):
        judged(written[4], trust)
    assert not [key for key in counting.asked if key.endswith(layout.MANIFEST)]


def test_a_key_that_two_authorities_have_certified_counts_once(
    certifier: Certifier, store: MemoryStore
) -> None:
    other = Certifier("other authority")
    both = [Authority.read(each.pem, [NAME]) for each in (certifier, other)]
    written = write(store, certifier.signer("certified"))
    written.add(written.sign(other.signer("certified")), key_of("certified").id)
    with pytest.raises(UntrustedError, match="and 1 found"):
        judged(written, ManifestTrust(Threshold(2, both)))


def test_a_listed_key_with_a_certificate_counts_for_its_authority(
    certifier: Certifier, store: MemoryStore
) -> None:
    trust_list = listing(TrustedKey(key=key_of("certified"), name="certified"))
    trust = ManifestTrust(RequireSigner([authority(certifier)]), trust_list=trust_list)
    judged(write(store, certifier.signer("certified")), trust)


def test_a_manifest_that_the_commit_does_not_pin_is_refused(store: MemoryStore) -> None:
    written = write(store, signer("trainer"))
    with pytest.raises(IntegrityError, match="and COMMIT pins"):
        by("trainer").judge(store, written.commit, written.data + b" ")


# ---------------------------------------------------------------------------------- malformed certificates


@pytest.fixture
def of_version_10(certifier: Certifier) -> bytes:
    """A certificate of a version that there is not."""
    (der,) = certifier.signer("trainer").certificates
    at = der.index(bytes.fromhex("a003020102")) + 4
    return der[:at] + b"\x09" + der[at + 1 :]


@pytest.mark.parametrize("trust", ("key", "authority"))
def test_a_malformed_certificate_in_a_pinned_signature_is_damage(
    trust: str, of_version_10: bytes, certifier: Certifier, store: MemoryStore
) -> None:
    other = write(MemoryStore(), signer("trainer"))
    signature = signer("trainer").sign(b"", within_s=1.0)
    data = oms.encode_bundle(other.payload, signature, certificates=[of_version_10])
    written = write(store, None, signature=data)
    asked = by("trainer") if trust == "key" else ManifestTrust(RequireSigner([authority(certifier)]))
    with pytest.raises(IntegrityError, match=r"not X\.509"):
        judged(written, asked)


def test_a_malformed_certificate_in_a_launch_record_is_not_trusted(
    of_version_10: bytes, certifier: Certifier
) -> None:
    record = replace(
        launch(signer("trainer")),
        signature=LaunchSignature(
            key_id="0" * 64, value=signer("trainer").sign(b"", within_s=1.0), certificates=(of_version_10,)
        ),
    )
    for asked in (by("trainer"), ManifestTrust(RequireSigner([authority(certifier)]))):
        with pytest.raises(UntrustedError, match=r"not X\.509"):
            asked.judge_launch(record)


# ------------------------------------------------------------------------------------------ in a few digits


def test_a_fingerprint_tells_what_is_demanded_and_of_whom(certifier: Certifier) -> None:
    a, b, c = key_of("a"), key_of("b"), key_of("c")
    demanded: list[Requirement] = [
        RequireSigner([a]), RequireSigner([a, b]), Threshold(2, [a, b]), Threshold(2, [a, b, c]),
        Threshold(3, [a, b, c]), AllOf(RequireSigner([a]), RequireSigner([b])),
        AnyOf(RequireSigner([a]), RequireSigner([b])), UnsafeAllowUnsigned(RequireSigner([a])),
        RequireSigner([authority(certifier)]),
    ]  # fmt: skip
    told = [ManifestTrust(each).fingerprint for each in demanded]
    assert len(set(told)) == len(demanded)
    assert all(len(each) == 16 and int(each, 16) >= 0 for each in told)
    assert ManifestTrust(Threshold(2, [b, a])).fingerprint == told[2]
    assert ManifestTrust(AllOf(RequireSigner([b]), RequireSigner([a]))).fingerprint == told[5]


def test_a_fingerprint_tells_whose_list_counts_and_not_which_version() -> None:
    requirement = RequireSigner([key_of("trainer")])
    root, other = signer("root"), signer("other root")

    def verified(version: int, by: FileSigner, *names: str) -> TrustList:
        made = replace(listing(*(TrustedKey(key=key_of(name), name=name) for name in names)), version=version)
        return TrustList.verify(sign_trust_list(made, [by]), "it", [by.public_key])

    def told(found: TrustList | None, demanded: Requirement = requirement) -> str:
        return ManifestTrust(demanded, trust_list=found).fingerprint

    ours = told(verified(1, root, "a"))
    assert told(verified(2, root, "a", "b")) == ours
    assert len({ours, told(None), told(verified(1, other, "a"))}) == 3
    # Where the policy names no keys, all that are listed count, and the next list has others.
    one, two = verified(1, root, "a"), verified(2, root, "a", "b")
    assert told(one, RequireSigner(one.public_keys)) == told(two, RequireSigner(two.public_keys))
    assert told(one, RequireSigner(one.public_keys)) != ours


# ------------------------------------------------------------------------------------- whose signatures hold


def standing(written: Written, trust: ManifestTrust) -> set[str]:
    return set(trust.standing(written.store, written.commit, written.data))


def test_the_signatures_that_hold_are_told_whatever_is_demanded(store: MemoryStore) -> None:
    written = write(store, signer("trainer"))
    written.add(written.sign(signer("validator")), key_of("validator").id)
    written.add(written.sign(signer("stranger")), key_of("stranger").id)
    both = {key_of("trainer").id, key_of("validator").id}
    three = Threshold(3, [key_of("trainer"), key_of("validator"), key_of("auditor")])
    assert standing(written, ManifestTrust(three)) == both
    listed = listing(TrustedKey(key=key_of("validator"), name="validator"))
    assert standing(written, ManifestTrust(RequireSigner([TRAINER]), trust_list=listed)) == both
    assert standing(written, by("auditor")) == set()


def test_what_nobody_has_signed_has_no_signatures_that_hold(store: MemoryStore) -> None:
    assert standing(write(store, None), by("trainer")) == set()


def test_a_revoked_keys_signature_does_not_hold(store: MemoryStore) -> None:
    written = write(store, signer("trainer"))
    written.add(written.sign(signer("validator")), key_of("validator").id)
    trust = ManifestTrust(RequireSigner([TRAINER, key_of("validator")]), trust_list=revoking("trainer"))
    assert standing(written, trust) == {key_of("validator").id}


def test_a_certified_keys_signature_holds_by_its_own_id(certifier: Certifier, store: MemoryStore) -> None:
    written = write(store, certifier.signer("trainer"))
    written.add(written.sign(certifier.signer("second")), key_of("second").id)
    trust = ManifestTrust(RequireSigner([authority(certifier)]))
    assert standing(written, trust) == {key_of("trainer").id, key_of("second").id}


def test_a_pinned_signature_that_is_wrong_is_no_ground_to_sign_again(store: MemoryStore) -> None:
    written = write(store, signer("trainer"))
    other = write(MemoryStore(), signer("trainer"), step=7)
    with pytest.raises(IntegrityError, match="COMMIT pins"):
        by("trainer").standing(store, written.commit, other.data)
    with pytest.raises(IntegrityError, match="has digest"):
        by("trainer").standing(store, replace(written.commit, signature=sha256_of(b"")), written.data)
    store.delete(layout.signature_key(written.commit.name))
    with pytest.raises(IntegrityError, match="is absent"):
        standing(written, by("trainer"))
    wrong = oms.encode_bundle(
        written.payload, signer("trainer").sign(b"something else", within_s=1.0), key_id=TRAINER.id
    )
    with pytest.raises(UntrustedError, match="is wrong"):
        standing(write(MemoryStore(), None, signature=wrong), by("trainer"))
