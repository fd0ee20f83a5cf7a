"""From prompts to judged responses."""
