"""Channel and server options, built here and nowhere else.

A misspelt option is ignored by gRPC without a word, and the keepalive settings of the two sides must agree or the
server answers with `too_many_pings`, so both live side by side in this file and are tested against each other.
"""

import os

import grpc
import grpc.aio

from headrace.engine.errors import ConfigError

MESSAGE_LIMIT_BYTES = 64 << 20
FRAME_BYTES = 1 << 20  # bulk data travels in messages of about this size
KEEPALIVE_S = 20.0

Option = tuple[str, int | str]


def client_options(
    *, internal: bool = True, message_limit_bytes: int = MESSAGE_LIMIT_BYTES, keepalive_s: float = KEEPALIVE_S
) -> list[Option]:
    """Options of every channel that Headrace opens.

    Args:
        internal: Between parts of one run: the proxy of the environment is not asked. Even 127.0.0.1 would go through
            it otherwise. Channels to services that others run keep the proxy.
        message_limit_bytes: Largest message in either direction.
        keepalive_s: A silent connection is pinged so often; the server tolerates twice as many.
    """
    options: list[Option] = [
        ("grpc.max_receive_message_length", message_limit_bytes),
        ("grpc.max_send_message_length", message_limit_bytes),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if internal:
        options.append(("grpc.enable_http_proxy", 0))
    return options


def server_options(*, message_limit_bytes: int = MESSAGE_LIMIT_BYTES, keepalive_s: float = KEEPALIVE_S) -> list[Option]:
    """Options of every server that Headrace starts; they match `client_options`."""
    return [
        ("grpc.max_receive_message_length", message_limit_bytes),
        ("grpc.max_send_message_length", message_limit_bytes),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", int(keepalive_s * 500)),
        ("grpc.so_reuseport", 0),  # two servers on one port must be an error, not a lottery
    ]


def target_of(address: str, *, setting: str = "address") -> str:
    """The gRPC target of `grpc://host:port`, `host:port` or `unix:/path`.

    Raises:
        ConfigError: The address has none of these forms; `setting` names where it came from.
    """
    target = address.removeprefix("grpc://")
    if target.startswith("unix:"):
        if len(target.removeprefix("unix:").encode()) > 100:
            raise ConfigError(
                f"{setting} is {address!r}, but the path of a Unix socket has at most 100 bytes; shorten it"
            )
        return target
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535 or "://" in target:
        raise ConfigError(f"{setting} is {address!r}; write grpc://HOST:PORT or unix:/PATH")
    return target


def open_channel(address: str, *, internal: bool = True, setting: str = "address") -> grpc.aio.Channel:
    """Open an asyncio channel; nothing is sent yet. The caller closes it.

    Raises:
        ConfigError: The address is malformed.
    """
    return grpc.aio.insecure_channel(target_of(address, setting=setting), options=client_options(internal=internal))


def open_blocking_channel(address: str, *, internal: bool = True, setting: str = "address") -> grpc.Channel:
    """Open a channel for blocking code (learner ranks); nothing is sent yet. The caller closes it.

    Raises:
        ConfigError: The address is malformed.
    """
    return grpc.insecure_channel(target_of(address, setting=setting), options=client_options(internal=internal))


def proxy_hint() -> str:
    """A clause for connection errors where the environment sends connections through a proxy; else empty."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        if os.environ.get(name):
            return f" (through the proxy of the environment variable {name})"
    return ""
