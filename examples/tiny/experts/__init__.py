"""The tiny task with a mixture of experts, beside the dense model."""
