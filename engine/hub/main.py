"""The hub's process, and the hub as a task of an embedding process."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from headrace.engine.config import Config, effective_toml, load_config
from headrace.engine.hub.composition import compose, find_resume
from headrace.engine.hub.hub import Hub
from headrace.engine.telemetry.run_folder import RunFolder

log = logging.getLogger(__name__)


def main(config_toml: str, address: str, resume: str = "") -> None:
    """Run a hub until its run has ended. Entry of the child process; SIGTERM ends it in an orderly way.

    Args:
        config_toml: The effective configuration.
        address: Where to listen.
        resume: A run folder to go on in; empty for a fresh run.

    Raises:
        UsageError: The configuration names something that does not exist.
        StorageError: The run folder cannot be written.
    """
    config = load_config(None, text=config_toml)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_run_process(config, address, Path(resume) if resume else None))


async def _run_process(config: Config, address: str, resume: Path | None) -> None:
    running = asyncio.create_task(run_hub(config, address, resume))
    # This process is ours alone, so its signals are too; an embedding process keeps its own.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        log.info("ended by SIGTERM")


async def run_hub(config: Config, address: str, resume: Path | None) -> None:
    """Make or open the run folder, compose the parts and run to the end. Cancelling ends everything in order.

    Raises:
        UsageError: The configuration names something that does not exist, or there is nothing to resume from.
        StorageError: The run folder cannot be written.
        HeadraceError: The run failed; its files are written and its processes ended.
    """
    goes_on = None if resume is None else await asyncio.to_thread(find_resume, resume)
    parts = await asyncio.to_thread(compose, config)
    now = time.time()
    if resume is None or goes_on is None:
        folder = RunFolder.create(Path(config.run.folder), config.run.name, effective_toml(config), now)
    else:
        folder = RunFolder.open(resume, now, first_step=goes_on.version.version + 1)
    try:
        hub = Hub(config, folder, parts, resume=goes_on)
    except BaseException:
        folder.close()
        raise
    await hub.run(address)
    # Whoever was not told in time by an event hears it from the end of this process or task.
    if hub.state.error is not None:
        raise hub.state.error


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; it is a third faster for many small calls."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
