"""SGLang's scheduler protocol over the worker's own service. Knows the front; nothing of the front knows it."""
