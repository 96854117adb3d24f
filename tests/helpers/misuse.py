"""Wrong uses of `parallelize` on two ranks, with words of the error that every rank raises."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from bascule.diffusers import Cut, Keys, Mask, ParallelHandle, SparseConfig, parallelize
from tests.helpers.inference_cases import Case, make_inputs, make_model
from tests.helpers.inference_toy import TABLE, Toy, make_toy, toy_gradients, toy_inputs
from tests.helpers.pipeline_cases import generated, make_pipeline, prompt_of, seeded

Wrong = tuple[Callable[[], object], str]
FLUX = Case("flux", 4, 2, 7, (3, 5))
SPLIT: dict[str, Any] = {"ulysses_degree": 2}


def is_second() -> bool:
    return dist.get_rank() == 1


def split(model: Any = None, **options: Any) -> ParallelHandle:
    """A toy over two ranks."""
    given = {"table": TABLE, **options}
    if not {"mesh", "ring_degree", "guidance_degree"} & given.keys():
        given = SPLIT | given
    return parallelize(make_toy() if model is None else model, **given)


def mesh(ranks: Any, *names: str) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def with_table(**changes: Any) -> Callable[[], object]:
    return lambda: split(table=replace(TABLE, **changes))


def with_inputs(**cuts: Any) -> Callable[[], object]:
    return with_table(inputs={"": {**TABLE.inputs[""], **cuts}})


def configured(heads: int) -> Any:
    model: Any = make_toy(heads=heads, kv_heads=heads)
    model.config = SimpleNamespace(num_attention_heads=heads)
    return model


def fsdp_1(model: nn.Module) -> nn.Module:
    """Wrapped, without the process groups that sharding takes."""
    wrapper = object.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._fsdp_wrapped_module = model
    return wrapper


def flux() -> Any:
    torch.manual_seed(0)
    return make_model(FLUX)


def called(**changes: Any) -> Callable[[], object]:
    def call() -> object:
        model = make_toy()
        with split(model):
            return model(**{**toy_inputs(), **changes})

    return call


def called_with(**changes: Any) -> Callable[[], object]:
    def call() -> object:
        model = make_toy()
        with split(model, table=replace(TABLE, replicated=("image", *TABLE.replicated), **changes)):
            return model(**toy_inputs())

    return call


def block_alone() -> object:
    model = make_toy()
    with split(model):
        return model.blocks[0](*toy_inputs().values())


@dataclass
class Extra:
    adapters: list[Tensor]


def flex() -> object:
    model = flux()
    with torch.no_grad(), parallelize(model, **SPLIT):
        model.set_attention_backend("flex")  # later than parallelize looked
        return model(**make_inputs(FLUX))


def of_diffusers(name: str, **options: Any) -> Any:
    return getattr(importlib.import_module("diffusers"), name)(**options)


def sharded_by_diffusers() -> object:
    model, degrees = flux(), of_diffusers("TensorParallelConfig", tp_degree=2)
    # as enable_parallelism leaves it, which needs GPUs
    model._parallel_config = of_diffusers("ParallelConfig", tensor_parallel_config=degrees)
    return parallelize(model, **SPLIT)


def newer_configuration() -> object:
    config: Any = importlib.import_module("diffusers").ContextParallelConfig
    newer = make_dataclass("ContextParallelConfig", [("window", int, 0)], bases=(config,))
    return split(mesh=newer(ulysses_degree=2, window=7))


def older_version() -> object:
    model = flux()

    def forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Any:
        return hidden_states

    with mock.patch.object(type(model), "forward", forward):
        return parallelize(model, **SPLIT)


def split_twice() -> object:
    model = make_toy()
    split(model)
    return split(model)


def after_undo(act: Callable[[ParallelHandle], object]) -> Callable[[], object]:
    def call() -> object:
        handle = split()
        handle.undo()
        handle.undo()
        return act(handle)

    return call


def undo_within() -> object:
    model = make_toy()
    handle = split(model)
    model.blocks[1].register_forward_pre_hook(lambda *_: handle.undo())
    return model(**toy_inputs())


class Lazy(Toy):
    """A model whose forward pass runs later."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        yield super().forward(*args, **kwargs)


def generator() -> object:
    model = Lazy().double()
    with split(model):
        return next(model(**toy_inputs()))


def sharded_gradients() -> object:
    model = make_toy()
    fully_shard(model)
    with split(model) as handle:
        model(**toy_inputs()).clone().sum().backward()
        return handle.average_gradients()


def unlike_gradients(change: Callable[[Any], object]) -> Callable[[], object]:
    def call() -> object:
        model = make_toy()
        with split(model) as handle:
            toy_gradients(model, toy_inputs())
            if is_second():
                change(model)
            return handle.average_gradients()

    return call


def one_split_already() -> object:
    models = make_toy(), make_toy()
    with split(models[0]):
        return split(models[is_second()])


def sparse(**options: Any) -> Callable[[], object]:
    return lambda: split(sparse=SparseConfig(keep=0.5, block=4), **options)


PRODUCT = "the product of degrees must be 2"
REFUSED: dict[str, Wrong] = {
    "no degrees": (lambda: split(ring_degree=1), f"ring 1 x Ulysses 1 on 2 ranks: {PRODUCT}"),
    "below 0": (lambda: split(ring_degree=-2, ulysses_degree=-1), "ring_degree is -2"),
    "too many": (lambda: split(ulysses_degree=4), f"Ulysses 4 on 2 ranks: {PRODUCT}"),
    "heads": (lambda: split(configured(1)), "has too few heads, 1 for 2 Ulysses ranks"),
    "axes": (lambda: split(mesh=mesh([0, 1], "tp")), "a mesh with the axes ('tp',): give"),
    "order": (lambda: split(mesh=mesh([[0, 1]], "ulysses", "ring")), "a mesh with the axes"),
    "both": (lambda: split(mesh=mesh([0, 1], "ulysses"), ring_degree=2), "a mesh or degrees, not"),
    "auto": (lambda: split(mesh="auto"), "the config of Toy lack num_attention_heads"),
    "vae": (lambda: split(vae="none"), "'none'"),
    "kernel": (lambda: split(kernel="flash3"), "kernel 'flash3': choose one of"),
    "format": (lambda: split(comm_dtype="int4"), "comm_dtype 'int4': choose one of int8, e4m3"),
    "sparse, a dict": (lambda: split(sparse={"keep": 0.4}), "sparse is {'keep': 0.4}: give a Sp"),
    "no table": (lambda: split(table=None), "context_parallel(mesh)"),
    "block": (with_table(blocks={"layers.*": ("text",)}), "names 'layers.*', and Toy has no"),
    "argument": (with_inputs(img=Cut("image")), "names an argument 'img' of Toy"),
    "replicated": (with_table(replicated=("times",)), "names an argument 'times' of Toy"),
    "segment": (with_inputs(image=Cut("pixels")), "'image', but cuts only pixels, text"),
    "segment of keys": (with_table(attends={"blocks.*.cross": Keys("words")}), "'words'"),
    "segment of a mask": (with_inputs(text_mask=Mask("words")), "'words'"),
    "older version": (older_version, "use the version of diffusers"),
    "no transformer": (lambda: split(object()), "object has none: give the model itself"),
    "split twice": (split_twice, "is split over ranks already"),
    "FSDP 1": (lambda: parallelize(fsdp_1(flux()), **SPLIT), "use fully_shard(model) (FSDP 2)"),
    "FSDP 1, compiled": (
        lambda: split(cast(Any, torch.compile(fsdp_1(make_toy())))),
        "cannot split a Toy that FSDP 1 shards",
    ),
    "wrapper": (
        lambda: parallelize(nn.DataParallel(flux()), **SPLIT),
        "for DataParallel, which holds a FluxTransformer2DModel: split that, its 'module'",
    ),
    "mesh, a text": (lambda: split(mesh="2x1"), "mesh is '2x1': give a DeviceMesh, \"auto\", an"),
    "mesh, a tuple": (lambda: split(mesh=(1, 2)), "mesh is (1, 2): give a DeviceMesh"),
    "degree, a text": (lambda: split(ulysses_degree="2"), "ulysses_degree is '2'"),
    "degree, a bool": (lambda: split(ring_degree=True, ulysses_degree=2), "ring_degree is True"),
    "sharded by diffusers": (sharded_by_diffusers, "sharded by ParallelConfig of diffusers: load"),
    "newer configuration": (newer_configuration, "does not know ContextParallelConfig(window=7)"),
    "configuration and degrees": (
        lambda: split(mesh=of_diffusers("ContextParallelConfig", ring_degree=2), ulysses_degree=2),
        "give a ContextParallelConfig or degrees, not both",
    ),
    "configuration of another mesh": (
        lambda: split(
            mesh=of_diffusers("ContextParallelConfig", ring_degree=2, mesh=mesh([0, 1], "ulysses"))
        ),
        "a mesh or degrees, not both",
    ),
    "tensor parallelism": (
        lambda: split(mesh=of_diffusers("TensorParallelConfig", tp_degree=2)),
        "mesh is TensorParallelConfig(",
    ),
    "back end": (flex, "its back end is flex: call set_attention_backend('native')"),
    "verify": (after_undo(lambda one: one.verify(**toy_inputs())), "verify: undo() was called"),
    "compile": (after_undo(lambda one: one.compile()), "compile: undo() was called"),
    "enter": (after_undo(lambda one: one.__enter__()), "undo() was called: call parallelize"),
    "undo within": (undo_within, "undo() within a forward pass of Toy"),
    "verify another": (lambda: split().verify(make_toy()), "Toy is not one of the models"),
    "timed": (lambda: split().timed().__enter__(), "timed: only a Toy was split"),
    "mode": (lambda: split().compile("fastest"), "mode 'fastest' is not one of"),  # pyright: ignore
    "tensors": (called(extra=toy_inputs()["text"]), "the tensors of extra"),
    "nested tensors": (called(extra=Extra([torch.ones(1)])), "the tensors of extra"),
    "mask's shape": (called(text_mask=torch.ones(2, 1, 1, 5)), "text_mask has the shape"),
    "mask's length": (called(text_mask=torch.ones(2, 4)), "text_mask has 4 tokens"),
    "mask of pairs": (
        called(text_mask=torch.ones(2, 5, 5)),
        "a mask of pairs of tokens of ['text'], but attention over ['text', 'image']",
    ),
    "block alone": (block_alone, "blocks.0 runs outside of the forward pass"),
    "explain": (lambda: split().explain(), "run the model, not compiled"),
    "cut too late": (
        called_with(inputs={"": {"text": Cut("text")}, "head": {"input": Cut("image")}}),
        "the length of image is not known yet",
    ),
    "other lengths": (
        called_with(
            segments=("image",), inputs={"": dict.fromkeys(("text", "image"), Cut("image"))}
        ),
        "another input has 5",
    ),
    "generator": (generator, "which must not be a generator"),
    "sharded": (sharded_gradients, "the gradient of text_in.weight is sharded, as by FSDP"),
    # The second rank differs.
    "weights": (lambda: split(make_toy(seed=3 * is_second())), "disagree on weights"),
    "models": (lambda: split(make_toy(num_blocks=1 + is_second())), "disagree on models"),
    "dtype": (lambda: split(make_toy().float() if is_second() else None), "disagree on"),
    "degrees": (
        lambda: split(**{"ulysses_degree" if is_second() else "ring_degree": 2}),
        "disagree on mesh: ranks [0]: ring 2 x Ulysses 1; ranks [1]: ring 1 x Ulysses 2",
    ),
    "tables": (
        lambda: split(table=replace(TABLE, replicated=TABLE.replicated[is_second() :])),
        "disagree on tables",
    ),
    "sparse": (
        lambda: split(sparse=SparseConfig(keep=0.5, block=4) if is_second() else None),
        "disagree on sparse: ranks [0]: none; ranks [1]: given",
    ),
    "8 bits": (
        lambda: split(comm_dtype="int8" if is_second() else None),
        "disagree on attention: ranks [0]: AttentionOptions(",
    ),
    "formats": (lambda: split(comm_dtype=("int8", "e4m3")[is_second()]), "disagree on attention"),
    "one error": (
        lambda: split(kernel="flash3" if is_second() else None),
        "kernel 'flash3': choose one of",
    ),
    "one split already": (one_split_already, "split over ranks already"),
    "gradients": (
        unlike_gradients(lambda model: setattr(model.head.bias, "grad", None)),
        "disagree on parameters without gradients: ranks [0]: []; ranks [1]: ['head.bias']",
    ),
    "parameters": (
        unlike_gradients(lambda model: model.register_parameter("x", nn.Parameter(torch.ones(2)))),
        "disagree on parameters: ranks [0]: ",
    ),
}
"""Uses after which the ranks go on together."""


def differently(**makes: Callable[[], Any]) -> Callable[[], object]:
    """The second rank has other inputs."""

    def call() -> object:
        model = make_toy()
        with split(model):
            others = {name: make() for name, make in makes.items()} if is_second() else {}
            return model(**{**toy_inputs(), **others})

    return call


def in_a_later_run(**degrees: Any) -> Callable[[], object]:
    """The second rank has another image from the third run on, of a model of few steps."""

    def call() -> object:
        model = make_toy()
        with torch.no_grad(), split(model, **degrees):
            for seed in (1, 1, 2 + is_second()):
                inputs = toy_inputs(batch=1) | {"image": toy_inputs(batch=1, seed=seed)["image"]}
                for time in (700.0, 300.0):
                    out = model(**inputs | {"time": torch.full((1, 1), time).double()}) + 0
            return out

    return call


def noise_of_a_sister() -> object:
    """One rank draws a number more before the second call of a pipeline that shares a model."""
    pipeline = make_pipeline("flux")
    other: Any = importlib.import_module("diffusers").FluxImg2ImgPipeline.from_pipe(pipeline)
    prompt = {key: x for key, x in prompt_of("flux").items() if "negative" not in key}
    prompt |= {"image": torch.rand(1, 3, 44, 36, generator=seeded(5)), "true_cfg_scale": 1.0}
    torch.manual_seed(7)
    with parallelize(pipeline, **SPLIT):
        generated("flux", other, prompt, num_inference_steps=4)
        torch.rand(int(is_second()))
        return generated("flux", other, prompt, num_inference_steps=4)


def noisier(by: float) -> Tensor:
    image = toy_inputs()["image"]
    return image + by * torch.randn(image.shape, generator=seeded(9), dtype=image.dtype)


def differently_over(**degrees: Any) -> Callable[[], object]:
    def call() -> object:
        model = make_toy()
        with torch.no_grad(), split(model, **degrees):
            for batch in (2, 1, 1):
                out = model(**toy_inputs(batch=batch, seed=1 + is_second())) + 0
            return out

    return call


def differently_compiled() -> object:
    model = make_toy(num_blocks=1)
    with torch.no_grad(), split(model) as handle:
        handle.compile()
        return model(**toy_inputs(seed=1 + is_second()))


def other_adapter_scale() -> object:
    model = flux()
    with torch.no_grad(), parallelize(model, **SPLIT):
        scale = {"scale": 0.5 if is_second() else 1.0}
        return model(**make_inputs(FLUX), joint_attention_kwargs=scale)


class Softmax:
    """A processor that computes attention by itself."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k, v = (f(hidden_states) for f in (attn.to_q, attn.to_k, attn.to_v))
        out = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
        text = args[0] if args else kwargs.get("encoder_hidden_states")
        return out if text is None else (out, text)


def softmax_in_a_block() -> object:
    model = flux()
    model.single_transformer_blocks[1].attn.set_processor(Softmax())
    with torch.no_grad(), parallelize(model, **SPLIT):
        return model(**make_inputs(FLUX))


def cut_by_a_hook() -> object:
    """A user's hook cuts the tokens before a block sees them."""
    model = make_toy()
    with split(model):
        model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0][:, :2], *args[1:]))
        return model(**toy_inputs())


def failing() -> object:
    """The second rank meets an error in the middle."""
    model = make_toy()

    def fail(*_: Any) -> None:
        raise ValueError("no memory is left")

    with split(model):
        model(**toy_inputs())
        if is_second():
            model.blocks[1].register_forward_pre_hook(fail)
        return model(**toy_inputs())


def run(name: str, change: Callable[[Any], dict[str, Any]], **degrees: Any) -> Callable[[], object]:
    """A pipeline that the second rank calls differently."""

    def call() -> object:
        pipeline, prompt = make_pipeline(name), prompt_of(name)
        with parallelize(pipeline, **(degrees or {"guidance_degree": 2})):
            changes = change(pipeline) if is_second() else {}
            return generated(name, pipeline, {**prompt, "generator": seeded(1)}, **changes)

    return call


def another_scheduler(pipeline: Any) -> dict[str, Any]:
    kind: Any = importlib.import_module("diffusers").FlowMatchEulerDiscreteScheduler
    pipeline.scheduler = kind.from_config(pipeline.scheduler.config, shift=7.0)
    return {}


def another_boundary(pipeline: Any) -> dict[str, Any]:
    """As of the step from which the second transformer is called."""
    pipeline.register_to_config(boundary_ratio=0.9)
    return {}


class Lora(nn.Linear):
    """A layer as peft makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.base_layer, self.scaling = base, {"style": 1.0}
        self.active_adapters, self.disable_adapters = ["style"], False
        torch.manual_seed(3)
        self.lora_A = nn.ModuleDict({"style": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"style": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, input: Tensor) -> Tensor:
        added = self.lora_B["style"](self.lora_A["style"](input)) * self.scaling["style"]
        return self.base_layer(input) + added


def adapted(change: Callable[[Any], object]) -> Callable[[], object]:
    """LoRAs are loaded after parallelize, on the second rank others."""

    def call() -> object:
        pipeline, prompt = make_pipeline("flux"), prompt_of("flux")
        with torch.no_grad(), parallelize(pipeline, **SPLIT):
            pipeline.transformer.proj_out = layer = Lora(pipeline.transformer.proj_out)
            generated("flux", pipeline, {**prompt, "generator": seeded(1)})
            if is_second():
                change(layer)
            return generated("flux", pipeline, {**prompt, "generator": seeded(1)})

    return call


def gradients_over_guidance() -> object:
    pipeline = make_pipeline("flux")
    call: Any = vars(type(pipeline))["__call__"].__wrapped__  # without torch.no_grad
    with parallelize(pipeline, guidance_degree=2):
        return call(pipeline, **prompt_of("flux"), height=44, width=36, num_inference_steps=1)


STEPS = "disagree on num_inference_steps: ranks [0]: 2; ranks [1]: 3"
other = toy_inputs(seed=5)
ENDING: dict[str, Wrong] = {
    **{
        f"values of {name}": (differently(**{name: lambda x=x: x}), f"values of {name} differ")
        for name, x in other.items()
    },
    "a time": (differently(time=lambda: toy_inputs()["time"] * 705 / 700), "values of time differ"),
    "noise": (differently(image=lambda: noisier(0.03)), "values of image differ"),
    "rounding": (differently(image=lambda: noisier(1e-7)), "set input_tolerance"),
    "text length": (differently(text=lambda: toy_inputs(text=4)["text"]), "disagree on"),
    "image length": (differently(image=lambda: toy_inputs(image=8)["image"]), "disagree on"),
    "a mask": (differently(text_mask=lambda: torch.ones(2, 5)), "disagree on"),
    "dtype of input": (differently(image=lambda: toy_inputs()["image"].float()), "disagree on"),
    "ring": (differently_over(ring_degree=2), "values of"),
    "guidance groups": (differently_over(guidance_degree=2), "values of"),
    "compiled": (differently_compiled, "values of"),
    "a later run": (in_a_later_run(ring_degree=2), "values of image differ"),
    "a later run, guided": (in_a_later_run(guidance_degree=2), "values of image differ"),
    "noise of a sister": (noise_of_a_sister, "call handle.add(pipeline), or give it a seeded"),
    "adapter scale": (other_adapter_scale, "disagree on"),
    "failing": (failing, "no memory is left"),
    "softmax": (
        softmax_in_a_block,
        "single_transformer_blocks.1.attn did not call F.scaled_dot_product_attention, so its "
        "attention was not over the mesh: its processor Softmax attends by itself: let it call",
    ),
    "cut by a hook": (cut_by_a_hook, "tokens"),
    "steps": (run("flux", lambda _: {"num_inference_steps": 3}), STEPS),
    "height": (run("flux", lambda _: {"height": 48}, **SPLIT), "disagree on height"),
    "guidance": (run("flux", lambda _: {"true_cfg_scale": 1.0}), "disagree on true_cfg_scale"),
    "prompt": (run("flux", lambda _: prompt_of("flux", seed=4)), "disagree on"),
    "schedule": (run("flux", another_scheduler, **SPLIT), "disagree on scheduler"),
    "a boundary": (run("wan", another_boundary, **SPLIT), "disagree on pipeline"),
    "LoRA's weights": (adapted(lambda one: one.lora_B["style"].weight.add_(1)), "on adapters"),
    "LoRA's scale": (adapted(lambda one: one.scaling.update(style=0.5)), "disagree on adapters"),
    "first without tiling": (
        lambda: parallelize(make_pipeline("flux"), vae="first", **SPLIT),
        "call pipeline.vae.enable_tiling()",
    ),
    "gradients": (gradients_over_guidance, "guidance over ranks has no gradients"),
}
"""Uses after which the ranks of a mesh do not go on."""
