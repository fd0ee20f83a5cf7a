"""A run as `python -m vapo_megatron.train` makes it, then the trained engine's greedy answers.

With parallel.offload vLLM loses while it sleeps what it would lose on a GPU.
"""

import json
import socket
import sys
from pathlib import Path


def watch_hosts() -> list[str]:
    """Return a list that fills with the hosts that this process asks for; C++ is not seen."""
    hosts: list[str] = []

    def watch(event: str, arguments: tuple) -> None:
        if event == "socket.getaddrinfo":
            hosts.append(str(arguments[0]))
        # Connecting a datagram socket sends nothing; vLLM finds its own address so.
        sends = event == "socket.sendto" or (
            event == "socket.connect" and arguments[0].type != socket.SOCK_DGRAM
        )
        if sends and isinstance(arguments[1], tuple):
            hosts.append(str(arguments[1][0]))

    sys.addaudithook(watch)
    return hosts


def train_and_answer(out: str, num_configs: str, *arguments: str) -> int:
    """Write {position: (prompt, response)}, token ids, of this rank's answers to OUT.RANK.

    The hosts that it has asked for are written to OUT.RANK.hosts.

    Args:
        out: OUT.
        num_configs: how many of the arguments are configuration files; the others are overrides.
    """
    from tests.rollout.vllm.poisoned_sleep import poison_sleep
    from vapo_megatron.config import load_config
    from vapo_megatron.rollout.requests import SamplingSettings
    from vapo_megatron.rollout.work import generate
    from vapo_megatron.training.loop import VapoTrainer

    hosts = watch_hosts()
    poison_sleep()
    configs, overrides = arguments[: int(num_configs)], arguments[int(num_configs) :]
    with VapoTrainer(load_config(configs, overrides)) as trainer:
        trainer.fit()
        greedy = SamplingSettings(
            temperature=0, top_p=1, top_k=-1, max_response_tokens=32, seed_role="evaluation"
        )
        trainer._publish()
        problems = trainer.source._held_out.problems[:16]
        engine, version = trainer.source.engine, trainer.policy_version
        rollouts = generate(engine, problems, [1] * len(problems), 0, greedy, version)
        answers = {r.position: (r.prompt.token_ids, list(r.token_ids)) for r in rollouts}
        mine = f"{out}.{trainer.ranks.rank}"
        Path(mine).write_text(json.dumps(answers))
    sys.audit("socket.getaddrinfo", "would.be.seen")
    Path(f"{mine}.hosts").write_text(json.dumps(hosts))
    return 0
