"""A checkpoint's provenance as an OpenLineage run event, for data catalogues. Pure.

The event is that of openlineage.io/spec/2-0-2. A checkpoint is a dataset that one run of a job put out,
from data and from the checkpoint before it; the launch that saved it is the parent of that run. Facets that
the specification has no name for begin with ``strongroom_``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from strongroom._version import __version__
from strongroom.provenance.records import Record, text_in, when

__all__ = ["PRODUCER", "SCHEMA_URL", "run_event"]

PRODUCER: Final = f"urn:strongroom:{__version__}"

SCHEMA_URL: Final = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"

_FACETS: Final = "https://openlineage.io/spec/facets"
_OWN_FACET: Final = "urn:strongroom:openlineage:v1"
_IDS: Final = uuid.uuid5(uuid.NAMESPACE_URL, "urn:strongroom:run")
"""Run ids are UUIDs: each is made of its run's and checkpoint's names, so that a second event is the same."""


def run_event(record: Record) -> dict[str, Any]:
    """The event that says that the checkpoint is complete."""
    manifest = record.manifest
    job = {"namespace": "strongroom", "name": manifest.run}
    return {
        "eventType": "COMPLETE",
        "eventTime": when(record.commit.committed_at_ms),
        "producer": PRODUCER,
        "schemaURL": SCHEMA_URL,
        "run": {
            "runId": _id(manifest.run, manifest.name.folder),
            "facets": {
                "parent": _facet(
                    "1-2-0/ParentRunFacet.json#/$defs/ParentRunFacet",
                    run={"runId": _id(manifest.run, str(manifest.name.launch))},
                    job=job,
                ),
                **_engine(record),
                **_tags(record),
                "strongroom_provenance": _own(
                    "ProvenanceRunFacet",
                    {
                        "given": dict(record.given),
                        "collected": dict(record.collected),
                        "metrics": dict(record.metrics),
                        "producer": dict(record.producer),
                    },
                ),
            },
        },
        "job": {
            **job,
            "facets": {
                "jobType": _facet(
                    "2-0-4/JobTypeJobFacet.json#/$defs/JobTypeJobFacet",
                    processingType="BATCH",
                    integration="STRONGROOM",
                    jobType="TRAINING",
                ),
                **_source(record),
            },
        },
        "inputs": list(_inputs(record)),
        "outputs": [_output(record)],
    }


def _inputs(record: Record) -> Iterator[dict[str, Any]]:
    data = record.told("data")
    version = data.get("version", data.get("manifest_digest"))
    if data:
        where = text_in(data.get("uri"))
        yield {
            **(
                _place(where)
                if where
                else {"namespace": "strongroom", "name": text_in(data.get("name")) or "data"}
            ),
            "facets": {
                **({"version": _version(str(version))} if version is not None else {}),
                "strongroom_data": _own("DataDatasetFacet", data),
            },
        }
    parent = record.manifest.parent
    if parent is not None:
        yield {
            **_place(record.root, parent.name.folder),
            "facets": {"version": _version(str(parent.manifest))},
        }


def _output(record: Record) -> dict[str, Any]:
    manifest = record.manifest
    return {
        **_place(record.root, manifest.name.folder),
        "facets": {
            "version": _version(str(record.commit.manifest)),
            "strongroom_checkpoint": _own(
                "CheckpointDatasetFacet",
                {
                    "run": manifest.run,
                    "step": manifest.name.step,
                    "launch": manifest.name.launch,
                    "sizeBytes": record.commit.size_bytes,
                    "worldSize": manifest.world_size,
                    "isSealed": manifest.is_sealed,
                    "retentionClass": manifest.retention_class,
                },
            ),
        },
    }


def _engine(record: Record) -> dict[str, Any]:
    version = text_in(record.section("environment").get("torch")) or record.producer.get("torch")
    if version is None:
        return {}
    facet = _facet(
        "1-1-1/ProcessingEngineRunFacet.json#/$defs/ProcessingEngineRunFacet",
        name="PyTorch",
        version=version,
        openlineageAdapterVersion=__version__,
    )
    return {"processing_engine": facet}


def _tags(record: Record) -> dict[str, Any]:
    if not record.tags:
        return {}
    tags = [{"key": tag, "value": "true", "source": "USER"} for tag in record.tags]
    return {"tags": _facet("1-0-0/TagsRunFacet.json#/$defs/TagsRunFacet", tags=tags)}


def _source(record: Record) -> dict[str, Any]:
    """Where the code is; the facet asks for a URL, which a repository without a remote does not have."""
    code = record.section("code")
    repository, commit = text_in(code.get("repository")), text_in(code.get("commit"))
    if repository is None or commit is None or "://" not in repository:
        return {}
    said = {
        "type": "git",
        "url": repository,
        "repoUrl": repository,
        "version": commit,
        "branch": text_in(code.get("branch")),
        "path": text_in((code.get("entry") or {}).get("name")),
    }
    facet = _facet(
        "1-1-0/SourceCodeLocationJobFacet.json#/$defs/SourceCodeLocationJobFacet",
        **{name: value for name, value in said.items() if value is not None},
    )
    return {"sourceCodeLocation": facet}


def _place(uri: str, below: str = "") -> dict[str, str]:
    """A dataset's name as OpenLineage spells it: scheme and host, then the path."""
    parts = urlsplit(uri)
    path = f"{parts.path.rstrip('/')}/{below}" if below else parts.path
    if not parts.netloc:
        return {"namespace": parts.scheme or "file", "name": path or uri}
    # Whoever reads with a password reads it from elsewhere.
    host = parts.netloc.rpartition("@")[2]
    return {"namespace": f"{parts.scheme}://{host}", "name": path.lstrip("/") or "/"}


def _version(text: str) -> dict[str, Any]:
    return _facet(
        "1-0-1/DatasetVersionDatasetFacet.json#/$defs/DatasetVersionDatasetFacet", datasetVersion=text
    )


def _facet(schema: str, **members: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": f"{_FACETS}/{schema}", **members}


def _own(schema: str, members: Mapping[str, Any]) -> dict[str, Any]:
    return {**members, "_producer": PRODUCER, "_schemaURL": f"{_OWN_FACET}#{schema}"}


def _id(run: str, part: str) -> str:
    return str(uuid.uuid5(_IDS, f"{run}/{part}"))
