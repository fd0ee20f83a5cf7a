"""Actor, critic and reference policy, their advantages, and who holds the GPU when."""
