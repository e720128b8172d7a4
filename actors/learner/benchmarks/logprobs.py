"""Log-probabilities and entropies from hidden states: the chunked form against the plain one, memory and time.

The head of a model with 151,936 words: 4,096 tokens, forward and backward pass, gradients through log-probabilities and
entropies to hidden states and weight. On a GPU hidden states have 1,024 numbers of bfloat16, otherwise 576 of float32.
*Plain* is what one writes without care: logits, divided by the temperature in float32, log_softmax, and the entropy as
its expectation. *Chunked* is `linear_logprobs`, with its own choice of chunks.

    chunked_logprob_memory_ratio    plain peak / chunked peak: LARGER is better, 16 means that chunked takes 1/16
    chunked_logprob_time_ratio      chunked seconds / plain seconds: SMALLER is better, 1 means as fast
    plain_logprob_peak_bytes        peak of memory above the inputs; the gradients that are returned are part of it, in
    chunked_logprob_peak_bytes      both forms. A GPU's peak is that of torch's allocator, a CPU's the resident set's
    plain_logprob_s                 seconds of one pass forward and backward; the best of three rounds (ten on a GPU)
    chunked_logprob_s               in which the two take turns
    logprob_memory_tokens           tokens of the memory figures: 4,096, or fewer where the plain form has no room
    logprob_time_tokens             tokens of the time figures: 4,096 on a GPU, otherwise 1,024, which takes long enough

Each form's memory is measured in a fresh process.
"""

import subprocess
import sys

import msgspec

from headrace.engine.errors import RunError

_CHILD = "headrace.actors.learner.benchmarks.logprobs_child"
_CHILD_TIMEOUT_S = 1800.0


def figures() -> dict[str, float]:
    """Measure; blocks for some minutes on a CPU, and takes up to 16 GB where that much is free.

    Raises:
        RunError: A child process failed or took over half an hour.
    """
    plan = _child("plan")
    tokens = f"{plan['memory_tokens']:.0f}"
    plain, chunked = (_child("memory", form, tokens)["peak_bytes"] for form in ("plain", "chunked"))
    times = _child("time", f"{plan['time_tokens']:.0f}", f"{plan['rounds']:.0f}")
    return {
        "chunked_logprob_memory_ratio": plain / chunked,
        "chunked_logprob_time_ratio": times["chunked_s"] / times["plain_s"],
        "plain_logprob_peak_bytes": plain,
        "chunked_logprob_peak_bytes": chunked,
        "plain_logprob_s": times["plain_s"],
        "chunked_logprob_s": times["chunked_s"],
        "logprob_memory_tokens": plan["memory_tokens"],
        "logprob_time_tokens": plan["time_tokens"],
    }


def _child(*arguments: str) -> dict[str, float]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", _CHILD, *arguments], capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"the measurement {' '.join(arguments)} took over {_CHILD_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message; out of memory?"])[-1]
        raise RunError(f"the measurement {' '.join(arguments)} ended with code {done.returncode}: {last}")
    return msgspec.json.decode(done.stdout, type=dict[str, float])
