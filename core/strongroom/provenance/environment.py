"""What the program runs on: Python, torch, CUDA, frameworks, and a digest of all installed packages.

Nothing is imported that the program has not imported itself, and no accelerator is touched.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

__all__ = ["collect_environment", "packages_digest"]

_FRAMEWORKS: Final = (
    "accelerate", "apex", "bitsandbytes", "composer", "datasets", "deepspeed", "flash-attn", "jax",
    "lightning", "megatron-core", "mosaicml-streaming", "numpy", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "peft", "pytorch-lightning", "safetensors", "strongroom",
    "tokenizers", "torch", "torchao", "torchaudio", "torchdata", "torchtitan", "torchvision",
    "transformer-engine", "transformers", "triton", "trl", "xformers",
)  # fmt: skip
"""Packages that a change of the results is likely to come from."""


def collect_environment() -> dict[str, Any]:
    """Versions by name; a member is absent where there is nothing to tell."""
    packages = _installed()
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": packages_digest(packages.items()),
        "package_count": len(packages),
        "frameworks": {name: packages[name] for name in _FRAMEWORKS if name in packages},
    }
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    if version is not None:
        found["torch"] = str(getattr(torch, "__version__", ""))
        for name in ("cuda", "hip"):
            built_with = getattr(version, name, None)
            if built_with is not None:
                found[name] = str(built_with)
    return found


def packages_digest(packages: Iterable[tuple[str, str]]) -> str:
    """SHA-256 over the sorted lines ``name==version``, each with a line feed; names as PEP 503 has them."""
    lines = sorted(f"{name}=={version}\n" for name, version in packages)
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def _installed() -> dict[str, str]:
    """Every package on the path; of two of one name the one that Python would import."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = sorted(os.listdir(folder or os.curdir))
        except OSError:
            # What is no folder, as an archive or one that is gone, has no packages to list.
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                package, version = _name_and_version(Path(folder), name)
                # What a broken installation left has no name or version to tell.
                if package and version:
                    found.setdefault(re.sub(r"[-_.]+", "-", package).lower(), version)
    return found


def _name_and_version(folder: Path, name: str) -> tuple[str, str]:
    """By the folder's name where that says both: to read each package's file takes far longer."""
    stem, _, kind = name.rpartition(".")
    package, _, version = stem.partition("-")
    if kind == "dist-info":
        return package, version
    try:
        # A development install's folder has no version in its name, an older install's has Python's too.
        distribution = importlib.metadata.Distribution.at(folder / name)
        return distribution.metadata["Name"] or "", distribution.version or ""
    except (KeyError, OSError, ValueError, TypeError):
        return "", ""
