"""Actor, critic, reference, reward model, advantages, and which model is on the GPU when."""
