"""Outputs of a list of prompts, made by all ranks of a job; each once, whole or not at all."""

import inspect
import logging
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bascule import quantities
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import member_of, resolve
from bascule.errors import ConfigError
from bascule.generate import generating
from bascule.generate.generating import arguments_of, check_prompt, check_size
from bascule.generate.options import IMAGE, VIDEO, GenerateOptions, names_of, read_prompts
from bascule.plan.requests import Balanced, Queue
from bascule.serve.adapters import load_on_all
from bascule.serve.jobs import Jobs, Sink
from bascule.serve.orders import Event, Orders
from bascule.serve.scheduling import Scheduler, Task, num_steps_of
from bascule.serve.starting import dtype_of, start_engine, start_pipeline
from bascule.serve.times import Times
from bascule.workload.tables import load_av


class Generation(Sink):
    """A run that makes outputs for prompts; all ranks of the job construct and run it together."""

    @shared("the start of bascule generate")
    def __init__(self, options: GenerateOptions, device: torch.device) -> None:
        self._options = options
        self.prompts = read_prompts(options)
        self._where = "prompt {}: " if len(self.prompts) > 1 else ""
        self._settings = options.settings | {"dtype": dtype_of(options, device)}
        pipeline = start_pipeline(options, device)
        self._takes = inspect.signature(pipeline.__call__).parameters
        ending = VIDEO if "num_frames" in self._takes else IMAGE
        if ending == VIDEO:
            load_av(f"--model {options.model}")  # or refuse at once
        self.names = [name + ending for name in names_of(self.prompts, options)]  # of output files
        for place, prompt in enumerate(self.prompts):
            num_pictures = None if prompt.image is None else len(prompt.images)
            try:
                check_prompt(pipeline, prompt, self._takes, num_pictures=num_pictures)
            except ConfigError as error:
                raise ConfigError(f"{self._where.format(place + 1)}{error}") from None
        are_guided = all(generating.is_guided(prompt, self._takes) for prompt in self.prompts)
        groups = 2 if are_guided and options.cache is None else 1  # one for each branch
        num_groups = options.guidance_ranks or groups
        self._engine = start_engine(options, pipeline, num_groups)
        self._world, self._pipeline = member_of(resolve(None), "world"), pipeline
        loras = {lora.name: Path(lora.name) for prompt in self.prompts for lora in prompt.lora}
        load_on_all(self._engine.adapters, loras, self._world, "the LoRA adapters")
        self._times = Times(pipeline, self._engine.degrees, num_groups=num_groups)
        self._made_folder = False  # True on rank 0 if it did
        self.missing = self._find_missing()  # on rank 0, indices of prompts without an output
        self._records, self._error = list[dict[str, Any]](), None

    def num_steps(self, place: int) -> int:
        """Return the denoising steps of a prompt."""
        return num_steps_of(self.prompts[place], self._takes)

    def run(self, on_step: Callable[[int, range], None]) -> list[dict[str, Any]]:
        """Make the missing outputs; return their records on rank 0, none on other ranks.

        Args:
            on_step: Called on rank 0, in a thread, with the index of a prompt and the ranks that
                computed a step of it.

        Raises:
            ConfigError: A prompt fails, or an output cannot be written.
            CommError: A rank is gone.
        """
        orders, error = self._engine.orders, None
        try:
            if orders is None:
                self._engine.run()
            else:
                self._scheduler, self._on_step = self._make_scheduler(orders), on_step
                jobs = Jobs(self._scheduler, self, until_idle=True)
                with ThreadPoolExecutor(1, "bascule prompts") as pool:
                    loop = pool.submit(jobs.run)
                    self._engine.run()
                loop.result()
                error = self._error  # `agree` below tells the other ranks
            agree(self._world, {}, error, what="the end of bascule generate")
        finally:
            if self._made_folder:
                with suppress(OSError):  # raised if it is not empty
                    self._options.out.rmdir()
            if error is not None:  # in place of the CommError that `agree` raises
                raise error
        return sorted(self._records, key=lambda record: record["file"])

    def _find_missing(self) -> list[int]:
        """Make the folder of the outputs, and return the indices of missing ones, on rank 0."""
        missing, error, folder = list[int](), None, self._options.out
        try:
            if self._world.rank == 0:
                self._made_folder = not folder.exists()
                folder.mkdir(parents=True, exist_ok=True)
                missing = [k for k, name in enumerate(self.names) if not (folder / name).exists()]
                if missing:  # the next line raises if this process may not write there
                    tempfile.TemporaryFile(dir=folder).close()
        except OSError as refusal:
            reason = refusal.strerror or refusal
            error = ConfigError(f"--out {folder}: cannot be written: {reason}")
        agree(self._world, {"prompts": str(self.names)}, error, what="the missing outputs")
        return missing

    # --- on rank 0 --------------------------------------------------------------------------------

    def _make_scheduler(self, orders: Orders) -> Scheduler:
        """Return a scheduler of the missing outputs, the most work first."""
        # Compiled code and a mesh that is given pay over many steps of one size.
        stays = self._options.mesh or self._options.compile or self._engine.stays
        fits = [d for d in self._engine.degrees if d * len(self.missing) <= orders.num_ranks]
        policy = Queue("fifo", max(fits, default=1)) if stays else Balanced()
        scheduler = Scheduler(orders, policy, self._times)
        tasks = sorted(map(self._make_task, self.missing), key=lambda task: -task.request.work_s)
        for number, task in enumerate(tasks):
            task.number = number
            scheduler.add(task)
        return scheduler

    def _make_task(self, place: int) -> Task:
        prompt = self.prompts[place]

        def arguments() -> dict[str, Any]:
            return arguments_of(prompt, self._takes) | {"output_type": "pil"}

        task = Task.of(place, self.names[place], prompt, self._takes, self._times, arguments)
        task.stays = self._engine.stays
        return task

    def changed(self, task: Task, event: Event | None) -> None:
        """Pass a finished step on to `on_step`."""
        if event is not None and event.kind == "step" and event.step:
            ranks = self._scheduler.orders.ranks_of(event.block)
            self._on_step(self.names.index(task.id), ranks)

    def ended(self, task: Task, state: str, reason: str) -> None:
        """Stop the run if a prompt failed."""
        if state == "failed":
            place = self.names.index(task.id)
            error = ConfigError(f"{self._where.format(place + 1)}the pipeline fails with {reason}")
            self._error = self._error or error
            self._scheduler.close()

    def write(self, task: Task, output: Any) -> str:
        """Write the record of an output, then the output; return what went wrong, or ""."""
        try:
            place = self.names.index(task.id)
            is_video = task.id.endswith(VIDEO)
            frames, sound = generating.media_of(self._pipeline, output, is_video=is_video)
            frames = frames if is_video else frames[:1]
            width, height = frames[0].size
            sizes = {"width": width, "height": height, "frames": len(frames)}
            check_size(task.prompt, sizes, self._where.format(place + 1))
            seconds = {"encode": task.encoding_s, "denoise": task.denoising_s}
            seconds["decode"] = task.last.seconds if task.last is not None else 0.0
            record = {"file": task.id, **self._settings, **asdict(task.prompt), "seconds": seconds}
            path = self._options.out / task.id
            generating.write_record(path.with_suffix(".json"), record)
            generating.write_media(path, frames, task.prompt.fps or self._options.fps, sound)
            self._records.append(record)
            took = quantities.seconds(sum(seconds.values()))
            logging.getLogger(__name__).info("%s is done after %s", task.id, took)
        except Exception as error:
            self._error = self._error or error
            return repr(error)
        return ""
