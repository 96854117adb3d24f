"""LoRA adapters: every rank loads them by name, and a request chooses which of them act.

They are never merged into weights: peft's layers add an adapter's product to their own output, so a
request changes nothing for the next one.
"""

import ctypes
import hashlib
import importlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bascule.comm.agree import agree_on
from bascule.comm.groups import RankGroup
from bascule.errors import ConfigError
from bascule.generate.options import Lora, adapter_file
from bascule.serve.orders import Event, Orders
from bascule.serve.status import Refusal, Unknown

_TENSOR = re.compile(r"(.+)\.lora_([AB])\.(weight|bias)")
_SIZES = {"A": ("in_features", "in_channels"), "B": ("out_features", "out_channels")}
_log = logging.getLogger(__name__)
_OTHER = "give one that was trained for this model"


class Adapters:
    """The LoRA adapters of a pipeline on this rank, which loads each file itself."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._keys: dict[str, str] = {}  # by name, what peft calls it
        self._active: Sequence[Lora] = ()
        # It warns of each part that a file leaves out; `_check_file` finds what no part takes.
        logging.getLogger("diffusers.loaders.lora_base").setLevel(logging.ERROR)

    def load(self, name: str, path: Path, digest: str | None = None) -> str:
        """Load an adapter, in place of an older one of its name; return the digest of its file.

        `path` is a file of safetensors, or a folder with one; `digest` is rank 0's, if it matters.

        Raises:
            ConfigError: peft is not installed, there is no such file, rank 0 has another one, or it
                does not fit the pipeline.
        """
        # Names that peft takes; diffusers warns of missing weights if one is a part of another.
        keys = map("adapter_{}_".format, count())
        file, key = path, next(key for key in keys if key not in self._keys.values())
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        fork = torch.random.fork_rng(devices)  # a running request draws as if nothing was loaded
        try:
            if find_spec("peft") is None:
                raise ConfigError("peft is not installed: pip install 'bascule[lora]'")
            own_digest = digest_of(file := adapter_file(path))
            if digest not in (None, own_digest):
                raise ConfigError("this rank's file is not rank 0's: give all ranks the same one")
            with fork, torch.inference_mode(False), warnings.catch_warnings(action="ignore"):
                _check_file(self._pipeline, file)
                self.remove(name)
                self._keys[name] = key
                self._pipeline.load_lora_weights(**_source(file), adapter_name=key)
                self._set(())  # diffusers activates what it loads
        except Exception as error:  # diffusers and peft refuse files in many ways
            if self._keys.get(name) == key:
                self.remove(name)
            reason = str(error).strip().partition("\n")[0]
            if not isinstance(error, ConfigError):
                kind, cause = type(self._pipeline).__name__, type(error).__name__
                reason = f"{file.name} does not fit a {kind}: {cause}: {reason}"
            raise ConfigError(f"LoRA {name!r}: {reason}") from error
        return own_digest

    def remove(self, name: str) -> None:
        """Remove an adapter, if there is one, and free its weights."""
        if (key := self._keys.pop(name, None)) is not None:
            self._set(())  # else peft would choose others to be active
            self._pipeline.delete_adapters(key)

    def follow(self, order: Mapping[str, Any]) -> str:
        """Load or remove an adapter, as rank 0 orders; return why that failed, or ""."""
        try:
            if order["path"] is None:
                self.remove(order["name"])
            else:
                self.load(order["name"], Path(order["path"]), order["digest"])
        except Exception as error:  # the rank goes on without it
            return str(error) if isinstance(error, ConfigError) else repr(error)
        finally:
            # New weights lie between free pages of the heap, which would grow with each change.
            with suppress(AttributeError):  # glibc alone has it
                ctypes.CDLL(None).malloc_trim(0)
        return ""

    def use(self, choice: Sequence[Any]) -> None:
        """Let the next calls of the pipeline's models use these adapters alone, as `Lora.of`."""
        loras = tuple(map(Lora.of, choice))
        if loras != self._active:
            check_names(loras, self._keys)
            self._set(loras)

    def _set(self, choice: Sequence[Lora]) -> None:
        keys = [self._keys[lora.name] for lora in choice]
        for layer in self._layers():
            layer.set_adapter(keys, inference_mode=True)  # no gradients
            for key, lora in zip(keys, choice, strict=True):
                layer.set_scale(key, lora.scale)
        self._active = choice

    def _layers(self) -> Iterator[Any]:
        for model in _parts_of(self._pipeline).values():
            yield from (layer for layer in model.modules() if hasattr(layer, "lora_A"))


def load_on_all(
    adapters: Adapters, paths: Mapping[str, Path], group: RankGroup, what: str
) -> dict[str, str]:
    """Load adapters on all ranks of a group, which compare their files; return digests of these."""

    def load() -> dict[str, str]:
        return {name: adapters.load(name, path) for name, path in paths.items()}

    return agree_on(
        group, load, lambda digests: {"files of LoRA adapters": str(digests)}, what=what
    )


def check_names(choice: Iterable[Lora], names: Iterable[str]) -> None:
    """Refuse a choice of adapters that are not among `names`."""
    for lora in choice:
        if lora.name not in names:
            known = ", ".join(map(repr, sorted(names))) or "none"
            raise ConfigError(f"lora: {lora.name!r} is not loaded; loaded: {known}")


def digest_of(file: Path) -> str:
    """Return a digest of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]


def _source(file: Path) -> dict[str, Any]:
    """Return arguments for diffusers to read this file, and nothing else."""
    settings = {"weight_name": file.name, "local_files_only": True, "use_safetensors": True}
    return {"pretrained_model_name_or_path_or_dict": str(file.parent), **settings}


def _parts_of(pipeline: Any) -> dict[str, nn.Module]:
    """Return the models that may have LoRA layers, by name."""
    parts = {x: getattr(pipeline, x, None) for x in getattr(pipeline, "_lora_loadable_modules", ())}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def _check_file(pipeline: Any, file: Path) -> None:
    """Refuse a file of which diffusers would drop tensors, or for which it would change weights."""
    import safetensors

    kind, parts = type(pipeline).__name__, _parts_of(pipeline)
    if not parts:
        raise ConfigError(f"a {kind} takes no LoRA: leave it out")
    with safetensors.safe_open(file, framework="pt") as opened:
        if any("dora_scale" in key for key in opened.keys()):
            raise ConfigError(f"{file.name} is a DoRA, of which diffusers drops parts: give a LoRA")
        if any(key.startswith("base_model.model.") for key in opened.keys()):
            fix = f"save it by {kind}.save_lora_weights"
            raise ConfigError(f"{file.name} is of peft's save_pretrained: {fix}")
    state: Any = pipeline.lora_state_dict(**_source(file))  # in diffusers' names
    others = dict(state[0] if isinstance(state, tuple) else state)
    is_empty = not others
    for part, model in parts.items():
        keys = [key for key in others if key.startswith(f"{part}.")]
        own = _as_peft(part, model, {key.removeprefix(f"{part}."): others.pop(key) for key in keys})
        for key, tensor in own.items():
            _check_tensor(model, f"{file.name}: {part}.{key}", key, tensor, own)
    if others or is_empty:
        what = f"its {next(iter(others))} is in none of" if others else "it has no tensor of"
        fix = f"save it by {kind}.save_lora_weights"
        raise ConfigError(f"{file.name}: {what} {', '.join(parts)} of a {kind}: {fix}")


def _as_peft(part: str, model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a part's tensors by the names that they get when diffusers loads them."""
    utils: Any = importlib.import_module("diffusers.utils")
    if own and part.startswith("text_encoder"):
        own = utils.convert_state_dict_to_peft(utils.convert_state_dict_to_diffusers(own))
        has_prefix = hasattr(model, "text_model")
        return {k if has_prefix else k.removeprefix("text_model."): x for k, x in own.items()}
    return (
        own if "lora_A" in next(iter(own), "lora_A") else utils.convert_unet_state_dict_to_peft(own)
    )


def _check_tensor(
    model: nn.Module, where: str, key: str, tensor: Tensor, own: Mapping[str, Tensor]
) -> None:
    """Refuse a tensor that is no LoRA of a layer of the model, or has other sizes."""
    if (match := _TENSOR.fullmatch(key)) is None:
        raise ConfigError(f"{where} is no matrix of a LoRA: give a LoRA of linear layers alone")
    name, side, _ = match.groups()
    if not all(f"{name}.lora_{twin}.weight" in own for twin in "AB"):
        raise ConfigError(f"{where} has no counterpart: the file is not whole")
    try:
        layer: Any = model.get_submodule(name)
    except AttributeError:
        fault = f"{where}: a {type(model).__name__} has no such layer"
        raise ConfigError(f"{fault}: {_OTHER}") from None
    size = next((n for name in _SIZES[side] if (n := getattr(layer, name, None))), None)
    asked = tensor.shape[1 if side == "A" and tensor.ndim > 1 else 0]
    if size != asked:  # if it is larger, diffusers would widen the layer
        raise ConfigError(f"{where} is for {asked} features, the layer has {size}: {_OTHER}")


# --- on rank 0 ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Change:
    """An order to all ranks to load an adapter, or to remove it (no digest)."""

    name: str
    digest: str | None
    answer: Future[None] = field(default_factory=Future[None])
    reasons: dict[int, str] = field(default_factory=dict[int, str])  # by rank; "": it is done


def _report(answer: Future[None]) -> None:
    if error := answer.exception():
        _log.warning("%s", error)


class Shelf:
    """The adapters that all ranks of a server have, and orders to change them; on rank 0.

    Callers hold the lock of the service, except for `find`. Ranks follow an order before their next
    call of a transformer, or at once if they have no request.

    Args:
        digests: Of the files of adapters that all ranks have loaded, by name.
        folder: Where `find` looks for others; None: nowhere.
        remember: Called with the name of an adapter that was loaded (True), or is gone (False).
    """

    def __init__(
        self,
        orders: Orders,
        digests: Mapping[str, str],
        folder: Path | None,
        remember: Callable[[str, bool], None],
    ) -> None:
        self._orders, self.digests, self._folder = orders, dict(digests), folder
        self._remember = remember
        self._changes: dict[str, _Change] = {}  # by number, until all ranks have answered
        self._numbers = count()
        self._end: Refusal | None = None  # why ranks follow no more orders

    def find(self, name: str) -> Path:
        """Return the file of NAME or NAME.safetensors in the folder; Refusal if there is none."""
        if self._folder is None:
            raise Refusal(400, "this server loads no more adapters: start it with --lora-folder")
        folder = self._folder.resolve()
        paths = [folder / name, folder / f"{name}.safetensors"]
        if not (there := [path for path in paths if path.exists()]):
            raise Refusal(404, f"there is no LoRA {name!r} in this server's folder", "name")
        if folder not in (file := adapter_file(there[0]).resolve()).parents:
            raise Refusal(400, f"LoRA {name!r} is outside of the folder: copy it there", "name")
        return file

    def load(self, name: str, path: Path, digest: str) -> Future[None]:
        """Let all ranks load an adapter; the result arrives when all have it, or one failed."""
        loading = [change.name for change in self._changes.values() if change.digest is not None]
        if name in self.digests or name in loading:
            text = f"LoRA {name!r} is loaded already: DELETE /v1/loras/{name} first"
            raise Refusal(409, text, "name")
        return self._order(name, path, digest)

    def remove(self, name: str) -> Future[None]:
        """Let all ranks remove an adapter; Unknown if there is none."""
        if self.digests.pop(name, None) is None:
            loaded = ", ".join(self.digests) or "none"
            raise Unknown(f"there is no LoRA {name!r}; loaded: {loaded}")
        return self._order(name)

    def reload(self, names: Iterable[str]) -> str:
        """Load again what an earlier server had; return why that cannot be, or "".

        The ranks follow the order before any later one, so no request need wait for it.
        """
        for name in [name for name in names if name not in self.digests]:
            try:
                path = self.find(name)
                self._order(name, path, digest := digest_of(path)).add_done_callback(_report)
            except (ConfigError, Refusal, OSError) as error:
                self._remember(name, False)
                return f"LoRA {name!r} is gone: {error}"
            self.digests[name] = digest
        return ""

    def _order(
        self, name: str, path: Path | None = None, digest: str | None = None
    ) -> Future[None]:
        if self._end is not None:
            raise self._end
        number, change = str(next(self._numbers)), _Change(name, digest)
        self._changes[number] = change
        change.answer.set_running_or_notify_cancel()  # a client that leaves cannot cancel it
        self._orders.adapt(number, name, None if path is None else str(path), digest)
        return change.answer

    def heard(self, event: Event) -> None:
        """Note a rank's answer to an order; the last one decides."""
        if (change := self._changes.get(event.request_id)) is None:
            return
        change.reasons[event.block.first] = event.reason
        if len(change.reasons) < self._orders.world_size:
            return
        del self._changes[event.request_id]
        failed = {rank: reason for rank, reason in change.reasons.items() if reason}
        self._remember(change.name, change.digest is not None and not failed)
        if failed:
            rank, reason = min(failed.items())
            if len(set(change.reasons.values())) > 1:  # no rank may have what another one lacks
                reason = f"rank {rank}: {reason}"
                self._order(change.name)
            self.digests.pop(change.name, None)
            return change.answer.set_exception(ConfigError(reason))
        if change.digest is not None:
            self.digests[change.name] = change.digest
        return change.answer.set_result(None)

    def end(self, error: Refusal) -> None:
        """Refuse later orders, and fail all that ranks have not followed."""
        self._end, changes, self._changes = error, self._changes, {}
        for change in changes.values():
            change.answer.set_exception(error)
