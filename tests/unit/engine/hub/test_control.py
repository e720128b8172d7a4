"""What members and trainers of one's own tell the hub."""

from typing import Any, cast

import pytest

from headrace.engine.errors import SchemaError
from headrace.engine.hub.control import ControlHub
from headrace.engine.hub.state import HubState
from headrace.v1 import control_pb2 as pb


async def test_a_figure_that_nobody_has_declared_is_refused_and_the_run_goes_on(hub_state: HubState) -> None:
    control = ControlHub(hub_state, lambda _: {})
    wrong = pb.ReportRequest(step=1, metrics={"actor/pg_loss": 1.0, "my_loss": 2.0})
    with pytest.raises(SchemaError, match="my_loss"):
        await control.Report(wrong, cast(Any, None))
    assert hub_state.ended == ""
    await control.Report(pb.ReportRequest(step=1, metrics={"actor/pg_loss": 3.0}), cast(Any, None))
    row = hub_state.reporting.folder.metrics_path.read_text()
    assert '"actor/pg_loss":3.0' in row
