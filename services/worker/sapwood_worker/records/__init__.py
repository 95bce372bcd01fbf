"""Plain records that the rooms hand one another: steps, outputs, loads, events. Knows no room and no torch."""
