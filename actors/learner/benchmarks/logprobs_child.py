# pyright: basic
# torch is only partly typed.
"""What the processes of `logprobs.py` run: `plan`, `memory FORM TOKENS` or `time TOKENS ROUNDS`; they print JSON."""

import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import torch

from headrace.actors.learner.linear_logprobs import linear_logprobs

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

NUM_WORDS = 151_936
NUM_TOKENS = 4_096
CPU_TIME_TOKENS = 1_024
# The plain form holds about five float32 tensors of tokens by words; a sixth is left to the rest of the system.
PLAIN_COPIES = 6

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
NUM_HIDDEN = 1_024 if ON_GPU else 576

Score = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [K], as one writes them without care for memory."""
    logits = torch.nn.functional.linear(hidden, weight).float() / temperature[:, None]
    log_p = logits.log_softmax(-1)
    del logits
    return log_p.gather(-1, token_ids[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


FORMS: dict[str, Score] = {"plain": plain, "chunked": linear_logprobs}


class Head:
    """Random hidden states and weight of a head, and passes over some of its tokens."""

    def __init__(self, num_tokens: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)

        def draw(rows: int, spread: float) -> Tensor:
            drawn = torch.empty(rows, NUM_HIDDEN, dtype=DTYPE, device=DEVICE)
            return drawn.normal_(std=spread, generator=generator).requires_grad_()

        self.weight, self.hidden = draw(NUM_WORDS, 0.05), draw(num_tokens, 1.0)
        self.token_ids = torch.randint(0, NUM_WORDS, (num_tokens,), generator=generator, device=DEVICE)
        self.temperature = torch.full((num_tokens,), 0.8, device=DEVICE)

    def run(self, form: str, num_tokens: int | None = None) -> None:
        """One pass forward and backward; returns when the device is done. Gradients are dropped first."""
        self.hidden.grad = self.weight.grad = None
        rows = slice(0, num_tokens)
        scores = FORMS[form](self.hidden[rows], self.weight, self.token_ids[rows], self.temperature[rows])
        torch.autograd.backward(scores[0].sum() + scores[1].sum())
        if ON_GPU:
            torch.cuda.synchronize()


def plan() -> dict[str, float]:
    """Sizes for this machine."""
    tokens = NUM_TOKENS
    while not ON_GPU and tokens > 1 and PLAIN_COPIES * tokens * NUM_WORDS * 4 > psutil.virtual_memory().available:
        tokens //= 2
    time_tokens, rounds = (NUM_TOKENS, 10) if ON_GPU else (min(CPU_TIME_TOKENS, tokens), 3)
    return {"memory_tokens": tokens, "time_tokens": time_tokens, "rounds": rounds}


def measure_memory(form: str, num_tokens: int) -> dict[str, float]:
    """Peak of memory over the inputs in one pass."""
    head = Head(num_tokens)
    head.run(form, 8)  # libraries, threads and workspaces are loaded
    head.hidden.grad = head.weight.grad = None
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    before = _memory_bytes()
    head.run(form)
    return {"peak_bytes": _peak_bytes() - before}


def measure_time(num_tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of a pass of each form, the best of some rounds after one that does not count."""
    head = Head(num_tokens)
    best = dict.fromkeys(FORMS, float("inf"))
    for turn in range(rounds + 1):
        for form in FORMS:
            start = time.perf_counter()
            head.run(form)
            if turn:
                best[form] = min(best[form], time.perf_counter() - start)
    return {f"{form}_s": seconds for form, seconds in best.items()}


def _memory_bytes() -> int:
    if ON_GPU:
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    if ON_GPU:
        return torch.cuda.max_memory_allocated()
    # Not ru_maxrss, which a spawned process takes over from its parent.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise SystemExit("this system does not tell a process its peak of memory (VmHWM)")
    return int(found[1]) * 1024


def main(command: str, *arguments: str) -> None:
    """Run one command and print what it found."""
    if command == "memory":
        found = measure_memory(arguments[0], int(arguments[1]))
    elif command == "time":
        found = measure_time(*(int(argument) for argument in arguments))
    else:
        found = plan()
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
