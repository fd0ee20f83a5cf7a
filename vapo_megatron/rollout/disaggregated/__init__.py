"""Generation in separate processes (rollout workers), and the trainers' end of it."""
