"""Ranks in which gradients flow through fake CUDA tensors, without a device.

Autograd asks the device of a gradient for its streams and events, which a CPU build of torch does
not have. Some lines of C++ stand in for them. Torch looks for them once, when it is imported, so
a process of its own loads them before, and forks into the ranks.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

_COMPILER = "g++"
_TIMEOUT_S = 600  # for hangs alone
_START = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); "
    "from tests.helpers.guarded_ranks import main; main(*sys.argv[2:])"
)
_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
const Device kOnly(DeviceType::CUDA, 0);

struct Guard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return kOnly; }
  Device exchangeDevice(Device) const override { return kOnly; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}
"""


def run_guarded(function: str, num_ranks: int) -> list[Any]:
    """Call a function on the ranks of a world over gloo; what JSON makes of its results, in order.

    Args:
        function: "module:name", called once, for what all ranks share; it returns the function
            that each rank calls.
        num_ranks: Ranks.
    """
    if shutil.which(_COMPILER) is None:
        pytest.skip(f"no {_COMPILER}: gradients of fake CUDA tensors NOT TESTED")
    path = os.pathsep.join(sys.path)  # pytest finds modules where Python alone would not
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        library = _built(Path(folder))
        done = subprocess.run(
            [sys.executable, "-c", _START, str(library), function, folder, str(num_ranks)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        results = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
        assert all(one.exists() for one in results), done.stderr
        return [json.loads(one.read_text()) for one in results]


def _built(folder: Path) -> Path:
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_SOURCE)
    home = Path(torch.__file__).parent
    where = [f"-I{home / 'include'}", f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"]
    flags = ["-std=c++20", "-fPIC", "-shared", "-O0", "-w"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [_COMPILER, *flags, abi, *where, str(source), "-o", str(library)]
    done = subprocess.run([*command, "-lc10", "-ltorch_cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def main(function: str, folder: str, num_ranks: str) -> None:
    """Write the function's result on each rank, as JSON, into a file of the folder."""
    module, name = function.split(":")
    on_rank = getattr(importlib.import_module(module), name)()
    ranks = list[int]()
    for rank in range(int(num_ranks)):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            _call(on_rank, Path(folder), rank, int(num_ranks))
    for process in ranks:
        os.waitpid(process, 0)


def _call(on_rank: Callable[[], Any], folder: Path, rank: int, num_ranks: int) -> NoReturn:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=_TIMEOUT_S / 2),
        )
        torch.manual_seed(0)
        result = json.dumps(on_rank())
        dist.barrier()  # a peer may still need the store of the first one
        (folder / f"{rank}.json").write_text(result)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # threads of autograd wait for a device for ever, after an error too
