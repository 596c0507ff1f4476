"""Figures of weights: hashing, looking again, downloading; ratios and counts of one run on one machine.

python tests/bench/run.py weights
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tasks.onhost import verify_weights as vw  # noqa: E402
from tests.weights.servers import COMMIT, REPO  # noqa: E402

Figure = tuple[str, float, str]
ONHOST = Path(vw.__file__).parent
MB = 1_000_000
SHARDS = 8
SHARD = 64 * MB  # of the model that is hashed
LARGER = 256 * MB  # of the model that is downloaded: starting the programs should not be what is measured
SPEED = 200 * MB  # bytes a second that the limited server sends in all: a link of 1.6 Gbit/s
REAL_SHARDS, REAL_SHARD, REAL_TENSORS = 48, 3_477_000_000, 1500  # DeepSeek-V4-Flash-0731: 48 shards, 166.9 GB


def figures() -> list[Figure]:
    """Everything; three minutes, and 7 GB of room in TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="rackwright-bench-") as folder:
        root = Path(folder)
        model = write_model(root / "model", SHARDS, SHARD)
        found = [*hashing(model), *looking_again(root)]
        return [*found, *downloading(root, write_model(root / "larger", SHARDS, LARGER))]


# ---- hashing


def hashing(model: Path) -> list[Figure]:
    """Threads against one thread, and against what people use instead; files lie in the page cache."""
    entries = [entry for entry in vw.scan(str(model)).files.values() if entry.path.endswith(".safetensors")]
    threads = vw.default_threads()
    ways: dict[str, Callable[[], object]] = {
        "one": lambda: hash_with(1, model),
        "many": lambda: hash_with(threads, model),
        "sha256sum": lambda: [
            subprocess.run(["sha256sum", entry.full], check=True, stdout=subprocess.DEVNULL)
            for entry in entries
        ],
        "hf": lambda: hf_cache_verify(entries),
    }
    seconds = best(ways, 4)
    return [
        (
            f"hashing: {threads} threads / ({threads} x the rate of one)",
            seconds["one"] / seconds["many"] / threads,
            ">= 0.9",
        ),
        (
            f"hashing: {threads} threads / sha256sum, file by file",
            seconds["sha256sum"] / seconds["many"],
            ">= 1",
        ),
        (
            f"hashing: {threads} threads / what `hf cache verify` does",
            seconds["hf"] / seconds["many"],
            ">= 1",
        ),
        ("hashing: GB/s of one thread", SHARDS * SHARD / 1e9 / seconds["one"], ""),
        ("hashing: MB of memory, for a shard of 4 GB", memory(4_000 * MB), "< 200"),
    ]


def hash_with(threads: int, model: Path) -> None:
    """A whole verification, without a stamp."""
    result = vw.verify(vw.Params(str(model), threads=threads))
    assert result["whole"] and result["hashed_bytes"] > SHARDS * SHARD


def hf_cache_verify(entries: list[vw.Entry]) -> None:
    """huggingface_hub's own loop over files (`utils/_verification.py`)."""
    from huggingface_hub.utils._verification import compute_file_hash

    for entry in entries:
        compute_file_hash(Path(entry.full), "sha256")


def memory(size: int) -> float:
    """Peak memory in MB of a process that verifies one sparse file of this size with four threads."""
    code = (
        "import re, sys; sys.path.insert(0, sys.argv[1]); import verify_weights as vw\n"
        "vw.verify(vw.Params(sys.argv[2], threads=4))\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read()).group(1))"
    )
    with tempfile.TemporaryDirectory(prefix="rackwright-bench-") as folder:
        for number in range(2):
            with (Path(folder) / f"{number}.safetensors").open("wb") as file:
                file.truncate(size // 2)
        done = subprocess.run(
            [sys.executable, "-I", "-c", code, str(ONHOST), folder],
            capture_output=True,
            text=True,
            check=True,
        )
    return int(done.stdout) * 1024 / MB


# ---- looking again at a model of the real size


def looking_again(root: Path) -> list[Figure]:
    """48 sparse shards of the real size with real headers: what is read is what is read of the real ones."""
    model = root / "real"
    write_model(model, REAL_SHARDS, REAL_SHARD, REAL_TENSORS, sparse=True)
    headers = vw.Params(str(model), headers_only=True)
    stamp, listed = root / "real.stamp", root / "real.sha256"
    files = vw.scan(str(model)).files
    # as a full verification would leave them; nothing has to be read to know it
    digests = {path: hashlib.sha256(path.encode()).hexdigest() for path in files}
    stamps = vw.Stamps(str(stamp), str(model))
    for path, entry in files.items():
        stamps.put(entry, digests[path])
    stamps.save()
    listed.write_text(vw.manifest_text(digests))
    again = vw.Params(str(model), manifest=str(listed), stamp=str(stamp))

    def whole(params: vw.Params) -> None:
        result = vw.verify(params)
        assert result["whole"] and result["shards"] == REAL_SHARDS and result["hashed_bytes"] == 0, result

    seconds = best({"headers": lambda: whole(headers), "again": lambda: whole(again)}, 3)
    return [
        ("headers of 48 shards alone, seconds", seconds["headers"], "< 0.5"),
        ("48 verified shards again, against manifest and stamp, seconds", seconds["again"], "< 1"),
    ]


# ---- downloading


def downloading(root: Path, model: Path) -> list[Figure]:
    """The fetcher against the client that it uses, alone and with the pass over the files that it saves."""
    listed = root / "model.sha256"
    result = vw.verify(vw.Params(str(model), write_manifest=str(listed)))
    assert result["whole"]
    found: list[Figure] = []
    for label, speed, budget in (
        (f"at {SPEED // MB} MB/s", SPEED, ">= 0.95"),
        ("at the speed of memory", None, ""),
    ):
        with hub(model, speed) as url:
            ratios: list[tuple[float, float]] = []
            rehashed = received = 0
            for number in range(3):
                alone = client_alone(url, root / f"alone-{number}")
                began = time.monotonic()
                vw.verify(vw.Params(str(root / f"alone-{number}"), manifest=str(listed), ignore=(".cache*",)))
                separate = time.monotonic() - began
                ours, outcome = fetched(url, root / f"ours-{number}" / "tiny", listed)
                rehashed += outcome["verify"]["hashed_bytes"]
                received += outcome["received_bytes"]
                ratios.append((alone / ours, (alone + separate) / ours))
                for used in (root / f"alone-{number}", root / f"ours-{number}"):
                    subprocess.run(["rm", "-rf", used], check=True)
        middle = [statistics.median(column) for column in zip(*ratios, strict=True)]
        found += [
            (f"download {label}: the client alone / rackwright, which verifies too", middle[0], budget),
            (
                f"download {label}: client and a separate pass / rackwright",
                middle[1],
                ">= 1" if speed else "",
            ),
        ]
        if speed:
            found.append(("download: bytes that were hashed in a second pass", float(rehashed), "<= 0"))
            total = 3 * sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
            found.append(("download: bytes received / bytes of the model", received / total, "<= 1"))
    return found


def environment(home: Path) -> dict[str, str]:
    """Without this machine's own settings of the clients, and without Xet, which the server has not."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HTTP", "http"))}
    return {**clean, "HOME": str(home), "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "TQDM_DISABLE": "1"}


def client_alone(url: str, dest: Path) -> float:
    """Seconds of huggingface_hub's snapshot_download into a folder, with as many workers."""
    code = (
        "import sys; from huggingface_hub import snapshot_download\n"
        f"snapshot_download({REPO!r}, revision={COMMIT!r}, endpoint={url!r}, local_dir=sys.argv[1],"
        " max_workers=8)"
    )
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", code, dest],
        check=True, env=environment(dest.parent), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return time.monotonic() - began


def fetched(url: str, dest: Path, listed: Path) -> tuple[float, dict[str, Any]]:
    """Seconds of the fetcher for the same, verified, and what it says."""
    request = {
        "dest": str(dest), "manifest": str(listed), "reserve": 0, "concurrency": 8,
        "sources": [{"kind": "huggingface", "repo": REPO, "revision": COMMIT, "endpoint": url}],
    }  # fmt: skip
    dest.parent.mkdir(parents=True)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, ONHOST / "fetch_weights.py", "--stdin"], input=json.dumps(request),
        capture_output=True, text=True, check=True, env=environment(dest.parent),
    )  # fmt: skip
    return time.monotonic() - began, json.loads(done.stdout)


# ---- what they are made of


def best(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each way, taken in turns, so that what else the machine does hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.monotonic()
            way()
            seconds[name].append(time.monotonic() - began)
    return {name: min(times) for name, times in seconds.items()}


def write_model(folder: Path, shards: int, size: int, tensors: int = 4, *, sparse: bool = False) -> Path:
    """A whole checkpoint with shards of about `size` bytes; sparse ones hold zeros that take no room."""
    folder.mkdir()
    weight_map: dict[str, str] = {}
    each = size // tensors // 2 * 2
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        names = [f"model.layers.{number}.mlp.experts.{i}.down_proj.weight_scale_inv" for i in range(tensors)]
        header = {
            tensor: {"dtype": "BF16", "shape": [each // 2], "data_offsets": [i * each, (i + 1) * each]}
            for i, tensor in enumerate(names)
        }
        weight_map.update(dict.fromkeys(names, name))
        raw = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            if sparse:
                file.truncate(8 + len(raw) + tensors * each)
            else:
                block = os.urandom(MB)
                left = tensors * each
                while left:
                    left -= file.write(block[:left])
    index = {"metadata": {"total_size": shards * tensors * each}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}\n")
    return folder


@contextmanager
def hub(model: Path, speed: int | None) -> Iterator[str]:
    """A hub in a process of its own, so that it takes no time of the measured ones' interpreters."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(model), "--speed", str(speed or 0)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def serve(model: Path, speed: int) -> None:
    """Serve until ended; the first line on stdout is the address."""
    from tests.weights.servers import running

    files = {
        path.relative_to(model).as_posix(): path.read_bytes() for path in model.rglob("*") if path.is_file()
    }
    with running(files, "huggingface") as server:
        server.total_rate = speed or None
        print(server.url, flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the hub of these figures; `figures` starts it")
    parser.add_argument("--serve", type=Path, required=True)
    parser.add_argument("--speed", type=int, default=0)
    options = parser.parse_args()
    serve(options.serve, options.speed)
