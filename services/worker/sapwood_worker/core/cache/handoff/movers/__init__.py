"""Ways in which pages go from one worker to another."""
