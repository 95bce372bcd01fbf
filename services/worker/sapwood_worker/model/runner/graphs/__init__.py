"""CUDA graphs of steps: of decodes whole, of prompts in pieces between the layers' attention. Knows no scheduler."""
