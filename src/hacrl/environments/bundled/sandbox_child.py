"""The program in which :mod:`hacrl.environments.bundled.sandbox` runs untrusted Python code.

Command: ``python -S -P -B sandbox_child.py CPU_SECONDS MEMORY_BYTES``, with the code on stdin. The program
imports what the code may use, gives up every right it does not need, writes one byte, and runs the code.
The kernel then refuses every system call that is not listed below: no file can be opened, no process or
thread started, no socket made, no signal sent. The filter cannot be removed again.

This file imports the standard library alone and runs without the rest of hacrl.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import importlib
import os
import platform
import resource
import signal
import sys
import traceback
from types import TracebackType
from typing import Any

READY = b"\x01"  # written once the limits are in force
CODE_NAME = "<code>"
# Importable in the code. Other modules cannot be loaded, because no file can be opened.
MODULES = tuple(
    "array base64 bisect calendar cmath collections collections.abc copy dataclasses datetime decimal enum "  # noqa: SIM905
    "fractions functools hashlib heapq io itertools json math numbers operator random re statistics string "
    "sys textwrap time typing unicodedata".split()
)
_USED_LATER = ("_strptime", "encodings.idna", "linecache", "locale")  # by functions of the modules above

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_KILL, SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
# Numbers of the system calls that stay allowed, by machine: (architecture of the filter, numbers).
SYSTEM_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0,
            "write": 1,
            "close": 3,
            "fstat": 5,
            "poll": 7,
            "lseek": 8,
            "mmap": 9,
            "mprotect": 10,
            "munmap": 11,
            "brk": 12,
            "rt_sigaction": 13,
            "rt_sigprocmask": 14,
            "rt_sigreturn": 15,
            "readv": 19,
            "writev": 20,
            "sched_yield": 24,
            "mremap": 25,
            "madvise": 28,
            "nanosleep": 35,
            "getpid": 39,
            "exit": 60,
            "gettimeofday": 96,
            "getrusage": 98,
            "times": 100,
            "sigaltstack": 131,
            "gettid": 186,
            "time": 201,
            "futex": 202,
            "restart_syscall": 219,
            "clock_gettime": 228,
            "clock_getres": 229,
            "clock_nanosleep": 230,
            "exit_group": 231,
            "getrandom": 318,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "close": 57,
            "lseek": 62,
            "read": 63,
            "write": 64,
            "readv": 65,
            "writev": 66,
            "ppoll": 73,
            "fstat": 80,
            "exit": 93,
            "exit_group": 94,
            "futex": 98,
            "nanosleep": 101,
            "clock_gettime": 113,
            "clock_getres": 114,
            "clock_nanosleep": 115,
            "sched_yield": 124,
            "restart_syscall": 128,
            "sigaltstack": 132,
            "rt_sigaction": 134,
            "rt_sigprocmask": 135,
            "rt_sigreturn": 139,
            "times": 153,
            "getrusage": 165,
            "gettimeofday": 169,
            "getpid": 172,
            "gettid": 178,
            "brk": 214,
            "munmap": 215,
            "mremap": 216,
            "mmap": 222,
            "mprotect": 226,
            "madvise": 233,
            "getrandom": 278,
        },
    ),
}


class _Instruction(ctypes.Structure):
    """``struct sock_filter``: one instruction of a filter."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    """``struct sock_fprog``: a filter."""

    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def main() -> None:
    """Read code from stdin and run it under limits."""
    cpu_seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    for module in (*MODULES, *_USED_LATER):
        importlib.import_module(module)
    set_limits(cpu_seconds, memory)
    refuse_system_calls()
    os.write(1, READY)
    run(code)


def set_limits(cpu_seconds: int, memory: int) -> None:
    """Limit CPU time, memory, written files, open files and processes; close all files but the three usual.

    The filter forbids files and processes altogether. Their limits hold if the filter has a hole.
    """
    os.closerange(3, 65536)
    os.environ.clear()
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def refuse_system_calls() -> None:
    """Let the kernel refuse all system calls but the listed ones, for good. Raise OSError if it cannot."""
    if sys.platform != "linux" or platform.machine() not in SYSTEM_CALLS:
        raise OSError(errno.ENOSYS, f"no system call filter for {sys.platform} on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = filter_program(platform.machine())
    program = _Program(len(instructions), instructions)
    for arguments in (
        (PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # the process ends with the one that started it
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),  # needed for a filter without being root
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl({arguments[0]}): {os.strerror(number)}")


def filter_program(machine: str) -> Any:
    """Return the filter as an array of instructions: allow the listed calls, refuse others with EPERM."""
    load, jump_if_equal, finish = 0x20, 0x15, 0x06
    number, architecture = 0, 4  # offsets in struct seccomp_data
    own_architecture, allowed = SYSTEM_CALLS[machine]
    listed = [
        _Instruction(load, 0, 0, architecture),
        _Instruction(jump_if_equal, 1, 0, own_architecture),
        _Instruction(finish, 0, 0, SECCOMP_RET_KILL),  # numbers mean other calls in other architectures
        _Instruction(load, 0, 0, number),
    ]
    for value in allowed.values():
        listed.append(_Instruction(jump_if_equal, 0, 1, value))
        listed.append(_Instruction(finish, 0, 0, SECCOMP_RET_ALLOW))
    listed.append(_Instruction(finish, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM))
    return (_Instruction * len(listed))(*listed)


def run(code: str) -> None:
    """Run the code. Print the value of a last expression, as Python's prompt does, and errors."""
    importlib.import_module("random").seed(0)  # the same code prints the same numbers
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.excepthook = print_error
    tree = ast.parse(code, CODE_NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, CODE_NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), CODE_NAME, "eval"), names)
        if value is not None:
            print(repr(value))


def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the error and the lines of the code that led to it, without the files of this program."""
    frames = [frame for frame in traceback.extract_tb(trace, limit=-50) if frame.filename == CODE_NAME]
    for frame in frames[-5:]:
        print(f"line {frame.lineno}, in {frame.name}", file=sys.stderr)
    print("".join(traceback.format_exception_only(kind, error)).strip(), file=sys.stderr)


if __name__ == "__main__":
    main()
