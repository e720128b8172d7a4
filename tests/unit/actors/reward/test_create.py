import pytest

from headrace.actors.reward.create import create_reward
from headrace.actors.reward.pool import RewardPool
from headrace.engine.config.schema import Config, RewardConfig
from headrace.engine.errors import ConfigError
from headrace.engine.transport.reward import GrpcReward


async def test_a_function_is_run_in_a_pool_and_an_address_is_dialled() -> None:
    pool = create_reward(Config(reward=RewardConfig(function="m:f")))
    client = create_reward(Config(reward=RewardConfig(address="grpc://127.0.0.1:1")))
    assert isinstance(pool, RewardPool) and isinstance(client, GrpcReward)
    await pool.close()
    await client.close()


@pytest.mark.parametrize(("function", "address"), [("", ""), ("m:f", "127.0.0.1:1")])
def test_exactly_one_of_function_and_address_must_be_set(function: str, address: str) -> None:
    with pytest.raises(ConfigError, match=r"set one of reward\.function and reward\.address"):
        create_reward(Config(reward=RewardConfig(function=function, address=address)))
