"""Threads and memory pages: what the process may use and not what the host has, one pool for both phases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import byte_tokenizer, tiny_llama

from adx.cli.main import main
from adx.runtime import hugepages, load, threads
from adx.runtime.hugepages import HUGE_PAGE, huge_pages_for_new_memory
from adx.runtime.threads import cgroup_quota, usable_threads

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    model = byte_tokenizer(tiny_llama(folder / "model", vocab_size=320, num_hidden_layers=1))
    assert main(["export", str(model), "-o", str(folder / "out"), "--threads", "1", "-q"]) == 0
    return folder / "out"


def run(code: str, *args: str, **environment: str) -> str:
    """Python code in a process whose only pools are the engine's."""
    quiet = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    env = {**os.environ, **quiet, "TOKENIZERS_PARALLELISM": "false", **environment}
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


USABLE = """
import os, sys
from adx.runtime.threads import usable_threads
os.sched_setaffinity(0, [int(cpu) for cpu in sys.argv[1:]])
print(usable_threads())
"""


@LINUX
@pytest.mark.parametrize("count", sorted({1, len(CPUS)}))
def test_affinity_bounds_the_threads(count: int) -> None:
    """As `taskset` and container runtimes set it."""
    quota = cgroup_quota()
    expected = count if quota is None else min(count, max(1, -(-quota // 1)))
    assert int(run(USABLE, *map(str, CPUS[:count]))) == expected


@pytest.mark.parametrize(
    ("affinity", "quota", "expected"),
    [(8, None, 8), (8, 2.0, 2), (8, 1.5, 2), (8, 0.25, 1), (1, 4.0, 1), (64, 1.0, 1)],
)
def test_the_smaller_of_affinity_and_quota_counts(
    affinity: int, quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a CPU counts as one; there is always one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(threads, "cgroup_quota", lambda: quota)
    assert usable_threads() == expected


Tree = Callable[[dict[str, str], str], float | None]


@pytest.fixture
def quota_of(tmp_path: Path) -> Tree:
    """The quota by a made-up cgroup file system and the process's membership in it."""

    def measure(files: dict[str, str], membership: str) -> float | None:
        root = tmp_path / "cgroup"
        root.mkdir()
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        (tmp_path / "self").write_text(membership)
        return cgroup_quota(root, tmp_path / "self")

    return measure


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/\n", None),
        ({"cpu.max": "100000 100000\n"}, "0::/\n", 1.0),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"app/cpu.max": "50000 100000\n"}, "0::/app\n", 0.5),
        ({"app/cpu.max": "400000 100000\n", "app/pod/cpu.max": "max 100000\n"}, "0::/app/pod\n", 4.0),
        ({"app/cpu.max": "200000 100000\n", "app/pod/cpu.max": "300000 100000\n"}, "0::/app/pod\n", 2.0),
        ({"other/cpu.max": "100000 100000\n"}, "0::/app\n", None),
        ({"cpu.max": "100000 100000\n"}, "0::/../..\n", 1.0),
    ],
    ids=["none", "one", "one and a half", "max", "own", "parent", "tightest", "another's", "outside the namespace"],
)
def test_quotas_of_version_2(files: dict[str, str], membership: str, expected: float | None, quota_of: Tree) -> None:
    assert quota_of(files, membership) == expected


def version_1(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        (version_1("cpu", -1), "4:cpu,cpuacct:/\n", None),
        (version_1("cpu", 200000), "4:cpu,cpuacct:/\n", 2.0),
        (version_1("cpu", 25000, 50000), "4:cpu,cpuacct:/\n", 0.5),
        (version_1("cpu,cpuacct", 100000), "5:memory:/x\n4:cpu,cpuacct:/\n", 1.0),
        (version_1("cpu,cpuacct/docker/1f", 300000), "4:cpu,cpuacct:/docker/1f\n", 3.0),
        (version_1("cpu/docker/1f", 300000), "4:cpu,cpuacct:/docker/1f\n", 3.0),
        (version_1("cpu", 100000), "4:cpu:/docker/seen/from/the/host\n", 1.0),
        (version_1("memory/docker", 100000), "5:memory:/docker\n4:cpu:/\n", None),
        ({"cpu/cpu.cfs_quota_us": "100000\n"}, "4:cpu:/\n", None),
    ],
    ids=["none", "two", "half", "mounted as both", "own", "by the short name", "host's path", "memory's", "no period"],
)
def test_quotas_of_version_1(files: dict[str, str], membership: str, expected: float | None, quota_of: Tree) -> None:
    assert quota_of(files, membership) == expected


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path / "none", tmp_path / "neither") is None


COUNT = """
import json, os, sys
import numpy as np, onnxruntime, tokenizers
from adx.runtime import load

def tasks():
    return len(os.listdir('/proc/self/task'))

np.ones((64, 64)) @ np.ones((64, 64))
counts = [tasks()]
threads = int(sys.argv[2]) if sys.argv[2] != '-' else None
with load(sys.argv[1], threads=threads) as model:
    model.generate('hello', max_new_tokens=4)
    counts.append(tasks())
    model.generate(['a', 'b' * 40, 'cc'], max_new_tokens=4)
    counts.append(tasks())
    print(json.dumps({'counts': counts, 'threads': model.session.threads}))
"""


@LINUX
@pytest.mark.parametrize("count", [1, 2])
def test_prefill_and_decode_share_one_pool(count: int, bundle: Path) -> None:
    """An engine of N threads starts N - 1 beside the caller's, whatever it is asked to do."""
    measured = json.loads(run(COUNT, str(bundle), str(count)))
    before, *after = measured["counts"]
    assert measured["threads"] == count
    assert after == [before + count - 1] * 2


@LINUX
def test_a_process_on_one_cpu_starts_no_thread(bundle: Path) -> None:
    """By default, on one CPU of the machine's: no pool of the host's size."""
    code = f"import os\nos.sched_setaffinity(0, [{CPUS[0]}])\n{COUNT}"
    measured = json.loads(run(code, str(bundle), "-"))
    assert measured["threads"] == 1
    assert len(set(measured["counts"])) == 1


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [({}, ["--threads", "1"], 1), ({"ADX_THREADS": "2"}, [], 2), ({"ADX_THREADS": "2"}, ["--threads", "1"], 1)],
    ids=["option", "environment", "both"],
)
def test_the_command_takes_the_number_of_threads(
    environment: dict[str, str],
    options: list[str],
    expected: int,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By option or ADX_THREADS, the option first; it says how many it uses."""
    monkeypatch.delenv("ADX_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", str(bundle), "--prompt", "x", "-n", "2", "-v", *options]) == 0
    assert f"CPUExecutionProvider, {expected} threads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("after", "before", "expected"),
    [
        ([], [(0, 9)], []),
        ([(0, 9)], [], [(0, 9)]),
        ([(0, 9)], [(0, 9)], []),
        ([(0, 9)], [(9, 12)], [(0, 9)]),
        ([(5, 9)], [(0, 5)], [(5, 9)]),
        ([(0, 20)], [(5, 9)], [(0, 5), (9, 20)]),
        ([(0, 20)], [(0, 5), (8, 9), (15, 20)], [(5, 8), (9, 15)]),
        ([(3, 8)], [(0, 5), (7, 20)], [(5, 7)]),
        ([(0, 4), (10, 30)], [(2, 12), (20, 22)], [(0, 2), (12, 20), (22, 30)]),
    ],
)
def test_new_memory_is_what_was_not_there(
    after: list[tuple[int, int]], before: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    """Regions that grew, shrank, were split or are new."""
    assert list(hugepages._difference(after, before)) == expected


MAPS = """\
55d0a0000000-55d0a0001000 rw-p 00000000 fe:00 131 /usr/bin/python3
55d0a1000000-55d0a1200000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000400000-7f0000500000 r--p 00000000 00:00 0
7f0001000000-7f0001001000 rw-p 00000000 fe:00 99 /tmp/a file with spaces
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0 [stack]
"""


def test_only_memory_of_the_process_itself_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writable, of no file, no stack."""
    (tmp_path / "maps").write_text(MAPS)
    monkeypatch.setattr(hugepages, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(hugepages, "sys", SimpleNamespace(platform="linux"))
    assert hugepages._anonymous_regions() == [(0x55D0A1000000, 0x55D0A1200000), (0x7F0000000000, 0x7F0000400000)]
    monkeypatch.setattr(hugepages, "MAPS", tmp_path / "none")
    assert hugepages._anonymous_regions() == []


class Madvise:
    """The C library's madvise, remembering its calls."""

    def __init__(self, result: int) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.result = result

    def __call__(self, *args: object, **options: object) -> SimpleNamespace:
        """Stands for `ctypes.CDLL` too."""

        def madvise(start: int, size: int, advice: int) -> int:
            self.calls.append((start, size, advice))
            return self.result

        return SimpleNamespace(madvise=madvise)


@LINUX
@pytest.mark.parametrize("result", [0, -1], ids=["granted", "refused"])
def test_whole_pages_of_new_memory_are_asked_for(result: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the block's own memory, at bounds of huge pages; where the first request is refused, no second."""
    libc = Madvise(result)
    old = (7 * HUGE_PAGE, 9 * HUGE_PAGE)
    regions = iter([[old], [(4 * HUGE_PAGE + 1, 12 * HUGE_PAGE - 1), (20 * HUGE_PAGE + 1, 21 * HUGE_PAGE)]])
    monkeypatch.setattr(hugepages.ctypes, "CDLL", libc)
    monkeypatch.setattr(hugepages, "_anonymous_regions", lambda: next(regions))
    with huge_pages_for_new_memory():
        pass
    spans = [(5 * HUGE_PAGE, 2 * HUGE_PAGE), (9 * HUGE_PAGE, 2 * HUGE_PAGE)]
    advices = (hugepages.MADV_HUGEPAGE, hugepages.MADV_COLLAPSE) if result == 0 else (hugepages.MADV_HUGEPAGE,)
    assert libc.calls == [(*span, advice) for span in spans for advice in advices]


def test_generation_does_not_depend_on_huge_pages(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens where the system grants them, refuses them, or has no such thing."""

    def tokens() -> tuple[int, ...]:
        with load(bundle, threads=1) as model:
            return tuple(model.generate("hello", max_new_tokens=8, ignore_eos=True).token_ids)

    expected = tokens()
    monkeypatch.setattr(hugepages.ctypes, "CDLL", Madvise(-1))
    assert tokens() == expected
    monkeypatch.setattr(hugepages, "sys", SimpleNamespace(platform="darwin"))
    assert tokens() == expected
    assert hugepages._anonymous_regions() == []


def test_an_engine_that_does_not_load_is_its_own_error() -> None:
    """Whatever the block raises comes through."""

    def fail() -> None:
        with huge_pages_for_new_memory():
            raise ValueError("from inside")

    with pytest.raises(ValueError, match="from inside"):
        fail()
