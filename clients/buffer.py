"""The buffer as other programs use it.

`BufferClient` (asyncio) puts records and columns:

    async with open_channel("grpc://hub:7070") as channel, contextlib.aclosing(BufferClient(channel, "mine")) as buffer:
        rejected = await buffer.put("train", [(header_of(trajectory), encode_trajectory(trajectory))])

`BlockingBufferClient` takes the batches of named steps, from any rank of any trainer:

    with open_blocking_channel("unix:/run/headrace/hub") as channel:
        buffer = BlockingBufferClient(channel, incarnation=1, rank=rank, num_ranks=world_size)
        batch = buffer.take(step, deadline_s=600.0)
        ...
        version = buffer.commit(step, batch.lease_token)

Records and columns are encoded and decoded by `headrace.engine.records`. Neither client owns its channel.
"""

from headrace.engine.records import decode_column, decode_trajectory, encode_column, encode_trajectory, header_of
from headrace.engine.transport.buffer import BlockingBufferClient, BufferClient, BufferStats, Rejected, TakenBatch
from headrace.engine.transport.channel import open_blocking_channel, open_channel

__all__ = [
    "BlockingBufferClient",
    "BufferClient",
    "BufferStats",
    "Rejected",
    "TakenBatch",
    "decode_column",
    "decode_trajectory",
    "encode_column",
    "encode_trajectory",
    "header_of",
    "open_blocking_channel",
    "open_channel",
]
