"""Models that cannot be split, and calls of split models; and what users are told."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bascule.diffusers import Cut, SparseConfig, parallelize
from tests.helpers.inference_cases import Case, make_inputs, make_model
from tests.helpers.inference_toy import TABLE, Toy, make_toy, toy_inputs
from tests.helpers.misuse_arguments import Wrong
from tests.helpers.pipeline_cases import make_pipeline
from tests.helpers.tile_cases import tiny_vae

FLUX = Case("flux", 4, 2, 7, (3, 5))
SPLIT: dict[str, Any] = {"ulysses_degree": 2}


def flux() -> Any:
    torch.manual_seed(0)
    return make_model(FLUX)


def compiled_before() -> object:
    return parallelize(torch.compile(make_toy()), table=TABLE, **SPLIT)  # pyright: ignore[reportUnknownArgumentType]


def split_twice() -> object:
    model = make_toy()
    parallelize(model, table=TABLE, **SPLIT)
    return parallelize(model, table=TABLE, **SPLIT)


def meta() -> object:
    with torch.device("meta"):
        model = make_toy()
    return parallelize(model, table=TABLE, **SPLIT)


def wrapped() -> object:
    model = flux()
    return parallelize(DistributedDataParallel(model), **SPLIT)


class Softmax:
    """A processor that computes attention by itself."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k, v = (f(hidden_states) for f in (attn.to_q, attn.to_k, attn.to_v))
        out = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
        text = args[0] if args else kwargs.get("encoder_hidden_states")
        return out if text is None else (out, text)


def own_softmax() -> object:
    model = flux()
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.set_processor(Softmax())
    with torch.no_grad(), parallelize(model, **SPLIT):
        return model(**make_inputs(FLUX))


def own_softmax_somewhere() -> object:
    """One of the blocks; its neighbours call torch."""
    model = flux()
    model.single_transformer_blocks[1].attn.set_processor(Softmax())
    with torch.no_grad(), parallelize(model, **SPLIT):
        return model(**make_inputs(FLUX))


def flex() -> object:
    model = flux()
    model.set_attention_backend("flex")
    with torch.no_grad(), parallelize(model, **SPLIT):
        return model(**make_inputs(FLUX))


def of_diffusers() -> object:
    model = flux()
    model._parallel_config = object()  # as enable_parallelism leaves it, which needs GPUs
    return parallelize(model, **SPLIT)


def older_version() -> object:
    model = flux()

    def forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Any:
        return hidden_states

    with mock.patch.object(type(model), "forward", forward):
        return parallelize(model, **SPLIT)


def after_undo(what: str) -> Callable[[], object]:
    def call() -> object:
        handle = parallelize(make_toy(), table=TABLE, **SPLIT)
        handle.undo()
        handle.undo()
        does: dict[str, Any] = {
            "verify": lambda: handle.verify(**toy_inputs()),
            "compile": handle.compile,
            "enter": handle.__enter__,
            "explain": handle.explain,
        }
        return does[what]()

    return call


def undo_within() -> object:
    model = make_toy()
    handle = parallelize(model, table=TABLE, **SPLIT)
    model.blocks[1].register_forward_pre_hook(lambda *_: handle.undo())
    return model(**toy_inputs())


def other_model_verified() -> object:
    with parallelize(make_toy(), table=TABLE, **SPLIT) as handle:
        return handle.verify(make_toy(), **toy_inputs())


def timed_model() -> object:
    with parallelize(make_toy(), table=TABLE, **SPLIT) as handle, handle.timed():
        return None


def sparse_compiled() -> object:
    given: Any = {"table": TABLE, "sparse": SparseConfig(keep=0.5, block=4)}
    with parallelize(make_toy(), **given, **SPLIT) as handle:
        handle.compile()


def wrong_mode() -> object:
    with parallelize(make_toy(), table=TABLE, **SPLIT) as handle:
        handle.compile("fastest")  # pyright: ignore[reportArgumentType]


class Text:
    """A pipeline of a model that is no transformer."""

    unet = nn.Linear(2, 2)


def called(**changed: Any) -> Callable[[], object]:
    def call() -> object:
        model = make_toy()
        with parallelize(model, table=TABLE, **SPLIT):
            inputs: dict[str, Any] = {**toy_inputs(), **changed}
            return model(**{name: x for name, x in inputs.items() if x is not ...})

    return call


def hook_that_replaces() -> object:
    """A user's hook cuts the tokens before the model sees them."""
    model = make_toy()
    with parallelize(model, table=TABLE, **SPLIT):

        def halve(module: nn.Module, args: Any) -> Any:
            return (args[0][:, :2], *args[1:])

        model.blocks[1].register_forward_pre_hook(halve)
        return model(**toy_inputs())


class Regrouping(Toy):
    """Pools its tokens between blocks."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, text: Tensor, image: Tensor, context: Tensor, time: Tensor
    ) -> Tensor:
        text, image = self.text_in(text), self.image_in(image)
        context = self.context_in(context)
        text, image = self.blocks[0](text, image, context, None)
        image = functional.avg_pool1d(image.mT, 2, ceil_mode=True).mT
        text, image = self.blocks[1](text, image, context, None)
        return self.head(image)


def pooled() -> object:
    torch.manual_seed(0)
    model = Regrouping().double()
    with parallelize(
        model,
        table=replace(TABLE, inputs={"": {"text": Cut("text"), "image": Cut("image")}}),
        **SPLIT,
    ):
        return model(**toy_inputs())


MODELS: dict[str, Wrong] = {
    "a class": (lambda: parallelize(Toy, table=TABLE, **SPLIT), "Toy'>: make one first"),
    "a pipeline's class": (
        lambda: parallelize(type(make_pipeline("flux")), **SPLIT),
        "FluxPipeline'>: make one first",
    ),
    "a name": (lambda: parallelize("black-forest-labs/FLUX.1-dev", **SPLIT), "from_pretrained"),
    "nothing": (lambda: parallelize(None, **SPLIT), "parallelize takes a model, or a pipeline"),
    "several": (lambda: parallelize([make_toy()], table=TABLE, **SPLIT), "list has none"),
    "a unet": (lambda: parallelize(Text(), **SPLIT), "Text has none"),
    "a vae": (lambda: parallelize(tiny_vae("kl"), **SPLIT), "TiledVAE"),
    "no table": (lambda: parallelize(make_toy(), **SPLIT), "context_parallel(mesh)"),
    "compiled": (compiled_before, "handle.compile()"),
    "split twice": (split_twice, "is split over ranks already"),
    "on meta": (meta, "load its weights first"),
    "in DDP": (wrapped, "DistributedDataParallel"),
    "flex": (flex, "set_attention_backend('native')"),
    "split by diffusers": (of_diffusers, "enable_parallelism"),
    "older version": (older_version, "diffusers"),
    "verify after undo": (after_undo("verify"), "verify: undo() was called"),
    "compile after undo": (after_undo("compile"), "compile: undo() was called"),
    "enter after undo": (after_undo("enter"), "undo() was called: call parallelize again"),
    "explain before": (after_undo("explain"), "explain"),
    "undo within": (undo_within, "undo() within a forward pass of Toy"),
    "verify another": (other_model_verified, "verify: Toy is not one of the models"),
    "timed model": (timed_model, "timed: a Toy alone was split"),
    "sparse compiled": (sparse_compiled, "do not compile it"),
    "mode": (wrong_mode, "mode 'fastest' is not one of"),
}


x = toy_inputs()
CALLS: dict[str, Wrong] = {
    "a list": (called(image=x["image"].tolist()), "must be Tensor, not list"),
    "a text": (called(text="a cat"), "must be Tensor, not str"),
    "nothing": (called(image=None), "must be Tensor, not NoneType"),
    "left out": (called(image=...), "image"),
    "two dims": (called(image=x["image"][0]), "shapes cannot be multiplied"),
    "without a batch": (called(text=x["text"][0, 0]), "text has the shape ("),
    "batches differ": (called(text=x["text"][:1]), "Sizes of tensors must match"),
    "unknown": (called(extra=x["text"]), "the tensors of extra"),
    "unknown name": (called(tokens=x["text"]), "the tensors of tokens"),
    "mask's shape": (called(text_mask=torch.ones(2, 1, 1, 5)), "text_mask has the shape"),
    "mask's length": (called(text_mask=torch.ones(2, 4)), "text_mask has 4 tokens"),
}
ENDING: dict[str, Wrong] = {
    "own softmax": (own_softmax, "did not call F.scaled_dot_product_attention"),
    "own softmax in a block": (
        own_softmax_somewhere,
        "single_transformer_blocks.1 did not call F.scaled_dot_product_attention",
    ),
    "cut by a hook": (hook_that_replaces, "tokens"),
    "pooled": (pooled, "tokens"),
}
"""Calls after which the ranks of a mesh do not go on."""
