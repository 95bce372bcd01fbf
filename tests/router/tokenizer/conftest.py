from sapwood_testing.vocabularies import deepseek, demo, llama3, mistral, packaged, qwen3

__all__ = ["deepseek", "demo", "llama3", "mistral", "packaged", "qwen3"]
