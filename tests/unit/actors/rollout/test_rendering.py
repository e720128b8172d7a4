"""Prompts to ids: once, with one BOS, and never through text again."""

from pathlib import Path
from typing import Any

import pytest

from headrace.actors.models import load_tokenizer
from headrace.actors.rollout.rendering import TokenizerRenderer
from headrace.actors.rollout.sampling import sample_once
from headrace.engine.clock import SystemClock
from headrace.engine.testing import ScriptedInferenceBackend
from headrace.engine.types import Message, PolicyVersion, Prompt, PromptGroup, SamplingParams

BOS = 1


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tokenizer that puts BOS before text, with a template that writes BOS itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab={"<pad>": 0, "<s>": BOS, "he": 2, **letters}, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    wrap: Any = PreTrainedTokenizerFast  # untyped
    fast = wrap(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>")
    fast.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_double_bos_a_chat_prompt_and_a_plain_one_get_exactly_one(model_dir: Path) -> None:
    """K-088."""
    renderer = TokenizerRenderer(model_dir)
    chat = renderer.render(Prompt(prompt_id="p", messages=(Message(role="user", content="no"),)))
    plain = renderer.render(Prompt(prompt_id="p", text="no"))
    assert chat == plain == (BOS, ord("n"), ord("o"))
    # The mistake: rendering to text, which has the BOS, and encoding that.
    assert load_tokenizer(model_dir)("<s>no").input_ids[:2] == [BOS, BOS]
    ids = renderer.render(Prompt(prompt_id="p", token_ids=(BOS, 65)))
    assert ids == (BOS, 65)
    assert renderer.text_of(chat).replace(" ", "") == "no"


async def test_retokenise_training_sees_the_ids_that_were_sampled(model_dir: Path) -> None:
    """K-003: "h", "e" are sampled, which encoded again would be the one id 2."""
    renderer = TokenizerRenderer(model_dir)
    sampled = [ord("h"), ord("e")]
    assert load_tokenizer(model_dir)("he").input_ids == [BOS, 2]
    backend = ScriptedInferenceBackend(sampled)
    await backend.start()
    prompt = Prompt(prompt_id="p", text="no")
    group = PromptGroup(
        group_id="g",
        prompt=prompt,
        group_size=1,
        attempt=0,
        min_version=PolicyVersion(0, 0),
        sampling=SamplingParams(max_tokens=2),
    )
    ids = renderer.render(prompt)
    trajectory = await sample_once(backend, renderer, group, 0, ids, SystemClock())
    await backend.close()
    assert trajectory.response_token_ids.tolist() == sampled
    assert trajectory.prompt_token_ids.tolist() == [BOS, ord("n"), ord("o")]
    assert len(trajectory.logprobs) == len(trajectory.loss_mask) == 2
