"""A stand-in for torch on hosts without GPUs: enough of it for deep_probe.py, with faults to switch on.

`FAKE_TORCH_FAULTS` (or a file `faults` beside this one) is a comma-separated list of: `import` (fails),
`no-gpu`, `hang-copy`, `damage-copy`, and for all_reduce `hang`, `die`, `wrong`, each of which may end in
`-p2p` (only with P2P on) and in a number of ranks (`hang-p2p-2`). `FAKE_TORCH_GPUS` (or a file `gpus` beside
this one) is the number of GPUs, of which CUDA_VISIBLE_DEVICES may show fewer.
`FAKE_TORCH_LOG` names a file where each rank notes its environment, `FAKE_TORCH_SHM` one that a rank makes
and leaves, as NCCL may when it is killed.
"""

import json
import os
import sys
import time
from pathlib import Path

_BESIDE = Path(__file__).with_name("faults")
_WORDS = os.environ.get("FAKE_TORCH_FAULTS") or (_BESIDE.read_text() if _BESIDE.exists() else "")
_COUNT = Path(__file__).with_name("gpus")
GPUS = int(os.environ.get("FAKE_TORCH_GPUS") or (_COUNT.read_text() if _COUNT.exists() else "2"))
FAULTS = [word for word in _WORDS.strip().split(",") if word]
if "import" in FAULTS:
    raise ImportError("libcudart.so.13: cannot open shared object file")

__version__ = "2.11.0+fake"
uint8, int64, float32 = "uint8", "int64", "float32"


class version:
    cuda = "13.0"


class Tensor:
    def __init__(self, value=0.0, device="cpu"):
        self.value, self.device = value, device

    def copy_(self, other, non_blocking=False):
        across = str(self.device).startswith("cuda") and str(other.device).startswith("cuda")
        if across and "hang-copy" in FAULTS:
            time.sleep(600)
        self.value = -1.0 if across and "damage-copy" in FAULTS else other.value
        return self

    def remainder(self, number):
        return self

    def to(self, dtype):
        return self

    def cpu(self):
        return Tensor(self.value)

    def fill_(self, value):
        self.value = value
        return self

    def __getitem__(self, part):
        return self

    def __eq__(self, number):
        return Tensor(self.value == number)

    def item(self):
        return self.value


def empty(size, dtype=None, device="cpu", pin_memory=False):
    return Tensor(0.0, device)


def zeros(size, dtype=None, device="cpu"):
    return Tensor(0.0, device)


def ones(size, dtype=None, device="cpu"):
    return Tensor(1.0, device)


def full(shape, value, device="cpu", dtype=None):
    return Tensor(value, device)


def arange(size, dtype=None):
    return Tensor(7.0)


def equal(one, other):
    return one.value == other.value


def all(tensor):
    return tensor


class _Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self):
        pass

    def elapsed_time(self, end):
        return 10.0


class _Device:
    def __init__(self, index):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *details):
        return False


class cuda:
    Event, device = _Event, _Device

    class nccl:
        @staticmethod
        def version():
            return (2, 28, 9)

    @staticmethod
    def device_count():
        there = 0 if "no-gpu" in FAULTS else GPUS
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        return there if listed is None else len([word for word in listed.split(",") if int(word) < there])

    @staticmethod
    def get_device_name(index):
        return "NVIDIA Fake"

    @staticmethod
    def synchronize(device=None):
        pass

    @staticmethod
    def set_device(index):
        pass

    @staticmethod
    def can_device_access_peer(one, other):
        return True


class _Distributed:
    """What `import torch.distributed as dist` gives."""

    ranks = 1

    def init_process_group(self, backend, rank, world_size, timeout):
        self.ranks = world_size
        log = os.environ.get("FAKE_TORCH_LOG")
        if log:
            names = (
                "NCCL_P2P_DISABLE",
                "NCCL_NVLS_ENABLE",
                "TORCH_SYMM_MEM_DISABLE_MULTICAST",
                "MASTER_ADDR",
                "CUDA_VISIBLE_DEVICES",
                "CUDA_DEVICE_ORDER",
            )
            with Path(log).open("a") as out:
                out.write(
                    json.dumps(
                        {"pid": os.getpid(), "ranks": world_size, **{n: os.environ.get(n) for n in names}}
                    )
                    + "\n"
                )

        if os.environ.get("FAKE_TORCH_SHM"):
            Path(os.environ["FAKE_TORCH_SHM"]).write_text("segment")

    def _fault(self, kind):
        p2p = os.environ.get("NCCL_P2P_DISABLE") != "1"
        wanted = {kind, f"{kind}-{self.ranks}"}
        if p2p:
            wanted |= {f"{kind}-p2p", f"{kind}-p2p-{self.ranks}"}
        return bool(wanted & set(FAULTS))

    def all_reduce(self, tensor):
        if self._fault("hang"):
            time.sleep(600)
        if self._fault("die"):
            sys.stderr.write("NCCL error: unhandled system error, cannot allocate /dev/shm/nccl-x\n")
            os._exit(1)
        total = float(self.ranks * (self.ranks + 1) // 2)
        tensor.value = total + 1 if self._fault("wrong") else total

    def destroy_process_group(self):
        pass


distributed = _Distributed()
sys.modules["torch.distributed"] = distributed
