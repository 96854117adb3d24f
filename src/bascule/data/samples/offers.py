"""The samples that a rank brings to a step, measured by the user's functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bascule.comm.samples.sample_bytes import Parcel, parcel
from bascule.data.samples.loaded import Offer, Sample, whole_number
from bascule.data.source import Reading
from bascule.errors import ConfigError, PlanError

Saved = list[dict[str, Any] | None]
"""After each microbatch, where a loader with a state of its own would go on."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the user, or the loader for them, does with samples.

    Attributes:
        length_fn: Tokens of a sample.
        weight_fn: What a sample counts in the global mean: a whole number.
        unpack: Samples of an item of the loader.
        collate: A microbatch from its samples; called with none for an empty one.
    """

    length_fn: Callable[[Sample], int]
    weight_fn: Callable[[Sample], int]
    unpack: Callable[[Any], list[Sample]] | None
    collate: Callable[[list[Sample]], Any]


def num_input_ids(sample: Sample) -> int:
    """The default length."""
    try:
        return len(sample["input_ids"])
    except (LookupError, TypeError) as error:
        raise ConfigError(
            f'a {type(sample).__name__} without "input_ids": give BalancedLoader a length_fn'
        ) from error


def one(sample: Sample) -> int:
    """The default weight."""
    del sample
    return 1


def collate_and_pin(
    collate: Callable[[list[Sample]], Any], *, takes_none: bool, pin: bool
) -> Callable[[list[Sample]], Any]:
    """Collate and pin; an empty microbatch is None, unless `collate` takes one."""

    def collated(samples: list[Sample]) -> Any:
        data = collate(samples) if samples or takes_none else None
        return _pinned(data) if pin else data

    return collated


def _pinned(data: Any) -> Any:
    """The same with its tensors in pinned memory."""
    if hasattr(data, "pin_memory"):
        return data.pin_memory()
    if isinstance(data, Mapping):
        return {key: _pinned(part) for key, part in data.items()}
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return type(data)(_pinned(part) for part in data)
    return data


def load(
    reading: Reading, handlers: Handlers, accumulate: int, *, loads: bool, cost_version: int
) -> tuple[Offer, Saved]:
    """This rank's samples of a step; what fails becomes part of the offer.

    Args:
        reading: This rank's microbatches.
        handlers: What is done with samples.
        accumulate: Microbatches of a step.
        loads: Whether this rank loads samples; otherwise it only computes.
        cost_version: Newest cost model that it knows.
    """
    items: list[list[Any]] = []
    saved: Saved = []
    # Whatever ends the user's code, also SystemExit: the others would wait for a thread that ended.
    try:
        for _ in range(accumulate):
            taken = next(reading, None)
            if taken is not None:
                items.append(taken)
            saved.append(reading.saved())
    except BaseException as error:
        return Offer(error=named(error, f"microbatch {len(saved)}")), saved
    try:
        samples = [_unpacked(taken, handlers, micro) for micro, taken in enumerate(items)]
        lens, weights, parcels = _measured(samples, handlers)
    except (RuntimeError, ConfigError) as error:
        return Offer(error=error), saved
    offer = Offer(
        samples=samples,
        lens=lens,
        weights=weights,
        parcels=parcels,
        num_items=[len(taken) for taken in items],
        is_short=loads and len(items) < accumulate,
        cost_version=cost_version,
    )
    return offer, saved


def _unpacked(taken: list[Any], handlers: Handlers, micro: int) -> list[Sample]:
    if handlers.unpack is None:
        return taken
    try:
        return [sample for item in taken for sample in handlers.unpack(item)]
    except BaseException as error:
        raise named(error, f"microbatch {micro}, unpack") from error


def _measured(
    samples: Sequence[Sequence[Sample]], handlers: Handlers
) -> tuple[list[int], list[int], list[Parcel]]:
    """Length, weight and form on the wire of each sample, microbatches one after the other."""
    lens: list[int] = []
    weights: list[int] = []
    parcels: list[Parcel] = []
    for micro, group in enumerate(samples):
        for place, sample in enumerate(group):
            try:
                lens.append(whole_number(handlers.length_fn(sample), "length_fn"))
                weights.append(whole_number(handlers.weight_fn(sample), "weight_fn"))
                parcels.append(parcel(sample))
            except BaseException as error:
                raise named(error, f"microbatch {micro}, sample {place}") from error
    return lens, weights, parcels


def named(error: BaseException, place: str) -> Exception:
    """The error with its place; one line, since it travels to all ranks."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} .. {lines[-1]}"
    if isinstance(error, ConfigError | PlanError):
        return ConfigError(f"{place}: {text}")
    result = RuntimeError(f"{place}: {type(error).__name__}: {text}")
    result.__cause__ = error
    return result
