"""What a first tier holds of one checkpoint besides its files, held against what ``COMMIT`` pins."""

from __future__ import annotations

import logging
from typing import Final

from strongroom import canonical, layout
from strongroom.canonical import Bounds
from strongroom.digest import sha256_of
from strongroom.errors import IntegrityError, ObjectNotFoundError
from strongroom.manifest import MANIFEST_BOUNDS, MAX_KEYRING_BYTES, Commit, Manifest
from strongroom.signing import MAX_SIGNATURE_BYTES
from strongroom.stores.base import Store

__all__ = ["open_checkpoint_files", "open_manifest", "read_record", "sidecars"]

_LOG: Final = logging.getLogger("strongroom")

_KEYRING_BOUNDS: Final = Bounds(length_bytes=MAX_KEYRING_BYTES, depth=4, items=8_000_000)


def open_checkpoint_files(source: Store, commit: Commit) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest, and everything small that belongs to a checkpoint by its key, ``COMMIT`` aside.

    Raises:
        IntegrityError: something is missing, or is not what ``COMMIT`` pins.
        UnsupportedFormatError: the manifest is whole and of another format.
        StoreError: it could not be read.
    """
    manifest, data = open_manifest(source, commit)
    return manifest, {layout.data_key(commit.name, layout.MANIFEST): data, **sidecars(source, commit)}


def open_manifest(source: Store, commit: Commit) -> tuple[Manifest, bytes]:
    """The manifest and its bytes, and nothing else: what may be read before anything is on record.

    Raises:
        IntegrityError, UnsupportedFormatError, StoreError: as `open_checkpoint_files`.
    """
    key = layout.data_key(commit.name, layout.MANIFEST)
    data = read_record(source, key, MANIFEST_BOUNDS.length_bytes)
    found = sha256_of(data)
    if not found.matches(commit.manifest):
        raise IntegrityError(
            f"{key} in {source.uri} has the digest {found}, and COMMIT pins {commit.manifest}"
        )
    manifest = Manifest.decode(data, key)
    if manifest.name != commit.name or manifest.run != commit.run:
        raise IntegrityError(f"{key} in {source.uri} says that it is {manifest.name} of run {manifest.run}")
    return manifest, data


def sidecars(source: Store, commit: Commit) -> dict[str, bytes]:
    """Signatures and keyrings by their keys; what ``COMMIT`` pins was held against it.

    Raises:
        IntegrityError: one that is needed is missing or damaged.
        StoreError: one could not be read.
    """
    name = commit.name
    found: dict[str, bytes] = {}
    if commit.signature is not None:
        key = layout.signature_key(name)
        found[key] = read_record(source, key, MAX_SIGNATURE_BYTES)
        if not sha256_of(found[key]).matches(commit.signature):
            raise IntegrityError(
                f"{key} in {source.uri} is not the signature that COMMIT pins: {commit.signature}"
            )
    for file_name in source.list_names(f"{name.folder}/{layout.SIGNATURES}"):
        key_id = layout.parse_signature_name(file_name)
        if key_id is not None:
            key = layout.further_signature_key(name, key_id)
            found[key] = read_record(source, key, MAX_SIGNATURE_BYTES)
    has_keyring = False
    for file_name in source.list_names(f"{name.folder}/{layout.KEYRINGS}"):
        generation = layout.parse_keyring_name(file_name)
        data = _keyring(source, commit, generation) if generation is not None else None
        if generation is not None and data is not None:
            found[layout.keyring_key(name, generation)] = data
            has_keyring = True
    if commit.keyring is not None and not has_keyring:
        raise IntegrityError(f"{name} in {source.uri} is sealed, and has no keyring that is whole")
    return found


def read_record(source: Store, key: str, limit_bytes: int) -> bytes:
    """A small object that has to be there.

    Raises:
        IntegrityError: it is not, or is too long.
        StoreError: it could not be read.
    """
    try:
        return source.read(key, limit_bytes=limit_bytes)
    except ObjectNotFoundError as error:
        raise IntegrityError(f"{key} is missing in {source.uri}") from error


def _keyring(source: Store, commit: Commit, generation: int) -> bytes | None:
    """A keyring; None where it is gone or damaged: others may be whole, and readers pass it over too."""
    key = layout.keyring_key(commit.name, generation)
    try:
        data = source.read(key, limit_bytes=MAX_KEYRING_BYTES)
        canonical.check_self_digest(canonical.decode(data, key, _KEYRING_BOUNDS), key)
        if generation == 1 and commit.keyring is not None and not sha256_of(data).matches(commit.keyring):
            raise IntegrityError(f"it is not the one that COMMIT pins: {commit.keyring}")
    except ObjectNotFoundError:
        return None
    except IntegrityError as error:
        _LOG.warning("%s in %s is damaged, and not copied: %s", key, source.uri, error)
        return None
    return data
