"""Sealing adds a fixed amount of memory to a save and to a restore, however large the state is."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from sealed_saves import MIB, write_policy

STATE_BYTES = 256 * MIB


def test_sealed_saves_and_restores_stay_within_the_bar_and_stay_flat(tmp_path: Path) -> None:
    policy = write_policy(tmp_path)
    script = textwrap.dedent(
        """
        import resource, sys, torch
        from strongroom import Checkpointer, KeepLast

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        root, policy = sys.argv[1:]
        state = {f"t{n}": torch.ones(4 << 20) for n in range(16)}  # 256 MiB in 16 MiB tensors
        with Checkpointer(root + "/warm", security=policy) as checkpointer:
            checkpointer.save(1, {"t": torch.ones(1)}).result()
            checkpointer.restore({"t": torch.ones(1)})
        before = peak()
        peaks = []
        with Checkpointer(root + "/run", keep=KeepLast(count=1), security=policy) as checkpointer:
            for step in range(6):
                checkpointer.save(step, {"model": state}).result()
                peaks.append(peak() - before)
            checkpointer.restore({"model": state})
            peaks.append(peak() - before)
        print(*peaks)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(policy)], capture_output=True, text=True, check=True
    )
    peaks = [int(word) for word in done.stdout.split()]
    # The design's bar: 1.05 x the state and 128 MiB; the restore fills the caller's own memory.
    assert peaks[-1] <= 1.05 * STATE_BYTES + 128 * MIB, peaks
    assert peaks[-2] - peaks[2] <= 16 * MIB, peaks
    assert peaks[-1] - peaks[-2] <= 32 * MIB, peaks
