"""vLLM in the trainer's processes; nothing else imports vllm."""
