"""A run as `python -m vapo_megatron.train` makes it, then the trained engine's greedy answers."""

import json
from pathlib import Path


def train_and_answer(out: str, num_configs: str, *arguments: str) -> int:
    """Write {position: (prompt, response)}, token ids, of this rank's answers to OUT.RANK.

    Args:
        out: OUT.
        num_configs: how many of the arguments are configuration files; the others are overrides.
    """
    from vapo_megatron.config import load_config
    from vapo_megatron.rollout.requests import SamplingSettings
    from vapo_megatron.trainer import VapoTrainer

    configs, overrides = arguments[: int(num_configs)], arguments[int(num_configs) :]
    with VapoTrainer(load_config(configs, overrides)) as trainer:
        trainer.fit()
        greedy = SamplingSettings(
            temperature=0, top_p=1, top_k=-1, max_response_tokens=64, seed_role="evaluation"
        )
        problems = trainer.source.held_out.problems[:16]
        rollouts = trainer.source.engine.generate(problems, 1, 0, greedy, trainer.policy_version)
        answers = {r.position: (r.prompt.token_ids, r.token_ids) for r in rollouts}
        Path(f"{out}.{trainer.groups.rank}").write_text(json.dumps(answers))
    return 0
