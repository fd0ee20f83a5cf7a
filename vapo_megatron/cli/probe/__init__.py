"""`vapo probe`: makes prompts that go on after a chain of thought with an error."""
