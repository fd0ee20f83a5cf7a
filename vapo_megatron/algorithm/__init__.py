"""The paper's equations: pure arithmetic on tensors."""
