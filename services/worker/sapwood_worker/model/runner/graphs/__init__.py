"""Steps without the host's work: CUDA graphs of decodes and of prompts, and recordings on a CPU. Knows no scheduler."""
