"""The process of a run's own reward function: a pool of workers behind a RewardService."""

import asyncio
import contextlib
import signal

from headrace.actors.reward.pool import create_pool
from headrace.engine.transport.channel import open_channel
from headrace.engine.transport.control import ControlClient
from headrace.engine.transport.reward import RewardServicer
from headrace.engine.transport.server import serving
from headrace.v1 import control_pb2 as pb


def main(hub: str, address: str) -> None:
    """Serve `reward.function` at `address` until SIGTERM or until the hub is gone. Entry of the child process.

    Raises:
        ConfigError: The function cannot be imported.
    """
    asyncio.run(_serve(hub, address))


async def _serve(hub: str, address: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with open_channel(hub) as channel:
        control = ControlClient(channel, pb.ROLE_REWARD, "reward")
        run = await control.join()
        control.progress.moved("loading the reward", pb.PHASE_LOADING)
        pool = create_pool(run.config.reward)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(pool.close)
            await pool.start()
            servicer = RewardServicer(pool, name=run.config.reward.function)
            async with serving([servicer.service()], address):
                control.progress.moved("scoring", pb.PHASE_READY)
                beating = asyncio.create_task(control.heartbeats())
                stopping = asyncio.create_task(stop.wait())
                # Heartbeats end when the run does; the reward still answers until it is told to stop.
                await asyncio.wait({stopping})
                beating.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await beating
            await servicer.close()
