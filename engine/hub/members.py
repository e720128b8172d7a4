"""The members of a run and when one of them counts as lost.

A pure state machine: times are passed in. A member is lost when nothing is heard of it, or when its progress counter
stands still for longer than its phase allows while it claims to be at work. Loading may take minutes with the GIL held,
so it has a limit of its own.

Invariant: a member that has asked for work is never taken for one that loads. Heartbeats go once a second and over a
connection of their own, so the one that says "loading" may be the last that is heard before the work, or come after it.
"""

from dataclasses import dataclass

from headrace.engine.errors import ActorLostError, UsageError
from headrace.v1 import control_pb2 as pb

ROLE_NAMES = {
    pb.ROLE_ROLLOUT: "rollout",
    pb.ROLE_REWARD: "reward",
    pb.ROLE_LEARNER: "learner",
    pb.ROLE_TOKEN_SCORER: "token_scorer",
    pb.ROLE_HUB: "hub",
}


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of the run.

    Attributes:
        heard_s: Monotonic time of the last heartbeat or request for work.
        moved_s: Monotonic time at which the progress counter last moved.
        doing: What it says that it does, since `doing_since_s` (Unix time).
        has_asked: It has asked for work, so it has loaded, whatever its heartbeats said last.
    """

    member_id: str
    role: str
    rank: int
    pid: int
    host: str
    heard_s: float
    moved_s: float
    phase: int = pb.PHASE_STARTING
    progress: int = 0
    doing: str = "starting"
    doing_since_s: float = 0.0
    event_loop_lag_s: float = 0.0
    has_asked: bool = False

    @property
    def is_loading(self) -> bool:
        """The limit for loading holds."""
        return not self.has_asked and self.phase in (pb.PHASE_STARTING, pb.PHASE_LOADING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a member may be silent, load, and work without progress, in seconds."""

    silent_s: float
    loading_s: float
    working_s: float


class Members:
    """Who is in the run."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._members: dict[str, Member] = {}

    def join(self, member: Member) -> Member | None:
        """Add a member; returns the one of the same name that it takes over from, if any."""
        old = self._members.get(member.member_id)
        self._members[member.member_id] = member
        return old

    def leave(self, member_id: str) -> Member | None:
        """Remove a member; None when it is not known."""
        return self._members.pop(member_id, None)

    def get(self, member_id: str) -> Member:
        """A member.

        Raises:
            UsageError: It never joined, or has left.
        """
        member = self._members.get(member_id)
        if member is None:
            raise UsageError(f"member {member_id!r} is not in this run; join first")
        return member

    def all(self) -> list[Member]:
        """In order of joining."""
        return list(self._members.values())

    def of_role(self, role: str) -> list[Member]:
        """Members of one role, in order of joining."""
        return [member for member in self._members.values() if member.role == role]

    def beat(self, beat: pb.HeartbeatRequest, now_s: float, wall_s: float) -> bool:
        """Take a heartbeat in; True when what the member does has changed."""
        member = self.get(beat.member_id)
        member.heard_s = now_s
        member.event_loop_lag_s = beat.event_loop_lag_s
        if beat.progress != member.progress or beat.phase != member.phase:
            member.progress, member.phase, member.moved_s = beat.progress, beat.phase, now_s
        changed = member.doing != beat.wait.waits_for
        if changed:
            member.doing, member.doing_since_s = beat.wait.waits_for, wall_s
        return changed

    def asked(self, member_id: str, now_s: float) -> None:
        """A member has asked for work; one that is not known is none of ours."""
        member = self._members.get(member_id)
        if member is None:
            return
        if not member.has_asked:
            member.has_asked, member.moved_s = True, now_s
        member.heard_s = now_s

    def rank_asked(self, role: str, rank: int, now_s: float) -> None:
        """The member of a role that has this rank has asked for work; see `asked`."""
        for member in self.of_role(role):
            if member.rank == rank:
                self.asked(member.member_id, now_s)

    def lost(self, now_s: float) -> list[tuple[Member, ActorLostError]]:
        """Members that have passed a limit, each with the reason in words."""
        found: list[tuple[Member, ActorLostError]] = []
        for member in self._members.values():
            silent_s, still_s = now_s - member.heard_s, now_s - member.moved_s
            if silent_s > (self._limits.loading_s if member.is_loading else self._limits.silent_s):
                found.append((member, ActorLostError(f"{member.member_id} has not been heard of for {silent_s:.0f} s")))
            elif still_s > (self._limits.loading_s if member.is_loading else self._limits.working_s):
                what = f"{member.member_id} has made no progress for {still_s:.0f} s while {member.doing}"
                found.append((member, ActorLostError(what)))
        return found
