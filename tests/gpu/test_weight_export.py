"""Updates written from a GPU beside the next step's work are those of the moment they were staged."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.actors.learner.sharding import RankGroup
from headrace.actors.learner.weight_export import WeightExporter
from headrace.engine.config.schema import Config, ModelConfig
from headrace.engine.types import PolicyVersion, UpdateKind, WeightUpdate
from headrace.engine.weights.delta import apply_change, decode_bucket, encoded_bucket
from headrace.engine.weights.payload import open_payload, verify_payload

pytestmark = pytest.mark.gpu


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RankGroup]:
    made = RankGroup(rank=0, num_ranks=1, init_method=f"file://{tmp_path}/meet", device=torch.device("cuda", 0))
    yield made
    made.close()


def test_a_delta_written_while_the_weights_move_on_leads_to_what_was_staged(group: RankGroup, tmp_path: Path) -> None:
    master = torch.randn(3000, 4096, device="cuda") * 0.02
    config = Config(model=ModelConfig(dtype="bfloat16"))
    exporter = WeightExporter([("w", master)], config=config, run_id="run", group=group)
    state = np.empty(0, np.uint16)
    since = None
    for number in range(1, 5):
        version = PolicyVersion(0, number)
        awaited = master.to(torch.bfloat16).view(torch.int16).cpu().numpy().view(np.uint16).reshape(-1)
        staged = exporter.stage(version, since)
        written: list[WeightUpdate] = []
        thread = threading.Thread(target=lambda s=staged, w=written: w.append(s.write(tmp_path)))
        thread.start()
        for _ in range(50):  # the next step, on the same device
            master.add_(torch.randn_like(master), alpha=1e-6)
        thread.join()
        staged.settle(accepted=True)
        since = version
        (update,) = written
        if update.manifest.kind is UpdateKind.KEYFRAME:
            verify_payload(update)
            state = open_payload(update)["w"][1].reshape(-1).copy()
        else:
            payload = memoryview(Path(update.local_path).read_bytes())
            for bucket in update.manifest.buckets:
                target = state[bucket.start : bucket.start + bucket.count]
                apply_change(target, decode_bucket(encoded_bucket(bucket, payload), target))
        assert update.manifest.base == (None if number == 1 else PolicyVersion(0, number - 1))
        assert np.array_equal(state, awaited)
