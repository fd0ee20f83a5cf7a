"""The loop with saving and stopping, one step as the paper has it, and what a run builds."""
