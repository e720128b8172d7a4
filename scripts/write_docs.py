"""Writes the pages of docs/ that are made from the sources; `--check` only says which of them are out of date."""

import sys
from pathlib import Path

from headrace.engine.config import describe_schema
from headrace.engine.config.schema import ALIASES

DOCS = Path(__file__).parents[1] / "docs"

CONFIGURATION = """\
# Configuration

<!-- Made by `make docs` from engine/config/schema.py; change the comments there. -->

A run is described by one TOML file. Every key has a default, and every key can be overridden on the command line:

```
headrace train run.toml --schedule.group_size=16 --learner.learning_rate=2e-6 --data.options.max_terms=4
headrace config show run.toml --run.steps=20   # the effective configuration, as TOML
headrace config check run.toml                 # would a run accept it?
headrace config schema > run.toml              # a file with every key to start from
```

Values on the command line are TOML; strings need no quotes. An unknown key is refused with the nearest valid name,
before anything is loaded. The effective configuration is stored in the run folder and with each checkpoint.

Other names that are understood: {aliases}.

Between settings must hold:

- `schedule.max_staleness` is at least `schedule.weight_sync_steps - 1`: samples grow that old between publishes.
- `schedule.group_size` is at least 2 for the methods that compare the samples of one prompt.
- exactly one of `reward.function` and `reward.address` is set, and `model.path` is.
- `rollout.max_tokens` is below `model.max_context_tokens`, so that a prompt fits.
- `buffer.capacity_records` holds at least one step's batch.
- evaluation (`eval.num_prompts`) with prompts from files has its own file, `eval.path`.

Of the environment, `HEADRACE_CACHE` names the folder in which converted models are kept (`~/.cache/headrace` by
default), and `HF_HUB_OFFLINE=1` forbids downloads.

## Every key

```toml
{schema}```
"""


def pages() -> dict[Path, str]:
    """The text of each page by its file."""
    aliases = ", ".join(f"`{alias}` (`{canonical.rpartition('.')[2]}`)" for alias, canonical in ALIASES.items())
    return {DOCS / "configuration.md": CONFIGURATION.format(aliases=aliases, schema=describe_schema())}


def main(argv: list[str]) -> int:
    """Write the pages that differ; with `--check` name them and return 1."""
    stale = [file for file, text in pages().items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        name = file.relative_to(DOCS.parent)
        if "--check" in argv:
            print(f"{name} is not what the sources say; run 'make docs'")
        else:
            file.write_text(pages()[file], encoding="utf-8")
            print(f"wrote {name}")
    return 1 if stale and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
