"""Fine-tune a tiny byte-level transformer on Python's own manual, by Composer's Trainer.

    python train.py runs/base --text source --out base.safetensors     # first it learns source code
    python train.py runs/a --weights base.safetensors                  # then it is fine-tuned on prose

The program that one would write. It knows nothing of kills: whatever happens to it, it is started again by
the same command. What Strongroom adds is marked.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from composer import Callback, ComposerModel, Trainer
from composer.algorithms import GradientClipping
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from strongroom_composer import StrongroomCheckpoint  # Strongroom

CONTEXT = 64  # bytes that the model sees at once
BATCH_SIZE = 16
EPOCHS = 3


class Text(Dataset[Tensor]):
    """The beginning of a text, in pieces that are cropped at random."""

    def __init__(self, name: str, pieces: int) -> None:
        if name == "manual":
            source = "".join(topics.values()).encode()
        else:
            files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            source = b"".join(file.read_bytes() for file in files)
        self.bytes = torch.frombuffer(bytearray(source[: (pieces + 1) * CONTEXT]), dtype=torch.uint8)
        self.pieces = pieces

    def __len__(self) -> int:
        return self.pieces

    def __getitem__(self, index: int) -> Tensor:
        start = index * CONTEXT + int(torch.randint(CONTEXT, ()))
        return self.bytes[start : start + CONTEXT + 1].long()


class ByteTransformer(ComposerModel):
    """Guesses each next byte from those before it."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.bytes(batch[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=batch.device)
        guesses: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return guesses

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())


class Lines(Callback):
    """One line a step, the loss with all its digits: two runs can be compared exactly."""

    def batch_end(self, state: Any, logger: Any) -> None:
        print(f"step {state.timestamp.batch.value} loss {state.loss.item()!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", help="the run's")
    parser.add_argument("--text", choices=("manual", "source"), default="manual")
    parser.add_argument("--weights", type=Path, help="a safetensors file to begin from")
    parser.add_argument("--out", type=Path, help="where to write the weights")
    parser.add_argument("--steps", type=int, default=60, help="of the optimizer (%(default)s)")
    options = parser.parse_args()

    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("composer").setLevel(logging.INFO)
    torch.manual_seed(1)
    # How many threads share a sum decides the order of its additions, and so its last bits.
    torch.set_num_threads(1)
    model = ByteTransformer()
    if options.weights is not None:
        model.load_state_dict(load_file(options.weights))
    text = Text(options.text, options.steps // EPOCHS * BATCH_SIZE)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(text, BATCH_SIZE, shuffle=True),
        optimizers=DecoupledAdamW(model.parameters(), lr=3e-3, weight_decay=1e-5),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="5ba"),
        algorithms=[GradientClipping("norm", 1.0)],
        max_duration=f"{EPOCHS}ep",
        device="cpu",
        seed=1,
        deterministic_mode=True,
        progress_bar=False,
        callbacks=[
            StrongroomCheckpoint(options.root, save_interval="5ba", num_checkpoints_to_keep=3),  # Strongroom
            Lines(),
        ],
    )
    trainer.fit()

    weights = trainer.state.model.state_dict()
    trainer.close()
    if options.out is not None:
        save_file(weights, options.out)
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values()))
    print("done; weights", digest.hexdigest()[:16])


if __name__ == "__main__":
    main()
