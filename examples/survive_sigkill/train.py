"""Train a small byte-level transformer on the source code of Python's standard library.

The program that a researcher would write. It knows nothing of kills: whatever happens to it, it is started
again with the same command. What Strongroom adds is an import and one line in `main`.

Everything that makes an exact resume hard is here: batches shuffled anew in each epoch, crops drawn at
random by the loader's workers, dropout, accumulated gradients, AdamW's moments, and a learning rate that
changes with every step.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import lightning
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from strongroom_lightning import StrongroomCheckpoint

CONTEXT = 64  # bytes that the model sees at once
BATCH_SIZE = 8
ACCUMULATE = 2  # batches in one step of the optimizer
EPOCHS = 3


class StandardLibrary(Dataset[Tensor]):
    """The beginning of the standard library's source, in pieces that are cropped at random."""

    def __init__(self, pieces: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        source = b"".join(file.read_bytes() for file in files)[: (pieces + 1) * CONTEXT]
        if len(source) < (pieces + 1) * CONTEXT:
            raise SystemExit(f"this Python has only {len(source)} bytes of source; use fewer --steps")
        self.source = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        self.pieces = pieces

    def __len__(self) -> int:
        return self.pieces

    def __getitem__(self, index: int) -> Tensor:
        start = index * CONTEXT + int(torch.randint(CONTEXT, ()))
        return self.source[start : start + CONTEXT + 1].long()


class ByteTransformer(lightning.LightningModule):
    """Guesses each next byte from those before it."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.bytes(text) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        guesses: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return guesses

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        guesses = self(batch[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(guesses, batch[:, 1:].flatten())
        self.log("loss", loss)
        # One line a batch, the loss with all its digits: two runs can be compared exactly.
        where = f"epoch={self.current_epoch} batch={batch_idx} step={self.global_step}"
        print(f"{where} loss={loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        warm_up = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the run's folder")
    parser.add_argument("--steps", type=int, default=72, help="of the optimizer, in all (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data (%(default)s)")
    options = parser.parse_args()

    lightning.seed_everything(1, verbose=False)
    # How many threads share a sum decides the order of its additions, and so its last bits.
    torch.set_num_threads(1)
    batches = math.ceil(options.steps / EPOCHS) * ACCUMULATE
    text = StandardLibrary(batches * BATCH_SIZE)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=options.steps,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        deterministic=True,  # refuse kernels whose result depends on timing: no resume of theirs is exact
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            StrongroomCheckpoint(options.out / "checkpoints", every_n_train_steps=5, keep=3),  # the one line
        ],
    )
    model = ByteTransformer()
    trainer.fit(model, DataLoader(text, BATCH_SIZE, shuffle=True, num_workers=options.workers))
    save_file(model.state_dict(), options.out / "model.safetensors")


if __name__ == "__main__":
    main()
