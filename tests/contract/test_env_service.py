"""The environment service as its clients and its launcher meet it: a real process, real sandboxes, the real client."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from envclient.base.errors import WireError
from envclient.base.ports import listen, port_of
from envclient.client import EnvClient
from envclient.types import ExecStatus, Template

TOKEN = "a-token"
ROOT = Path(__file__).parents[2]


class Service:
    """`python -m envclient.controller` with its socket handed in, as the launcher starts it."""

    def __init__(self, run_dir: Path, config: str) -> None:
        (run_dir / "config.yaml").write_text(f"env: {config}\n")
        with listen("127.0.0.1") as sock:
            self.url = f"http://127.0.0.1:{port_of(sock)}"
            argv = [sys.executable, "-m", "envclient.controller", "--run-dir", str(run_dir), "--fd", str(sock.fileno())]
            self.log = run_dir / "log"
            with open(self.log, "wb") as log:
                environment = {**os.environ, "VENUS_TOKEN": TOKEN}
                self.process = subprocess.Popen(
                    argv, pass_fds=(sock.fileno(),), env=environment, stdout=log, stderr=log, cwd=ROOT
                )

    def play(self, scenario: Callable[[EnvClient], Awaitable[None]]) -> None:
        async def main() -> None:
            async with EnvClient(self.url, TOKEN) as client:
                await client.register([Template(name="t")])
                await asyncio.wait_for(scenario(client), 60)

        asyncio.run(main())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts services with a config; ends them."""
    services: list[Service] = []

    def make(config: str = "{}") -> Service:
        services.append(Service(tmp_path, config))
        return services[-1]

    yield make
    for service in services:
        service.process.kill()
        service.process.wait()


def descendants(pid: int) -> set[int]:
    """Ids of all processes below `pid`."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | descendants(child)
    return found


def wait_until_gone(pids: set[int], seconds: float) -> set[int]:
    """Which of `pids` are still there after at most `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pids = {pid for pid in pids if Path(f"/proc/{pid}").exists()}
        if not pids:
            break
        time.sleep(0.05)
    return pids


def test_a_wrong_token_is_refused(start: Callable[..., Service]) -> None:
    service = start()

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=service.url, trust_env=False) as nobody:
            assert (await nobody.post("/v1/statistics")).status_code == 401
        for token in ("another", TOKEN + "x", TOKEN[:-1]):
            async with EnvClient(service.url, token) as client:
                for call in (
                    client.register([Template(name="t")]),
                    client.lease("t", "x", 10, "x"),
                    client.exec("x", ["true"], 1),
                    client.read("x", "f"),
                    client.write("x", "f", b""),
                    client.twin("x", 1, "x"),
                    client.release("x"),
                    client.statistics(),
                ):
                    with pytest.raises(WireError, match="wrong or missing token"):
                        await call

    asyncio.run(scenario())


def test_lease_use_twin_release(start: Callable[..., Service]) -> None:
    async def scenario(client: EnvClient) -> None:
        lease = await client.lease("t", "p0.0.0.0", 60, "key")
        assert (lease.template, lease.trajectory) == ("t", "p0.0.0.0")
        assert await client.lease("t", "p0.0.0.0", 60, "key") == lease
        await client.write(lease.lease_id, "f", b"data")
        result = await client.exec(lease.lease_id, ["sh", "-c", "cat f -"], 10, stdin=b" and stdin")
        assert (result.status, result.output) == (ExecStatus.EXITED, b"data and stdin")
        twin = await client.twin(lease.lease_id, 60, "twin")
        assert await client.twin(lease.lease_id, 60, "twin") == twin
        await client.release(lease.lease_id)
        await client.release(lease.lease_id)
        assert (await client.read(twin.lease_id, "f")).data == b"data"
        for call in (
            client.exec(lease.lease_id, ["true"], 1),
            client.read(lease.lease_id, "f"),
            client.write(lease.lease_id, "f", b""),
            client.twin(lease.lease_id, 1, "another"),
        ):
            with pytest.raises(WireError, match=f"{lease.lease_id}.* does not live"):
                await call
        with pytest.raises(WireError, match="has ended: released"):
            await client.lease("t", "p0.0.0.0", 60, "key")
        await client.release(twin.lease_id)
        await client.release("never was")
        statistics = await client.statistics()
        assert (statistics.leases, statistics.created, statistics.released, statistics.execs) == (0, 2, 2, 1)

    start().play(scenario)


def test_the_same_key_at_once_makes_one_sandbox(start: Callable[..., Service]) -> None:
    async def scenario(client: EnvClient) -> None:
        leases = await asyncio.gather(*(client.lease("t", "x", 60, f"key{number % 3}") for number in range(30)))
        assert len({lease.lease_id for lease in leases}) == 3
        assert (await client.statistics()).created == 3

    start().play(scenario)


def test_an_expired_lease_ends_with_all_it_runs(start: Callable[..., Service]) -> None:
    service = start()

    async def scenario(client: EnvClient) -> None:
        before = descendants(service.process.pid)
        lease = await client.lease("t", "x", 1.5, "key")
        inside = descendants(service.process.pid) - before
        assert inside
        with pytest.raises(WireError, match="has ended"):
            await client.exec(lease.lease_id, ["sleep", "100"], 100)
        assert not wait_until_gone(inside, 10)
        statistics = await client.statistics()
        assert (statistics.leases, statistics.expired, statistics.released) == (0, 1, 0)
        await client.release(lease.lease_id)

    service.play(scenario)


def test_leases_beyond_the_capacity_wait_or_are_refused(start: Callable[..., Service]) -> None:
    async def scenario(client: EnvClient) -> None:
        first = await client.lease("t", "x", 60, "1")
        second = asyncio.create_task(client.lease("t", "x", 60, "2"))
        with pytest.raises(WireError, match="no room for 1 s: all 1 sandboxes are in use"):
            await client.lease("t", "x", 60, "3")
        with pytest.raises(WireError, match="no room"):
            await second
        third = asyncio.create_task(client.lease("t", "x", 60, "4"))
        await asyncio.sleep(0.1)
        await client.release(first.lease_id)
        assert (await client.exec((await third).lease_id, ["true"], 5)).exit_code == 0

    start("{max_sandboxes: 1, lease_wait_s: 1.0}").play(scenario)


def test_requests_that_cannot_be_met_are_refused_in_one_line(start: Callable[..., Service]) -> None:
    async def scenario(client: EnvClient) -> None:
        lease = await client.lease("t", "x", 60, "key")
        for call, told in (
            (client.lease("u", "x", 60, "k"), "template 'u' is not registered"),
            (client.lease("t", "x", 0, "k"), "lifetime_s is 0"),
            (client.exec(lease.lease_id, [], 5), "argv is empty"),
            (client.exec(lease.lease_id, ["true"], -1), "timeout_s is -1"),
            (client.read(lease.lease_id, "missing"), "No such file"),
            (client.register([Template(name="t", max_processes=1)]), "other contents"),
        ):
            with pytest.raises(WireError, match=told):
                await call
        statistics = await client.statistics()
        assert (statistics.leases, statistics.templates) == (1, 1)

    start().play(scenario)


def test_a_template_whose_zygote_died_starts_again(start: Callable[..., Service]) -> None:
    service = start()

    async def scenario(client: EnvClient) -> None:
        lease = await client.lease("t", "x", 60, "1")
        bwrap = next(
            pid for pid in descendants(service.process.pid) if "bwrap" in Path(f"/proc/{pid}/comm").read_text()
        )
        os.kill(bwrap, signal.SIGKILL)
        with pytest.raises(WireError, match="ended"):
            await client.exec(lease.lease_id, ["sleep", "10"], 20)
        await client.release(lease.lease_id)
        again = await client.lease("t", "x", 60, "2")
        assert (await client.exec(again.lease_id, ["true"], 5)).exit_code == 0

    service.play(scenario)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may look at a guest agent's descriptors from outside")
def test_a_guest_agent_holds_nothing_of_the_zygote_and_no_capability(start: Callable[..., Service]) -> None:
    service = start()

    async def scenario(client: EnvClient) -> None:
        before = descendants(service.process.pid)
        await client.lease("t", "x", 60, "1")
        (agent,) = descendants(service.process.pid) - before
        held = [os.readlink(path).split(":")[0] for path in Path(f"/proc/{agent}/fd").iterdir()]
        assert sorted(held) == ["/dev/null"] * 3 + ["anon_inode", "pipe", "pipe", "socket"]
        status = Path(f"/proc/{agent}/status").read_text()
        assert "CapPrm:\t0000000000000000" in status and "CapBnd:\t0000000000000000" in status
        assert Path(f"/proc/{agent}/oom_score_adj").read_text() == "1000\n"

    service.play(scenario)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_service_leaves_no_process(start: Callable[..., Service], how: signal.Signals) -> None:
    service = start()

    async def scenario(client: EnvClient) -> None:
        leases = [await client.lease("t", "x", 60, f"k{number}") for number in range(3)]
        script = "(setsid sleep 1000 &) ; sleep 1000"
        running = [asyncio.create_task(client.exec(lease.lease_id, ["sh", "-c", script], 500)) for lease in leases]
        inside = descendants(service.process.pid)
        while len(inside) < 2 + 3 * 4:
            await asyncio.sleep(0.05)
            inside = descendants(service.process.pid)
        service.process.send_signal(how)
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, WireError)
        assert service.process.wait(10) == (0 if how is signal.SIGTERM else -how)
        assert not wait_until_gone(inside, 10)

    service.play(scenario)


@pytest.mark.parametrize(
    ("config", "path", "told"),
    [
        ("{backend: vmware}", os.environ["PATH"], "env.backend is 'vmware' (known: process)"),
        ("{}", "/nonexistent", "program 'bwrap' is not installed: sandboxes need it (apt-get install bubblewrap)"),
        ("{max_sandbox: 3}", os.environ["PATH"], "did you mean max_sandboxes?"),
    ],
)
def test_what_is_wrong_at_the_start_is_one_line(tmp_path: Path, config: str, path: str, told: str) -> None:
    (tmp_path / "config.yaml").write_text(f"env: {config}\n")
    argv = [sys.executable, "-m", "envclient.controller", "--run-dir", str(tmp_path), "--fd", "0"]
    environment = {**os.environ, "VENUS_TOKEN": TOKEN, "PATH": path}
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and told in result.stderr


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv to be another")
def test_the_service_also_runs_without_root(tmp_path: Path) -> None:
    """As an ordinary user: the contract suite's isolation and limits, in bubblewrap's user namespace."""
    tests = "isolation or see_each or leaks or privilege or bomb or disk or timeout or twin or applets"
    suite = f"{ROOT}/tests/contract/test_env_backend.py"
    scratch = f"/tmp/venus-plain-{os.getpid()}"
    prefixes = " ".join({sys.base_prefix, sys.prefix})
    # A folder that only root may enter (/root, say) is replaced, in a mount namespace of its own, by one with just the
    # interpreter in it.
    script = f"""
        set -e
        for prefix in {prefixes}; do
            mkdir -p {tmp_path}/keep$prefix && mount --bind $prefix {tmp_path}/keep$prefix
        done
        for prefix in {prefixes}; do
            top=/$(echo $prefix | cut -d/ -f2)
            [ "$(stat -c %a $top)" = 700 ] || continue
            mount -t tmpfs -o mode=755 tmpfs $top
            mkdir -p $prefix && mount --bind {tmp_path}/keep$prefix $prefix
        done
        export HOME=/tmp TMPDIR=/tmp
        exec setpriv --reuid 4321 --regid 4321 --clear-groups --inh-caps=-all --bounding-set=-all \\
            {sys.executable} -m pytest -q --basetemp {scratch} {suite} -k "{tests}"
        """
    result = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    shutil.rmtree(scratch, ignore_errors=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
