"""From logits to tokens: masks, penalties and draws, by Triton and on a CPU. Knows no request."""
