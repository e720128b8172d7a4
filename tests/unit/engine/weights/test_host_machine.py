"""Hub's chain, host's copy, offers and receivers together, with every fault that the way between them has.

Whatever happens in whatever order: a receiver holds exactly the weights of the version that it names, never a mixture,
never an older version than before; and once the faults stop, all come to the newest version.
"""

import shutil
import tempfile
from pathlib import Path

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.errors import CorruptUpdateError, InputError, WrongBaseError
from headrace.engine.testing.plain_weights import PlainReceiver, PlainSender
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck, WeightUpdate
from headrace.engine.weights.chain import VersionChain
from headrace.engine.weights.host_files import HostFiles
from headrace.engine.weights.host_offers import HostOffers, Offer, Stream
from headrace.engine.weights.receivers import ReceiverTable

NUM_RECEIVERS = 3
RECEIVERS = st.integers(0, NUM_RECEIVERS - 1)
START = PolicyVersion(0, 0)


class Engine:
    """A receiver, its stream at the agent, and whether it has staged something."""

    def __init__(self, name: str, deltas: bool) -> None:
        self.name, self.deltas = name, deltas
        self.receiver = PlainReceiver(START)
        self.stream: Stream | None = None
        self.offered: WeightUpdate | None = None
        self.staged = False

    @property
    def have(self) -> PolicyVersion | None:
        return self.receiver.version if self.receiver.state else None


class WeightsOfAHost(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
        self.seed = seed
        self.newest = START
        self.sender = PlainSender(seed, keyframe_steps=4)
        self.states: dict[PolicyVersion, dict[str, list[int]]] = {}
        self.chain = VersionChain("run", 1, keep=2)
        self.paths: dict[tuple[PolicyVersion, PolicyVersion | None], str] = {}
        self.table = ReceiverTable()
        self.engines = [Engine(f"rollout-{number}", deltas=number > 0) for number in range(NUM_RECEIVERS)]
        self.floor = [START] * NUM_RECEIVERS
        self.flipped = False
        self.agent_starts()

    # The trainer

    @rule(full=st.booleans(), refused=st.booleans())
    def a_version_is_published(self, full: bool, refused: bool) -> None:
        self.sender.step()
        self.newest = PolicyVersion(self.newest.incarnation, self.newest.version + 1)
        part = self.sender.part(self.newest, self.folder, full=full)
        if refused:  # the part was lost on its way; its version never is
            self.sender.settle(accepted=False)
            return
        self.chain.offer_part(0, part.manifest, 1)
        self.sender.settle(accepted=True)
        self.paths[part.manifest.version, part.manifest.base] = part.local_path
        self.states[self.newest] = {
            spec.name: bits.tolist() for spec, bits in zip(self.sender.tensors, self.sender.state, strict=True)
        }

    @precondition(lambda self: self.states)
    @rule(back=st.integers(0, 3))
    def the_trainer_is_resumed_as_a_new_incarnation(self, back: int) -> None:
        self.seed += 1
        self.newest = PolicyVersion(self.newest.incarnation + 1, max(0, self.newest.version - back))
        self.sender = PlainSender(self.seed, keyframe_steps=4)
        self.a_version_is_published(full=False, refused=False)

    @rule()
    def a_trainer_of_another_run_publishes_here(self) -> None:
        folder = self.folder / "other"
        folder.mkdir(exist_ok=True)
        part = PlainSender(7, run_id="other").part(self.newest, folder)
        try:
            self.chain.offer_part(0, part.manifest, 1)
        except InputError:
            return
        raise AssertionError("a part of another run was taken")

    # The agent

    def agent_starts(self) -> None:
        self.files = HostFiles(self.folder / "agent", "run")
        self.offers = HostOffers()
        self.flipped = False
        self.table.register("agent", None)
        for engine in self.engines:
            engine.stream = engine.offered = None

    @rule()
    def the_agent_is_killed_and_started_anew(self) -> None:
        self.agent_starts()

    @rule(damage=st.sampled_from(["", "", "flip", "cut", "gone"]), again=st.booleans())
    def the_agent_takes_an_update(self, damage: str, again: bool) -> None:
        have = self.table.base_for_update("agent")
        updates = self.chain.what_next(have)
        if not updates:
            return
        manifest = updates[0]
        update = WeightUpdate(manifest=manifest, local_path=self.paths[manifest.version, manifest.base])
        sent = damaged(update, damage, self.folder) if damage else update
        for number in range(1 + again):  # an update that comes twice
            self.apply_at_agent(sent, spoilt=bool(damage) or number > 0)

    def apply_at_agent(self, update: WeightUpdate, *, spoilt: bool) -> None:
        shadow, before = self.files.shadow, self.files.shadow.version
        status = AckStatus.SERVING
        try:
            touched = self.files.apply(update)
        except WrongBaseError:
            status = AckStatus.WRONG_BASE
        except CorruptUpdateError:
            status = AckStatus.CORRUPT
        else:
            assert shadow.version is not None
            self.offers.moved(shadow.version, shadow.digest, touched, shadow.num_bytes)
            if update.manifest.base is None:
                self.flipped = False
        if status is not AckStatus.SERVING:
            assert shadow.version == before
            assert spoilt or self.flipped, "a good update was refused"
        version = shadow.version or START
        self.table.acknowledge("agent", WeightAck(version=version, status=status, digest=shadow.digest))
        self.files.sweep(self.offers.needed())

    @precondition(lambda self: self.files.shadow.version is not None)
    @rule(at=st.integers(0, 32))
    def a_bit_of_the_copy_flips(self, at: int) -> None:
        self.files.shadow.read(1, at, 1)[0] ^= 1 << at % 32
        self.flipped = True

    # Receivers

    @rule(number=RECEIVERS)
    def a_receiver_subscribes(self, number: int) -> None:
        engine = self.engines[number]
        engine.stream, engine.staged = self.offers.subscribe(engine.name, engine.have, engine.deltas), False
        engine.offered = None

    @rule(number=RECEIVERS)
    def a_receiver_loses_its_stream(self, number: int) -> None:
        engine = self.engines[number]
        if engine.stream is not None:
            self.offers.leave(engine.stream)
            engine.stream = engine.offered = None

    @rule(number=RECEIVERS)
    def a_receiver_is_killed_and_comes_back_with_nothing(self, number: int) -> None:
        self.a_receiver_loses_its_stream(number)
        self.engines[number] = Engine(f"rollout-{number}", deltas=number > 0)
        self.floor[number] = START

    @rule(number=RECEIVERS)
    def a_receiver_is_offered_an_update(self, number: int) -> None:
        engine = self.engines[number]
        offer = None if engine.stream is None else self.offers.next_for(engine.stream)
        if engine.stream is None or offer is None:
            return
        self.check_offer(engine, offer)
        self.offers.offer(engine.stream, offer)
        try:
            engine.offered = self.files.make(offer, self.offers.since)
        except CorruptUpdateError:
            self.offers.withdraw(engine.stream)
            self.offers.lost()
            self.table.acknowledge("agent", WeightAck(version=START, status=AckStatus.WRONG_BASE))
            return
        assert engine.offered is not None

    @rule(number=RECEIVERS, damage=st.sampled_from(["", "", "", "flip", "cut", "gone"]))
    def a_receiver_stages_what_it_is_offered(self, number: int, damage: str) -> None:
        engine = self.engines[number]
        update, engine.offered = engine.offered, None
        if update is None:
            return
        if damage:
            update = damaged(update, damage, self.folder)
        refusal = engine.receiver.stage(update)
        engine.staged = refusal is None
        if refusal is not None:
            assert damage or self.flipped, f"a good update was refused: {refusal.message}"
            self.offers.acknowledge(engine.name, refusal)

    def check_offer(self, engine: Engine, offer: Offer) -> None:
        assert offer.base is None or (engine.deltas and offer.base == engine.receiver.version)
        assert engine.have is None or offer.version >= engine.receiver.version

    @rule(number=RECEIVERS, answered=st.booleans())
    def a_receiver_serves_what_it_has_staged(self, number: int, answered: bool) -> None:
        engine = self.engines[number]
        if not engine.staged:
            return
        engine.staged = False
        ack = engine.receiver.apply()
        if engine.stream is None:
            return
        if answered:
            self.offers.acknowledge(engine.name, ack)
        else:
            self.a_receiver_loses_its_stream(number)
        self.files.sweep(self.offers.needed())

    @rule()
    def all_catch_up(self) -> None:
        for _ in range(2 * len(self.chain.retained()) + 12):
            for number, engine in enumerate(self.engines):
                if engine.stream is None:
                    self.a_receiver_subscribes(number)
                self.a_receiver_serves_what_it_has_staged(number, answered=True)
                self.a_receiver_is_offered_an_update(number)
                self.a_receiver_stages_what_it_is_offered(number, "")
                self.a_receiver_serves_what_it_has_staged(number, answered=True)
            self.the_agent_takes_an_update("", again=False)
            if all(engine.receiver.version == self.newest for engine in self.engines):
                return

    # What always holds

    @invariant()
    def a_receiver_holds_the_weights_that_it_names(self) -> None:
        for number, engine in enumerate(getattr(self, "engines", ())):
            receiver = engine.receiver
            assert receiver.version >= self.floor[number]
            self.floor[number] = receiver.version
            if receiver.state:
                held = {name: bits.tolist() for name, bits in receiver.state.items()}
                assert held == self.states[receiver.version]

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            self.converge()
        finally:
            self.files.close()
            shutil.rmtree(self.folder)

    def converge(self) -> None:
        """Without further faults all come to the newest version, in few steps."""
        self.a_version_is_published(full=False, refused=False)
        self.all_catch_up()
        for engine in self.engines:
            assert engine.receiver.version == self.newest, (engine.name, self.newest)


def damaged(update: WeightUpdate, how: str, folder: Path) -> WeightUpdate:
    path = folder / "damaged.bin"
    path.unlink(missing_ok=True)
    if how != "gone":
        data = bytearray(Path(update.local_path).read_bytes())
        if data:
            data[-1] ^= 0x40 if how == "flip" else 0
        path.write_bytes(data if how == "flip" else data[:-1])
    return msgspec.structs.replace(update, local_path=str(path))


TestWeightsOfAHost = WeightsOfAHost.TestCase
TestWeightsOfAHost.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
