"""`vapo select`: keeps the prompts of a file that are worth training on, by sampled responses."""
