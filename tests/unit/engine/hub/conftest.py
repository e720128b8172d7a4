"""The state of a run without children: real parts on the system clock."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.buffers.async_table import AsyncTable
from headrace.buffers.table import Table
from headrace.engine.clock import SystemClock
from headrace.engine.config import Config
from headrace.engine.hub.flow import GroupFlow
from headrace.engine.hub.members import Limits, Members
from headrace.engine.hub.reporting import Reporting
from headrace.engine.hub.state import HubState
from headrace.engine.hub.streak import FailureStreak
from headrace.engine.hub.waits import Changes, WaitBoard
from headrace.engine.telemetry.run_folder import RunFolder
from headrace.engine.types import PolicyVersion


@pytest.fixture
def hub_state(tmp_path: Path) -> Iterator[HubState]:
    """One group of two samples a step."""
    config = Config()
    schedule = msgspec.structs.replace(config.schedule, group_size=2, groups_per_step=1)
    config = msgspec.structs.replace(config, schedule=schedule)
    clock, start = SystemClock(), PolicyVersion(0, 0)
    board = WaitBoard(clock)
    folder = RunFolder.create(tmp_path / "runs", "run", "", clock.wall())
    reporting = Reporting(folder, clock)
    yield HubState(
        run_id="run",
        config=config,
        clock=clock,
        board=board,
        changes=Changes(clock, board),
        flow=GroupFlow(config, start, clock),
        members=Members(Limits(silent_s=60, loading_s=60, working_s=60)),
        reporting=reporting,
        streak=FailureStreak(1),
        train=AsyncTable(Table("train", required_columns=("reward", "advantage"))),
        evals=AsyncTable(Table("eval")),
        version=start,
    )
    reporting.close()
    folder.close()
