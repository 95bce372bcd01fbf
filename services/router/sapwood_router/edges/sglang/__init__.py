"""SGLang's own API, as its tools call it: text generation, the model, the cache. Knows no gRPC and no worker."""
