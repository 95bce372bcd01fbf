"""`sapwood doctor`: the abilities of this machine, missing parts, and the commands that install them. Changes nothing."""
