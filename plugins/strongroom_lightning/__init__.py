"""The front end for Lightning: one callback saves a run through Strongroom and resumes it by itself.

::

    trainer = L.Trainer(callbacks=[StrongroomCheckpoint("runs/a", every_n_train_steps=100)])
    trainer.fit(model, datamodule)  # resumes by itself if runs/a holds a whole checkpoint
"""

from __future__ import annotations

try:
    from strongroom_lightning.callback import StrongroomCheckpoint
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lightning":
        raise
    raise ModuleNotFoundError(
        "strongroom_lightning needs the package lightning (2.5 or newer), which is not installed; "
        "install Strongroom with its extra: strongroom[lightning]",
        name=error.name,
    ) from error

__all__ = ["StrongroomCheckpoint"]
