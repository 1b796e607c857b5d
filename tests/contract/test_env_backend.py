"""The contract that every sandbox backend keeps (`envclient.types.Backend`), played on the real backends."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from envclient.base.errors import VenusError
from envclient.node.process import ProcessBackend
from envclient.types import Backend, ExecResult, ExecStatus, Template

BACKENDS: dict[str, Callable[[], Backend]] = {"process": ProcessBackend}
Scenario = Callable[[Backend], Awaitable[None]]
Play = Callable[..., None]
MiB = 1 << 20


@pytest.fixture(params=BACKENDS)
def play(request: pytest.FixtureRequest) -> Play:
    """Runs a scenario on a fresh backend whose template `t` has the given fields and which holds sandbox `a`."""

    def run(scenario: Scenario, **fields: object) -> None:
        async def main() -> None:
            backend = BACKENDS[request.param]()
            try:
                await backend.prepare(Template(name="t", **fields))  # type: ignore[arg-type]
                await backend.create("t", "a")
                await asyncio.wait_for(scenario(backend), 60)
            finally:
                await backend.close()

        asyncio.run(main())

    return run


async def sh(backend: Backend, sandbox: str, script: str, timeout_s: float = 20.0, **more: object) -> ExecResult:
    options = {"stdin": b"", "max_output_bytes": 65536} | more
    return await backend.exec(sandbox, ["sh", "-c", script], timeout_s, **options)  # type: ignore[arg-type]


async def py(backend: Backend, sandbox: str, script: str, timeout_s: float = 20.0) -> ExecResult:
    return await backend.exec(sandbox, [sys.executable, "-c", textwrap.dedent(script)], timeout_s, b"", 65536)


async def text(backend: Backend, sandbox: str, script: str) -> str:
    result = await sh(backend, sandbox, script)
    assert result.status is ExecStatus.EXITED, result
    return result.output.decode()


# --------------------------------------------------------------------------------------------------------- commands


def test_exit_codes_and_signals(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        done = await sh(backend, "a", "exit 7")
        assert (done.status, done.exit_code, done.output) == (ExecStatus.EXITED, 7, b"")
        assert (await sh(backend, "a", "true")).exit_code == 0
        missing = await backend.exec("a", ["no-such-program"], 5, b"", 1000)
        assert (missing.status, missing.exit_code) == (ExecStatus.EXITED, 127)
        assert b"no-such-program" in missing.output
        killed = await sh(backend, "a", "kill -SEGV $$")
        assert (killed.status, killed.exit_code) == (ExecStatus.KILLED, 139)

    play(scenario)


def test_stdin_and_both_output_streams_in_order(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        given = bytes(range(256)) * 4096  # more than a pipe holds
        echoed = await backend.exec("a", ["cat"], 10, given, len(given))
        assert echoed.output == given and not echoed.truncated
        empty = await backend.exec("a", ["cat"], 10, b"", 100)
        assert empty.output == b""
        mixed = await sh(backend, "a", "echo one; echo two >&2; echo three")
        assert mixed.output == b"one\ntwo\nthree\n"

    play(scenario)


def test_output_is_bounded_and_says_where_it_was_cut(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        result = await sh(backend, "a", "echo beginning; head -c 1000000 /dev/zero", max_output_bytes=1000)
        assert result.truncated and result.exit_code == 0
        assert result.output.startswith(b"beginning\n")
        assert b"[output cut here: 999010 more bytes]" in result.output
        assert len(result.output) < 1100
        exact = await sh(backend, "a", "printf 12345", max_output_bytes=5)
        assert (exact.output, exact.truncated) == (b"12345", False)
        endless = await sh(backend, "a", "yes", timeout_s=0.5, max_output_bytes=10)
        assert (endless.status, endless.truncated) == (ExecStatus.TIMED_OUT, True)

    play(scenario)


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setpgid(0, 0)
        time.sleep(1000)
    os._exit(0)
os.wait()
if "child" in sys.argv and os.fork() == 0:
    time.sleep(1000)
time.sleep(1000 if "wait" in sys.argv else 0)
"""
LIVING = "grep -l '[t]ime.sleep' /proc/[0-9]*/cmdline 2>/dev/null | wc -l"


def test_timeout_kills_all_descendants(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        argv = [sys.executable, "-c", DAEMON, "wait", "child"]
        result = await backend.exec("a", argv, 1.0, b"", 1000)
        assert result.status is ExecStatus.TIMED_OUT
        assert result.duration_s >= 1.0
        assert await text(backend, "a", LIVING) == "0\n"

    play(scenario)


def test_timeout_beside_another_command_spares_only_that_one(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        other = asyncio.create_task(sh(backend, "a", "while [ ! -e go ]; do sleep 0.05; done; sleep 0.1; echo alive"))
        argv = [sys.executable, "-c", DAEMON, "wait", "child"]
        result = await backend.exec("a", argv, 1.0, b"", 1000)
        assert result.status is ExecStatus.TIMED_OUT
        assert await text(backend, "a", LIVING) == "0\n"
        await backend.write("a", "go", b"")
        assert (await other).output == b"alive\n"

    play(scenario)


def test_a_background_process_does_not_hold_the_reply(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        result = await backend.exec("a", [sys.executable, "-c", DAEMON], 20.0, b"", 1000)
        assert (result.status, result.exit_code) == (ExecStatus.EXITED, 0)
        assert await text(backend, "a", LIVING) == "1\n"

    play(scenario)


def test_commands_of_one_sandbox_run_side_by_side(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        waiter = asyncio.create_task(sh(backend, "a", "while [ ! -e go ]; do sleep 0.02; done; echo went"))
        assert await text(backend, "a", "echo go > go; echo done") == "done\n"
        assert (await waiter).output == b"went\n"

    play(scenario)


# ------------------------------------------------------------------------------------------------------------ files


def test_read_and_write(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        data = os.urandom(3 * MiB)
        await backend.write("a", "deep/er/file.bin", data)
        whole = await backend.read("a", "/workspace/deep/er/file.bin", 4 * MiB)
        assert whole.data == data and not whole.truncated
        cut = await backend.read("a", "deep/er/file.bin", 1000)
        assert cut.data == data[:1000] and cut.truncated
        await backend.write("a", "deep/er/file.bin", b"short")
        assert await text(backend, "a", "cat deep/er/file.bin") == "short"
        await backend.write("a", "/tmp/x", b"1")
        assert await text(backend, "a", "cat /tmp/x") == "1"

    play(scenario)


@pytest.mark.parametrize("path", ["missing", "deep", "pipe", "/dev/zero", "loop"])
def test_what_is_no_regular_file_is_refused_at_once(play: Play, path: str) -> None:
    async def scenario(backend: Backend) -> None:
        await sh(backend, "a", "mkdir deep; mkfifo pipe; ln -s loop loop")
        with pytest.raises(VenusError, match="read"):
            await backend.read("a", path, 100)
        if path != "missing":
            with pytest.raises(VenusError, match="write"):
                await backend.write("a", path, b"x")
        assert await text(backend, "a", "echo still here") == "still here\n"

    play(scenario)


@pytest.mark.parametrize("bad", ["a\0b", "a\ud800b"])
def test_a_name_that_the_kernel_cannot_take_is_an_error(play: Play, bad: str) -> None:
    async def scenario(backend: Backend) -> None:
        with pytest.raises(VenusError, match="read: "):
            await backend.read("a", bad, 100)
        with pytest.raises(VenusError, match="write: "):
            await backend.write("a", bad, b"x")
        for _ in range(600):  # with two commands each, more than the descriptors that the agent may hold
            for argv in ([bad], ["true", bad]):
                refused = await backend.exec("a", argv, 5, b"", 1000)
                assert (refused.status, refused.exit_code) == (ExecStatus.EXITED, 126) and refused.output
        assert await text(backend, "a", "echo still here") == "still here\n"

    play(scenario)


def test_no_way_out_by_link_or_dots(play: Play, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the run's token")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "library.py").write_text("original")
    tmp_path.chmod(0o755)

    async def scenario(backend: Backend) -> None:
        host = str(secret)
        dots = "/workspace/" + "../" * 20 + host.lstrip("/")
        await sh(backend, "a", f"ln -s {host} link; ln -s {tmp_path} folder; ln -s /opt/lib/library.py lib")
        for path in (host, dots, "link", "folder/secret", "/proc/1/root" + host, "/etc/shadow"):
            with pytest.raises(VenusError):
                await backend.read("a", path, 100)
            assert b"token" not in (await sh(backend, "a", f"cat {path}")).output
        for path in ("/opt/lib/library.py", "lib", "/opt/lib/new", "/usr/bin/new", "/etc/new", "/new", "/dev/new"):
            with pytest.raises(VenusError):
                await backend.write("a", path, b"changed")
            assert (await sh(backend, "a", f"echo changed > {path}")).exit_code != 0
        assert (mounted / "library.py").read_text() == "original"

    play(scenario, mounts=[(str(mounted), "/opt/lib")])


def test_twin_has_the_files_and_a_life_of_its_own(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        await sh(
            backend, "a", "mkdir -p d/empty; echo 1 > d/f; ln -s f d/l; ln d/f hard; chmod 750 d/f; echo t > /tmp/t"
        )
        await sh(backend, "a", "mkfifo pipe; (sleep 100 &)")
        await backend.twin("a", "b")
        listing = "stat -c '%n %a %F' d d/empty d/f d/l hard; cat d/l hard /tmp/t; [ d/f -ef hard ] && echo same"
        assert await text(backend, "b", listing) == await text(backend, "a", listing)
        assert "sleep" not in await text(backend, "b", "cat /proc/[0-9]*/comm")
        await sh(backend, "b", "echo 2 > d/f")
        assert await text(backend, "a", "cat d/f") == "1\n"
        await backend.destroy("a")
        assert await text(backend, "b", "cat d/f") == "2\n"

    play(scenario)


def test_mounts_below_workdir_and_tmp_stay_visible(play: Play, tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text("library")
    tmp_path.chmod(0o755)

    async def scenario(backend: Backend) -> None:
        await sh(backend, "a", "echo mine > src/mine; echo mine > own")
        await backend.twin("a", "b")
        for sandbox in ("a", "b"):
            assert await text(backend, sandbox, "cat src/deep/lib.py one.py /tmp/one.py; ls src/deep; cat own") == (
                "librarylibrarylibrarylib.py\nmine\n"
            )
            assert (await sh(backend, sandbox, "echo changed > src/deep/lib.py || rm src/deep/lib.py")).exit_code != 0

    file = str(tmp_path / "lib.py")
    play(scenario, mounts=[(str(tmp_path), "/workspace/src/deep"), (file, "/workspace/one.py"), (file, "/tmp/one.py")])


# -------------------------------------------------------------------------------------------------------- isolation


def test_sandboxes_do_not_see_each_other(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.create("t", "b")
        await sh(backend, "a", "echo secret | tee mine /tmp/mine /dev/shm/mine; (sleep 987 &)")
        # A checkout may lie in /tmp itself, and every sandbox sees this Python.
        found = f"find /tmp /dev/shm -path {sys.prefix} -prune -o -type f -print"
        assert await text(backend, "b", f"{found}; ls mine 2>&1 | grep -c 'No such'") == "1\n"
        assert "987" not in await text(backend, "b", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        own = await text(backend, "b", "ls -d /proc/[0-9]* | wc -l")
        assert int(own) <= 4  # the agent, sh, ls, wc
        assert (await sh(backend, "b", "kill -9 -1; kill -9 $(seq 2 400 | grep -v $$)")).output.count(b"secret") == 0
        assert "987" in await text(backend, "a", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")

    play(scenario)


def test_neither_network_nor_host_nor_neighbour(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.create("t", "b")
        with socket.socket() as listening, socket.socket(socket.AF_UNIX) as abstract:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            abstract.bind(f"\0venus-test-{os.getpid()}")
            abstract.listen()
            probe = f"""
                import socket
                for family, address in (
                    (socket.AF_INET, ("127.0.0.1", {listening.getsockname()[1]})),
                    (socket.AF_INET, ("127.0.0.1", 4711)),
                    (socket.AF_INET, ("192.0.2.1", 80)),
                    (socket.AF_UNIX, "\\0venus-test-{os.getpid()}"),
                    (socket.AF_UNIX, "\\0between"),
                    (socket.AF_VSOCK, (2, 1)),
                ):
                    try:
                        with socket.socket(family) as s:
                            s.settimeout(2)
                            s.connect(address)
                        print("reached", address)
                    except OSError as error:
                        print("no")
                """
            serve = """
                import socket, time
                a = socket.create_server(("127.0.0.1", 4711))
                b = socket.socket(socket.AF_UNIX); b.bind("\\0between"); b.listen()
                open("ready", "w").close()
                for _ in range(2):
                    a.accept()
                """
            server = asyncio.create_task(py(backend, "b", serve))
            await sh(backend, "b", "while [ ! -e ready ]; do sleep 0.05; done")
            assert (await py(backend, "a", probe)).output == b"no\n" * 6
            connect = "import socket; socket.create_connection(('127.0.0.1', 4711)); print('own loopback works')"
            assert (await py(backend, "b", connect)).output == b"own loopback works\n"
            await py(backend, "b", connect)
            await server

    play(scenario)


def test_nothing_of_the_host_or_the_service_leaks_in(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VENUS_TOKEN", "token-of-this-run")

    async def scenario(backend: Backend) -> None:
        seen = await text(backend, "a", "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'")
        assert "token-of-this-run" not in seen and "VENUS" not in seen
        for path in ("/home", "/etc/shadow", "/etc/passwd", "/sys", "/run", "/var", f"/proc/{os.getpid()}"):
            if os.path.exists(path):
                assert (await sh(backend, "a", f"cat {path} || ls {path}")).exit_code != 0, path
        assert (await text(backend, "a", "ls /proc/self/fd")).split() == ["0", "1", "2", "3"]  # 3: the listing itself

    play(scenario)


def test_no_way_to_more_privilege(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        status = await text(backend, "a", "grep -E '^(Cap|NoNewPrivs|Seccomp:|Uid)' /proc/self/status")
        fields = dict(line.split(":\t") for line in status.splitlines())
        assert {fields[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        assert "0" not in fields["Uid"].split()
        probe = """
            import ctypes, os
            libc = ctypes.CDLL(None, use_errno=True)
            print(libc.unshare(0x10000000), libc.unshare(0x20000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
            print(libc.ptrace(16, 1, 0, 0), libc.shmget(0, 4096, 0o1600), libc.kill(1, 9))
            for path in ("/proc/1/mem", "/proc/1/environ"):
                try:
                    open(path, "rb").read(1)
                    print("read", path)
                except OSError:
                    print("no")
            """
        assert (await py(backend, "a", probe)).output == b"-1 -1 -1\n-1 -1 0\nno\nno\n"  # a signal to pid 1 is dropped
        assert await text(backend, "a", "echo agent lives") == "agent lives\n"

    play(scenario)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give each sandbox a uid of its own")
def test_every_sandbox_has_a_uid_of_its_own_and_gives_it_back(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.create("t", "b")
        first, second = await text(backend, "a", "id -u"), await text(backend, "b", "id -u")
        assert first != second and int(first) > 65535
        await backend.destroy("a")
        await backend.create("t", "c")
        assert await text(backend, "c", "id -u") == first

    play(scenario)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give each sandbox a uid of its own")
def test_a_sandbox_that_does_not_come_up_keeps_no_uid(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise OSError("no descriptors")

    async def scenario(backend: Backend) -> None:
        first = await text(backend, "a", "id -u")
        with monkeypatch.context() as patched:
            patched.setattr("envclient.node.process.GuestLink.connect", fail)
            with pytest.raises(OSError, match="no descriptors"):
                await backend.create("t", "b")
        await backend.create("t", "c")
        assert int(await text(backend, "c", "id -u")) == int(first) + 1

    play(scenario)


# ----------------------------------------------------------------------------------------------------------- limits


async def unharmed(backend: Backend, neighbour: str) -> None:
    """The neighbour still forks, allocates and writes."""
    script = """
        import subprocess
        data = bytearray(50 << 20)
        open("f", "wb").write(data[: 1 << 20])
        subprocess.run(["true"], check=True)
        """
    result = await py(backend, neighbour, script)
    assert (result.status, result.exit_code) == (ExecStatus.EXITED, 0), result


def test_fork_bomb_hits_its_own_limit(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.create("t", "b")
        bomb = "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.1)"
        running = asyncio.create_task(py(backend, "a", bomb, timeout_s=3.0))
        await asyncio.sleep(1.0)
        await unharmed(backend, "b")
        assert (await running).status is ExecStatus.TIMED_OUT
        assert int(await text(backend, "a", "ls -d /proc/[0-9]* | wc -l")) <= 4

    play(scenario, max_processes=24)


def test_a_full_process_table_is_told_as_a_limit(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        await sh(backend, "a", "> started; for i in $(seq 40); do sleep 100 & done", timeout_s=5.0)
        last = asyncio.create_task(sh(backend, "a", "echo > started; exec sleep 100", timeout_s=200))
        for _ in range(1000):
            if (await backend.read("a", "started", 10)).data:
                break
        result = await sh(backend, "a", "true")
        assert result.status is ExecStatus.KILLED and b"temporarily unavailable" in result.output
        last.cancel()

    play(scenario, max_processes=8)


def test_memory_hog_hits_its_own_limit(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.create("t", "b")
        hog = await py(backend, "a", "b = [bytearray(16 << 20) for _ in range(64)]")
        assert hog.exit_code == 1 and b"MemoryError" in hog.output
        await unharmed(backend, "b")
        await unharmed(backend, "a")

    play(scenario, memory_bytes=512 * MiB)


def test_full_disk_hits_its_own_limit(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.create("t", "b")
        files = "/workspace/f /tmp/f /dev/shm/f"
        script = f"for f in {files}; do head -c 7M /dev/zero > $f; done; du -scm {files} | tail -1"
        result = await sh(backend, "a", script)
        assert b"No space left" in result.output
        assert int(result.output.split()[-2]) <= 16
        with pytest.raises(VenusError, match="No space left"):
            await backend.write("a", "g", b"x" * 16 * MiB)
        many = await py(backend, "a", "[open(f'/tmp/{i}', 'w').close() for i in range(100_000)]")
        assert b"No space left" in many.output
        await unharmed(backend, "b")
        await sh(backend, "a", "rm -r /workspace/f /tmp/* /dev/shm/f")
        await unharmed(backend, "a")

    play(scenario, disk_bytes=16 * MiB)


# ------------------------------------------------------------------------------------------------ life and templates


def test_destroy_is_idempotent_and_final(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        running = asyncio.create_task(sh(backend, "a", "sleep 100", timeout_s=200))
        await asyncio.sleep(0.2)
        await asyncio.gather(backend.destroy("a"), backend.destroy("a"))
        await backend.destroy("a")
        await backend.destroy("never was")
        with pytest.raises(VenusError):
            await running
        for call in (
            sh(backend, "a", "true"),
            backend.read("a", "f", 1),
            backend.write("a", "f", b""),
            backend.twin("a", "c"),
        ):
            with pytest.raises(VenusError, match="does not exist"):
                await call

    play(scenario)


WARM = """
import os, time
state = {"loaded": 1}
import guest

def hello(argv, stdin, out):
    print("a test prints this")
    os.write(2, b"and this")
    state["loaded"] += 1
    os.write(out, b"%d %s %s" % (state["loaded"], argv[1].encode(), stdin))
    return 3

def broken(argv, stdin, out):
    raise ValueError("the applet's own fault")

def hang(argv, stdin, out):
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    os.write(out, b"before")
    time.sleep(1000)

def look(argv, stdin, out):
    for fd in sorted(os.listdir("/proc/self/fd"))[:-1]:  # the last one is the listing itself
        os.write(out, os.readlink("/proc/self/fd/" + fd).split(":")[0].encode() + b" ")
    return 0

guest.serve({"hello": hello, "broken": broken, "hang": hang, "look": look})
"""


def warm(tmp_path: Path, source: str = WARM) -> dict[str, object]:
    """Template fields of a warm-up process that runs `source`."""
    (tmp_path / "warm.py").write_text(source)
    return {"mounts": [(str(tmp_path / "warm.py"), "/opt/warm.py")], "warmup": [sys.executable, "/opt/warm.py"]}


def test_applets_run_in_a_fork_of_the_warm_process(play: Play, tmp_path: Path) -> None:
    async def scenario(backend: Backend) -> None:
        for _ in range(2):  # what one run changes, the next does not see
            result = await backend.exec("a", ["hello", "you"], 5, b"there", 100)
            assert (result.status, result.exit_code, result.output) == (ExecStatus.EXITED, 3, b"2 you there")
        broken = await backend.exec("a", ["broken"], 5, b"", 10_000)
        assert broken.exit_code == 1 and b"the applet's own fault" in broken.output
        hung = await backend.exec("a", ["hang"], 0.5, b"", 100)
        assert (hung.status, hung.output) == (ExecStatus.TIMED_OUT, b"before")
        assert await text(backend, "a", "ls -d /proc/[0-9]* | wc -l") in ("3\n", "4\n")
        assert (await backend.exec("a", ["look"], 5, b"", 1000)).output.split() == [b"/dev/null"] * 3 + [b"pipe"]
        assert await text(backend, "a", "echo programs too") == "programs too\n"

    play(scenario, **warm(tmp_path))


def test_many_sandboxes_at_once(play: Play, tmp_path: Path) -> None:
    async def scenario(backend: Backend) -> None:
        names = [f"s{number}" for number in range(40)]
        await asyncio.gather(*(backend.create("t", name) for name in names))
        results = await asyncio.gather(*(backend.exec(name, ["hello", name], 30, b"", 100) for name in names))
        assert [r.output.decode() for r in results] == [f"2 {name} " for name in names]
        await asyncio.gather(*(backend.destroy(name) for name in names))

    play(scenario, **warm(tmp_path))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise SystemExit('library not found')", "library not found"),
        ("import time; time.sleep(60)", "was not ready after 1 s"),
        (
            "import threading, guest\nthreading.Thread(target=threading.Event().wait).start()\nguest.serve({})",
            "2 threads",
        ),
    ],
)
def test_a_failing_warm_up_is_told(play: Play, tmp_path: Path, source: str, told: str) -> None:
    async def scenario(backend: Backend) -> None:
        fields = warm(tmp_path, source)
        with pytest.raises(VenusError, match=told):
            await backend.prepare(Template(name="bad", warmup_timeout_s=1.0, **fields))  # type: ignore[arg-type]
        with pytest.raises(VenusError, match="not registered"):
            await backend.create("bad", "x")

    play(scenario)


def test_templates_are_immutable_and_checked(play: Play) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.prepare(Template(name="t"))
        with pytest.raises(VenusError, match="other contents"):
            await backend.prepare(Template(name="t", max_processes=3))
        with pytest.raises(VenusError, match="cannot be bound"):
            await backend.prepare(Template(name="u", mounts=[("/no/such/folder", "/opt")]))
        with pytest.raises(VenusError, match="workdir"):
            await backend.prepare(Template(name="u", workdir="/tmp"))
        with pytest.raises(VenusError, match="not registered"):
            await backend.create("nobody", "x")
        with pytest.raises(VenusError, match="argv is empty"):
            await backend.exec("a", [], 1, b"", 1)

    play(scenario)
