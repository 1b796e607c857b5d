"""The system call filter, run through a small interpreter of its instructions, also for machines we are not on."""

from __future__ import annotations

import errno

import pytest

from envclient.node.syscalls import ALLOW, ERRNO, KILL, MACHINES, rules

NEWUSER, VFORK_FLAGS, THREAD_FLAGS = 0x10000000, 0x4111, 0x3D0F00
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, AF_ALG, AF_VSOCK = 1, 2, 10, 16, 38, 40


def verdict(machine: str, number: int, arg0: int = 0, arch: int | None = None) -> int:
    """What the filter of `machine` returns for one call: classic BPF, the five instructions that we use."""
    data = {0: number, 4: MACHINES[machine][0] if arch is None else arch, 16: arg0}
    table, at, accumulator = rules(machine), 0, 0
    while True:
        code, if_true, if_false, constant = table[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            accumulator = data[constant]
        else:
            holds = {
                0x15: accumulator == constant,
                0x35: accumulator >= constant,
                0x45: bool(accumulator & constant),
            }[code]
            at += if_true if holds else if_false


CALLS = {
    # name: x86_64, aarch64
    "read": (0, 63),
    "write": (1, 64),
    "execve": (59, 221),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "shmget": (29, 194),
    "io_uring_setup": (425, 425),
    "fsopen": (430, 430),
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
}
MACHINE_COLUMN = [("x86_64", 0), ("aarch64", 1)]


@pytest.mark.parametrize(("machine", "column"), MACHINE_COLUMN)
def test_what_is_forbidden_and_what_is_not(machine: str, column: int) -> None:
    def call(name: str, arg0: int = 0) -> int:
        return verdict(machine, CALLS[name][column], arg0)

    for name in ("read", "write", "execve"):
        assert call(name) == ALLOW, name
    for name in CALLS.keys() - {"read", "write", "execve", "clone", "clone3", "socket"}:
        assert call(name) == ERRNO | errno.EPERM, name
    assert call("clone3") == ERRNO | errno.ENOSYS
    assert call("clone", VFORK_FLAGS) == call("clone", THREAD_FLAGS) == call("clone") == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, NEWUSER, 0x20000000, 0x40000000):
        assert call("clone", flag | VFORK_FLAGS) == ERRNO | errno.EPERM
    for family in (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK):
        assert call("socket", family) == ALLOW
    for family in (0, AF_ALG, AF_VSOCK, 17):
        assert call("socket", family) == ERRNO | errno.EAFNOSUPPORT


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_by_another_architecture_end_the_process(machine: str) -> None:
    assert verdict(machine, 0, arch=0x40000003) == KILL


def test_the_x32_numbers_are_no_way_round() -> None:
    assert verdict("x86_64", 0x40000000 | 165) == ERRNO | errno.ENOSYS


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(OSError, match="riscv64"):
        rules("riscv64")
