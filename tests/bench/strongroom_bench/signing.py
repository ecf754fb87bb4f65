"""What signing and verifying a checkpoint cost by the number of its files: no shard is read for either."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Final

from strongroom import layout
from strongroom.digest import Digest, DigestAlgorithm, sha256_of
from strongroom.layout import CheckpointName
from strongroom.manifest import Commit, FileRecord, Manifest
from strongroom.stores.memory import MemoryStore
from strongroom_bench.figure import Figure
from strongroom_bench.keys import read_signer
from strongroom_bench.measure import seconds
from strongroom_bench.scale import Scale
from strongroom_security import RequireSigner
from strongroom_security.signers.generating import generate_key
from strongroom_security.signing import ManifestSigning
from strongroom_security.trust import ManifestTrust

__all__ = ["measure"]

_SHARDS: Final = (4, 64, 4096)
_NAME: Final = CheckpointName(launch=1, step=1, attempt="0" * 16)
_WITHIN_S: Final = 60.0


def measure(scale: Scale, folder: Path) -> list[Figure]:
    """Sign and judge manifests of so many shards, by both digests, with a key in a file."""
    (folder / "signing").mkdir()
    generate_key(folder / "signing" / "signer.pem")
    signer = read_signer(folder / "signing")
    signing = ManifestSigning(signer, within_s=_WITHIN_S)
    trust = ManifestTrust(RequireSigner([signer.public_key]))
    algorithms: tuple[DigestAlgorithm, ...] = ("sha256", "blake3")
    figures = [
        figure
        for algorithm in algorithms
        for shards in _SHARDS
        for figure in _figures(scale, signing, trust, algorithm, shards)
    ]
    (folder / "signing" / "signer.pem").unlink()
    return figures


def _figures(
    scale: Scale, signing: ManifestSigning, trust: ManifestTrust, algorithm: DigestAlgorithm, shards: int
) -> list[Figure]:
    files = _files(algorithm, shards)
    manifest = _manifest(algorithm, files)
    encoded = manifest.encode()
    bundle = signing.sign_checkpoint(encoded, files, within_s=_WITHIN_S)
    store = MemoryStore()
    store.put(layout.signature_key(_NAME), bundle)
    commit = _commit(encoded, manifest, bundle)
    work = {
        "sign": lambda: signing.sign_checkpoint(encoded, files, within_s=_WITHIN_S),
        "judge": lambda: trust.judge(store, commit, encoded),
    }
    taken = {word: [seconds(act) for _ in range(scale.rounds)] for word, act in work.items()}
    return [
        Figure(
            figure=f"to {word} a checkpoint of {shards} shards, {algorithm}",
            value=statistics.median(values),
            unit="s",
            runs=len(values),
            setting=f"P-256, a key in a file; a bundle of {len(bundle):,} bytes",
            spread={word: (min(values), max(values))},
        )
        for word, values in taken.items()
    ]


def _files(algorithm: DigestAlgorithm, shards: int) -> tuple[FileRecord, ...]:
    paths = [layout.shard_path(number, 0) for number in range(shards)]
    paths += [layout.INDEX, layout.PROVENANCE, layout.STATE]
    digest = Digest(algorithm, bytes(range(32)))
    return tuple(FileRecord(path=path, size_bytes=1 << 30, digest=digest) for path in sorted(paths))


def _manifest(algorithm: DigestAlgorithm, files: tuple[FileRecord, ...]) -> Manifest:
    return Manifest(
        run="bench",
        name=_NAME,
        parent=None,
        created_at_ms=0,
        algorithm=algorithm,
        world_size=1,
        files=files,
    )


def _commit(encoded: bytes, manifest: Manifest, bundle: bytes) -> Commit:
    return Commit(
        run="bench",
        name=_NAME,
        manifest=sha256_of(encoded),
        size_bytes=manifest.size_bytes,
        committed_at_ms=0,
        signature=sha256_of(bundle),
    )
