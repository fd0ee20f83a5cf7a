"""From prompts to judged responses: vLLM, its processes, evaluation, replay."""
