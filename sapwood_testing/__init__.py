"""Fakes and stand-ins for tests and benchmarks. In no wheel: only an editable install has it."""
