"""Steps without the host's part: CUDA graphs of decodes and of prompts' pieces, on a CPU recordings. Knows no scheduler."""
