"""Configurations and weights as files have them: Hugging Face's and GGUF. Knows no step and no runner."""
