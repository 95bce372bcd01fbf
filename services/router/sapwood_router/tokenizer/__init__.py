"""The tokenizer service as the router uses it: replicas, encoding, decoding. Knows no worker and no edge."""
