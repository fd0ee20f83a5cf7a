"""Turns with luck: a task on which a value model pays over the turns of an episode."""
