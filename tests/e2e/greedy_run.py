"""A run as `python -m vapo_megatron.train` makes it, and then the trained engine's greedy answers.

torchrun ... tests/e2e/greedy_run.py OUT.json CONFIG [section.field=value ...]
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    from vapo_megatron.config import load_config
    from vapo_megatron.rollout.requests import SamplingSettings
    from vapo_megatron.trainer import VapoTrainer

    out, config, *overrides = sys.argv[1:]
    with VapoTrainer(load_config(config, overrides)) as trainer:
        trainer.fit()
        greedy = SamplingSettings(
            temperature=0, top_p=1, top_k=-1, max_response_tokens=64, seed_role="evaluation"
        )
        problems = trainer.source.held_out.problems[:16]
        rollouts = trainer.source.engine.generate(problems, 1, 0, greedy, trainer.policy_version)
        answers = {r.position: (r.prompt.token_ids, r.token_ids) for r in rollouts}
        Path(f"{out}.{trainer.groups.rank}").write_text(json.dumps(answers))
