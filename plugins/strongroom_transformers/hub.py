"""What a run publishes on the Hugging Face Hub: released weights, as safetensors, and nothing else of it.

The Trainer uploads its output folder: beside the weights that is ``training_args.bin``, a pickle that holds
its arguments with the token among them, and by ``hub_strategy`` optimizer and random states. Here a folder is
made for each upload, of what `from_pretrained` needs and of no other kind of file. What is uploaded while a
run trains comes out of a committed checkpoint, read by one process and verified; a run whose checkpoints are
sealed must be given permission: ``release="safetensors"``.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from huggingface_hub import HfApi

from strongroom import Checkpoint
from strongroom.errors import ConfigError
from strongroom.exporting.onefile import write_weights
from strongroom.frontend import RunSettings, on_record_as_export, policy_seals, replace_for_good
from strongroom.loading import load
from strongroom_transformers.voice import VOICE

__all__ = ["Release", "Releases", "check_hub", "check_release"]

Release = Literal["safetensors"]
"""In which form weights of a sealed run may leave it."""

_PUBLISHED: Final = frozenset({".jinja", ".json", ".md", ".model", ".safetensors", ".tiktoken", ".txt"})
"""Kinds of files that hold weights, words or numbers; none of them is run by whoever loads it."""


def check_release(given: str | None) -> Release | None:
    """Return it if it is a form in which weights are released.

    Raises:
        ConfigError: it is none.
    """
    if given not in (None, "safetensors"):
        raise ConfigError(f"release must be 'safetensors' or None, got {given!r}")
    return given  # type: ignore[return-value]  # mypy does not narrow by membership


def check_hub(args: Any, settings: RunSettings, release: Release | None) -> None:
    """Refuse, before anything is trained, an upload that must not be.

    Raises:
        ConfigError: says why, and what to do.
    """
    if not args.push_to_hub:
        return
    strategy = _strategy(args)
    if strategy in ("checkpoint", "all_checkpoints"):
        raise ConfigError(
            f"hub_strategy={strategy!r} uploads optimizer and random states, which are of use to nobody but "
            f"this run; use 'every_save' or 'end', which upload the weights, and replicate_to= for a second "
            f"place of its checkpoints"
        )
    _check_permission("push_to_hub=True", settings, release)


class Releases:
    """What one Trainer publishes.

    Args:
        trainer: the Trainer.
        settings: the run's.
        release: the permission, where the run is sealed.
    """

    def __init__(self, trainer: Any, settings: RunSettings, release: Release | None) -> None:
        self._trainer = trainer
        self._settings = settings
        self._release = release
        self._upload: _Upload | None = None

    def guard(self) -> None:
        """Take the place of the Trainer's uploads; for good."""
        replace_for_good(self._trainer, "push_to_hub", self._push)
        replace_for_good(self._trainer, "train", self._train)

    def is_committed(self, trainer: Any, checkpoint: Checkpoint) -> None:
        """A checkpoint was committed: release its weights, if the run does so with every save."""
        args = trainer.args
        if not args.push_to_hub or _strategy(args) != "every_save" or not _is_first(trainer):
            return
        self._tell()
        if self._upload is not None and not self._upload.is_done():
            if not args.hub_always_push:
                VOICE.info(f"step {checkpoint.step} is not uploaded: an earlier one still is")
                return
            self._upload.wait_until_done()
            self._tell()
        trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
        self._upload = _Upload(lambda: self._publish(checkpoint.step), f"step {checkpoint.step}")
        trainer.push_in_progress = self._upload

    def _publish(self, step: int) -> None:
        trainer, settings = self._trainer, self._settings
        options = settings.options
        state = load(
            settings.root,
            step=step,
            only=["model"],
            security=options["security"],
            replicate_to=options["replicate_to"],
            accept_older=True,  # this very one, whatever was seen meanwhile
        ).state
        what = {"step": step, "to": f"hub:{trainer.hub_model_id}"}
        with on_record_as_export(settings, what), _Staged() as folder:
            _write(trainer, folder, state["model"])
            _drop_others(folder)
            HfApi().upload_folder(
                repo_id=trainer.hub_model_id,
                folder_path=str(folder),
                commit_message=f"Training in progress, step {step}",
                token=trainer.args.hub_token,
                revision=trainer.args.hub_revision,
            )

    def _push(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def push_to_hub(
            commit_message: str | None = "End of training",
            blocking: bool = True,
            token: str | None = None,
            revision: str | None = None,
            private: bool | None = None,
            **kwargs: Any,
        ) -> Any:
            trainer = self._trainer
            args = trainer.args
            _check_permission("push_to_hub()", self._settings, self._release)
            trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
            token = args.hub_token if token is None else token
            if trainer.hub_model_id is None:
                trainer.init_hf_repo(token=token, private=private)
            weights = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
            if not _is_first(trainer):
                return None
            staged = _Staged()
            folder = staged.make()
            try:
                _write(trainer, folder, trainer.model.state_dict() if weights is None else weights)
                _add_card(trainer, folder, kwargs)
                _drop_others(folder)
                trainer._finish_current_push()
                api: Any = HfApi()
                what = {"step": trainer.state.global_step, "to": f"hub:{trainer.hub_model_id}"}
                with on_record_as_export(self._settings, what):
                    pushed = api.upload_folder(
                        repo_id=trainer.hub_model_id,
                        folder_path=str(folder),
                        commit_message=commit_message,
                        token=token,
                        run_as_future=not blocking,
                        revision=args.hub_revision if revision is None else revision,
                    )
            except BaseException:
                staged.remove()
                raise
            if blocking:
                staged.remove()
            else:
                pushed.add_done_callback(lambda _: staged.remove())
            return pushed

        return push_to_hub

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            check_hub(self._trainer.args, self._settings, self._release)
            result = original(*args, **kwargs)
            # One that ends otherwise may have no time; its checkpoints are safe, and can be released later.
            if self._upload is not None:
                self._upload.wait_until_done()
            self._tell()
            return result

        return train

    def _tell(self) -> None:
        upload = self._upload
        if upload is None or not upload.is_done():
            return
        self._upload = None
        if upload.error is not None:
            VOICE.warn(
                f"{upload.what} was not uploaded to the Hub: {upload.error!r:.500}. It is saved, and the "
                f"next save is uploaded again"
            )
        else:
            VOICE.info(f"{upload.what} is on the Hub, as {self._trainer.hub_model_id}")


class _Upload:
    """One upload on a thread of its own, which keeps no program from ending."""

    def __init__(self, work: Callable[[], None], what: str) -> None:
        self.what = what
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="strongroom-hub", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is told on the training thread
            self.error = error

    def is_done(self) -> bool:
        """As the Trainer asks."""
        return not self._thread.is_alive()

    def wait_until_done(self) -> None:
        """As the Trainer asks."""
        self._thread.join()


class _Staged:
    """A private folder for what is about to be uploaded."""

    def __init__(self) -> None:
        self._folder: str | None = None

    def make(self) -> Path:
        self._folder = tempfile.mkdtemp(prefix="strongroom-release-")
        return Path(self._folder)

    def remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Path:
        return self.make()

    def __exit__(self, *_: object) -> None:
        self.remove()


def _check_permission(what: str, settings: RunSettings, release: Release | None) -> None:
    if release is None and policy_seals(settings.options["security"]):
        raise ConfigError(
            f"{what} publishes weights, and this run's policy seals them; leave it out, or allow it: "
            f"StrongroomCallback(root, release='safetensors') uploads weights, configuration and tokenizer, "
            f"and nothing else of the run"
        )


def _write(trainer: Any, folder: Path, weights: Mapping[str, Any]) -> None:
    """What ``from_pretrained`` reads."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(str(folder), state_dict=dict(weights), is_main_process=True)
    else:
        write_weights(folder / "model.safetensors", weights)
    words = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if words is not None and hasattr(words, "save_pretrained"):
        words.save_pretrained(str(folder))


def _add_card(trainer: Any, folder: Path, given: dict[str, Any]) -> None:
    """The page that the Trainer writes for the model, among other things of how it was trained."""
    args = trainer.args
    name = given.pop("model_name", None)
    if name is None:
        name = Path(args.output_dir).name if args.hub_model_id is None else args.hub_model_id.split("/")[-1]
    tags = given.pop("tags", None) or []
    tags = [tags] if isinstance(tags, str) else list(tags)
    tags += [one for one in getattr(trainer.model, "model_tags", None) or () if one not in tags]
    trainer.create_model_card(model_name=name, **({"tags": tags} if tags else {}), **given)
    card = Path(args.output_dir) / "README.md"
    if card.exists():
        shutil.copy(card, folder / "README.md")


def _drop_others(folder: Path) -> None:
    """Nothing is uploaded that could be code, or of a kind that nobody has thought of."""
    dropped = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in _PUBLISHED:
            path.unlink()
            dropped.append(path.relative_to(folder).as_posix())
    if dropped:
        VOICE.warn(
            f"not uploaded to the Hub, since they are no weights, configuration or words: "
            f"{', '.join(dropped)}"
        )


def _strategy(args: Any) -> str:
    return str(getattr(args.hub_strategy, "value", args.hub_strategy))


def _is_first(trainer: Any) -> bool:
    return bool(trainer.is_world_process_zero())
