"""Files behind offers: made once, of the offered version or not at all, kept while needed, elsewhere if it is full."""

import shutil
from pathlib import Path

import pytest

from headrace.engine.errors import StorageError
from headrace.engine.testing.plain_weights import PlainReceiver, PlainSender, as_update
from headrace.engine.types import AckStatus, PolicyVersion
from headrace.engine.weights.host_files import HostFiles
from headrace.engine.weights.host_offers import HostOffers, Offer


class Host:
    def __init__(self, tmp_path: Path, fallback: Path | None = None) -> None:
        self.folder = tmp_path
        self.files = HostFiles(tmp_path / "agent", "run", fallback)
        self.offers = HostOffers()
        self.sender = PlainSender(1)

    def take(self, number: int) -> None:
        self.sender.step()
        part = self.sender.part(PolicyVersion(0, number), self.folder)
        self.sender.settle(accepted=True)
        touched = self.files.apply(as_update(part))
        self.offers.moved(part.manifest.version, part.manifest.digest, touched, self.files.shadow.num_bytes)


def offer(number: int, base: int | None = None) -> Offer:
    return Offer(version=PolicyVersion(0, number), base=None if base is None else PolicyVersion(0, base))


def test_a_keyframe_is_handed_on_and_outlives_the_file_that_it_came_in(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.take(1)
    for path in tmp_path.glob("keyframe-*"):
        path.unlink()
    update = host.files.make(offer(1), host.offers.since)
    assert update is not None
    assert PlainReceiver(PolicyVersion(0, 0)).take(update).status is AckStatus.SERVING


def test_a_file_is_made_once_and_only_of_the_version_that_is_there(tmp_path: Path) -> None:
    host = Host(tmp_path)
    for number in (1, 2, 3):
        host.take(number)
    made = host.files.make(offer(3, base=1), host.offers.since)
    assert made is not None and made is host.files.make(offer(3, base=1), host.offers.since)
    assert host.files.make(offer(2, base=1), host.offers.since) is None


def test_files_go_when_no_offer_needs_them_and_stay_while_one_does(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.take(1)
    host.take(2)
    needed, other = offer(2, base=1), offer(2)
    paths = [Path(update.local_path) for one in (needed, other) if (update := host.files.make(one, host.offers.since))]
    host.files.sweep(set())
    assert all(path.exists() for path in paths)  # of the newest version
    host.take(3)
    host.files.sweep({needed})
    assert [path.exists() for path in paths] == [True, False]
    host.files.sweep(set())
    assert not paths[0].exists()
    host.files.close()
    assert not (tmp_path / "agent").exists()


def test_what_an_agent_left_that_died_is_removed(tmp_path: Path) -> None:
    Host(tmp_path).take(1)
    HostFiles(tmp_path / "agent", "run")
    assert list((tmp_path / "agent").iterdir()) == []


def test_where_there_is_no_room_the_fallback_takes_over(tmp_path: Path) -> None:
    host = Host(tmp_path, fallback=tmp_path / "disk" / "agent")
    shutil.rmtree(tmp_path / "agent")  # as good as full: nothing can be made there
    host.take(1)
    host.take(2)
    update = host.files.make(offer(2, base=1), host.offers.since)
    assert update is not None and Path(update.local_path).parent == tmp_path / "disk" / "agent"
    shutil.rmtree(tmp_path / "disk")
    host.take(3)
    with pytest.raises(StorageError):
        host.files.make(offer(3, base=1), host.offers.since)


def test_without_a_fallback_it_is_an_error(tmp_path: Path) -> None:
    host = Host(tmp_path)
    shutil.rmtree(tmp_path / "agent")
    with pytest.raises(StorageError):
        host.take(1)
