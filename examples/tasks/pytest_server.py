"""Warm-up process of a library's template: pytest collects once, every test run is a fork that swaps one function.

Runs inside a sandbox (standard library, pytest and the guest agent; nothing of VenusRL):

    python pytest_server.py ROOT PACKAGE IMPORT_MODE TEST...

It collects the library's tests and then serves two applets through the guest agent:
* `venus-test` reads a JSON request on stdin: `module`, `file`, `qualname`, `first_line`, `source_file` (the function's
  source, a file of the sandbox), `tests` (node ids), `cpu_s`, `all` (run on after the first failure). It puts the code
  of that source in the place of the library's function, runs only these tests and prints one JSON object: `ok`,
  `compiled`, `failed` (node ids), `test`, `message`. A run that uses more than `cpu_s` seconds of processor time is
  killed by SIGPROF: processor time, because a loaded machine must not turn a right repair into a hang. What sleeps for
  ever is killed by the exec's own timeout.
* `venus-coverage` (used by `examples.tasks.build`) prints which test calls which functions, how costly it is and
  whether it passed.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import signal
import sys
import types
from typing import Any

COSTLY = 50_000
"""Calls and returns beyond which a test is left out: counted, not timed, so that the same tests are chosen again."""
COVERAGE_LIMIT_S = 10.0
"""For tests that wait instead."""


def find_function(module: str, qualname: str, first_line: int) -> types.FunctionType:
    """The plain function object behind `qualname`, looked for through decorators and descriptors.

    Raises:
        LookupError: there is none whose code starts at `first_line`.
    """
    *owners, name = qualname.split(".")
    found: Any = sys.modules[module]
    for owner in owners:
        found = getattr(found, owner)
    found = vars(found)[name]
    for _ in range(8):
        if isinstance(found, types.FunctionType) and found.__code__.co_firstlineno == first_line:
            return found
        inner = (getattr(found, link, None) for link in ("__wrapped__", "__func__", "fget", "_partial", "func"))
        found = next((candidate for candidate in inner if candidate is not None), None)
    raise LookupError(f"{module}.{qualname} does not start at line {first_line}")


def compile_function(source: str, file: str, qualname: str) -> tuple[types.CodeType, ast.arguments]:
    """Code and signature of the function in `source`; inside a class of its own name, so that __names are mangled.

    Raises:
        SyntaxError: the source is not one function.
    """
    tree = ast.parse(source, file)
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise SyntaxError("not one function")
    function = tree.body[0]
    *owners, name = qualname.split(".")
    if function.name != name:
        raise SyntaxError(f"the function is not named {name}")
    function.decorator_list = []
    arguments = function.args
    if owners:
        body: ast.stmt = ast.ClassDef(name=owners[-1], bases=[], keywords=[], body=[function], decorator_list=[])
        tree = ast.fix_missing_locations(ast.Module(body=[body], type_ignores=[]))
    code = compile(tree, file, "exec")
    for wanted in [*owners[-1:], name]:
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == wanted)
    return code, arguments


def swap(request: dict[str, Any], source: str) -> None:
    """Put the code and the defaults of `source` in the place of the library's function, in this process.

    Raises:
        SyntaxError: the source is not Python.
        LookupError: no such function. ValueError: it closes over other variables than the library's.
    """
    function = find_function(request["module"], request["qualname"], request["first_line"])
    code, arguments = compile_function(source, request["file"], request["qualname"])

    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), request["file"], "eval"), function.__globals__)

    function.__code__ = code
    if arguments.defaults:
        function.__defaults__ = tuple(value(node) for node in arguments.defaults)
    if function.__kwdefaults__:
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        function.__kwdefaults__ = {argument.arg: value(node) for argument, node in pairs if node is not None}


def print_json(fd: int, value: Any) -> None:
    """Write `value` to `fd`, all of it."""
    data = json.dumps(value).encode()
    while data:
        data = data[os.write(fd, data) :]


class Server:
    """pytest plug-in: in the place of the test loop it serves applets."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.items: dict[str, Any] = {}
        self.reports: list[Any] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)

    def pytest_runtestloop(self, session: Any) -> None:
        self.items = {item.nodeid: item for item in session.items}
        import guest

        gc.collect()
        gc.freeze()
        guest.serve({"venus-test": self.run_tests, "venus-coverage": self.coverage})

    def run_one(self, test: str) -> list[Any]:
        """Run a test; its failed reports."""
        self.reports = []
        item = self.items[test]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return [report for report in self.reports if report.failed]

    def run_tests(self, argv: list[str], stdin: bytes, stdout_fd: int) -> int:
        request = json.loads(stdin)
        unknown = [test for test in request["tests"] if test not in self.items]
        if unknown:
            print_json(stdout_fd, {"error": f"unknown test {unknown[0]!r}"})
            return 1
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        failed: list[str] = []
        first, message, compiled = "", "", True
        try:
            with open(request["source_file"], encoding="utf-8") as file:
                swap(request, file.read())
        except LookupError as error:
            print_json(stdout_fd, {"error": str(error)})
            return 1
        except Exception as error:  # whatever the edited definition raises: the code does not even compile
            failed, message, compiled = list(request["tests"]), type(error).__name__, False
        else:
            for test in request["tests"]:
                reports = self.run_one(test)
                if reports:
                    failed.append(test)
                    if not first:
                        first, message = test, message_of(reports[0])
                    if not request.get("all", False):
                        break
        signal.setitimer(signal.ITIMER_PROF, 0)
        result = {"ok": not failed, "compiled": compiled, "failed": failed, "test": first, "message": message}
        print_json(stdout_fd, result)
        return 0

    def coverage(self, argv: list[str], stdin: bytes, stdout_fd: int) -> int:
        """argv[1]: folder below the root whose functions count."""
        folder = os.path.join(self.root, argv[1]) + "/"
        found: dict[str, Any] = {}

        def stop(*_: Any) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, stop)
        gc.disable()  # a finalizer would be counted with whatever test it happens to run in
        for test in self.items:
            called: set[tuple[str, int]] = set()
            cost = 0

            def note(frame: types.FrameType, event: str, _: Any, called: set[tuple[str, int]] = called) -> None:
                nonlocal cost
                cost += 1
                if cost > COSTLY:
                    raise TimeoutError
                code = frame.f_code
                if event == "call" and code.co_filename.startswith(folder):
                    called.add((code.co_filename[len(self.root) + 1 :], code.co_firstlineno))

            signal.setitimer(signal.ITIMER_REAL, COVERAGE_LIMIT_S)
            sys.setprofile(note)
            try:
                passed = not self.run_one(test)
            except BaseException:
                passed = False
            finally:
                sys.setprofile(None)
                signal.setitimer(signal.ITIMER_REAL, 0)
            passed = passed and any(report.when == "call" and report.passed for report in self.reports)
            found[test] = {"calls": sorted(called), "cost": cost, "passed": passed and cost <= COSTLY}
        print_json(stdout_fd, found)
        return 0


def message_of(report: Any) -> str:
    """First line of why a test failed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return str(text).split("\n", 1)[0]


def main() -> int:
    root, _package, import_mode, *tests = sys.argv[1:]
    os.chdir(root)
    sys.path.insert(0, root)
    import pytest

    options = ["-q", "-s", "--tb=native", "-o", "addopts=", f"--rootdir={root}", f"--import-mode={import_mode}"]
    # A conftest written for another pytest must not stop the collection; the chosen tests need none.
    options += ["--noconftest", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--continue-on-collection-errors"]
    return int(pytest.main([*options, *tests], plugins=[Server(root)]))


if __name__ == "__main__":
    sys.exit(main())
