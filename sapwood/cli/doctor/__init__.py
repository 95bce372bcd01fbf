"""`sapwood doctor`: what this machine has, what is missing for what, and the command that mends it. Changes nothing."""
