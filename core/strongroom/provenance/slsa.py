"""A checkpoint's provenance as a SLSA v1 predicate: training is the build, the checkpoint the product. Pure.

The predicate is that of slsa.dev/provenance/v1. Whoever signs says it of itself: the program that
trains is its own builder, so a statement like this reaches build level 1, or level 2 where a key signs that
the training program cannot use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from strongroom.provenance.records import Record, sha256_in, text_in, when

__all__ = ["BUILD_TYPE", "PREDICATE_TYPE", "predicate"]

PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"

BUILD_TYPE: Final = "urn:strongroom:training:v1"
"""What the parameters below mean is said in ``docs/reference/provenance.md``."""

BUILDER: Final = "urn:strongroom:builder:self"
"""The training program itself; a platform that vouches for its jobs has a URI of its own."""


def predicate(record: Record, *, builder: str = BUILDER) -> dict[str, Any]:
    """What is said of the checkpoint, without fractions: a number that has one is a text.

    Args:
        builder: URI of whoever vouches for how it was made.
    """
    code = record.section("code")
    manifest = record.manifest
    external: dict[str, Any] = {
        "hyperParameters": record.given.get("hyper_parameters", {}),
        "model": record.given.get("model"),
        "data": {name: value for name, value in record.told("data").items() if name != "cursor"},
        "entryPoint": (code.get("entry") or {}).get("name"),
    }
    internal: dict[str, Any] = {
        "architecture": record.collected.get("architecture"),
        "changes": code.get("changes"),
        "environment": dict(record.section("environment")),
        "launch": manifest.name.launch,
        "meshes": record.collected.get("meshes"),
        "retentionClass": manifest.retention_class,
        "worldSize": manifest.world_size,
    }
    metadata: dict[str, Any] = {
        "invocationId": manifest.run,
        # By the manifest, which is signed: nobody's word is on the time in COMMIT.
        "finishedOn": when(manifest.created_at_ms),
    }
    if record.began_at_ms is not None:
        metadata["startedOn"] = when(record.began_at_ms)
    found: dict[str, Any] = _exact(
        {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": _said(external),
                "internalParameters": _said(internal),
                "resolvedDependencies": list(_dependencies(record)),
            },
            "runDetails": {
                "builder": {"id": builder, "version": dict(record.producer)},
                "byproducts": list(_byproducts(record)),
                "metadata": metadata,
            },
        }
    )
    return found


def _dependencies(record: Record) -> Iterator[dict[str, Any]]:
    code, data = record.section("code"), record.told("data")
    commit = text_in(code.get("commit"))
    if commit is not None:
        repository = text_in(code.get("repository"))
        where = {"uri": f"git+{repository}@{commit}"} if repository and "://" in repository else {}
        yield {
            "name": "code",
            **where,
            "digest": {"gitCommit": commit},
            "annotations": _said({"branch": code.get("branch"), "isDirty": code.get("is_dirty")}),
        }
    entry = code.get("entry") or {}
    script = sha256_in(entry.get("digest"))
    if script is not None:
        yield {"name": f"entry point {entry.get('name')}", "digest": {"sha256": script}}
    digest = sha256_in(data.get("manifest_digest"))
    version = data.get("version")
    if digest is not None or version is not None:
        uri = text_in(data.get("uri"))
        yield {
            "name": "data",
            **({"uri": uri} if uri else {}),
            **({"digest": {"sha256": digest}} if digest else {}),
            **({} if digest or uri else {"uri": f"urn:strongroom:data:{version}"}),
            "annotations": _said({"version": version, "cursor": _cursor(record)}),
        }
    if record.container is not None:
        yield {"name": "container", "digest": {"sha256": record.container}}
    packages = sha256_in(record.section("environment").get("packages"))
    if packages is not None:
        yield {"name": "installed packages", "digest": {"sha256": packages}}
    parent = record.manifest.parent
    if parent is not None:
        yield {
            "name": "parent checkpoint",
            "uri": f"urn:strongroom:checkpoint:{record.manifest.run}:{parent.name.folder}",
            "digest": {"sha256": parent.manifest.value.hex()},
        }


def _byproducts(record: Record) -> Iterator[dict[str, Any]]:
    """What came of training beside the checkpoint: figures, and how far it had come."""
    annotations = _said(
        {
            "epoch": record.given.get("epoch", record.collected.get("epoch")),
            "metrics": dict(record.metrics),
            "step": record.manifest.name.step,
            "tags": list(record.tags),
        }
    )
    yield {
        "name": "checkpoint manifest",
        "uri": f"urn:strongroom:checkpoint:{record.manifest.run}:{record.manifest.name.folder}",
        "digest": {"sha256": record.commit.manifest.value.hex()},
        "annotations": annotations,
    }


def _cursor(record: Record) -> Any:
    return record.told("data").get("cursor", record.collected.get("cursor"))


def _said(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None and value not in ({}, [], "")}


def _exact(value: Any) -> Any:
    """The same without fractions, which two readers may round differently."""
    if isinstance(value, Mapping):
        return {name: _exact(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    return repr(value) if isinstance(value, float) else value
