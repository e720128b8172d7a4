"""`headrace reward serve|check`."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="serve|check", required=True)
    serve = actions.add_parser("serve", help="serve a Python function as a reward server")
    serve.add_argument("function", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this host alone)")
    serve.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    serve.add_argument("--workers", type=int, default=2, metavar="N", help="worker processes (default: 2)")
    serve.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds for one sample (default: 30)")
    serve.add_argument("--grace", type=float, default=10.0, metavar="S", help="seconds for running calls at the end")
    serve.add_argument("--port-file", type=Path, metavar="FILE", help="write HOST:PORT there once calls are taken")
    serve.add_argument("--watch-parent", action="store_true", help="end when standard input reaches its end")

    check = actions.add_parser("check", help="say what a running reward server does wrong, and how fast it is")
    check.add_argument("address", metavar="HOST:PORT", help="or unix:/PATH")
    check.add_argument("--prompt", default="What is 2 + 2?", help="prompt of the samples that are sent")
    check.add_argument("--response", default="4", help="response of the samples that are sent")
    check.add_argument("--data", default='{"answer": "4"}', metavar="JSON", help="their data, a JSON object")
    check.add_argument("--calls", type=int, default=200, metavar="N", help="calls of the load test (default: 200)")
    check.add_argument("--concurrency", type=int, default=8, metavar="N", help="of them at the same time (default: 8)")
    check.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds for one call (default: 30)")


def run(args: argparse.Namespace) -> int:
    """Run the action. `serve` blocks until a signal, `check` until it has its verdict.

    Returns:
        0; 1 when `check` found the server doing something wrong.

    Raises:
        ConfigError: The function cannot be used, or the address is taken or malformed.
        UsageError: `--data` is not a JSON object.
        RewardError: `check` found no server.
    """
    if args.action == "serve":
        from headrace.clients.reward import serve

        host = f"[{args.host}]" if ":" in args.host else args.host
        serve(
            args.function,
            f"{host}:{args.port}",
            num_workers=args.workers,
            timeout_s=args.timeout,
            grace_s=args.grace,
            port_file=args.port_file,
            watch_parent=args.watch_parent,
        )
        return 0
    from headrace.clients.reward_check import CheckOptions, check_server

    options = CheckOptions(
        prompt=args.prompt,
        response=args.response,
        data=_json_object(args.data),
        num_calls=args.calls,
        concurrency=args.concurrency,
        timeout_s=args.timeout,
    )
    report = asyncio.run(check_server(args.address, options))
    print(report.text())
    return 1 if report.faults else 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"--data is {text!r}, which is not a JSON object: {error}") from error
