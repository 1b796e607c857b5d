"""The system calls a sandbox may not make, as a seccomp filter.

Standard library only; bound into the container beside `jail.py`. Capabilities, namespaces and uids already keep a
sandbox in; this narrows what a defect of the kernel could be reached through, and closes three ways round the limits:
a user namespace of its own (new mounts without a size), System V memory (counted nowhere), and sockets that a network
namespace does not confine (vsock).
"""

from __future__ import annotations

import ctypes
import errno
import platform

LD, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NR_OFFSET, ARCH_OFFSET, ARG0_OFFSET = 0, 4, 16
NAMESPACE_FLAGS = 0x7E020000
X32_BIT = 0x40000000
FAMILIES = (1, 2, 10, 16)
"""unix, inet, inet6, netlink: what a network namespace confines."""

SAME_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
"""io_uring_*, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr."""
CLONE3 = 435
MACHINES: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    # audit arch, clone, socket, then: mount umount2 pivot_root chroot setns unshare keyctl add_key request_key bpf
    # perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev kexec_load kexec_file_load shmget
    "x86_64": (
        0xC000003E,
        56,
        41,
        (165, 166, 155, 161, 308, 272, 250, 248, 249, 321, 298, 323, 101, 310, 311, 246, 320, 29),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        198,
        (40, 39, 41, 51, 268, 97, 219, 217, 218, 280, 241, 282, 117, 270, 271, 104, 294, 194),
    ),
}


class Instruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32))


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction)))


def deny(number: int) -> tuple[int, int, int, int]:
    return (RET, 0, 0, ERRNO | number)


def rules(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter for `machine` as (code, jump if true, jump if false, constant).

    Raises:
        OSError: no table for this machine.
    """
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine!r}")
    arch, clone, socket, forbidden = MACHINES[machine]
    out = [(LD, 0, 0, ARCH_OFFSET), (JEQ, 1, 0, arch), (RET, 0, 0, KILL), (LD, 0, 0, NR_OFFSET)]
    if machine == "x86_64":
        out += [(JGE, 0, 1, X32_BIT), deny(errno.ENOSYS)]
    # ENOSYS makes libc fall back to clone, whose flags a filter can read.
    out += [(JEQ, 0, 1, CLONE3), deny(errno.ENOSYS)]
    for number in forbidden + SAME_EVERYWHERE:
        out += [(JEQ, 0, 1, number), deny(errno.EPERM)]
    out += [
        (JEQ, 0, 4, clone),
        (LD, 0, 0, ARG0_OFFSET),
        (JSET, 0, 1, NAMESPACE_FLAGS),
        deny(errno.EPERM),
        (RET, 0, 0, ALLOW),
    ]
    known = [(JEQ, len(FAMILIES) - place, 0, family) for place, family in enumerate(FAMILIES)]
    out += [
        (JEQ, 0, len(known) + 2, socket),
        (LD, 0, 0, ARG0_OFFSET),
        *known,
        deny(errno.EAFNOSUPPORT),
        (RET, 0, 0, ALLOW),
    ]
    return out


def program() -> Program:
    """The filter for this machine, ready for prctl(PR_SET_SECCOMP). Keep the returned object alive while it is used."""
    table = rules(platform.machine())
    return Program(len(table), (Instruction * len(table))(*(Instruction(*row) for row in table)))
