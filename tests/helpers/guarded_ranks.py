"""Ranks in which gradients flow through fake CUDA tensors, without a device.

Autograd asks the device of a gradient for its streams and events, which a CPU build of torch does
not have. Some lines of C++ stand in for them. Torch looks for them once, when it is imported, so
these ranks are processes that load them before.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

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


def run_guarded(function: str, num_ranks: int, *args: object) -> list[Any]:
    """Call a function on the ranks of a world over gloo; what JSON makes of its results, in order.

    Args:
        function: "module:name".
        num_ranks: Ranks.
        *args: Of it, as JSON can carry them.
    """
    if shutil.which(_COMPILER) is None:
        pytest.skip(f"no {_COMPILER}: gradients of fake CUDA tensors NOT TESTED")
    path = os.pathsep.join(sys.path)  # pytest finds modules where Python alone would not
    with tempfile.TemporaryDirectory() as folder:
        library = _built(Path(folder))
        given = function, json.dumps(args), f"file://{folder}/store", str(num_ranks)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _START, str(library), *given, str(rank)],
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            said = [rank.communicate(timeout=_TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    failed = [errors for rank, (_, errors) in zip(ranks, said, strict=True) if rank.returncode]
    assert not failed, "\n".join(failed)
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def _built(folder: Path) -> Path:
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_SOURCE)
    home = Path(torch.__file__).parent
    where = [f"-I{home / 'include'}", f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"]
    flags = ["-std=c++20", "-fPIC", "-shared", "-O1", "-w"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [_COMPILER, *flags, abi, *where, str(source), "-o", str(library)]
    done = subprocess.run([*command, "-lc10", "-ltorch_cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def main(function: str, args: str, store: str, num_ranks: str, rank: str) -> None:
    """Print the function's result on a rank, as JSON, in the last line."""
    module, name = function.split(":")
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=int(rank),
            world_size=int(num_ranks),
            timeout=timedelta(seconds=_TIMEOUT_S / 2),
        )
        torch.manual_seed(0)
        result = getattr(importlib.import_module(module), name)(*json.loads(args))
        print(json.dumps(result), flush=True)
        dist.barrier()  # a peer may still need the store of the first one
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)  # threads of autograd wait for a device for ever, after an error too
