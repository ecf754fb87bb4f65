"""Fine-tune a tiny byte-level transformer on Python's own manual, in a loop of one's own on Accelerate.

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

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from strongroom_accelerate import Strongroom  # Strongroom

CONTEXT = 64  # bytes that the model sees at once
BATCH_SIZE = 8
ACCUMULATE = 2  # batches in one step of the optimizer
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


class ByteTransformer(nn.Module):
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

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.bytes(text) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        guesses: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return guesses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", help="the run's")
    parser.add_argument("--text", choices=("manual", "source"), default="manual")
    parser.add_argument("--weights", type=Path, help="a safetensors file to begin from")
    parser.add_argument("--out", type=Path, help="where to write the weights")
    parser.add_argument("--steps", type=int, default=60, help="of the optimizer (%(default)s)")
    options = parser.parse_args()

    logging.basicConfig()
    logging.getLogger("strongroom_accelerate").setLevel(logging.INFO)
    set_seed(1)
    # How many threads share a sum decides the order of its additions, and so its last bits.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = ByteTransformer()
    if options.weights is not None:
        model.load_state_dict(load_file(options.weights))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps)
    text = Text(options.text, options.steps // EPOCHS * ACCUMULATE * BATCH_SIZE)
    loader = DataLoader(text, BATCH_SIZE, shuffle=True)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    strongroom = Strongroom(accelerator, options.root, every_n_steps=5, keep=3)  # Strongroom: before prepare
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    strongroom.resume()  # Strongroom: takes up the newest whole checkpoint, if there is one

    with strongroom:  # Strongroom: waits for the last save, also where an exception ends this
        for _ in strongroom.epochs(EPOCHS):  # Strongroom: those that are left
            for batch in loader:
                with accelerator.accumulate(model):
                    guesses = model(batch[:, :-1]).flatten(0, 1)
                    loss = nn.functional.cross_entropy(guesses, batch[:, 1:].flatten())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                strongroom.step()  # Strongroom: saves where it is due
                # The loss with all its digits: two runs can be compared exactly.
                accelerator.print(f"step {strongroom.steps_done} loss {loss.item()!r}", flush=True)

    weights = accelerator.unwrap_model(model).state_dict()
    if options.out is not None:
        save_file(weights, options.out)
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values()))
    accelerator.print("done; weights", digest.hexdigest()[:16])


if __name__ == "__main__":
    main()
