"""What a process may use: cgroups of both versions, built in a directory, affinity, hyperthreads, ulimits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.machine import Cpus, default_threads, has_huge_pages, read_cpus, read_memory_limits, tightest, total_memory
from cllm.machine.cgroups import groups

GIB = 1 << 30
MIB = 1 << 20
NO_LIMIT_V1 = "9223372036854771712"
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1000 kB\nMemAvailable:   50331648 kB\nSwapFree:  99999999 kB\n"

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset"""


def build(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def machine(root: Path, cgroup: str, mounts: str, **files: str) -> Path:
    """A machine with 64 GiB, 48 of them available."""
    own = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup + "\n", "proc/self/mountinfo": mounts + "\n"}
    return build(root, own | files)


def v2(root: Path, path: str, files: Mapping[str, str]) -> Path:
    return machine(root, f"0::{path}", V2_MOUNT, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def v1(root: Path, path: str, files: Mapping[str, str]) -> Path:
    cgroup = f"5:memory:{path}\n4:cpuset:/\n3:cpu,cpuacct:{path}\n1:name=systemd:/init"
    return machine(root, cgroup, V1_MOUNTS, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def cpus_of(root: Path, count: int = 64) -> Cpus:
    return read_cpus(root, affinity=range(count), machine=64)


# --- CPU quota ---


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("200000 100000\n", 2.0),
        ("max 100000", None),
        ("max", None),
        ("", None),
        ("-1 100000", None),
        ("100000 0", None),
        ("0 100000", None),
        ("nonsense here", None),
        ("100000", None),
        ("1e5 100000", None),
    ],
)
def test_a_quota_of_version_2(tmp_path: Path, text: str, quota: float | None) -> None:
    assert cpus_of(v2(tmp_path, "/box", {"box/cpu.max": text})).quota == quota


@pytest.mark.parametrize(
    ("time", "period", "quota"),
    [("150000", "100000", 1.5), ("-1", "100000", None), ("50000", "", None), ("25000", "50000", 0.5)],
)
def test_a_quota_of_version_1(tmp_path: Path, time: str, period: str, quota: float | None) -> None:
    place = "cpu,cpuacct/docker/box"
    files = {f"{place}/cpu.cfs_quota_us": time, f"{place}/cpu.cfs_period_us": period}
    assert cpus_of(v1(tmp_path, "/docker/box", files)).quota == quota


def test_the_smallest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "pods/cpu.max": "300000 100000",
        "pods/pod/cpu.max": "max 100000",
        "pods/pod/box/cpu.max": "800000 100000",
        "pods/other/cpu.max": "10000 100000",
    }
    assert cpus_of(v2(tmp_path, "/pods/pod/box", files)).quota == 3.0


@pytest.mark.parametrize(("quota", "usable"), [(None, 8), (0.5, 1), (1.0, 1), (1.5, 1), (2.0, 2), (7.99, 7), (64.0, 8)])
def test_a_quota_counts_in_whole_cpus_and_never_as_none(quota: float | None, usable: int) -> None:
    assert Cpus(machine=64, allowed=8, cores=8, quota=quota).usable == usable


# --- memory ---


def test_memory_of_version_2_less_what_is_in_use_but_not_page_cache(tmp_path: Path) -> None:
    files = {
        "box/memory.max": str(2 * GIB),
        "box/memory.current": str(1 * GIB),
        "box/memory.stat": f"anon 1\nfile {600 * MIB}\nactive_file {100 * MIB}\ninactive_file {412 * MIB}\nshmem 5\n",
    }
    room = tightest(read_memory_limits(v2(tmp_path, "/box", files)))
    assert (room.limit, room.free, room.hard) == (2 * GIB, 1536 * MIB, True)
    assert str(room) == "the 1,536 MiB that the container's memory limit of 2,048 MiB leaves"


def test_memory_of_version_1_counts_the_groups_below_as_well(tmp_path: Path) -> None:
    files = {
        "memory/box/memory.limit_in_bytes": str(2 * GIB),
        "memory/box/memory.usage_in_bytes": str(1 * GIB),
        "memory/box/memory.stat": f"inactive_file 7\ntotal_active_file 0\ntotal_inactive_file {512 * MIB}\n",
        "memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "memory/memory.usage_in_bytes": str(9 * GIB),
    }
    room = tightest(read_memory_limits(v1(tmp_path, "/box", files)))
    assert (room.limit, room.free) == (2 * GIB, 1536 * MIB)


def test_a_limit_of_version_1_that_stands_above_what_can_be_seen(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "memory/memory.usage_in_bytes": str(GIB),
        "memory/memory.stat": f"hierarchical_memory_limit {3 * GIB}\n",
    }
    room = tightest(read_memory_limits(v1(tmp_path, "/", files)))
    assert (room.limit, room.free) == (3 * GIB, 2 * GIB)


@pytest.mark.parametrize("limit", ["max", NO_LIMIT_V1, "", "garbage", "-1", "12 34", "\x00\xff", "9" * 400])
def test_no_limit_or_nonsense_leaves_the_machines_own_numbers(tmp_path: Path, limit: str) -> None:
    for kind, name, build_it in (("2", "box/memory.max", v2), ("1", "memory/box/memory.limit_in_bytes", v1)):
        (tmp_path / kind).mkdir()
        room = tightest(read_memory_limits(build_it(tmp_path / kind, "/box", {name: limit})))
        assert (room.limit, room.free, room.hard) == (64 * GIB, 48 * GIB, False)


def test_what_neighbours_use_of_a_common_limit_is_gone(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": str(4 * GIB),
        "pod/memory.current": str(3 * GIB),
        "pod/box/memory.max": str(2 * GIB),
        "pod/box/memory.current": str(GIB // 2),
    }
    rooms = read_memory_limits(v2(tmp_path, "/pod/box", files))
    assert tightest(rooms).free == 1 * GIB and tightest(rooms).limit == 4 * GIB
    assert total_memory(rooms) == 2 * GIB


def test_a_container_that_uses_more_than_its_limit_has_no_room(tmp_path: Path) -> None:
    files = {"box/memory.max": str(GIB), "box/memory.current": str(GIB + 4096), "box/memory.stat": "junk\nx y z\n"}
    assert tightest(read_memory_limits(v2(tmp_path, "/box", files))).free == 0


def test_a_limit_above_the_machines_memory_binds_nobody(tmp_path: Path) -> None:
    room = tightest(read_memory_limits(v2(tmp_path, "/box", {"box/memory.max": str(128 * GIB)})))
    assert room.name == "the machine's memory" and room.free == 48 * GIB


def test_memory_high_slows_but_does_not_kill(tmp_path: Path) -> None:
    files = {"box/memory.max": str(4 * GIB), "box/memory.high": str(3 * GIB), "box/memory.current": "0"}
    room = tightest(read_memory_limits(v2(tmp_path, "/box", files)))
    assert (room.free, room.hard) == (3 * GIB, False)


def test_strict_overcommit_limits_what_can_be_reserved(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", {})
    (root / "proc/meminfo").write_text(MEMINFO + f"CommitLimit: {4 << 20} kB\nCommitted_AS: {3 << 20} kB\n")
    assert tightest(read_memory_limits(root)).free == 48 * GIB
    build(root, {"proc/sys/vm/overcommit_memory": "2\n"})
    room = tightest(read_memory_limits(root))
    assert (room.free, room.limit, room.hard) == (1 * GIB, 4 * GIB, True)


def test_without_any_files_there_is_still_an_answer(tmp_path: Path) -> None:
    assert tightest(read_memory_limits(tmp_path)).free > 0
    assert read_cpus(tmp_path, affinity=[0, 1], machine=2) == Cpus(machine=2, allowed=2, cores=2)


def test_an_old_kernel_without_memavailable(tmp_path: Path) -> None:
    build(tmp_path, {"proc/meminfo": "MemTotal: 4096 kB\nMemFree: 1024 kB\nCached: 512 kB\nSwapFree: 9999 kB\n"})
    assert tightest(read_memory_limits(tmp_path)).free == 1536 * 1024


# --- where the groups are ---


def test_both_versions_at_once(tmp_path: Path) -> None:
    """systemd's hybrid: version 2 is there without controllers, the limits are in version 1."""
    cgroup = "4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/a/b"
    mounts = V1_MOUNTS + "\n" + V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    files = {
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "0",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/unified/a/b/cgroup.procs": "1\n",
    }
    root = machine(tmp_path, cgroup, mounts, **files)
    assert tightest(read_memory_limits(root)).free == GIB
    assert cpus_of(root).quota == 2.0


def test_a_container_sees_its_own_group_at_the_mount_point(tmp_path: Path) -> None:
    """Docker on version 1: the path is the host's, but only that part of the hierarchy is mounted."""
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB)}
    root = machine(tmp_path, "5:memory:/docker/abc", mounts, **files)
    assert tightest(read_memory_limits(root)).free == GIB
    assert [group.directory for group in groups("memory", root)] == [root / "sys/fs/cgroup/memory"]


@pytest.mark.parametrize("path", ["/", "/../sibling", "/elsewhere", "/gone/since"])
def test_a_group_outside_of_what_is_mounted_is_limited_by_the_mount_point(tmp_path: Path, path: str) -> None:
    root = v2(tmp_path, path, {"memory.max": str(GIB), "../memory.max": "4096"})
    assert tightest(read_memory_limits(root)).free == GIB


def test_a_mount_point_with_a_blank(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/", r"31 23 0:28 / /my\040groups rw - cgroup2 none rw")
    build(root, {"my groups/memory.max": str(GIB)})
    assert tightest(read_memory_limits(root)).free == GIB


@given(st.text(max_size=200), st.text(max_size=200))
def test_whatever_stands_in_these_files(tmp_path_factory: pytest.TempPathFactory, cgroup: str, mounts: str) -> None:
    root = tmp_path_factory.mktemp("root")
    for name, text in (("cgroup", cgroup), ("mountinfo", mounts)):
        file = root / "proc/self" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode(errors="surrogatepass"))
    assert read_cpus(root, affinity=[0], machine=1).usable == 1
    assert read_memory_limits(root)


# --- affinity and threads ---


def topology(root: Path, siblings: Mapping[int, str], name: str = "thread_siblings_list") -> Path:
    place = "sys/devices/system/cpu/cpu{}/topology/" + name
    return build(root, {place.format(cpu): text + "\n" for cpu, text in siblings.items()})


PAIRS = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}


@pytest.mark.parametrize("name", ["thread_siblings_list", "core_cpus_list"])
def test_hyperthreads_of_one_core_count_once(tmp_path: Path, name: str) -> None:
    root = topology(tmp_path, PAIRS, name)
    assert read_cpus(root, affinity=range(16), machine=16).cores == 8
    assert read_cpus(root, affinity=range(8), machine=16).cores == 8
    assert read_cpus(root, affinity=[0, 8, 1, 9, 2], machine=16).cores == 3


@pytest.mark.parametrize(
    ("cpus", "threads"),
    [
        # few CPUs: all of them, hyperthreads or not
        (Cpus(1, 1, 1), 1),
        (Cpus(2, 2, 2), 2),
        (Cpus(2, 2, 1), 2),
        (Cpus(4, 4, 2), 4),
        # more: one is left to others, or two of many
        (Cpus(5, 5, 5), 4),
        (Cpus(11, 11, 11), 10),
        (Cpus(12, 12, 12), 10),
        (Cpus(16, 16, 16), 14),
        (Cpus(64, 64, 64), 62),
        (Cpus(256, 256, 256), 254),
        # hyperthreads are room enough
        (Cpus(8, 8, 4), 4),
        (Cpus(16, 16, 8), 8),
        (Cpus(128, 128, 64), 64),
        # affinity to some cores, both hyperthreads or one of each
        (Cpus(128, 8, 4), 4),
        (Cpus(128, 8, 8), 7),
        (Cpus(64, 1, 1), 1),
        # quotas
        (Cpus(64, 64, 64, 0.5), 1),
        (Cpus(64, 64, 64, 1.5), 1),
        (Cpus(64, 64, 64, 2.0), 2),
        (Cpus(64, 64, 32, 8.0), 7),
        (Cpus(64, 64, 32, 200.0), 32),
        (Cpus(64, 2, 2, 8.0), 2),
    ],
)
def test_the_default_number_of_threads(cpus: Cpus, threads: int) -> None:
    assert default_threads(cpus).count == threads


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 2), st.none() | st.floats(0.01, 600))
def test_the_default_is_never_none_and_never_more_than_there_are(
    machine: int, allowed: int, smt: int, quota: float | None
) -> None:
    cpus = Cpus(max(machine, allowed), allowed, max(1, allowed // smt), quota)
    assert 1 <= default_threads(cpus).count <= cpus.usable <= cpus.allowed


@pytest.mark.parametrize(
    ("cpus", "reason"),
    [
        (Cpus(2, 2, 2), "one for each of 2 CPUs"),
        (Cpus(16, 16, 16), "2 of 16 CPUs left free for the server's own threads"),
        (Cpus(16, 16, 8), "one for each physical core of 16 CPUs"),
        (Cpus(64, 64, 64, 2.0), "cgroup quota of 2 CPUs; the machine has 64"),
        (Cpus(64, 64, 64, 1.5), "cgroup quota of 1.5 CPUs; the machine has 64"),
        (Cpus(64, 1, 1), "CPU affinity of 1 CPU; the machine has 64"),
        (
            Cpus(64, 64, 64, 8.0),
            "cgroup quota of 8 CPUs; the machine has 64; 1 of 8 CPUs left free for the server's own threads",
        ),
    ],
)
def test_the_reason_names_the_limit(cpus: Cpus, reason: str) -> None:
    assert default_threads(cpus).reason == reason


# --- this process ---

needs_linux = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinity here")


@needs_linux
def test_affinity_of_this_process() -> None:
    code = "from cllm.machine import read_cpus; print(read_cpus().allowed)"
    one = min(os.sched_getaffinity(0))
    ran = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: os.sched_setaffinity(0, {one}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "1"


@needs_linux
@pytest.mark.parametrize(("kind", "name"), [(resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")])
def test_ulimits_of_this_process(kind: int, name: str) -> None:
    code = (
        "from cllm.machine import *; room = tightest(read_memory_limits()); "
        "print(room.name, room.free, room.hard, room.counts_mapped, sep=';')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(kind, (200 * MIB, resource.getrlimit(kind)[1])),
        capture_output=True,
        text=True,
        check=True,
    )
    found, free, hard, mapped = ran.stdout.strip().split(";")
    assert found == name and hard == "True" and mapped == str(kind == resource.RLIMIT_AS)
    assert 0 < int(free) < 200 * MIB


def test_importing_it_needs_only_the_standard_library() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['psutil', 'numpy', 'pydantic'])); "
        "from cllm.machine import *; print(default_threads(read_cpus()).count, tightest(read_memory_limits()).free)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("setting", "offered"),
    [("always [madvise] never\n", True), ("[always] madvise never\n", True), ("always madvise [never]\n", False)],
)
def test_large_pages_are_offered_as_the_system_says(tmp_path: Path, setting: str, offered: bool) -> None:
    assert not has_huge_pages(tmp_path)
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    file.parent.mkdir(parents=True)
    file.write_text(setting)
    assert has_huge_pages(tmp_path) is offered
