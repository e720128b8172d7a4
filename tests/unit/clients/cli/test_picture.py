import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pytest

from headrace.clients.cli.picture import draw_overlap
from headrace.engine.errors import InputError, StorageError
from headrace.engine.telemetry import Span

SVG = "{http://www.w3.org/2000/svg}"
MAX_BYTES = 150_000


def made_up(num_steps: int, num_workers: int = 1, samples_a_step: int = 4, at: float = 1_790_000_000.0) -> list[Span]:
    """Ten seconds a step: the learner waits for 2 and works for 8; workers sample in the first 6 of them."""
    spans: list[Span] = []
    for k in range(num_steps):
        t = at + 10 * k
        spans.append(Span(track="learner", name="wait for a batch", start_s=t, end_s=t + 2))
        spans.append(Span(track="learner", name="step", start_s=t + 2, end_s=t + 10, detail={"step": k + 1}))
        spans.append(Span(track="weights", name="send", start_s=t, end_s=t + 0.5))
        for worker in range(num_workers):
            for i in range(samples_a_step):
                a = t + 6 * i / samples_a_step
                spans.append(Span(track=f"rollout {worker}", name="sample", start_s=a, end_s=t + 6, detail={}))
                spans.append(Span(track="reward", name="score", start_s=a, end_s=a + 0.01))
    return spans


def test_the_overlap_that_is_drawn_is_that_of_the_shown_steps(tmp_path: Path) -> None:
    half_way_s = 1_790_000_000.0 + 200
    spans = [span for span in made_up(30) if span.role != "rollout" or span.start_s < half_way_s]
    assert draw_overlap(spans, tmp_path / "overlap.svg", 5, 10) == pytest.approx(0.5)
    assert draw_overlap(spans, tmp_path / "overlap.svg", 25, 30) == 0.0
    assert draw_overlap(spans, tmp_path / "overlap.svg", first_step=16) < 0.25
    assert draw_overlap(spans, tmp_path / "overlap.svg") > 0.25


def test_the_file_is_a_small_svg_nine_hundred_pixels_wide(tmp_path: Path) -> None:
    path = tmp_path / "overlap.svg"
    draw_overlap(made_up(200, num_workers=4, samples_a_step=64), path)
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    assert float(root.attrib["width"].removesuffix("pt")) * 96 / 72 == 900
    assert path.stat().st_size < MAX_BYTES
    assert [entry.name for entry in tmp_path.iterdir()] == ["overlap.svg"]


def test_even_a_hundred_crowded_steps_make_a_file_that_is_not_too_large(tmp_path: Path) -> None:
    path = tmp_path / "overlap.svg"
    draw_overlap(made_up(100, num_workers=20, samples_a_step=16), path, first_step=1, last_step=100)
    assert path.stat().st_size < MAX_BYTES


def test_global_settings_of_matplotlib_are_left_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    draw_overlap(made_up(3), tmp_path / "overlap.svg")
    assert dict(matplotlib.rcParams) == before


def test_a_short_run_and_a_single_step_are_drawn(tmp_path: Path) -> None:
    assert draw_overlap(made_up(1), tmp_path / "one.svg") == pytest.approx(0.5)
    assert draw_overlap(made_up(3), tmp_path / "three.svg") == pytest.approx(0.5)


def test_a_timeline_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no learner step"):
        draw_overlap([], tmp_path / "overlap.svg")
    with pytest.raises(InputError, match="no step from 7 to 9 is in the timeline: it has 1 to 3"):
        draw_overlap(made_up(3), tmp_path / "overlap.svg", 7, 9)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"overlap\.svg"):
        draw_overlap(made_up(1), tmp_path / "missing" / "overlap.svg")
