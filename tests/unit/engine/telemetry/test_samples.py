import json
from pathlib import Path

from headrace.engine.telemetry import SampleRow, SampleWriter
from headrace.engine.telemetry.samples import MAX_TEXT_CHARS


class FixedClock:
    def monotonic(self) -> float:
        return 5.0

    def wall(self) -> float:
        return 1_790_000_000.0


def row(step: int, name: str, **more: object) -> SampleRow:
    return SampleRow(step=step, record_id=name, prompt="1 + 1?", response="2", **more)  # type: ignore[arg-type]


def test_each_step_and_kind_has_its_own_cap(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    writer = SampleWriter(path, FixedClock(), max_per_step=2)
    written = [writer.write(row(1, f"a{i}", reward=1.0)) for i in range(4)]
    written.append(writer.write(row(1, "e0", kind="eval")))
    written.append(writer.write(row(2, "b0")))
    writer.close()
    assert written == [True, True, False, False, True, True]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["record_id"] for r in rows] == ["a0", "a1", "e0", "b0"]
    assert rows[0]["reward"] == 1.0 and rows[3]["reward"] is None
    assert rows[0]["time"] == 1_790_000_000.0


def test_a_long_text_is_cut_and_a_lone_surrogate_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    writer = SampleWriter(path, FixedClock())
    writer.write(SampleRow(step=1, record_id="a", prompt="x" * (MAX_TEXT_CHARS + 5), response="\ud800 größe"))
    writer.close()
    (read,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert read["prompt"].endswith("[5 characters more]")
    assert read["response"] == "? größe"
