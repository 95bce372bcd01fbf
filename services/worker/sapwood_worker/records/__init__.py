"""Plain records that the worker's packages exchange: steps, outputs, loads, events. Imports no other package and no torch."""
