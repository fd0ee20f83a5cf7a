"""Actor, critic and reference policy, advantages, and which model is on the GPU in which phase."""
