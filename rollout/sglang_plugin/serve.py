"""`python -m rollout.sglang_plugin.serve ARGS`: SGLang's HTTP server with the run's token as its API key.

SGLang takes the key only as an argument, and a command line is readable by everyone on the machine; this entry reads
it from the environment variable VENUS_TOKEN and hands it over inside the process.
"""

from __future__ import annotations

import os
import sys

from rollout.sglang_plugin.targets import TargetError, check_targets


def main(argv: list[str]) -> int:
    """Serve until terminated."""
    token = os.environ.pop("VENUS_TOKEN", "")
    if not token:
        print("error: VENUS_TOKEN is not set (engines are started by a rollout worker)", file=sys.stderr)
        return 2
    try:
        check_targets()
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args([*argv, f"--api-key={token}"])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
