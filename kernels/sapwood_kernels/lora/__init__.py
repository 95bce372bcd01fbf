"""Products with the low-rank matrices of adapters (LoRA)."""
